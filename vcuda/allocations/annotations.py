"""The allocation that schedulers and device plugins have written on a pod."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from vcuda.allocations.cards import INDEXED, MOST_CARDS, Share, amount_of
from vcuda.k8s_types import Pod
from vcuda.quota.charge import CORES_PER_CARD
from vcuda.requests.schemes import SCHEMES, Scheme, is_named


def _split(names: Iterable[str]) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return the names that are whole keys, and those that are the beginning of keys."""
    every = frozenset(names)
    prefixes = tuple(name for name in every if name.endswith("-"))
    return every.difference(prefixes), prefixes


_ANNOTATIONS, _PREFIXES = _split(name for scheme in SCHEMES for name in scheme.allocation_annotations)
_LABELS, _ = _split(name for scheme in SCHEMES for name in scheme.allocation_labels)


class Keys(msgspec.Struct, frozen=True, gc=False):
    """The annotations and labels of one scheme's allocation."""

    annotations: tuple[str, ...]
    labels: tuple[str, ...]


class Allocation(msgspec.Struct, frozen=True, gc=False):
    """The allocation annotations and labels on a pod, of every scheme, and whose they are.

    ``schemes``: those that the pod asks by come first. Two vendors share names (``nvidia.com/predicate-node``): a key
    belongs to the first of the schemes that has it.
    """

    annotations: Mapping[str, str]
    labels: Mapping[str, str]
    schemes: tuple[Scheme, ...]

    def get(self, key: str | None) -> str | None:
        """Return the value of an annotation or label; None where it is absent or empty."""
        if key is None:
            return None
        return self.annotations.get(key) or self.labels.get(key) or None

    def keys_of(self, scheme: Scheme) -> Keys:
        """Return what belongs to a scheme; nothing where it is none of ``schemes``."""
        return dict(_claims(self.annotations, self.labels, self.schemes)).get(scheme.name, Keys((), ()))


def read_allocation(pod: Pod, asked: tuple[Scheme, ...]) -> Allocation | None:
    """Return the allocation on a pod that asks by these schemes; None where there is none.

    A pod may carry what no scheme that it asks by has written: its manifest was copied from another.
    """
    annotations = {sys.intern(key): value for key, value in pod.annotations.items() if _is_allocation(key)}
    labels = {sys.intern(key): value for key, value in pod.labels.items() if key in _LABELS}
    if not annotations and not labels:
        return None
    order = dict.fromkeys((*asked, *SCHEMES))
    found = {name for name, _ in _claims(annotations, labels, order)}
    return Allocation(annotations, labels, tuple(scheme for scheme in order if scheme.name in found))


def _is_allocation(key: str) -> bool:
    return key in _ANNOTATIONS or key.startswith(_PREFIXES)


def _claims(annotations: Iterable[str], labels: Iterable[str], schemes: Iterable[Scheme]) -> Iterator[tuple[str, Keys]]:
    """Give each key to the first scheme that has it; yield the name of each that got some, with what it got."""
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


class PodCards(msgspec.Struct, frozen=True):
    """The shares that a stored pod has, or is to have, of the cards of ``node``."""

    node: str
    shares: tuple[Share, ...]


class Record(msgspec.Struct, frozen=True):
    """The names of the annotations, under the scheme's own domain."""

    time: str
    node: str
    index: str
    assigned: str

    @classmethod
    def of(cls, scheme: Scheme) -> Record:
        """Return the names; ``index`` is what the number of a container is appended to."""
        domain = scheme.cores.partition("/")[0]
        names = ("predicate-time", "predicate-node", "predicate-gpu-idx-", "gpu-assigned")
        return cls(*(f"{domain}/{name}" for name in names))


RECORDS = {scheme.name: Record.of(scheme) for scheme in INDEXED}
"""The annotations of each scheme by its name."""
_NUMBER = re.compile("[0-9]{1,6}", re.ASCII)
_RECORD_PREFIXES = tuple(
    name for record in RECORDS.values() for name in (record.time, record.node, record.index, record.assigned)
)


def read_holding(pod: Pod) -> PodCards | None:
    """Return the cards that the pod's annotations give it; None where they give it none, or it has ended.

    A bound pod has them on its node; one that is not bound on the node that was chosen for it.
    """
    if pod.status is not None and pod.status.phase in ("Succeeded", "Failed"):
        return None
    annotations = pod.annotations
    for scheme in INDEXED if annotations else ():
        record = RECORDS[scheme.name]
        node = pod.spec.node_name or annotations.get(record.node, "")
        shares = tuple(_shares(pod, scheme, record, annotations)) if node else ()
        if shares:
            return PodCards(node, shares)
    return None


def annotations_for(scheme: Scheme, node: str, shares: Mapping[int, tuple[Share, ...]], time: int) -> dict[str, str]:
    """Return what is written on a pod that gets these shares, by container, of a node; ``time`` is Unix nanoseconds.

    gpu-manager serves the pods of its node in the order of their times.
    """
    record = RECORDS[scheme.name]
    indexes = {f"{record.index}{number}": ",".join(str(share.card) for share in got) for number, got in shares.items()}
    return {record.time: str(time), record.node: node, record.assigned: "false", **indexes}


def patch_of(written: Mapping[str, str], present: Iterable[str], uid: str, version: str) -> bytes:
    """Return the JSON merge patch that writes the annotations, and takes away what an earlier placement left.

    ``present`` are the annotations there are. The API server answers 409 where the pod is no longer the one of
    ``uid``, or no longer the one of resourceVersion ``version``.
    """
    old = {key: None for key in present if key.startswith(_RECORD_PREFIXES)}
    metadata = {"uid": uid, "resourceVersion": version, "annotations": {**old, **written}}
    return msgspec.json.encode({"metadata": metadata})


def _shares(pod: Pod, scheme: Scheme, record: Record, annotations: Mapping[str, str]) -> Iterator[Share]:
    """Yield the shares; no more cards a container than it asks for, as the owner of a pod can write what he likes."""
    for number, container in enumerate(pod.spec.containers or ()):
        text = annotations.get(f"{record.index}{number}")
        cores = amount_of(container, scheme.cores)
        if not text or not cores:
            continue
        memory = amount_of(container, scheme.memory) * scheme.memory_unit
        count = min(max(1, cores // CORES_PER_CARD), MOST_CARDS)
        for part in text.split(",", count)[:count]:
            if _NUMBER.fullmatch(part.strip()):
                yield Share(int(part), min(cores, CORES_PER_CARD), memory)
