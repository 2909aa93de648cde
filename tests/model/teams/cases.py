"""The bounds within which the model of team ledgers is explored, and rules that are wrong on purpose, with bounds.

Namespaces m and n are in team X, or move to team Y or out of a team. Every pod takes one card.
"""

from tests.model.cases import Mutant
from tests.model.teams.world import ANY, NONE, Bounds, Document, Limits

ONE = (1, 9, 9)
TWO = (2, 9, 9)
SUM = (9, 9, 1)

BOTH = (0, 0)


def edits(*places: tuple[int, int], x: Limits = ONE) -> tuple[Document, ...]:
    """Return one document for each pair of places."""
    return tuple(Document(each, (x, ONE), (ONE, ONE)) for each in places)


def limits(*x: Limits) -> tuple[Document, ...]:
    """Return one document for each limit of team X, in which both namespaces stay."""
    return tuple(Document(BOTH, (each, ANY)) for each in x)


STAY = Bounds(limits(ONE))
"""Two namespaces share one card."""

LOWERED = Bounds(limits(TWO, ONE), procedures=1)
GRANTED = Bounds(limits(ONE, TWO, ONE), procedures=1)
"""The limit is raised, and then is as before: a grant begins and ends."""

TOTAL = Bounds(limits((9, 9, 2)), procedures=1, models=2)
UNEVEN = Bounds((Document(BOTH, ((2, 1, 9), ANY), ((2, 1, 9), (1, 0, 9))),), procedures=1, models=2, brings=1)
JOINS = Bounds(edits((NONE, 0), BOTH))
MOVES = Bounds(edits((1, 0), BOTH), procedures=1)
RETURNS = Bounds(edits(BOTH, (1, 0), BOTH), procedures=1)
BRINGS = STAY._replace(brings=1, procedures=1)
TEAM_LOST = STAY._replace(team_losses=1)
LOST = STAY._replace(losses=1)
BOTH_LOST = STAY._replace(losses=1, team_losses=1, procedures=1)

SMALL = {
    "two namespaces share one card": STAY,
    "two namespaces share two cards": STAY._replace(documents=limits(TWO)),
    "a lower limit": LOWERED,
    "a grant begins and ends": GRANTED,
    "one total for two models": TOTAL,
    "a namespace joins": JOINS,
    "a namespace moves": MOVES,
    "a pod is not admitted": BRINGS,
    "a team ledger is lost": TEAM_LOST,
    "a namespace's ledger is lost": LOST,
    "both ledgers are lost": BOTH_LOST,
    "a namespace ends": STAY._replace(ends=2, procedures=1),
}
"""The bounds that `make test` explores."""

DEEP = {
    "moves": MOVES._replace(procedures=2),
    "a namespace moves and returns": RETURNS,
    "a new team": Bounds(edits((NONE, NONE), BOTH), procedures=1, anew=True),
    "a lower limit": LOWERED._replace(procedures=2),
    "a grant": GRANTED._replace(procedures=2),
    "a total": TOTAL._replace(procedures=2),
    "pods are not admitted": BRINGS._replace(brings=2, procedures=2),
    "both ledgers are lost": BOTH_LOST._replace(procedures=2),
    "a namespace ends": STAY._replace(ends=2),
    "a namespace ends and its ledger is lost": STAY._replace(ends=1, losses=1),
    "three procedures": STAY._replace(procedures=3),
    "three procedures, a team ledger is lost": TEAM_LOST._replace(procedures=3),
    "moves, and a team ledger is lost": MOVES._replace(team_losses=1),
    "moves, and a ledger is lost": MOVES._replace(losses=1),
    "a new team, and a ledger is lost": Bounds(edits((NONE, NONE), BOTH), procedures=1, anew=True, losses=1),
}
"""The bounds that `make fuzz` explores too."""

MANY = Bounds(
    tuple(Document(places, ((2, 2, 3),) * 2, (TWO, ANY)) for places in (BOTH, (1, 0), BOTH, (NONE, 0))),
    procedures=4,
    models=2,
    brings=1,
)

WALKS = {
    "two models and four documents": MANY,
    "losses": MANY._replace(losses=1, team_losses=2),
    "ends": MANY._replace(ends=2, losses=1),
}
"""The bounds of the random walks."""

MUTANTS = [
    Mutant("ADMIT", "the limit of the namespace is not checked", JOINS),
    Mutant("ADMIT", "the terms are not compared", LOWERED),
    Mutant("ADMIT", "a pod takes the place of another without a check", BRINGS),
    Mutant("ADMIT", "the terms are the limits", GRANTED),
    Mutant("PLACED", "an older document admits", MOVES, rests=True),
    Mutant("PLACED", "an older document moves", MOVES, rests=True),
    Mutant("CHECK", "the limit of the team is not checked", STAY),
    Mutant("CHECK", "the total is not checked", TOTAL),
    Mutant("CHECK", "only the usage of the others counts", STAY),
    Mutant("RAISE", "the ledger before the team ledger", STAY),
    Mutant("RAISE", "only the last write is tried again", STAY),
    Mutant("RAISE", "a raise lowers", STAY._replace(documents=limits(TWO))),
    Mutant("RAISE", "enough is allotted already", STAY),
    Mutant("RAISE", "the ledger is charged with all that is allotted", LOWERED),
    Mutant("RAISE", "unused allotments of other models are kept", TOTAL),
    Mutant("RAISE", "an older document raises", LOWERED),
    Mutant("RAISE", "a raise in a closed team ledger", TEAM_LOST),
    Mutant("JOIN", "a join and its raise are one write", Bounds(edits(BOTH, (NONE, 0)), losses=1)),
    Mutant("PLACED", "a namespace that seems to have ended leaves its team", STAY._replace(ends=1, procedures=1)),
    Mutant("LOST", "no lost ledger is made", LOST, rests=True),
    Mutant("COVER", "a forced raise keeps the other allotments", BRINGS),
    Mutant("COVER", "no move is completed", MOVES, rests=True),
    Mutant("LOWER", "a lowering raises", UNEVEN),
    Mutant("LOWER", "the ledger is not written", STAY),
    Mutant("LOWER", "an unchanged ledger is not written", STAY),
    Mutant("LOWER", "the team ledger is read last", STAY),
    Mutant("LOWER", "a joined ledger gives back what is not covered", LOST),
    Mutant("LOWER", "every ledger without the team gives back", LOST),
    Mutant("LOWER", "a missing ledger gives back", LOST),
    Mutant("LOWER", "a closed ledger gives back", LOST),
    Mutant("LOWER", "nothing is lowered", STAY, rests=True),
    Mutant("OPEN", "a new team ledger is open", TEAM_LOST),
    Mutant("OPEN", "an opening writes no ledger", TEAM_LOST),
    Mutant("OPEN", "an opening keeps the terms", BRINGS),
    Mutant("OPEN", "an opening joins no ledger", BOTH_LOST),
    Mutant("OPEN", "an opening waits for no ledger", BOTH_LOST),
]
