"""Decides waiting charges by one version of the ledger, and drafts the ledger that a webhook replica writes for them.

A namespace of a team may need more quota of the team than its ledger records. Then the ledger of the team is raised
before the draft is written.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from vcuda.errors import Unavailable
from vcuda.ledger.ledger import Ledger, Rejected, charges_by_model, is_older
from vcuda.ledger.team import (
    MAX_MEMBERS,
    Allotted,
    TeamLedger,
    allot,
    allotted_to_others,
    covers,
    leave,
    needed,
    raised,
)
from vcuda.quota.model import Charge, Mode, NamespaceQuota, Team, fits, total
from webhook.ledger.batches import Charging, Decided, Read, decide_all
from webhook.ledger.charging import RetryLater
from webhook.ledger.reservations import Plan
from webhook.ledger.spending import Spending
from webhook.ledger.team_account import TeamAccount

NEWER_QUOTA = "the ledger was counted by a newer quota ConfigMap than this replica has read"


class Raise(NamedTuple):
    """A larger allotment: the ledgers of the team and of the namespace that must be written, in this order."""

    team: TeamLedger
    ledger: Ledger


class Membership(NamedTuple):
    """The team of a namespace, by the quota document of this replica.

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
    def terms(self) -> str:
        """A text that names the limits of the team, and the time in which they hold.

        Another namespace may use an unused allotment while other limits hold. So limits that hold again have new terms.
        """
        return f"{self.team.terms}.{self.version}" if self.team else ""

    def is_recorded(self, ledger: Ledger) -> bool:
        """Return True if the ledger of the namespace names exactly this team; none if the namespace has no team."""
        return [*ledger.allotments] == ([self.team.name] if self.team else [])

    def checked(self, ledger: Ledger) -> Ledger:
        """Return the ledger of the namespace; without its former teams if the namespace has no team any more.

        Raises Unavailable if a newer quota ConfigMap has moved the namespace to another team.
        """
        if self.is_recorded(ledger):
            return ledger
        if is_older(self.version, ledger.placed):
            raise Unavailable(NEWER_QUOTA)
        return ledger if self.team else leave(ledger, self.version)

    def allots(self, ledger: Ledger, planned: Allotted) -> bool:
        """Return whether the namespace may use ``planned`` by the allotment in its ledger."""
        allotment = ledger.allotments.get(self.team.name) if self.team else None
        return allotment is not None and allotment.terms == self.terms and covers(allotment.charges, planned)

    def fitting(self, others: Allotted, *amounts: Allotted) -> Allotted:
        """Return, for each model, the first of the ``amounts`` that fits the limits of the team."""
        found: dict[str, Charge] = {}
        if (team := self.team) is None:
            return found
        for each in amounts:
            if team.total and not fits(team.total, total(others.values()), total(each.values())):
                continue
            # Pods may not use a model without a limit. Its stored pods count only for all models together.
            limited = ((model, charge, team.limits.get(model)) for model, charge in each.items())
            for model, charge, limit in limited:
                if limit is None or fits(limit, others.get(model, Charge()), charge):
                    found.setdefault(model, charge)
        return found

    def raised(
        self, stored: TeamLedger, namespace: str, ledger: Ledger, *, planned: Allotted, extra: Allotted
    ) -> Raise:
        """Return the ledgers that allot ``planned`` to the namespace, and ``extra`` if this fits too.

        If the limits are enforced, a model that does not fit the limits of the team gets no larger allotment.
        """
        others = allotted_to_others(stored, namespace)
        checked = self.fitting(others, charges_by_model([*planned.items(), *extra.items()]), planned)
        written = raised(stored, namespace, checked, self.version)
        if not self.enforced:
            written = raised(written, namespace, planned)
        allotted = written.allotted.get(namespace, {})
        # The unused rest of an earlier allotment may be used again if it fits the present limits.
        charges = self.fitting(others, allotted, checked) if covers(checked, planned) else checked
        after = allot(ledger, self.team.name if self.team else "", charges, self.terms)
        if not covers(allotted, planned):
            # Another team must go on counting the charges that this team does not allot yet.
            after = replace(after, allotments={**ledger.allotments, **after.allotments})
        if {*after.allotments} != {*ledger.allotments}:
            after = replace(after, placed=self.version)
        return Raise(written, after)


NO_PLAN = Plan({})


class Draft(NamedTuple):
    """Decisions, and the ledger that this replica must write for them."""

    read: Read
    decided: Decided
    ledger: Ledger
    plan: Plan | None = None
    """The next reservation, if ``ledger`` lacks it."""
    writes: bool = True
    """True if the ledger must be written."""

    @property
    def planned(self) -> Allotted:
        """By model: the charges and reservations of the namespace after the write."""
        return charges_by_model([*needed(self.ledger).items(), *(self.plan or NO_PLAN).charges.items()])

    def needs_raise(self, membership: Membership) -> bool:
        """Return True if the write admits charges or reserves quota for which the allotment is too small."""
        # A write that only records what the namespace uses needs no allotment, because these pods exist anyway.
        uses_more = self.decided.ledger is not self.read.flushed or (self.plan or NO_PLAN).charges
        return bool(uses_more) and not membership.allots(self.ledger, self.planned)


class Drafts:
    """Makes the drafts of one namespace. ``team_account`` returns the account of a team by its name."""

    def __init__(self, namespace: str, spending: Spending, team_account: Callable[[str], TeamAccount]) -> None:
        self._namespace = namespace
        self._spending = spending
        self._team_account = team_account

    async def draft(
        self, read: Read, calls: Sequence[Charging], membership: Membership, *, final: bool
    ) -> Draft | RetryLater | None:
        """Decide the calls in order. Return None if only a newly read ledger makes the decisions final.

        ``final``: True if the ledger was just read. Raises the errors of `TeamAccount.change`.
        """
        draft = self._decided(read, calls, membership, final=final)
        if draft is None or membership.team is None or _needs_no_team(draft, calls, membership):
            return draft
        found: list[Draft | RetryLater | None] = []

        def change(team: TeamLedger) -> TeamLedger:
            raised, draft = self._raised(team, read, calls, membership, final=final)
            found.append(draft)
            return raised

        await self._team_account(membership.team.name).change(change)
        return found[-1]

    def _decided(
        self,
        read: Read,
        calls: Sequence[Charging],
        membership: Membership,
        others: Allotted | None = None,
        *,
        final: bool,
    ) -> Draft | None:
        """Decide the calls. ``others``: as for `decide`. ``final``, result: as for `draft`."""
        decided = decide_all(read, calls, others)
        # Only a compare-and-swap proves that the ledger in memory is not out of date. So a rejection, or an admission
        # that writes nothing, is decided again by a newly read ledger.
        if not final and not (decided.changed and decided.admits_all):
            return None
        ledger, reserved = decided.ledger, self._spending.reservation
        own = [each for call, each in zip(calls, decided.decisions, strict=True) if not call.item.dry_run]
        if any(isinstance(each, Rejected) and each.shortage.rests_on_reserved for each in own):
            ledger = self._spending.ask(ledger)
        changed = decided.changed or ledger is not decided.ledger
        gives_back = reserved.active and not calls and read.stored.version
        if not ((changed and own) or read.stored.opens or reserved.spent or gives_back):
            return Draft(read, decided, ledger, writes=False)
        self._spending.note(calls, decided.decisions)
        # If a newer quota document has moved the namespace to another team, this replica reserves nothing.
        plan = self._spending.plan(ledger, others) if membership.is_recorded(ledger) else NO_PLAN
        return Draft(read, decided, ledger, plan)

    def _raised(
        self, team: TeamLedger, read: Read, calls: Sequence[Charging], membership: Membership, *, final: bool
    ) -> tuple[TeamLedger, Draft | RetryLater | None]:
        """Decide the calls by the limits of the team too. Return the ledger of the team with the allotment that the
        draft needs, and the draft."""
        if is_older(membership.version, team.config_version):
            raise Unavailable(NEWER_QUOTA)
        # The draft includes the charges that this replica has spent since the read. Until the draft is written, the
        # replica spends no more than the reservation in the draft.
        spent = read._replace(flushed=self._spending.reservation.flushed(read.counted))
        others = allotted_to_others(team, self._namespace)
        draft = self._decided(spent, calls, membership, others, final=final)
        if draft is None or not draft.writes:
            return team, draft
        named = membership.team is not None and membership.team.name in draft.ledger.allotments
        crowded = self._namespace not in team.allotted and len(team.allotted) >= MAX_MEMBERS
        if membership.team and membership.enforced and crowded and draft.needs_raise(membership):
            return team, too_many_members(membership.team.name)
        if named and not crowded and draft.needs_raise(membership):
            planned, extra = draft.planned, (draft.plan or NO_PLAN).charges
            team, ledger = membership.raised(team, self._namespace, draft.ledger, planned=planned, extra=extra)
            draft = draft._replace(ledger=ledger)
        sent = self._spending.sent(draft.ledger, draft.plan or NO_PLAN)
        return team, draft._replace(ledger=sent, plan=None)


def too_many_members(team: str) -> RetryLater:
    return RetryLater(f"at most {MAX_MEMBERS} namespaces of team {team} can use its quota at once")


def _needs_no_team(draft: Draft, calls: Sequence[Charging], membership: Membership) -> bool:
    """Return whether the calls are decided, and the ledger may be written, without the limits of the team."""
    if not draft.decided.admits_all or any(call.item.dry_run for call in calls):
        return False
    return not draft.writes or not draft.needs_raise(membership)
