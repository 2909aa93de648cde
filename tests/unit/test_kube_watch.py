"""Tests of the decoding of watch events. Every valid notation of an event must be decoded to the same event."""

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from vcuda.errors import WatchLost
from vcuda.kube.watch import Meta, read_event

ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9) | st.just('"}},"object":{"metadata":{}}'),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=9,
)
ANY_TYPE = st.sampled_from(("ADDED", "MODIFIED", "DELETED"))


@given(ANY_TYPE, ANY_JSON, st.booleans(), st.booleans(), st.booleans())
def test_an_event_is_read_in_any_json_notation(
    kind: str, rest: Any, compact: bool, reversed_: bool, more: bool
) -> None:
    made = {"metadata": {"name": "train", "namespace": "team-a", "uid": "u", "resourceVersion": "7"}, "rest": rest}
    fields = {"type": kind, "object": made, **({"more": {}} if more else {})}
    line = json.dumps(
        dict(reversed(fields.items())) if reversed_ else fields, separators=(",", ":") if compact else (", ", ": ")
    ).encode()
    event = read_event(line, "watch")
    assert (event.type, event.meta) == (kind, Meta("7", "team-a", "train", "u"))
    assert json.loads(bytes(event.raw)) == made


@pytest.mark.parametrize(
    "line",
    [
        b'{"type":"ADDED","object":{"metadata":{"resourceVersion":"7"}}',
        b'{"type":"ADDED","object":{"metadata":{"resourceVersion":"7"}}}}',
        b'{"type":"ADDED","object":{"metadata":{"resourceVersion":"7"}},}',
        b'{"type":"ADDED","object":{"metadata":{}}}',
        b'{"type":"OTHER","object":{"metadata":{"resourceVersion":"7"}}}',
        b'{"type":"ADDED","object":',
        b'{"type":"ADDED"}',
    ],
)
def test_a_line_that_cannot_be_read_loses_the_watch(line: bytes) -> None:
    """An unreadable event could be about any object, so the watch must begin again with a LIST."""
    with pytest.raises(WatchLost):
        read_event(line, "watch")
