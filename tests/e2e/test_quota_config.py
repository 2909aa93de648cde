"""Tests that edits of the quota ConfigMap are checked and take effect at once. Malformed ones replace nothing."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http import HTTPStatus
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster, Json
from tests.e2e.installation import Installation, await_ready, installed, registered, running
from tests.e2e.quota_config import KEY, QuotaConfigMap
from tests.integration.reviews import card_pod, gpu_pod, pinned

pytestmark = pytest.mark.one_version

MALFORMED = """
team-a: {quota: {M40: -1, P100: "2"}}
team-b: {quotas: {M40: 1}, pool: public}
"""
PATHS = ("team-a.quota.M40", "team-a.quota.P100", "team-b.quotas", "team-b.pool")


@pytest.fixture(scope="module")
def own(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    with installed(cluster, tmp_path_factory.mktemp("own")) as installation:
        yield installation


def test_a_malformed_edit_is_rejected_and_kubectl_shows_the_path_of_every_fault(
    cluster: Cluster, own: Installation
) -> None:
    """kubectl also warns that `kubectl apply` did not create the ConfigMap. The test ignores this warning."""
    with own.team({"quota": {"M40": 1}}):
        before = own.quota.document()
        manifest = json.dumps(own.quota.manifest(MALFORMED))
        rejected = cluster.kubectl("apply", "-f", "-", stdin=manifest, check=False)
        assert (rejected.returncode, rejected.stdout) == (1, "")
        heading, *faults = [line for line in rejected.stderr.splitlines() if not line.startswith("Warning: ")]
        assert heading.strip() == "The request is invalid:"
        assert tuple(fault.removeprefix("* ").partition(": ")[0] for fault in faults) == PATHS
        assert own.quota.document() == before


def test_an_edit_that_removes_the_label_of_the_check_is_still_checked(cluster: Cluster, own: Installation) -> None:
    """The ConfigMap had the label before the edit, so the API server calls the webhook."""
    own.quota.limit(anybody={"quota": {"M40": 1}})
    unlabelled = {"metadata": {"labels": None}, "data": {KEY: MALFORMED}}
    assert cluster.rest.try_merge_patch(own.quota.path, unlabelled).status == HTTPStatus.UNPROCESSABLE_ENTITY


def test_a_deleted_quota_limits_no_namespace_and_a_new_one_counts_running_pods(
    cluster: Cluster, own: Installation
) -> None:
    """No controller runs here, because it would delete the ledger."""
    with own.team({"quota": {"M40": 1}}) as namespace:
        cluster.create(card_pod("within", namespace))
        assert cluster.try_create(card_pod("over", namespace)).is_over_quota
        cluster.rest.send("DELETE", own.quota.path).ok()
        own.replica.await_log("the quota ConfigMap was deleted, so no namespace is limited")
        cluster.create(pinned(card_pod("over", namespace)))
        own.quota.limit(**{namespace: {"quota": {"M40": 3}}})
        cluster.create(card_pod("again", namespace))
        assert cluster.try_create(card_pod("too-many", namespace)).is_over_quota


def test_an_edit_warns_of_a_lost_entry_and_an_event_reports_that_the_edit_is_in_force(
    cluster: Cluster, installation: Installation, team: Callable[[Json], str]
) -> None:
    """The webhook does not know its caller, so no warning may reveal whether a namespace exists."""
    namespace = team({"quota": {"M40": 1}})
    missing = f"{namespace}s"
    entries = {**installation.quota.document(), namespace: {"quota": {"M40": 3}}}
    added = installation.quota.write(json.dumps({**entries, missing: {"quota": {"M40": 1}}}))
    added.ok()
    assert "namespace not found" not in str(added.warnings)
    edited = installation.quota.write(json.dumps(entries))
    assert f"{missing}: the entry (M40: 1 card) is removed. No limit applies any more" in edited.warnings
    about_it = f"involvedObject.uid={edited.ok()['metadata']['uid']},reason=QuotaEdited"
    change = f"{namespace}.quota.M40: 1 card -> 3 cards"
    events = cluster.await_events("kube-system", about_it, lambda found: change in str(found))
    assert {event["type"] for event in events} == {"Normal"}


@pytest.fixture
def unchecked(cluster: Cluster) -> QuotaConfigMap:
    """A quota ConfigMap without the label for which the webhook is called. So malformed text can be stored in it."""
    return QuotaConfigMap(cluster.rest, "kube-system", "gpuquota-unchecked", labels={})


def test_the_last_valid_quota_stays_in_force_when_a_malformed_one_is_stored(
    cluster: Cluster, unchecked: QuotaConfigMap, tmp_path: Path
) -> None:
    """A metric, the log, and an Event on the ConfigMap report the malformed quota."""
    unchecked.write("{}").ok()
    with installed(cluster, tmp_path, quota=unchecked) as own, own.team({"quota": {"M40": 1}}) as namespace:
        stored = own.quota.write(MALFORMED).ok()
        own.replica.await_log("quota document malformed")
        assert own.replica.metric("vcuda_quota_config_valid") == 0
        assert own.replica.get("/readyz").status == HTTPStatus.OK
        cluster.create(card_pod("within", namespace))
        assert cluster.try_create(card_pod("over", namespace)).is_over_quota

        about_it = f"involvedObject.uid={stored['metadata']['uid']},reason=MalformedQuota"
        [event] = cluster.await_events("kube-system", about_it)
        assert event["type"] == "Warning"
        assert event["message"].startswith(
            "the quota document is malformed, and the last good document stays in force: "
        )
        assert [path for path in PATHS if path not in event["message"]] == []

        own.quota.limit_anew(**{namespace: {"quota": {"M40": 2}}})
        assert own.replica.metric("vcuda_quota_config_valid") == 1
        cluster.create(card_pod("over", namespace))


def test_a_webhook_started_with_a_malformed_quota_waits_and_admits_pods_without_vcuda(
    cluster: Cluster, unchecked: QuotaConfigMap, tmp_path: Path
) -> None:
    unchecked.write(MALFORMED).ok()
    with ExitStack() as stack:
        own = stack.enter_context(running(cluster, tmp_path, quota=unchecked, patience=1))
        stack.enter_context(registered(own))
        namespace = stack.enter_context(own.free_team())
        own.replica.await_log("quota document malformed")
        assert own.replica.get("/readyz").status == HTTPStatus.SERVICE_UNAVAILABLE
        # Without a valid quota, the webhook knows no GPU resources. The API server calls it for this pod because of an
        # annotation, and it admits the pod. A pod that requests a resource with a slash in its name is rejected,
        # because the quota may define the resource as a GPU unit.
        cluster.create(gpu_pod("web", namespace, {"cpu": "1"}, annotations={"example.com/gpu": "none"}))
        rejected = cluster.try_create(card_pod("train", namespace))
        assert rejected.status == HTTPStatus.INTERNAL_SERVER_ERROR
        assert 'failed calling webhook "validate.quota.vcuda.io"' in rejected.message
        unread = "this replica has not read a quota, because the quota ConfigMap is malformed"
        own.replica.await_log("not answered", lambda line: line["reason"] == unread)
        own.quota.limit_anew(**{namespace: {"quota": {"M40": 1}}})
        await_ready(own)
        cluster.create(card_pod("train", namespace))
