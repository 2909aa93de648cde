"""Stored pods as the ledger counts them, with the allocation that schedulers and device plugins wrote on them."""

import functools
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from vcuda.allocations.cards import PodCards, read_pod_cards
from vcuda.k8s_types import DEFAULT_GRACE_SECONDS, MIRROR_ANNOTATION, Pod
from vcuda.placement import affinity, placement
from vcuda.quota.model import Charge
from vcuda.requests.pod_request import NO_MODELS, PodRequest, asks_for_vcuda, read_request
from vcuda.requests.resources import BUILT_IN, MAX_PRODUCT, GpuResources
from vcuda.requests.schemes import ALLOCATION_ANNOTATIONS, ALLOCATION_LABELS, SCHEMES, Scheme, is_named

MOST_REQUESTS_REMEMBERED, LONGEST_REMEMBERED = 512, 4096
"""Specs of containers whose charge is remembered, and the bytes that the longest of them has."""

_ENCODER = msgspec.json.Encoder()

MOST_KEYS_REMEMBERED = 16
"""Allocation annotations and labels on a pod whose schemes are worked out once for all that are like it."""

LONGEST_LIST = 16_384
"""Bytes that are kept of a list of cards.

A vendor writes at most 80 bytes for each card of each container: that is 16 cards for 12 containers.
"""

LONGEST_TEXT = 254
"""Bytes that are kept of any other text. A node's name has at most 253, so a name that was cut is none."""

_ANNOTATIONS = tuple(name for scheme in SCHEMES for name in scheme.allocation_annotations)
_LABELS = tuple(name for scheme in SCHEMES for name in scheme.allocation_labels)
_TEXTS = frozenset(
    key
    for scheme in SCHEMES
    for key in (scheme.predicate_node, *scheme.predicate_times, scheme.phase.key if scheme.phase else None)
)
_LISTS = frozenset(scheme.allocated for scheme in SCHEMES)


class Keys(msgspec.Struct, frozen=True, gc=False):
    """The annotations and labels of one scheme's allocation."""

    annotations: tuple[str, ...]
    labels: tuple[str, ...]


class Allocation(msgspec.Struct, frozen=True, gc=False):
    """The allocation annotations and labels on a pod, of every scheme, and whose they are.

    Tenants can write them where no quota is enforced, so what is kept of one pod is bounded: each name of the schemes'
    tables once, and at most `LONGEST_LIST` or `LONGEST_TEXT` bytes of those values that something is judged by.

    ``schemes``: those that the pod asks by come first. Two vendors share names (``nvidia.com/predicate-node``): a key
    belongs to the first of the schemes that has it. ``is_cut``: a value that something is judged by was longer.
    """

    annotations: Mapping[str, str]
    labels: Mapping[str, str]
    schemes: tuple[Scheme, ...]
    is_cut: bool = False

    def get(self, key: str | None) -> str | None:
        """Return the value of an annotation or label; None where it is absent or empty."""
        if key is None:
            return None
        return self.annotations.get(key) or self.labels.get(key) or None

    def keys_of(self, scheme: Scheme) -> Keys:
        """Return the keys that belong to a scheme; none if it is none of ``schemes``.

        The caller must have read the allocation with ``whole_keys`` if the keys are to be found on the pod.
        """
        return dict(_claims(self.annotations, self.labels, self.schemes)).get(scheme.name, Keys((), ()))


def read_allocation(pod: Pod, asked: tuple[Scheme, ...], *, whole_keys: bool = False) -> Allocation | None:
    """Return the allocation on a pod that asks by these schemes; None where there is none.

    ``whole_keys``: a key that begins with a scheme's name is kept as it is. Otherwise all such keys are kept as one,
    under the scheme's name: a pod can have thousands.
    """
    found = [(kept, key, value) for key, value in pod.annotations.items() if (kept := _annotation_kept(key))]
    labels = {kept: value for key, value in pod.labels.items() if (kept := _label_kept(key))}
    if not found and not labels:
        return None
    annotations = {key if whole_keys else kept: _kept_of(kept, value) for kept, key, value in found}
    is_cut = any(len(value) > _most_of(kept) for kept, _, value in found if kept in _TEXTS or kept in _LISTS)
    # Pods are alike in this by the thousand. Names that a pod's owner makes up are bounded, and those of one pod too.
    choose = _schemes_of if len(annotations) + len(labels) <= MOST_KEYS_REMEMBERED else _schemes_of.__wrapped__
    schemes = choose((*annotations,), (*labels,), tuple(each.name for each in asked))
    return Allocation(annotations, labels, schemes, is_cut)


def _most_of(name: str) -> int:
    return LONGEST_LIST if name in _LISTS else LONGEST_TEXT


def _kept_of(name: str, value: str) -> str:
    if name not in _TEXTS and name not in _LISTS:
        return ""
    kept = value[: _most_of(name)]
    # All that vendors write is ASCII. One other character makes Python keep up to four bytes for each.
    return kept if kept.isascii() else kept.encode("ascii", "replace").decode()


# Remembered, as the names of all schemes are many and those on pods few. The API server bounds a key's length, so that
# those which somebody makes up cost no more than others.
@functools.lru_cache(maxsize=4096)
def _annotation_kept(key: str) -> str:
    return _name_of(key, _ANNOTATIONS) if ALLOCATION_ANNOTATIONS.fullmatch(key) else ""


@functools.lru_cache(maxsize=4096)
def _label_kept(key: str) -> str:
    return _name_of(key, _LABELS) if ALLOCATION_LABELS.fullmatch(key) else ""


def _name_of(key: str, names: tuple[str, ...]) -> str:
    return next(name for name in names if is_named(key, (name,)))


@functools.lru_cache(maxsize=1024)
def _schemes_of(annotations: tuple[str, ...], labels: tuple[str, ...], asked: tuple[str, ...]) -> tuple[Scheme, ...]:
    # A pod may carry what no scheme that it asks by has written: its manifest was copied from another.
    by_name = {scheme.name: scheme for scheme in SCHEMES}
    order = {name: by_name[name] for name in (*asked, *by_name)}.values()
    found = {name for name, _ in _claims(annotations, labels, order)}
    return tuple(scheme for scheme in order if scheme.name in found)


def _claims(annotations: Iterable[str], labels: Iterable[str], schemes: Iterable[Scheme]) -> Iterator[tuple[str, Keys]]:
    left, left_labels = tuple(annotations), tuple(labels)
    for scheme in schemes:
        keys = Keys(
            tuple(key for key in left if is_named(key, scheme.allocation_annotations)),
            tuple(key for key in left_labels if is_named(key, scheme.allocation_labels)),
        )
        if keys.annotations or keys.labels:
            yield scheme.name, keys
        left = tuple(key for key in left if key not in keys.annotations)
        left_labels = tuple(key for key in left_labels if key not in keys.labels)


class StoredPod(msgspec.Struct, frozen=True):
    """What is kept of a vcuda pod that is stored.

    ``model`` is what its spec holds it to, or None: then ``on_models`` is what it takes of those where that is less
    than its ``charge``. ``node`` is the node it is bound to, or empty. ``live``: it holds, or will hold, its cards; a
    terminating pod does too, until its containers have ended. ``allocation`` is what its
    scheduler and device plugin have written on it; None where that is nothing. ``cards`` are those that this
    gives it by number. ``version`` is its resourceVersion. ``terminating``: its deletion has been accepted. ``mirror``:
    it shows a static pod, which runs whatever becomes of it here. ``grace_seconds``: for so long its containers may run
    after it was deleted. ``extended_claim`` is the name of the ResourceClaim that the scheduler has made for what the
    pod itself asks for, and is charged for. ``uses_claims``: it names ResourceClaims, which are charged by themselves.
    """

    uid: str
    namespace: str
    name: str
    model: str | None
    node: str
    live: bool
    charge: Charge
    created: str
    allocation: Allocation | None = None
    cards: PodCards | None = None
    version: str = ""
    terminating: bool = False
    mirror: bool = False
    grace_seconds: int = DEFAULT_GRACE_SECONDS
    extended_claim: str = ""
    on_models: Mapping[str, Charge] = NO_MODELS
    uses_claims: bool = False

    @property
    def is_cut(self) -> bool:
        """Whether its annotations hold more than is kept of them; its charge does not depend on them."""
        return bool((self.allocation and self.allocation.is_cut) or (self.cards and self.cards.is_cut))

    def charge_on(self, nodes: placement.Nodes) -> Charge:
        """Return what it takes of the model that it is charged to."""
        return self.on_models.get(self.model_on(nodes) or "", self.charge) if self.on_models else self.charge

    def model_on(self, nodes: placement.Nodes) -> str | None:
        """Return the model it is charged to: the one it is held to, else its node's; None where neither is known."""
        return self.model or (nodes.model_of(self.node) if self.node else None)


class ClaimUser(msgspec.Struct, frozen=True, gc=False):
    """What is kept of a stored pod that uses ResourceClaims and asks for no GPU itself. It is charged nothing.

    The fields are as in `StoredPod`.
    """

    uid: str
    namespace: str
    name: str
    node: str
    live: bool
    terminating: bool
    grace_seconds: int


def read_claim_user(pod: Pod) -> ClaimUser | None:
    """Return what is kept of a pod that uses ResourceClaims, or None if it uses none."""
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
    """What pods ask for, and the model that holds each, remembered by that part of their specs.

    The pods of one workload are alike in it, and change no more. It is for one thread, and for one ``known`` and
    ``labels``. Of large ones nothing is kept, and of all at most so many.
    """

    def __init__(self, known: GpuResources, labels: affinity.NodeLabels) -> None:
        self.known = known
        self.labels = labels
        self._asked: dict[bytes, tuple[PodRequest, str | None]] = {}

    def read(self, pod: Pod) -> tuple[PodRequest, str | None]:
        """Return what `read_request` does of it, but for its faults: a stored pod is charged all the same."""
        spec = pod.spec
        text = _ENCODER.encode((spec.containers, spec.init_containers, spec.affinity, spec.node_selector))
        found = self._asked.get(text)
        if found is None:
            # Faults tell of annotations too, and name fields.
            request = msgspec.structs.replace(read_request(pod, self.known), faults=())
            found = request, placement.read_pin(pod, self.labels, self.known.models).model
            if len(self._asked) >= MOST_REQUESTS_REMEMBERED:
                self._asked.clear()
            if len(text) <= LONGEST_REMEMBERED:
                self._asked[text] = found
        return found


def read_stored(
    pod: Pod,
    labels: affinity.NodeLabels,
    known: GpuResources = BUILT_IN,
    cache: RequestCache | None = None,
    *,
    whole_keys: bool = False,
) -> StoredPod | None:
    """Return what is kept of a pod, or None where it asks for nothing that is charged.

    ``cache`` is for ``known`` and ``labels``. ``whole_keys``: see `read_allocation`.
    """
    if not asks_for_vcuda(pod, known):
        return None
    # What is charged and where it is pinned are read from the spec alone, which its owner cannot change any more. Up to
    # Kubernetes 1.30 a required affinity may have any text as a value. A longer one can be no label of a node.
    metadata, extended = pod.metadata, _extended_claim_of(pod)
    request, model = (cache or RequestCache(known, labels)).read(pod)
    model = model if model and (len(model) <= MAX_PRODUCT or model in known.models.rows) else None
    allocation = read_allocation(pod, request.schemes, whole_keys=whole_keys)
    # Where the scheduler has claimed devices for it, these are the pod's, and whole: not what a device plugin offers.
    on_models = NO_MODELS if extended else request.on_models
    return StoredPod(
        uid=metadata.uid,
        namespace=metadata.namespace,
        name=metadata.name,
        model=model,
        node=pod.spec.node_name,
        live=not pod.has_ended,
        charge=on_models.get(model or "", request.charge),
        created=metadata.creation_timestamp or "",
        allocation=allocation,
        cards=read_pod_cards(pod) if allocation else None,
        version=metadata.resource_version,
        terminating=metadata.deletion_timestamp is not None,
        mirror=MIRROR_ANNOTATION in pod.annotations,
        grace_seconds=_longest_grace(pod),
        extended_claim=extended,
        on_models=NO_MODELS if model else on_models,
        uses_claims=bool(pod.spec.resource_claims),
    )


def _longest_grace(pod: Pod) -> int:
    # A deletion may give more time than the spec, and kubelet goes by it; one that gives less it may not have seen.
    return max(pod.spec.grace_seconds, pod.metadata.deletion_grace_period_seconds or 0)


def _extended_claim_of(pod: Pod) -> str:
    # From the status, which tenants cannot write: annotations and owners of a claim they can.
    made = pod.status.extended_resource_claim_status if pod.status else None
    return made.resource_claim_name if made else ""


def charges_of(pods: Iterable[StoredPod], nodes: placement.Nodes) -> Iterator[tuple[str, Charge]]:
    """Yield (model, charge) of every pod that holds cards of a known model."""
    for pod in pods:
        model = pod.model_on(nodes) if pod.live else None
        if model:
            yield model, pod.charge_on(nodes)
