"""Tests of the warnings and log lines for the changes between two versions of the quota document."""

import pytest
from hypothesis import given, strategies as st

from tests.tables import cases
from vcuda.errors import QuotaFault
from vcuda.quota.changes import beyond, changes, outline, weakened
from vcuda.quota.document import parse_quota
from vcuda.quota.model import Quota
from vcuda.requests.config import parse_config

OLD = parse_quota("team-a: {quota: {A100: 8, T4: {cards: 4, memory: 64Gi}}}\nteam-b: {mode: warn, quota: {A100: 2}}")
NODES = {"A100": 16}


@cases(
    "text, expected",
    a_deleted_entry=(
        "team-b: {mode: warn, quota: {A100: 2}}",
        ["team-a: A100: 8 cards, T4: 4 cards, 65536 MiB -> nothing"],
    ),
    values=(
        "team-a: {quota: {A100: 800, L4: 1}, pool: [lab]}\nteam-b: {quota: {A100: 2}}\nteam-c: {quota: {}}",
        [
            "team-a.quota.A100: 8 cards -> 800 cards",
            "team-a.quota.T4: 4 cards, 65536 MiB -> nothing",
            "team-a.quota.L4: nothing -> 1 card",
            'team-a.pools: [] -> ["lab"]',
            'team-b.mode: "warn" -> "enforce"',
            "team-c: nothing -> no model",
        ],
    ),
)
def test_each_change_is_named_by_its_path_with_the_old_and_the_new_value(text: str, expected: list[str]) -> None:
    assert [str(change) for change in changes(OLD, parse_quota(text))] == expected


def test_names_that_enter_or_leave_the_excepted_namespaces_are_changes() -> None:
    old, new = parse_quota("'*': {except: [a, b-*]}"), parse_quota("'*': {except: [a, c]}")
    assert [str(change) for change in changes(old, new)] == ["*.except: b-* -> nothing", "*.except: nothing -> c"]
    assert list(map(str, weakened(old, new))) == ["*.except: the entry does not apply any more to c"]
    assert [str(change) for change in changes(Quota(), old)] == ["*: nothing -> no model, except a, b-*"]


def test_a_removed_entry_of_an_excepted_namespace_leaves_no_limit() -> None:
    old, new = parse_quota("team-a: {quota: {T4: 1}}"), parse_quota("'*': {except: [team-*]}")
    assert list(map(str, weakened(old, new))) == [
        "team-a: the entry (T4: 1 card) is removed. No limit applies any more"
    ]


def test_a_summary_names_the_first_changes_and_the_number_of_the_others() -> None:
    assert outline(OLD, OLD, 1024) == ""
    few = parse_quota(
        "team-a: {quota: {A100: 9, T4: {cards: 4, memory: 64Gi}}}\nteam-b: {mode: warn, quota: {A100: 2}}"
    )
    assert outline(OLD, few, 1024) == "team-a.quota.A100: 8 cards -> 9 cards"
    many = parse_quota("".join(f"team-{number}: {{quota: {{A100: 1}}}}\n" for number in range(1000)))
    told = outline(Quota(), many, 1024)
    assert told.startswith("team-0: nothing -> A100: 1 card; team-1: nothing -> ")
    named = told.count("nothing ->")
    assert told.endswith(f"; {1000 - named} more changes are not listed")


@given(st.integers(1, 400), st.integers(1, 40))
def test_a_summary_is_never_longer_than_an_event_may_be(models: int, entries: int) -> None:
    limits = ", ".join(f"model-{number}: 1" for number in range(models))
    new = parse_quota("".join(f"team-{number}: {{quota: {{{limits}}}}}\n" for number in range(entries)))
    assert 0 < len(outline(Quota(), new, 1024)) <= 1024


def test_a_changed_grant_is_named_with_its_times() -> None:
    old = parse_quota("team-a: {quota: {A100: 8}}")
    dated = "{A100: 1, from: 2026-12-01, until: 2026-12-24T18:00}"
    new = parse_quota(
        f"team-a: {{quota: {{A100: 8}}, grants: [{dated}, {{L4: 2, weekly: Sat-Sun, daily: '20:00-06:00'}}]}}"
    )
    (change,) = changes(old, new)
    assert (change.path, change.before) == ("team-a.grants", "[]")
    assert change.after.split("; ") == [
        "A100: 1 card from 2026-12-01 00:00 UTC until 2026-12-24 18:00 UTC (UTC)",
        "L4: 2 cards on Sat, Sun at 20:00-06:00 (UTC)",
    ]


@cases(
    "text, told",
    an_entry_removed=(
        "team-b: {mode: warn, quota: {A100: 2}}",
        ["team-a: the entry (A100: 8 cards, T4: 4 cards, 65536 MiB) is removed. No limit applies any more"],
    ),
    the_default_entry_instead=(
        "team-a: {quota: {}}\n'*': {quota: {}}",
        ['team-b: the entry (warn, A100: 2 cards) is removed. The entry "*" applies instead'],
    ),
    a_softer_mode=(
        "team-a: {mode: audit, quota: {}}\nteam-b: {mode: warn, quota: {}}",
        ["team-a.mode: the mode changes from enforce to audit"],
    ),
    a_stricter_mode=("team-a: {quota: {}}\nteam-b: {quota: {}}", []),
)
def test_a_removed_or_softened_entry_is_a_warning(text: str, told: list[str]) -> None:
    assert list(map(str, weakened(OLD, parse_quota(text)))) == told


@cases(
    "text, told",
    one_entry=(
        "team-a: {quota: {A100: 800}}",
        [
            "team-a.quota.A100: the limit is raised from 8 cards to 800 cards, but the nodes have 16 cards",
            "A100: the sum of all limits is raised from 10 cards to 800 cards, but the nodes have 16 cards",
        ],
    ),
    the_sum=(
        "team-a: {quota: {A100: 9}}\nteam-b: {quota: {A100: 8}}",
        ["A100: the sum of all limits is raised from 10 cards to 17 cards, but the nodes have 16 cards"],
    ),
    as_many_cards_as_the_nodes_have=("team-a: {quota: {A100: 16}}", []),
    a_model_of_unknown_size=("team-a: {quota: {T4: 100000}}", []),
)
def test_more_cards_than_the_nodes_have_are_a_warning(text: str, told: list[str]) -> None:
    assert list(map(str, beyond(OLD, parse_quota(text), NODES))) == told


@cases(
    "text, told",
    grants_of_one_entry=(
        "team-a: {quota: {A100: 10}, grants: [{A100: 4, weekly: Sat}, {A100: 4, from: 2100-01-01}]}",
        "team-a.quota.A100: the limit with all grants is raised from 8 cards to 18 cards, but the nodes have 16 cards",
    ),
    a_grant_of_another_model=(
        "team-a: {quota: {A100: 17}, grants: [{T4: 4, weekly: Sat}]}",
        "team-a.quota.A100: the limit is raised from 8 cards to 17 cards, but the nodes have 16 cards",
    ),
    a_grant_that_is_over=("team-a: {quota: {A100: 10}, grants: [{A100: 8, until: 2000-01-01}]}", ""),
    a_model_that_is_blocked=("team-a: {quota: {A100: 0}, grants: [{A100: 18, weekly: Sat}]}", ""),
)
def test_grants_count_as_cards_that_the_nodes_must_have(text: str, told: str) -> None:
    assert str(next(iter(beyond(OLD, parse_quota(text).at(1.7e9), NODES)), "")) == told


def test_a_limit_that_was_too_high_before_is_no_warning_again() -> None:
    high = parse_quota("team-a: {quota: {A100: 800}}")
    assert list(map(str, beyond(high, parse_quota("team-a: {quota: {A100: 700}}"), NODES))) == []


ENTRIES = st.dictionaries(
    st.sampled_from(["team-a", "team-b", "'*'"]),
    st.tuples(st.sampled_from(["enforce", "warn", "audit"]), st.integers(0, 3)),
)


def written(entries: dict[str, tuple[str, int]]) -> Quota:
    lines = (f"{name}: {{mode: {mode}, quota: {{A100: {cards}}}}}" for name, (mode, cards) in entries.items())
    return parse_quota("\n".join(lines))


@given(ENTRIES, ENTRIES)
def test_two_documents_without_a_change_are_equal(
    one: dict[str, tuple[str, int]], other: dict[str, tuple[str, int]]
) -> None:
    old, new = written(one), written(other)
    equal = (old.namespaces, old.default) == (new.namespaces, new.default)
    assert (list(changes(old, new)) == []) == equal


@pytest.mark.parametrize("text", ["", "  \n", "# team-a: {}\n---\n", "---\n...\n", "null", "~  # nobody"])
def test_a_document_without_content_is_rejected_since_it_would_lift_every_limit(text: str) -> None:
    with pytest.raises(QuotaFault, match=r"data.gpu_quota: must not be empty; write \{\} to limit no namespace"):
        parse_config({"gpu_quota": text})
    assert not parse_config({"gpu_quota": "{}"}).quota.namespaces


@pytest.mark.parametrize(
    ("key", "hint"), [("gpu_unit", "did you mean `gpu_units`?"), ("gpu_x", "supported keys: gpu_quota")]
)
def test_an_unknown_key_of_ours_is_rejected(key: str, hint: str) -> None:
    with pytest.raises(QuotaFault) as rejected:
        parse_config({"gpu_quota": "{}", key: "{}", "notes.txt": "kept"})
    [fault] = rejected.value.faults
    assert str(fault).startswith(f"data.{key}: unknown key; {hint}")
