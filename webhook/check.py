"""Tells in words what a patch does to a pod, for tables that people read."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import groupby

import jsonpatch
import msgspec

from vcuda.cli import aligned
from vcuda.k8s_types import AdmissionRequest, AdmissionResponse, GroupVersionKind, Operation, Pod
from vcuda.quota.model import UNASKED_NAMESPACES
from vcuda.requests.pod_request import read_request
from vcuda.workloads import Manifest, Workload
from webhook.choices import RecentChoices
from webhook.context import PolicySnapshot
from webhook.ledgers import Ledgers, MemoryLedgers
from webhook.mutate import mutate
from webhook.validate import validate


def patch_story(patch: Sequence[Operation]) -> Iterator[str]:
    """Yield a phrase for each kind of change that its owner may not expect."""
    removed = [operation for operation in patch if operation["op"] == "remove"]
    allocations = [operation for operation in removed if operation["path"].startswith("/metadata/")]
    if allocations:
        keys = ", ".join(_key(operation["path"]) for operation in allocations)
        yield f"allocation records removed: {keys}"
    if any(operation["path"] == "/spec/nodeName" for operation in removed):
        yield "nodeName moved to a required node affinity"
    for operation in patch:
        if operation["path"] == "/spec/schedulerName":
            yield f"scheduler set to {operation['value']}"


def _key(path: str) -> str:
    return str(path).rpartition("/")[2].replace("~1", "/").replace("~0", "~")


PODS = GroupVersionKind(version="v1", kind="Pod")

_WORDS = {"ignored": "no GPU", "unlimited": "not limited"}

_COUNTED = "a system namespace: the API server asks nobody about its pods, so they count and are never refused"


class Row(msgspec.Struct, frozen=True):
    """What becomes of ``count`` pods of one workload; ``charge`` is for each of them."""

    object: str
    namespace: str
    count: int
    decision: str
    model: str
    charge: str
    reason: str

    @property
    def refused(self) -> bool:
        """Whether these pods may not be created."""
        return self.decision == "refused"


def check(workloads: Iterable[Workload], policy: PolicySnapshot) -> list[Row]:
    """Decide every pod in order, each beside those admitted before it.

    Pods of a workload that fare alike share a row, with the reason of the first: how much is free differs in each.
    """
    return asyncio.run(_check(workloads, policy))


async def _check(workloads: Iterable[Workload], policy: PolicySnapshot) -> list[Row]:
    ledgers, choices = MemoryLedgers(), RecentChoices()
    rows = []
    for workload in workloads:
        decided = [await _decide(workload, policy, ledgers, choices) for _ in range(workload.count)]
        for _, alike in groupby(decided, key=lambda decision: decision[0]):
            (_, first), *others = alike
            rows.append(msgspec.structs.replace(first, count=1 + len(others)))
    return rows


async def _decide(
    workload: Workload, policy: PolicySnapshot, ledgers: Ledgers, choices: RecentChoices
) -> tuple[Hashable, Row]:
    """Return what becomes of one more pod, and by what it is told whether the next one fares alike."""
    pod, answers = await admit_pod(workload.pod, workload.namespace, policy, ledgers, choices)
    last = answers[-1]
    view = msgspec.convert(pod, Pod)
    charge = read_request(view).charge
    decision = _WORDS.get(last.outcome, "admitted") if last.allowed else "refused"
    stories = [last.message, answers[0].reason, *patch_story(answers[0].patch), *last.warnings]
    row = Row(
        object=f"{workload.kind}/{workload.name}",
        namespace=workload.namespace,
        count=1,
        decision=decision,
        model=last.model,
        charge=str(charge) if charge.cores else "",
        reason="; ".join(story for story in stories if story),
    )
    if workload.namespace in UNASKED_NAMESPACES and last.outcome not in _WORDS:
        return "counted", msgspec.structs.replace(row, decision="counted", model="", reason=_COUNTED)
    return (last.outcome, last.model, bool(last.warnings)), row


async def admit_pod(
    pod: Manifest, namespace: str, policy: PolicySnapshot, ledgers: Ledgers, choices: RecentChoices
) -> tuple[Manifest, list[AdmissionResponse]]:
    """Take a pod through /mutate and /validate as the API server does; return it as stored, and both answers."""
    answer = await mutate(_request(pod, namespace), policy, ledgers, choices)
    if not answer.allowed:
        return pod, [answer]
    patched: Manifest = jsonpatch.apply_patch(pod, msgspec.json.encode(answer.patch))
    uid = str(uuid.uuid4())
    stored = {**patched, "metadata": {**patched["metadata"], "uid": uid}}
    verdict = await validate(_request(stored, namespace), policy, ledgers, choices, float("inf"))
    return stored, [answer, verdict]


def _request(pod: Manifest, namespace: str) -> AdmissionRequest:
    raw = msgspec.Raw(msgspec.json.encode(pod, enc_hook=str))
    return AdmissionRequest(uid="check", kind=PODS, namespace=namespace, operation="CREATE", object=raw)


def table(rows: Iterable[Row]) -> Iterator[str]:
    """Yield the lines of a table for people."""
    heading = ("OBJECT", "NAMESPACE", "PODS", "DECISION", "MODEL", "CHARGE", "REASON")
    cells = [heading, *((r.object, r.namespace, str(r.count), r.decision, r.model, r.charge, r.reason) for r in rows)]
    yield from aligned(cells)
