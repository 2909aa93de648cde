"""Tests of the memory that the controller needs for deleted pods and claims whose containers may still run."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from controller.claim_holds import MAX_USERS_OF_LOSS, ClaimHolds
from controller.lingering import MAX_ENTRIES, MAX_PER_NAMESPACE, PRUNE_SECONDS, FullUntil, Lingering
from controller.pods import MAX_GONE, REMEMBER_GONE_SECONDS, GoneUids, PodInformer
from tests.api_double import ApiDouble
from tests.builders import LABELS, MODEL, nodes
from tests.replicas import Clock
from tests.tables import cases
from tests.unit.test_kept_bytes import MIB, keeping_at_most
from vcuda.allocations.stored_claims import ClaimCharge, StoredClaim
from vcuda.allocations.stored_pods import Allocation, StoredPod
from vcuda.claims.digest import PackedDigest
from vcuda.claims.objects import AllocatedDevice
from vcuda.ledger.ledger import Ledger
from vcuda.ledger.recount import recount
from vcuda.quota.model import Charge, Limit, fits
from vcuda.quota.values import MAX_CARDS, MAX_MEMORY

CARD = Charge(100, 0, 100)
NODES = nodes(**{"gpu-1": {MODEL: "A100"}, "gpu-2": {MODEL: "T4"}})
MAX_TERMINATING = 600


def running_pod(number: int, namespace: str, grace: int = 30) -> StoredPod:
    """Return a bound pod with annotations of 16 KiB. A tenant can write such pods in a namespace without a quota."""
    text = f"{number:x<16384}"
    return StoredPod(
        uid=f"{number:036}",
        namespace=namespace,
        name=f"{number:x<253}",
        model=None,
        node="gpu-1",
        live=True,
        charge=CARD,
        created="2026-01-01T00:00:00Z",
        allocation=Allocation({"hami.io/vgpu-devices-allocated": text}, {}, ()),
        grace_seconds=grace,
    )


def allocated_claim(number: int, namespace: str, users: int = 1) -> StoredClaim:
    device = AllocatedDevice("r0", "gpu.nvidia.com", "gpu-1", f"{number:x<63}")
    return StoredClaim(
        f"{number:036}",
        namespace,
        f"claim-{number}",
        PackedDigest(bytes(8192)),
        (device,) * 32,
        users=tuple(f"{number:027}{user:09}" for user in range(users)),
    )


def watch_of_pods(api: ApiDouble, clock: Clock) -> PodInformer:
    return PodInformer(api.kube, LABELS, lambda _: None, clock.monotonic, MAX_TERMINATING)


def delete(watch: PodInformer, pod: StoredPod) -> None:
    watch.reflector.on_event(pod, None)


def lose(holds: ClaimHolds, claim: StoredClaim) -> None:
    """Let the watch of claims report a claim with devices, and then its deletion."""
    known: dict[str, Any] = {"version": "1", "listed": False, "charge": lambda _: ClaimCharge({"A100": CARD})}
    holds.record(None, claim, **known)
    holds.record(claim, None, **known)


def is_full(watch: PodInformer, namespace: str) -> bool:
    """Return True if the namespace, when counted next, has no room for any model under the largest possible limits."""
    ledger = recount(Ledger(), watch.observed(namespace, NODES))
    largest = Limit(MAX_CARDS * 100), Limit(None, MAX_MEMORY, 1), Limit(MAX_CARDS * 100, MAX_MEMORY)
    used = [ledger.usage(model).used for model in NODES.models]
    return not any(fits(limit, each, Charge(1, 1)) for limit in largest for each in used)


def each_namespace(numbers: range) -> Iterator[tuple[int, str]]:
    return ((number, f"team-{number % 100}") for number in numbers)


# The controller keeps fewer deletions than the next two tests make. Counting memory is slow, so the tests count it only
# for the last deletions.


@pytest.mark.slow
def test_a_hundred_thousand_forced_deletions_without_a_quota_are_kept_within_a_bound(api: ApiDouble) -> None:
    watch = watch_of_pods(api, Clock())
    for number, namespace in each_namespace(range(60_000)):
        delete(watch, running_pod(number, namespace))
    with keeping_at_most(16 * MIB):
        for number, namespace in each_namespace(range(60_000, 100_000)):
            delete(watch, running_pod(number, namespace))


@pytest.mark.slow
def test_a_hundred_thousand_lost_claims_without_a_quota_are_kept_within_a_bound(api: ApiDouble) -> None:
    clock = Clock()
    holds = ClaimHolds(watch_of_pods(api, clock), clock.monotonic)
    for number, namespace in each_namespace(range(80_000)):
        lose(holds, allocated_claim(number, namespace))
    with keeping_at_most(12 * MIB):
        for number, namespace in each_namespace(range(80_000, 100_000)):
            lose(holds, allocated_claim(number, namespace))


def test_a_namespace_with_too_many_forced_deletions_is_full_until_its_last_pod_has_ended(api: ApiDouble) -> None:
    clock = Clock()
    watch = watch_of_pods(api, clock)
    for number in range(MAX_PER_NAMESPACE):
        delete(watch, running_pod(number, "team-a", grace=200 if number == 7 else 60))
    assert not is_full(watch, "team-a")
    delete(watch, running_pod(MAX_PER_NAMESPACE, "team-a", grace=60))
    assert is_full(watch, "team-a")
    assert not is_full(watch, "team-b")
    clock.now += 199
    assert is_full(watch, "team-a")
    clock.now += 1
    assert not watch.observed("team-a", NODES).vanished


def test_a_namespace_with_too_many_lost_claims_is_full(api: ApiDouble) -> None:
    clock = Clock()
    watch = watch_of_pods(api, clock)
    holds = ClaimHolds(watch, clock.monotonic)
    for number in range(MAX_PER_NAMESPACE + 1):
        assert not is_full(watch, "team-a")
        lose(holds, allocated_claim(number, "team-a"))
    clock.now += MAX_TERMINATING - 1
    assert is_full(watch, "team-a")
    clock.now += 1
    assert not is_full(watch, "team-a")


def test_very_many_claims_whose_pods_have_ended_do_not_fill_their_namespace(api: ApiDouble) -> None:
    """No ledger is recounted during this. Claims whose pods were deleted by force stay charged."""
    clock = Clock()
    watch = watch_of_pods(api, clock)
    holds = ClaimHolds(watch, clock.monotonic)
    lost = [allocated_claim(number, "team-a", users=1) for number in range(5 * MAX_PER_NAMESPACE)]
    for number, claim in enumerate(lost):
        [user] = claim.users
        pod = msgspec.structs.replace(running_pod(number, "team-a", grace=300), uid=user, live=number % 100 == 0)
        delete(watch, pod)
        lose(holds, claim)
        clock.now += 1 / 64
    assert not is_full(watch, "team-a")
    forced = {f"{claim.uid}@1/A100" for claim in lost[::100]}
    assert {key for key, _ in holds.vanished("team-a", lambda _: ClaimCharge(), 300)} == forced


def test_at_the_bound_of_all_namespaces_the_largest_becomes_full_and_the_others_are_kept() -> None:
    clock = Clock()
    full = FullUntil(clock.monotonic)
    kept = Lingering[int](clock.monotonic, full)
    kept.add("team-a", "0", 0, clock.now + 60)
    for number in range(MAX_ENTRIES):
        kept.add(f"team-{number % 8}" if number % 9 else "large", f"{number}", number, clock.now + 60)
    assert len(kept.all()) < MAX_ENTRIES
    assert full.of("large") == clock.now + 60
    assert kept.within("team-a") == {"0": 0}


def test_ended_deletions_of_all_namespaces_are_forgotten() -> None:
    """No quota causes a count of these namespaces."""
    clock = Clock()
    kept = Lingering[int](clock.monotonic, FullUntil(clock.monotonic))
    for number in range(500):
        kept.add(f"team-{number}", "pod", number, clock.now + 60)
    clock.now += 60 + PRUNE_SECONDS
    kept.add("another", "pod", 1, clock.now + 60)
    assert kept.all() == [1]


def test_uids_of_deleted_objects_are_kept_within_a_bound_and_the_oldest_are_forgotten() -> None:
    gone = GoneUids(Clock().monotonic)
    for number in range(MAX_GONE + 1):
        gone.add("first" if number == 0 else "team-a", f"{number}")
    assert not gone.within("first")
    assert len(gone.within("team-a")) == MAX_GONE


def test_the_uid_of_an_object_whose_deletion_is_reported_twice_is_kept_until_the_last_report_is_forgotten() -> None:
    clock = Clock()
    gone = GoneUids(clock.monotonic)
    gone.add("team-a", "twice")
    clock.now += 1
    gone.add("team-a", "twice")
    clock.now += REMEMBER_GONE_SECONDS - 1
    gone.add("team-b", "first")
    assert gone.within("team-a") == {"twice"}
    clock.now += 1
    gone.add("team-b", "second")
    assert not gone.within("team-a")


@cases("users", unknown=0, few=MAX_USERS_OF_LOSS, many=256)
def test_a_lost_claim_counts_as_in_use_for_the_longest_grace_period(api: ApiDouble, users: int) -> None:
    """The watch of pods has shown none of the users."""
    clock = Clock()
    holds = ClaimHolds(watch_of_pods(api, clock), clock.monotonic)
    lose(holds, allocated_claim(1, "team-a", users))
    for seconds, held in ((0, [CARD]), (299, [CARD]), (1, [])):
        clock.now += seconds
        found = holds.vanished("team-a", lambda _: ClaimCharge(), 300)
        assert [each.charge for _, each in found] == held
