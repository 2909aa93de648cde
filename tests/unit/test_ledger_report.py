"""Tests of the usage report of a namespace."""

import msgspec
import pytest

from tests.builders import LABELS, MODEL, nodes
from vcuda.allocations.stored_pods import StoredPod
from vcuda.ledger.ledger import FULL, LOST, Ledger, Pending, Reservation, Terminating
from vcuda.ledger.report import FULL_WARNING, MAX_REPORTED_PODS, ModelUse, NamespaceUse, PodUse, report
from vcuda.placement.nodes import Nodes
from vcuda.quota.model import Charge, Limit, Mode, NamespaceQuota

ONE_CARD = Charge(100, 0, 100)
LIMITED = NamespaceQuota({"M40": Limit(800), "P100": Limit(250, 1000)})


def holder(
    name: str, charge: Charge = ONE_CARD, model: str | None = "M40", node: str = "", live: bool = True
) -> StoredPod:
    return StoredPod(f"uid-{name}", "team-a", name, model, node, live, charge, "")


def used(ledger: Ledger, *pods: StoredPod, quota: NamespaceQuota = LIMITED, at: Nodes | None = None) -> NamespaceUse:
    return report("team-a", quota, ledger, pods, at or Nodes(LABELS))


def test_the_report_of_a_namespace_that_uses_nothing_has_its_limits() -> None:
    assert used(Ledger()) == NamespaceUse(
        "team-a",
        "enforce",
        (
            ModelUse("M40", limit=8, used=0, pending=0, available=8),
            ModelUse("P100", limit=2.5, used=0, pending=0, available=2.5, memory_limit=1000, memory_used=0),
        ),
    )


def test_used_includes_terminating_charges() -> None:
    [m40, _] = used(Ledger({"M40": ONE_CARD}, terminating={"a": Terminating("M40", ONE_CARD, 30)})).models
    assert (m40.used, m40.terminating, m40.available) == (2, 1, 6)


def test_reserved_cards_are_neither_used_nor_available() -> None:
    """When a charge that was admitted from a reservation is written, it is pending, and counts as used."""
    reserved = {
        "replica-1": Reservation({"M40": Charge(150), "P100": Charge(50, 300)}, 1),
        "replica-2": Reservation({"M40": Charge(50)}, 7),
    }
    ledger = Ledger({"M40": ONE_CARD}, "7", {"a": Pending("M40", ONE_CARD)}, reserved=reserved)
    m40, p100 = used(ledger).models
    assert (m40.used, m40.pending, m40.reserved, m40.available) == (2, 1, 2, 4)
    assert (p100.used, p100.reserved, p100.available) == (0, 0.5, 2)
    assert (p100.memory_used, p100.memory_reserved, p100.memory_available) == (0, 300, 700)


def test_without_an_open_ledger_all_unused_cards_are_reserved() -> None:
    use = used(Ledger({"M40": ONE_CARD}, reserved={LOST: Reservation({}, 5)}))
    m40, p100 = use.models
    assert use.ledger_lost
    assert (m40.used, m40.reserved, m40.available) == (1, 7, 0)
    assert (p100.reserved, p100.available, p100.memory_reserved, p100.memory_available) == (2.5, 0, 1000, 0)


def test_a_namespace_that_counts_as_full_has_no_free_cards_and_uses_no_more_than_its_pods() -> None:
    """The ledger of a namespace that counts as full has a charge that is larger than every cluster."""
    full = {f"{model}{FULL}600": Terminating(model, Charge(10**7, 10**9), 600) for model in ("M40", "P100")}
    use = used(Ledger({"M40": ONE_CARD}, terminating={**full, "a": Terminating("M40", ONE_CARD, 30)}))
    m40, p100 = use.models
    assert (m40.used, m40.terminating, m40.reserved, m40.available) == (2, 1, 6, 0)
    assert (p100.used, p100.reserved, p100.available, p100.memory_used, p100.memory_reserved) == (0, 2.5, 0, 0, 1000)
    assert (use.ledger_lost, use.warnings) == (False, (FULL_WARNING,))


def test_used_and_reserved_memory_add_up_to_the_charge() -> None:
    """The memory of whole cards must be rounded up once, for the used and the reserved cards together."""
    quota = NamespaceQuota({"P100": Limit(300, 1000)})
    ledger = Ledger({"P100": Charge(100, 0, 100)}, reserved={"replica": Reservation({"P100": Charge(100, 0, 100)}, 1)})
    [p100] = used(ledger, quota=quota).models
    assert (p100.memory_used, p100.memory_reserved, p100.memory_available) == (334, 333, 333)


def test_over_the_limit_nothing_is_available() -> None:
    """The usage may exceed the limit if the mode is not enforce, or if the limit was lowered."""
    assert used(Ledger({"M40": Charge(900)})).models[0].available == 0


def test_a_model_that_is_used_without_a_limit_is_listed_last() -> None:
    models = used(Ledger({"A100": ONE_CARD}), holder("old", model="A100")).models
    assert [model.model for model in models] == ["M40", "P100", "A100"]
    assert models[2] == ModelUse("A100", limit=0, used=1, pending=0, available=0, pods=(PodUse("old", 100, 0),))


def test_the_order_is_that_of_the_quota() -> None:
    quota = NamespaceQuota({"Z": Limit(100), "A": Limit(100)})
    assert [model.model for model in used(Ledger({"A": ONE_CARD, "Z": ONE_CARD}), quota=quota).models] == ["Z", "A"]


@pytest.mark.parametrize("mode", Mode)
def test_the_report_has_the_mode_of_the_quota(mode: Mode) -> None:
    assert used(Ledger(), quota=NamespaceQuota({}, mode=mode)) == NamespaceUse("team-a", mode.value, ())


def test_pods_are_listed_by_their_model_largest_first() -> None:
    charges = {"c": Charge(50, 100), "b": Charge(50, 100), "a": Charge(50, 10), "d": Charge(200, 0, 200)}
    pods = [holder(name, charge) for name, charge in charges.items()]
    models = used(Ledger(), *pods, holder("elsewhere", model="P100")).models
    assert [[pod.name for pod in model.pods] for model in models] == [["d", "b", "c", "a"], ["elsewhere"]]


def test_a_pod_that_is_not_pinned_is_listed_by_its_nodes_model() -> None:
    at = nodes(**{"gpu-1": {MODEL: "P100"}})
    use = used(Ledger(), holder("a", model=None, node="gpu-1"), at=at)
    assert [pod.name for pod in use.models[1].pods] == ["a"]
    assert use.unpinned == ()


def test_pods_without_a_known_model_are_listed_separately() -> None:
    use = used(Ledger(), holder("b", model=None), holder("a", model=None, node="gone"))
    assert use.unpinned == ("a", "b")
    assert all(model.pods == () for model in use.models)


def test_only_models_that_a_quota_or_a_node_names_are_in_the_report() -> None:
    """In modes warn and audit, the 512 pending charges can have 512 invented models."""
    charges = {model: Pending(model, ONE_CARD) for model in ("named", "on-a-node", "invented")}
    at = msgspec.structs.replace(nodes(**{"gpu-1": {MODEL: "on-a-node"}}), limited=frozenset({"M40", "named"}))
    use = used(Ledger(pending=charges), holder("a", model="invented", node="gpu-1"), holder("b", model="named"), at=at)
    assert [model.model for model in use.models] == ["M40", "P100", "named", "on-a-node"]
    assert [[pod.name for pod in model.pods] for model in use.models] == [[], [], ["b"], ["a"]]


@pytest.mark.parametrize("model", ["M40", None])
def test_a_pod_that_has_ended_uses_nothing(model: str | None) -> None:
    assert used(Ledger(), holder("a", model=model, live=False)) == used(Ledger())


def test_a_published_report_stays_small_and_the_metrics_count_all() -> None:
    many = [holder(f"pod-{number:04}") for number in range(MAX_REPORTED_PODS + 7)]
    m40 = used(Ledger(), *many).models[0]
    assert (len(m40.pods), m40.more_pods, m40.pods[-1].name) == (
        MAX_REPORTED_PODS,
        7,
        f"pod-{MAX_REPORTED_PODS - 1:04}",
    )
    unpinned = [msgspec.structs.replace(pod, model=None) for pod in many]
    whole = used(Ledger(), *unpinned)
    published = whole.shortened()
    assert (len(whole.unpinned), whole.more_unpinned) == (MAX_REPORTED_PODS + 7, 0)
    assert (len(published.unpinned), published.more_unpinned) == (MAX_REPORTED_PODS, 7)
