"""Tests of the times at which a grant (temporary quota) is in force by the clock of a time zone."""

import datetime
import math
from collections.abc import Callable
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given, settings, strategies as st

from vcuda.quota.times import (
    MINUTES_PER_DAY,
    Times,
    end_of,
    moment_of,
    read_days,
    read_hours,
    read_local_time,
    shown_time,
    zone_names,
    zone_of,
)

BERLIN = ZoneInfo("Europe/Berlin")
DAY = 24 * 3600

CLOCK_CHANGES = {
    # Time zones whose clocks change at 2:00 and 3:00, at midnight, by half an hour, back to the previous day, or by a
    # whole day. The clocks of the last two zones never change.
    "Europe/Berlin": ("2026-03-29", "2026-10-25"),
    "America/New_York": ("2026-03-08", "2026-11-01"),
    "America/Havana": ("2026-03-08", "2026-11-01"),
    "America/Santiago": ("2026-04-05", "2026-09-06"),
    "Asia/Beirut": ("2026-03-29", "2026-10-25"),
    "Africa/Cairo": ("2026-04-24", "2026-10-30"),
    "Australia/Lord_Howe": ("2026-04-05", "2026-10-04"),
    "Africa/Casablanca": ("2026-02-15", "2026-03-22"),
    "Pacific/Apia": ("2011-12-30",),
    "Asia/Kolkata": ("2026-06-01",),
    "UTC": ("2026-06-01",),
}

CHANGES = st.sampled_from([(ZoneInfo(zone), day) for zone, days in CLOCK_CHANGES.items() for day in days])


def at(text: str, zone: ZoneInfo = BERLIN) -> float:
    return moment_of(read_local_time(text), zone)


def clock_at(moment: float, zone: ZoneInfo) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(moment, zone)


@st.composite
def moments_and_times(draw: st.DrawFn) -> tuple[float, Times]:
    """Draw the times of a grant, and a moment near a change of the zone's clock."""
    zone, day = draw(CHANGES)
    middle = moment_of(datetime.date.fromisoformat(day), zone)
    moment = middle + 60 * draw(st.integers(-2 * MINUTES_PER_DAY, 2 * MINUTES_PER_DAY))
    near = st.integers(-3 * MINUTES_PER_DAY, 3 * MINUTES_PER_DAY).map(lambda minutes: middle + 60 * minutes)
    start = draw(st.just(-math.inf) | near)
    end = draw(st.just(math.inf) | near.filter(lambda end: end > start))
    days = draw(st.frozensets(st.integers(0, 6), max_size=6))
    minute = st.integers(0, 5 * 60) | st.integers(0, MINUTES_PER_DAY - 1)
    hours = draw(st.none() | st.tuples(minute, minute | st.just(MINUTES_PER_DAY)).filter(lambda two: two[0] != two[1]))
    return moment, Times(zone, start, end, days, hours)


def by_the_clock(times: Times, moment: float) -> bool:
    """Return whether the grant is in force by the calendar and wall clock. Independent of the code under test."""
    clock = clock_at(moment, times.zone)
    if not times.start <= moment < times.end or (times.days and clock.isoweekday() - 1 not in times.days):
        return False
    if times.hours is None:
        return True
    first, end = times.hours
    shows = {minute % MINUTES_PER_DAY for minute in range(first, end if first < end else end + MINUTES_PER_DAY)}
    return clock.hour * 60 + clock.minute in shows


@given(moments_and_times())
def test_a_grant_is_in_force_by_the_wall_clock(case: tuple[float, Times]) -> None:
    moment, times = case
    assert times.holds(moment) == by_the_clock(times, moment)


@settings(max_examples=300)
@given(moments_and_times())
@example((at("2026-03-29T00:00"), Times(BERLIN, hours=(20 * 60, 2 * 60 + 30))))
@example((at("2026-03-22T12:00"), Times(BERLIN, days=frozenset({6}), hours=(2 * 60, 3 * 60))))
@example((at("2026-10-25T01:00Z"), Times(BERLIN, hours=(2 * 60 + 30, 4 * 60))))
def test_nothing_changes_before_the_next_change(case: tuple[float, Times]) -> None:
    moment, times = case
    held, change = times.holds(moment), times.next_change(moment)
    assert change > moment
    until = min(change, moment + 3 * DAY)
    minutes = range(int(moment) + 60, math.ceil(until), 60)
    assert {times.holds(minute) for minute in minutes} <= {held}
    if change < math.inf:
        assert times.holds(change) != held
        assert times.holds(change - 0.001) == held


@given(moments_and_times())
def test_a_weekly_or_daily_grant_changes_again_within_its_bounds(case: tuple[float, Times]) -> None:
    moment, times = case
    whole_day = times.hours == (0, MINUTES_PER_DAY) and not times.days
    if times.recurs and times.end == math.inf and not whole_day:
        assert times.next_change(moment) <= max(moment, times.start) + 16 * DAY


@given(CHANGES, st.integers(-3, 3), st.integers(-5 * MINUTES_PER_DAY, 5 * MINUTES_PER_DAY))
def test_until_a_day_includes_that_day_and_from_a_day_begins_with_it(
    change: tuple[ZoneInfo, str], days: int, minutes: int
) -> None:
    zone, written = change
    day = datetime.date.fromisoformat(written) + datetime.timedelta(days)
    moment = moment_of(day, zone) + 60 * minutes
    today = clock_at(moment, zone).date()
    assert Times(zone, end=end_of(day, zone)).holds(moment) == (today <= day)
    assert Times(zone, start=moment_of(day, zone)).holds(moment) == (today >= day)


@pytest.mark.parametrize(
    ("text", "days"),
    [("Mon", {0}), ("Sat-Sun", {5, 6}), ("Fri-Mon", {4, 5, 6, 0}), ("Mon, Wed", {0, 2}), ("Sun,Mon-Tue", {6, 0, 1})],
)
def test_days_of_the_week_are_parsed(text: str, days: set[int]) -> None:
    assert read_days(text) == days


DAYS_OF_THE_WEEK = ("", "Mo", "monday", "Mon-", "-Mon", "Mon,,Tue", "1-5", "Mon Tue")
HOURS = ("20:00", "20-06", "24:00-06:00", "20:60-06:00", "20:00-24:01", "20:00-20:00", "x")
DATES = ("2026-02-30", "2026-13-01", "20261201", "2026-W49-2", "0001-01-01", "9999-12-31")
TIMES = ("2026-12-01T25:00", "2026-12-01T18")


@pytest.mark.parametrize(
    ("read", "text"),
    [
        *((read_days, text) for text in DAYS_OF_THE_WEEK),
        *((read_hours, text) for text in HOURS),
        *((read_local_time, text) for text in (*DATES, *TIMES)),
    ],
)
def test_invalid_days_hours_and_times_are_rejected(read: Callable[[str], object], text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # the caller writes the message
        read(text)


@pytest.mark.parametrize(
    ("text", "utc"),
    [
        ("2026-12-01", "2026-11-30T23:00:00"),
        ("2026-12-01T18:00", "2026-12-01T17:00:00"),
        ("2026-12-01T18:00:30", "2026-12-01T17:00:30"),
        ("2026-12-01T18:00Z", "2026-12-01T18:00:00"),
        ("2026-12-01T18:00-05:00", "2026-12-01T23:00:00"),
    ],
)
def test_a_time_without_an_offset_is_in_the_zone(text: str, utc: str) -> None:
    assert at(text) == datetime.datetime.fromisoformat(f"{utc}+00:00").timestamp()


def test_people_read_the_time_in_the_zone_of_the_grant() -> None:
    assert shown_time(at("2026-12-01"), BERLIN) == "2026-12-01 00:00 Europe/Berlin"
    assert shown_time(at("2026-12-01T08:00:05"), BERLIN) == "2026-12-01 08:00:05 Europe/Berlin"


def test_only_zones_of_the_iana_database_are_known() -> None:
    assert zone_of("Europe/Berlin") is ZoneInfo("Europe/Berlin")
    assert [zone_of(name) for name in ("Mars", "localtime", "../etc/passwd", "Europe", "")] == [None] * 5
    assert all(zone_of(name) for name in zone_names())
