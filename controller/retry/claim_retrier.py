"""Makes Kubernetes retry the creation of ResourceClaims that were rejected for quota, as soon as quota is free.

Kubernetes' claim controller creates claims from the templates that a pod names. After each rejection it
waits longer, up to 16 minutes. A change of the pod makes it retry immediately, so this module annotates pods.
"""

import time
from collections.abc import Callable

import structlog

from controller.pods import pod_path
from controller.recount.team_usages import TeamUsages, team_in, team_key
from controller.retry.rejected import LOOK_SECONDS, RejectedObject, rejected_by_events
from controller.retry.retrier import REST_PER_SECOND, FreeByModel, Rests, has_free_cards, record_free, retry_patch
from controller.seen_events import CLAIM_REASON
from controller.workqueue import Reconciler
from vcuda import errors, k8s_types
from vcuda.k8s_types import Decoder
from vcuda.kube import MERGE_PATCH, Kube
from vcuda.ledger.report import NamespaceUse

MAX_AT_ONCE = 20  # One check reads at most this many pods, those of each namespace that were rejected first.
MAX_WOKEN = 10_000
"""The most pods of a namespace that are read after its free quota has grown. Their uids are kept in memory."""
NEXT_LOOK_SECONDS = 5.0
"""Seconds until the next check of a namespace. The next check finds Events that were written after the last."""


class ClaimingStatus(k8s_types.K8sStruct, frozen=True, gc=False):
    """The claims that Kubernetes created for a pod, by their names in the pod's field ``resourceClaims``."""

    resource_claim_statuses: tuple[k8s_types.NamedClaim, ...] | None = None


class ClaimingPod(k8s_types.K8sObject, frozen=True, gc=False):
    """A pod with the status of its ResourceClaims."""

    spec: k8s_types.PodSpec = k8s_types.PodSpec()
    status: ClaimingStatus = ClaimingStatus()

    @property
    def waits_for_claim(self) -> bool:
        made = {each.name for each in self.status.resource_claim_statuses or ()}
        wanted = (each for each in self.spec.resource_claims or () if each.resource_claim_template_name)
        return self.metadata.deletion_timestamp is None and any(each.name not in made for each in wanted)


_POD = Decoder(ClaimingPod)


class ClaimRetrier:
    """When the free quota of a namespace or team grows, retries the rejected claims of its pods, once for each pod.

    ``served``: returns True if the API server serves ResourceClaims.
    """

    def __init__(self, kube: Kube, served: Callable[[], bool], teams: TeamUsages | None = None) -> None:
        self._teams = teams or TeamUsages()
        self._rests = Rests(time.monotonic)
        self.reconciler = Reconciler("retry-claims", self._reconcile, failure="retry of rejected ResourceClaims failed")
        self._kube = kube
        self._served = served
        self._free: dict[str, FreeByModel] = {}
        # `_checked`: for each key of the queue, the uids of the pods that were read, by namespace.
        self._checked: dict[str, dict[str, set[str]]] = {}
        self._log = structlog.get_logger()

    def report(self, namespace: str, use: NamespaceUse | None) -> None:
        """Record the free quota of a namespace and its team. If it has grown, queue a check of pods without a claim."""
        key, interval = namespace, None
        free, has_grown = record_free(self._free, namespace, use)
        if use and use.team:
            key, interval = team_key(use.team.name), self._teams.interval(use.team.name)
            free, of_team_has_grown = record_free(self._free, key, use.team)
            has_grown = has_grown or of_team_has_grown
        if has_grown:
            self._checked[key] = {}
            self.reconciler.queue.add(key, interval=interval)
        if not has_free_cards(free):
            self._checked.pop(key, None)

    def _reconcile(self, key: str) -> float | None:
        checked, team = self._checked.get(key), team_in(key)
        if checked is None or not self._served():
            return None
        due: list[tuple[int, str, str, str, str, RejectedObject]] = []
        for namespace in [key] if team is None else self._rests.rested(self._teams.members(team)):
            began, known = time.monotonic(), checked.setdefault(namespace, set())
            try:
                found = rejected_by_events(self._kube, namespace, CLAIM_REASON, ("Pod",), leave_out=known)
                in_order = sorted((since, pod.name, pod.uid, namespace, pod) for pod, since in found.items())
                in_turns = ((number, *each) for number, each in enumerate(in_order[: MAX_WOKEN - len(known)]))
                due = sorted((*due, *in_turns))[: MAX_AT_ONCE + 1]  # the last one shows that more are due
            except errors.ListOverdue as error:
                # After a slow LIST, check other namespaces first. Kubernetes also retries by itself.
                self._log.warning("rejected ResourceClaims not listed in time", namespace=namespace, reason=str(error))
                if team is None:
                    self.reconciler.queue.retry(key, LOOK_SECONDS * REST_PER_SECOND)
                    return None
            self._rests.measure(namespace, began)
        # `MAX_AT_ONCE` limits the pods that one check reads, including pods that need no retry. The first pod of each
        # namespace comes before the second one of any namespace. So a tenant who forges Events cannot delay the retries
        # in other namespaces.
        now = due[:MAX_AT_ONCE]
        for *_, namespace, pod in now:
            checked[namespace].add(pod.uid)
        woken = [self._wake(namespace, pod) for *_, namespace, pod in now]
        if now and len(due) > len(now):
            return 0.0
        return NEXT_LOOK_SECONDS if any(woken) else None

    def _wake(self, namespace: str, known: RejectedObject) -> bool:
        """Annotate a pod that still lacks a claim, so that Kubernetes retries. Return True if the pod was annotated."""
        path = pod_path(namespace, known.name)
        try:
            if not _POD.decode(self._kube.get(path)).waits_for_claim:
                return False
            # The patch contains the pod's uid from the Event, so that it fails for a newer pod with the same name.
            self._kube.patch(path, retry_patch(uid=known.uid), MERGE_PATCH)
        except (errors.NotFound, errors.Conflict):
            return False
        self._log.info("claim retry triggered", namespace=namespace, pod=known.name)
        return True
