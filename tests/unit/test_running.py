"""Tests of forced deletions. The ledger must charge a GPU until no container can use it."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import pytest

from controller import claim_holds, pods
from controller.claim_holds import Hold, LostAllocation, hold_by_pod
from controller.pods import KeptPod, PodLives
from controller.recount.charge_ages import Watch
from tests import running_scenarios as scenarios
from tests.running_scenarios import LONG, let_claim_go, running
from tests.running_world import CLAIMS, MODEL, ONE, PODS, RunningWorld, TrueClaim, TruePod
from tests.tables import cases
from vcuda.ledger import recount as recounting
from vcuda.ledger.ledger import UNSEEN_SECONDS, Ledger, Reservation, Terminating
from vcuda.ledger.recount import ObservedPods, recount
from vcuda.quota.model import Charge
from vcuda.quota.well_known import STORABLE_SECONDS


@pytest.mark.parametrize("scenario", scenarios.ALL, ids=lambda scenario: scenario.__name__)
def test_a_gpu_stays_charged_while_a_container_may_use_it_and_no_longer(scenario: scenarios.Scenario) -> None:
    world = RunningWorld()
    scenario(world)
    for _ in range(3):
        world.pass_by(LONG + STORABLE_SECONDS)
        world.hear_and_recount()
    assert world.used() == world.held()
    assert not world.ledger.terminating


class Broken(NamedTuple):
    """Breaks a rule: it sets attribute ``name`` of ``where`` to ``value``. Then ``scenario`` must fail."""

    where: object
    name: str
    value: object
    scenario: scenarios.Scenario


def nothing(*_: object) -> Mapping[str, Terminating]:
    return {}


def held_by_default(model: str, charge: Charge, _grace: int) -> Terminating:
    return Terminating(model, charge, UNSEEN_SECONDS)


def unused_unless_known(
    uid: str, lost: LostAllocation, lives: PodLives, seconds_of: Callable[[KeptPod], int], grace: int
) -> Hold:
    known = uid in lives.vanished or uid in lives.stored
    return hold_by_pod(uid, lost, lives, seconds_of, grace) if known else Hold(0)


MUTANTS = {
    "a forced deletion keeps the pod's charge": Broken(
        pods.PodInformer, "seconds_of", lambda *_: 0, scenarios.a_pod_is_deleted_by_force
    ),
    "a forced deletion keeps the claim's charge": Broken(
        claim_holds, "hold_by_pod", lambda *_: Hold(0), scenarios.a_pod_is_deleted_by_force_and_its_claim_goes
    ),
    "every deleted pod stays charged for some seconds": Broken(
        pods, "MIN_TERMINATING_SECONDS", 0, scenarios.a_pod_with_no_grace_period_is_deleted_by_force
    ),
    "a pod that no watch saw may still run": Broken(
        claim_holds, "hold_by_pod", unused_unless_known, scenarios.the_watch_of_pods_missed_the_deletion
    ),
    "a claim that was listed without devices may have had some": Broken(
        claim_holds.ClaimHolds,
        "unseen_users",
        lambda *_: (),
        scenarios.a_claim_lost_its_devices_while_nobody_led_and_goes_later,
    ),
    "an unseen decrease of pods stays charged": Broken(
        recounting, "_unseen_pods", nothing, scenarios.a_pod_goes_while_nobody_leads
    ),
    "an unseen decrease of claims stays charged": Broken(
        recounting, "_unseen_claims", nothing, scenarios.a_pod_and_its_claim_go_while_nobody_leads
    ),
    "an unseen decrease stays charged for the longest grace period": Broken(
        recounting, "_unseen", held_by_default, scenarios.a_pod_goes_while_nobody_leads
    ),
    "the longest grace period of the pods is recorded": Broken(
        pods, "long_graces", nothing, scenarios.a_pod_goes_while_nobody_leads
    ),
    "the longest grace period of the pods that use claims is recorded": Broken(
        pods, "long_grace", lambda _: 0, scenarios.a_pod_and_its_claim_go_while_nobody_leads
    ),
    "a pending charge stays if its pod may have been stored and deleted before the watch": Broken(
        Watch, "is_of", lambda *_: True, scenarios.a_pod_comes_and_goes_while_nobody_leads
    ),
    "a pending claim stays charged for as long as its pod may run": Broken(
        Ledger, "longest_claim_grace", 0, scenarios.a_pod_comes_and_goes_with_its_claim_while_nobody_leads
    ),
    "earlier users of an allocation are remembered": Broken(
        claim_holds.ClaimHolds,
        "users_of",
        lambda _, claim: frozenset(claim.users),
        scenarios.two_pods_share_a_claim_and_the_first_is_deleted_by_force,
    ),
    "a LIST does not replace deletions that the watch has not delivered": Broken(
        recounting.Observed,
        "seen_since",
        lambda _listed, watched, _counted: watched.since,
        scenarios.a_pod_that_only_a_replica_has_counted_is_deleted_by_force,
    ),
}


@pytest.mark.parametrize("broken", MUTANTS.values(), ids=MUTANTS)
def test_every_rule_is_needed(broken: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broken.where, broken.name, broken.value)
    with pytest.raises(AssertionError, match="may be in use"):
        broken.scenario(RunningWorld())


# Tests that each charge is released as soon as possible


@pytest.mark.parametrize("claimed", [False, True], ids=["its own card", "a claim"])
def test_a_pod_that_has_ended_releases_its_gpu_at_once(*, claimed: bool) -> None:
    world = RunningWorld()
    pod = running(world, "pod", LONG, claimed=claimed)
    world.end(pod)
    if claimed:
        let_claim_go(world, pod)
    world.hear_and_recount()
    assert world.used() == 0


@pytest.mark.parametrize("claimed", [False, True], ids=["its own card", "a claim"])
def test_a_pod_that_ended_while_no_replica_led_releases_its_gpu_as_soon_as_its_standby_leads(*, claimed: bool) -> None:
    world = RunningWorld()
    running(world, "other", claimed=claimed)
    pod = running(world, "pod", LONG, claimed=claimed)
    world.standby.hear_all()
    world.end(pod)
    world.delete(pod)
    if claimed:
        let_claim_go(world, pod)
    world.hand_over()
    world.hear_and_recount()
    assert world.used() == 100


def test_a_standby_measures_the_ages_of_charges_before_it_leads() -> None:
    world = RunningWorld()
    world.admit(TruePod("never-stored", 30))
    pod = running(world, "pod", 60)
    world.delete(pod)
    world.hear_and_recount()
    world.standby.hear_all()
    world.standby.note()
    world.pass_by(STORABLE_SECONDS + 1)
    assert world.used() == 200
    world.hand_over()
    world.recount()
    assert world.used() == 0


def test_a_claim_stays_in_the_count_until_the_watch_of_pods_shows_that_its_pod_has_ended() -> None:
    """The claim watch may show that the pod released the claim before the pod watch shows that the pod has ended.

    If the claim no longer counted, its charge would stay for a fixed time.
    """
    world = RunningWorld()
    pod = running(world, "pod", LONG, claimed=True)
    world.end(pod)
    let_claim_go(world, pod)
    world.leader.hear(CLAIMS, 10)
    world.recount()
    assert (world.ledger.claimed, world.ledger.terminating) == ({MODEL: ONE}, {})
    world.leader.hear(PODS, 10)
    world.recount()
    assert (world.ledger.claimed, world.ledger.terminating) == ({}, {})


def test_a_claim_that_was_reserved_for_a_pod_that_was_never_bound_is_released_at_once() -> None:
    world = RunningWorld()
    pod = TruePod("pod", LONG, "pod-claim")
    world.admit(pod)
    world.store(pod)
    world.admit_claim(TrueClaim("pod-claim"))
    world.store(world.claims["pod-claim"])
    world.allocate(pod)
    world.hear_and_recount()
    world.delete(pod)
    let_claim_go(world, pod)
    world.hear_and_recount()
    assert world.used() == 0


def test_a_pod_with_a_short_grace_period_leaves_no_record() -> None:
    world = RunningWorld()
    running(world, "pod", 30)
    running(world, "user", 30, claimed=True)
    assert (world.ledger.graces, world.ledger.claim_grace) == ({}, 0)


def test_the_record_of_a_long_grace_period_is_removed_with_its_last_pod() -> None:
    world = RunningWorld()
    pod, user = running(world, "pod", LONG), running(world, "user", LONG, claimed=True)
    assert (world.ledger.graces, world.ledger.claim_grace) == ({MODEL: LONG}, LONG)
    for each in (pod, user):
        world.end(each)
    world.hear_and_recount()
    assert (world.ledger.graces, world.ledger.claim_grace) == ({}, 0)


def test_a_pod_that_uses_claims_and_may_run_for_long_is_recorded_before_it_is_admitted() -> None:
    world = RunningWorld()
    world.admit(TruePod("pod", LONG, "pod-claim"))
    assert world.ledger.longest_claim_grace == LONG
    assert world.used() == 0


# Tests of deletions that no watch saw. The count is lower than before, unless new pods hide the decrease.


@cases(
    "reserved, arrived, held",
    no_charges_are_new=(0, 0, 2),
    the_new_charges_were_admitted_by_no_replica=(0, 2, 0),
    a_replica_may_have_admitted_all_new_charges=(2, 2, 2),
    a_replica_may_have_admitted_some_of_the_new_charges=(1, 2, 1),
)
def test_charges_that_a_replica_may_have_admitted_hide_no_deletion(reserved: int, arrived: int, held: int) -> None:
    """If a new pod is stored and another pod is deleted unobserved, the sum of the charges may stay the same.

    A pod that a replica admits from its reservation is stored before its charge is pending in the ledger.
    """
    reservations = {"replica": Reservation({MODEL: _cards(reserved)}, 1)} if reserved else {}
    counted = Ledger({MODEL: _cards(5)}, "100", reserved=reservations)
    observed = ObservedPods("200", {MODEL: _cards(3 + arrived)}, (), since="150")
    terminating = recount(counted, observed).terminating
    assert sum(each.charge.cores for each in terminating.values()) == 100 * held


def _cards(number: int) -> Charge:
    return Charge(100 * number, 0, 100 * number)
