"""What the webhook would do with the pods of some manifests: decided by asking it, told in a table that people read.

Who is asked is a parameter: the decisions themselves, for the command `check`, or a server, as in the demo.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import jsonpatch
import msgspec
from jsonpointer import JsonPointer

from vcuda import cli, k8s_types
from vcuda.quota.model import UNASKED_NAMESPACES
from vcuda.requests.pod_request import read_request
from vcuda.requests.resources import BUILT_IN, GpuResources
from vcuda.workloads import Manifest, Workload, workloads_in
from webhook import context, pod_review
from webhook.ledgers import MemoryLedgers, RecentChoices

Ask = Callable[[str, k8s_types.AdmissionRequest], Awaitable[k8s_types.AdmissionResponse]]
"""Has a review answered, by its path."""

PODS = k8s_types.GroupVersionKind(version="v1", kind="Pod")

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


def read_workloads(paths: Sequence[Path], namespace: str) -> list[Workload]:
    """Return every object that makes pods, in order; ``namespace`` is for those that name none.

    Raises:
        BadInput: a file cannot be read, or an object in it makes no pods or a malformed one.

    """
    return [workload for path in paths for workload in workloads_in(str(path), context.read_text(path), namespace)]


def check(workloads: Iterable[Workload], policy: context.PolicySnapshot) -> list[Row]:
    """Decide every pod in order, each beside those admitted before it; nothing that runs already is known."""
    ledgers, choices = MemoryLedgers(), RecentChoices()

    async def ask(path: str, request: k8s_types.AdmissionRequest) -> k8s_types.AdmissionResponse:
        if path == "/mutate":
            return await pod_review.mutate(request, policy, ledgers, choices)
        return await pod_review.validate(request, policy, ledgers, choices, deadline=float("inf"))

    return asyncio.run(decide(workloads, ask, policy.resources))


async def decide(workloads: Iterable[Workload], ask: Ask, known: GpuResources = BUILT_IN) -> list[Row]:
    """Return what is answered about every pod, asked in order.

    Pods of a workload that fare alike share a row, with the reason of the first: how much is free differs in each.
    """
    rows = []
    for workload in workloads:
        decided = [await _decide(workload, ask, known) for _ in range(workload.count)]
        for _, alike in groupby(decided, key=lambda decision: decision[0]):
            (_, first), *others = alike
            rows.append(msgspec.structs.replace(first, count=1 + len(others)))
    return rows


async def _decide(workload: Workload, ask: Ask, known: GpuResources) -> tuple[Hashable, Row]:
    """Return what becomes of one more pod, and by what it is told whether the next one fares alike."""
    pod, answers = await _create(workload.pod, workload.namespace, ask)
    first, last = answers[0], answers[-1]
    untouched = _WORDS.get(first.outcome)
    charge = read_request(msgspec.convert(pod, k8s_types.Pod), known).charge_on(last.model or first.model)
    stories = [last.message, first.reason, *patch_story(first.patch), *last.warnings]
    row = Row(
        object=f"{workload.kind}/{workload.name}",
        namespace=workload.namespace,
        count=1,
        decision=(untouched or "admitted") if last.allowed else "refused",
        model=last.model or first.model,
        charge=str(charge) if charge.cores else "",
        reason="; ".join(story for story in stories if story),
    )
    if workload.namespace in UNASKED_NAMESPACES and not untouched:
        return "counted", msgspec.structs.replace(row, decision="counted", model="", reason=_COUNTED)
    return (last.outcome, last.model, bool(last.warnings)), row


async def _create(pod: Manifest, namespace: str, ask: Ask) -> tuple[Manifest, list[k8s_types.AdmissionResponse]]:
    """Take a pod through /mutate and /validate as the API server does; return it as stored, and both answers."""
    proposed = await ask("/mutate", _request(pod, namespace))
    if not proposed.allowed:
        return pod, [proposed]
    patched: Manifest = jsonpatch.apply_patch(pod, msgspec.json.encode(proposed.patch))
    # The API server gives a pod its uid after mutation; it is what a charge is known by.
    stored = {**patched, "metadata": {**patched["metadata"], "uid": str(uuid.uuid4())}}
    return stored, [proposed, await ask("/validate", _request(stored, namespace))]


def _request(pod: Manifest, namespace: str) -> k8s_types.AdmissionRequest:
    # YAML has types that JSON has not, such as dates; where text is expected they are text.
    raw = msgspec.Raw(msgspec.json.encode(pod, enc_hook=str))
    return k8s_types.AdmissionRequest(
        uid=str(uuid.uuid4()), kind=PODS, namespace=namespace, operation="CREATE", object=raw
    )


def patch_story(patch: Sequence[k8s_types.Operation]) -> Iterator[str]:
    """Yield a phrase for each kind of change that the pod's owner may not expect."""
    removed = [operation["path"] for operation in patch if operation["op"] == "remove"]
    records = [path for path in removed if path.startswith("/metadata/")]
    if records:
        yield f"allocation records removed: {', '.join(JsonPointer(path).parts[-1] for path in records)}"
    if "/spec/nodeName" in removed:
        yield "nodeName moved to a required node affinity"
    for operation in patch:
        if operation["path"] == "/spec/schedulerName":
            yield f"scheduler set to {operation['value']}"


def table(rows: Iterable[Row]) -> Iterator[str]:
    """Yield the lines of a table for people."""
    heading = ("OBJECT", "NAMESPACE", "PODS", "DECISION", "MODEL", "CHARGE", "REASON")
    cells = [heading, *((r.object, r.namespace, str(r.count), r.decision, r.model, r.charge, r.reason) for r in rows)]
    yield from cli.aligned(cells)
