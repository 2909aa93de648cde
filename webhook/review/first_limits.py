"""Warns about pods that the entry ``*`` of an edited quota begins to reject.

Storage, network and GPU operators run privileged pods. If the entry ``*`` begins to apply to their namespaces, these
pods are rejected when they restart. The key ``except`` leaves such namespaces without a limit.
"""

import time
from collections.abc import Callable, Iterator

import msgspec

from vcuda import errors
from vcuda.k8s_types import Check, Pod
from vcuda.quota.allowances import Allowance
from vcuda.quota.model import DEFAULT, Mode, NamespaceQuota, Quota
from vcuda.quota.values import listed
from vcuda.requests.bypasses import could_reach_gpus
from vcuda.requests.pod_request import read_request
from webhook.review.context import PolicySnapshot
from webhook.review.pod_review import faults_of

PODS_SECONDS = 1.0
"""The time in which all pods of the cluster are read and judged. The API server waits 5 seconds for the answer."""

MAX_NAMED_NAMESPACES = 20
"""The most namespaces in one warning. The API server truncates long warnings."""

Pods = Callable[[float], Iterator[Pod]]
"""A function that yields all pods that have not ended. It raises VcudaError if it cannot, or after these seconds."""

UNNAMED = errors.Fault(
    DEFAULT,
    "privileged pods of storage, network and GPU operators in namespaces without an entry will be rejected "
    "at their next restart. Name these namespaces in the key `except`; docs/install.md shows how to find them",
)


def general_warning(old: Quota, new: Quota) -> Iterator[errors.Fault]:
    """Yield the warning that names no namespace, if the entry ``*`` of ``new`` rejects more privileged pods."""
    if new.default and Allowance.PRIVILEGED not in new.default.allow and _rejects_more(old.default, new.default):
        yield UNNAMED


def named_warnings(old: Quota, policy: PolicySnapshot, pods: Pods, check: Check) -> Iterator[errors.Fault]:
    """Yield warnings with the namespaces in which the entry ``*`` begins to reject pods that run now.

    ``policy``: the snapshot with the edited quota. The caller must have made sure that the API server sent the review.
    """
    new, found = policy.quota.default, set[str]()
    if new is None or not _rejects_more(old.default, new):
        return
    try:
        _find(found, old, policy, pods, check)
    except errors.Dropped:
        raise
    except errors.VcudaError as error:
        yield errors.Fault(DEFAULT, f"not all pods could be compared with this entry: {error}")
        yield from general_warning(old, policy.quota)
    if found:
        names = sorted(found)
        shown = listed(names, MAX_NAMED_NAMESPACES)
        yield errors.Fault(DEFAULT, f"pods in these namespaces would be rejected at their next restart: {shown}")
        pasted = msgspec.json.encode(sorted({*new.excepted, *names[:MAX_NAMED_NAMESPACES]})).decode()
        yield errors.Fault(DEFAULT, f"to leave these namespaces without a limit, write in this entry: except: {pasted}")


def _find(found: set[str], old: Quota, policy: PolicySnapshot, pods: Pods, check: Check) -> None:
    """Add to ``found`` the namespaces in which the entry ``*`` begins to reject pods. Raises VcudaError."""
    deadline = time.monotonic() + PODS_SECONDS

    def check_time(steps: int = 0, /) -> None:
        check(steps)
        if time.monotonic() > deadline:
            raise errors.ListOverdue(f"this takes longer than {PODS_SECONDS:g} s")

    for pod in pods(PODS_SECONDS):
        check_time()
        name = pod.metadata.namespace
        if name not in found and _begins(name, old, policy.quota) and _is_rejected(pod, policy, check_time):
            found.add(name)


def _rejects_more(old: NamespaceQuota | None, new: NamespaceQuota) -> bool:
    if new.mode is not Mode.ENFORCE:
        return False
    return old is None or old.mode is not Mode.ENFORCE or not old.excepted <= new.excepted


def _begins(namespace: str, old: Quota, new: Quota) -> bool:
    """Return whether the entry ``*`` begins to reject pods of the namespace."""
    limits = new.for_namespace(namespace)
    if limits is None or limits.team or namespace in new.namespaces:
        return False
    before = old.for_namespace(namespace)
    return before is None or before.mode is not Mode.ENFORCE


def _is_rejected(pod: Pod, policy: PolicySnapshot, check: Check) -> bool:
    quota = policy.quota.for_namespace(pod.metadata.namespace)
    if quota is None or not could_reach_gpus(pod):
        return False
    request = read_request(pod, policy.resources, check)
    return any(True for _ in faults_of(pod, request, policy, quota.allow, check))
