"""Situations in which pods or claims are deleted while containers may still use their GPUs.

After each step, `RunningWorld` checks that every card that may be in use is charged.
"""

from collections.abc import Callable, Sequence

from controller.claim_holds import AWAIT_PODS_SECONDS
from tests.running_world import CLAIMS, RunningWorld, TrueClaim, TruePod
from vcuda.quota.well_known import STORABLE_SECONDS

Scenario = Callable[[RunningWorld], None]

LONG = 600


def running(
    world: RunningWorld, name: str, grace: int = 30, *, claimed: bool = False, grouped: bool = False
) -> TruePod:
    """Return a running pod whose card the leader has counted.

    ``claimed``: the pod has the card by a claim. ``grouped``: the claim is reserved for a PodGroup.
    """
    pod = TruePod(name, grace, f"{name}-claim" if claimed else "")
    assert world.admit(pod)
    world.store(pod)
    if claimed:
        claim = TrueClaim(pod.claim, grouped=grouped)
        assert world.admit_claim(claim)
        world.store(claim)
    world.bind(pod)
    world.hear_and_recount()
    return pod


def let_claim_go(world: RunningWorld, pod: TruePod) -> None:
    """Let the claim controller release and then delete the claim of a deleted pod."""
    claim = world.claims[pod.claim]
    world.leave(claim, pod)
    world.delete_claim(claim)


def a_pod_is_deleted_by_force(world: RunningWorld) -> None:
    pod = running(world, "pod", 60)
    world.delete(pod)
    world.hear_and_recount()
    world.recount_after(59)


def a_pod_is_deleted_by_force_some_time_after_it_was_admitted(world: RunningWorld) -> None:
    """A pod is deleted by force 70 seconds after its admission. How long it stays charged counts from the deletion."""
    pod = running(world, "pod", 60)
    world.pass_by(70)
    world.delete(pod)
    world.hear_and_recount()
    world.recount_after(10)


def a_pod_is_deleted_by_force_and_its_claim_goes(world: RunningWorld) -> None:
    pod = running(world, "pod", 60, claimed=True)
    world.delete(pod)
    let_claim_go(world, pod)
    world.hear_and_recount()
    world.recount_after(59)


def the_claim_of_a_group_goes_after_the_forced_deletion_of_its_pod(world: RunningWorld) -> None:
    pod = running(world, "pod", LONG, claimed=True, grouped=True)
    world.delete(pod)
    let_claim_go(world, pod)
    world.hear_and_recount()
    world.recount_after(LONG - 1)


def a_pod_with_no_grace_period_is_deleted_by_force(world: RunningWorld) -> None:
    pod = running(world, "pod", 0)
    world.delete(pod)
    world.hear_and_recount()
    world.recount_after(1)


def the_watch_of_pods_is_behind_for_long(world: RunningWorld) -> None:
    pod = running(world, "pod", 60, claimed=True)
    world.delete(pod)
    let_claim_go(world, pod)
    world.leader.hear(CLAIMS, 10)
    for _ in range(3):
        world.recount()
        world.pass_by(AWAIT_PODS_SECONDS)
    world.hear_and_recount()


def the_watch_of_pods_missed_the_deletion(world: RunningWorld) -> None:
    running(world, "other")
    pod = running(world, "pod", LONG, claimed=True)
    world.delete(pod)
    world.recount_by_a_new_leader()
    let_claim_go(world, pod)
    world.hear_and_recount()
    world.recount_after(LONG - 10)


def a_claim_lost_its_devices_while_nobody_led_and_goes_later(world: RunningWorld) -> None:
    running(world, "other")
    pod = running(world, "pod", LONG, claimed=True)
    world.delete(pod)
    world.leave(world.claims[pod.claim], pod)
    world.recount_by_a_new_leader()
    world.delete_claim(world.claims[pod.claim])
    world.hear_and_recount()
    world.recount_after(LONG - 10)


def a_pod_goes_and_its_claim_while_nobody_leads(world: RunningWorld) -> None:
    pod = running(world, "pod", LONG, claimed=True)
    running(world, "other")
    world.delete(pod)
    world.hear_and_recount()
    let_claim_go(world, pod)
    world.recount_by_a_new_leader()
    world.recount_after(LONG - 10)


def a_pod_goes_while_nobody_leads(world: RunningWorld) -> None:
    running(world, "other")
    pod = running(world, "pod", LONG)
    world.delete(pod)
    world.recount_by_a_new_leader()
    world.recount_after(LONG - 10)


def a_pod_and_its_claim_go_while_nobody_leads(world: RunningWorld) -> None:
    running(world, "other", claimed=True)
    pod = running(world, "pod", LONG, claimed=True)
    world.delete(pod)
    let_claim_go(world, pod)
    world.recount_by_a_new_leader()
    world.recount_after(LONG - 10)


def a_pod_comes_and_goes_while_nobody_leads(world: RunningWorld) -> None:
    pod = TruePod("pod", LONG)
    world.start(pod)
    world.delete(pod)
    world.recount_by_a_new_leader()
    for _ in range(2):
        world.recount_after(STORABLE_SECONDS + 1)


def a_pod_comes_and_goes_with_its_claim_while_nobody_leads(world: RunningWorld) -> None:
    pod = TruePod("pod", LONG, "pod-claim")
    world.admit(pod)
    world.store(pod)
    world.admit_claim(TrueClaim("pod-claim"))
    world.store(world.claims["pod-claim"])
    world.bind(pod)
    world.delete(pod)
    let_claim_go(world, pod)
    world.recount_by_a_new_leader()
    for _ in range(2):
        world.recount_after(STORABLE_SECONDS + 1)


def two_pods_share_a_claim_and_the_first_is_deleted_by_force(world: RunningWorld) -> None:
    first = running(world, "first", LONG, claimed=True)
    second = TruePod("second", 30, first.claim)
    world.start(second)
    world.delete(first)
    world.leave(world.claims[first.claim], first)
    world.hear_and_recount()
    world.end(second)
    world.leader.hear_all()
    let_claim_go(world, second)
    world.hear_and_recount()
    world.recount_after(LONG - 10)


def a_claim_loses_its_devices_and_is_used_again(world: RunningWorld) -> None:
    """The first pod of the claim is deleted with its lost node. The claim may then get other devices."""
    first = running(world, "first", LONG, claimed=True)
    world.delete(first)
    world.leave(world.claims[first.claim], first)
    world.hear_and_recount()
    second = TruePod("second", 30, first.claim)
    world.start(second)
    world.hear_and_recount()


def a_pod_that_only_a_replica_has_counted_is_deleted_by_force(world: RunningWorld) -> None:
    """A replica's LIST counts the pod before the leader's watch shows the pod."""
    running(world, "other")
    pod = TruePod("pod", LONG)
    world.start(pod)
    world.count_by_replica()
    world.delete(pod)
    world.recount()
    world.recount_after(20)


def a_standby_that_is_behind_becomes_the_leader(world: RunningWorld) -> None:
    """A standby becomes the leader. Its watches never showed a charged pod, which was then deleted by force."""
    pod = running(world, "pod", LONG)
    world.delete(pod)
    world.hand_over()
    world.recount()
    world.hear_and_recount()
    world.recount_after(LONG - 10)


def a_former_leader_still_recounts(world: RunningWorld) -> None:
    """A new leader has counted a pod and its forced deletion. The former leader has seen neither, and recounts."""
    pod = running(world, "pod", LONG)
    world.hand_over()
    world.delete(pod)
    running(world, "new")
    recount_by_standby(world)
    world.recount_after(LONG - 10)
    recount_by_standby(world)


def a_standby_recounts_beside_the_leader(world: RunningWorld) -> None:
    pod, other = running(world, "pod", LONG, claimed=True), running(world, "other", LONG)
    world.standby.hear_all()
    world.delete(pod)
    let_claim_go(world, pod)
    world.standby.hear(CLAIMS, 10)
    recount_by_standby(world)
    world.hear_and_recount()
    world.delete(other)
    world.standby.hear_all()
    recount_by_standby(world)
    world.recount_after(LONG - 10)


def recount_by_standby(world: RunningWorld) -> None:
    world.standby.recount(looks=True)
    world.check()


ALL: Sequence[Scenario] = (
    a_pod_is_deleted_by_force,
    a_pod_is_deleted_by_force_some_time_after_it_was_admitted,
    a_pod_is_deleted_by_force_and_its_claim_goes,
    the_claim_of_a_group_goes_after_the_forced_deletion_of_its_pod,
    a_pod_with_no_grace_period_is_deleted_by_force,
    the_watch_of_pods_is_behind_for_long,
    the_watch_of_pods_missed_the_deletion,
    a_claim_lost_its_devices_while_nobody_led_and_goes_later,
    a_pod_goes_and_its_claim_while_nobody_leads,
    a_pod_goes_while_nobody_leads,
    a_pod_and_its_claim_go_while_nobody_leads,
    a_pod_comes_and_goes_while_nobody_leads,
    a_pod_comes_and_goes_with_its_claim_while_nobody_leads,
    two_pods_share_a_claim_and_the_first_is_deleted_by_force,
    a_claim_loses_its_devices_and_is_used_again,
    a_pod_that_only_a_replica_has_counted_is_deleted_by_force,
    a_standby_that_is_behind_becomes_the_leader,
    a_former_leader_still_recounts,
    a_standby_recounts_beside_the_leader,
)
