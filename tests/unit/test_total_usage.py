"""Tests of the usage of all GPU models together: reports, tables, metrics, retries and violations."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from prometheus_client import CollectorRegistry

from controller.metrics import UsageCollector
from controller.recount.publisher import limits_of
from controller.retry.rejected import Owner
from controller.retry.retrier import ALL_MODELS, FreeQuota, has_free_cards, record_free
from controller.violations.violations import find_violations
from tests.gpuquota import Cluster, run
from tests.tables import cases
from tests.unit.test_ledger_report import holder, used
from tests.unit.test_plugin_rejections import DENIED, event, store
from tests.unit.test_plugin_why import deployment
from tests.unit.test_retrier import HALF, ONE, TWO, chosen, owner
from tests.unit.test_violations import AT, found, over, pod
from vcuda.allocations.stored_pods import StoredPod
from vcuda.errors import ApiError
from vcuda.ledger.ledger import LOST, Ledger, Pending, Reservation, Terminating
from vcuda.ledger.report import ModelUse, NamespaceUse
from vcuda.quota.model import Charge, Limit, NamespaceQuota, Usage
from vcuda.quota.shortage import Shortage, exceeded

CARD = Charge(100, 0, 100)
QUOTA = NamespaceQuota({"M40": Limit(800), "P100": Limit(800)}, total=Limit(1000))

# Tests of the report


def test_the_usage_of_all_models_together_is_reported() -> None:
    ledger = Ledger(
        {"M40": Charge(150), "P100": Charge(50)},
        pending={"a": Pending("P100", CARD)},
        terminating={"b": Terminating("M40", CARD, 30)},
        reserved={"replica": Reservation({"M40": Charge(200), "P100": Charge(50)}, 1)},
    )
    use = used(ledger, quota=QUOTA)
    assert use.total == ModelUse("total", limit=10, used=4, pending=1, available=3.5, terminating=1, reserved=2.5)
    assert used(ledger).total is None


def test_without_an_open_ledger_all_unused_cards_of_the_total_are_reserved() -> None:
    use = used(Ledger({"M40": CARD}, reserved={LOST: Reservation({}, 5)}), quota=QUOTA)
    assert use.total
    assert (use.total.used, use.total.reserved, use.total.available) == (1, 9, 0)
    assert [each.available for each in use.models] == [0, 0]


@cases(
    "stored, has_room",
    much=(({"M40": 500}, []), True),
    a_tenth=(({"M40": 500, "P100": 400}, []), True),
    less_than_a_tenth=(({"M40": 500, "P100": 401}, []), False),
    less_than_the_largest_pod=(({"M40": 400, "P100": 400}, [holder("big", Charge(300))]), False),
)
def test_a_namespace_near_its_total_has_no_room(
    stored: tuple[dict[str, int], Sequence[StoredPod]], *, has_room: bool
) -> None:
    """A ledger without room is recounted more often, because pods may wait for quota."""
    ledger = Ledger({model: Charge(cores) for model, cores in stored[0].items()})
    assert used(ledger, *stored[1], quota=QUOTA).has_room is has_room


def test_a_changed_total_is_published_at_once() -> None:
    use = used(Ledger(), quota=QUOTA)
    raised = used(Ledger(), quota=NamespaceQuota(QUOTA.limits, total=Limit(1100)))
    assert limits_of(use) == limits_of(used(Ledger({"M40": CARD}), quota=QUOTA))
    assert len({repr(limits_of(each)) for each in (use, raised, replace(use, total=None))}) == 3


def test_the_metrics_have_the_total_of_each_namespace_that_has_one() -> None:
    uses = {"a": used(Ledger({"M40": CARD, "P100": CARD}), quota=QUOTA), "b": used(Ledger({"M40": CARD}))}
    registry = CollectorRegistry()
    registry.register(UsageCollector(lambda: uses, dict))
    figures = [
        registry.get_sample_value(f"vcuda_quota_total_{name}_cards", {"namespace": namespace})
        for namespace in uses
        for name in ("limit", "used")
    ]
    assert figures == [10, 2, None, None]
    assert registry.get_sample_value("vcuda_quota_used_cards", {"namespace": "a", "model": "total"}) is None


# Tests of the plugin

FIGURES = {"pending": 0, "available": 3}
M40 = {"model": "M40", "limit": 8, "used": 5, **FIGURES}
P100 = {"model": "P100", "limit": 8, "used": 2, "pending": 0, "available": 6}
TOTAL = {"model": "total", "limit": 10, "used": 7, **FIGURES}


def publish(cluster: Cluster, *, held: Sequence[str] = ()) -> None:
    pods = [{"name": name, "cores": 100 * int(name[-1]), "memory": 0} for name in held]
    models = [{**M40, "pods": pods[:1]}, {**P100, "pods": pods[1:]}]
    use = {"namespace": "team-a", "mode": "enforce", "models": models, "total": TOTAL}
    cluster.publish("team-a", text=json.dumps(use))


def test_the_table_has_a_row_for_all_models_together(cluster: Cluster) -> None:
    publish(cluster)
    assert run("-n", "team-a").stdout.splitlines()[1:] == [
        "team-a     M40    5     3     8      [############--------]  0",
        "team-a     P100   2     6     8      [#####---------------]  0",
        "team-a     total  7     3     10     [##############------]  0",
    ]
    [shown] = json.loads(run("-n", "team-a", "-o", "json").stdout)
    assert (shown["total"]["limit"], shown["total"]["used"]) == (10, 7)


@cases(
    "asked, needed, told",
    not_now=(400, 1, "1 card of any GPU model must become free before the request fits"),
    never=(1100, None, "the request for any GPU model is larger than the limit, so it never fits, even if other pods"),
)
def test_why_names_the_pods_of_all_models_if_the_total_is_used_up(
    cluster: Cluster, asked: int, needed: float | None, told: str
) -> None:
    deployment(cluster)
    publish(cluster, held=["of-2", "of-3", "of-1"])
    over_ = exceeded("team-a", Shortage("M40", Charge(asked), Usage(Charge(700)), Limit(1000), of_total=True))
    store(cluster, event(1, DENIED + over_, name="train-abc"))
    cluster.rejection = ApiError(403, over_)
    [missing] = json.loads(run("-n", "team-a", "why", "deploy/train", "-o", "json").stdout)["missing"]
    assert (missing["model"], missing["needed"]) == ("total", needed)
    assert [each["name"] for each in missing["held_by"]] == (["of-3", "of-2", "of-1"] if needed else [])
    assert told in run("-n", "team-a", "why", "deploy/train").stdout


# Tests of the retries of rejected workloads


@cases(
    "free, owners, tries",
    no_more_than_total=({"M40": 800, ALL_MODELS: 200}, [owner(missing=2), owner(missing=2)], [0]),
    a_smaller_one_behind_a_large_one=({"M40": 800, ALL_MODELS: 150}, [owner(TWO), owner(ONE)], [1]),
    of_two_models=({"M40": 100, "P100": 800, ALL_MODELS: 200}, [owner(ONE)] * 3, [0, 1]),
    none_is_free=({"M40": 800, ALL_MODELS: 0}, [owner(HALF)], []),
    no_total=({"M40": 200}, [owner(ONE)] * 3, [0, 1]),
)
def test_no_more_pods_are_retried_than_the_total_has_room_for(
    free: dict[str, int | FreeQuota], owners: Sequence[Owner], tries: list[int]
) -> None:
    assert chosen(free, *owners) == tries
    assert has_free_cards({model: FreeQuota(room) for model, room in free.items()}) is bool(tries)  # type: ignore[arg-type]  # all rooms here are numbers


def reported(free: float, total: float | None) -> NamespaceUse:
    in_total = None if total is None else ModelUse("total", 100, 100 - total, 0, total)
    return NamespaceUse("team-a", "enforce", (ModelUse("M40", 200, 200 - free, 0, free),), total=in_total)


@cases(
    "before, after, retried",
    total_has_grown=((5, 0), (5, 1), True),
    total_was_removed=((5, 0), (5, None), True),
    total_was_added=((5, None), (5, 5), True),
    nothing_has_grown=((5, 2), (5, 1), False),
    no_model_has_free_cards=((0, 0), (0, 1), False),
)
def test_rejected_workloads_are_retried_when_the_total_has_room(
    before: tuple[float, float | None], after: tuple[float, float | None], *, retried: bool
) -> None:
    recorded: dict[str, Mapping[str, FreeQuota]] = {}
    record_free(recorded, "team-a", reported(*before))
    free, has_grown = record_free(recorded, "team-a", reported(*after))
    assert (has_grown and has_free_cards(free)) is retried


# Tests of violations

THREE = NamespaceQuota({"M40": Limit(200), "P100": Limit(300)}, total=Limit(300))


@cases(
    "pods, expected",
    within=([pod("a", 200, 2), pod("b", 100, 1, model="P100")], []),
    the_newest_of_any_model=([pod("a", 200, 2), pod("b", 200, 3, model="P100")], over("a")),
    beyond_the_limit_of_its_model_only=(
        [pod("a", 200, 4), pod("b", 100, 3, model="P100"), pod("c", 100, 2)],
        over("c"),
    ),
    beyond_its_model_and_beyond_total=(
        [pod("a", 200, 4), pod("b", 100, 3), pod("c", 100, 2, model="P100"), pod("d", 100, 1, model="P100")],
        over("d", "b"),
    ),
    of_a_model_that_is_not_allowed=(
        [pod("a", 200, 3, model="A100"), pod("b", 300, 2, model="P100")],
        [("a", "not-allowed")],
    ),
    terminating=([pod("a", 200, 2, terminating=True), pod("b", 300, 1, model="P100")], []),
    without_a_model=([pod("a", 300, 3, model="P100"), pod("b", 100, 1, model=None)], [("b", "unpinned")]),
)
def test_the_newest_pods_beyond_the_total_are_violations(
    pods: list[StoredPod], expected: list[tuple[str, str]]
) -> None:
    assert sorted(found(*pods, quota=THREE)) == sorted(expected)


def test_a_violation_of_total_names_the_total() -> None:
    pods = [pod("a", 200, 2), pod("b", 200, 1, model="P100"), pod("not-charged", model=None)]
    [violation] = [each for each in find_violations("team-a", THREE, pods, AT) if each.stored.name == "b"]
    figures = "used: 4 cards, limited: 3 cards; this pod takes 2 cards and does not fit with the older pods and claims"
    assert (violation.message, violation.evictable) == (f"beyond GPU quota: total in namespace team-a, {figures}", True)
