"""Reads stored pods: their charges, and the annotations in which schedulers and device plugins record their cards."""

import functools
import re
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from vcuda.allocations.cards import PodCards, read_pod_cards
from vcuda.k8s_types import DEFAULT_GRACE_SECONDS, MIRROR_ANNOTATION, Pod
from vcuda.placement import affinity, placement
from vcuda.placement.nodes import Nodes
from vcuda.quota.model import Charge
from vcuda.requests.pod_request import ModelCharges, PodRequest, read_request, requests_gpus
from vcuda.requests.resources import BUILT_IN, MAX_PRODUCT, GpuResources
from vcuda.requests.schemes import ALLOCATION_ANNOTATIONS, ALLOCATION_LABELS, SCHEMES, Scheme, is_listed_key

MAX_REQUESTS_REMEMBERED, MAX_REMEMBERED_LENGTH = 512, 4096
"""The most pod specs in a `RequestCache`, and the most bytes of a spec that is cached."""

_ENCODER = msgspec.json.Encoder()

MAX_KEYS_REMEMBERED = 16
"""The vendors of an allocation are cached only if the allocation has at most this many annotations and labels."""

MAX_LIST_LENGTH = 16_384
"""The most characters that are read of an annotation that lists cards. A vendor writes at most 80 characters for each
card of each container, so 16 cards in 12 containers fit."""

MAX_WORDS_LENGTH = 2048
"""The most characters that are kept of such a list: its different words, without numbers."""

MAX_NODE_LENGTH, MAX_SHORT_TEXT_LENGTH = 254, 32
"""The most characters kept of an annotation that names a node, and of others that a rule needs, such as times. Node
names have at most 253 characters, so a cut value names no node."""

_ANNOTATIONS = tuple(name for scheme in SCHEMES for name in scheme.allocation_annotations)
_LABELS = tuple(name for scheme in SCHEMES for name in scheme.allocation_labels)
_MAX_LENGTHS: Mapping[str | None, int] = {
    **dict.fromkeys((key for each in SCHEMES for key in each.predicate_times), MAX_SHORT_TEXT_LENGTH),
    **{scheme.phase.key: MAX_SHORT_TEXT_LENGTH for scheme in SCHEMES if scheme.phase},
    **{scheme.predicate_node: MAX_NODE_LENGTH for scheme in SCHEMES},
    **{scheme.allocated: MAX_LIST_LENGTH for scheme in SCHEMES},
}
"""The most characters that are read of each annotation that a rule needs."""

_LISTS = frozenset(scheme.allocated for scheme in SCHEMES if scheme.allocated)

# `_SEPARATORS` splits an annotation that lists the pod's cards. HAMi writes "uuid,vendor,memory,cores:" for each card.
# If the card is in MIG mode, "[slice]" follows the uuid. After each container HAMi writes ";". vgpu-manager writes
# "container[index_uuid_cores_memory]".
_SEPARATORS = re.compile(r"[][,:;_\s]+")


class Allocation(msgspec.Struct, frozen=True, gc=False):
    """The annotations and labels in which the components of all vendors record the cards of a pod.

    Tenants can write these keys, so their memory is bounded. Keys that differ only after a vendor's prefix, for example
    by container, are kept as one key. Long values are cut. Values that no rule needs are kept as empty texts. A list of
    cards is only needed while the pod is bound and has not ended. Its different words are kept, separated by commas.
    """

    annotations: Mapping[str, str]
    labels: Mapping[str, str]
    schemes: tuple[Scheme, ...]
    """The schemes (vendors' sets of names) that use these keys. Schemes by which the pod requests GPUs come first. A
    key that several schemes use counts for the first of them."""
    is_cut: bool = False
    """True if at least one value that a rule needs was too long, so that only its beginning is kept."""

    def get(self, key: str | None) -> str | None:
        """Return the value of an annotation or label; None if it is missing or empty."""
        if key is None:
            return None
        return self.annotations.get(key) or self.labels.get(key) or None

    def keys_of(self, scheme: Scheme) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the keys of one vendor's annotations, and of its labels.

        If ``whole_keys`` was not set, some keys are only prefixes.
        """
        annotations = (key for key in self.annotations if _owner(key, self.schemes) == scheme.name)
        labels = (key for key in self.labels if _owner(key, self.schemes, label=True) == scheme.name)
        return tuple(annotations), tuple(labels)


def read_allocation(pod: Pod, vendors: tuple[Scheme, ...], *, whole_keys: bool = False) -> Allocation | None:
    """Return the annotations and labels that record a pod's cards; None if the pod has none.

    ``vendors``: the vendors' schemes by which the pod requests GPUs. ``whole_keys``: True to keep every key, so that a
    patch can remove it; False to keep one key for each prefix of a scheme.
    """
    found = [(kept, key, value) for key, value in pod.annotations.items() if (kept := _name_of(key))]
    labels = {kept: value for key, value in pod.labels.items() if (kept := _name_of(key, label=True))}
    if not found and not labels:
        return None
    runs = bool(pod.spec.node_name) and not pod.has_ended
    texts = {key if whole_keys else kept: _kept_of(kept, value, runs=runs) for kept, key, value in found}
    annotations, is_cut = {key: text for key, (text, _) in texts.items()}, any(cut for _, cut in texts.values())
    # Cache the result only for short lists of keys. Thousands of pods have equal lists, but users can invent long
    # lists.
    choose = _schemes_of if len(annotations) + len(labels) <= MAX_KEYS_REMEMBERED else _schemes_of.__wrapped__
    schemes = choose((*annotations,), (*labels,), tuple(each.name for each in vendors))
    return Allocation(annotations, labels, schemes, is_cut)


def _kept_of(name: str, value: str, *, runs: bool) -> tuple[str, bool]:
    """Return the part of an annotation's text that is kept, and True if a rule needs more than this part."""
    most = _MAX_LENGTHS.get(name, 0)
    kept, is_cut = value[:most], 0 < most < len(value)
    if name in _LISTS:
        words = dict.fromkeys(_SEPARATORS.split(kept)) if runs else ()
        kept = ",".join(word for word in words if not word.isdecimal())
        kept, is_cut = kept[:MAX_WORDS_LENGTH], is_cut or len(kept) > MAX_WORDS_LENGTH
    # Annotations of vendors are ASCII. A single other character makes Python store up to four bytes for every
    # character. So other characters are replaced.
    return kept if kept.isascii() else kept.encode("ascii", "replace").decode(), is_cut


# The result is cached, because each key is compared with many names, and most pods have the same few keys. The API
# server limits the length of a key, so a user cannot fill the memory with invented keys.
@functools.lru_cache(maxsize=8192)
def _name_of(key: str, *, label: bool = False) -> str:
    """Return the name or prefix in `SCHEMES` that matches the key of an annotation or label; empty if none matches."""
    names, pattern = (_LABELS, ALLOCATION_LABELS) if label else (_ANNOTATIONS, ALLOCATION_ANNOTATIONS)
    return next(name for name in names if is_listed_key(key, (name,))) if pattern.fullmatch(key) else ""


@functools.lru_cache(maxsize=1024)
def _schemes_of(annotations: tuple[str, ...], labels: tuple[str, ...], vendors: tuple[str, ...]) -> tuple[Scheme, ...]:
    # Check every vendor, because a user may have copied annotations from a pod of another vendor.
    by_name = {scheme.name: scheme for scheme in SCHEMES}
    order = tuple({name: by_name[name] for name in (*vendors, *by_name)}.values())
    owners = {_owner(key, order) for key in annotations} | {_owner(key, order, label=True) for key in labels}
    return tuple(scheme for scheme in order if scheme.name in owners)


def _owner(key: str, schemes: tuple[Scheme, ...], *, label: bool = False) -> str | None:
    """Return the name of the first vendor's scheme that uses this annotation or label; None if no scheme uses it."""
    names = ((each.name, each.allocation_labels if label else each.allocation_annotations) for each in schemes)
    return next((scheme for scheme, own in names if is_listed_key(key, own)), None)


class StoredPod(msgspec.Struct, frozen=True):
    """A stored pod that requests a GPU."""

    uid: str
    namespace: str
    name: str
    model: str | None
    """The GPU model to which the pod's spec limits the pod; None if the spec does not limit it to one model."""
    node: str
    """The node to which the pod is bound; empty if it is not bound."""
    live: bool
    """True until the pod has ended. A terminating pod keeps its cards until its containers have ended."""
    charge: Charge
    created: str
    allocation: Allocation | None = None
    cards: PodCards | None = None
    """The parts of cards that a bound pod uses; None if its annotations list no cards by number."""
    version: str = ""
    """The resourceVersion of the pod."""
    terminating: bool = False
    """True if the pod has a deletionTimestamp."""
    mirror: bool = False
    """True if this is the mirror pod of a static pod. Deleting a mirror pod does not stop the static pod."""
    grace_seconds: int = DEFAULT_GRACE_SECONDS
    """The seconds for which the containers may run after the pod is deleted."""
    extended_claim: str = ""
    """The ResourceClaim that the scheduler created for the pod's extended resources. Only the pod is charged."""
    on_models: ModelCharges | None = None
    """The charges by GPU model of the pod's node, if ``model`` is None and they may differ from ``charge``."""
    uses_claims: bool = False
    """True if the pod names ResourceClaims, which are charged separately."""

    @property
    def is_cut(self) -> bool:
        """True if the pod's annotations were too long to be kept completely. The charge does not depend on them."""
        return bool((self.allocation and self.allocation.is_cut) or (self.cards and self.cards.is_cut))

    def charge_on(self, nodes: Nodes) -> Charge:
        model = self.model_on(nodes) if self.on_models else None
        return self.on_models.on(model) if self.on_models and model else self.charge

    def model_on(self, nodes: Nodes) -> str | None:
        """Return the GPU model to which its spec limits the pod, otherwise its node's model; None if unknown."""
        if self.model and nodes.knows(self.model):
            return self.model
        return nodes.model_of(self.node) if self.node else None


class ClaimUser(msgspec.Struct, frozen=True, gc=False):
    """A stored pod that uses ResourceClaims. `StoredPod` describes the fields."""

    uid: str
    namespace: str
    name: str
    node: str
    live: bool
    terminating: bool
    grace_seconds: int


def read_claim_user(pod: Pod) -> ClaimUser | None:
    if not pod.spec.resource_claims:
        return None
    metadata = pod.metadata
    return ClaimUser(
        uid=metadata.uid,
        namespace=metadata.namespace,
        name=metadata.name,
        node=pod.spec.node_name,
        live=not pod.has_ended,
        terminating=metadata.deletion_timestamp is not None,
        grace_seconds=_longest_grace(pod),
    )


class RequestCache:
    """Caches the requests and models of pods by the fields of the spec that are equal in all pods of a workload.

    The class is not thread-safe.
    """

    def __init__(self, known: GpuResources, labels: affinity.NodeLabels) -> None:
        self.known = known
        self.labels = labels
        self._requests: dict[bytes, tuple[PodRequest, str | None]] = {}

    def read(self, pod: Pod) -> tuple[PodRequest, str | None]:
        """Return a pod's GPU request, without faults, and its GPU model. Despite faults, a stored pod is charged."""
        spec = pod.spec
        text = _ENCODER.encode((spec.containers, spec.init_containers, spec.affinity, spec.node_selector))
        found = self._requests.get(text)
        if found is None:
            # Faults are not cached, because they also depend on annotations, which the cache key does not contain.
            request = msgspec.structs.replace(read_request(pod, self.known), faults=())
            found = request, placement.read_pod_pin(pod, self.labels, self.known.models).model
            if len(self._requests) >= MAX_REQUESTS_REMEMBERED:
                self._requests.clear()
            if len(text) <= MAX_REMEMBERED_LENGTH:
                self._requests[text] = found
        return found


def read_stored(
    pod: Pod,
    labels: affinity.NodeLabels,
    known: GpuResources = BUILT_IN,
    cache: RequestCache | None = None,
    *,
    whole_keys: bool = False,
) -> StoredPod | None:
    """Return a stored pod; None if it requests no GPU. ``known`` and ``labels`` must equal those of ``cache``."""
    if not requests_gpus(pod, known):
        return None
    # The charge and the GPU model come only from the pod's spec, which users cannot change. Up to Kubernetes 1.30, the
    # required node affinity may have a value that is too long for a label. It matches no node, so it is not used.
    metadata = pod.metadata
    # The pod's status names the claim that the scheduler created for the pod. Tenants cannot write the status.
    made = pod.status.extended_resource_claim_status if pod.status else None
    extended = made.resource_claim_name if made else ""
    request, model = (cache or RequestCache(known, labels)).read(pod)
    model = model if model and (len(model) <= MAX_PRODUCT or model in known.models.rows) else None
    allocation = read_allocation(pod, request.schemes, whole_keys=whole_keys)
    # If the scheduler created a claim for the pod, the pod gets whole cards, and no shares from a device plugin.
    on_models = None if extended else request.on_models
    return StoredPod(
        uid=metadata.uid,
        namespace=metadata.namespace,
        name=metadata.name,
        model=model,
        node=pod.spec.node_name,
        live=not pod.has_ended,
        charge=on_models.on(model) if on_models and model else request.charge,
        created=metadata.creation_timestamp or "",
        allocation=allocation,
        cards=read_pod_cards(pod) if allocation and pod.spec.node_name else None,
        version=metadata.resource_version,
        terminating=metadata.deletion_timestamp is not None,
        mirror=MIRROR_ANNOTATION in pod.annotations,
        grace_seconds=_longest_grace(pod),
        extended_claim=extended,
        on_models=None if model else on_models,
        uses_claims=bool(pod.spec.resource_claims),
    )


def _longest_grace(pod: Pod) -> int:
    # kubelet uses the spec's grace period until it observes a deletion with another period. So take the longer one.
    return max(pod.spec.grace_seconds, pod.metadata.deletion_grace_period_seconds or 0)


def charges_of(pods: Iterable[StoredPod], nodes: Nodes) -> Iterator[tuple[str, Charge]]:
    """Yield the GPU model and the charge of each pod that has not ended and whose GPU model is known."""
    for pod in pods:
        model = pod.model_on(nodes) if pod.live else None
        if model:
            yield model, pod.charge_on(nodes)
