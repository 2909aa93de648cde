"""The times at which a grant (an addition to a limit) applies: from, until, days of the week and hours of the day.

Days and hours are in the local time of a time zone.
"""

import bisect
import datetime
import functools
import importlib.resources
import math
import re
from collections.abc import Iterator
from zoneinfo import ZoneInfo

import msgspec

WEEKDAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
MINUTES_PER_DAY = 24 * 60
MAX_DAYS = 16
"""The number of days that are searched for the next start or end of a weekly or daily grant. A change to daylight
saving time can skip the hours of a grant in one week, but not in two weeks in a row."""

UTC = ZoneInfo("UTC")

YEARS = range(1970, 9000)
"""The years that the dates of a grant may have. Python supports no year after 9999."""

_HOURS = re.compile(r"([0-9]{2}):([0-9]{2}) *- *([0-9]{2}):([0-9]{2})", re.ASCII)
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", re.ASCII)
_TIME = re.compile(_DATE.pattern + r"T[0-9]{2}:[0-9]{2}(:[0-9]{2})?(Z|[-+][0-9]{2}:[0-9]{2})?", re.ASCII)

LocalTime = datetime.date | datetime.datetime
"""A day, a local time, or a time with an offset from UTC."""


class Times(msgspec.Struct, frozen=True):
    """The times at which a grant applies. The grant applies while all conditions in the fields are true."""

    zone: ZoneInfo
    start: float = -math.inf
    """The time when the grant begins, in Unix seconds."""
    end: float = math.inf
    """The time when the grant ends, in Unix seconds. At this time, the grant does not apply any more."""
    days: frozenset[int] = frozenset()
    """The days of the week, 0 for Monday; empty for every day."""
    hours: tuple[int, int] | None = None
    """The first minute of the grant, and the minute after its last, both counted from midnight; None for the whole day.
    If the second number is smaller, the grant continues after midnight, if ``days`` allows the next day."""

    def __str__(self) -> str:
        parts = [f"from {shown_time(self.start, self.zone)}"] if self.start > -math.inf else []
        parts += [f"until {shown_time(self.end, self.zone)}"] if self.end < math.inf else []
        parts += [f"on {', '.join(WEEKDAYS[day] for day in sorted(self.days))}"] if self.days else []
        if self.hours:
            parts.append("at {:02}:{:02}-{:02}:{:02}".format(*divmod(self.hours[0], 60), *divmod(self.hours[1], 60)))
        return f"{' '.join(parts)} ({self.zone.key})"

    @property
    def recurs(self) -> bool:
        return bool(self.days) or self.hours is not None

    def holds(self, moment: float) -> bool:
        """Return whether the grant (an addition to a limit) applies at ``moment``, in Unix seconds."""
        if not self.start <= moment < self.end:
            return False
        if not self.recurs:
            return True
        clock = datetime.datetime.fromtimestamp(moment, self.zone)
        if self.days and clock.weekday() not in self.days:
            return False
        if self.hours is None:
            return True
        minute, (first, end) = clock.hour * 60 + clock.minute, self.hours
        return first <= minute < end if first < end else minute >= first or minute < end

    def next_change(self, moment: float) -> float:
        """Return the first time after ``moment`` at which the grant starts or ends; infinite if there is none."""
        before = self.holds(moment)
        return next((at for at in self._bounds(moment) if self.holds(at) != before), math.inf)

    def _bounds(self, moment: float) -> Iterator[float]:
        """Yield, in order, the times after ``moment`` at which the grant (an addition to a limit) may start or end."""
        if moment < self.start:
            yield self.start
        if self.recurs:
            first = max(moment, self.start)
            day = datetime.datetime.fromtimestamp(first, self.zone).date()
            for number in range(MAX_DAYS):
                bounds = self._bounds_of(day + datetime.timedelta(number))
                yield from (at for at in bounds if first < at < self.end)
        if moment < self.end < math.inf:
            yield self.end

    def _bounds_of(self, day: datetime.date) -> list[float]:
        """Return the sorted times of a day's start, of ``hours`` on that day, and of any clock change on that day."""
        begin, after = (start_of(each, self.zone) for each in (day, day + datetime.timedelta(1)))
        found = {begin, *_clock_changes(begin, after, self.zone)}
        for minute in self.hours or ():
            wall = datetime.time(minute // 60 % 24, minute % 60, tzinfo=self.zone)
            # When clocks are set back, a local time occurs twice. ``fold`` selects the first or the second one.
            found.update(datetime.datetime.combine(day, wall.replace(fold=fold)).timestamp() for fold in (0, 1))
        return sorted(found)


def start_of(day: datetime.date, zone: ZoneInfo) -> float:
    """Return the start of a day in Unix seconds, even if a clock change skips or repeats midnight."""
    return datetime.datetime.combine(day, datetime.time(tzinfo=zone)).timestamp()


def _clock_changes(begin: float, after: float, zone: ZoneInfo) -> list[float]:
    """Return the time between ``begin`` and ``after`` at which the offset from UTC changes, or an empty list."""

    def offset(moment: float) -> datetime.timedelta | None:
        return datetime.datetime.fromtimestamp(moment, zone).utcoffset()

    old = offset(begin)
    if offset(after) == old:
        return []
    seconds = range(int(begin), int(after))
    return [float(seconds[0] + bisect.bisect_left(seconds, True, key=lambda each: offset(each) != old))]


def moment_of(written: LocalTime, zone: ZoneInfo) -> float:
    """Convert a time, or the start of a day, to Unix seconds. If a local time occurs twice, the first one counts."""
    if not isinstance(written, datetime.datetime):
        return start_of(written, zone)
    return (written if written.tzinfo else written.replace(tzinfo=zone)).timestamp()


def end_of(written: LocalTime, zone: ZoneInfo) -> float:
    """Convert a time, or the end of a day, to Unix seconds."""
    is_day = not isinstance(written, datetime.datetime)
    return moment_of(written + datetime.timedelta(1) if is_day else written, zone)


def shown_time(moment: float, zone: ZoneInfo) -> str:
    """Return a time as text for messages, for example ``2026-12-02 00:00 Europe/Berlin``."""
    clock = datetime.datetime.fromtimestamp(moment, zone).replace(tzinfo=None)
    return f"{clock.isoformat(sep=' ', timespec='seconds' if clock.second else 'minutes')} {zone.key}"


def read_local_time(text: str) -> LocalTime:
    """Return the day or time in ``text`` (ISO 8601). Raises ValueError for other texts."""
    if _DATE.fullmatch(text):
        found: LocalTime = datetime.date.fromisoformat(text)
    elif _TIME.fullmatch(text):
        found = datetime.datetime.fromisoformat(text)
    else:
        raise ValueError
    if found.year not in YEARS:
        raise ValueError
    return found


def read_days(text: str) -> frozenset[int]:
    """Return the days in a text such as ``Sat-Sun`` or ``Mon, Wed``. Raises ValueError for other texts."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = (each.strip() for each in part.partition("-"))
        begin = WEEKDAYS.index(first)
        length = (WEEKDAYS.index(last) - begin) % 7 if dash else 0
        found.update((begin + number) % 7 for number in range(length + 1))
    return frozenset(found)


def read_hours(text: str) -> tuple[int, int]:
    """Return the two times in a text such as ``20:00-06:00``, as minutes after midnight, or raise ValueError."""
    matched = _HOURS.fullmatch(text)
    if matched is None:
        raise ValueError
    hour, minute, end_hour, end_minute = map(int, matched.groups())
    first, end = hour * 60 + minute, end_hour * 60 + end_minute
    if max(minute, end_minute) > 59 or first >= MINUTES_PER_DAY or end > MINUTES_PER_DAY or first == end:  # noqa: PLR2004
        raise ValueError
    return first, end


@functools.cache
def zone_names() -> frozenset[str]:
    """Return the names of all time zones, as IANA publishes them."""
    return frozenset(importlib.resources.files("tzdata").joinpath("zones").read_text("utf-8").split())


def zone_of(name: str) -> ZoneInfo | None:
    return ZoneInfo(name) if name in zone_names() else None
