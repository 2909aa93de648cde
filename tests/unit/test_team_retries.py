"""Tests of retries in a team: if quota of the team becomes free, the oldest rejection in any namespace retries."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from controller.recount.team_usages import TeamUsages, team_key
from controller.retry import retrier as retries
from controller.retry.claim_retrier import ClaimRetrier
from controller.retry.rejected import LOOK_SECONDS
from controller.retry.retrier import BUDGET_SECONDS, REST_PER_SECOND, RETRY_ANNOTATION
from controller.seen_events import CLAIM_REASON, REASON
from tests.api_double import ApiDouble, Effect
from tests.builders import LABELS, container
from tests.quota_map import store_quota
from tests.unit.test_ledger_report import used
from tests.unit.test_retrier import REPLICA_SETS, failure
from vcuda import errors
from vcuda.kube import NodeInformer, QuotaInformer, QuotaSource
from vcuda.ledger.ledger import Ledger
from vcuda.quota.model import Charge

KEY = team_key("vision")


class Team:
    """The retriers for a team with a limit of ``cards``. The test sets their clock, and reports the usage."""

    def __init__(self, api: ApiDouble, entries: str = "{}", cards: int = 4) -> None:
        self.api, self.now = api, 1000.0
        store_quota(api, entries, gpu_teams=f'{{vision: {{namespaces: ["m-*"], quota: {{M40: {cards}}}}}}}')
        self.quota = QuotaInformer(api.kube, QuotaSource(), frozenset())
        self.quota.reflector.relist()
        self.usages = TeamUsages()
        nodes = NodeInformer(api.kube, LABELS)
        self.retrier = retries.Retrier(api.kube, self.quota, nodes, lambda: self.now, teams=self.usages)
        self.claims = ClaimRetrier(api.kube, lambda: True, self.usages)

    def report(self, namespace: str, cores: int) -> None:
        quota = self.quota.current()
        limits = quota.for_namespace(namespace) if quota else None
        assert limits
        ledger = Ledger({"M40": Charge(cores)})
        use = replace(used(ledger, quota=limits), namespace=namespace)
        use = replace(use, team=self.usages.record(namespace, limits.team, ledger.usages()))
        self.retrier.report(namespace, use)
        self.claims.report(namespace, use)

    def reject(self, namespace: str, name: str, at: int, cards: int = 1) -> None:
        """Store a ReplicaSet whose pod was rejected at this time."""
        template = {"spec": {"containers": [container({"tencent.com/vcuda-core": 100 * cards})]}}
        conditions = [failure(lastTransitionTime=f"2026-01-01T00:00:{at:02}Z")]
        manifest = {"metadata": {"name": name}, "spec": {"replicas": 1, "template": template}}
        path = f"{REPLICA_SETS.format(namespace)}/{name}"
        self.api.store(path, {**manifest, "status": {"conditions": conditions}})

    def check(self) -> list[str]:
        """Take a turn for the team. Return the names of the workloads that retry in it."""
        before = {path: self.annotation(path) for path in self.api.objects}
        self.retrier.reconciler.turn(KEY)
        return sorted(path.rpartition("/")[2] for path in before if self.annotation(path) != before[path])

    def reject_job(self, namespace: str, name: str, *, parallelism: int = 1, **metadata: str) -> None:
        """Store a Job whose pods were rejected, with an Event whose time is forged."""
        template = {"spec": {"containers": [container({"tencent.com/vcuda-core": 100})]}}
        spec = {"parallelism": parallelism, "completions": parallelism, "template": template}
        path = f"/apis/batch/v1/namespaces/{namespace}/jobs/{name}"
        self.api.store(path, {"metadata": {"name": name, **metadata}, "spec": spec, "status": {}})
        self._report(namespace, {"kind": "Job", "name": name}, REASON, "0001-01-01T00:00:00Z")

    def reject_claim(self, namespace: str, name: str, at: str, *, exists: bool = True) -> None:
        """Store an Event about a pod whose claim was rejected. ``exists``: store the pod too."""
        spec = {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "gpu"}]}
        stored = {"metadata": {"name": name, "uid": f"uid-{name}", "namespace": namespace}, "spec": spec}
        if exists:
            self.api.store(f"/api/v1/namespaces/{namespace}/pods/{name}", stored)
        self._report(namespace, {"kind": "Pod", "name": name, "uid": f"uid-{name}"}, CLAIM_REASON, at)

    def _report(self, namespace: str, about: Mapping[str, str], reason: str, at: str) -> None:
        event = {"involvedObject": about, "message": "exceeded quota: M40 in team vision", "reason": reason}
        name = about["name"]
        path = f"/api/v1/namespaces/{namespace}/events/{name}"
        self.api.store(path, {**event, "firstTimestamp": at, "metadata": {"name": name}})

    def annotation(self, path: str) -> Any:
        return self.api.objects[path]["metadata"].get("annotations", {}).get(RETRY_ANNOTATION)


def test_the_workload_that_has_waited_longest_in_the_whole_team_retries_first(api: ApiDouble) -> None:
    team = Team(api)
    team.report("m-1", 400)
    for namespace in ("m-2", "m-3"):
        team.report(namespace, 0)
    team.reject("m-2", "newer", 2)
    team.reject("m-3", "oldest", 1)
    team.reject("m-3", "newest", 3)
    assert team.check() == []
    team.report("m-1", 300)
    assert team.retrier.reconciler.queue.next() == KEY
    assert team.check() == ["oldest"]
    api.remove(f"{REPLICA_SETS.format('m-3')}/oldest")
    team.now += 10
    assert team.check() == ["newer"]


def test_a_workload_that_does_not_fit_its_own_limit_takes_no_quota_of_the_team(api: ApiDouble) -> None:
    team = Team(api, "{m-2: {quota: {M40: 1}}}")
    for namespace, cores in (("m-1", 200), ("m-2", 0), ("m-3", 0)):
        team.report(namespace, cores)
    team.reject("m-2", "too-large", 1, cards=2)
    team.reject("m-2", "fits", 2)
    team.reject("m-2", "second", 3)
    team.reject("m-3", "other", 4)
    assert team.check() == ["fits", "other"]


def test_other_namespaces_of_a_team_are_not_delayed_by_slow_lists_of_one(api: ApiDouble) -> None:
    """A user can make the LIST of Events in a namespace slow. The check of the team then leaves the namespace out."""
    team = Team(api)
    for namespace, cores in (("m-1", 100), ("m-2", 0), ("m-3", 0)):
        team.report(namespace, cores)
    team.reject("m-3", "waits", 1)
    listed = []

    def slow(namespace: str) -> None:
        listed.append(namespace)
        if namespace == "m-2":
            team.now += LOOK_SECONDS
            raise errors.ListOverdue("slow")

    original = api.list_pages

    def list_pages(path: str, *args: Any, **kwargs: Any) -> Any:
        slow(path.split("/")[path.split("/").index("namespaces") + 1])
        return original(path, *args, **kwargs)

    api.list_pages = list_pages  # type: ignore[method-assign]
    told = [name for _ in range(5) for name in team.check()]
    assert told
    listed.clear()
    team.check()
    assert "m-2" not in listed
    assert {"m-1", "m-3"} <= {*listed}
    team.now += LOOK_SECONDS * REST_PER_SECOND
    team.check()
    team.check()
    team.check()
    assert "m-2" in listed


def test_a_check_of_a_large_team_is_bounded_and_later_checks_look_at_other_namespaces(api: ApiDouble) -> None:
    team = Team(api, cards=40)
    for number in range(40):
        team.report(f"m-{number}", 0)
        team.reject(f"m-{number}", f"waits-{number}", 1)

    def deliver(method: str, _timeout: float, effect: Effect) -> bytes:
        team.now += BUDGET_SECONDS / 10 * (method == "LIST")
        return effect()

    api.deliver = deliver
    before, told = team.now, team.check()
    assert told
    assert team.now - before < 3 * BUDGET_SECONDS
    found: set[str] = set()
    for _ in range(12):
        team.now += 10
        found |= {*team.check()}
    assert found == {f"waits-{number}" for number in range(40)}


@pytest.mark.parametrize("freed", ["m-1", "m-2"])
def test_the_claims_that_have_waited_longest_in_the_whole_team_are_retried_first(api: ApiDouble, freed: str) -> None:
    team = Team(api)
    team.report("m-1", 200)
    team.report("m-2", 200)
    for number in range(30):
        team.reject_claim(f"m-{number % 2 + 1}", f"pod-{number}", f"2026-01-01T00:00:{59 - number:02}Z")
    team.report(freed, 100)
    assert team.claims.reconciler.queue.next() == KEY
    team.claims.reconciler.turn(KEY)
    woken = {path.rpartition("/")[2] for path in api.objects if "/pods/" in path and team.annotation(path)}
    assert woken == {f"pod-{number}" for number in range(10, 30)}


# Tests of the Events and owners of one namespace that must not stop the retries of the others


@pytest.mark.parametrize("jobs", [1, 5])
def test_owners_that_never_create_their_pods_take_the_retries_of_no_other_namespace(api: ApiDouble, jobs: int) -> None:
    """The Jobs want many pods, which the API server rejects for another reason."""
    team = Team(api)
    for namespace, cores in (("m-1", 100), ("m-bad", 0), ("m-2", 0)):
        team.report(namespace, cores)
    for number in range(jobs):
        team.reject_job("m-bad", f"bad-{number}", parallelism=1000)
    team.reject("m-2", "waits", 1)
    assert team.check() == ["bad-0"]
    for _ in range(3):
        team.now += 10
        assert "waits" in team.check()
        team.now += 10
        assert "waits" not in team.check(), "each has its turn"


def test_a_retry_that_created_a_pod_leaves_the_order(api: ApiDouble) -> None:
    team = Team(api)
    for namespace, cores in (("m-1", 300), ("m-2", 0), ("m-3", 0)):
        team.report(namespace, cores)
    team.reject_job("m-2", "oldest", parallelism=3)
    team.reject("m-3", "newer", 1)
    assert team.check() == ["oldest"]
    api.objects["/apis/batch/v1/namespaces/m-2/jobs/oldest"]["status"] = {"active": 1}
    team.now += 10
    assert team.check() == ["oldest"]


def test_an_event_makes_no_rejection_older_than_its_owner(api: ApiDouble) -> None:
    team = Team(api)
    for namespace, cores in (("m-1", 300), ("m-2", 0), ("m-3", 0)):
        team.report(namespace, cores)
    team.reject_job("m-2", "new", creationTimestamp="2026-01-01T00:00:09Z")
    team.reject("m-3", "older", 1)
    assert team.check() == ["older"]


def test_events_about_missing_pods_stop_no_retries_of_claims_in_another_namespace(
    api: ApiDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controller.retry.claim_retrier.MAX_WOKEN", 20)
    team = Team(api)
    team.report("m-1", 400)
    for number in range(30):
        team.reject_claim("m-bad", f"none-{number}", "0001-01-01T00:00:00Z", exists=False)
    team.reject_claim("m-2", "waits", "2026-01-01T00:00:00Z")
    for namespace, cores in (("m-bad", 0), ("m-2", 0), ("m-1", 300)):
        team.report(namespace, cores)
    team.claims.reconciler.turn(KEY)
    assert team.annotation("/api/v1/namespaces/m-2/pods/waits")
