"""Whom the nudger takes for an owner that was refused."""

from __future__ import annotations

import pytest

from controller.retrier import Nudger
from tests.api_double import ApiDouble
from tests.builders import LABELS
from vcuda.kube import NodeInformer, QuotaInformer, QuotaPlace
from vcuda.quota.model import OVER_QUOTA

JOB = {"metadata": {"name": "train"}, "spec": {"parallelism": 1}, "status": {}}


@pytest.mark.parametrize(
    ("name", "found"),
    [
        pytest.param("train", ["/apis/batch/v1/namespaces/team-a/jobs/train"], id="its own"),
        pytest.param("gone", [], id="one that is gone"),
        pytest.param("../../team-b/jobs/train", [], id="a way to another namespace"),
        pytest.param("..", [], id="a way up"),
        pytest.param("", [], id="none"),
    ],
)
def test_an_event_leads_to_an_owner_in_its_namespace_or_to_none(api: ApiDouble, name: str, found: list[str]) -> None:
    """Tenants write Events too, and the leader asks with rights of its own."""
    for namespace in ("team-a", "team-b"):
        api.store(f"/apis/batch/v1/namespaces/{namespace}/jobs/train", JOB)
    event = {
        "involvedObject": {"kind": "Job", "name": name},
        "message": f"{OVER_QUOTA}: M40",
        "metadata": {"name": "e"},
    }
    api.store("/api/v1/namespaces/team-a/events/e", event)
    nodes = NodeInformer(api.kube, LABELS)
    nudger = Nudger(api.kube, QuotaInformer(api.kube, QuotaPlace(), frozenset()), nodes)
    assert [each.path for each in nudger._by_event("team-a")] == found
    asked = ["GET"] if name in ("train", "gone") else []
    assert api.calls == ["LIST", *asked]
