"""Which pods of a namespace its quota would not let in as it is now.

They are there where a namespace was limited after its pods were created, where a limit was lowered, and where pods were
created while the webhook was not asked.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from vcuda.allocations.stored_pods import StoredPod
from vcuda.ledger.ledger import NO_LIMIT
from vcuda.placement.placement import Nodes
from vcuda.quota.model import Charge, Limit, Mode, NamespaceQuota, cards, fits, mebibytes, total


class Kind(enum.StrEnum):
    """What is wrong with a pod: no model to count it by, a model that is not allowed, or more than the limit."""

    UNPINNED = "unpinned"
    NOT_ALLOWED = "not-allowed"
    OVER_QUOTA = "over-quota"


class Finding(msgspec.Struct, frozen=True):
    """A pod that the quota would not let in, and why.

    ``evictable``: the quota is enforced, and without the pod the namespace uses less of it. A mirror pod is not: its
    static pod runs on, and kubelet shows it anew, as the newest of all.
    """

    kind: Kind
    pod: StoredPod
    message: str
    evictable: bool


def audit(namespace: str, quota: NamespaceQuota, pods: Iterable[StoredPod], nodes: Nodes) -> Sequence[Finding]:
    """Return what is wrong with a namespace's pods, the newest pod first.

    A pod is beyond the limit where it does not fit beside the older ones that do. So the newest go, without them the
    rest is within the limit, and each of them would be too much for it. Finished pods count for nothing. One that is
    terminating is never found, and makes way for the others already: were it in their way here, each eviction would
    take one more pod with it, as the one that goes still holds its card.
    """
    by_model: dict[str | None, list[StoredPod]] = {}
    for pod in sorted(pods, key=_age):
        if pod.live:
            by_model.setdefault(pod.model_on(nodes), []).append(pod)
    found = [finding for model, held in by_model.items() for finding in _found(namespace, quota, model, held)]
    return sorted(found, key=lambda finding: _age(finding.pod), reverse=True)


def _age(pod: StoredPod) -> tuple[str, str, str]:
    """Sort the oldest first. RFC 3339 in UTC, as the API server writes it, sorts as text, to the second."""
    return pod.created, pod.name, pod.uid


def _found(namespace: str, quota: NamespaceQuota, model: str | None, held: Sequence[StoredPod]) -> Iterator[Finding]:
    """Yield what is wrong with the pods on one model, given oldest first."""
    staying = [pod for pod in held if not pod.terminating]
    if model is None:
        yield from (Finding(Kind.UNPINNED, pod, _unpinned(namespace), evictable=False) for pod in staying)
        return
    limit = quota.limits.get(model)
    kind = Kind.NOT_ALLOWED if limit is None else Kind.OVER_QUOTA
    used = total(pod.charge for pod in held)
    for pod in _beyond(limit or NO_LIMIT, staying):
        message = _over(namespace, model, limit, used, pod) if limit else _not_allowed(namespace, model, quota)
        if pod.mirror:
            message += f"; it shows a static pod, which only its manifest on node {pod.node} can end"
        yield Finding(kind, pod, message, evictable=quota.mode == Mode.ENFORCE and not pod.mirror)


def _beyond(limit: Limit, pods: Sequence[StoredPod]) -> Iterator[StoredPod]:
    """Yield the pods that do not fit beside the older ones that do."""
    used = Charge()
    for pod in pods:
        if fits(limit, used, pod.charge):
            used += pod.charge
        else:
            yield pod


def _unpinned(namespace: str) -> str:
    return f"the GPU quota of namespace {namespace} does not count it: it is held to no model and runs on none"


def _not_allowed(namespace: str, model: str, quota: NamespaceQuota) -> str:
    allowed = ", ".join(quota.limits) or "none"
    return f"namespace {namespace} may not use GPU model {model}; the models that it may use: {allowed}"


def _over(namespace: str, model: str, limit: Limit, used: Charge, pod: StoredPod) -> str:
    where = f"{model} in namespace {namespace}"
    takes = f"this pod takes {cards(pod.charge.cores)}"
    figures = f"used: {cards(used.cores)}, limited: {cards(limit.cores)}"
    if used.cores <= limit.cores:
        where = f"memory of {where}"
        takes = f"this pod takes {mebibytes(pod.charge.memory_under(limit))}"
        figures = f"used: {mebibytes(used.memory_under(limit))}, limited: {mebibytes(limit.memory or 0)}"
    return f"beyond GPU quota: {where}, {figures}; {takes} and does not fit beside the older ones"
