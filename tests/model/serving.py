"""The rules of the API server, its callers, time and the replicas. Each rule yields the steps that it permits."""

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

from tests.model.world import (
    ASKED,
    AWAY,
    DELETED,
    FLUSHED,
    NEVER,
    NEW,
    NO_LATE,
    NO_WRITE,
    NOT_HELD,
    NOT_PENDING,
    NOTHING,
    SPENT,
    STORED,
    SYNCED,
    WAITING,
    Bounds,
    LateWrite,
    Pod,
    Replica,
    Reserved,
    World,
    Write,
)

Step = tuple[tuple[object, ...], World]
"""A step of the model: a sentence with gaps, the texts for the gaps, and the state (world) after the step."""

NONE: Mapping[int, Replica] = {}

Rule = Callable[[World, Bounds], Iterator[Step]]


def change(world: World, pods: Mapping[int, Pod], replicas: Mapping[int, Replica] = NONE, **others: Any) -> World:
    """Return the world (state) with these pods and replicas, by number, and with ``others`` as other fields."""
    new_pods = tuple([pods.get(i, pod) for i, pod in enumerate(world.pods)]) if pods else world.pods
    new_replicas = world.replicas
    if replicas:
        new_replicas = tuple([replicas.get(r, each) for r, each in enumerate(world.replicas)])
    changed = World(new_pods, new_replicas, *world[2:])
    return changed._replace(**others) if others else changed


def name(replica: int) -> str:
    return "ABCDEF"[replica]


def place(pod: Pod, replica: int, where: int) -> Pod:
    """Return the pod with a new place in this replica. Example of a place: WAITING."""
    return pod._replace(at=(*pod.at[:replica], where, *pod.at[replica + 1 :]))


def reserve(world: World, slot: int, amount: int, bounds: Bounds) -> tuple[Reserved, ...]:
    """Return the reservations with a new amount in this slot. The new reservation has age 0."""
    kept_age = bounds.broken == "reaped although renewed"
    new = Reserved(amount, world.reserved[slot].age if kept_age else 0) if amount else NOTHING
    return (*world.reserved[:slot], new, *world.reserved[slot + 1 :])


def compare_and_swap(world: World, bounds: Bounds, sender: int = -1) -> World:
    """CAS: a write has arrived. Reject every other write that was computed from an earlier version of the ledger."""
    if bounds.broken == "no compare-and-swap":
        return world
    losers = {
        number: replica._replace(write=NO_WRITE)
        for number, replica in enumerate(world.replicas)
        if number != sender and replica.write != NO_WRITE and not replica.write.landed
    }
    pods = {}
    for i, pod in enumerate(world.pods):
        kept = tuple(BACK.get(where, where) if r in losers else where for r, where in enumerate(pod.at))
        if pod.late or kept != pod.at:
            pods[i] = pod._replace(at=kept, late=0)
    return change(world, pods, losers, late=(NO_LATE,) * len(world.late), opening=False)


BACK = {FLUSHED: SPENT, SYNCED: WAITING}
"""For each place of a pod that is part of a pending write: its place after the API server has rejected the write."""


def api_server(world: World, bounds: Bounds) -> Iterator[Step]:
    """DEADLINE: a pod is stored only once, after its admission and before its deadline (see `time_passes`)."""
    asked_new = False
    for i, pod in enumerate(world.pods):
        if (pod.stage == NEW and not asked_new) or (pod.stage == ASKED and bounds.asked_again):
            asked_new |= pod.stage == NEW
            again = pod.stage == ASKED and bounds.broken != "a new deadline when asked again"
            asked = pod._replace(stage=ASKED, age=pod.age if again else 0)
            for r, where in enumerate(pod.at):
                if where == AWAY:
                    yield ("p{} is asked of {}", i, name(r)), change(world, {i: place(asked, r, WAITING)})
        if pod.stage == ASKED and pod.yes:
            yield ("p{} is stored", i), change(world, {i: pod._replace(stage=STORED, stored_at=world.newest + 1)})
        if pod.stage == STORED:
            deleted = pod._replace(stage=DELETED, deleted_at=world.newest + 1)
            yield ("p{} is deleted", i), change(world, {i: deleted})
            if bounds.runs:
                yield ("p{} is deleted by force", i), change(world, {i: deleted._replace(runs=bounds.runs + 1)})


def time_passes(world: World, bounds: Bounds) -> Iterator[Step]:
    """DEADLINE: one tick passes. A pod that is not stored by its deadline is never stored."""
    pods = {}
    for i, pod in enumerate(world.pods):
        waits = bounds.broken == "a deadline from the yes" and not pod.yes
        age = pod.age + (pod.stage == ASKED and not waits)
        stage = NEVER if age > bounds.deadline else pod.stage
        pending = min(pod.pending + 1, bounds.deadline + 1) if pod.pending != NOT_PENDING else NOT_PENDING
        # After the deadline of the create, or after the pod is stored, no caller waits for an answer.
        at = tuple(AWAY if where == WAITING else where for where in pod.at) if stage > ASKED else pod.at
        runs, held = max(pod.runs - 1, 0), pod.held if pod.held == NOT_HELD else max(pod.held - 1, 0)
        pods[i] = pod._replace(stage=stage, age=age, pending=pending, at=at, runs=runs, held=held)
    longest = bounds.lasting + 1
    replicas = {
        r: Replica(
            each.reserved,
            min(each.age + 1, longest),
            each.write._replace(age=min(each.write.age + 1, longest)) if each.write != NO_WRITE else NO_WRITE,
        )
        for r, each in enumerate(world.replicas)
    }
    oldest = bounds.lasting + bounds.deadline + 1
    reserved = tuple(each._replace(age=min(each.age + 1, oldest)) if each.amount else each for each in world.reserved)
    unseen = tuple(sorted(max(left - 1, 0) for left in world.unseen))
    yield ("a tick",), change(world, pods, replicas, reserved=reserved, unseen=unseen)


def left(world: World, replica: int, bounds: Bounds) -> int:
    """SPEND: return the number of charges that a replica may still admit from its reservation.

    It is 0 after the reservation time. Before, it is right whether the pending write arrives or not.
    """
    reserved, age, write = world.replicas[replica]
    if bounds.runs > bounds.deadline and bounds.broken != "spent although it may run for long":
        return 0
    spent = sum(pod.at[replica] == SPENT for pod in world.pods)
    flushed = sum(pod.at[replica] == FLUSHED for pod in world.pods)
    if bounds.broken == "spent from the new reservation" and write != NO_WRITE:
        return write.reserve - spent if write.age <= bounds.lasting else 0
    if age > bounds.lasting and bounds.broken != "spent after the reservation time":
        return 0
    if write == NO_WRITE or bounds.broken == "spent from the old reservation":
        return reserved - spent - flushed
    return min(reserved - spent - flushed, write.reserve - spent)


def spend(world: World, bounds: Bounds) -> Iterator[Step]:
    """SPEND: a replica admits a pod from its reservation, without a write.

    IDEM: it admits a pod whose charge it knows to be pending, again.
    """
    for r in range(bounds.replicas):
        for i, pod in enumerate(world.pods):
            if pod.at[r] == WAITING and pod.known:
                yield (
                    ("{1} says yes to p{0}, which is pending", i, name(r)),
                    change(world, {i: _yes(place(pod, r, AWAY))}),
                )
            if pod.at[r] == WAITING and left(world, r, bounds) > 0:
                yield ("{} admits p{} from its reservation", name(r), i), change(world, {i: _yes(place(pod, r, SPENT))})


def _yes(pod: Pod) -> Pod:
    return pod._replace(yes=True) if pod.stage == ASKED else pod


class Batch(NamedTuple):
    """A write: the pods that it adds, the pods admitted from the reservation before, and the next reservation."""

    replica: int
    added: tuple[int, ...]
    flushed: tuple[int, ...]
    reserve: int


def sync_and_flush(world: World, bounds: Bounds) -> Iterator[Step]:
    """SYNC and FLUSH: a replica sends one write.

    The write adds the pods that wait for an answer, makes charges admitted from the reservation pending, and sets the
    next reservation.
    """
    for r, replica in enumerate(world.replicas):
        if replica.write != NO_WRITE or not world.exists or _is_lost(world, r, bounds):
            continue
        waiting = [i for i, pod in enumerate(world.pods) if pod.at[r] == WAITING]
        spent = tuple(i for i, pod in enumerate(world.pods) if pod.at[r] == SPENT)
        groups = {(), *((i,) for i in waiting), *([tuple(waiting)] if not bounds.reserve else [])}
        for group in sorted(groups):
            for amount in range(bounds.reserve + 1):
                if not (group or spent or replica.reserved or amount):
                    continue
                # A write that adds a pod keeps the reservation, or reduces it by the charges admitted from it. Only a
                # write that adds no pod may set any other reservation.
                if group and amount not in (replica.reserved - len(spent), replica.reserved):
                    continue
                batch = Batch(r, group, spent, amount)
                if fits(world, batch, bounds):
                    yield send(world, batch, bounds)


def _is_lost(world: World, r: int, bounds: Bounds) -> bool:
    unchecked = bounds.broken == "a lost reservation is renewed"
    return world.replicas[r].reserved > 0 and world.reserved[r] == NOTHING and not unchecked


def fits(world: World, batch: Batch, bounds: Bounds) -> bool:
    """SYNC: return whether the write fits the limit. A write that does not raise the usage needs no room."""
    own = world.reserved[batch.replica].amount
    if bounds.broken == "a lost reservation is renewed" and not own:
        own = world.replicas[batch.replica].reserved
    others = sum(each.amount for slot, each in enumerate(world.reserved) if slot != batch.replica)
    if bounds.broken == "synced despite other reservations":
        others = 0
    added = sum(world.pods[i].pending == NOT_PENDING for i in batch.added)
    moved = sum(world.pods[i].pending == NOT_PENDING for i in batch.flushed)
    raises = added > 0 or moved + batch.reserve > own
    sums = world.committed + world.pending + world.terminating + added + moved + others + batch.reserve
    return not raises or sums <= bounds.limit


def send(world: World, batch: Batch, bounds: Bounds) -> Step:
    """FLUSH: send the write of a replica. The reservation time begins now, and not at the confirmation of the write."""
    r, added, flushed, amount = batch
    pods = {i: place(world.pods[i], r, FLUSHED) for i in flushed}
    for i in added:
        synced = place(world.pods[i], r, SYNCED)
        pods[i] = _yes(synced) if bounds.broken == "yes before the write is confirmed" else synced
    words = ("{} sends a write: adds {}, flushes {}, reserves {}", name(r), list(added), list(flushed), amount)
    return words, change(world, pods, {r: world.replicas[r]._replace(write=Write(amount))})


def writes_land(world: World, bounds: Bounds) -> Iterator[Step]:
    """CAS: a write is accepted if the ledger still has the version from which it was computed.

    Its sender may no longer wait for the answer.
    """
    if not world.exists:
        return
    for r, replica in enumerate(world.replicas):
        if replica.write != NO_WRITE and not replica.write.landed:
            carried = (SYNCED,) if bounds.broken == "flushed in two writes" else (SYNCED, FLUSHED)
            pods = {i: _pending(pod) for i, pod in enumerate(world.pods) if pod.at[r] in carried}
            lands = {r: replica._replace(write=replica.write._replace(landed=True))}
            reserved = reserve(world, r, replica.write.reserve, bounds)
            yield (
                ("the write of {} lands", name(r)),
                compare_and_swap(change(world, pods, lands, reserved=reserved), bounds, r),
            )
    for number, late in enumerate(world.late):
        if late != NO_LATE:
            pods = {i: _pending(pod)._replace(late=0) for i, pod in enumerate(world.pods) if pod.late >> number & 1}
            reserved = reserve(world, late.slot, late.reserve, bounds)
            done = (*world.late[:number], NO_LATE, *world.late[number + 1 :])
            yield (
                ("a write lands whose sender no longer waits",),
                compare_and_swap(change(world, pods, late=done, reserved=reserved), bounds),
            )


def _pending(pod: Pod) -> Pod:
    return pod._replace(pending=0, known=True)


def outcomes(world: World, bounds: Bounds) -> Iterator[Step]:
    """A replica learns the outcome of its write.

    UNKNOWN: without an answer, the write stays pending. LOSTRES: if a replica's reservation was removed from the
    ledger, the replica forgets it, and the charges that it admitted from it.
    """
    for r, replica in enumerate(world.replicas):
        write = replica.write
        if write.landed:
            age = 0 if bounds.broken == "a reservation from the answer" else write.age
            pods = {i: _confirmed(pod, r, bounds) for i, pod in enumerate(world.pods) if pod.at[r] in BACK}
            yield ("{} has its write confirmed", name(r)), change(world, pods, {r: Replica(write.reserve, age)})
        elif write == NO_WRITE and world.exists and _is_lost(world, r, bounds):
            pods = {i: place(pod, r, AWAY) for i, pod in enumerate(world.pods) if pod.at[r] == SPENT}
            yield ("{} finds its reservation gone", name(r)), change(world, pods, {r: Replica(0, bounds.lasting + 1)})
        # A replica without a reservation may write again from the same version: only one of the two writes is accepted,
        # and no pod is admitted before its write is confirmed. A replica with a reservation would not know how much of
        # it is left.
        elif write != NO_WRITE and (not bounds.reserve or bounds.broken == "a read of the old version decides it"):
            for number in [n for n, late in enumerate(world.late) if late == NO_LATE][:1]:
                pods = {
                    i: place(pod, r, BACK[pod.at[r]])._replace(late=pod.late | 1 << number)
                    for i, pod in enumerate(world.pods)
                    if pod.at[r] in BACK
                }
                left_behind = (*world.late[:number], LateWrite(r, write.reserve), *world.late[number + 1 :])
                yield (
                    ("{} gives its write up, having read the old version", name(r)),
                    change(world, pods, {r: replica._replace(write=NO_WRITE)}, late=left_behind),
                )


def _confirmed(pod: Pod, r: int, bounds: Bounds) -> Pod:
    if pod.at[r] == SYNCED:
        return _yes(place(pod, r, AWAY))
    moved = place(pod, r, AWAY)
    return _pending(moved) if bounds.broken == "flushed in two writes" else moved


def crash(world: World, bounds: Bounds) -> Iterator[Step]:
    """NEWID: a replica crashes, and its new process has a new id. REAP removes the old process's reservation."""
    if not world.crashes:
        return
    slot = bounds.replicas + bounds.crashes - world.crashes
    free = [number for number, late in enumerate(world.late) if late == NO_LATE]
    for r, replica in enumerate(world.replicas):
        under_way = replica.write != NO_WRITE and not replica.write.landed
        if under_way and not free:
            continue
        number = free[0] if free else 0
        pods = {
            i: place(pod, r, AWAY)._replace(late=pod.late | (under_way and pod.at[r] in BACK) << number)
            for i, pod in enumerate(world.pods)
        }
        reserved = list(world.reserved)
        late = list(world.late)
        fresh = Replica(0, bounds.lasting + 1)
        if bounds.broken == "an id that outlives its process":
            fresh = Replica(world.reserved[r].amount, 0)
            pods = {i: pod._replace(late=0) for i, pod in pods.items()}
        else:
            reserved[slot], reserved[r] = world.reserved[r], NOTHING
            if under_way and world.exists:
                late[number] = LateWrite(slot, replica.write.reserve)
        after = change(world, pods, {r: fresh}, reserved=tuple(reserved), late=tuple(late), crashes=world.crashes - 1)
        yield ("{} crashes and starts again", name(r)), after


RULES: tuple[Rule, ...] = (api_server, time_passes, spend, sync_and_flush, writes_land, outcomes, crash)


def serving(world: World, bounds: Bounds) -> Iterator[Step]:
    return chain.from_iterable(rule(world, bounds) for rule in RULES)
