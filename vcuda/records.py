"""How a placement stands on a pod: the annotations by which gpu-admission tells gpu-manager which cards it gets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from vcuda.cards import INDEXED, MOST_CARDS, Share
from vcuda.charge import CORES_PER_CARD
from vcuda.demands import amount_of
from vcuda.objects import Pod
from vcuda.schemes import Scheme


class Holding(msgspec.Struct, frozen=True):
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
_PREFIXES = tuple(
    name for record in RECORDS.values() for name in (record.time, record.node, record.index, record.assigned)
)


def read_holding(pod: Pod) -> Holding | None:
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
            return Holding(node, shares)
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
    old = {key: None for key in present if key.startswith(_PREFIXES)}
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
