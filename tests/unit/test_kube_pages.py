"""Tests of LISTs in pages."""

import json
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, strategies as st

from tests.tables import cases
from vcuda.errors import ListOverdue, TimedOut, TooLarge, Unavailable
from vcuda.kube import pages
from vcuda.kube.pages import AIM_BYTES, FIRST_PAGE, GROWTH, MAX_OBJECT_BYTES, MAX_PAGE_BYTES, Pager, SkippedObject

KIB = 1024
SIZES = st.lists(
    st.sampled_from([1, 10, 100, 1000, 3000]).map(lambda size: size * KIB) | st.integers(1, 9_000_000), max_size=60
)


class Server:
    """A server that returns pages of objects. Its bodies are small, but claim to have the given sizes."""

    def __init__(self, *sizes: int, seconds: Callable[[int], float] = lambda _: 0.0) -> None:
        self.sizes = sizes
        self.seconds = seconds
        self.now = 0.0
        self.asked: list[int] = []
        self.read: list[int] = []

    def fetch(self, limit: int, token: str, timeout: float, most: int) -> "Body":
        self.asked.append(limit)
        begin = int(token or 0)
        numbers = range(begin, min(begin + limit, len(self.sizes)))
        size = sum(self.sizes[number] for number in numbers)
        took = self.seconds(limit)
        self.now += min(took, timeout)
        if took > timeout:
            raise TimedOut("GET /pods")
        self.read.append(min(size, most))
        following = str(numbers.stop) if numbers.stop < len(self.sizes) else ""
        head = {"kind": "PodList", "metadata": {"resourceVersion": "7", "continue": following}}
        items = [{"metadata": {"name": f"pod-{number}", "namespace": "team-a"}} for number in numbers]
        body = json.dumps({**head, "items": items}, separators=(",", ":")).encode()
        if size > most:
            raise TooLarge("too large", body)
        return Body.of(body, size)

    def listed(self, most: int = 500, *, seconds: float = 8.0, skip: object = None) -> list[int]:
        pager = Pager(
            self.fetch,
            "LIST /pods",
            most=most,
            timeout=3.0,
            seconds=seconds,
            skip=skip,  # type: ignore[arg-type]
            clock=lambda: self.now,
        )
        items = [item for page in pager for item in page.items]
        return [int(json.loads(bytes(item))["metadata"]["name"].removeprefix("pod-")) for item in items]


class Body(bytes):
    """A response body that claims to have another size than it has."""

    size: int

    @classmethod
    def of(cls, body: bytes, size: int) -> "Body":
        made = cls(body)
        made.size = size
        return made

    def __len__(self) -> int:
        return self.size


@pytest.fixture(autouse=True)
def _read_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode the real bytes of a `Body`, whose `len` returns another size."""
    read = pages.read_page
    monkeypatch.setattr(pages, "read_page", lambda body: read(memoryview(body).tobytes()))


@given(SIZES)
def test_every_object_is_listed_once_and_no_page_exceeds_the_bound(sizes: list[int]) -> None:
    server = Server(*sizes)
    assert server.listed() == [*range(len(sizes))]
    of_several = [size for limit, size in zip(server.asked, server.read, strict=True) if limit > 1]
    assert max([0, *of_several]) <= MAX_PAGE_BYTES
    assert max([0, *server.read]) <= MAX_OBJECT_BYTES
    assert all(1 <= limit <= 500 for limit in server.asked)


def test_pages_of_usual_objects_grow_and_those_of_large_ones_stay_short() -> None:
    usual, large = Server(*[6 * KIB] * 3000), Server(*[1_200_000] * 300)
    usual.listed()
    assert (usual.asked[:3], len(usual.asked)) == ([FIRST_PAGE, FIRST_PAGE * GROWTH, 500], 8)
    large.listed()
    assert large.asked[:5] == [FIRST_PAGE, FIRST_PAGE // GROWTH, FIRST_PAGE // GROWTH**2, 3, 3]
    assert max(large.read[2:]) <= AIM_BYTES


def test_large_objects_behind_small_ones_are_requested_again_a_few_at_a_time() -> None:
    server = Server(*[KIB] * 400, *[1_200_000] * 20)
    assert len(server.listed()) == 420
    assert len(server.asked) < 30


def test_a_page_is_never_longer_than_the_caller_allows() -> None:
    server = Server(*[KIB] * 50)
    server.listed(most=2)
    assert {*server.asked} == {2}


@cases(
    "seconds, overdue",
    within_its_time=(lambda _: 1.0, False),
    many_pages=(lambda _: 2.0, True),
    more_than_it_has_left=(lambda _: 2.9, True),
)
def test_a_list_that_takes_too_long_ends_with_a_plain_message(
    seconds: Callable[[int], float], *, overdue: bool
) -> None:
    server = Server(*[1_200_000] * 12, seconds=seconds)
    if not overdue:
        assert len(server.listed()) == 12
        return
    with pytest.raises(ListOverdue, match="LIST /pods took longer than 8 s"):
        server.listed()
    assert server.now <= 8


def test_a_page_that_takes_too_long_is_requested_again_with_fewer_objects() -> None:
    server = Server(*[KIB] * 500, seconds=lambda limit: 5.0 if limit > 100 else 0.1)
    assert len(server.listed(seconds=60)) == 500


def test_a_server_that_does_not_answer_is_called_once() -> None:
    server = Server(*[KIB] * 500, seconds=lambda _: 5.0)
    with pytest.raises(TimedOut):
        server.listed(seconds=60)
    assert server.asked == [FIRST_PAGE]


def test_an_object_that_is_too_large_is_named_and_left_out_or_ends_the_list() -> None:
    sizes = [KIB, MAX_OBJECT_BYTES + 1, KIB]
    skipped: list[SkippedObject] = []
    assert Server(*sizes).listed(skip=skipped.append) == [0, 2]
    assert skipped == [("team-a", "pod-1")]
    with pytest.raises(TooLarge, match=f"LIST /pods: team-a/pod-1 has more than {MAX_OBJECT_BYTES} bytes"):
        Server(*sizes).listed()


@cases(
    "head, name",
    of_a_node=(b'{"kind":"Node","apiVersion":"v1","metadata":{"name":"node-1","uid":"1"', "node-1"),
    of_a_claim_with_a_generated_name=(
        b'{"metadata":{"name":"a-x","generateName":"a-","namespace":"team-a","uid":"1"',
        "team-a/a-x",
    ),
    of_nothing_that_is_known=(b'{"spec":{}', "an object without a name"),
)
def test_an_object_is_named_by_its_beginning(head: bytes, name: str) -> None:
    assert str(pages.name_in(head)) == name


def test_a_list_without_a_readable_beginning_cannot_be_continued() -> None:
    with pytest.raises(msgspec.MsgspecError):
        pages.read_skipped(b'{"items": [{"metadata":{"name":"a"')


def test_an_answer_that_is_no_list_raises() -> None:
    with pytest.raises(Unavailable, match="LIST /pods: the answer is not a list"):
        list(Pager(lambda *_: b"<html>", "LIST /pods", most=1, timeout=1, seconds=1))
