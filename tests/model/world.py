"""The state of the model (world): one namespace's pods, the replicas, the ledger, and the pending writes.

Time is in ticks. The age of an event stops growing when it no longer matters. So the number of worlds is finite,
although time does not end. "Longer than X" means X and one tick, which is the margin. The model has the true age of an
event. A process that sees the event late measures a smaller age, and acts later. The model permits this too.
"""

import functools
from typing import NamedTuple

# The states of a pod. NEVER: the deadline of the pod has passed, so the pod is never stored.
NEW, ASKED, STORED, DELETED, NEVER = range(5)

# The place of a pod in one replica. AWAY: the replica has no work with the pod. WAITING: the caller waits. SPENT:
# admitted from the reservation. FLUSHED: admitted before, and now part of the pending write. SYNCED: part of the
# pending write, which admits it.
AWAY, WAITING, SPENT, FLUSHED, SYNCED = range(5)

NOT_PENDING = -1
NOT_HELD = -1
UNLISTED = -1
EVERYTHING = 99


class Bounds(NamedTuple):
    """The size of the model, and the name of the rule that is wrong on purpose (``broken``).

    Every pod takes 1 of ``limit``. A replica may reserve up to ``reserve``; with 0, it admits a pod only by a write.
    ``lasting``: the reservation time in ticks. ``deadline``: that of a create, in ticks. ``crashes`` of replicas, and
    ``losses`` and ``ends`` (deletions) of the ledger, are maximum numbers. ``runs``: ticks for which the containers of
    a pod run after its forced deletion; 0 if no pod is deleted by force. ``presumed``: ticks for which an unseen
    decrease stays terminating if no longer grace period is recorded.
    """

    limit: int = 1
    pods: int = 2
    replicas: int = 2
    reserve: int = 1
    lasting: int = 1
    deadline: int = 1
    crashes: int = 0
    losses: int = 0
    ends: int = 0
    asked_again: bool = False
    new_namespace: bool = False
    runs: int = 0
    presumed: int = 0
    broken: str = ""

    @property
    def overdue(self) -> int:
        """Return the age in ticks at which a leader may prove the absence of a pending charge's pod."""
        return {"gone without an age": 0, "gone without a margin": self.deadline}.get(self.broken, self.deadline + 1)

    @property
    def reapable(self) -> int:
        """Return the age in ticks at which the leader may remove a reservation."""
        return {
            "reaped after the reservation time alone": self.lasting + 1,
            "reaped after the deadline alone": self.deadline + 1,
            "reaped without a margin": self.lasting + self.deadline,
        }.get(self.broken, self.lasting + self.deadline + 1)

    @property
    def hold(self) -> int:
        """Return for how many ticks a leader keeps a charge after it saw the forced deletion of the pod."""
        return self.runs + (self.broken != "released before its time")

    @property
    def hold_unseen(self) -> int:
        """Return for how many ticks a charge stays terminating if no watch saw the deletion of its pod."""
        return (self.presumed if self.broken == "terminating for the default only" else self.runs) + 1

    @property
    def late_writes(self) -> int:
        """Return the maximum number of pending writes for which no sender waits any more."""
        return self.crashes + (self.reserve == 0 or self.broken == "a read of the old version decides it")


class Pod(NamedTuple):
    """One pod, with one uid.

    ``stored_at``, ``deleted_at``: the numbers of the events that stored and deleted the pod, counted from the version
    of the ledger's last count; 0 is any earlier event. ``pending``: the age of the pod's pending charge. ``known``:
    True if it has had one. ``late``: the late writes that contain the pod, as bits. ``runs``: ticks for which its
    containers still run after the forced deletion. ``held``: ticks until its terminating charge may be released;
    `NOT_HELD` if it has none.
    """

    stage: int = NEW
    age: int = 0
    yes: bool = False
    stored_at: int = 0
    deleted_at: int = 0
    pending: int = NOT_PENDING
    known: bool = False
    at: tuple[int, ...] = ()
    late: int = 0
    runs: int = 0
    held: int = NOT_HELD


class Write(NamedTuple):
    """A pending write of a replica. ``reserve``: the reservation in the write; -1 if there is no write.

    ``age``: the ticks since the write was sent.
    """

    reserve: int = -1
    landed: bool = False
    age: int = 0


NO_WRITE = Write()


class Replica(NamedTuple):
    """What a replica knows about its own reservation.

    ``age``: the age of the replica's last confirmed write.
    """

    reserved: int
    age: int
    write: Write = NO_WRITE


class Reserved(NamedTuple):
    """A reservation in the ledger. With amount 0, there is none.

    ``listed``: the version of a LIST that began after the leader could remove (reap) the reservation.
    """

    amount: int = 0
    age: int = 0
    listed: int = UNLISTED


NOTHING = Reserved()


class LateWrite(NamedTuple):
    """A write without a waiting sender. It is accepted if the ledger still has the version that the sender read."""

    slot: int = -1
    reserve: int = 0


NO_LATE = LateWrite()


class World(NamedTuple):
    """One state of the model.

    ``reserved``: a slot for each replica, for each id of a crashed replica, and for the lost ledger.
    ``marked``: the namespace has a mark, which records that it has had a ledger.
    ``opening``: the replica that set the mark had read the ledger before, and the ledger has not changed since.
    ``unmarking``: a process that deleted a ledger will delete the mark that the namespace had then.
    ``unseen``: for each charge of a decrease that no watch saw, the ticks until it may be released.
    """

    pods: tuple[Pod, ...]
    replicas: tuple[Replica, ...]
    reserved: tuple[Reserved, ...]
    late: tuple[LateWrite, ...]
    exists: bool
    marked: bool
    opening: bool
    crashes: int
    losses: int
    ends: int
    unmarking: bool
    unseen: tuple[int, ...] = ()

    @property
    def newest(self) -> int:
        """Return the number of the last event. A LIST that begins now has this number as its version."""
        return max(max(pod.stored_at, pod.deleted_at) for pod in self.pods)

    @property
    def committed(self) -> int:
        """Return the number of committed charges. They are those of pods that were live at the ledger's version."""
        return sum(
            not pod.stored_at and (pod.stage == STORED or (pod.stage == DELETED and pod.deleted_at > 0))
            for pod in self.pods
        )

    @property
    def pending(self) -> int:
        return sum(pod.pending != NOT_PENDING for pod in self.pods)

    @property
    def terminating(self) -> int:
        return sum(pod.held != NOT_HELD for pod in self.pods) + len(self.unseen)


def first(bounds: Bounds) -> World:
    idle = Replica(0, bounds.lasting + 1)
    slots = bounds.replicas + bounds.crashes + 1
    opened = not bounds.new_namespace
    return World(
        (Pod(at=(AWAY,) * bounds.replicas),) * bounds.pods,
        (idle,) * bounds.replicas,
        (NOTHING,) * slots,
        (NO_LATE,) * bounds.late_writes,
        opened,
        opened,
        False,
        bounds.crashes,
        bounds.losses,
        bounds.ends,
        False,
    )


def canonical(world: World, bounds: Bounds) -> World:
    """Return one world (state) for all that differ only in names, or in things that no longer matter."""
    plain = simplified(world, bounds)
    ordered = World(tuple(sorted(plain.pods)), *plain[1:])
    return min(ordered, _swapped(ordered)) if bounds.replicas == 2 else ordered


def simplified(world: World, bounds: Bounds) -> World:
    """Return the world (state) without things that no longer matter, such as the age of a stored pod."""
    pods = tuple([_simplified(pod, bounds.deadline) for pod in world.pods])
    replicas = tuple([_without_use(each, r, world.pods, bounds.lasting) for r, each in enumerate(world.replicas)])
    return World(pods, replicas, *world[2:])


# The cache is small, because a million worlds (states) have only a few hundred different pods.
@functools.cache
def _simplified(pod: Pod, deadline: int) -> Pod:
    if pod.stage == ASKED:
        # The pod is admitted, and another admission would change nothing. So the model may forget ``known``.
        return pod._replace(known=False) if pod.yes else pod
    decided = pod.stage in (DELETED, NEVER) and not (pod.stored_at or pod.deleted_at)
    # The pending charge of an ended pod counts as old enough to be removed, even if it is younger in reality.
    pending = deadline + 1 if pod.pending != NOT_PENDING else NOT_PENDING
    return pod._replace(stage=NEVER if decided else pod.stage, age=0, yes=False, pending=pending, known=False)


def _without_use(replica: Replica, number: int, pods: tuple[Pod, ...], longest: int) -> Replica:
    reserved, age, write = replica
    if age <= longest and reserved <= sum(pod.at[number] in (SPENT, FLUSHED) for pod in pods):
        return Replica(reserved, longest + 1, _without_age(write, longest))  # the replica has no reserved room left
    return replica if write.reserve else Replica(reserved, age, _without_age(write, longest))


def _without_age(write: Write, longest: int) -> Write:
    return write if write.reserve else Write(0, write.landed, longest + 1)


def _swapped(world: World) -> World:
    pods = tuple(sorted([_swapped_pod(pod) for pod in world.pods]))
    reserved = (world.reserved[1], world.reserved[0], *world.reserved[2:])
    late = tuple([each._replace(slot=1 - each.slot) if each.slot in (0, 1) else each for each in world.late])
    return World(pods, world.replicas[::-1], reserved, late, *world[4:])


@functools.cache
def _swapped_pod(pod: Pod) -> Pod:
    return pod._replace(at=pod.at[::-1])
