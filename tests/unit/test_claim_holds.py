"""Tests of how long a claim is charged for devices that it has lost. The pods that the watch has shown decide."""

import pytest

from controller.claim_holds import ClaimHolds, Hold, LostAllocation, hold_by_pod
from controller.pods import KeptPod, PodInformer, PodLives
from tests.api_double import ApiDouble
from tests.builders import LABELS
from tests.tables import cases
from vcuda.allocations.stored_claims import ClaimCharge, StoredClaim
from vcuda.allocations.stored_pods import StoredPod
from vcuda.claims.digest import PackedDigest
from vcuda.claims.objects import AllocatedDevice
from vcuda.quota.model import Charge

CARD = Charge(100, 0, 100)
DEVICES = (AllocatedDevice("r0", "gpu.nvidia.com", "gpu-1", "gpu-0"),)
CLAIM = StoredClaim("claim", "team-a", "claim", PackedDigest(b""))
LOST = LostAllocation(CLAIM, {"A100": CARD}, frozenset({"pod"}), "50", at=0.0)
RUNNING = StoredPod("pod", "team-a", "pod", None, "gpu-1", True, CARD, "", grace_seconds=600)
ENDED = StoredPod("pod", "team-a", "pod", None, "gpu-1", False, CARD, "", grace_seconds=600)
UNBOUND = StoredPod("pod", "team-a", "pod", None, "", True, CARD, "", grace_seconds=600)
NEWER, OLDER = "51", "49"
"""Versions of the watch of pods. At version 50, the watch of claims showed that the claim has lost its devices."""


def lives(version: str, pod: KeptPod | None = None, *, vanished: bool = False, gone: bool = False) -> PodLives:
    found = {} if pod is None else {"pod": pod}
    return PodLives(version, {} if vanished else found, found if vanished else {}, {"pod"} if gone else (), {})


@cases(
    "shown, hold",
    deleted_by_force=(lives(NEWER, RUNNING, vanished=True), Hold(600)),
    deleted_after_its_end=(lives(NEWER, gone=True), Hold(0)),
    ended=(lives(NEWER, ENDED), Hold(0)),
    never_bound=(lives(NEWER, UNBOUND), Hold(0)),
    not_bound_yet_by_a_watch_that_is_behind=(lives(OLDER, UNBOUND), Hold(600, sure=False)),
    running=(lives(NEWER, RUNNING), Hold(600, sure=False, runs=True)),
    running_by_a_watch_that_is_behind=(lives(OLDER, RUNNING), Hold(600, sure=False)),
    never_shown=(lives(NEWER), Hold(90)),
    not_shown_yet=(lives(OLDER), Hold(90, sure=False)),
)
def test_a_lost_device_is_held_for_as_long_as_its_pod_may_run(shown: PodLives, hold: Hold) -> None:
    """The longest grace period in the ledger is 90 s. It applies to the pod, which the watch has never shown."""
    assert hold_by_pod("pod", LOST, shown, lambda pod: pod.grace_seconds, 90) == hold


@pytest.fixture
def holds(api: ApiDouble) -> ClaimHolds:
    return ClaimHolds(PodInformer(api.kube, LABELS, lambda _: None), lambda: 0.0)


def note(holds: ClaimHolds, old: StoredClaim | None, new: StoredClaim | None, *, listed: bool = False) -> None:
    holds.record(old, new, version="1", listed=listed, charge=lambda _: ClaimCharge({"A100": CARD}))


def claim(*users: str, devices: tuple[AllocatedDevice, ...] = DEVICES) -> StoredClaim:
    return StoredClaim("claim", "team-a", "claim", PackedDigest(b""), devices, users=users)


def test_earlier_users_of_an_allocation_are_remembered_until_the_devices_are_lost(holds: ClaimHolds) -> None:
    note(holds, None, claim("first"))
    note(holds, claim("first"), claim("second"))
    assert holds.users_of(claim("second")) == {"first", "second"}
    note(holds, claim("second"), claim(devices=()))
    assert holds.users_of(claim(devices=())) == set()


@pytest.mark.parametrize("listed", [True, False])
def test_a_claim_that_a_list_shows_without_devices_may_have_lost_some(holds: ClaimHolds, *, listed: bool) -> None:
    """A claim that a LIST shows without devices stays charged for a while after its deletion.

    If the watch has shown the claim since its creation, no charge stays.
    """
    bare = claim(devices=())
    note(holds, None, bare, listed=listed)
    assert len([*holds.unseen_users("team-a")]) == listed
    note(holds, bare, None)
    held = [*holds.vanished("team-a", lambda _: ClaimCharge(), 90)]
    assert [each.seconds for _, each in held] == [90] * listed
