"""The quota of each GPU model in a namespace, the charges of objects, and the rule by which a charge fits a limit.

All values here are already checked. ``vcuda.quota.document`` reads a quota from the document that people write.
"""

import enum
import functools
import hashlib
import math
import numbers
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING

import msgspec

from vcuda.quota.allowances import Allowance
from vcuda.quota.membership import Members
from vcuda.quota.times import Times
from vcuda.quota.well_known import SYSTEM_NAMESPACES, team_path

DEFAULT = "*"
"""The key of the quota entry that applies to all namespaces without their own entry."""


CORES_PER_CARD = 100

MAX_SLICES = 8
"""The most compute slices and memory slices of one card."""
MAX_CARD_SHARES = 48
"""The most shares of one card whose charge is exact. NVIDIA's drivers serve at most 48 clients of one card."""
UNIT_DECIMALS = 6
"""The most decimals of the cards that one unit in ``gpu_units`` is charged."""
COMMON_DENOMINATOR = math.lcm(*range(1, MAX_CARD_SHARES + 1), 10**UNIT_DECIMALS // CORES_PER_CARD)
"""The denominator of each charge in hundredths of a card divides this number."""


class Mode(enum.StrEnum):
    """A pod over quota is rejected (enforce), admitted with a warning (warn), or admitted and only recorded (audit)."""

    ENFORCE = "enforce"
    WARN = "warn"
    AUDIT = "audit"

    def is_softer_than(self, other: "Mode") -> bool:
        strictest_first = [*Mode]
        return strictest_first.index(self) > strictest_first.index(other)


if TYPE_CHECKING:
    Cores = int | Fraction
else:
    # msgspec decodes no union of int and Fraction. It passes each value of this abstract type to a hook of the decoder.
    Cores = numbers.Rational
"""Hundredths of a card. MIG profiles, units of memory and shares of DRA devices may have fractions of a hundredth, for
example 100/7. They are exact, so that the shares of a card add up to one card."""


def card_count(cores: int | Fraction) -> str:
    """Return hundredths of a card as a number of cards: 800 is ``8``, 250 ``2.5``.

    Parts of hundredths, which MIG profiles have, are rounded up, so that no usage looks smaller than it is.
    """
    return f"{math.ceil(cores) / CORES_PER_CARD:.2f}".rstrip("0").rstrip(".")


def cards(cores: int | Fraction) -> str:
    """Return `card_count` with its unit: 800 is ``8 cards``, 100 ``1 card``."""
    return f"{card_count(cores)} card{'' if card_count(cores) == '1' else 's'}"


def cores_of(part: Fraction) -> int | Fraction:
    """Return a part of a card as hundredths. A part that ledgers cannot store exactly is rounded up to six decimals."""
    millionths = 10**UNIT_DECIMALS
    if COMMON_DENOMINATOR % part.denominator:
        part = Fraction(math.ceil(part * millionths), millionths)
    return exact(CORES_PER_CARD * part)


def exact(cores: Fraction) -> int | Fraction:
    """Return the same amount, as an int if it is whole."""
    return cores.numerator if cores.denominator == 1 else cores


def mebibytes(memory: int) -> str:
    return f"{memory} MiB"


class Limit(msgspec.Struct, frozen=True):
    """The limit of one GPU model in one namespace.

    ``cores`` are hundredths of a card, so 8 cards are 800. 0 cores block the model. ``memory`` is in MiB. None means
    that the amount is not limited.
    """

    cores: int | None
    memory: int | None = None
    card_memory: int = 0
    """The memory of one card in MiB if ``cores`` is None; 0 otherwise."""

    def __add__(self, other: "Limit") -> "Limit":
        cores = None if self.cores is None or other.cores is None else self.cores + other.cores
        memory = None if self.memory is None or other.memory is None else self.memory + other.memory
        return Limit(cores, memory, self.card_memory)

    @property
    def blocks(self) -> bool:
        return self.cores == 0

    @property
    def most_cores(self) -> int:
        """The cards that pods may use under this limit if they request whole cards, in hundredths of a card."""
        return self.cores_in(self.memory or 0) if self.cores is None else self.cores

    def cores_in(self, memory: int) -> int:
        """Convert MiB to hundredths of a card. ``cores`` of the limit must be None."""
        return memory * CORES_PER_CARD // self.card_memory

    def __str__(self) -> str:
        amounts = (cards, self.cores), (mebibytes, self.memory)
        return ", ".join(render(each) for render, each in amounts if each is not None)


NO_LIMIT = Limit(cores=0)
"""The limit of a model that the quota does not list: no cards."""


class Grant(msgspec.Struct, frozen=True):
    """An addition to the limits of a namespace at certain times."""

    limits: Mapping[str, Limit]
    """The amounts added to limits, by GPU model. A model that the entry's ``quota`` sets to 0 stays at 0."""
    times: Times
    why: str = ""


class Granted(msgspec.Struct, frozen=True):
    """The part of a limit that a grant adds at present."""

    model: str
    limit: Limit
    until: float
    """The time when the added part of the limit ends, in Unix seconds; infinite if it does not end."""
    grant: Grant


class Team(msgspec.Struct, frozen=True, dict=True):
    """The limits of a team at one moment. All namespaces of the team share them."""

    name: str
    limits: Mapping[str, Limit]
    total: Limit | None = None
    granted: tuple[Granted, ...] = ()
    """The parts of ``limits`` that grants of the team add."""
    until: float = math.inf
    """When a grant of the team next begins or ends, in Unix seconds; infinite if no grant does."""

    @functools.cached_property
    def digest(self) -> str:
        """A short digest of the limits and of the time until which they hold. The order of models has no effect."""
        text = msgspec.json.encode((sorted(self.limits.items()), self.total, self.until))
        return hashlib.blake2b(text, digest_size=8).hexdigest()


class NamespaceQuota(msgspec.Struct, frozen=True):
    """The quota entry of one namespace as people wrote it. Method `at` returns a copy with the limits of one moment."""

    limits: Mapping[str, Limit]
    """The limit of each model, in the order of the document. Pods may not use other models."""
    pools: tuple[str, ...] = ()
    """The pools (groups of nodes) in which pods may run; empty for every pool."""
    mode: Mode = Mode.ENFORCE
    allow: frozenset[Allowance] = frozenset()
    """The pod settings that are admitted although they can give a pod more GPU than it is charged."""
    order: tuple[str, ...] = ()
    """The GPU models in the order in which they are tried for a pod; empty for the order of ``limits``."""
    one_model: bool = False
    """True if every pod or claim that could get several models is rejected."""
    require_nodes: bool = False
    """True if no pod or claim gets a model of which no node offers what it requests."""
    grants: tuple[Grant, ...] = ()
    """All grants, including those that do not apply now."""
    total: Limit | None = None
    """The limit of the cards of all models together, without memory; None if there is none. Grants do not raise it."""
    excepted: frozenset[str] = frozenset()
    """The namespaces to which the ``*`` entry does not apply: names, and beginnings of names that end with ``*``."""
    own: Mapping[str, Limit] | None = None
    """The limits without grants, in a copy that `at` has made; None in the entry as people wrote it."""
    granted: tuple[Granted, ...] = ()
    """The parts of ``limits`` that grants add, in the order of the grants."""
    team: Team | None = None
    """The team of the namespace, in the copy that `Quota.for_namespace` returns. The limits of the team hold too."""

    def at(self, moment: float | None) -> "NamespaceQuota":
        """Return the quota with the limits of ``moment``, in Unix seconds. If ``moment`` is None, no grant is added.

        If only grants name a model, the model has a limit of 0 while none of these grants applies. So the models that a
        namespace may use do not change with time.
        """
        if not self.grants:
            return self
        written = self.limits if self.own is None else self.own
        limits = dict(written)
        granted = []
        for grant in self.grants:
            until = grant.times.next_change(moment) if moment is not None and grant.times.holds(moment) else None
            for model, added in grant.limits.items():
                own, limit = written.get(model), limits.setdefault(model, Limit(0))
                if until is not None and (own is None or not own.blocks):
                    limits[model] = added if limit.blocks else limit + added
                    granted.append(Granted(model, added, until, grant))
        return msgspec.structs.replace(self, limits=limits, own=written, granted=tuple(granted))

    def ends(self, model: str) -> float:
        """Return when the first grant that now raises the model's limit ends, in Unix time; infinite if none does."""
        return min((each.until for each in self.granted if each.model == model), default=math.inf)


class Quota(msgspec.Struct, frozen=True, dict=True):
    """The quota entries of all namespaces. ``Quota()`` limits no namespace."""

    namespaces: Mapping[str, NamespaceQuota] = {}
    default: NamespaceQuota | None = None
    """The ``*`` entry, for namespaces without their own entry; None if these namespaces are not limited."""
    system: frozenset[str] = SYSTEM_NAMESPACES
    """The namespaces to which the ``*`` entry never applies, because a rejected pod there can stop the cluster."""
    version: str = ""
    """The resourceVersion of the quota ConfigMap. A LIST of pods at this version or later contains every pod that was
    stored before this version of the ConfigMap."""
    moment: float | None = None
    """The time for which `for_namespace` returns the limits, in Unix seconds; None for the limits without grants."""
    teams: Mapping[str, NamespaceQuota] = {}
    """The teams as people wrote them, by name. A member without its own entry has the quota of its team."""
    members: Members = Members()

    @functools.cached_property
    def models(self) -> frozenset[str]:
        """All models that the quota limits, in any namespace, at any time."""
        own = (model for entry in self.entries.values() for model in entry.limits)
        return frozenset((*own, *(model for grant in self._grants for model in grant.limits)))

    @functools.cached_property
    def times(self) -> frozenset[Times]:
        return frozenset(grant.times for grant in self._grants)

    @property
    def entries(self) -> Mapping[str, NamespaceQuota]:
        """All quota entries as people wrote them, by namespace, and the teams, by `team_path`. The key of the ``*``
        entry is `DEFAULT`. The entry of a team's member has the values of the team for the keys that it lacks."""
        teams = {team_path(name): team for name, team in self.teams.items()}
        return {**teams, **self.namespaces, **({DEFAULT: self.default} if self.default else {})}

    @property
    def named(self) -> frozenset[str]:
        """The namespaces that have their own entry, or that a team lists by their name."""
        return frozenset((*self.namespaces, *self.members.names))

    @property
    def _grants(self) -> Iterable[Grant]:
        return (grant for entry in self.entries.values() for grant in entry.grants)

    def at(self, moment: float) -> "Quota":
        return msgspec.structs.replace(self, moment=moment) if self.times else self

    def next_change(self, moment: float) -> float:
        """Return the first time after ``moment`` at which a grant begins or ends; infinite if there is none."""
        return min((times.next_change(moment) for times in self.times), default=math.inf)

    def for_namespace(self, name: str) -> NamespaceQuota | None:
        """Return the quota of a namespace at the time ``self.moment``; None if the namespace is not limited."""
        own, team = self.namespaces.get(name), self.members.team_of(name) if self.teams else None
        if team is not None:
            return self._of_member(team, own)
        # A system namespace can have its own quota entry. If the webhook is not called for its pods, they are charged,
        # but never rejected.
        if own is not None:
            return self._at_moment(own)
        default = self.default
        if default is None or name in self.system or name in default.excepted or name.startswith(self._beginnings):
            return None
        return self._at_moment(default)

    @functools.cached_property
    def _beginnings(self) -> tuple[str, ...]:
        excepted = self.default.excepted if self.default else ()
        return tuple(each.removesuffix("*") for each in excepted if each.endswith("*"))

    def _at_moment(self, written: NamespaceQuota) -> NamespaceQuota:
        if not written.grants:
            return written
        if id(written) not in self._known:
            self._known[id(written)] = written.at(self.moment)
        return self._known[id(written)]

    def of_team(self, name: str) -> NamespaceQuota:
        """Return the quota of a team at the time ``self.moment``. The team must exist."""
        return self._at_moment(self.teams[name])

    def team(self, name: str) -> Team:
        """Return the limits of a team at the time ``self.moment``. The team must exist."""
        shared, moment = self.of_team(name), self.moment
        changes = (math.inf if moment is None else each.times.next_change(moment) for each in shared.grants)
        return Team(name, shared.limits, shared.total, shared.granted, min(changes, default=math.inf))

    def _of_member(self, team: str, own: NamespaceQuota | None) -> NamespaceQuota:
        key = team, id(own)
        if key not in self._known:
            joint = self.of_team(team) if own is None else self._at_moment(own)
            self._known[key] = msgspec.structs.replace(joint, team=self.team(team))
        return self._known[key]

    @functools.cached_property
    def _known(self) -> dict[object, NamespaceQuota]:
        # A cache of quota entries with the limits at ``moment``. The keys have the id() of the entry as people wrote
        # it, and the name of the team.
        return {}


class Charge(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The GPU quota of one model that one or several objects (pods or claims) of a namespace take.

    ``cores`` are hundredths of a card. ``memory`` is the sum of requests for memory in MiB. ``card_memory`` is the sum
    of requests for whole cards or percentages of a card, in hundredths of a card's memory. `memory_under` converts
    ``card_memory`` to MiB by the present limit. So a recorded charge stays correct if the limit changes.
    """

    cores: Cores = 0
    memory: int = 0
    card_memory: Cores = 0

    # All arithmetic of charges is here and in `total`. A test fails if a method leaves out a field of this class.

    def __add__(self, other: "Charge") -> "Charge":
        return Charge(self.cores + other.cores, self.memory + other.memory, self.card_memory + other.card_memory)

    def __sub__(self, other: "Charge") -> "Charge":
        return Charge(self.cores - other.cores, self.memory - other.memory, self.card_memory - other.card_memory)

    def __mul__(self, count: int) -> "Charge":
        return Charge(self.cores * count, self.memory * count, self.card_memory * count)

    def mean(self, count: int) -> "Charge":
        """Return the charge divided by ``count``, with each amount rounded up."""
        return Charge(-(-self.cores // count), -(-self.memory // count), -(-self.card_memory // count))

    def peak(self, other: "Charge") -> "Charge":
        """Return the larger of each amount of two charges, as Kubernetes does for init containers and containers."""
        return Charge(
            max(self.cores, other.cores), max(self.memory, other.memory), max(self.card_memory, other.card_memory)
        )

    def minimum(self, other: "Charge") -> "Charge":
        """Return a charge with the smaller of each amount of both charges."""
        return Charge(
            min(self.cores, other.cores), min(self.memory, other.memory), min(self.card_memory, other.card_memory)
        )

    def covers(self, other: "Charge") -> bool:
        """Return whether no amount in ``other`` is larger than the same amount in this charge."""
        return self.cores >= other.cores and self.memory >= other.memory and self.card_memory >= other.card_memory

    def memory_under(self, limit: Limit) -> int:
        """Return the charged memory in MiB, rounded up, so that many small shares cannot exceed ``limit``.

        The memory of one card is the memory of the limit divided by the cards of the limit. If the limit has no cards,
        the memory of one card is the limit's ``card_memory``.
        """
        memory, cores = (limit.card_memory, CORES_PER_CARD) if limit.cores is None else (limit.memory, limit.cores)
        if not memory or not cores:
            return self.memory
        return self.memory + -(-self.card_memory * memory // cores)

    def __str__(self) -> str:
        return f"{cards(self.cores)}, {mebibytes(self.memory)}" if self.memory else cards(self.cores)


def total(charges: Iterable[Charge]) -> Charge:
    # sum() would be slow, because it creates a Charge for each addition. This function runs for every pod.
    cores: Cores = 0
    memory, card_memory = 0, cores
    for charge in charges:
        cores += charge.cores
        memory += charge.memory
        card_memory += charge.card_memory
    return Charge(cores, memory, card_memory)


class Usage(msgspec.Struct, frozen=True, gc=False):
    """The usage of one model in a namespace."""

    used: Charge = Charge()
    """All charges, including the pending, terminating and reserved charges."""
    pending: Charge = Charge()
    """The charges of admitted pods that no watch has reported as stored yet."""
    terminating: Charge = Charge()
    """The charges of deleted pods whose containers may still run."""
    reserved: Charge = Charge()
    """The quota that webhook replicas have reserved, so that they can admit pods without a write to the ledger."""
    others: Charge = Charge()
    """The quota that the other namespaces of the team may use. It is not part of ``used``."""

    @property
    def in_use(self) -> Charge:
        """The usage that is shown to people. Reserved quota is excluded, because no pod uses this quota yet."""
        return self.used - self.reserved


def all_models(usages: Iterable[Usage]) -> Usage:
    """Return the usage of all models together, from the usage of each model."""
    return Usage(*map(total, zip(*map(msgspec.structs.astuple, usages), strict=True)))


def fits(limit: Limit, used: Charge, asked: Charge) -> bool:
    """Return whether the sum of two charges, ``used`` and ``asked``, is within a limit of cores and memory."""
    after = used + asked
    if limit.cores is not None and after.cores > limit.cores:
        return False
    return limit.memory is None or after.memory_under(limit) <= limit.memory
