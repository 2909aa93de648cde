"""Tests of a grant (additional quota for a limited time) on a real cluster.

When the grant begins, a rejected workload runs. When the grant ends, no more pods are admitted.
"""

import datetime
import json
import time
from http import HTTPStatus

import pytest

from tests.e2e.cluster import Cluster, Json
from tests.e2e.installation import Installation, limited_team
from tests.e2e.ledgers import await_committed
from tests.e2e.workloads import was_told, workload
from tests.integration.reviews import card_pod

pytestmark = [
    pytest.mark.slow,
    pytest.mark.one_version,
    pytest.mark.usefixtures("controller_manager", "controller", "m40"),
]

ZONE = "Asia/Tokyo"
BEGINS_AFTER, LASTS = 12, 20
"""Seconds until the grant begins, and the duration of the grant in seconds."""


def local_time(moment: float) -> str:
    """Return a moment as local time in `ZONE`, nine hours ahead of UTC."""
    clock = datetime.datetime.fromtimestamp(moment, datetime.timezone(datetime.timedelta(hours=9)))
    return clock.replace(tzinfo=None).isoformat(timespec="seconds")


def dated(begin: float) -> Json:
    grant = {"M40": 2, "from": local_time(begin), "until": local_time(begin + LASTS), "why": "e2e"}
    return {"quota": {"M40": 1}, "time_zone": ZONE, "grants": [grant]}


def await_usage(cluster: Cluster, namespace: str, limit: float) -> Json:
    def m40_of(found: Json) -> Json:
        [m40] = [model for model in json.loads(found["data"]["usage.json"])["models"] if model["model"] == "M40"]
        return dict(m40)

    path = f"/api/v1/namespaces/{namespace}/configmaps"
    return m40_of(cluster.await_object(path, "gpu-quota-usage", lambda found: m40_of(found)["limit"] == limit, 60))


def created(pod: Json) -> float:
    return datetime.datetime.fromisoformat(pod["metadata"]["creationTimestamp"]).timestamp()


def holds_two(pods: list[Json]) -> bool:
    return len(pods) == len(("holder", "train"))


def test_a_rejected_deployment_runs_during_a_grant_and_nothing_is_admitted_after_its_end(
    cluster: Cluster, installation: Installation
) -> None:
    with limited_team(installation, {"quota": {"M40": 1}}) as namespace:
        cluster.create(card_pod("holder", namespace))
        await_committed(installation, namespace, M40=100)
        begin = float(int(time.time()) + BEGINS_AFTER)
        installation.quota.limit(**{namespace: dated(begin)})

        # Before the grant begins, the webhook rejects the Deployment's pods, and its ReplicaSet retries less often.
        cluster.create(workload("Deployment", namespace))
        cluster.await_events(namespace, "reason=FailedCreate")
        assert time.time() < begin

        # When the grant begins, the controller makes the ReplicaSet retry, and the webhook admits the pod.
        during = await_usage(cluster, namespace, 3)
        [train] = [pod for pod in cluster.await_pods(namespace, holds_two) if pod["metadata"]["name"] != "holder"]
        assert begin <= created(train) < begin + LASTS
        [owner] = cluster.rest.get(f"/apis/apps/v1/namespaces/{namespace}/replicasets")["items"]
        assert was_told(owner)
        [grant] = during["grants"]
        assert (grant["cards"], grant["until"], grant["why"]) == (2, f"{local_time(begin + LASTS)}+09:00", "e2e")
        [announced, *_] = cluster.await_events(namespace, "reason=GrantEnds")
        assert announced["involvedObject"]["name"] == train["metadata"]["name"]

        # When the grant ends, both pods stay, so the usage is above the limit. Another pod is rejected.
        after = await_usage(cluster, namespace, 1)
        assert time.time() >= begin + LASTS
        assert (after["used"], after["grants"]) == (2, [])
        rejected = cluster.try_create(card_pod("late", namespace))
        assert rejected.status == HTTPStatus.FORBIDDEN
        assert "used: 2 (0 pending), limited: 1" in rejected.message
        assert holds_two(cluster.pods(namespace))
