"""The GPU models that an object (a pod or ResourceClaim) may use, in the order in which they are tried.

The order comes from the first of these sources that exists:

1. The annotation `MODELS_ANNOTATION` of a pod or ResourceClaim. ``H100, A100`` means these two models and no others.
   A final ``*`` stands for the other models of the quota entry.
2. ``order`` in the quota entry. The other models of the entry follow.
3. The order of the models in the quota entry.
"""

import enum
from collections.abc import Mapping, Set

import msgspec

from vcuda.quota.model import NamespaceQuota
from vcuda.quota.terms import MODELS_ANNOTATION
from vcuda.quota.values import listed, printable, suggestion

OTHERS = "*"
"""The item at the end of the models annotation that stands for all other models of the quota entry."""

MAX_CHARACTERS = 2048
"""The maximum length of the models annotation. It is enough for 32 names of 63 characters, the longest allowed name."""

MAX_NAMED = 10
"""The maximum number of GPU models that an error message lists."""


class Rule(enum.StrEnum):
    """The rule for the order in which the GPU models that an object may use are tried."""

    ANNOTATION = "annotation"
    ORDER = "order"
    DOCUMENT = "document"


PLACES = {
    Rule.ANNOTATION: f"annotation {MODELS_ANNOTATION}",
    Rule.ORDER: "`order` of the namespace's quota",
    Rule.DOCUMENT: "the namespace's quota",
}
"""The names, used in messages, of the places where people set the order in which models are tried."""


class Wish(msgspec.Struct, frozen=True, gc=False):
    """The GPU models that the models annotation of an object names, in the annotation's order."""

    models: tuple[str, ...]
    others: bool = False
    """True if the annotation ends with ``*``, so that the other models of the quota entry follow."""

    def unknown(self, known: Set[str]) -> str | None:
        """Return a message about the first named model that is not in ``known``; None if ``known`` has all of them."""
        for model in self.models:
            if model not in known:
                hint = suggestion(model, known) or f"supported models: {listed(sorted(known), MAX_NAMED)}"
                return f'unknown GPU model "{printable(model)}"; {hint}'
        return None

    def unlisted(self, namespace: str, quota: NamespaceQuota) -> str | None:
        """Return a message about the first named model that the quota does not list; None if it lists all of them."""
        for model in self.models:
            if model not in quota.limits:
                return (
                    f"annotation {MODELS_ANNOTATION} names {printable(model)}, but the quota of namespace {namespace} "
                    f"lists only {listed(quota.limits, MAX_NAMED)}"
                )
        return None


def read_wish(annotations: Mapping[str, str]) -> Wish | None:
    """Parse the models annotation. Return None if it is missing. Raises ValueError if it is malformed."""
    text = annotations.get(MODELS_ANNOTATION)
    if text is None:
        return None
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"must not be longer than {MAX_CHARACTERS} characters")
    *named, last = (part.strip() for part in text.split(","))
    others = last == OTHERS
    if not others:
        named.append(last)
    if not all(named) or OTHERS in named:
        raise ValueError(
            "must be GPU models separated by commas, the best first, for example `H100, A100`. A `*` must be last"
        )
    return Wish(tuple(dict.fromkeys(named)), others)


def ordered_models(annotations: Mapping[str, str], quota: NamespaceQuota) -> tuple[tuple[str, ...], Rule]:
    """Return the models that an object with these annotations may use, in the order in which they are tried, and the
    rule for that order. A malformed annotation is ignored."""
    try:
        wish = read_wish(annotations) or Wish(())
    except ValueError:
        wish = Wish(())
    named = dict.fromkeys((*wish.models, *(quota.limits if wish.others else ())))
    if models := tuple(model for model in named if model in quota.limits):
        return models, Rule.ANNOTATION
    if quota.order:
        return tuple(dict.fromkeys((*quota.order, *quota.limits))), Rule.ORDER
    return tuple(quota.limits), Rule.DOCUMENT
