"""The state of the model (world): the ledgers of two namespaces and of two teams, and the unfinished procedures.

`tests/model/world.py` shows that a namespace's ledger covers its pods. Here, a ledger has only a usage, and ``held`` is
the true usage: the pods that run or may still be stored, and what replicas may still admit from reservations. A step
that reads one object and writes it by compare-and-swap is one step, at the moment of the write. A procedure is several
such steps. Each of its writes may be stored late or never, also after its process has ended. So a procedure needs no
process. It has the document that its process had read.
"""

from typing import Any, NamedTuple

Amount = tuple[int, int]
"""Cards of each of the two GPU models."""

Limits = tuple[int, int, int]
"""The limits of the two GPU models, and of both together (``total``)."""

NOTHING: Amount = (0, 0)
UNSEEN: Amount = (-1, -1)
ANY: Limits = (9, 9, 9)
NONE = -1
NAMESPACES = TEAMS = MODELS = range(2)


class Document(NamedTuple):
    """One version of the quota document.

    ``places``: for each namespace, its team, or `NONE`. ``teams``, ``namespaces``: the limits of each.
    """

    places: tuple[int, int]
    teams: tuple[Limits, Limits] = (ANY, ANY)
    namespaces: tuple[Limits, Limits] = (ANY, ANY)


class Bounds(NamedTuple):
    """The size of the model, and the name of the rule that is wrong on purpose (``broken``).

    ``procedures``: the most unfinished procedures. ``models``: the number of GPU models that are requested. ``brings``:
    the most pods that start to run without an admission. ``ends``: the most deletions of a namespace or its ledger.
    ``anew``: the document has no teams at first, so that no team ledger exists.
    """

    documents: tuple[Document, ...]
    procedures: int = 2
    models: int = 1
    brings: int = 0
    losses: int = 0
    team_losses: int = 0
    ends: int = 0
    anew: bool = False
    broken: str = ""


class Allotment(NamedTuple):
    """The part of a team's quota that a ledger may use. ``terms``: the document by which it was checked."""

    charges: Amount = NOTHING
    terms: int = NONE


class Ledger(NamedTuple):
    """The ledger of a namespace. ``team_version``: the document that changed the teams in ``allotments`` last."""

    used: Amount = NOTHING
    allotments: tuple[Allotment | None, ...] = (None, None)
    team_version: int = NONE
    open: bool = True

    @property
    def names(self) -> tuple[int, ...]:
        return tuple([team for team, each in enumerate(self.allotments) if each is not None])


class TeamLedger(NamedTuple):
    """The ledger of a team.

    ``allotted``: for each namespace, its part. ``document``: the newest by which a process looked for new members.
    """

    allotted: tuple[Amount | None, ...] = (None, None)
    closed: bool = False
    document: int = NONE


class Procedure(NamedTuple):
    """An unfinished RAISE, LOWER, OPEN or UPDATE (a look for new members).

    ``adds``: the GPU model of a pod that a RAISE admits; `NONE` if it only covers the usage. ``want``: the usage of the
    namespace with this pod. ``checked``: what was allotted for it. ``terms``: the document by which ``checked`` was
    checked. ``fresh``: the namespace's ledger has not changed since a RAISE read it. ``seen``: for each namespace, what
    a LOWER or OPEN will allot to it; `UNSEEN` if it has not yet written its ledger.
    """

    kind: str
    namespace: int
    team: int
    document: int
    adds: int = NONE
    want: Amount = NOTHING
    checked: Amount | None = None
    terms: int = NONE
    fresh: bool = True
    seen: tuple[Amount | None, ...] = (UNSEEN, UNSEEN)


class World(NamedTuple):
    """One state of the model.

    ``held``: the true usage of each namespace. ``brought``: the part of it that the team need not count yet.
    ``member``: the team that counts the namespace. ``gone``: the namespace seems not to exist. ``oldest``, ``newest``:
    the documents that processes have read. ``fault``: an admission that exceeded a limit.
    """

    ledgers: tuple[Ledger | None, ...]
    teams: tuple[TeamLedger | None, ...]
    marks: tuple[bool, ...] = (True, True)
    gone: tuple[bool, ...] = (False, False)
    held: tuple[Amount, ...] = (NOTHING, NOTHING)
    brought: tuple[Amount, ...] = (NOTHING, NOTHING)
    member: tuple[int, ...] = (NONE, NONE)
    procedures: tuple[Procedure, ...] = ()
    oldest: int = 0
    newest: int = 0
    brings: int = 0
    losses: int = 0
    team_losses: int = 0
    ends: int = 0
    fault: str = ""


def first(bounds: Bounds) -> World:
    places = bounds.documents[0].places
    ledgers = [Ledger(allotments=tuple([Allotment() if t == place else None for t in TEAMS])) for place in places]
    teams = (None, None) if bounds.anew else (TeamLedger(document=0), TeamLedger(document=0))
    counts = {each: getattr(bounds, each) for each in ("brings", "losses", "team_losses", "ends")}
    return World(tuple(ledgers), teams, member=places, **counts)


def plus(a: Amount, b: Amount) -> Amount:
    return a[0] + b[0], a[1] + b[1]


def less(a: Amount, b: Amount) -> Amount:
    return max(a[0] - b[0], 0), max(a[1] - b[1], 0)


def largest(a: Amount, b: Amount) -> Amount:
    return max(a[0], b[0]), max(a[1], b[1])


def smallest(a: Amount, b: Amount) -> Amount:
    return min(a[0], b[0]), min(a[1], b[1])


def covers(a: Amount | None, b: Amount) -> bool:
    return largest(a or NOTHING, b) == (a or NOTHING)


def within(used: Amount, limits: Limits) -> bool:
    return used[0] <= limits[0] and used[1] <= limits[1] and used[0] + used[1] <= limits[2]


def one(model: int) -> Amount:
    return int(model == 0), int(model == 1)


def documents(world: World) -> range:
    """Return the numbers of the documents by which processes may act now."""
    return range(world.oldest, world.newest + 1)


def with_item(items: tuple[Any, ...], number: int, new: Any) -> tuple[Any, ...]:
    return (*items[:number], new, *items[number + 1 :])
