"""The state of the model (world): the pods of two namespaces, the ledgers, marks, replicas, and one late write.

A ledger has a part for each of its namespaces. The mark of a namespace names the ledger that holds its part, and the id
of the part. The model has no clock: a wait ends by a step that is possible only when the awaited event has happened.
For example, a lost ledger is opened only when no pod that it charged can still be stored. `tests/model/world.py` has
ticks, and checks that each wait is long enough.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

# The states of a pod. YES: it is admitted, and may be stored. LINGERS: it was deleted by force, and its containers
# still run. ENDED: it was deleted, or can no longer be stored.
NEW, ASKED, YES, STORED, LINGERS, ENDED = range(6)

# The place of a pod in its replica. RESERVED: admitted from the reservation, and not written yet. FLUSHED: like
# RESERVED, and in the pending write. SYNCED: admitted by the pending write.
AWAY, WAITING, RESERVED, FLUSHED, SYNCED = range(5)

# The states of a namespace's part of a ledger. Only an open part admits pods. ARRIVING: copied from another ledger.
# CLOSED: may lack charges.
OPEN, FROZEN, ARRIVING, CLOSED = range(4)

ENDLESS = 99
"""A limit that nothing reaches, and the usage of a closed ledger."""

NONE = -1


class Document(NamedTuple):
    """One version of the quota document.

    ``places``: for each namespace, its ledger. ``namespaces``, ``ledgers``: for each namespace, and for each
        ledger, the limits of the GPU models in order, followed by the limit of all models together (``total``).
    """

    places: tuple[int, ...]
    namespaces: tuple[tuple[int, int, int], ...] = ((ENDLESS,) * 3,) * 2
    ledgers: tuple[tuple[int, int, int], ...] = ((ENDLESS,) * 3,) * 2


class Bounds(NamedTuple):
    """The size of the model, and the name of the rule that is wrong on purpose (``broken``).

    ``documents``: the versions of the quota document, the oldest first. Every pod takes one card. ``pods``: the
    namespace and the GPU model of each pod. ``known``: for each replica, the document that it has read. ``learns``: the
    replicas may read newer documents. ``reserve``: for each namespace, the most cards of a reservation. All
    reservations are of model 0. ``begins``: the document by which the parts were placed; `NONE` if the namespaces are
    new. ``lingers``: pods may be deleted by force. ``late``: a write of a move may arrive later than other writes.
    """

    documents: tuple[Document, ...]
    pods: tuple[tuple[int, int], ...]
    known: tuple[int, ...] = (0,)
    learns: bool = True
    begins: int = 0
    reserve: tuple[int, int] = (0, 0)
    crashes: int = 0
    losses: int = 0
    ends: int = 0
    lingers: bool = False
    late: bool = False
    broken: str = ""


class Pod(NamedTuple):
    """One pod. ``source``: the ledger to which its charge is written, or whose reservation admitted it."""

    stage: int = NEW
    where: int = AWAY
    replica: int = NONE
    source: int = NONE


class Orphan(NamedTuple):
    """A copied reservation, which no replica renews.

    ``replica``: the replica that may still admit from it. ``source``: the ledger in which the replica did so.
    """

    amount: int
    replica: int
    source: int


class Part(NamedTuple):
    """The part of one namespace in one ledger. The sets of pods are bits.

    ``id``: a part that was moved or opened again has a new one. ``document``: the version that placed the part.
    ``reserved``: the reservation of each replica. ``to``, ``move``, ``newer``: for a frozen part, the ledger to which
    it moves, the id of its copy, and its document.
    """

    state: int
    id: int
    document: int
    committed: int = 0
    pending: int = 0
    terminating: int = 0
    reserved: tuple[int, ...] = ()
    orphans: tuple[Orphan, ...] = ()
    to: int = NONE
    move: int = NONE
    newer: int = NONE


class Mark(NamedTuple):
    """The mark of a namespace. It names the ledger, the id of the namespace's part in it, and the document used."""

    ledger: int
    id: int
    document: int


class Ledger(NamedTuple):
    """A ledger. ``up``: False if it was lost, and so admits nothing. ``parts``: one for each namespace."""

    up: bool
    parts: tuple[Part | None, ...]


class Write(NamedTuple):
    """A pending write of a replica. ``reserve``: for each namespace, the reservation in the write."""

    ledger: int
    reserve: tuple[int, ...]
    landed: bool = False


class Replica(NamedTuple):
    """One replica of the webhook. ``held``: for each ledger and namespace, the reservation that the replica knows.

    ``admitting``: for each ledger, 1 while the replica may still admit from its reservations.
    """

    document: int
    held: tuple[tuple[int, ...], ...]
    admitting: tuple[int, ...]
    write: Write | None = None


class Late(NamedTuple):
    """A write that arrives later. ``copy``: the part that it adds to ``ledger``, if the ledger has not changed.

    Without ``copy``, it replaces the mark ``old`` by ``new``, or deletes it if ``new`` is None. ``blind``: True if it
    is wrongly accepted although another write was first.
    """

    namespace: int
    ledger: int = NONE
    copy: Part | None = None
    old: Mark | None = None
    new: Mark | None = None
    blind: bool = False


class World(NamedTuple):
    """One state of the model.

    ``uncounted``: for each namespace, True if the ledger that its mark names need not count it yet (see `check`).
    ``caps``: for each ledger and then for each namespace, the most that may be used (see `check`).
    """

    pods: tuple[Pod, ...]
    replicas: tuple[Replica, ...]
    ledgers: tuple[Ledger, ...]
    marks: tuple[Mark | None, ...]
    late: Late | None
    uncounted: tuple[bool, ...]
    caps: tuple[tuple[int, int, int], ...]
    crashes: int
    losses: int
    ends: int


LEDGERS = range(2)
NAMESPACES = range(2)


def first(bounds: Bounds) -> World:
    replicas = tuple(Replica(known, ((0, 0), (0, 0)), (0, 0)) for known in bounds.known)
    parts: list[list[Part | None]] = [[None, None], [None, None]]
    marks: list[Mark | None] = [None, None]
    if bounds.begins != NONE:
        for n, place in enumerate(bounds.documents[bounds.begins].places):
            parts[place][n] = Part(OPEN, n, bounds.begins, reserved=(0,) * len(replicas))
            marks[n] = Mark(place, n, bounds.begins)
    ledgers = tuple(Ledger(True, tuple(each)) for each in parts)
    caps = tuple(limits_of(bounds, replicas, ledger=each) for each in LEDGERS)
    caps += tuple(limits_of(bounds, replicas, namespace=each) for each in NAMESPACES)
    pods = (Pod(),) * len(bounds.pods)
    uncounted = (bounds.begins == NONE,) * 2
    counts = bounds.crashes, bounds.losses, bounds.ends
    return World(pods, replicas, ledgers, tuple(marks), None, uncounted, caps, *counts)


def limits_of(
    bounds: Bounds, replicas: tuple[Replica, ...], *, ledger: int = NONE, namespace: int = NONE
) -> tuple[int, int, int]:
    """Return the largest limits by which any replica may admit now: of each GPU model, and of both together."""
    known = {each.document for each in replicas}
    documents = [bounds.documents[each] for each in known]
    rows = [each.ledgers[ledger] if ledger != NONE else each.namespaces[namespace] for each in documents]
    if len(rows) == 1:
        return rows[0]
    return max(row[0] for row in rows), max(row[1] for row in rows), max(row[2] for row in rows)


def charged(bounds: Bounds, pods: int) -> tuple[int, int, int]:
    """Return the charges of these pods (bits): of each GPU model, and of both together."""
    return _charged(bounds.pods, pods)


# A million worlds (states) have only a few hundred different parts and sets of pods.
@functools.cache
def _charged(kinds: tuple[tuple[int, int], ...], pods: int) -> tuple[int, int, int]:
    models = [model for i, (_, model) in enumerate(kinds) if pods >> i & 1]
    return models.count(0), models.count(1), len(models)


def added(a: tuple[int, int, int], b: tuple[int, int, int]) -> tuple[int, int, int]:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2]


def used_by(bounds: Bounds, part: Part | None) -> tuple[int, int, int]:
    """Return the usage in a namespace's part of a ledger. All reservations are of model 0."""
    return _used_by(bounds.pods, part) if part else (0, 0, 0)


@functools.cache
def _used_by(kinds: tuple[tuple[int, int], ...], part: Part) -> tuple[int, int, int]:
    reserved = sum(part.reserved) + sum(each.amount for each in part.orphans)
    used = reserved, 0, reserved
    for each in (part.committed, part.pending, part.terminating):
        used = added(used, _charged(kinds, each))
    return used


def pods_of(world: World, bounds: Bounds, namespace: int, *stages: int) -> int:
    """Return the pods of a namespace in these stages, as bits."""
    return sum(1 << i for i, pod in enumerate(world.pods) if pod.stage in stages and bounds.pods[i][0] == namespace)


def parts_of(world: World) -> Iterator[tuple[int, int, Part]]:
    for ledger, each in enumerate(world.ledgers):
        for namespace, part in enumerate(each.parts):
            if part is not None:
                yield ledger, namespace, part


def new_id(world: World) -> int:
    return 1 + max(ids_in(world), default=0)


def ids_in(world: World) -> list[int]:
    """Return all ids in the world (state), in the order of their appearance."""
    found = [each.id for each in world.marks if each]
    for _, _, part in parts_of(world):
        found += [part.id, part.move]
    if late := world.late:
        found += [late.copy.id] if late.copy else []
        found += [each.id for each in (late.old, late.new) if each]
    return [each for each in dict.fromkeys(found) if each != NONE]


def canonical(world: World) -> World:
    """Return one world (state) for all that differ only in ids, or in a late write that can no longer arrive."""
    late = world.late
    if late and late.copy is None and not late.blind and world.marks[late.namespace] != late.old:
        world = world._replace(late=None)
    ids = ids_in(world)
    if ids == list(range(len(ids))):
        return world
    names = {old: new for new, old in enumerate(ids)} | {NONE: NONE}

    def part(each: Part | None) -> Part | None:
        return each and each._replace(id=names[each.id], move=names[each.move])

    def mark(each: Mark | None) -> Mark | None:
        return each and each._replace(id=names[each.id])

    late = world.late
    return world._replace(
        ledgers=tuple([Ledger(each.up, tuple([part(one) for one in each.parts])) for each in world.ledgers]),
        marks=tuple([mark(each) for each in world.marks]),
        late=late and late._replace(copy=part(late.copy), old=mark(late.old), new=mark(late.new)),
    )
