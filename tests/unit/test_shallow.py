"""Tests of `shallow`, of the decoders and of the reflector with any JSON that the API server would store."""

import json
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from hypothesis import assume, given, strategies as st

from controller.plugin.kubectl import read_json
from tests.api_double import Handle
from vcuda import shallow as under_test
from vcuda.admission_review import MAX_REPAIRED, read_review
from vcuda.allocations.stored_claims import ClaimReader
from vcuda.k8s_types import Decoder, Pod
from vcuda.kube import Params, Reflector
from vcuda.kube.pages import Page, read_page
from vcuda.kube.watch import read_event
from vcuda.shallow import shallow

ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='a"\\[]{},:\ud800\udc00é', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=20,
)


def cut(value: Any, deepest: int) -> Any:
    """Return the JSON value, with None instead of the lists and objects below ``deepest`` levels."""
    if not isinstance(value, list | dict):
        return value
    if not deepest:
        return None
    if isinstance(value, list):
        return [cut(each, deepest - 1) for each in value]
    return {key: cut(each, deepest - 1) for key, each in value.items()}


def whole(text: str) -> str:
    """Return the text with a replacement for each half of a surrogate pair."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def sound(value: Any) -> Any:
    if isinstance(value, str):
        return whole(value)
    if isinstance(value, list):
        return [sound(each) for each in value]
    return {whole(key): sound(each) for key, each in value.items()} if isinstance(value, dict) else value


@given(ANY_JSON, st.integers(0, 8), st.sampled_from((None, 1)))
def test_a_text_loses_its_deepest_values_and_nothing_else(value: Any, deepest: int, indent: int | None) -> None:
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(under_test, "DEEPEST", deepest)
        found = json.loads(shallow(json.dumps(value, indent=indent).encode()))
    assert cut(found, deepest) == sound(cut(value, deepest))
    assert cut(found, deepest + under_test.FLAT_LEVELS) == found


def test_a_text_without_halves_is_not_searched_character_by_character() -> None:
    with mock.patch.object(under_test, "_CHARACTERS", None):
        assert shallow(rb'["\n"]') == rb'["\n"]'


def nested(depth: int, brackets: tuple[bytes, bytes]) -> bytes:
    return brackets[0] * depth + b"0" + brackets[1] * depth


JUNK = st.one_of(
    st.builds(
        nested,
        st.integers(1, 10_000) | st.integers(900, 1_000),
        st.sampled_from(((b"[", b"]"), (b'{"f:a":', b"}"), (b'["]",', b",{}]"))),
    ),
    st.sampled_from(
        (
            b"1" * 5_000,
            b"-1e999999",
            b'"\\ud800"',
            b'{"\\udfff":"\\ud83d\\ude00"}',
            b'"\\\\ud800"',
            b'{"a":1,"a":[2]}',
            b'"' + b"\\n" * 750_000 + b'"',
            b'"\xff"',
            b'"\\u0000[{\\""',
        )
    ),
    ANY_JSON.map(lambda value: json.dumps(value).encode()),
)
JUNKS = st.lists(JUNK, min_size=1, max_size=3).map(lambda junks: b"[" + b",".join(junks) + b"]")


def pod(name: str, version: int, junk: bytes = b"[]", *, junk_first: bool = False) -> bytes:
    own = f'"name":"{name}","namespace":"a","uid":"{name}","resourceVersion":"{version}"'.encode()
    managed = b'"managedFields":' + junk
    metadata = b'"metadata":{' + b",".join((managed, own) if junk_first else (own, managed)) + b"}"
    spec = f'"spec":{{"schedulerName":"v{version}"}}'.encode()
    return b"{" + b",".join((spec, metadata) if junk_first else (metadata, spec)) + b"}"


class Pages(Handle):
    """A double of the API whose LISTs have the given page."""

    def __init__(self, *items: bytes) -> None:
        self.body = b'{"kind":"List","metadata":{"resourceVersion":"9"},"items":[' + b",".join(items) + b"]}"

    def list_pages(self, _path: str, _params: Params, _limit: int, **_: object) -> Iterator[Page]:
        yield read_page(self.body)[0]


def scheduler(raw: bytes) -> str:
    return POD.decode(raw).spec.scheduler_name


POD = Decoder(Pod)


@given(
    JUNKS, JUNKS, st.booleans(), st.sampled_from((b'{"type":"MODIFIED","object":%b}', b'{"object":%b,"type":"ADDED"}'))
)
def test_every_object_is_delivered_whatever_the_api_server_stores_in_another(
    listed: bytes, changed: bytes, first: bool, line: bytes
) -> None:
    double = Pages(pod("before", 1), pod("odd", 2, listed, junk_first=first), pod("after", 3))
    reflector = Reflector(double.kube, "/pods", scheduler)
    reflector.relist()
    assert {key.name: value for key, value in reflector.snapshot().items()} == {
        "before": "v1",
        "odd": "v2",
        "after": "v3",
    }
    events = (pod("odd", 11, changed, junk_first=first), pod("after", 12))
    reflector.follow(read_event(line.replace(b"%b", each), "watch") for each in events)
    assert reflector.get(("a", "odd")) == "v11"
    assert reflector.get(("a", "after")) == "v12"
    assert reflector.counts.undecodable == 0


@given(JUNKS)
def test_the_charge_of_a_claim_does_not_depend_on_the_parameters_of_drivers(junk: bytes) -> None:
    text = b'{"metadata":{"uid":"u"},"spec":{"devices":{"requests":[{"name":"r","exactly":{"deviceClassName":"c"}}],'
    text += b'"config":[{"opaque":{"driver":"d","parameters":%b}}]}}}'
    reader = ClaimReader()
    assert reader.read(text.replace(b"%b", junk)) == reader.read(text.replace(b"%b", b"{}"))


@given(JUNKS)
def test_a_review_of_any_object_is_read(junk: bytes) -> None:
    assume(len(junk) < MAX_REPAIRED - 1024)
    review = b'{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"u","object":%b}}'
    found = read_review(review.replace(b"%b", pod("odd", 2, junk)))
    assert scheduler(found.object) == "v2"


@given(JUNKS)
def test_the_plugin_reads_any_object(junk: bytes) -> None:
    assert read_json(pod("odd", 2, junk))["spec"] == {"schedulerName": "v2"}
