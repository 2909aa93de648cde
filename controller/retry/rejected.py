"""Finds workloads and claims that were rejected for quota, by the conditions of ReplicaSets and by Events.

Tenants can write these conditions and Events. So they are read in pages, for a limited time, and into limited memory.
"""

import contextlib
import itertools
import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import msgspec

from controller.seen_events import REASON
from vcuda import errors, k8s_types
from vcuda.k8s_types import Decoder
from vcuda.kube import Kube, objects, segment
from vcuda.quota.rejections import may_pass_later

LOOK_SECONDS = 10.0
"""The most seconds that all LISTs of one check of a namespace may take together."""

MAX_REJECTED = 1000
"""The maximum number of objects that one check takes from the Events of a namespace. It limits the used memory."""

MAX_UID_LENGTH = 64
"""The maximum length of a uid in an Event. A uid from the API server has 36 characters."""

MAX_OWNER_BYTES = 8 * 2**20
"""The most bytes of owners (ReplicaSets, Jobs …), in JSON, that one check keeps. A later check keeps other owners."""

Reports = Callable[[str], bool]
"""A function that returns True if a message reports the kind of rejection that is searched for."""

JOB_ENDED = ("Complete", "Failed", "SuccessCriteriaMet", "FailureTarget")
"""The types of the conditions after which a Job creates no more pods."""

_COLLECTIONS = {
    "ReplicaSet": "/apis/apps/v1/namespaces/{}/replicasets",
    "StatefulSet": "/apis/apps/v1/namespaces/{}/statefulsets",
    "DaemonSet": "/apis/apps/v1/namespaces/{}/daemonsets",
    "ReplicationController": "/api/v1/namespaces/{}/replicationcontrollers",
    "Job": "/apis/batch/v1/namespaces/{}/jobs",
}
# The controllers of ReplicaSets and ReplicationControllers report a rejection by the condition ReplicaFailure until
# they can create a pod. The controllers of other kinds only write an Event, which the API server deletes after an hour
# (--event-ttl). A LIST of ReplicaSets or ReplicationControllers is large, because it includes pod templates. So these
# two kinds are listed only every few minutes, or if an Event or the last check has found a rejected owner.
WITH_CONDITION = ("ReplicaSet", "ReplicationController")
_WITH_EVENT = ("StatefulSet", "DaemonSet", "Job")


class Condition(k8s_types.K8sStruct, frozen=True, gc=False):
    """A condition in the status of an owner of pods (for example a ReplicaSet or Job)."""

    type: str = ""
    status: str = ""
    message: str = ""
    last_transition_time: str | None = None


class OwnerSpec(k8s_types.K8sStruct, frozen=True, gc=False):
    """The pod template of an owner, and how many pods it wants. Only a Job has ``parallelism`` and ``completions``."""

    replicas: int | None = None
    parallelism: int | None = None
    completions: int | None = None
    suspend: bool | None = None
    template: k8s_types.Pod = k8s_types.Pod()


class OwnerStatus(k8s_types.K8sStruct, frozen=True, gc=False):
    """The numbers of pods in the status of an owner (for example a ReplicaSet or Job).

    Only a Job has ``active`` and ``succeeded``. Only a DaemonSet has the two fields that end in ``_scheduled``.
    """

    replicas: int = 0
    active: int = 0
    succeeded: int = 0
    desired_number_scheduled: int = 0
    current_number_scheduled: int = 0
    conditions: tuple[Condition, ...] | None = None


class Owner(k8s_types.K8sObject, frozen=True, gc=False):
    """An owner of pods: a ReplicaSet, ReplicationController, StatefulSet, DaemonSet or Job."""

    spec: OwnerSpec = OwnerSpec()
    status: OwnerStatus = OwnerStatus()

    @property
    def missing(self) -> int:
        """The number of pods that this owner still has to create. Requires a spec with the API server's defaults."""
        spec, status = self.spec, self.status
        if self.metadata.deletion_timestamp:
            return 0
        if spec.parallelism is not None:
            return max(self._wanted_by_job(spec.parallelism) - status.active, 0)
        if spec.replicas is not None:
            return max(spec.replicas - status.replicas, 0)
        return max(status.desired_number_scheduled - status.current_number_scheduled, 0)

    @property
    def created(self) -> int:
        """The number of pods that this owner has created, by its status, which its users cannot write."""
        status = self.status
        return status.replicas + status.active + status.succeeded + status.current_number_scheduled

    def _wanted_by_job(self, parallelism: int) -> int:
        # Compute the number of wanted pods as Kubernetes' Job controller does (manageJob in pkg/controller/job).
        ended = any(each.type in JOB_ENDED and each.status == "True" for each in self.status.conditions or ())
        if self.spec.suspend or ended:
            return 0
        if self.spec.completions is None:
            return 0 if self.status.succeeded else parallelism
        return min(parallelism, self.spec.completions - self.status.succeeded)

    def rejected_since(self, reports: Reports) -> str | None:
        """Return since when condition ReplicaFailure has a message that ``reports`` recognizes; None if it has none."""
        # Kubernetes' controllers record only the text of a rejection, and no causes. So search the text.
        for condition in self.status.conditions or ():
            if condition.type == "ReplicaFailure" and condition.status == "True" and reports(condition.message):
                return condition.last_transition_time or ""
        return None


class RejectedOwner(msgspec.Struct, frozen=True):
    """An owner of pods (for example a ReplicaSet or Job) whose pods were rejected.

    ``path``: the owner's path in the API.
    ``since``: the time of the first known rejection.
    ``size``: the bytes of the owner's JSON.
    """

    path: str
    since: str
    owner: Owner
    size: int = 0

    @property
    def namespace(self) -> str:
        return self.path.partition("/namespaces/")[2].partition("/")[0]

    def is_of(self, kind: str, namespace: str) -> bool:
        return self.path.startswith(f"{_COLLECTIONS[kind].format(segment(namespace))}/")


class RejectedOwners:
    """The owners with rejected pods that one check has found, with at most `MAX_OWNER_BYTES` in all.

    ``judged``: the paths of owners for which an earlier check has decided whether they retry. These owners are dropped
    first if the total is too large.
    """

    def __init__(self, judged: Collection[str] = ()) -> None:
        self._judged = judged
        self._first: list[RejectedOwner] = []
        self._again: list[RejectedOwner] = []
        self._bytes = 0
        self.complete = True
        """False if an owner was dropped before any check has decided whether it retries."""
        self.paths: set[str] = set()
        """The paths of all owners that this check has found, including dropped owners."""

    @property
    def owners(self) -> list[RejectedOwner]:
        return [*self._first, *self._again]

    def add(self, rejected: RejectedOwner) -> None:
        """Keep an owner if the size limit permits. The first owner is always kept."""
        self.paths.add(rejected.path)
        judged = rejected.path in self._judged
        while self._again and not judged and self._bytes + rejected.size > MAX_OWNER_BYTES:
            self._bytes -= self._again.pop().size
        if self._bytes and self._bytes + rejected.size > MAX_OWNER_BYTES:
            self.complete = self.complete and judged
            return
        self._bytes += rejected.size
        (self._again if judged else self._first).append(rejected)


class RejectedObject(k8s_types.K8sStruct, frozen=True, gc=False):
    """The object that an Event is about: an owner whose pod was rejected, or a pod whose claim was rejected."""

    kind: str = ""
    name: str = ""
    uid: str = ""


class RejectionEvent(k8s_types.K8sStruct, frozen=True, gc=False):
    """An Event that reports why an object could not be created."""

    involved_object: RejectedObject = RejectedObject()
    message: str | None = None
    first_timestamp: str | None = None


_EVENT = Decoder(RejectionEvent)
_OWNER = Decoder(Owner)


def find_rejected(
    kube: Kube,
    namespace: str,
    in_time: Callable[[], bool] = lambda: True,
    listed: Collection[str] = WITH_CONDITION,
    *,
    found: RejectedOwners | None = None,
    reports: Reports = may_pass_later,
) -> RejectedOwners:
    """Return the owners that still lack pods after a rejection that ``reports`` recognizes, by default one for quota.

    A kind in `WITH_CONDITION` (for example ReplicaSet) is listed if it is in ``listed``, or if an Event refers to an
    owner of this kind. An owner of another kind is read if an Event refers to it, while ``in_time`` returns True.
    Undecodable owners are skipped. ``found``: the owners that were found before, to which the others are added.

    Raises ListOverdue if the LISTs take longer than `LOOK_SECONDS`.
    """
    until = time.monotonic() + LOOK_SECONDS
    reported = rejected_by_events(kube, namespace, REASON, _COLLECTIONS, reports=reports)
    kinds = [kind for kind in WITH_CONDITION if kind in listed or any(each.kind == kind for each in reported)]
    found = RejectedOwners() if found is None else found
    by_condition = _rejected_by_condition(kube, namespace, kinds, until, reports)
    for rejected in itertools.chain(by_condition, _rejected_by_event(kube, namespace, reported, in_time)):
        if rejected.owner.missing:
            found.add(rejected)
    return found


def _rejected_by_condition(
    kube: Kube, namespace: str, kinds: Iterable[str], until: float, reports: Reports
) -> Iterator[RejectedOwner]:
    for kind in kinds:
        collection = _COLLECTIONS[kind].format(segment(namespace))
        pages = kube.list_pages(collection, seconds=until - time.monotonic())
        for raw in (raw for page in pages for raw in page.items):
            for owner in objects.decode_each(_OWNER, [raw]):
                since = owner.rejected_since(reports)
                if since is not None:
                    path = f"{collection}/{segment(owner.metadata.name)}"
                    yield RejectedOwner(path, since, owner, len(bytes(raw)))


def rejected_by_events(
    kube: Kube,
    namespace: str,
    reason: str,
    kinds: Collection[str],
    *,
    leave_out: Collection[str] = (),
    reports: Reports = may_pass_later,
) -> dict[RejectedObject, str]:
    """Read Events. Return the objects whose pods or claims were rejected, each with the time of its first rejection.

    Only Events of this ``reason`` about objects of these ``kinds`` are read, if ``reports`` recognizes their message.
    Objects whose uid is in ``leave_out`` are left out. At most `MAX_REJECTED` objects are returned, in the order of the
    Events' names.

    Raises ListOverdue if the LIST takes longer than `LOOK_SECONDS`.
    """
    first: dict[RejectedObject, str] = {}
    path = f"/api/v1/namespaces/{segment(namespace)}/events"
    pages = kube.list_pages(path, {"fieldSelector": f"reason={reason}"}, seconds=LOOK_SECONDS)
    for event in objects.decode_each(_EVENT, (raw for page in pages for raw in page.items)):
        reported, since = event.involved_object, event.first_timestamp or ""
        if reported not in first and len(first) >= MAX_REJECTED:
            continue
        if reported.uid not in leave_out and _is_possible(reported, kinds) and reports(event.message or ""):
            first[reported] = min(since, first.get(reported, since))
    return first


def _is_possible(reported: RejectedObject, kinds: Collection[str]) -> bool:
    # A user who may write Events can put a text of any length into the kind, name and uid of the reported object. A
    # name that is a path could address an object of another namespace, so reject names that no object can have.
    return reported.kind in kinds and len(reported.uid) <= MAX_UID_LENGTH and k8s_types.can_be_name(reported.name)


def _rejected_by_event(
    kube: Kube, namespace: str, reported: Mapping[RejectedObject, str], in_time: Callable[[], bool]
) -> Iterator[RejectedOwner]:
    """Read the owners in ``reported`` whose kind has no condition ReplicaFailure."""
    first: dict[str, str] = {}
    for each, since in reported.items():
        if each.kind in _WITH_EVENT:
            path = f"{_COLLECTIONS[each.kind].format(segment(namespace))}/{segment(each.name)}"
            first[path] = min(since, first.get(path, since))
    # Read the owners in random order. If one check has no time for all of them, later checks read other owners.
    for path, since in random.sample(sorted(first.items()), len(first)):
        if not in_time():
            return
        # The owner may have been deleted, because Events stay for some time after the deletion of their object.
        with contextlib.suppress(errors.NotFound):
            raw = kube.get(path)
            for owner in objects.decode_each(_OWNER, [raw]):
                # A tenant can write an Event with any time.
                yield RejectedOwner(path, max(since, owner.metadata.creation_timestamp or ""), owner, len(raw))
