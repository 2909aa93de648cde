"""Bodies within a deadline, and lines out of chunks."""

from __future__ import annotations

import itertools
import time
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcuda.errors import Unavailable
from vcuda.kube.client import read_body, split_lines

LINES = st.lists(st.text(min_size=1).map(lambda text: text.replace("\n", "é").encode()))


@given(lines=LINES, cuts=st.lists(st.integers(0, 300)))
def test_lines_come_whole_however_the_stream_is_cut(lines: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(line + b"\n" for line in lines)
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    chunks = [stream[start:end] for start, end in itertools.pairwise(edges)]
    assert list(split_lines(chunks)) == lines


def test_a_line_is_given_as_soon_as_it_is_whole() -> None:
    """A watch says nothing for a minute; its last event must not wait for the next."""
    lines = split_lines(itertools.chain([b"fir", b"st\nsec"], iter(pytest.fail, None)))
    assert next(lines) == b"first"


def test_blank_lines_are_left_out() -> None:
    assert list(split_lines([b"\na\n\n", b"\nb\n"])) == [b"a", b"b"]


@pytest.mark.parametrize("chunks", [[b"a\nb"], [b"a", b"b"]], ids=["after a line", "in the first line"])
def test_a_stream_that_ends_inside_a_line_is_torn(chunks: list[bytes]) -> None:
    with pytest.raises(Unavailable, match="inside a line"):
        list(split_lines(chunks))


def test_each_read_of_a_body_may_take_only_what_is_left_of_the_call() -> None:
    """A server that drips meets the deadline all the same."""
    response = Mock()
    response.read1.side_effect = [b"a", b"b", b"c", b""]
    assert read_body(response, time.monotonic() + 60) == b"abc"
    timeouts = [call.args[0] for call in response.connection.sock.settimeout.call_args_list]
    assert len(timeouts) == 4
    assert timeouts == sorted(timeouts, reverse=True)
    assert timeouts[0] <= 60


def test_past_the_deadline_nothing_is_read_and_the_connection_is_not_used_again() -> None:
    response = Mock()
    response.read1.return_value = b""
    with pytest.raises(TimeoutError):
        read_body(response, time.monotonic() - 1)
    response.close.assert_called_once_with()
    response.read1.assert_not_called()


def test_a_body_is_read_though_its_connection_was_given_up_already() -> None:
    """As it is when the server has said that it will close."""
    response = Mock(connection=None)
    response.read1.side_effect = [b"a", b""]
    assert read_body(response, time.monotonic() + 60) == b"a"
