"""Tests of the retrier of rejected workloads. The oldest rejections come first, and only as many pods retry as fit."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from controller.retry import retrier as retries
from controller.retry.rejected import Owner, RejectedOwner
from controller.retry.retrier import (
    BUDGET_SECONDS,
    MODELS_DELAY_SECONDS,
    MODELS_INTERVAL_SECONDS,
    RETRY_ANNOTATION,
    FreeQuota,
)
from tests.api_double import ApiDouble, Effect
from tests.builders import LABELS, MODEL, container, held_to
from tests.quota_map import store_quota
from tests.tables import cases
from vcuda.kube import NodeInformer, QuotaInformer, QuotaSource
from vcuda.ledger.report import ModelUse, NamespaceUse
from vcuda.placement.nodes import Nodes
from vcuda.quota.model import Limit, NamespaceQuota
from vcuda.quota.rejections import OVER_QUOTA

QUOTA = NamespaceQuota({"M40": Limit(800), "P100": Limit(800)})
ONE, TWO = {"tencent.com/vcuda-core": 100}, {"tencent.com/vcuda-core": 200}
HALF = {"tencent.com/vcuda-core": 50, "tencent.com/vcuda-memory": 1}
NODES = Nodes(LABELS)


def owner(limits: Mapping[str, int] = ONE, missing: int = 1, **spec: Any) -> Owner:
    """Return a ReplicaSet that lacks ``missing`` pods of one container. ``spec``: more fields of its pod template."""
    template = {"spec": {"containers": [container(limits)], **spec}}
    return read({"spec": {"replicas": missing + 3, "template": template}, "status": {"replicas": 3}})


def read(manifest: Mapping[str, Any]) -> Owner:
    return msgspec.json.decode(msgspec.json.encode(manifest), type=Owner)


def rooms(free: Mapping[str, int | FreeQuota]) -> dict[str, FreeQuota]:
    """Return the free quota of each model. A plain number means free cores, with unlimited memory."""
    return {model: FreeQuota(room) if isinstance(room, int) else room for model, room in free.items()}


def chosen(free: Mapping[str, int | FreeQuota], *owners: Owner, quota: NamespaceQuota = QUOTA) -> list[int]:
    """Return the indexes of the owners that may retry. ``owners`` are ordered by the age of their rejections."""
    rejected = [RejectedOwner(str(index), f"2026-01-01T00:00:0{index}Z", each) for index, each in enumerate(owners)]
    in_order = retries.oldest_first(rejected[::-1])
    rooms_of = {"": retries.Room(rooms(free), quota.limits)}
    return [int(each.path) for each in retries.select_retries(in_order, {"": quota}, rooms_of, NODES)]


# Tests of the time at which a workload's pod was rejected


def failure(**fields: str | None) -> dict[str, str | None]:
    given = {"type": "ReplicaFailure", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    return {**given, "message": f'pods "a" is forbidden: {OVER_QUOTA}: M40 in namespace team-a', **fields}


# Tests of which owners (controllers of pods) may retry


HELD_M40, HELD_P100 = owner(affinity=held_to("M40")), owner(affinity=held_to("P100"))
SELECTS_P100 = owner(nodeSelector={MODEL: "P100"})


@cases(
    "free, owners, tries",
    the_oldest_first_and_no_more_than_fit=({"M40": 300}, [owner()] * 5, [0, 1, 2]),
    nothing_is_free=({"M40": 0}, [owner()], []),
    free_quota_unknown=({}, [owner()], []),
    by_the_number_of_missing_pods=({"M40": 300}, [owner(missing=2), owner(), owner()], [0, 1]),
    an_owner_that_needs_more_than_all=({"M40": 200}, [owner(missing=500), owner()], [0]),
    a_too_large_owner_delays_no_other=({"M40": 100}, [owner(TWO), owner()], [1]),
    a_smaller_owner_uses_the_rest=({"M40": 250}, [owner(TWO), owner(TWO), owner(HALF)], [0, 2]),
    an_owner_without_missing_pods=({"M40": 300}, [owner(missing=0), owner()], [1]),
    free_quota_of_an_unlisted_model=({"V100": 300}, [owner()], []),
    an_owner_without_a_GPU_request=({"M40": 300}, [owner({})], []),
    flexible_owners_use_all_models=({"M40": 200, "P100": 100}, [owner()] * 5, [0, 1, 2]),
    one_owner_uses_both_models=({"M40": 100, "P100": 100}, [owner(missing=2), owner()], [0]),
    a_flexible_owner_uses_its_first_model=({"M40": 100, "P100": 200}, [owner(), HELD_M40], [0]),
    a_pinned_owner_waits_for_its_model=({"M40": 800}, [HELD_P100, owner()], [1]),
    a_pinned_owner_uses_its_model=({"M40": 0, "P100": 100}, [HELD_P100, owner()], [0]),
    pinned_by_nodeSelector_no_room=({"M40": 800}, [SELECTS_P100, owner()], [1]),
    pinned_by_nodeSelector_with_room=({"M40": 0, "P100": 100}, [SELECTS_P100, owner()], [0]),
)
def test_the_oldest_owners_retry_first_and_no_more_than_fit(
    free: Mapping[str, int], owners: list[Owner], tries: list[int]
) -> None:
    assert chosen(free, *owners) == tries


def test_rejections_at_the_same_time_are_ordered_by_path() -> None:
    """If two rejections are equally old, each pass of the retrier must choose the same one first."""
    same = [RejectedOwner(path, "2026-01-01T00:00:00Z", owner()) for path in ("c", "a", "b")]
    assert [each.path for each in retries.oldest_first(same)] == ["a", "b", "c"]


def test_a_workload_retries_when_the_last_slice_of_a_card_is_free() -> None:
    """A seventh of a card is 14.28… hundredths of a card. The free quota is rounded down to 14 hundredths."""
    use = ModelUse("A100", limit=1, used=0.86, pending=0, available=0.14)
    slices = owner({"nvidia.com/mig-1g.5gb": 1}, missing=2)
    quota = NamespaceQuota({"A100": Limit(100)})
    assert chosen({"A100": FreeQuota.of(use)}, slices, slices, quota=quota) == [0]


def test_the_free_quota_is_not_modified() -> None:
    free = {"M40": FreeQuota(300)}
    left = {"": retries.Room(free, QUOTA.limits)}
    assert retries.select_retries([RejectedOwner("a", "", owner())], {"": QUOTA}, left, NODES)
    assert free == {"M40": FreeQuota(300)}


SHARE = {"nvidia.com/vcuda-core": 50, "nvidia.com/vcuda-memory": 600}


@pytest.mark.parametrize(
    ("limit", "room", "owners", "tries"),
    [
        pytest.param(Limit(800, 8000), FreeQuota(800, 1300), [owner(SHARE)] * 3, [0, 1], id="only as many as fit"),
        pytest.param(Limit(800, 8000), FreeQuota(800, 599), [owner(SHARE), owner()], [], id="none fits"),
        pytest.param(
            Limit(800, 8000),
            FreeQuota(800, 1000),
            [owner(SHARE), owner()],
            [0],
            id="whole cards by their share of memory",
        ),
        pytest.param(
            Limit(800, 8000), FreeQuota(800, 1000), [owner(TWO), owner()], [1], id="a smaller owner uses the rest"
        ),
        pytest.param(Limit(800), FreeQuota(800), [owner(SHARE)] * 3, [0, 1, 2], id="memory is not limited"),
        pytest.param(Limit(800, 0), FreeQuota(800, 0), [owner(SHARE)], [], id="a memory limit of 0"),
        # The limit is 7 cards with 100 MiB together, so one card is charged 14 2/7 MiB. Six cards use 85.7 MiB,
        # reported as 86. So only 14 MiB are reported as free, but the seventh card fits.
        pytest.param(Limit(700, 100), FreeQuota(100, 14), [owner()], [0], id="the last card despite rounding"),
    ],
)
def test_no_more_owners_retry_than_fit_in_memory(
    limit: Limit, room: FreeQuota, owners: list[Owner], tries: list[int]
) -> None:
    assert chosen({"M40": room}, *owners, quota=NamespaceQuota({"M40": limit})) == tries


@pytest.mark.parametrize(
    ("room", "other", "more"),
    [
        *((FreeQuota(*room), FreeQuota(1, 5), True) for room in ((2, 5), (1, 6), (1, None))),
        *((FreeQuota(*room), FreeQuota(1, 5), False) for room in ((1, 5), (1, 4))),
        (FreeQuota(1, 6), FreeQuota(2, 5), True),
        *((FreeQuota(*room), FreeQuota(1), False) for room in ((1, 5), (1, None))),
    ],
)
def test_there_is_more_room_if_any_model_has_more(room: FreeQuota, other: FreeQuota, more: bool) -> None:
    assert room.exceeds(other) is more


# Tests of owners whose pods were rejected


def store_event(
    api: ApiDouble, name: str, kind: str = "Job", message: str = f"{OVER_QUOTA}: M40 in namespace team-a"
) -> None:
    """Store an Event that reports a rejected pod. The Event names the pod's owner, by default a Job."""
    event = {"involvedObject": {"kind": kind, "name": name}, "message": message}
    path = f"/api/v1/namespaces/team-a/events/{len(api.objects)}"
    api.store(path, {**event, "metadata": {"name": path.rpartition("/")[2]}})


REPLICA_SETS = "/apis/apps/v1/namespaces/{}/replicasets"
REJECTED = {"spec": {"replicas": 1}, "status": {"conditions": [failure()]}}


class Retried:
    """A retrier for namespace team-a, with much free quota and some rejected workloads. The test sets its clock."""

    def __init__(self, api: ApiDouble, owners: int, tick: float = 0.0) -> None:
        self.api, self.now, self.tick = api, 0.0, tick
        for number in range(owners):
            self.add_owner(f"train-{number}")
        store_quota(api, "team-a: {quota: {M40: 200}}")
        quota = QuotaInformer(api.kube, QuotaSource(), frozenset())
        quota.reflector.relist()
        self.retrier = retries.Retrier(api.kube, quota, NodeInformer(api.kube, LABELS), self.clock)
        self.retrier.report("team-a", NamespaceUse("team-a", "enforce", (ModelUse("M40", 200, 0, 0, 200),)))
        self.queue = self.retrier.reconciler.queue
        assert self.queue.next() == "team-a"

    def add_owner(self, name: str) -> None:
        """Store a ReplicaSet. Its status condition, and no Event, reports that its pod was rejected."""
        spec = {"replicas": 1, "template": {"spec": {"containers": [container(ONE)]}}}
        path = f"{REPLICA_SETS.format('team-a')}/{name}"
        self.api.store(path, {**REJECTED, "metadata": {"name": name}, "spec": spec})

    def clock(self) -> float:
        self.now += self.tick
        return self.now

    def told(self) -> int:
        found = (each["metadata"].get("annotations", {}) for each in self.api.objects.values())
        return sum(RETRY_ANNOTATION in annotations for annotations in found)


def test_an_owner_that_cannot_be_judged_in_time_is_judged_in_a_later_pass(api: ApiDouble) -> None:
    """Each reading of the clock advances it by a fifth of the time that one pass may take."""
    retried = Retried(api, owners=40, tick=BUDGET_SECONDS / 5)
    for _ in range(20):
        before = retried.told()
        retried.retrier.reconciler.turn("team-a")
        assert retried.told() - before <= 6
    assert retried.told() == 40


def test_the_paths_of_deleted_owners_are_forgotten_while_some_owners_are_never_judged(api: ApiDouble) -> None:
    retried = Retried(api, owners=40, tick=BUDGET_SECONDS / 50)
    for turn in range(20):
        for path in [each for each in api.objects if "/replicasets/" in each][:35]:
            api.remove(path)
        for number in range(60):
            retried.add_owner(f"new-{turn}-{number}")
        retried.retrier.reconciler.turn("team-a")
        retried.now += 10
        assert retried.retrier._judged["team-a"] <= api.objects.keys()


def test_a_pass_without_rejections_is_one_list_and_sometimes_finds_owners_without_events(
    api: ApiDouble,
) -> None:
    """The Event of a rejected owner may have expired or was never written. So some passes also list owners."""
    retried = Retried(api, owners=0)

    def lists() -> int:
        before = len(api.calls)
        retried.retrier.reconciler.turn("team-a")
        return api.calls[before:].count("LIST")

    assert [lists() for _ in range(3)] == [3, 1, 1]
    retried.add_owner("silent")
    assert (lists(), retried.told()) == (1, 0)
    retried.now += retries.LISTED_EVERY_SECONDS
    assert (lists(), retried.told()) == (3, 1)
    assert lists() == 2, "expected LISTs while a workload is rejected"


def test_an_event_of_a_replica_set_causes_a_list_of_replica_sets(api: ApiDouble) -> None:
    retried = Retried(api, owners=0)
    retried.retrier.reconciler.turn("team-a")
    retried.add_owner("train")
    store_event(api, "train", "ReplicaSet")
    retried.retrier.reconciler.turn("team-a")
    assert retried.told() == 1


def test_a_pass_that_takes_too_long_is_followed_by_a_rest(api: ApiDouble) -> None:
    """Between two slow passes over one namespace, other namespaces must have their turns."""
    retried = Retried(api, owners=1)

    def slow(method: str, _timeout: float, effect: Effect) -> bytes:
        retried.now += 10 * BUDGET_SECONDS * (method == "LIST")
        return effect()

    api.deliver = slow
    retried.retrier.reconciler.turn("team-a")
    retried.now += 200 * BUDGET_SECONDS
    for name in ("team-a", "team-b"):
        retried.queue.add(name)
    assert retried.queue.next() == "team-b"
    retried.now += 100 * BUDGET_SECONDS
    assert retried.queue.next() == "team-a"
    assert retried.told() == 1


NO_MODEL = "this pod may use no GPU model in namespace team-a: M40 is excluded by the pod's nodeName"
DAEMON_SETS = "/apis/apps/v1/namespaces/team-a/daemonsets"


def store_daemon_set(api: ApiDouble, name: str, message: str = NO_MODEL, **spec: Any) -> None:
    """Store a DaemonSet that lacks a pod, and an Event with the rejection of this pod."""
    template = {"spec": {"containers": [container(ONE)], **spec}}
    counts = {"desiredNumberScheduled": 2, "currentNumberScheduled": 1}
    manifest = {"metadata": {"name": name}, "spec": {"template": template}, "status": counts}
    api.store(f"{DAEMON_SETS}/{name}", manifest)
    store_event(api, name, "DaemonSet", message)


@cases(
    "owner, retries",
    its_node_had_no_model=({}, 1),
    no_model_is_usable_yet=({"nodeSelector": {MODEL: "P100"}}, 0),
    rejected_for_another_reason=({"message": "violates PodSecurity"}, 0),
)
def test_a_daemon_set_without_a_usable_model_retries_once_after_nodes_change(
    api: ApiDouble, owner: dict[str, Any], retries: int
) -> None:
    retried = Retried(api, owners=0)
    store_daemon_set(api, "train", **owner)
    retried.retrier.reconciler.turn("team-a")
    assert retried.told() == 0, "expected no retry for free quota"
    for _ in range(3):
        retried.retrier.models_changed(["team-a"])
    queue = retried.retrier.models.queue
    retried.now += MODELS_DELAY_SECONDS
    assert queue.next() == "team-a"
    retried.retrier.models.turn("team-a")
    assert retried.told() == retries
    queue.add("later", MODELS_INTERVAL_SECONDS - 1)
    retried.retrier.models_changed(["team-a"])
    retried.now += MODELS_INTERVAL_SECONDS
    assert [queue.next(), queue.next()] == ["later", "team-a"], "expected at most one check per interval"


def test_a_daemon_set_without_free_quota_retries_after_nodes_change(api: ApiDouble) -> None:
    """After the retry its pod is rejected for quota. So the DaemonSet retries again when quota becomes free."""
    retried = Retried(api, owners=0)
    store_daemon_set(api, "train")
    retried.retrier.report("team-a", NamespaceUse("team-a", "enforce", (ModelUse("M40", 200, 200, 0, 0),)))
    retried.retrier.models.turn("team-a")
    assert retried.told() == 1


def test_free_quota_stays_recorded_while_a_new_report_replaces_it() -> None:
    """If a check read no free quota during the replacement, it would be the last check, and the retries would end."""

    class Record(dict[str, Mapping[str, FreeQuota]]):
        def __setitem__(self, namespace: str, free: Mapping[str, FreeQuota]) -> None:
            assert namespace in self
            super().__setitem__(namespace, free)

    before, after = (NamespaceUse("team-a", "enforce", (ModelUse("M40", 2, 1, 0, free),)) for free in (1, 2))
    record = Record({"team-a": retries.record_free({}, "team-a", before)[0]})
    assert retries.record_free(record, "team-a", after) == ({"M40": FreeQuota(200)}, True)
    assert retries.record_free(record, "team-a", None) == ({}, False)
    assert not record
