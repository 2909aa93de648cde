"""Tests of edits of the teams in the quota ConfigMap: their warnings, and their changes in the log."""

import time
from collections.abc import Mapping, Sequence

import msgspec
import pytest
from structlog.testing import capture_logs

from tests.builders import MODEL, nodes
from tests.tables import cases
from tests.unit.test_quota_edit import Used, edited
from vcuda.errors import Unavailable, VcudaError
from vcuda.placement.nodes import COUNT_LABEL
from vcuda.quota.changes import changes, outline
from vcuda.quota.model import Charge, Quota, Usage
from vcuda.requests.config import parse_config
from webhook.review.context import PolicySnapshot
from webhook.review.quota_edit import MAX_WARNINGS

NODES = nodes(a={MODEL: "M40", COUNT_LABEL: "9"}, b={MODEL: "T4", COUNT_LABEL: "16"})
VISION = "vision: {namespaces: [vision-train, 'vision-dev-*'], quota: {M40: 8}}"
TAIL = "new pods are rejected until less is in use"


def read(gpu_teams: str, entries: str = "{}") -> Quota:
    return parse_config({"gpu_teams": gpu_teams, "gpu_quota": entries}).quota


def warnings(
    before: Quota,
    gpu_teams: str,
    entries: str = "{}",
    namespaces: Sequence[str] | None = ("vision-train", "vision-dev-7"),
    **used: Charge | Usage | VcudaError,
) -> list[str]:
    """Return the warnings about an edit. ``namespaces``: the existing namespaces; None if they cannot be listed."""
    listed = None if namespaces is None else lambda: namespaces
    answer = edited(entries, PolicySnapshot(before, NODES), Used(**used), listed, teams=gpu_teams)
    assert answer.allowed, answer.message
    return list(answer.warnings)


NO_TEAM = "other: {namespaces: [other], quota: {M40: 1}}"
THREE, SIX = Charge(300), Charge(600)


@cases(
    "before, after, told",
    joins=(NO_TEAM, f"{NO_TEAM}\n{VISION}", ["vision-dev-7: joins team vision and brings 3 cards of M40"]),
    leaves=(
        f"{NO_TEAM}\n{VISION}",
        f"{NO_TEAM}\nvision: {{namespaces: [vision-train], quota: {{M40: 8}}}}",
        [
            "gpu_teams: 1 namespace loses the limits of its team: vision-dev-7",
            "vision-dev-7: leaves team vision with 3 cards of M40. No limit applies any more",
        ],
    ),
    moves=(
        f"{VISION}\n{NO_TEAM}",
        f"{VISION}\n{NO_TEAM.replace('[other]', '[other, vision-dev-7]')}",
        [
            "vision-dev-7: moves from team vision to team other and brings 3 cards of M40",
            f"gpu_teams.other.quota.M40: the limit is 1 card, but the usage is 3 cards; {TAIL}",
        ],
    ),
    renamed=(
        VISION,
        VISION.replace("vision:", "sight:"),
        [
            "gpu_teams.vision: the team (M40: 8 cards) is removed",
            "vision-dev-7: moves from team vision to team sight and brings 3 cards of M40",
        ],
    ),
    lowered=(
        VISION,
        VISION.replace("8}", "2}"),
        [f"gpu_teams.vision.quota.M40: the limit is 2 cards, but the usage is 3 cards; {TAIL}"],
    ),
    a_total_below_the_usage=(
        VISION,
        VISION.replace("8}}", "8}, total: 2}"),
        [f"gpu_teams.vision.total: the limit is 2 cards, but the usage is 3 cards; {TAIL}"],
    ),
    the_same=(VISION, VISION, []),
)
def test_an_edit_of_a_team_warns_of_the_usage_that_it_moves_or_exceeds(
    before: str, after: str, told: list[str]
) -> None:
    namespaces = ("vision-train", "vision-dev-7", "other")
    assert warnings(read(before), after, namespaces=namespaces, vision_dev_7=THREE) == told


def test_the_usage_of_a_team_is_the_sum_of_its_members() -> None:
    told = warnings(read(NO_TEAM), VISION, vision_train=SIX, vision_dev_7=THREE, unrelated=SIX)
    assert told[-1] == f"gpu_teams.vision.quota.M40: the limit is 8 cards, but the usage is 9 cards; {TAIL}"


def test_a_member_without_usage_joins_without_a_warning() -> None:
    assert warnings(read("x: {namespaces: [x]}"), f"x: {{namespaces: [x]}}\n{VISION}") == []


def test_a_member_whose_usage_is_unknown_joins_with_a_warning() -> None:
    told = warnings(read(NO_TEAM), f"{NO_TEAM}\n{VISION}", vision_dev_7=Unavailable("no answer"))
    assert told == [
        "vision-dev-7: the quota was not compared with the current usage: no answer",
        "vision-dev-7: joins team vision and brings an unknown usage",
    ]


@cases(
    "entries, instead",
    no_limit=("{}", "No limit applies any more"),
    the_entry_for_all=('"*": {quota: {M40: 1}}', 'The entry "*" applies instead'),
    an_entry_of_its_own=("vision-train: {quota: {M40: 1}}", 'The entry "vision-train" applies instead'),
)
def test_a_namespace_that_leaves_its_team_gets_the_other_limit_named(entries: str, instead: str) -> None:
    told = warnings(read(f"{VISION}\n{NO_TEAM}", '"*": {quota: {M40: 1}}'), NO_TEAM, entries)
    assert any(text.endswith(f"vision-train: leaves team vision. {instead}") for text in told)


def test_a_lost_entry_of_a_member_names_its_team() -> None:
    [told] = warnings(read(VISION, "vision-train: {quota: {M40: 4}}"), VISION)
    assert told == "vision-train: the entry (M40: 4 cards) is removed. The limits of team vision apply instead"


def test_without_a_list_of_namespaces_the_named_members_are_compared() -> None:
    told = warnings(read(NO_TEAM), f"{NO_TEAM}\n{VISION}", namespaces=None, vision_train=THREE, vision_dev_7=SIX)
    assert told == ["vision-train: joins team vision and brings 3 cards of M40"]


def test_a_new_member_that_does_not_exist_gives_a_warning() -> None:
    told = warnings(read(NO_TEAM), f"{NO_TEAM}\n{VISION}", namespaces=["vision-trian", "other"])
    assert told == [
        "gpu_teams.vision.namespaces: namespace vision-train not found; did you mean `vision-trian`?",
    ]


@cases(
    "gpu_teams, entries, told",
    above_the_cards=(
        VISION.replace("8}", "10}"),
        "{}",
        [
            "gpu_teams.vision.quota.M40: the limit is raised from 8 cards to 10 cards, but the nodes have 9 cards",
            "M40: the sum of all limits is raised from 8 cards to 10 cards, but the nodes have 9 cards",
        ],
    ),
    members_are_not_added=(VISION, "vision-train: {quota: {M40: 4}}", []),
    a_model_without_nodes=(
        VISION.replace("8}", "8, M4O: 1}"),
        "{}",
        [f"gpu_teams.vision.quota.M4O: no node has GPU model M4O in label {MODEL}; did you mean M40?"],
    ),
    an_entry_above_its_team=(
        VISION,
        "vision-train: {quota: {M40: 8.5}}",
        ["vision-train.quota.M40: the limit of 8.5 cards has no effect, because team vision has 8 cards"],
    ),
    a_total_above_the_teams=(
        VISION.replace("M40: 8}", "M40: 8, T4: 8}, total: 3"),
        "vision-train: {quota: {M40: 3, T4: 2}, total: 4}",
        ["vision-train.total: the limit of 4 cards has no effect, because team vision has 3 cards"],
    ),
    below_a_grant_of_the_team=(
        VISION.replace("M40: 8}", "M40: 4}, grants: [{M40: 4, weekly: Mon}]"),
        "vision-train: {quota: {M40: 8}}",
        [],
    ),
    an_entry_with_the_limits_of_its_team=(
        VISION.replace("M40: 8}", "M40: 9}, grants: [{M40: 1, until: 2020-01-01}]"),
        "vision-dev-7: {one_model: true}",
        ["gpu_teams.vision.grants[0]: the grant has ended and can be removed"],
    ),
    a_softer_mode=(
        VISION.replace("8}", "8}, mode: warn"),
        "{}",
        ["gpu_teams.vision.mode: the mode changes from enforce to warn"],
    ),
)
def test_warnings_about_limits_are_given_for_teams(gpu_teams: str, entries: str, told: list[str]) -> None:
    assert warnings(read(VISION), gpu_teams, entries) == told


@cases(
    "before, after",
    a_limit=(VISION, VISION.replace("8}", "9}")),
    a_limit_above_the_cards=(VISION, VISION.replace("8}", "10}")),
    a_softer_mode=(VISION, VISION.replace("8}", "8}, mode: warn")),
    a_removed_total=(VISION.replace("8}", "8}, total: 3"), VISION),
)
def test_a_change_that_members_have_from_their_team_is_listed_once(before: str, after: str) -> None:
    inheriting = "{vision-train: {one_model: true}, vision-dev-7: {one_model: true}}"
    with capture_logs() as logged:
        told = warnings(read(before, inheriting), after, inheriting)
    [line] = [line for line in logged if "path" in line]
    assert line["path"].startswith("gpu_teams.vision.")
    assert all("vision-train" not in text and "vision-dev" not in text for text in told)


def test_a_change_of_a_member_s_own_limit_is_listed_for_the_member() -> None:
    before, after = read(VISION, "vision-train: {quota: {M40: 4}}"), VISION.replace("8}", "9}")
    with capture_logs() as logged:
        warnings(before, after, "vision-train: {quota: {M40: 5}}")
    paths = [line["path"] for line in logged if "path" in line]
    assert paths == ["gpu_teams.vision.quota.M40", "vision-train.quota.M40"]


TWO_TEAMS = f"{VISION}\n{NO_TEAM}"


@cases(
    "after, namespaces, told",
    all_teams=("{}", None, "namespaces lose the limits of their team: other, vision-dev-*, vision-train"),
    all_teams_of_existing_namespaces=(
        "{}",
        ["free", "other", *(f"vision-dev-{number}" for number in range(25))],
        "26 namespaces lose the limits of their team: other, vision-dev-0, vision-dev-1",
    ),
    one_team=(NO_TEAM, ["other", "vision-train"], "1 namespace loses the limits of its team: vision-train"),
    one_beginning=(
        TWO_TEAMS.replace(", 'vision-dev-*'", ""),
        ["vision-train", "vision-dev-7"],
        "1 namespace loses the limits of its team: vision-dev-7",
    ),
)
def test_the_first_warning_says_which_namespaces_lose_the_limits_of_their_team(
    after: str, namespaces: Sequence[str] | None, told: str
) -> None:
    before = read(TWO_TEAMS, "gone: {quota: {M40: 1}}")
    shown = warnings(before, after, namespaces=namespaces, vision_dev_7=THREE)
    assert shown[0].startswith(f"gpu_teams: {told}")
    assert len(shown[0]) < 500


def test_a_removed_key_of_the_teams_is_the_first_warning_of_an_unknown_caller_too() -> None:
    stored = {"gpu_quota": "{}", "gpu_teams": VISION}
    old = msgspec.Raw(msgspec.json.encode({"metadata": {"name": "gpuquota"}, "data": stored}))
    told = edited("{}", PolicySnapshot(Quota(), NODES), callers_known=False, old_object=old).warnings
    assert told[0] == "gpu_teams: namespaces lose the limits of their team: vision-dev-*, vision-train"


def test_a_namespace_that_changes_its_team_does_not_lose_its_limits() -> None:
    before, after = read(f"{VISION}\n{NO_TEAM}"), VISION.replace("]", ", other]")
    assert not any("lose" in text for text in warnings(before, after, namespaces=["other"]))


def test_a_malformed_team_is_rejected_with_its_path() -> None:
    answer = edited("{}", PolicySnapshot(Quota(), NODES), teams="vision: {namespaces: ['ours-*']}")
    assert answer.allowed
    ours = PolicySnapshot(Quota(system=frozenset({"ours-ledgers"})), NODES)
    answer = edited("{}", ours, teams="vision: {namespaces: ['ours-*']}")
    assert [str(fault) for fault in answer.faults] == [
        "gpu_teams.vision.namespaces[0]: must not match the system namespace ours-ledgers"
    ]


def test_each_change_of_a_team_is_logged() -> None:
    with capture_logs() as logged:
        warnings(read(f"{VISION}\n{NO_TEAM}"), "vision: {namespaces: [vision-train, vision-x], quota: {M40: 9}}")
    lines = [(line["path"], line["before"], line["after"]) for line in logged if "path" in line]
    assert lines == [
        ("gpu_teams.vision.quota.M40", "8 cards", "9 cards"),
        ("gpu_teams.other", "M40: 1 card", ""),
        ("gpu_teams.vision.namespaces", "vision-dev-*", ""),
        ("gpu_teams.vision.namespaces", "", "vision-x"),
        ("gpu_teams.other.namespaces", "other", ""),
    ]


def test_the_summary_of_an_edit_has_the_changes_of_teams() -> None:
    assert outline(read(NO_TEAM), read(f"{NO_TEAM}\n{VISION}"), 1000) == (
        "gpu_teams.vision: nothing -> M40: 8 cards; gpu_teams.vision.namespaces: nothing -> vision-dev-*; "
        "gpu_teams.vision.namespaces: nothing -> vision-train"
    )


class Slow(Used):
    """Ledgers that each take two milliseconds to read."""

    async def usage(self, namespace: str, *others: object) -> Mapping[str, Usage]:
        time.sleep(0.002)
        return await super().usage(namespace, *others)


def test_an_edit_of_a_team_with_ten_thousand_namespaces_is_answered_in_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ledgers are read only until the deadline. The warnings say how many namespaces were not compared."""
    monkeypatch.setattr("webhook.review.usage_warnings.COMPARING_SECONDS", 0.05)
    names = [f"vision-dev-{number}" for number in range(10_000)]
    answer = edited(
        "{}", PolicySnapshot(read(VISION), NODES), Slow(), lambda: names, teams=VISION.replace("vision:", "s:")
    )
    assert answer.allowed
    assert len(answer.warnings) <= MAX_WARNINGS + 1
    assert any("namespaces not compared with the usage: " in told for told in answer.warnings)


def test_a_quota_with_many_teams_differs_from_itself_in_nothing() -> None:
    text = "\n".join(f"t{n}: {{namespaces: [a{n}, 'b{n}-*'], quota: {{M40: 1}}}}" for n in range(300))
    assert list(changes(read(text), read(text))) == []
