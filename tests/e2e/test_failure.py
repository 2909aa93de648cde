"""Tests of failures. No failure makes the system admit a pod beyond the quota, and the system recovers by itself."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster, Json
from tests.e2e.installation import Installation, await_ready, registered, running, tenant_of
from tests.e2e.lossy_proxy import Losses, lossy_proxy
from tests.e2e.rest import Answer
from tests.e2e.workloads import workload
from tests.integration.reviews import card_pod, pinned, review_of, with_uid
from tests.processes import eventually
from tools.control_plane import ControlPlane
from vcuda.quota.rejections import UNPATCHED
from webhook.caches import SKIPPED_SECONDS

pytestmark = pytest.mark.one_version

Team = Callable[[Json], str]


def forged(namespace: str, **fields: Json) -> Json:
    """Return a pod that its user has pinned to a model. ``fields``: fields that /mutate would remove."""
    pod = pinned(card_pod("forged", namespace))
    return {**pod, **{part: {**pod[part], **more} for part, more in fields.items()}}


def told_why(events: list[Json]) -> bool:
    return any(UNPATCHED in event["message"] for event in events)


def test_a_client_that_retries_gets_its_pod_once_mutate_answers_and_after_30_s_the_cause(
    cluster: Cluster, tmp_path: Path
) -> None:
    """kubectl repeats a request after a 429 with Retry-After, but not after a 403."""
    with (
        running(cluster, tmp_path) as own,
        own.team({"quota": {"M40": 8}}) as namespace,
        ThreadPoolExecutor() as threads,
    ):
        await_ready(own)
        pod = json.dumps(card_pod("retried", namespace))
        with cluster.register_webhooks(validating=own.validating()):
            created = threads.submit(cluster.kubectl, "create", "-f", "-", stdin=pod)
            own.replica.await_metric("vcuda_admissions_total", 1, outcome="not-mutated")
            with cluster.register_webhooks(mutating=own.mutating()):
                created.result()
            assert own.charged(namespace) == {"M40": 100}
            floating = card_pod("floating", namespace)
            rejected = eventually_rejected(lambda: cluster.try_create(floating))
            assert "so its registration is probably missing or wrong" in rejected.message


def eventually_rejected(create: Callable[[], Answer]) -> Answer:
    """Return the first answer that clients do not repeat."""

    def final() -> Answer | None:
        answer = create()
        assert answer.body["kind"] != "Pod"
        return answer if answer.status == HTTPStatus.FORBIDDEN else None

    found = eventually(final, timeout=2 * SKIPPED_SECONDS)
    assert found
    return found


@pytest.mark.usefixtures("controller_manager")
def test_no_pod_bypasses_mutate_while_it_is_down_and_workloads_continue_afterwards(
    cluster: Cluster, tmp_path: Path
) -> None:
    """By failurePolicy Ignore, the API server ignores a timeout of /mutate, and a tenant can cause one."""
    with (
        running(cluster, tmp_path) as own,
        own.team({"quota": {"M40": 8}}) as namespace,
        tenant_of(cluster, namespace) as tenant,
    ):
        await_ready(own)
        with cluster.register_webhooks(validating=own.validating()):
            for pod, what in (
                (forged(namespace, spec={"nodeName": "gpu-m40"}), "spec.nodeName is set"),
                (forged(namespace, metadata={"annotations": {"tencent.com/predicate-time": "1"}}), "predicate-time"),
                (forged(namespace, metadata={"labels": {"nvidia.com/assigned-phase": "x"}}), "assigned-phase"),
                (card_pod("floating", namespace), "must restrict the pod to one GPU model"),
            ):
                rejected = tenant.try_create(pod)
                assert rejected.status == HTTPStatus.TOO_MANY_REQUESTS
                assert UNPATCHED in rejected.message
                assert what in rejected.message
            tenant.create(workload("ReplicaSet", namespace))
            cluster.await_events(namespace, "reason=FailedCreate", told_why)
            assert own.charged(namespace) == {}
            with cluster.register_webhooks(mutating=own.mutating()):
                cluster.await_pods(namespace, lambda pods: len(pods) == 1)
        assert own.charged(namespace) == {"M40": 100}


def test_a_webhook_recovers_by_itself_after_its_api_server_was_down(
    cluster: Cluster, control_plane: ControlPlane, installation: Installation, team: Team
) -> None:
    namespace, untouched = team({"quota": {"M40": 2}}), team({"quota": {"M40": 2}})
    cluster.create(card_pod("before", namespace))
    with control_plane.apiserver.away(control_plane.apiserver.kill):
        unsure = installation.replica.review("/validate", with_uid(pinned(card_pod("meanwhile", namespace))))
        assert (unsure["allowed"], unsure["status"]["code"]) == (False, HTTPStatus.TOO_MANY_REQUESTS)
        review = review_of(with_uid(pinned(card_pod("meanwhile", untouched))))
        unread = installation.replica.send("POST", "/validate", json.dumps(review))
        assert (unread.status, unread.headers["Retry-After"]) == (HTTPStatus.SERVICE_UNAVAILABLE, "1")
    cluster.create(card_pod("after", namespace))
    assert cluster.try_create(card_pod("over", namespace)).is_over_quota
    assert installation.charged(namespace) == {"M40": 200}
    # This call returns when the webhook's watch has shown the edit of the quota.
    installation.quota.limit(**{namespace: {"quota": {"M40": 3}}})
    cluster.create(card_pod("over", namespace))


Lossy = tuple[Installation, Losses]


@pytest.fixture
def lossy(cluster: Cluster, tmp_path: Path) -> Iterator[Lossy]:
    """A webhook whose calls of the API server may lose replies: those that a test adds to ``losses.wanted``."""
    losses = Losses()
    with (
        lossy_proxy(cluster, tmp_path / "proxy", losses) as kubeconfig,
        running(cluster, tmp_path / "certs", kubeconfig=kubeconfig) as own,
        registered(own),
    ):
        yield own, losses


def test_a_charge_whose_reply_was_lost_is_found_again_and_counts_once(cluster: Cluster, lossy: Lossy) -> None:
    own, losses = lossy
    with own.team({"quota": {"M40": 2}}) as namespace:
        # The webhook creates two ConfigMaps: the ledger, and the record that the namespace had a ledger.
        opening = [("POST", "/configmaps"), ("POST", "/configmaps")]
        written = [("PUT", f"/gpu-ledger-{namespace}")]
        for pod, lost in (("first", [*opening, *written]), ("second", written)):
            losses.wanted.extend(lost)
            cluster.create(card_pod(pod, namespace))
        assert [method for method, _ in losses.lost] == ["POST", "POST", "PUT", "PUT"]
        assert own.charged(namespace) == {"M40": 200}
        assert own.ledger(namespace).pending.keys() == {pod["metadata"]["uid"] for pod in cluster.pods(namespace)}
