"""Tests of the message for a rejected option of `vcuda-certs`. The message must say which value to use instead."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from certs import options


@pytest.mark.parametrize(
    ("text", "span"),
    [("90d", timedelta(90)), ("12h", timedelta(hours=12)), ("5m", timedelta(minutes=5)), ("0s", timedelta())],
)
def test_a_span_is_a_number_and_a_unit(text: str, span: timedelta) -> None:
    assert options.parse_span(text) == span
    assert options.format_span(span) == text


@pytest.mark.parametrize(
    ("parse", "text", "told"),
    [
        *((options.parse_span, text, "must be a number with a unit s, m, h or d") for text in ("90", "-5m")),
        *((options.parse_span, text, "must be at most 36500d") for text in ("9999999999999d", "3000000d")),
        *((options.parse_life, text, "must be from 1m to 36500d") for text in ("9999999999999d", "59s", "36501d")),
        (options.parse_past, "yesterday", "must be a time, for example 2026-01-31T12:00:00Z"),
        (options.parse_past, "2026-01-31T12:00:00", "must have a time zone"),
        (options.parse_past, "9999-01-31T12:00:00Z", "must not be in the future"),
        *((options.parse_host_port, text, "must be HOST:PORT") for text in ("10.0.0.7", ":8443")),
        *(
            (options.parse_selector, text, "must be KEY=VALUE")
            for text in ("part-of", "a!=", "a=b,", "a==b", "a in (b)", "a!=b")
        ),
    ],
)
def test_the_error_for_a_bad_value_says_what_to_write(parse: Callable[[str], object], text: str, told: str) -> None:
    with pytest.raises(ValueError, match=r".+") as raised:
        parse(text)
    assert told in str(raised.value)


def test_a_selector_is_one_label_or_several() -> None:
    assert options.parse_selector("app.kubernetes.io/part-of=vcuda-quota, b=c") == {
        "app.kubernetes.io/part-of": "vcuda-quota",
        "b": "c",
    }


def test_a_time_in_the_past_is_accepted() -> None:
    assert options.parse_past("2026-01-31T12:00:00Z") == datetime(2026, 1, 31, 12, tzinfo=UTC)
