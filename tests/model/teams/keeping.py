"""The rules that any process may follow: moves of a namespace's part of a ledger, recounts, and lost ledgers.

A move has four writes. FREEZE: the part in the old ledger admits nothing more, and names the ledger to which it moves.
COPY: the new ledger gets a copy of the frozen part. MARK: the mark of the namespace names the new ledger. REMOVE: the
frozen part is removed. OPEN: a part admits after the mark names it. Any process may make the next write of any move.
"""

import itertools
from collections.abc import Iterator
from itertools import chain

from tests.model.teams.replicas import Step, ledger_name, namespace_name, put, rejected, with_item
from tests.model.teams.world import (
    ARRIVING,
    ASKED,
    CLOSED,
    FROZEN,
    LEDGERS,
    LINGERS,
    NAMESPACES,
    NONE,
    OPEN,
    STORED,
    YES,
    Bounds,
    Late,
    Ledger,
    Mark,
    Orphan,
    Part,
    World,
    new_id,
    parts_of,
    pods_of,
)

BLIND_COPY = "a copy without compare-and-swap"
BLIND_MARK = "a mark without compare-and-swap"
BLIND_END = "a new mark is deleted"


def where(ledger: int, namespace: int) -> str:
    return f"{namespace_name(namespace)} in {ledger_name(ledger)}"


def is_named(world: World, ledger: int, namespace: int, part: Part) -> bool:
    """Return whether the mark of the namespace names this part of a ledger: the ledger and the part's id."""
    mark = world.marks[namespace]
    return mark is not None and (mark.ledger, mark.id) == (ledger, part.id)


def freeze(world: World, bounds: Bounds) -> Iterator[Step]:
    """FREEZE: a process freezes a namespace's part of a ledger if its newer document has the namespace elsewhere."""
    for ledger, n, part in parts_of(world):
        if part.state != OPEN or part.to != NONE:
            continue
        for number, document in enumerate(bounds.documents):
            newer = number > part.document or bounds.broken == "an older document moves"
            if newer and document.places[n] != ledger:
                state = OPEN if bounds.broken == "no freeze" else FROZEN
                frozen = part._replace(state=state, to=document.places[n], move=new_id(world), newer=number)
                swaps = bounds.broken != "a freeze without compare-and-swap"
                yield f"{where(ledger, n)} is frozen by document {number}", put(world, ledger, {n: frozen}, swaps=swaps)


def copied(part: Part, source: int, bounds: Bounds) -> Part:
    """COPY: return the copy of a frozen part of a ledger. Its reservations get new keys, so no replica renews them."""
    orphans = tuple(Orphan(amount, r, source) for r, amount in enumerate(part.reserved) if amount)
    reserved = (0,) * len(part.reserved)
    if bounds.broken == "reservations are copied under the replica's own key":
        orphans, reserved = (), part.reserved
    if bounds.broken == "reservations are not copied":
        orphans = ()
    return Part(
        ARRIVING,
        part.move,
        part.newer,
        part.committed,
        0 if bounds.broken == "pending charges are not copied" else part.pending,
        0 if bounds.broken == "terminating charges are not copied" else part.terminating,
        reserved,
        tuple(sorted((*part.orphans, *orphans))),
    )


def copy(world: World, bounds: Bounds) -> Iterator[Step]:
    """COPY: write the copy of a frozen part, if the mark still names this part. It replaces a copy of another freeze.

    The new ledger is read first, then the frozen part, then the mark. A write that arrives late finds another version.
    """
    for ledger, n, part in parts_of(world):
        if part.to == NONE:
            continue
        new = world.ledgers[part.to]
        there = new.parts[n]
        named = is_named(world, ledger, n, part) or bounds.broken == "a copy without a look at the mark"
        if bounds.broken == "the mark before the copy":
            named = bool((mark := world.marks[n]) and mark.id == part.move)
        same = there and (there.id == part.move or bounds.broken == "a copy of another freeze is taken")
        free = there is None or (there.state in (ARRIVING, CLOSED) and not same)
        if new.up and named and free:
            arriving = copied(part, ledger, bounds)
            yield f"{where(ledger, n)} is copied", put(world, part.to, {n: arriving})
            if bounds.late and world.late is None:
                yield (
                    f"a copy of {where(ledger, n)} is sent",
                    world._replace(late=Late(n, part.to, arriving, blind=bounds.broken == BLIND_COPY)),
                )


def mark(world: World, bounds: Bounds) -> Iterator[Step]:
    """MARK: after the copy is confirmed, replace the namespace's mark by one that names the copy (compare-and-swap)."""
    for ledger, n, part in parts_of(world):
        if part.to == NONE:
            continue
        there = world.ledgers[part.to].parts[n]
        is_there = there is not None and there.state == ARRIVING
        if there and bounds.broken != "a copy of another freeze is taken":
            is_there = is_there and there.id == part.move
        if is_named(world, ledger, n, part) and (is_there or bounds.broken == "the mark before the copy"):
            number = there.id if there and is_there else part.move
            new = Mark(part.to, number, part.newer)
            yield f"the mark of {namespace_name(n)} names {ledger_name(part.to)}", marked(world, bounds, n, new)
            if bounds.late and world.late is None:
                late = Late(n, old=world.marks[n], new=new, blind=bounds.broken == BLIND_MARK)
                yield f"a mark of {namespace_name(n)} is sent", world._replace(late=late)


def marked(world: World, bounds: Bounds, namespace: int, new: Mark | None) -> World:
    """Return the world (state) with a new mark. A ledger that was lost after the copy need not count yet."""
    part = world.ledgers[new.ledger].parts[namespace] if new else None
    absent = new is None or (world.losses < bounds.losses and not (part and part.id == new.id))
    return world._replace(
        marks=with_item(world.marks, namespace, new), uncounted=with_item(world.uncounted, namespace, absent)
    )


def late_write(world: World, bounds: Bounds) -> Iterator[Step]:
    """A late write arrives, or is lost. `rejected` and `canonical` remove a late write that can no longer arrive."""
    if not (late := world.late):
        return
    yield "the late write is lost", world._replace(late=None)
    named = namespace_name(late.namespace)
    if late.copy:
        yield (
            f"the late copy of {named} lands",
            put(world._replace(late=None), late.ledger, {late.namespace: late.copy}),
        )
    else:
        what = "mark" if late.new else "deletion of the mark"
        yield f"the late {what} of {named} lands", marked(world, bounds, late.namespace, late.new)._replace(late=None)


def remove(world: World, bounds: Bounds) -> Iterator[Step]:
    """REMOVE: remove a namespace's frozen part of a ledger if the mark no longer names it, or a useless part."""
    for ledger, n, part in parts_of(world):
        named = is_named(world, ledger, n, part)
        if part.to != NONE:
            there = world.ledgers[part.to].parts[n]
            early = {"removed before the copy": True, "removed before the mark": there and there.id == part.move}
            if not named or early.get(bounds.broken):
                yield f"{where(ledger, n)} is removed", put(world, ledger, {n: None})
        elif part.state in (ARRIVING, CLOSED) and not named and not _is_awaited(world, ledger, n, part):
            yield f"the unused part of {where(ledger, n)} is removed", put(world, ledger, {n: None})


def _is_awaited(world: World, ledger: int, namespace: int, part: Part) -> bool:
    """Return whether a later mark may name this part of a ledger: after a move, after a loss, or in a new namespace."""
    if part.state == CLOSED:
        found = world.marks[namespace]
        return found is None or found.ledger == ledger
    return any(
        n == namespace and each.move == part.id and is_named(world, source, n, each)
        for source, n, each in parts_of(world)
    )


def open_part(world: World, bounds: Bounds) -> Iterator[Step]:
    """OPEN: open a namespace's part of a ledger that its mark names. A closed part gets the count of a new LIST."""
    for ledger, n, part in parts_of(world):
        found = world.marks[n]
        named = is_named(world, ledger, n, part)
        if bounds.broken == "opened by an older mark":
            named = found is not None and found.ledger == ledger
        early = {
            "a copy is opened before the mark": part.state == ARRIVING,
            "a new part is opened without a mark": part.state == CLOSED and found is None,
            "a lost part is opened without a wait": part.state == CLOSED and found and found.ledger == ledger,
        }
        if part.state in (ARRIVING, CLOSED) and (named or early.get(bounds.broken)):
            opened = part._replace(state=OPEN)
            if part.state == CLOSED:
                opened = opened._replace(committed=pods_of(world, bounds, n, STORED))
            uncounted = world.uncounted[n] and not is_named(world, ledger, n, part)
            opens = put(world, ledger, {n: opened})
            yield f"{where(ledger, n)} is opened", opens._replace(uncounted=with_item(world.uncounted, n, uncounted))


def close_part(world: World, bounds: Bounds) -> Iterator[Step]:
    """NEW and LOST PART: write a closed part if the namespace has no mark, or a mark that names a missing part.

    If there was no mark, the process then creates one for the closed part, which may be opened at once. If there was a
    mark, the process first waits until no pod that the lost part charged can still be stored.
    """
    for ledger, n in itertools.product(LEDGERS, NAMESPACES):
        found, here = world.marks[n], world.ledgers[ledger]
        part = here.parts[n]
        if here.up and part is None:
            for document in _placing(found, ledger, n, bounds):
                closed = Part(CLOSED, new_id(world), document, reserved=(0,) * len(world.replicas))
                yield f"a closed part of {where(ledger, n)} is made", put(world, ledger, {n: closed})
        elif here.up and part and part.state == CLOSED and not is_named(world, ledger, n, part):
            lost = found is not None and found.ledger == ledger and is_over(world, bounds, n)
            if lost or not found:
                new = marked(world, bounds, n, Mark(ledger, part.id, part.document))
                words = f"the mark of {namespace_name(n)} names the closed part in {ledger_name(ledger)}"
                yield words, new._replace(uncounted=world.uncounted)


def _placing(found: Mark | None, ledger: int, namespace: int, bounds: Bounds) -> list[int]:
    """Return the documents by which a namespace's part of this ledger may be made: that of its mark, or all with it."""
    if found:
        return [found.document] if found.ledger == ledger else []
    return [number for number, each in enumerate(bounds.documents) if each.places[namespace] == ledger]


def is_over(world: World, bounds: Bounds, namespace: int) -> bool:
    """Return whether a process has waited long enough after a loss.

    By then, no pod of the namespace can still be stored, and no replica can still admit from a reservation for it.
    """
    live = any(
        replica.admitting[ledger] and replica.held[ledger][namespace]
        for replica in world.replicas
        for ledger in LEDGERS
    )
    unconfirmed = any(replica.write and replica.write.landed for replica in world.replicas)
    return not live and not unconfirmed and not pods_of(world, bounds, namespace, YES)


def lose(world: World, bounds: Bounds) -> Iterator[Step]:
    """LOST: a ledger is deleted. A new one is closed (admits nothing) until one write opens it.

    This write comes after a wait. The process lists the marks, writes each mark of the ledger again, and counts the
    pods of all their namespaces. So the new ledger has every part of the lost one.
    """
    for ledger, here in enumerate(world.ledgers):
        if here.up and world.losses:
            lost = rejected(world, ledger)
            closed = Ledger(False, (None, None))
            ledgers = with_item(lost.ledgers, ledger, closed)
            yield f"{ledger_name(ledger)} is lost", lost._replace(ledgers=ledgers, losses=world.losses - 1)
        elif not here.up:
            named = [n for n in NAMESPACES if (found := world.marks[n]) and found.ledger == ledger]
            early = bounds.broken == "a lost ledger is opened without a wait"
            if early or all(is_over(world, bounds, n) for n in named):
                if bounds.broken == "only one part is restored":
                    named = named[:1]
                yield f"{ledger_name(ledger)} is opened", _restored(world, bounds, ledger, named)


def _restored(world: World, bounds: Bounds, ledger: int, named: list[int]) -> World:
    parts: list[Part | None] = [None, None]
    for n in named:
        found = world.marks[n]
        assert found
        number = found.id
        if bounds.broken != "a lost ledger is opened with the old marks":
            number = new_id(world)
            world = world._replace(marks=with_item(world.marks, n, found._replace(id=number)))
        stored = pods_of(world, bounds, n, STORED)
        parts[n] = Part(OPEN, number, found.document, stored, reserved=(0,) * len(world.replicas))
    opened = Ledger(True, tuple(parts))
    uncounted = tuple([each and n not in named for n, each in enumerate(world.uncounted)])
    return world._replace(ledgers=with_item(world.ledgers, ledger, opened), uncounted=uncounted)


def recounted(world: World, bounds: Bounds, namespace: int, part: Part) -> Part:
    """RECOUNT: return a namespace's part of a ledger with the count of stored pods, without charges of ended pods."""
    covered = part.committed | part.pending | part.terminating
    if any(part.reserved) or part.orphans:
        covered = -1
    return part._replace(
        committed=pods_of(world, bounds, namespace, STORED),
        pending=part.pending & pods_of(world, bounds, namespace, ASKED, YES),
        terminating=covered & pods_of(world, bounds, namespace, LINGERS),
    )


def recount(world: World, bounds: Bounds) -> Iterator[Step]:
    """RECOUNT and REAP: recount a namespace's part of a ledger, and perhaps remove a reservation that has ended."""
    for ledger, n, part in parts_of(world):
        if part.state != OPEN:
            continue
        counted = recounted(world, bounds, n, part)
        if counted != part:
            yield f"{where(ledger, n)} is recounted", put(world, ledger, {n: counted})
        for r, amount in enumerate(part.reserved):
            if amount and is_spent(world, bounds, n, r, ledger):
                reaped = counted._replace(reserved=with_item(part.reserved, r, 0))
                yield f"a reservation of {where(ledger, n)} is reaped", put(world, ledger, {n: reaped})
        for each in dict.fromkeys(part.orphans):
            early = bounds.broken == "a copied reservation is reaped without a wait"
            if early or is_spent(world, bounds, n, each.replica, each.source):
                rest = list(part.orphans)
                rest.remove(each)
                reaped = counted._replace(orphans=tuple(rest))
                yield f"a copied reservation of {where(ledger, n)} is reaped", put(world, ledger, {n: reaped})


def is_spent(world: World, bounds: Bounds, namespace: int, r: int, ledger: int) -> bool:
    """REAP: return whether a reservation's time has ended, and no pod that it admitted can still be stored."""
    replica = world.replicas[r]
    on_way = replica.write is not None and replica.write.ledger == ledger
    live = replica.admitting[ledger] == 1 and replica.held[ledger][namespace] > 0
    storable = any(
        (pod.stage, pod.replica, pod.source) == (YES, r, ledger) and bounds.pods[i][0] == namespace
        for i, pod in enumerate(world.pods)
    )
    return not (on_way or live or storable)


def end(world: World, bounds: Bounds) -> Iterator[Step]:
    """END: remove a namespace's part of a ledger if only stored pods are charged. Then remove its unchanged mark."""
    for ledger, n, part in parts_of(world):
        charged = part.pending or part.terminating or any(part.reserved) or part.orphans
        if bounds.broken == "a part ends with something reserved":
            charged = part.pending or part.terminating
        if part.state != OPEN or charged or not world.ends or world.late:
            continue
        ended = put(world, ledger, {n: None})
        late = Late(n, old=world.marks[n], blind=bounds.broken == BLIND_END)
        uncounted = with_item(world.uncounted, n, True)
        yield f"{where(ledger, n)} ends", ended._replace(late=late, ends=world.ends - 1, uncounted=uncounted)


RULES = (freeze, copy, mark, late_write, remove, open_part, close_part, lose, recount, end)


def keeping(world: World, bounds: Bounds) -> Iterator[Step]:
    return chain.from_iterable(rule(world, bounds) for rule in RULES)
