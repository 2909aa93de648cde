"""Tests that the webhook answers every malformed AdmissionReview in JSON, and admits no GPU pod beyond the quota."""

import json
from collections.abc import Iterator
from contextlib import closing
from http import HTTPStatus
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tests import strategies
from tests.integration.fuzzing import Target, assert_harmless, for_a_while
from tests.integration.reviews import POD, Json, pinned, review_of, with_uid
from tests.processes import JSON_TYPE, exchange

pytestmark = pytest.mark.slow

EXAMPLES = 60
SHARE = 0.3

ASKING = ("tencent.com/vcuda-core", "nvidia.com/vcuda-core", "nvidia.com/gpu", "nvidia.com/vgpu-number")

Place = tuple[str | int, ...]


class Token(str):
    """Text that is inserted unchanged into JSON, and may be invalid JSON."""

    __slots__ = ()


NUMBERS: list[Any] = [0, -1, 2**63, -(2**64), 1e308, *map(Token, ["1e999", "-0", "9" * 5000, "0.1e-400", "NaN"])]
TEXTS: list[Any] = ["", "\0", "a\0b", "\u202e~/", "x" * 70_000, *map(Token, ['"\\ud800"', '"\\udfff\\ud800"'])]
DEEP = [Token("[" * 3000 + "]" * 3000), Token('{"a":' * 3000 + "1" + "}" * 3000)]
NO_JSON = [Token("'single'"), Token("[1,]"), Token("\\u0000")]
ODD = [None, True, *NUMBERS, *TEXTS, [], {}, [[]], [None], {"": None}, *DEEP, *NO_JSON]


def written(value: object) -> str:
    """Return the JSON text of the value. A `Token` in it is inserted unchanged."""
    if isinstance(value, Token):
        return value
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{written(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return json.dumps(value)


def places(value: object, here: Place = ()) -> Iterator[Place]:
    if here:
        yield here
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    for key in keys:
        yield from places(value[key], (*here, key))  # type: ignore[index]  # the keys fit the type of the value


def changed(value: Any, place: Place, change: str, odd: Any) -> Any:
    key, rest = place[0], place[1:]
    if rest:
        inner = changed(value[key], rest, change, odd)
    elif change == "drop":
        return [each for at, each in enumerate(value) if at != key] if isinstance(value, list) else without(value, key)
    elif change == "twice" and isinstance(value, dict):
        return Token(f"{written(value)[:-1]},{json.dumps(key)}:{written(odd)}}}")
    else:
        inner = {"nest": [value[key]], "wrap": {"a": value[key]}, "text": written(value[key])}.get(change, odd)
    if isinstance(value, list):
        return [inner if at == key else each for at, each in enumerate(value)]
    return {**value, key: inner}


def without(value: Json, key: str | int) -> Json:
    return {each: what for each, what in value.items() if each != key}


@st.composite
def spoilt_reviews(draw: st.DrawFn) -> bytes:
    """AdmissionReviews of a valid pod, with up to three random changes each. Some are cut off, or have extra bytes."""
    pod = draw(strategies.pods())
    if draw(st.booleans()):
        pod = with_uid(pinned(pod))
    review: Any = review_of(pod, namespace=draw(st.sampled_from(["full", "roomy", "free"])))
    for _ in range(draw(st.integers(0, 3))):
        where = draw(st.sampled_from(list(places(review)) or [()]))
        change = draw(st.sampled_from(["drop", "odd", "odd", "nest", "wrap", "text", "twice"]))
        if where and not isinstance(review, Token):
            review = changed(review, where, change, draw(st.sampled_from(ODD)))
    text = written(review).encode("utf-8", "surrogatepass")
    return draw(st.sampled_from([text, text, text, text[: len(text) // 2], text + b"}", b"\xef\xbb\xbf" + text]))


def must_be_rejected(body: bytes) -> bool:
    """Return whether the review creates a GPU pod beyond its quota, by another JSON parser than the webhook's."""
    try:
        asked = json.loads(body)["request"]
        pod = asked["object"]
        limits = [each["resources"]["limits"] for each in pod["spec"]["containers"]]
        cores = [limit[name] for limit in limits for name in ASKING if name in limit]
        return bool(
            asked["kind"] == POD
            and asked["operation"] == "CREATE"
            and not asked.get("subResource")
            and asked["namespace"] == "full"
            and any(isinstance(core, str) and core.isascii() and core.isdecimal() and int(core) for core in cores)
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False


@pytest.mark.timeout(900)
def test_a_malformed_review_is_answered_in_json_and_never_exceeds_the_quota(target: Target) -> None:
    answered = {"reviews": 0, "errors": 0, "must be rejected": 0}

    @settings(max_examples=EXAMPLES, database=None, suppress_health_check=list(HealthCheck))
    @given(spoilt_reviews(), st.sampled_from(["/mutate", "/validate", "/validate?timeout=2s", "/quota"]))
    def send(body: bytes, path: str) -> None:
        with closing(target.server.connect()) as connection:
            reply = exchange(connection, "POST", path, body, JSON_TYPE)
            assert_harmless(reply.body)
            answer = reply.decoded()
            if reply.status != HTTPStatus.OK:
                assert reply.status == HTTPStatus.BAD_REQUEST, reply
                assert answer.keys() == {"error", "status"}
                answered["errors"] += 1
                return
            answered["reviews"] += 1
            if path != "/quota" and must_be_rejected(body):
                answered["must be rejected"] += 1
                assert not answer["response"]["allowed"], body
            assert exchange(connection, "GET", "/healthz").body == b"ok\n", (
                "the connection has an answer to another request"
            )
        target.assert_sound()

    send()
    before = target.note_memory("before spoilt reviews")
    times = for_a_while(SHARE, send)
    after = target.note_memory(f"after {times * EXAMPLES} more: {answered}")
    assert min(answered.values()) > 0
    assert after - before < 32
