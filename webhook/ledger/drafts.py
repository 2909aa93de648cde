"""Decides waiting charges by one version of the ledger, and drafts the ledger that a webhook replica writes for them.

A namespace of a team may need more quota of the team than its ledger records. Then the ledger of the team is raised
before the draft is written.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from vcuda.errors import Unavailable
from vcuda.ledger import team as rules
from vcuda.ledger.ledger import Ledger, Rejected, charges_by_model, is_older
from vcuda.ledger.team import Allotted, Membership, TeamLedger
from webhook.ledger.batches import Charging, Decided, Read, decide_all
from webhook.ledger.charging import RetryLater
from webhook.ledger.reservations import Plan, Spending
from webhook.ledger.team_account import TeamAccount

NEWER_QUOTA = "the ledger was counted by a newer quota ConfigMap than this replica has read"

NO_PLAN = Plan({})


class Draft(NamedTuple):
    """Decisions, and the ledger that this replica must write for them."""

    read: Read
    decided: Decided
    ledger: Ledger
    plan: Plan = NO_PLAN
    """The next reservation, which `Drafts.draft` adds to ``ledger``."""
    writes: bool = True
    """True if the ledger must be written."""

    @property
    def planned(self) -> Allotted:
        """By model: the charges and reservations of the namespace after the write."""
        return charges_by_model([*rules.needed(self.ledger).items(), *self.plan.charges.items()])

    def needs_raise(self, membership: Membership) -> bool:
        """Return True if the write admits charges or reserves quota for which the allotment is too small."""
        # A write that only records what the namespace uses needs no allotment, because these pods exist anyway.
        uses_more = self.decided.ledger is not self.read.flushed or self.plan.charges
        return self.writes and bool(uses_more) and not membership.allots(self.ledger, self.planned)


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

        ``final``: True if the ledger was just read. The caller must begin the write of the draft next. Raises the
        errors of `TeamAccount.change`.
        """
        # Most charges fit the allotment of their namespace. So decide without the ledger of the team first.
        draft = self._decide(read, calls, membership, None, final=final)
        if draft is None or membership.team is None or _needs_no_team(draft, calls, membership):
            return draft and self._with_reservation(draft)
        account = self._team_account(membership.name)
        return await account.change(lambda team: self._decide_in_team(team, read, calls, membership, final=final))

    def _decide_in_team(
        self, team: TeamLedger, read: Read, calls: Sequence[Charging], membership: Membership, *, final: bool
    ) -> tuple[TeamLedger, Draft | RetryLater | None]:
        """Decide the calls by the limits of the team too. Return the ledger of the team with the allotment that the
        draft needs, and the draft."""
        if is_older(membership.version, team.config_version):
            raise Unavailable(NEWER_QUOTA)
        # The draft includes the charges that this replica has spent since the read. Until the draft is written, the
        # replica spends no more than the reservation in the draft.
        spent = read._replace(flushed=self._spending.reservation.flushed(read.counted))
        draft = self._decide(spent, calls, membership, rules.allotted_to_others(team, self._namespace), final=final)
        if draft is None:
            return team, None
        if draft.needs_raise(membership):
            crowded = rules.is_crowded_for(team, self._namespace)
            if crowded and membership.enforced:
                return team, too_many_members(membership.name)
            if not crowded and membership.name in draft.ledger.allotments:
                planned, extra = draft.planned, draft.plan.charges
                team, ledger = membership.raise_allotment(
                    team, self._namespace, draft.ledger, planned=planned, extra=extra
                )
                draft = draft._replace(ledger=ledger)
        return team, self._with_reservation(draft)

    def _decide(
        self, read: Read, calls: Sequence[Charging], membership: Membership, others: Allotted | None, *, final: bool
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
            ledger = self._spending.request_release(ledger)
        changed = decided.changed or ledger is not decided.ledger
        gives_back = reserved.active and not calls and read.stored.version
        if not ((changed and own) or read.stored.opens or reserved.spent or gives_back):
            return Draft(read, decided, ledger, writes=False)
        self._spending.record_demand(calls, decided.decisions)
        # If a newer quota document has moved the namespace to another team, this replica reserves nothing.
        plan = self._spending.plan(ledger, others) if membership.is_named_by(ledger) else NO_PLAN
        return Draft(read, decided, ledger, plan)

    def _with_reservation(self, draft: Draft) -> Draft:
        return draft._replace(ledger=self._spending.sent(draft.ledger, draft.plan)) if draft.writes else draft


def too_many_members(team: str) -> RetryLater:
    return RetryLater(f"at most {rules.MAX_MEMBERS} namespaces of team {team} can use its quota at once")


def _needs_no_team(draft: Draft, calls: Sequence[Charging], membership: Membership) -> bool:
    """Return whether the calls are decided, and the ledger may be written, without the limits of the team."""
    decided = draft.decided.admits_all and not any(call.item.dry_run for call in calls)
    return decided and not draft.needs_raise(membership)
