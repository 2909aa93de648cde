"""The bounds within which the model of team ledgers is explored, and rules that are wrong on purpose, with bounds.

Namespace m moves between ledger X and ledger Y. Namespace n stays.
"""

from tests.model.cases import Mutant
from tests.model.teams.world import ENDLESS, NONE, Bounds, Document

Amounts = tuple[int, int, int]

ANY = (ENDLESS,) * 3
ONE = (1, ENDLESS, ENDLESS)
TOTAL = (ENDLESS, ENDLESS, 1)


def documents(*places: tuple[int, int], x: Amounts = ANY, y: Amounts = ANY, m: Amounts = ANY) -> tuple[Document, ...]:
    """Return one document for each pair of places. ``x``, ``y``, ``m``: the limits of the ledgers X and Y, and of m."""
    return tuple(Document(each, (m, ANY), (x, y)) for each in places)


PAIR = ((0, 0), (1, 0))
"""Two pods of model 0, one in each namespace."""

SAME = ((0, 0), (0, 0))
"""Two pods of namespace m."""

JOINS = Bounds(documents((0, 1), (1, 1), y=ONE), PAIR)
"""Namespace m joins team Y, of which n is a member. The team may use one card."""

LEAVES = Bounds(documents((0, 0), (1, 0), x=ONE), PAIR)
"""Namespace m leaves team X, of which n is a member. The team may use one card."""

MOVES = Bounds(documents((0, 1), (1, 1), m=ONE), SAME)
"""Namespace m moves. It may use one card itself, wherever its part is."""

STAYS = Bounds(documents((0, 1), m=ONE), SAME)
"""Namespace m stays in ledger X, and may use one card."""

RETURNS = Bounds(documents((0, 1), (1, 1), (0, 1), m=ONE), SAME)
"""Two edits, within a second: namespace m moves, and moves back."""

BEHIND = RETURNS._replace(known=(0, 1), learns=False)
"""Replica A has read neither edit, and replica B only the first edit. Another process has read both."""

NEW = Bounds(documents((0, 1), (1, 1), m=ONE), SAME, known=(0, 1), learns=False, begins=NONE)
"""Two replicas with different documents get the first pods of a new namespace."""

SMALL = {
    "a namespace joins a team": JOINS,
    "a namespace leaves a team": LEAVES,
    "a namespace moves": MOVES,
    "a namespace moves and returns": RETURNS,
    "two replicas with different documents": BEHIND,
    "a new namespace": NEW,
    "one total for two models": JOINS._replace(documents=documents((0, 1), (1, 1), y=TOTAL), pods=((0, 0), (1, 1))),
    "joins, reserving": JOINS._replace(reserve=(1, 0)),
    "leaves, reserving": LEAVES._replace(reserve=(1, 0)),
    "moves, reserving": MOVES._replace(reserve=(1, 0)),
    "moves, reserving, a crash": MOVES._replace(reserve=(1, 0), crashes=1),
    "moves with late writes, and a loss": MOVES._replace(late=True, losses=1),
    "joins with late writes, and a loss": JOINS._replace(late=True, losses=1),
    "moves, and ends": MOVES._replace(ends=1),
    "moves with forced deletions": MOVES._replace(lingers=True),
}
"""The bounds that `make test` explores: about 100,000 states (worlds)."""

DEEP = {
    "joins a reserving team": JOINS._replace(reserve=(0, 1)),
    "a new namespace, and a loss": NEW._replace(losses=1),
    "a new namespace, and an end": NEW._replace(ends=1),
    "returns, reserving": RETURNS._replace(reserve=(1, 0)),
    "leaves, both reserving": LEAVES._replace(reserve=(1, 1)),
    "moves, reserving, a loss": MOVES._replace(reserve=(1, 0), losses=1),
    "moves, an end, and a loss": MOVES._replace(ends=1, losses=1),
    "returns with late writes, and a loss": RETURNS._replace(late=True, losses=1),
    "two replicas with different documents, reserving": BEHIND._replace(reserve=(1, 0)),
    "forced deletions, reserving": MOVES._replace(lingers=True, reserve=(1, 0)),
    "a lower limit": MOVES._replace(
        documents=(*documents((0, 1), m=(2, ENDLESS, ENDLESS)), *documents((1, 1), m=ONE)), known=(0, 0)
    ),
}
"""The bounds that `make fuzz` explores too."""

MANY = Bounds(
    tuple(
        Document(places, ((2, ENDLESS, ENDLESS), ANY), ((2, ENDLESS, 3),) * 2)
        for places in ((0, 1), (1, 1), (0, 1), (0, 0))
    ),
    pods=((0, 0), (0, 0), (1, 0), (1, 0), (0, 1)),
    known=(0, 1),
    reserve=(1, 1),
    crashes=1,
    ends=1,
    late=True,
)
"""Five pods, four documents, and both namespaces reserve: too many states to explore, so random walks visit them."""

WALKS = {
    "a loss": MANY._replace(losses=1),
    "forced deletions": MANY._replace(lingers=True),
    "new namespaces": MANY._replace(losses=1, begins=NONE),
    "two losses": MANY._replace(crashes=2, losses=2, ends=2, known=(0, 0)),
    "replicas behind": MANY._replace(learns=False, known=(1, 2)),
}
"""The bounds of the random walks."""


FAULTY = MOVES._replace(late=True, losses=1)

MUTANTS = [
    Mutant("FREEZE", "no freeze", MOVES),
    Mutant("FREEZE", "a freeze without compare-and-swap", MOVES),
    Mutant("FREEZE", "an older document moves", MOVES, rests=True),
    Mutant("COPY", "reservations are copied under the replica's own key", MOVES._replace(reserve=(1, 0))),
    Mutant("COPY", "reservations are not copied", MOVES._replace(reserve=(1, 0))),
    Mutant("COPY", "pending charges are not copied", MOVES),
    Mutant("COPY", "terminating charges are not copied", MOVES._replace(lingers=True)),
    Mutant("COPY", "a copied reservation is reaped without a wait", MOVES._replace(reserve=(1, 0))),
    Mutant("COPY", "a copy without a look at the mark", MOVES._replace(ends=1)),
    Mutant("COPY", "a copy of another freeze is taken", FAULTY),
    Mutant("COPY", "a copy without compare-and-swap", MOVES._replace(late=True)),
    Mutant("MARK", "the mark before the copy", JOINS),
    Mutant("MARK", "a mark without compare-and-swap", RETURNS._replace(late=True)),
    Mutant("REMOVE", "removed before the copy", LEAVES),
    Mutant("REMOVE", "removed before the mark", LEAVES),
    Mutant("OPEN", "a copy is opened before the mark", FAULTY),
    Mutant("OPEN", "opened by an older mark", FAULTY),
    Mutant("OPEN", "a new part is opened without a mark", NEW),
    Mutant("OPEN", "a lost part is opened without a wait", FAULTY),
    Mutant("RENEW", "a reservation is renewed for a frozen part", LEAVES._replace(reserve=(1, 1))),
    Mutant("ADMIT", "the limit of the namespace is not checked", MOVES),
    Mutant("ADMIT", "the limit of the team is not checked", JOINS),
    Mutant("ADMIT", "the total is not checked", SMALL["one total for two models"]),
    Mutant("ADMIT", "frozen parts do not count", LEAVES),
    Mutant("ADMIT", "copied parts do not count", JOINS),
    Mutant("ADMIT", "reservations of other parts do not count", JOINS._replace(begins=1, reserve=(1, 0))),
    Mutant("LOST", "a lost ledger is opened without a wait", FAULTY),
    Mutant("LOST", "only one part is restored", JOINS._replace(losses=1)),
    Mutant("LOST", "a lost ledger is opened with the old marks", FAULTY),
    Mutant("END", "a part ends with something reserved", STAYS._replace(reserve=(1, 0), ends=1)),
    Mutant("END", "a new mark is deleted", MOVES._replace(ends=1)),
]
