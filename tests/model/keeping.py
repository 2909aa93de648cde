"""The rules that keep the ledger correct: recounts, proof of absence, removal of reservations, loss and opening.

Any number of leaders may act. The view of a leader (the pods as its watch shows them) may be of any age. In the model,
no write of a leader arrives late. A late write would equal a later decision by the same old view: the view is still
true, and the ledger only accepts the write at the version that the leader read.
"""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from tests.model.serving import Rule, Step, change, compare_and_swap, name
from tests.model.world import (
    DELETED,
    EVERYTHING,
    NO_LATE,
    NOT_HELD,
    NOT_PENDING,
    NOTHING,
    STORED,
    UNLISTED,
    Bounds,
    Pod,
    Reserved,
    World,
)


def counted(world: World, view: int, bounds: Bounds, since: int | None = None) -> World:
    """RECOUNT: recount the ledger by one view of the pods. Remove pending charges of pods that were seen stored.

    TERMINATING: if the watch saw the forced deletion of a pod, the pod's charge becomes terminating. UNSEEN: if the
    count decreased before the watch began, the decrease becomes terminating too.

    ``view``: the version of the view. ``since``: the version at which the watch began; None for a LIST, which sees no
    deletion.
    """
    keeps = bounds.broken == "a count from another view"
    began = view if since is None else since
    pods = {}
    for i, pod in enumerate(world.pods):
        new = pod._replace(pending=NOT_PENDING) if _is_seen(pod, view, began, bounds) else pod
        if pod.runs and began < pod.deleted_at <= view and pod.held == NOT_HELD and not _forgets(bounds):
            new = new._replace(held=bounds.hold)
        if not keeps:
            new = new._replace(stored_at=max(0, pod.stored_at - view), deleted_at=max(0, pod.deleted_at - view))
        pods[i] = new
    reserved = tuple(
        each if keeps or each.listed == UNLISTED else each._replace(listed=max(0, each.listed - view))
        for each in world.reserved
    )
    unseen = tuple(sorted((*world.unseen, *(bounds.hold_unseen,) * _unseen(world, pods, view, began, bounds))))
    return change(world, pods, reserved=reserved, unseen=unseen)


def _is_seen(pod: Pod, view: int, began: int, bounds: Bounds) -> bool:
    was_stored = pod.stage in (STORED, DELETED) and pod.stored_at <= view
    return was_stored and (pod.stage == STORED or pod.deleted_at > began or not bounds.runs)


def _forgets(bounds: Bounds) -> bool:
    return bounds.broken == "a forced deletion releases"


def _unseen(world: World, pods: Mapping[int, Pod], view: int, began: int, bounds: Bounds) -> int:
    """Return by how much the count fell without a deletion that the watch saw. New pods may hide a decrease."""
    if not (bounds.runs and began) or bounds.broken == "an unseen decrease releases":
        return 0
    seen = sum(pod.pending != NOT_PENDING and pods[i].pending == NOT_PENDING for i, pod in enumerate(world.pods))
    held = sum(pod.held == NOT_HELD != pods[i].held for i, pod in enumerate(world.pods))
    live = sum(pod.stored_at <= view and _is_live(pod, view) for pod in world.pods)
    # Pods that were admitted from a reservation may be stored before their charges are written. Such new pods may hide
    # a decrease.
    hidden = 0 if bounds.broken == "hidden by what was spent" else sum(each.amount for each in world.reserved[:-1])
    before = world.committed + seen
    return min(max(before + hidden - live - held, 0), before)


def _is_live(pod: Pod, view: int) -> bool:
    return pod.stage == STORED or (pod.stage == DELETED and pod.deleted_at > view)


def recount(world: World, bounds: Bounds) -> Iterator[Step]:
    """RECOUNT: a leader recounts by any view of the pods that is not older than the view of the last count."""
    for view in range(world.newest + 1):
        for since in range(view + 1) if bounds.runs else (0,):
            if (new := counted(world, view, bounds, since)) != world:
                yield ("recounted by a watch from {} to {} events on", since, view), compare_and_swap(new, bounds)
    if bounds.broken == "recounted by an older view" and not world.newest:
        for i, pod in enumerate(world.pods):
            if pod.stage == STORED:
                uncounted = change(world, {i: pod._replace(stored_at=1)})
                yield ("recounted by a view from before p{} was stored", i), compare_and_swap(uncounted, bounds)


def gone(world: World, bounds: Bounds) -> Iterator[Step]:
    """GONE: after a pending charge's deadline, a leader removes it if a LIST that began later lacks the pod.

    The pod may have been stored and then deleted by force. A leader whose watch began before the charge would have seen
    this. Any other leader waits until its watch is as old as the longest time for which a pod may run. By then the
    pod's containers have ended.
    """
    for i, pod in enumerate(world.pods):
        absent = pod.stage != STORED or bounds.broken == "gone without a read"
        stopped = not pod.runs or bounds.broken == "gone without a watch"
        overdue = NOT_PENDING < pod.pending >= bounds.overdue and bounds.broken != "never gone"
        if overdue and stopped and absent:
            dropped = change(world, {i: pod._replace(pending=NOT_PENDING)})
            yield ("p{} is proven absent", i), compare_and_swap(dropped, bounds)


def release(world: World, bounds: Bounds) -> Iterator[Step]:
    """RELEASE: a leader removes a terminating charge when the time of this charge is over."""
    for i, pod in enumerate(world.pods):
        if not pod.held:
            released = change(world, {i: pod._replace(held=NOT_HELD)})
            yield ("the terminating charge of p{} is released", i), compare_and_swap(released, bounds)
    if world.unseen[:1] == (0,):
        released = world._replace(unseen=world.unseen[1:])
        yield ("an unseen decrease is released",), compare_and_swap(released, bounds)


def reap(world: World, bounds: Bounds) -> Iterator[Step]:
    """REAP: the leader removes a reservation that no write has renewed for the reservation time and the deadline.

    The same write recounts the ledger by a LIST that began after this time.
    """
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
                reaped = _with(_by_long_watch(counted(world, view, bounds, 0), bounds), slot, NOTHING)
                words = ("the reservation of {} is reaped, {} events on", _holder(slot, bounds), view)
                yield words, compare_and_swap(reaped, bounds)


def _by_long_watch(world: World, bounds: Bounds) -> World:
    """Return the world (state) in which a leader has made the charges of deleted pods terminating.

    This leader has watched while the reservation aged until it could be removed. So it saw every forced deletion in
    this time, even if another leader missed some.
    """
    pods = {
        i: pod._replace(held=bounds.hold)
        for i, pod in enumerate(world.pods)
        if pod.runs and pod.held == NOT_HELD and bounds.runs + 1 - pod.runs < bounds.reapable
    }
    return change(world, pods)


def _holder(slot: int, bounds: Bounds) -> str:
    if slot < bounds.replicas:
        return name(slot)
    return "a replica that crashed" if slot < bounds.replicas + bounds.crashes else "the lost ledger"


def _with(world: World, slot: int, new: Reserved) -> World:
    return world._replace(reserved=(*world.reserved[:slot], new, *world.reserved[slot + 1 :]))


def loss(world: World, bounds: Bounds) -> Iterator[Step]:
    """LOSS: the ledger is deleted without rule END, or a missing ledger is created.

    The new ledger reserves the whole limit, so that nothing is admitted until REAP or OPEN removes this reservation.
    """
    if world.exists and world.losses:
        yield ("the ledger is deleted",), _without_ledger(world, bounds, losses=world.losses - 1)
    if not world.exists:
        nothing = (NOTHING,) * len(world.reserved)
        at_once = bounds.broken == "recreated and used at once"
        anew = counted(world, world.newest, bounds)._replace(reserved=nothing, exists=True)
        yield ("the ledger is made",), anew if at_once else _with(anew, len(nothing) - 1, Reserved(EVERYTHING))


def _without_ledger(world: World, bounds: Bounds, **others: Any) -> World:
    """Return the world (state) after the deletion of the ledger. Every write that was sent before is rejected."""
    rejected = compare_and_swap(world, bounds._replace(broken=""))
    pods = {i: pod._replace(pending=NOT_PENDING, held=NOT_HELD) for i, pod in enumerate(rejected.pods)}
    reserved, late = (NOTHING,) * len(world.reserved), (NO_LATE,) * len(world.late)
    return change(rejected, pods, reserved=reserved, late=late, exists=False, **others)


def open_early(world: World, bounds: Bounds) -> Iterator[Step]:
    """OPEN: if a namespace has no mark (the record of an earlier ledger), set it and open the ledger without REAP."""
    lost = len(world.reserved) - 1
    if not world.exists or not world.reserved[lost].amount:
        return
    if not world.marked or bounds.broken == "opened despite a mark":
        yield ("marked by who has read the ledger",), world._replace(marked=True, opening=True)
        yield ("marked",), world._replace(marked=True)
    if world.unmarking:
        yield ("marked anew",), world._replace(unmarking=False)
    if world.opening or (bounds.broken == "opened on a later version" and world.marked):
        opened = _with(counted(world, world.newest, bounds), lost, NOTHING)
        yield ("opened without a wait",), compare_and_swap(opened, bounds)


def end(world: World, bounds: Bounds) -> Iterator[Step]:
    """END: delete a ledger in which nothing is charged. Then delete the mark that there was one, unless renewed."""
    held = world.terminating and bounds.broken != "ended with something terminating"
    charged = world.pending or held or any(each.amount for each in world.reserved)
    if world.exists and world.ends and (not charged or bounds.broken == "ended with something pending"):
        ended = _without_ledger(world, bounds, unseen=(), ends=world.ends - 1, unmarking=world.marked)
        yield ("the ledger ends",), ended
    if world.unmarking:
        yield ("its mark goes",), world._replace(marked=False, unmarking=False)


RULES: tuple[Rule, ...] = (recount, gone, release, reap, loss, open_early, end)


def keeping(world: World, bounds: Bounds) -> Iterator[Step]:
    """Yield every step of the leaders that the rules permit, and every loss of the ledger."""
    ledgerless = (loss, end) if not world.exists else RULES
    return chain.from_iterable(rule(world, bounds) for rule in ledgerless)
