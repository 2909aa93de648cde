"""Tests of the teams in the quota ConfigMap: who is a member, which limits hold, and the message for each mistake."""

import random
from datetime import UTC, datetime

import pytest
from hypothesis import given, strategies as st

from tests.tables import cases
from vcuda.errors import QuotaFault
from vcuda.quota import teams
from vcuda.quota.allowances import Allowance
from vcuda.quota.membership import Members
from vcuda.quota.model import Limit, Mode, NamespaceQuota, Quota
from vcuda.quota.well_known import SYSTEM_NAMESPACES, UNASKED_NAMESPACES
from vcuda.requests.config import parse_config

VISION = "vision: {namespaces: [vision-train, 'vision-dev-*'], quota: {A100: 8, T4: {cards: 16, memory: 256Gi}}"
TEAM_KEYS = "pool: [public], order: [T4, A100], one_model: true, allow: [privileged], mode: warn, require_nodes: true"
SYSTEM = SYSTEM_NAMESPACES | UNASKED_NAMESPACES


def read(gpu_teams: str, entries: str = "{}", **keys: str) -> Quota:
    return parse_config({"gpu_teams": gpu_teams, "gpu_quota": entries, **keys}, system=SYSTEM).quota


def faults(gpu_teams: str, entries: str = "{}", **keys: str) -> list[str]:
    with pytest.raises(QuotaFault) as caught:
        read(gpu_teams, entries, **keys)
    return [str(fault) for fault in caught.value.faults]


def limited(quota: Quota, namespace: str) -> NamespaceQuota:
    found = quota.for_namespace(namespace)
    assert found is not None
    return found


# Tests of membership


@cases(
    "namespace, team",
    named=("vision-train", "vision"),
    a_beginning=("vision-dev-7", "vision"),
    the_beginning_itself=("vision-dev-", "vision"),
    a_longer_beginning=("vision-dev-new-1", "new"),
    a_name_before_every_beginning=("vision-dev-new-old", "old"),
    no_beginning=("vision-dev", None),
    another_name=("vision-train-2", None),
    the_team_itself=("vision", None),
    with_a_dot=("team.vision", None),
    empty=("", None),
)
def test_the_most_exact_item_decides_the_team(namespace: str, team: str | None) -> None:
    quota = read(
        "vision: {namespaces: [vision-train, 'vision-dev-*']}\n"
        "new: {namespaces: ['vision-dev-new-*']}\n"
        "old: {namespaces: [vision-dev-new-old]}"
    )
    found = quota.for_namespace(namespace)
    assert (found.team.name if found and found.team else None) == team


NAMES = st.text("ab", min_size=1, max_size=5)


@given(items=st.dictionaries(NAMES.flatmap(lambda name: st.sampled_from([name, f"{name}*"])), NAMES), seed=st.randoms())
def test_the_team_depends_on_no_order_and_the_longest_match_wins(items: dict[str, str], seed: random.Random) -> None:
    """The reference compares each item with the namespace, as a reader of the document would."""
    by_team = {team: tuple(item for item in items if items[item] == team) for team in items.values()}
    shuffled = list(by_team.items())
    seed.shuffle(shuffled)
    other_order = {team: tuple(seed.sample(listed, len(listed))) for team, listed in shuffled}
    for namespace in ("a", "ab", "aab", "abab", "bbbbb", "aabba"):
        begun = {each for each in items if each.endswith("*") and namespace.startswith(each[:-1])}
        matching = begun | ({namespace} & items.keys())
        expected = max(matching, key=lambda each: (each == namespace, len(each)), default=None)
        assert Members(by_team).team_of(namespace) == (items[expected] if expected else None)
        assert Members(other_order).team_of(namespace) == Members(by_team).team_of(namespace)


def test_a_member_without_an_entry_has_the_quota_of_its_team() -> None:
    quota = read(f"{VISION}, total: 20, {TEAM_KEYS}}}")
    found = limited(quota, "vision-dev-1")
    limits = {"A100": Limit(800), "T4": Limit(1600, 256 * 1024)}
    assert found.limits == limits
    assert found.total == Limit(2000)
    assert (found.pools, found.mode, found.order) == (("public",), Mode.WARN, ("T4", "A100"))
    assert (found.one_model, found.require_nodes, found.allow) == (True, True, frozenset({Allowance.PRIVILEGED}))
    assert found.team is not None
    assert (found.team.limits, found.team.total) == (limits, Limit(2000))


def test_teams_need_no_entries() -> None:
    quota = read(f"{VISION}}}")
    assert limited(quota, "vision-train").team
    assert quota.for_namespace("other") is None


def test_the_limits_of_all_entries_are_not_lifted_by_a_missing_key_although_there_are_teams() -> None:
    with pytest.raises(QuotaFault, match=r"data\.gpu_quota: is required"):
        parse_config({"gpu_teams": f"{VISION}}}"}, system=SYSTEM)


def test_a_team_comes_before_the_entry_for_all_others() -> None:
    quota = read(f"{VISION}}}", '"*": {quota: {}, except: ["vision-dev-*"]}')
    assert limited(quota, "vision-dev-1").limits == limited(quota, "vision-train").limits != {}
    assert limited(quota, "other").limits == {}


# Tests of an entry of a member


def test_the_limits_of_a_members_entry_and_of_its_team_hold() -> None:
    found = limited(read(f"{VISION}, total: 20}}", "vision-train: {quota: {A100: 4}, total: 3}"), "vision-train")
    assert (found.limits, found.total) == ({"A100": Limit(400)}, Limit(300))
    assert found.team is not None
    assert (found.team.limits["A100"], found.team.total) == (Limit(800), Limit(2000))


@cases(
    "entry, field, expected",
    absent_quota=("pool: [wx]", "limits", {"A100": Limit(800), "T4": Limit(1600, 256 * 1024)}),
    null_quota=("quota: null", "limits", {"A100": Limit(800), "T4": Limit(1600, 256 * 1024)}),
    empty_quota=("quota: {}", "limits", {}),
    absent_pool=("quota: {A100: 1}", "pools", ("public",)),
    null_pool=("pool: null", "pools", ("public",)),
    empty_pool=("pool: []", "pools", ()),
    own_pool=("pool: [wx]", "pools", ("wx",)),
    absent_order=("one_model: false", "order", ("T4", "A100")),
    order_of_its_own_models=("quota: {A100: 1}", "order", ("A100",)),
    order_of_the_teams_models=("order: [A100]", "order", ("A100",)),
    empty_order=("order: []", "order", ()),
    absent_allow=("quota: {A100: 1}", "allow", {Allowance.PRIVILEGED}),
    empty_allow=("allow: []", "allow", frozenset()),
    absent_one_model=("quota: {A100: 1}", "one_model", True),
    own_one_model=("one_model: false", "one_model", False),
    absent_require_nodes=("quota: {A100: 1}", "require_nodes", True),
    own_require_nodes=("require_nodes: false", "require_nodes", False),
    absent_mode=("quota: {A100: 1}", "mode", Mode.WARN),
    stricter_mode=("mode: enforce", "mode", Mode.ENFORCE),
    own_total_alone=("total: 3", "total", Limit(300)),
    own_limits_have_no_total=("quota: {A100: 1}", "total", None),
    without_limits_the_total_of_the_team=("pool: [wx]", "total", Limit(2000)),
)
def test_a_members_entry_has_the_teams_value_for_each_key_that_it_lacks(
    entry: str, field: str, expected: object
) -> None:
    """A null key is absent. An empty list or mapping is a value of the entry."""
    quota = read(f"{VISION}, total: 20, {TEAM_KEYS}}}", f"vision-train: {{{entry}}}")
    assert getattr(limited(quota, "vision-train"), field) == expected


@cases(
    "gpu_quota, required",
    at_the_top=("require_nodes: true", {"vision-train": True, "vision-dev-1": True, "nlp": False}),
    nowhere=("{}", {"vision-train": False, "vision-dev-1": False, "nlp": False}),
    in_an_entry=("{require_nodes: true, nlp: {require_nodes: true}}", {"vision-dev-1": True, "nlp": True}),
)
def test_require_nodes_at_the_top_is_for_teams_too(gpu_quota: str, required: dict[str, bool]) -> None:
    quota = read(f"{VISION}}}\nspeech: {{namespaces: [nlp], require_nodes: false}}", gpu_quota)
    assert {name: limited(quota, name).require_nodes for name in required} == required


MONDAY = datetime(2026, 11, 30, tzinfo=UTC).timestamp()
TUESDAY = MONDAY + 86_400


def test_grants_of_a_team_raise_only_the_limits_of_the_team() -> None:
    """The limits of a member's own entry stay as they are written."""
    quota = read(f"{VISION}, grants: [{{A100: 4, weekly: Mon}}]}}", "vision-train: {quota: {A100: 4}}")
    found = {day: limited(quota.at(day), "vision-train") for day in (MONDAY, TUESDAY)}
    of_team = {day: each.team.limits["A100"] if each.team else None for day, each in found.items()}
    assert {day: each.limits["A100"] for day, each in found.items()} == {MONDAY: Limit(400), TUESDAY: Limit(400)}
    assert of_team == {MONDAY: Limit(1200), TUESDAY: Limit(800)}
    assert limited(quota.at(MONDAY), "vision-dev-1").limits["A100"] == Limit(1200)
    assert quota.next_change(MONDAY) == TUESDAY


def test_the_grants_of_a_member_have_the_time_zone_of_its_team() -> None:
    entry = "vision-train: {quota: {A100: 4}, grants: [{A100: 1, daily: '08:00-09:00'}]}"
    quota = read(f"{VISION}, time_zone: Asia/Tokyo}}", entry)
    assert {str(times.zone) for times in quota.times} == {"Asia/Tokyo"}


def test_the_quota_knows_the_models_of_its_teams() -> None:
    quota = read(f"{VISION}, grants: [{{H100: 1, weekly: Mon}}]}}")
    assert quota.models == {"A100", "T4", "H100"}
    assert [*quota.entries] == ["gpu_teams.vision"]


@cases(
    "other, same",
    another_order=("quota: {T4: {cards: 16, memory: 256Gi}, A100: 8}, total: 20", True),
    another_limit=("quota: {A100: 9, T4: {cards: 16, memory: 256Gi}}, total: 20", False),
    another_memory=("quota: {A100: 8, T4: {cards: 16, memory: 255Gi}}, total: 20", False),
    another_total=("quota: {A100: 8, T4: {cards: 16, memory: 256Gi}}, total: 19", False),
    no_total=("quota: {A100: 8, T4: {cards: 16, memory: 256Gi}}", False),
    another_mode=("quota: {A100: 8, T4: {cards: 16, memory: 256Gi}}, total: 20, mode: warn", True),
)
def test_the_digest_of_a_team_changes_with_its_limits(other: str, same: bool) -> None:
    first = limited(read(f"{VISION}, total: 20}}"), "vision-train").team
    second = limited(read(f"renamed: {{namespaces: [vision-train], {other}}}"), "vision-train").team
    assert first is not None
    assert second is not None
    assert (first.digest == second.digest) is same


def test_a_grant_changes_the_digest_of_a_team() -> None:
    quota = read(f"{VISION}, grants: [{{A100: 4, weekly: Mon}}]}}")
    digests = {getattr(limited(quota.at(day), "vision-train").team, "digest", "") for day in (MONDAY, TUESDAY)}
    assert len(digests) == 2


def test_memory_alone_in_a_team_needs_the_memory_of_a_card() -> None:
    """An entry that has the limits of its team causes no second fault."""
    gpu_teams, entries = "vision: {namespaces: [a], quota: {A100: {memory: 80Gi}}}", "a: {pool: [wx]}"
    (fault,) = faults(gpu_teams, entries)
    assert fault.startswith("gpu_teams.vision.quota.A100: must have `cards`")
    found = limited(read(gpu_teams, entries, gpu_models="A100: {memory: 40Gi}"), "a")
    assert found.limits["A100"] == Limit(None, 80 * 1024, 40 * 1024)
    assert found.team is not None
    assert found.team.limits == found.limits


# Tests of mistakes

NOT_TEAMS = (
    "must be a mapping with one entry per team, for example vision: {namespaces: [vision-train], quota: {A100: 8}}"
)
NOT_A_TEAM = "must be a mapping, for example {namespaces: [vision-train], quota: {A100: 8}}"
NO_NAMESPACES = 'must have at least one namespace, for example [vision-train, "vision-dev-*"]'
NO_ITEM = "must be the name of a namespace, or the beginning of names with `*`, for example vision-dev-*; got "
NO_TEAM_NAME = (
    "the name of a team must have at most 63 lower-case letters, digits and `-`, and must begin and end with a letter "
    "or digit"
)
NO_TIMES = "must have `from`, `until`, `weekly` or `daily`. Cards for all times must be in `quota`"
NO_TEAM_IN_A_TEAM = "must not be the name of another team, because a team has no teams"
LIMITS_OF_TEAM = "because the entry has the limits of gpu_teams.vision.quota"
KEYS = (
    "unknown key; supported keys: `quota`, `pool`, `mode`, `allow`, `order`, `one_model`, `require_nodes`, `total`, "
    "`time_zone`, `grants`, `namespaces`. GPU models must be listed in `quota`"
)


@cases(
    "gpu_teams, found",
    a_list=("[a]", [f"data.gpu_teams: {NOT_TEAMS}; got a list"]),
    no_mapping=("a: 3", [f"gpu_teams.a: {NOT_A_TEAM}; got 3"]),
    empty_text=("# nobody yet", ["data.gpu_teams: must not be empty; write {} for no team"]),
    no_namespaces=("a: {quota: {T4: 1}}", [f"gpu_teams.a.namespaces: {NO_NAMESPACES}"]),
    empty_namespaces=("a: {namespaces: []}", [f"gpu_teams.a.namespaces: {NO_NAMESPACES}"]),
    null_namespaces=("a: {namespaces: null}", [f"gpu_teams.a.namespaces: {NO_NAMESPACES}"]),
    one_name=("a: {namespaces: x}", ['gpu_teams.a.namespaces: must be a list, for example [x]; got "x"']),
    all_namespaces=("a: {namespaces: ['*']}", [f'gpu_teams.a.namespaces[0]: {NO_ITEM}"*"']),
    a_star_inside=("a: {namespaces: ['a*b']}", [f'gpu_teams.a.namespaces[0]: {NO_ITEM}"a*b"']),
    a_name_with_a_dot=("a: {namespaces: [team.x]}", [f'gpu_teams.a.namespaces[0]: {NO_ITEM}"team.x"']),
    an_upper_case_name=("a: {namespaces: [A]}", [f'gpu_teams.a.namespaces[0]: {NO_ITEM}"A"']),
    a_team_within=("a: {namespaces: [{b: {namespaces: [c]}}]}", [f"gpu_teams.a.namespaces[0]: {NO_ITEM}a mapping"]),
    a_key_with_teams=("a: {namespaces: [c], teams: [b]}", [f"gpu_teams.a.teams: {KEYS}"]),
    except_of_all=("a: {namespaces: [c], except: [b]}", [f"gpu_teams.a.except: {KEYS}"]),
    another_team=(
        "a: {namespaces: [b]}\nb: {namespaces: [c]}",
        [f"gpu_teams.a.namespaces[0]: {NO_TEAM_IN_A_TEAM}; see gpu_teams.b"],
    ),
    one_name_twice=(
        "a: {namespaces: [c, c]}",
        ["gpu_teams.a.namespaces[1]: duplicate name; each name must be listed once"],
    ),
    one_name_in_two_teams=(
        "a: {namespaces: [d, c]}\nb: {namespaces: [c]}",
        ["gpu_teams.b.namespaces[0]: duplicate namespace c; gpu_teams.a.namespaces[1] lists it too"],
    ),
    one_beginning_in_two_teams=(
        "a: {namespaces: ['c-*']}\nb: {namespaces: ['c-*']}",
        ["gpu_teams.b.namespaces[0]: duplicate namespace c-*; gpu_teams.a.namespaces[0] lists it too"],
    ),
    a_dot_in_the_name=("team.x: {namespaces: [c]}", [f"gpu_teams[team.x]: {NO_TEAM_NAME}"]),
    all_as_a_name=('"*": {namespaces: [c]}', [f"gpu_teams.*: {NO_TEAM_NAME}"]),
    a_system_namespace=(
        "a: {namespaces: [kube-system]}",
        ["gpu_teams.a.namespaces[0]: must not match the system namespace kube-system"],
    ),
    a_beginning_of_system_namespaces=(
        "a: {namespaces: ['kube-*']}",
        ["gpu_teams.a.namespaces[0]: must not match the system namespace kube-node-lease"],
    ),
    a_beginning_of_our_namespaces=(
        "a: {namespaces: ['vcuda*']}",
        ["gpu_teams.a.namespaces[0]: must not match the system namespace vcuda-quota"],
    ),
    too_many_names=(
        f"a: {{namespaces: [{', '.join(f'n{n}' for n in range(teams.MAX_ITEMS + 1))}]}}",
        ["gpu_teams.a.namespaces: must not have more than 500 names; got 501"],
    ),
    too_many_teams=(
        "\n".join(f"t{n}: {{namespaces: [n{n}]}}" for n in range(teams.MAX_TEAMS + 1)),
        ["data.gpu_teams: the document must not have more than 1000 teams; got 1001"],
    ),
    a_wrong_limit=(
        "a: {namespaces: [c], quota: {T4: -1}}",
        ["gpu_teams.a.quota.T4: must be a number of cards between 0 and 100000; got -1"],
    ),
    a_wrong_grant=(
        "a: {namespaces: [c], grants: [{T4: 1}]}",
        [f"gpu_teams.a.grants[0]: {NO_TIMES}"],
    ),
    a_wrong_order=(
        "a: {namespaces: [c], quota: {T4: 1}, order: [T5]}",
        ['gpu_teams.a: `order` must list only models of `quota` or `grants`; got "T5"; supported models: T4'],
    ),
    every_fault=(
        "a: {namespaces: []}\nb: {quota: {T4: -1}, namespaces: ['*']}",
        [
            "gpu_teams.b.quota.T4: must be a number of cards between 0 and 100000; got -1",
            f'gpu_teams.b.namespaces[0]: {NO_ITEM}"*"',
        ],
    ),
)
def test_a_mistake_in_a_team_is_a_fault_with_its_path(gpu_teams: str, found: list[str]) -> None:
    assert faults(gpu_teams) == found


@cases(
    "entry, found",
    softer_mode=(
        "mode: audit",
        ["vision-train.mode: must not be less strict than gpu_teams.vision.mode, which is warn; got audit"],
    ),
    another_model=(
        "quota: {A100: 4, H100: 1}",
        ["vision-train.quota.H100: must be a model of gpu_teams.vision.quota; supported models: A100, T4"],
    ),
    a_grant_of_another_model=(
        "quota: {A100: 4}, grants: [{H100: 1, weekly: Mon}]",
        ["vision-train.grants[0].H100: must be a model of gpu_teams.vision.quota; supported models: A100, T4"],
    ),
    grants_without_limits=(
        "grants: [{A100: 1, weekly: Mon}]",
        [f"vision-train.grants: must not be set without `quota`, {LIMITS_OF_TEAM}"],
    ),
    another_order=(
        "order: [H100]",
        ['vision-train: `order` must list only models of `quota` or `grants`; got "H100"; did you mean `A100`?'],
    ),
)
def test_an_entry_that_contradicts_its_team_is_a_fault_with_both_paths(entry: str, found: list[str]) -> None:
    assert faults(f"{VISION}, mode: warn}}", f"vision-train: {{{entry}}}") == found


def test_faults_of_entries_and_teams_are_reported_together() -> None:
    """While the teams are malformed, an entry without limits may name any model, as its team may have the model."""
    found = faults("vision: {namespaces: [a], quota: 3}", "a: {order: [T4]}\nb: {mode: soft}")
    assert [fault.partition(":")[0] for fault in found] == ["gpu_teams.vision.quota", "b.mode"]


def test_a_similar_key_is_suggested() -> None:
    with pytest.raises(QuotaFault, match="gpu_team: unknown key; did you mean `gpu_teams`"):
        parse_config({"gpu_quota": "{}", "gpu_team": "{}"})
