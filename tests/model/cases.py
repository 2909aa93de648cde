"""The bounds within which the model is explored, and rules that are wrong on purpose, each with a violation."""

from typing import Any, NamedTuple

from tests.model.world import Bounds

EXACT = Bounds(reserve=0)
"""Bounds without reservations: a replica admits a pod only after a confirmed write."""

RESERVING = Bounds()

RUNNING_ON = EXACT._replace(replicas=1, runs=2, presumed=1)
"""Bounds of a replica whose pods, when force-deleted, keep their containers running after their charges have ended."""

RUNNING_ON_RESERVED = RESERVING._replace(replicas=1, runs=1)
"""Containers run on for no longer than the deadline of a pod, so a replica may admit from its reservation."""

SMALL = {
    "nothing reserved": EXACT,
    "nothing reserved, asked again": EXACT._replace(asked_again=True),
    "nothing reserved, three pods in groups, one replica": EXACT._replace(pods=3, limit=2, replicas=1),
    "nothing reserved, crash and loss": EXACT._replace(crashes=1, losses=1),
    "nothing reserved, in a new namespace": EXACT._replace(losses=1, new_namespace=True),
    "nothing reserved, an end and a loss": EXACT._replace(losses=1, ends=1),
    "reserving": RESERVING,
    "reserving, one replica that crashes": RESERVING._replace(replicas=1, crashes=1),
    "reserving, in a new namespace": RESERVING._replace(replicas=1, losses=1, new_namespace=True),
    "forced deletions": RUNNING_ON,
    "forced deletions, and an end": RUNNING_ON._replace(ends=1),
    "forced deletions of pods of a reservation": RUNNING_ON_RESERVED,
}
"""The bounds that `make test` explores. Within them, the model has about 60,000 states (worlds)."""

FULL = SMALL | {
    "nothing reserved, three pods in groups": EXACT._replace(pods=3, limit=2),
    "nothing reserved, crash, loss, asked again": EXACT._replace(crashes=1, losses=1, asked_again=True),
    "nothing reserved, a longer deadline": EXACT._replace(deadline=2, crashes=1, losses=1),
    "reserving, asked again": RESERVING._replace(asked_again=True),
    "reserving, a crash": RESERVING._replace(crashes=1),
    "reserving, a loss": RESERVING._replace(losses=1),
    "reserving, an end and a loss": RESERVING._replace(replicas=1, losses=1, ends=1),
    "reserving, a new namespace, and a loss": RESERVING._replace(losses=1, new_namespace=True),
    "reserving, a longer deadline": RESERVING._replace(deadline=2),
    "reserving, a longer reservation time": RESERVING._replace(lasting=2),
    "reserving, three pods": RESERVING._replace(pods=3),
    "reserving two of two, one replica": RESERVING._replace(limit=2, pods=3, reserve=2, replicas=1, crashes=1),
    "nothing reserved, three pods asked again": EXACT._replace(pods=3, limit=2, asked_again=True),
    "forced deletions, three pods": RUNNING_ON._replace(pods=3, limit=2),
    "forced deletions, two replicas": RUNNING_ON._replace(replicas=2, asked_again=True),
    "forced deletions, a crash": RUNNING_ON._replace(crashes=1),
    "forced deletions of pods of a reservation, a crash": RUNNING_ON_RESERVED._replace(crashes=1),
    "forced deletions of pods of a reservation, two of two": RUNNING_ON_RESERVED._replace(limit=2, pods=3, reserve=2),
}
"""The bounds that `python -m tests.model --full` explores."""


class Mutant(NamedTuple):
    """A rule that is wrong on purpose (``broken``) in place of ``rule``, and bounds within which it causes a violation.

    ``rests``: True if the only violation is a charge that is never released, or a move that never ends.
    """

    rule: str
    broken: str
    bounds: Any
    """The `Bounds` of the model of one ledger, or those of the model of team ledgers."""
    rests: bool = False

    @property
    def broken_bounds(self) -> Any:
        return self.bounds._replace(broken=self.broken)

    @property
    def rest_every(self) -> int:
        """Return 20 if every 20th state (world) is checked for charges that are never released; 0 for no check."""
        return 20 if self.rests else 0


TODAY = EXACT._replace(asked_again=True)
LOSING = EXACT._replace(losses=1)
OPENING = EXACT._replace(losses=1, new_namespace=True)

MUTANTS = [
    Mutant("DEADLINE", "a deadline from the yes", EXACT),
    Mutant("DEADLINE", "a new deadline when asked again", TODAY),
    Mutant("CAS", "no compare-and-swap", EXACT),
    Mutant("SYNC", "yes before the write is confirmed", EXACT),
    Mutant("SYNC", "synced despite other reservations", RESERVING),
    Mutant("SPEND", "spent from the old reservation", RESERVING),
    Mutant("SPEND", "spent from the new reservation", RESERVING),
    Mutant("SPEND", "spent after the reservation time", RESERVING),
    Mutant("SPEND", "a reservation from the answer", RESERVING),
    Mutant("FLUSH", "flushed in two writes", RESERVING),
    Mutant("UNKNOWN", "a read of the old version decides it", RESERVING),
    Mutant("LOSTRES", "a lost reservation is renewed", RESERVING._replace(asked_again=True)),
    Mutant("NEWID", "an id that outlives its process", RESERVING._replace(crashes=1)),
    Mutant("RECOUNT", "recounted by an older view", EXACT),
    Mutant("RECOUNT", "a count from another view", EXACT),
    Mutant("GONE", "gone without an age", EXACT),
    Mutant("GONE", "gone without a read", EXACT),
    Mutant("GONE", "gone without a margin", EXACT),
    Mutant("GONE", "never gone", EXACT, rests=True),
    Mutant("REAP", "reaped after the reservation time alone", RESERVING._replace(deadline=2)),
    Mutant("REAP", "reaped after the deadline alone", RESERVING._replace(lasting=2)),
    Mutant("REAP", "reaped without a margin", RESERVING),
    Mutant("REAP", "reaped although renewed", RESERVING),
    Mutant("REAP", "reaped without a LIST", RESERVING),
    Mutant("REAP", "reaped by an earlier LIST", RESERVING),
    Mutant("REAP", "reaped without its count", RESERVING),
    Mutant("REAP", "never reaped", RESERVING._replace(replicas=1, crashes=1), rests=True),
    Mutant("LOSS", "recreated and used at once", LOSING),
    Mutant("OPEN", "opened despite a mark", OPENING),
    Mutant("OPEN", "opened without a mark", OPENING),
    Mutant("OPEN", "opened on a later version", OPENING),
    Mutant("REAP", "reaped without a new mark", EXACT._replace(losses=1, ends=1)),
    Mutant("END", "ended with something pending", EXACT._replace(ends=1)),
    Mutant("TERMINATING", "a forced deletion releases", RUNNING_ON),
    Mutant("TERMINATING", "released before its time", RUNNING_ON),
    Mutant("UNSEEN", "an unseen decrease releases", RUNNING_ON),
    Mutant("UNSEEN", "terminating for the default only", RUNNING_ON),
    Mutant("UNSEEN", "hidden by what was spent", RUNNING_ON_RESERVED._replace(limit=2, pods=3, lasting=0)),
    Mutant("GONE", "gone without a watch", RUNNING_ON),
    Mutant("SPEND", "spent although it may run for long", RUNNING_ON_RESERVED._replace(runs=4)),
    Mutant("END", "ended with something terminating", RUNNING_ON._replace(ends=1)),
    Mutant("REJECT", "rejected by the ledger", EXACT),
    Mutant("REJECT", "rejected by a LIST and what is pending", EXACT),
]
