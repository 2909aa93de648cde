"""Tests of the leader's data on the usage page, and of the text that a standby shows."""

import threading
from dataclasses import replace

import msgspec

from controller.ui.document import Holder, ModelCards
from controller.ui.leading import SERVICE, UsagePage, advertising, claim_rows, cluster_cards, placed_charges, pod_rows
from examples.claims import NVIDIA, claim_policy
from examples.usage import Sample, model_use, namespace_use
from tests.api_double import ApiDouble, Effect
from tests.builders import MODEL, nodes
from tests.extended import SYSTEM
from tests.waiting import PATIENT
from vcuda.allocations.stored_claims import ClaimCharge, StoredClaim
from vcuda.allocations.stored_pods import StoredPod
from vcuda.claims.digest import ClaimDigest, pack
from vcuda.claims.objects import AllocatedDevice
from vcuda.quota.model import Charge, Limit, NamespaceQuota

AT = nodes(**{"gpu-1": {MODEL: "P100"}})


def pod(name: str, charge: Charge, model: str | None = "M40", node: str = "", live: bool = True) -> StoredPod:
    return StoredPod(f"uid-{name}", "team-a", name, model, node, live, charge, "2026-01-01T00:00:00Z")


def test_a_pod_is_shown_with_its_charge_under_the_namespace_s_limit() -> None:
    """A whole card is shown with its share of the namespace's memory limit."""
    quota = NamespaceQuota({"M40": Limit(400, 4000)})
    pods = [pod("whole", Charge(100, 0, 100)), pod("share", Charge(50, 300)), pod("ended", Charge(100), live=False)]
    assert list(pod_rows(pods, quota, AT)) == [
        Holder("pod", "whole", "M40", 1, 1000, "", "2026-01-01T00:00:00Z"),
        Holder("pod", "share", "M40", 0.5, 300, "", "2026-01-01T00:00:00Z"),
    ]


def test_a_pod_that_is_not_pinned_has_its_nodes_model_or_none() -> None:
    rows = pod_rows([pod("a", Charge(100), None, "gpu-1"), pod("b", Charge(100), None, "gone")], None, AT)
    assert [row.model for row in rows] == ["P100", None]


def test_a_claim_is_shown_once_for_each_model_with_the_node_of_its_device() -> None:
    devices = claim_policy().devices
    allocated = (AllocatedDevice("r0", NVIDIA, "new", "gpu-0"),)
    held, free = (
        StoredClaim(name, "team-a", name, pack(ClaimDigest()), given, "2026-01-01T00:00:00Z")
        for name, given in (("held", allocated), ("free", ()))
    )
    both = ClaimCharge({"A100": Charge(100, 0, 100), "M40": Charge(50, 300)}, "A100")
    quota = NamespaceQuota({"A100": Limit(400, 4000)})
    claims = [(held, both), (free, ClaimCharge(uncounted=True)), (free, ClaimCharge())]
    assert list(claim_rows(claims, quota, devices)) == [
        Holder("claim", "held", "A100", 1, 1000, "new", "2026-01-01T00:00:00Z"),
        Holder("claim", "held", "M40", 0.5, 300, "new", "2026-01-01T00:00:00Z"),
        Holder("claim", "free", None, 0, 0, "", "2026-01-01T00:00:00Z"),
    ]


def test_the_cluster_counts_limited_namespaces_by_their_reports_and_the_rest_by_their_pods() -> None:
    uses = {"team-a": namespace_use("team-a", model_use("M40", 8, 3.5, 1), model_use("P100", 2))}
    free = [pod("x", Charge(50), node="gpu-1"), pod("y", Charge(25), None, "gpu-1"), pod("z", Charge(100), live=False)]
    assert cluster_cards({"M40": 16, "A100": 4, "P100": None}, uses, placed_charges(free, [], AT)) == [
        ModelCards("A100", 4, 0, 0),
        ModelCards("M40", 16, 4, 8),
        ModelCards("P100", None, 0.25, 2),
    ]


def test_a_limit_above_the_total_of_its_namespace_counts_as_the_total() -> None:
    models, together = (model_use("M40", 8), model_use("P100", 2)), model_use("total", 6)
    uses = {"team-a": replace(namespace_use("team-a", *models), total=together), "b": namespace_use("b", models[0])}
    assert [(each.model, each.limits) for each in cluster_cards({}, uses, [])] == [("M40", 6 + 8), ("P100", 2)]


def test_pods_and_claims_that_no_quota_bounds_use_no_cards_before_they_are_placed() -> None:
    """If such pods and claims counted, one user without an enforced quota could make all cards look used."""
    huge = Charge(10**9, 0, 10**9)
    uses = {"warned": namespace_use("warned", model_use("M40", 4, 10**7), mode="warn")}
    claim = StoredClaim("c", "team-b", "c", pack(ClaimDigest()))
    held = msgspec.structs.replace(claim, allocated=(AllocatedDevice("r0", NVIDIA, "new", "gpu-0"),))
    pods = [pod("waits", huge), pod("nowhere", huge, node="gone"), pod("runs", Charge(100), node="gpu-1")]
    claims = [(claim, ClaimCharge({"M40": huge})), (held, ClaimCharge({"M40": Charge(50)}))]
    assert cluster_cards({"M40": 16}, uses, placed_charges(pods, claims, AT)) == [ModelCards("M40", 16, 1.5, 4)]


def test_there_may_be_no_leader() -> None:
    assert "There is no leader" in str(UsagePage(lambda: "").standing())


def test_a_replica_is_a_standby_until_it_leads_and_has_listed_everything() -> None:
    ready = [False]
    page, documents = UsagePage(lambda: "pod-7"), Sample().documents()
    standby = "This replica of the controller is a standby. The leader is pod-7."
    assert page.standing() == standby
    with page.showing(documents, lambda: ready[0]):
        assert "still reading the cluster" in str(page.standing())
        ready[0] = True
        assert page.standing() is documents
    assert page.standing() == standby


def test_the_service_routes_here_until_the_leader_ends_and_then_to_the_next_one(api: ApiDouble) -> None:
    path = f"/apis/discovery.k8s.io/v1/namespaces/{SYSTEM}/endpointslices/{SERVICE}"
    written = threading.Semaphore(0)

    def deliver(method: str, _timeout: float, effect: Effect) -> bytes:
        answer = effect()
        if method != "GET":
            written.release()
        return answer

    api.deliver = deliver
    for ip in ("10.0.0.1", "10.0.0.2"):
        with advertising(api.kube, SYSTEM, (ip, 8088)):
            assert written.acquire(timeout=PATIENT)
            assert api.objects[path]["endpoints"] == [{"addresses": [ip], "conditions": {"ready": True}}]
        assert "page endpointslice" not in {thread.name for thread in threading.enumerate()}
    assert api.objects[path]["ports"] == [{"name": "http", "port": 8088}]
