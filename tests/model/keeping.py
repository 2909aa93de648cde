"""The rules of who keeps the ledger true: settling, proving absent, reaping; its loss, and its making anew.

Any number of leaders may be at it, with views of any age: a write of theirs that lands late is the same as one decided
later by an old view, for what it was decided by is as true then, and its version has to be the ledger's still.
"""

from collections.abc import Iterator
from itertools import chain

from tests.model.serving import Rule, Step, change, compare_and_swap, name
from tests.model.world import (
    DELETED,
    EVERYTHING,
    NO_LATE,
    NOT_PENDING,
    NOTHING,
    STORED,
    UNLISTED,
    Bounds,
    Pod,
    Reserved,
    World,
)


def counted(world: World, view: int, bounds: Bounds) -> World:
    """SETTLE: the pods counted by one view, and without the pending charges that this view has seen."""
    keeps = bounds.broken == "a count from another view"
    pods = {}
    for i, pod in enumerate(world.pods):
        seen = pod.stage in (STORED, DELETED) and pod.stored_at <= view
        new = pod._replace(pending=NOT_PENDING) if seen else pod
        if not keeps:
            new = new._replace(stored_at=max(0, pod.stored_at - view), deleted_at=max(0, pod.deleted_at - view))
        pods[i] = new
    reserved = tuple(
        each if keeps or each.listed == UNLISTED else each._replace(listed=max(0, each.listed - view))
        for each in world.reserved
    )
    return change(world, pods, reserved=reserved)


def settle(world: World, bounds: Bounds) -> Iterator[Step]:
    """SETTLE: by any view that is not older than the recorded one."""
    for view in range(world.newest + 1):
        if (new := counted(world, view, bounds)) != world:
            yield ("settled by a view {} events on", view), compare_and_swap(new, bounds)
    if bounds.broken == "settled by an older view" and not world.newest:
        for i, pod in enumerate(world.pods):
            if pod.stage == STORED:
                uncounted = change(world, {i: pod._replace(stored_at=1)})
                yield ("settled by a view from before p{} was stored", i), compare_and_swap(uncounted, bounds)


def gone(world: World, bounds: Bounds) -> Iterator[Step]:
    """GONE: a pending uid as old as the deadline that a quorum read then does not find."""
    for i, pod in enumerate(world.pods):
        absent = pod.stage != STORED or bounds.broken == "gone without a read"
        if pod.pending >= bounds.overdue and absent and bounds.broken != "never gone" and pod.pending != NOT_PENDING:
            dropped = change(world, {i: pod._replace(pending=NOT_PENDING)})
            yield ("p{} is proven absent", i), compare_and_swap(dropped, bounds)


def reap(world: World, bounds: Bounds) -> Iterator[Step]:
    """REAP: an unchanged reservation as old as lease and deadline goes, with a count by a LIST begun after that."""
    lost = len(world.reserved) - 1
    for slot, each in enumerate(world.reserved):
        old = each.age >= bounds.reapable
        early = bounds.broken == "reaped by an earlier LIST"
        renewed = not world.unmarking or bounds.broken == "reaped without a new mark"
        may_go = slot != lost or (world.marked and renewed) or bounds.broken == "opened without a mark"
        if not each.amount or bounds.broken == "never reaped" or not (old or early) or not may_go:
            continue
        if each.listed == UNLISTED and bounds.broken != "reaped without a LIST":
            listed = _with(world, slot, each._replace(listed=world.newest))
            yield ("a LIST for the reservation of {} begins", _holder(slot, bounds)), listed
        elif old:
            only = bounds.broken == "reaped without its count"
            for view in (0,) if only else range(max(each.listed, 0), world.newest + 1):
                reaped = _with(counted(world, view, bounds), slot, NOTHING)
                words = ("the reservation of {} is reaped, {} events on", _holder(slot, bounds), view)
                yield words, compare_and_swap(reaped, bounds)


def _holder(slot: int, bounds: Bounds) -> str:
    if slot < bounds.replicas:
        return name(slot)
    return "a replica that crashed" if slot < bounds.replicas + bounds.crashes else "the lost ledger"


def _with(world: World, slot: int, new: Reserved) -> World:
    return world._replace(reserved=(*world.reserved[:slot], new, *world.reserved[slot + 1 :]))


def loss(world: World, bounds: Bounds) -> Iterator[Step]:
    """LOSS: one that is made anew has everything reserved, for nobody, until REAP."""
    nothing = (NOTHING,) * len(world.reserved)
    if world.exists and world.losses:
        refused = compare_and_swap(world, bounds._replace(broken=""))
        pods = {i: _forgotten(pod) for i, pod in enumerate(refused.pods)}
        late = (NO_LATE,) * len(world.late)
        gone_by_hand = refused._replace(reserved=nothing, late=late, exists=False, losses=world.losses - 1)
        yield ("the ledger is deleted",), change(gone_by_hand, pods)
    if not world.exists:
        at_once = bounds.broken == "made anew and used at once"
        anew = counted(world, world.newest, bounds)._replace(reserved=nothing, exists=True)
        yield ("the ledger is made",), anew if at_once else _with(anew, len(nothing) - 1, Reserved(EVERYTHING))


def _forgotten(pod: Pod) -> Pod:
    return pod._replace(pending=NOT_PENDING)


def open_early(world: World, bounds: Bounds) -> Iterator[Step]:
    """OPEN: who finds no mark, and sets it, has a namespace that never had a ledger: it need not wait for REAP."""
    lost = len(world.reserved) - 1
    if not world.exists or not world.reserved[lost].amount:
        return
    if not world.marked or bounds.broken == "opened beside a mark":
        yield ("marked by who has read the ledger",), world._replace(marked=True, opening=True)
        yield ("marked",), world._replace(marked=True)
    if world.unmarking:
        yield ("marked anew",), world._replace(unmarking=False)
    if world.opening or (bounds.broken == "opened on a later version" and world.marked):
        opened = _with(counted(world, world.newest, bounds), lost, NOTHING)
        yield ("opened without a wait",), compare_and_swap(opened, bounds)


def end(world: World, bounds: Bounds) -> Iterator[Step]:
    """END: a ledger in which nothing is charged goes, and its mark after it, if nobody has written that since."""
    charged = world.pending or any(each.amount for each in world.reserved)
    if world.exists and world.ends and (not charged or bounds.broken == "ended with something pending"):
        ended = compare_and_swap(world, bounds._replace(broken=""))
        pods = {i: _forgotten(pod) for i, pod in enumerate(ended.pods)}
        nothing, late = (NOTHING,) * len(world.reserved), (NO_LATE,) * len(world.late)
        gone_for_good = ended._replace(
            reserved=nothing, late=late, exists=False, ends=world.ends - 1, unmarking=world.marked
        )
        yield ("the ledger ends",), change(gone_for_good, pods)
    if world.unmarking:
        yield ("its mark goes",), world._replace(marked=False, unmarking=False)


RULES: tuple[Rule, ...] = (settle, gone, reap, loss, open_early, end)


def keeping(world: World, bounds: Bounds) -> Iterator[Step]:
    """Every step of leaders, and of what befalls the ledger."""
    ledgerless = (loss, end) if not world.exists else RULES
    return chain.from_iterable(rule(world, bounds) for rule in ledgerless)
