"""Tests of the texts about a team's quota: the free quota, a quota that is nearly used up, and grants."""

import asyncio
from datetime import UTC, datetime

from tests.both_calls import creation
from tests.builders import MODEL, held_to, nodes, pod_of_cores
from tests.tables import cases
from tools.reviews import mutate, validate
from vcuda.quota.model import Charge
from vcuda.requests.config import parse_config
from webhook.ledger.ledgers import MemoryLedgers
from webhook.review.context import PolicySnapshot
from webhook.review.decisions import Creation

MONDAY = datetime(2026, 11, 30, 12, tzinfo=UTC).timestamp()
TUESDAY = MONDAY + 86_400
VISION = "namespaces: [team-a, team-b], quota: {A100: 8, T4: 8}"
OWN = "team-a: {quota: {A100: 4}}"
GRANT = "grants: [{A100: 4, weekly: Mon}]"
NEARLY = "the GPU quota is nearly used up: "


def created(
    own: int, others: int, *, cards: int = 1, team: str = VISION, entries: str = "{}", moment: float = TUESDAY
) -> Creation:
    """Return the review of a pod in namespace team-a. ``own``, ``others``: the A100 that team-a and team-b use."""
    quota = parse_config({"gpu_teams": f"vision: {{{team}}}", "gpu_quota": entries}).quota.at(moment)
    committed = {"team-a": {"A100": Charge(100 * own)}, "team-b": {"A100": Charge(100 * others)}}
    pod = pod_of_cores(100 * cards, affinity=held_to("A100"))
    policy = PolicySnapshot(quota, nodes(a={MODEL: "A100"}))
    return creation(pod, policy, MemoryLedgers(committed, quota.members))


@cases(
    "entries, told",
    without_an_entry=("{}", "the only possible model, 3 cards of 8 cards free in team vision"),
    with_an_entry=(OWN, "the only possible model, 2 cards of 4 cards free, 3 cards of 8 cards free in team vision"),
)
def test_the_reason_for_a_model_has_the_free_quota_of_the_team(entries: str, told: str) -> None:
    assert asyncio.run(mutate(created(2, 3, entries=entries))).reason.startswith(told)


@cases(
    "own, others, team, entries, told",
    of_the_team=(1, 6, VISION, "{}", "A100 in team vision, 8 cards of 8 cards"),
    far_from_it=(1, 1, VISION, "{}", ""),
    of_its_total=(1, 3, f"{VISION}, total: 5", "{}", "total in team vision, 5 cards of 5 cards"),
    of_the_entry=(3, 1, VISION, OWN, "A100 in namespace team-a, 4 cards of 4 cards"),
    of_the_team_with_an_entry=(1, 6, VISION, OWN, "A100 in team vision, 8 cards of 8 cards"),
)
def test_a_team_whose_quota_is_nearly_used_up_is_named(
    own: int, others: int, team: str, entries: str, told: str
) -> None:
    answer = asyncio.run(validate(created(own, others, team=team, entries=entries)))
    assert answer.warnings == ((NEARLY + told,) if told else ())


@cases(
    "entries, own, others, told",
    without_an_entry=("{}", 4, 4, True),
    with_an_entry=("team-a: {quota: {A100: 6}}", 4, 4, True),
    below_the_later_limit=("{}", 1, 4, False),
)
def test_a_pod_that_depends_on_a_grant_of_its_team_gets_a_warning(
    entries: str, own: int, others: int, told: bool
) -> None:
    answer = asyncio.run(validate(created(own, others, team=f"{VISION}, {GRANT}", entries=entries, moment=MONDAY)))
    ending = (
        "GPU quota: a grant ends at 2026-12-01 00:00 UTC: the limit of A100 in team vision falls from 12 cards to"
        " 8 cards. The team uses 9 cards"
    )
    assert answer.warnings == ((ending,) if told else ())


def test_a_rejection_by_a_team_names_the_next_grant_of_the_team() -> None:
    answer = asyncio.run(validate(created(4, 4, team=f"{VISION}, {GRANT}")))
    figures = "requested: 1 card, used: 8 (this namespace 4, others 4), limited: 8, 1 more needed"
    assert answer.message == (
        f"exceeded quota: A100 in team vision, {figures}; a grant adds 4 cards of A100 at 2026-12-07 00:00 UTC"
    )


def test_no_grant_of_the_entry_is_promised_if_the_team_has_no_room() -> None:
    entries = "team-a: {quota: {A100: 6}, grants: [{A100: 2, weekly: Mon}]}"
    answer = asyncio.run(validate(created(4, 4, entries=entries)))
    assert "in team vision" in answer.message
    assert "a grant adds" not in answer.message


def test_a_request_that_a_grant_of_the_team_permits_later_is_retried() -> None:
    """Otherwise the rejection would say that the pod can never run."""
    answer = asyncio.run(validate(created(0, 0, cards=9, team=f"{VISION}, {GRANT}")))
    assert answer.message.startswith("exceeded quota: A100 in team vision, requested: 9 cards")
