"""The annotations of pods that manifests/base/policies.yaml must guard, computed from the vendors' schemes."""

from vcuda.requests.schemes import SCHEMES

MODEL_CHOICES = frozenset(
    name
    for scheme in SCHEMES
    for name in (scheme.wanted_models, scheme.unwanted_models, scheme.card_mode)
    if name is not None
)
"""The annotations by which a pod chooses types of card, or how a card is shared."""

GUARDED_ANNOTATIONS = MODEL_CHOICES.union(
    *((*scheme.allocation_annotations, *scheme.creation_annotations) for scheme in SCHEMES),
    (scheme.core_limit for scheme in SCHEMES if scheme.core_limit),
)
"""The annotations of a stored pod that only schedulers and device plugins may change. A name that ends in ``-`` stands
for every key that begins with this name."""
