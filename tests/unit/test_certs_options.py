"""Values of options that are refused say what to write instead."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from certs.options import format_span, parse_host_port, parse_life, parse_past, parse_selector, parse_span


@pytest.mark.parametrize(
    ("text", "span"),
    [("90d", timedelta(days=90)), ("12h", timedelta(hours=12)), ("5m", timedelta(minutes=5)), ("0s", timedelta())],
)
def test_a_span_is_a_number_and_a_unit(text: str, span: timedelta) -> None:
    assert parse_span(text) == span
    assert format_span(span) == text


@pytest.mark.parametrize(
    ("parse", "text", "told"),
    [
        (parse_span, "90", "write a number and one of s, m, h and d"),
        (parse_span, "-5m", "write a number and one of s, m, h and d"),
        (parse_span, "9999999999999d", "longer than a time can be: write 36500d at most"),
        (parse_span, "3000000d", "longer than a time can be: write 36500d at most"),
        (parse_life, "9999999999999d", "write 1m to 36500d"),
        (parse_life, "59s", "write 1m to 36500d"),
        (parse_life, "36501d", "write 1m to 36500d"),
        (parse_past, "yesterday", "write one such as 2026-01-31T12:00:00Z"),
        (parse_past, "2026-01-31T12:00:00", "has no time zone"),
        (parse_past, "9999-01-31T12:00:00Z", "is in the future"),
        (parse_host_port, "10.0.0.7", "is not HOST:PORT"),
        (parse_host_port, ":8443", "is not HOST:PORT"),
        (parse_selector, "part-of", "write KEY=VALUE"),
        (parse_selector, "a!=", "write KEY=VALUE"),
        (parse_selector, "a=b,", "write KEY=VALUE"),
        (parse_selector, "a==b", "write KEY=VALUE"),
        (parse_selector, "a in (b)", "write KEY=VALUE"),
        (parse_selector, "a!=b", "write KEY=VALUE"),
    ],
)
def test_what_is_refused_says_what_to_write(parse: Callable[[str], object], text: str, told: str) -> None:
    with pytest.raises(ValueError, match=r".+") as raised:
        parse(text)
    assert told in str(raised.value)


def test_a_selector_is_one_label_or_several() -> None:
    assert parse_selector("app.kubernetes.io/part-of=vcuda-quota, b=c") == {
        "app.kubernetes.io/part-of": "vcuda-quota",
        "b": "c",
    }


def test_a_time_that_is_over_is_taken() -> None:
    assert parse_past("2026-01-31T12:00:00Z") == datetime(2026, 1, 31, 12, tzinfo=UTC)
