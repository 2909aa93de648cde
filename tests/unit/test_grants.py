"""Tests of grants (quota that applies only at certain times)."""

import asyncio
import datetime
import json
import math
from collections.abc import Mapping, Sequence
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, strategies as st

from controller.recount.grants import MAX_WAIT_SECONDS, NOTICE_SECONDS, GrantFollower
from tests.api_double import ApiDouble
from tests.builders import MODEL, held_to, nodes, pod_of_cores, quota_faults, review, vcuda_pod
from tests.quota_map import store_quota
from tests.tables import cases
from tools.reviews import mutate, validate
from vcuda.admission_review import AdmissionResponse, ReviewDeadline
from vcuda.errors import QuotaFault
from vcuda.kube import QuotaInformer, QuotaSource
from vcuda.ledger.ledger import Ledger
from vcuda.ledger.report import GrantUse, report
from vcuda.quota.document import parse_quota
from vcuda.quota.grant_entries import MAX_GRANTS, MAX_RECURRING
from vcuda.quota.model import Charge, Grant, Limit, NamespaceQuota, Quota
from vcuda.quota.quota_clock import QuotaClock
from vcuda.quota.times import UTC, Times, moment_of, read_local_time
from vcuda.requests.config import parse_config
from webhook.ledger.ledgers import MemoryLedgers
from webhook.review.context import PolicySnapshot
from webhook.review.decisions import Creation

BERLIN = ZoneInfo("Europe/Berlin")
GIB = 1024
HOUR = 3600

ISSUE = """
team-a:
  quota: {A100: 4}
  time_zone: Europe/Berlin
  grants: [{A100: 4, until: 2026-12-01, why: "paper"}, {T4: 8, weekly: "Sat-Sun"}, {A100: 2, daily: "20:00-06:00"}]
"""
"""The quota of a team with four A100. At certain times, its grants add more A100, or cards of another model."""


def at(text: str, zone: ZoneInfo = BERLIN) -> float:
    return moment_of(read_local_time(text), zone)


def entry(written: str, zone: ZoneInfo = UTC) -> NamespaceQuota:
    return parse_quota(f"team-a: {{{written}}}", zone=zone).namespaces["team-a"]


def many_times(number: int) -> str:
    hours = [f"{minute // 60:02}:{minute % 60:02}-24:00" for minute in range(number)]
    return json.dumps({f"n{at}": {"grants": [{"T4": 1, "daily": each}]} for at, each in enumerate(hours)})


def cards_at(written: NamespaceQuota, moment: float | None) -> dict[str, float]:
    return {model: limit.most_cores / 100 for model, limit in written.at(moment).limits.items()}


# Tests of the limits that grants give at one time


@pytest.mark.parametrize(
    ("moment", "cards"),
    [
        ("2026-11-24T12:00", {"A100": 8, "T4": 0}),
        ("2026-11-24T20:00", {"A100": 10, "T4": 0}),
        ("2026-11-28T12:00", {"A100": 8, "T4": 8}),
        ("2026-12-01T23:59:59", {"A100": 10, "T4": 0}),
        ("2026-12-02", {"A100": 6, "T4": 0}),
        ("2026-12-02T06:00", {"A100": 4, "T4": 0}),
    ],
)
def test_a_grant_adds_to_the_limit_while_all_its_conditions_hold(moment: str, cards: dict[str, float]) -> None:
    assert cards_at(parse_quota(ISSUE).namespaces["team-a"], at(moment)) == cards


def test_a_model_that_only_grants_name_is_always_listed() -> None:
    """So the models that a pod may use do not depend on the time."""
    written = entry("quota: {A100: 4}, grants: [{T4: 8, weekly: Sat}], order: [T4, A100]")
    assert cards_at(written, None) == {"A100": 4, "T4": 0}
    assert Quota({"team-a": written}).models == {"A100", "T4"}


def test_a_grant_adds_memory_if_memory_is_limited() -> None:
    written = entry(
        "quota: {A100: {cards: 4, memory: 160Gi}}, grants: [{A100: {cards: 2, memory: 80Gi}, until: 2100-01-01},"
        " {H100: {cards: 1, memory: 60Gi}, from: 2000-01-01}, {H100: {cards: 1, memory: 20Gi}, from: 2000-01-01}]"
    )
    assert written.at(0).limits == {"A100": Limit(600, 240 * GIB), "H100": Limit(0)}
    assert written.at(at("2026-11-24")).limits == {"A100": Limit(600, 240 * GIB), "H100": Limit(200, 80 * GIB)}


def test_the_default_entry_may_have_grants() -> None:
    quota = parse_quota('"*": {quota: {T4: 1}, grants: [{T4: 1, from: 2026-12-01}]}').at(at("2026-12-02"))
    limits = quota.for_namespace("anybody")
    assert limits
    assert limits.limits == {"T4": Limit(200)}


def test_the_time_zone_is_the_entrys_or_the_documents_or_utc() -> None:
    text = "{a: {grants: [{T4: 1, from: 2026-12-01}]}, b: {time_zone: Asia/Tokyo, grants: [{T4: 1, from: 2026-12-01}]}}"
    for data, zones in (
        ({}, ("UTC", "Asia/Tokyo")),
        ({"gpu_time_zone": "Europe/Berlin\n"}, ("Europe/Berlin", "Asia/Tokyo")),
    ):
        entries = parse_config({"gpu_quota": text, **data}).quota.namespaces
        assert tuple(each.grants[0].times.zone.key for each in entries.values()) == zones


def test_an_entry_without_grants_is_the_same_object_at_every_moment() -> None:
    written = entry("quota: {A100: 4}")
    quota = Quota({"team-a": written, "team-b": entry("grants: [{T4: 1, weekly: Sat}]")}, version="7")
    assert quota.at(at("2026-11-28")).for_namespace("team-a") is written
    without = Quota({"team-a": written})
    assert without.at(0) is without
    assert QuotaClock(lambda: 1 / 0).now(without) is without  # the clock is read only if the quota has grants


# Tests that only the quota document and the time decide the limits

LATE = at("2026-10-20")
MOMENTS = st.integers(0, 40 * 24 * 60).map(lambda minutes: LATE + 60.0 * minutes)


@st.composite
def entries(draw: st.DrawFn) -> NamespaceQuota:
    """Draw a quota entry whose grants begin and end near the end of daylight saving time."""
    model = st.sampled_from(["A100", "T4"])
    days = st.frozensets(st.integers(0, 6), max_size=6)
    hours = st.none() | st.sampled_from([(1200, 360), (60, 180), (0, 150), (120, 121)])
    spans = st.tuples(st.just(-math.inf) | MOMENTS, st.just(math.inf) | MOMENTS)
    times = st.builds(
        lambda span, days, hours: Times(BERLIN, span[0], span[1], days, hours),
        spans.filter(lambda two: two[0] < two[1]),
        days,
        hours,
    )
    limits = st.dictionaries(model, st.integers(0, 3).map(lambda cards: Limit(100 * cards)), max_size=2)
    added = st.dictionaries(model, st.integers(1, 3).map(lambda cards: Limit(100 * cards)), min_size=1, max_size=2)
    grants = st.lists(st.builds(Grant, added, times), min_size=1, max_size=4)
    return NamespaceQuota(draw(limits), grants=tuple(draw(grants)))


@given(entries(), MOMENTS)
def test_the_limit_is_the_base_plus_each_grant_in_force(written: NamespaceQuota, moment: float) -> None:
    for model, limit in written.at(moment).limits.items():
        own = written.limits.get(model)
        added = sum(
            each.limits[model].most_cores
            for each in written.grants
            if model in each.limits and each.times.holds(moment)
        )
        blocked = own is not None and not own.cores
        assert limit.cores == (0 if blocked else (own.most_cores if own else 0) + added)


@given(entries(), MOMENTS, MOMENTS)
def test_the_limits_of_a_moment_do_not_depend_on_an_earlier_call(
    written: NamespaceQuota, first: float, second: float
) -> None:
    assert written.at(first).at(second) == written.at(second)


@given(st.dictionaries(st.sampled_from("abc"), entries(), min_size=1), st.lists(MOMENTS, min_size=1, max_size=8))
def test_the_cached_quota_follows_the_clock_even_if_it_is_set_back(
    written: Mapping[str, NamespaceQuota], moments: Sequence[float]
) -> None:
    quota, now = Quota(written), [0.0]
    clock = QuotaClock(lambda: now[0])
    for moment in moments:
        now[0] = moment
        assert [clock.now(quota).for_namespace(name) for name in written] == [
            each.at(moment) for each in written.values()
        ]


@given(entries(), MOMENTS)
def test_the_cached_quota_is_the_same_object_until_its_next_change(written: NamespaceQuota, moment: float) -> None:
    quota, now = Quota({"team-a": written}), [moment]
    clock = QuotaClock(lambda: now[0])
    first = clock.now(quota)
    now[0] = min(quota.next_change(moment) - 0.001, moment + 400 * HOUR)
    assert clock.now(quota) is first


# Tests of valid and invalid grants


@cases(
    "grant, found",
    an_impossible_date=("{T4: 1, until: 2026-02-30}", ".until: must be a day or a time that exists, for example"),
    a_number_for_a_date=("{T4: 1, from: 20261201}", ".from: must be a day or a time that exists, for example"),
    an_end_before_its_start=("{T4: 1, from: 2026-12-02, until: 2026-12-01}", ".until: must not be before `from`"),
    a_misspelt_key=("{T4: 1, untill: 2026-12-01}", ".untill: unknown key; did you mean `until`?"),
    a_zone_of_its_own=("{T4: 1, weekly: Sat, time_zone: UTC}", ".time_zone: unknown key; supported keys: `from`"),
    a_field_of_ours=("{T4: 1, start: 2026-12-01}", ".start: unknown key; supported keys: `from`"),
    an_unknown_key_of_a_model=(
        "{T4: {cards: 1, mem: 1Gi}, weekly: Sat}",
        ".T4.mem: unknown key; did you mean `memory`?",
    ),
    a_negative_number=("{T4: -1, weekly: Sat}", ".T4: must be a number of cards between"),
    no_cards=("{T4: 0, weekly: Sat}", ".T4: must be above 0, because a grant adds cards to the limit"),
    an_impossible_model=("{-T4: 1, weekly: Sat}", ".-T4: must be a valid value of a node label"),
    no_model=("{weekly: Sat}", ": must have a GPU model with a number of cards"),
    no_condition=("{T4: 1}", ": must have `from`, `until`, `weekly` or `daily`"),
    no_mapping=("T4", ": must be a mapping with models and times, for example {A100: 4, until: 2026-12-01}"),
    unknown_days=("{T4: 1, weekly: Samstag}", ".weekly: must be days of the week, for example Sat-Sun"),
    unknown_hours=("{T4: 1, daily: 20-6}", ".daily: must be hours of the day, for example 20:00-06:00"),
    a_long_reason=(f"{{T4: 1, weekly: Sat, why: {'x' * 201}}}", ".why: must be a text of at most 200 characters"),
    memory_left_out=("{A100: 1, weekly: Sat}", ".A100: memory is required, because this model's memory is limited"),
    memory_of_its_own=(
        "{T4: {cards: 1, memory: 1Gi}, weekly: Sat}",
        ".T4.memory: must not be set, because this model's memory is not limited",
    ),
)
def test_a_bad_grant_is_rejected_with_its_position(grant: str, found: str) -> None:
    text = f"team-a: {{quota: {{T4: 1, A100: {{cards: 1, memory: 40Gi}}}}, grants: [{grant}]}}"
    [fault] = quota_faults(text)
    assert str(fault).startswith(f"team-a.grants[0]{found}")


def test_grants_of_one_model_all_state_memory_or_none() -> None:
    text = "a: {grants: [{T4: {cards: 1, memory: 1Gi}, weekly: Sat}, {T4: 1, weekly: Sun}]}"
    assert [fault.path for fault in quota_faults(text)] == ["a.grants[1].T4"]


def test_10000_grants_are_rejected_in_one_message() -> None:
    text = f"a: {{grants: [{', '.join(['{T4: 1, weekly: Sat}'] * 10_000)}]}}"
    assert list(map(str, quota_faults(text))) == [f"a.grants: must not have more than {MAX_GRANTS} grants; got 10000"]


def test_a_document_has_few_enough_times_to_be_compared_with_the_clock() -> None:
    """The number of different weekly and daily times in a document is bounded. Grants with dates do not count."""
    assert quota_faults(many_times(MAX_RECURRING)) == ()
    [fault] = quota_faults(many_times(MAX_RECURRING + 1))
    assert str(fault).endswith("the grants must not have more than 1000 different weekly or daily times; got 1001")
    days = (datetime.date(2026, 1, 1) + datetime.timedelta(number) for number in range(2 * MAX_RECURRING))
    dated = {f"n{at}": {"grants": [{"T4": 1, "until": str(day)}]} for at, day in enumerate(days)}
    assert quota_faults(json.dumps(dated)) == ()


@pytest.mark.parametrize("zone", ["Mars", "../../etc/passwd", "Europe", ""])
def test_an_unknown_zone_is_rejected(zone: str) -> None:
    [fault] = quota_faults(f'a: {{time_zone: "{zone}"}}')
    assert str(fault).startswith(f'a.time_zone: unknown time zone "{zone}"; ')
    with pytest.raises(QuotaFault, match=r"^data\.gpu_time_zone: unknown time zone"):
        parse_config({"gpu_quota": "{}", "gpu_time_zone": zone})


def test_a_misspelt_zone_is_recognised() -> None:
    [fault] = quota_faults("a: {time_zone: Europe/Berln}")
    assert fault.message == 'unknown time zone "Europe/Berln"; did you mean `Europe/Berlin`?'


def test_every_fault_of_all_grants_is_reported() -> None:
    text = "a: {grants: [{T4: 1}, {T4: -1, until: x}, {weekly: Sat}]}\nb: {grants: {}}"
    assert [fault.path for fault in quota_faults(text)] == ["a.grants[1].T4", "a.grants[1].until", "b.grants"]


# Tests of warnings and usage

TEAM = entry("quota: {A100: 1}, time_zone: Europe/Berlin, grants: [{A100: 1, until: 2026-12-01, why: paper}]")
TODAY, AFTER = at("2026-11-30T12:00"), at("2026-12-02")
NODES = nodes(a={MODEL: "A100"})
ENDS = (
    "GPU quota: a grant ends at 2026-12-02 00:00 Europe/Berlin: the limit of A100 in namespace team-a falls from"
    " 2 cards to 1 card. The namespace uses 2 cards"
)


def create(used: int, moment: float, quota: NamespaceQuota = TEAM) -> AdmissionResponse:
    policy = PolicySnapshot(Quota({"team-a": quota}, version="41").at(moment), NODES)
    ledgers = MemoryLedgers({"team-a": {"A100": Charge(100 * used)}})
    asked = review(pod_of_cores(100, affinity=held_to("A100")))
    return asyncio.run(validate(Creation(asked, policy, ledgers, deadline=ReviewDeadline(5.0, lambda: 0.0))))


def test_only_a_pod_that_depends_on_a_grant_gets_a_warning_with_its_end() -> None:
    assert create(1, TODAY).warnings == (ENDS,)
    assert create(0, TODAY).warnings == ()


def test_after_the_end_the_pod_is_rejected() -> None:
    assert (create(1, AFTER).outcome, create(2, TODAY).outcome) == ("over-quota", "over-quota")


def test_a_warning_of_memory_has_both_limits() -> None:
    quota = entry(
        "quota: {A100: {cards: 1, memory: 40Gi}}, grants: [{A100: {cards: 1, memory: 40Gi}, until: 2026-12-01}]"
    )
    [warning] = create(1, TODAY, quota).warnings
    assert warning.endswith("The memory limit falls from 81920 to 40960 MiB. The namespace uses 40960 MiB")


def test_a_rejection_names_the_grant_that_begins_next() -> None:
    quota = entry(
        "quota: {A100: 1}, time_zone: Europe/Berlin, grants: [{A100: 2, weekly: Sat}, {A100: 1, weekly: Sun}]"
    )
    assert create(1, TODAY, quota).message.endswith("; a grant adds 2 cards of A100 at 2026-12-05 00:00 Europe/Berlin")
    over = entry("quota: {A100: 1}, grants: [{A100: 2, until: 2026-01-01}]")
    assert "a grant adds" not in create(1, TODAY, over).message


def test_a_model_of_an_inactive_grant_is_rejected_so_that_the_workload_is_retried() -> None:
    policy = PolicySnapshot(Quota({"team-a": entry("grants: [{A100: 2, weekly: Sat}]")}).at(TODAY), NODES)
    asked = review(vcuda_pod())
    answer = asyncio.run(mutate(Creation(asked, policy, MemoryLedgers(), deadline=ReviewDeadline(5.0, lambda: 0.0))))
    assert (answer.outcome, answer.message.partition(":")[0]) == ("over-quota", "exceeded quota")
    assert "limited: 0, 1 more needed; a grant adds 2 cards of A100" in answer.message


def test_the_report_has_the_parts_that_end_and_the_excess_after_that() -> None:
    ledger = Ledger({"A100": Charge(200)})
    [during] = report("team-a", TEAM.at(TODAY), ledger, (), NODES).models
    assert (during.limit, during.used) == (2, 2)
    assert during.grants == (GrantUse(1, "2026-12-02T00:00:00+01:00", None, "paper"),)
    [after] = report("team-a", TEAM.at(AFTER), ledger, (), NODES).models
    assert (after.limit, after.used, after.available, after.grants) == (1, 2, 0, ())


# Tests of the leader, which recounts the ledger of a namespace when a grant begins or ends


class Followed:
    """The component of the leader that follows grants, with an API server double and a clock that the test sets."""

    def __init__(self, document: str, moment: float) -> None:
        api = ApiDouble()
        store_quota(api, document)
        self.moment = moment
        quota = QuotaInformer(api.kube, QuotaSource(), frozenset(), clock=lambda: self.moment)
        quota.reflector.relist()
        self.recounted: list[str] = []
        self._follower = GrantFollower(quota, lambda: ["team-a", "team-b", "other"], self.recounted.append)

    def look(self, moment: float) -> tuple[list[str], float | None]:
        """Check the grants at a moment. Return the namespaces to recount, and the seconds until the next check."""
        self.moment = moment
        self.recounted.clear()
        again = self._follower.reconcile("grants")
        return self.recounted[:], again


FOLLOWED = "{team-a: {grants: [{T4: 1, from: 2026-12-01, until: 2026-12-03}]}, team-b: {quota: {T4: 1}}}"


def test_a_namespace_is_recounted_when_its_grant_begins_is_about_to_end_and_ends() -> None:
    begin, end = at("2026-12-01", UTC), at("2026-12-04", UTC)
    followed = Followed(FOLLOWED, begin - 100)
    assert followed.look(begin - 100) == ([], MAX_WAIT_SECONDS)
    assert followed.look(begin - 10) == ([], 10)
    assert followed.look(begin) == (["team-a"], MAX_WAIT_SECONDS)
    assert followed.look(end - NOTICE_SECONDS - 1) == ([], 1)
    assert followed.look(end - NOTICE_SECONDS) == (["team-a"], MAX_WAIT_SECONDS)
    assert followed.look(end + 5) == (["team-a"], MAX_WAIT_SECONDS)


def test_namespaces_with_grants_are_recounted_when_the_clock_is_set_back() -> None:
    begin = at("2026-12-01", UTC)
    followed = Followed(FOLLOWED, begin)
    followed.look(begin + 5)
    assert followed.look(begin - 5)[0] == ["team-a"]


def test_without_grants_nothing_is_followed() -> None:
    assert Followed("team-b: {quota: {T4: 1}}", 0).look(0) == ([], None)
