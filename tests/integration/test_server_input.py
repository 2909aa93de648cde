"""Tests that malformed requests are answered in JSON with the error. No answer has a stack trace or admits a pod."""

import json
from contextlib import closing
from http import HTTPStatus
from typing import Any

import pytest

from tests.integration.fuzzing import Target
from tests.integration.reviews import card_pod, gpu_pod, review_of
from tests.processes import Body, Reply, WebhookProcess, exchange

LIMIT = 3 * 2**20
DEPLOYMENT = {"group": "apps", "version": "v1", "kind": "Deployment"}


@pytest.fixture(scope="module")
def server(target: Target) -> WebhookProcess:
    """A running webhook for all tests of this file. In the end, its log must have no error and no stack trace."""
    return target.server


def fault_of(reply: Reply) -> str:
    assert b"Traceback" not in reply.body
    answer = reply.decoded()
    assert answer.keys() == {"error", "status"}
    assert answer["status"] == reply.status
    return str(answer["error"])


def encoded(subject: object, **fields: object) -> str:
    return json.dumps(review_of(subject, **fields))


def with_quantity(quantity: str) -> str:
    """Return a review of a pod that requests cores. Its JSON has ``quantity`` unchanged."""
    return encoded(gpu_pod("p", "steady", {"tencent.com/vcuda-core": "HERE"})).replace('"HERE"', quantity)


@pytest.mark.parametrize(
    ("line", "body", "status", "sentence"),
    [
        pytest.param("POST /mutate", "pod", 400, "not an AdmissionReview in JSON", id="no JSON"),
        pytest.param("POST /mutate", b"", 400, "not an AdmissionReview in JSON", id="no body"),
        pytest.param("POST /mutate", "null", 400, "not an AdmissionReview in JSON", id="null"),
        pytest.param("POST /mutate", "[]", 400, "Expected `object`, got `array`", id="an array"),
        pytest.param("POST /mutate", "[" * 200_000, 400, "not an AdmissionReview", id="arrays without end"),
        pytest.param("POST /validate", with_quantity("NaN"), 400, "not an AdmissionReview in JSON", id="NaN"),
        pytest.param("POST /mutate", "{}", 400, "got apiVersion '' and kind ''", id="an object of no kind"),
        pytest.param("POST /mutate", encoded({}).replace("/v1", "/v2"), 400, "Versions: [v1]", id="another version"),
        pytest.param("POST /mutate", encoded({}).replace("Review", "Revue"), 400, "AdmissionRevue", id="other kind"),
        pytest.param("POST /mutate", encoded({}).replace('"request"', '"x"'), 400, "has no request", id="no request"),
        pytest.param("POST /mutate", encoded({}, uid=7), 400, "$.request.uid", id="a uid that is a number"),
        pytest.param("POST /mutate", encoded({}, namespace="Q").replace("Q", "\xff"), 400, "utf-8", id="not UTF-8"),
        pytest.param(
            "POST /mutate?timeout=soon", encoded({}), 400, "timeout='soon' is not a valid duration", id="timeout"
        ),
        pytest.param("POST /validate?timeout=-5s", encoded({}), 400, "is not a valid duration", id="negative timeout"),
        pytest.param("GET /mutate", None, 405, "not allowed", id="GET of a review path"),
        pytest.param("OPTIONS /validate", None, 405, "not allowed", id="OPTIONS"),
        pytest.param("POST /metrics", "{}", 405, "not allowed", id="POST of the metrics"),
        pytest.param("GET /nowhere", None, 404, "not found", id="unknown path"),
        pytest.param("POST /mutate/", encoded({}), 404, "not found", id="a slash too many"),
    ],
)
def test_a_request_that_is_not_a_review_gets_an_error_message(
    server: WebhookProcess, line: str, body: Body, status: int, sentence: str
) -> None:
    method, path = line.split()
    reply = server.send(method, path, body)
    assert reply.status == status
    assert sentence in fault_of(reply)


@pytest.mark.parametrize("content_type", ["text/plain", "text/json", "application/json-patch+json", ""])
def test_a_body_with_another_content_type_than_json_is_415(server: WebhookProcess, content_type: str) -> None:
    reply = server.send("POST", "/mutate", encoded({}), {"Content-Type": content_type})
    assert reply.status == HTTPStatus.UNSUPPORTED_MEDIA_TYPE
    assert fault_of(reply) == "the Content-Type must be application/json"


def test_parameters_of_the_content_type_are_accepted(server: WebhookProcess) -> None:
    reply = server.send("POST", "/mutate", encoded({}), {"Content-Type": "application/json; charset=utf-8"})
    assert reply.decoded()["response"]["allowed"]


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b" " * (LIMIT + 1), id="with its length said"),
        pytest.param([b" " * 65_536] * (LIMIT // 65_536) + [b" "], id="in chunks"),
    ],
)
def test_a_body_over_3_mib_is_413_and_the_connection_stays_usable(server: WebhookProcess, body: Any) -> None:
    with closing(server.connect()) as connection:
        reply = exchange(connection, "POST", "/mutate", body)
        assert reply.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        assert fault_of(reply) == f"the request body has more than {LIMIT} bytes"
        assert exchange(connection, "GET", "/healthz").body == b"ok\n"


def test_a_body_of_3_mib_is_read(server: WebhookProcess) -> None:
    review = encoded(card_pod("large", "steady"))
    assert server.send("POST", "/mutate", review.ljust(LIMIT)).decoded()["response"]["allowed"]


@pytest.mark.parametrize("path", ["/mutate", "/validate"])
@pytest.mark.parametrize(
    ("body", "code", "sentence"),
    [
        pytest.param(with_quantity("9" * 5000), 400, "out of range", id="a number of 5000 digits"),
        pytest.param(with_quantity('"' + "9" * 100_000 + '"'), 422, "9...' is not a quantity", id="100,000 digits"),
        pytest.param(with_quantity("null"), 400, "the pod cannot be read", id="null for a quantity"),
        pytest.param(encoded({"metadata": 3}), 400, "$.metadata", id="a number for metadata"),
        pytest.param(encoded({"metadata": {"name": "Q"}}, name="p").replace("Q", "\xff"), 400, "utf-8", id="not UTF-8"),
        pytest.param(encoded({}, kind=DEPLOYMENT), 400, "not apps/v1/Deployment", id="a Deployment"),
    ],
)
def test_a_pod_that_cannot_be_decoded_is_rejected(
    server: WebhookProcess, path: str, body: Body, code: int, sentence: str
) -> None:
    """The review is valid, so the HTTP status is 200. The rejection has its own status in the review's response."""
    reply = server.send("POST", path, body)
    assert reply.status == HTTPStatus.OK
    assert b"Traceback" not in reply.body
    assert len(reply.body) < 2000, "the answer must be short for a request of any size"
    response = reply.decoded()["response"]
    assert not response["allowed"]
    assert response["status"]["code"] == code
    assert sentence in response["status"]["message"]
