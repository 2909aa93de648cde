"""The ledger of a team: how much of the team's quota each of its namespaces may use.

Each namespace has its own ledger. The ledger of a team allots a part of the team's quota to each of them, and a
namespace's ledger records its allotment. The usage of a namespace's ledger stays within its allotment, and the sum of
all allotments within the team's limits. docs/team-ledgers.md has the rules, and `tests/model/teams` explores them.
"""

import functools
import itertools
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from vcuda.ledger.ledger import Allotment, Ledger, charges_by_model, is_older
from vcuda.ledger.text import ENCODER, FORMAT, Version, check_format, decode_cores
from vcuda.quota.model import Charge, Mode, NamespaceQuota, Team, fits, total

MAX_MEMBERS = 500
"""The most namespaces to which a team allots quota. In a larger team, the pods of further namespaces are rejected."""

AMPLE = 4
"""A raise allots this many times what the namespace needs, if the others leave this many times that amount free. So the
next admissions need no raise, which is two writes more."""

Allotted = Mapping[str, Charge]
"""An amount of quota by GPU model."""


class TeamLedger(msgspec.Struct, frozen=True, dict=True):
    """The allotments of one team."""

    allotted: Mapping[str, Allotted] = {}
    """By namespace: the part of the team's quota that the namespace may use."""
    config_version: str = ""
    """The newest version of the quota ConfigMap by which a process wrote this ledger."""
    wanted: str = ""
    """A replica that finds no free quota writes a new text here, so that the leader takes back unused allotments."""
    closed: str = ""
    """Empty if the ledger is open. A random text while allotments may be missing. No process then raises any."""
    counter: int = 0
    """A number that grows with each raise. The API server stores no new version if a write changes nothing."""

    @functools.cached_property
    def sums(self) -> Allotted:
        """The sum of all allotments, by model. A large team has thousands, so they are added once for each version."""
        return charges_by_model(each for allotted in self.allotted.values() for each in allotted.items())


class _Text(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    format: int
    allotted: Mapping[str, Allotted] = {}
    config_version: Version = ""
    wanted: str = ""
    closed: str = ""
    counter: int = 0


_TEXT = msgspec.json.Decoder(_Text, dec_hook=decode_cores)


def write_team_ledger(ledger: TeamLedger) -> str:
    return ENCODER.encode(_Text(FORMAT, **msgspec.structs.asdict(ledger))).decode()


def read_team_ledger(text: str) -> TeamLedger:
    """Return the ledger in ``text``. Raises OtherFormat, or ValueError if the text is damaged."""
    check_format(text)
    fields = msgspec.structs.asdict(_TEXT.decode(text))
    del fields["format"]
    return TeamLedger(**fields)


def needed(ledger: Ledger) -> Allotted:
    """Return the quota that a namespace must have allotted: all charges and reservations in its ledger, by model.

    Charges that fill the whole quota of the namespace are left out, as they must not fill the quota of its team.
    """
    return {model: usage.used for model, usage in ledger.without_fill().usages().items()}


def covers(allotted: Allotted, wanted: Allotted) -> bool:
    """Return whether ``allotted`` is at least as large as ``wanted`` for each model."""
    return all(allotted.get(model, Charge()).covers(charge) for model, charge in wanted.items())


def _times(amounts: Allotted, count: int) -> Allotted:
    return {model: charge * count for model, charge in amounts.items()}


def largest(*amounts: Allotted) -> Allotted:
    """Return the largest of each amount."""
    peaks: dict[str, Charge] = {}
    for model, charge in itertools.chain.from_iterable(each.items() for each in amounts):
        peaks[model] = peaks.get(model, Charge()).peak(charge)
    return peaks


def allotted_to_others(ledger: TeamLedger, namespace: str) -> Allotted:
    """Return the sum of what is allotted to all other namespaces of the team, by model."""
    own = ledger.allotted.get(namespace, {})
    others = {model: charge - own.get(model, Charge()) for model, charge in ledger.sums.items()}
    return {model: charge for model, charge in others.items() if charge != Charge()}


def is_crowded_for(ledger: TeamLedger, namespace: str) -> bool:
    """Return whether the team already allots quota to `MAX_MEMBERS` namespaces, and this namespace is none of them."""
    return namespace not in ledger.allotted and len(ledger.allotted) >= MAX_MEMBERS


def fits_team(team: Team, others: Allotted, own: Allotted) -> bool:
    """Return whether a namespace may use ``own`` within all limits of the team. ``others``: the other allotments."""
    return _fits_total(team, others, own) and all(
        fits(limit, others.get(model, Charge()), own.get(model, Charge())) for model, limit in team.limits.items()
    )


def fitting(team: Team, others: Allotted, *amounts: Allotted) -> Allotted:
    """Return, for each model, the first of the ``amounts`` that fits the limits of the team.

    ``others``: the allotments of the other namespaces. A model of which they exceed the limit excludes no other model.
    """
    found: dict[str, Charge] = {}
    for own in amounts:
        for model, charge in own.items() if _fits_total(team, others, own) else ():
            # Pods may not use a model without a limit. Its stored pods count only for all models together.
            limit = team.limits.get(model)
            if limit is None or fits(limit, others.get(model, Charge()), charge):
                found.setdefault(model, charge)
    return found


def _fits_total(team: Team, others: Allotted, own: Allotted) -> bool:
    return team.total is None or fits(team.total, total(others.values()), total(own.values()))


def raised(ledger: TeamLedger, namespace: str, charges: Allotted, config_version: str = "") -> TeamLedger:
    """Return the ledger with at least ``charges`` allotted to a namespace. No allotment becomes smaller.

    ``config_version``: the version of the quota ConfigMap of this process; empty if the caller sets it later. The
    caller must write the ledger by compare-and-swap *after* it has read the namespace's own ledger, and *before* it
    writes that ledger.
    """
    larger = largest(ledger.allotted.get(namespace, {}), charges)
    allotted = {**ledger.allotted, **({namespace: larger} if larger else {})}
    version = config_version or ledger.config_version
    return replace(ledger, allotted=allotted, config_version=version, counter=ledger.counter + 1)


def lowered(ledger: TeamLedger, namespace: str, charges: Allotted) -> TeamLedger:
    """Return the ledger with at most ``charges`` allotted to a namespace. No allotment becomes larger.

    The caller must read the ledger of the team, then write the namespace's own ledger with `shrunk`, then replace
    exactly the version of the team's ledger that it read.
    """
    left = {name: each for name, each in ledger.allotted.items() if name != namespace}
    lower = minimum(ledger.allotted.get(namespace, {}), charges)
    return replace(ledger, allotted={**left, **({namespace: lower} if lower else {})})


def minimum(one: Allotted, other: Allotted) -> Allotted:
    """Return the smaller of each amount of both. Models without an amount are left out."""
    smaller = {model: charge.minimum(other.get(model, Charge())) for model, charge in one.items()}
    return {model: charge for model, charge in smaller.items() if charge != Charge()}


def shrunk(ledger: Ledger, team: str) -> Ledger:
    """Return a namespace's ledger whose allotment from ``team`` is at most what the ledger needs, with a new counter.

    The caller must ensure that the ledger names the team. If charges fill the quota of the namespace, their pods are
    not known. They were admitted within the allotment, so the allotment stays.
    """
    is_filled = ledger.without_fill() is not ledger
    charges = ledger.allotments[team].charges
    return _changed(ledger, team, charges if is_filled else minimum(charges, needed(ledger)))


def unchecked(ledger: Ledger, team: str) -> Ledger:
    """Return a namespace's ledger as `shrunk` does, whose next admission checks the limits of the team again."""
    after = shrunk(ledger, team)
    return replace(after, allotments={**after.allotments, team: replace(after.allotments[team], terms="")})


def _changed(ledger: Ledger, team: str, charges: Allotted) -> Ledger:
    before = ledger.allotments[team]
    after = Allotment(charges, before.terms, before.counter + 1)
    return replace(ledger, allotments={**ledger.allotments, team: after})


def allot(ledger: Ledger, team: str, charges: Allotted, terms: str = "") -> Ledger:
    """Return a namespace's ledger with an allotment from ``team``, and from no other team.

    ``terms``: empty if ``charges`` was not checked by the limits, so that the next admission checks it.
    """
    counter = ledger.allotments[team].counter if team in ledger.allotments else 0
    return replace(ledger, allotments={team: Allotment(charges, terms, counter)})


def brings_charges(ledger: Ledger, team: str, namespace: str, stored: TeamLedger) -> bool:
    """Return True if a namespace joins the team with charges that the ledger ``stored`` of the team lacks."""
    if team not in ledger.allotments or is_crowded_for(stored, namespace):
        return False
    is_joining = len(ledger.allotments) > 1 or not ledger.allotments[team].charges
    return is_joining and not covers(stored.allotted.get(namespace, {}), needed(ledger))


def join(ledger: Ledger, team: str, config_version: str) -> Ledger:
    """Return a namespace's ledger that also names ``team``. The caller must write it before it raises the allotment."""
    return replace(ledger, allotments={**ledger.allotments, team: Allotment()}, team_version=config_version)


def leave(ledger: Ledger, config_version: str) -> Ledger:
    """Return a namespace's ledger that names no team."""
    return replace(ledger, allotments={}, team_version=config_version) if ledger.allotments else ledger


class Cover(NamedTuple):
    """The ledger of a team that allots at least the usage of a namespace, and the charges that the namespace's ledger
    may record. ``fits``: False if the team exceeds a limit by this allotment."""

    team: TeamLedger
    charges: Allotted
    fits: bool


def cover(team: Team, stored: TeamLedger, namespace: str, *, recorded: Allotted, used: Allotted) -> Cover:
    """Allot ``used`` to a namespace whose pods run already, and the rest of the ``recorded`` allotment if it fits."""
    others = allotted_to_others(stored, namespace)
    charges = next((each for each in (largest(recorded, used), used) if fits_team(team, others, each)), used)
    is_within = fits_team(team, others, charges) or covers(stored.allotted.get(namespace, {}), charges)
    return Cover(raised(stored, namespace, charges), charges, is_within)


class Raise(NamedTuple):
    """A larger allotment: the ledgers of the team and of the namespace that must be written, in this order."""

    team: TeamLedger
    ledger: Ledger


class Membership(NamedTuple):
    """The team of a namespace, by the quota document that a process has read.

    ``team``: None if the namespace has no team. ``version``: the resourceVersion of the quota ConfigMap.
    ``enforced``: False if the quota only warns or audits.
    """

    team: Team | None
    version: str
    enforced: bool

    @classmethod
    def of(cls, quota: NamespaceQuota, version: str) -> "Membership":
        return cls(quota.team, version, quota.mode is Mode.ENFORCE)

    @property
    def name(self) -> str:
        """The name of the team; empty if the namespace has no team."""
        return self.team.name if self.team else ""

    @property
    def terms(self) -> str:
        """A text that names the limits of the team, and the time in which they hold.

        Another namespace may use an unused allotment while other limits hold. So limits that hold again have new terms.
        """
        return f"{self.team.digest}.{self.version}" if self.team else ""

    def is_named_by(self, ledger: Ledger) -> bool:
        """Return True if the ledger of the namespace names exactly this team; none if the namespace has no team."""
        return [*ledger.allotments] == ([self.name] if self.team else [])

    def is_outdated_for(self, ledger: Ledger) -> bool:
        """Return True if a newer quota ConfigMap has moved the namespace to another team."""
        return not self.is_named_by(ledger) and is_older(self.version, ledger.team_version)

    def allots(self, ledger: Ledger, planned: Allotted) -> bool:
        """Return whether the namespace may use ``planned`` by the allotment in its ledger."""
        allotment = ledger.allotments.get(self.name)
        return allotment is not None and allotment.terms == self.terms and covers(allotment.charges, planned)

    def raise_allotment(
        self, stored: TeamLedger, namespace: str, ledger: Ledger, *, planned: Allotted, extra: Allotted
    ) -> Raise:
        """Return the ledgers that allot ``planned`` to the namespace, and ``extra`` if this fits too.

        While much quota of the team is free, the namespace gets `AMPLE` times as much, so that its next admissions need
        no raise. If the limits are enforced, a model that does not fit the limits of the team gets no larger allotment.
        """
        if (team := self.team) is None:
            return Raise(stored, ledger)
        others = allotted_to_others(stored, namespace)
        wanted = charges_by_model([*planned.items(), *extra.items()])
        ample = _times(wanted, AMPLE)
        left_free = _times(ample, AMPLE - 1)
        checked = {
            **fitting(team, others, wanted, planned),
            **fitting(team, charges_by_model([*others.items(), *left_free.items()]), ample),
        }
        written = raised(stored, namespace, checked, self.version)
        if not self.enforced:
            written = raised(written, namespace, planned)
        allotted = written.allotted.get(namespace, {})
        # The unused rest of an earlier allotment may be used again if it fits the present limits.
        charges = fitting(team, others, allotted, checked) if covers(checked, planned) else checked
        after = allot(ledger, team.name, charges, self.terms)
        if not covers(allotted, planned):
            # Another team must go on counting the charges that this team does not allot yet.
            after = replace(after, allotments={**ledger.allotments, **after.allotments})
        if {*after.allotments} != {*ledger.allotments}:
            after = replace(after, team_version=self.version)
        return Raise(written, after)
