"""Tests of the Kubernetes client: paths, response bodies and their lines, and warning headers."""

import itertools
import time
from collections.abc import Callable
from typing import NoReturn, cast
from unittest.mock import Mock

import pytest
from hypothesis import given, strategies as st

from tests.tables import cases
from vcuda.errors import NotFound, Unavailable, VcudaError
from vcuda.kube import Event, InvolvedObject, Kube, LedgerStore, QuotaInformer, QuotaSource, Stored, post_event
from vcuda.kube.client import read_response, split_lines, warnings_in
from vcuda.ledger.ledger import Ledger
from vcuda.placement.nodes import Nodes

NAME = "team-a/../team-b"
QUOTED = "team-a%2F..%2Fteam-b"
IN_IT = f"/api/v1/namespaces/{QUOTED}/"


class Asked:
    """A test double of the client. It records the path of each call, and has no objects."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    def get(self, path: str, *_: object, **__: object) -> NoReturn:
        self.paths.append(path)
        raise NotFound(404, "no such object")

    post = put = post_heard = put_heard = list_pages = get


def store(kube: Kube, namespace: str) -> LedgerStore:
    return LedgerStore(kube, namespace, Nodes)


@cases(
    "call, begin",
    the_ledgers_namespace=(lambda kube: store(kube, NAME).open("a"), IN_IT),
    a_namespaces_pods=(lambda kube: store(kube, "a").list_pods(NAME), IN_IT),
    a_namespaces_ledger=(
        lambda kube: store(kube, "a").write(NAME, Ledger(), Stored(Ledger(), "1")),
        f"/api/v1/namespaces/a/configmaps/gpu-ledger-{QUOTED}",
    ),
    the_quota=(lambda kube: QuotaInformer(kube, QuotaSource(NAME), frozenset()).stored_version(), IN_IT),
    an_Event=(
        lambda kube: post_event(kube, Event(InvolvedObject("v1", "Pod", "a", NAME), "id", "Reason", "message", "test")),
        IN_IT,
    ),
)
def test_a_slash_in_a_name_is_part_of_the_name(call: Callable[[Kube], object], begin: str) -> None:
    asked = Asked()
    with pytest.raises(VcudaError, match="no such object"):
        call(cast("Kube", asked))
    assert asked.paths[0].startswith(begin)


LINES = st.lists(st.text(min_size=1).map(lambda text: text.replace("\n", "é").encode()))


@given(lines=LINES, cuts=st.lists(st.integers(0, 300)))
def test_lines_are_complete_however_the_stream_is_cut(lines: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(line + b"\n" for line in lines)
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    chunks = [stream[start:end] for start, end in itertools.pairwise(edges)]
    assert list(split_lines(chunks)) == lines


def test_a_line_is_returned_as_soon_as_it_is_complete() -> None:
    """A watch may be silent for a minute, so its last event must not wait for the next line."""
    lines = split_lines(itertools.chain([b"fir", b"st\nsec"], iter(pytest.fail, None)))
    assert next(lines) == b"first"


def test_blank_lines_are_left_out() -> None:
    assert list(split_lines([b"\na\n\n", b"\nb\n"])) == [b"a", b"b"]


@pytest.mark.parametrize(
    "chunks", [[b"a\nb"], [b"a", b"b"]], ids=["deadline after a line", "deadline in the first line"]
)
def test_a_stream_that_ends_inside_a_line_is_torn(chunks: list[bytes]) -> None:
    with pytest.raises(Unavailable, match="inside a line"):
        list(split_lines(chunks))


def test_each_read_of_a_body_has_only_the_rest_of_the_timeout() -> None:
    """So a server that sends its answer byte by byte does not extend the timeout."""
    response = Mock()
    response.read1.side_effect = [b"a", b"b", b"c", b""]
    assert read_response(response, time.monotonic() + 60, 100) == b"abc"
    timeouts = [call.args[0] for call in response.connection.sock.settimeout.call_args_list]
    assert len(timeouts) == 4
    assert timeouts == sorted(timeouts, reverse=True)
    assert timeouts[0] <= 60


def test_past_the_deadline_nothing_is_read_and_the_connection_is_not_used_again() -> None:
    response = Mock()
    response.read1.return_value = b""
    with pytest.raises(TimeoutError):
        read_response(response, time.monotonic() - 1, 100)
    response.close.assert_called_once_with()
    response.read1.assert_not_called()


def test_a_body_is_read_although_its_connection_was_released() -> None:
    """If the server announces that it will close the connection, Python releases it before the body is read."""
    response = Mock(connection=None)
    response.read1.side_effect = [b"a", b""]
    assert read_response(response, time.monotonic() + 60, 100) == b"a"


@cases(
    "headers, texts",
    none=([], ()),
    as_Kubernetes_sends_it=(['299 - "nearly used up"'], ("nearly used up",)),
    one_header_per_warning=(['299 - "one"', '299 - "two"'], ("one", "two")),
    one_header_for_several_warnings=(['299 - "one, and more", 299 - "two"'], ("one, and more", "two")),
    escapes=([r'299 - "a \"quoted\" word, C:\\x"'], ('a "quoted" word, C:\\x',)),
    UTF_8_decoded_as_Latin_1=(['299 - "für M40"'.encode().decode("latin-1")], ("für M40",)),
    agent_and_date=(['110 proxy:80 "stale" "Sat, 25 Aug 2012 23:34:45 GMT"'], ("stale",)),
    malformed=(["", "299", '299 - "cut', "nothing of the kind"], ()),
)
def test_the_texts_of_warning_headers_are_read(headers: list[str], texts: tuple[str, ...]) -> None:
    assert warnings_in(headers) == texts
