"""Answers to what is no request: the same JSON object as every other error, and the end of the connection."""

from __future__ import annotations

from http import HTTPStatus

import msgspec
from gunicorn.http import errors

from webhook.arrival import MAX_BODY, TooLarge

LONGEST = 300
"""Letters of a message: the parser's repeat what was sent, which may be long."""

_STATUS_OF: tuple[tuple[type[Exception], HTTPStatus], ...] = (
    (TooLarge, HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
    (errors.LimitRequestLine, HTTPStatus.REQUEST_URI_TOO_LONG),
    (errors.LimitRequestHeaders, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE),
    (errors.UnsupportedTransferCoding, HTTPStatus.NOT_IMPLEMENTED),
    (errors.ExpectationFailed, HTTPStatus.EXPECTATION_FAILED),
    (errors.ParseException, HTTPStatus.BAD_REQUEST),
    (errors.NoMoreData, HTTPStatus.BAD_REQUEST),
)

MALFORMED = tuple(kind for kind, _ in _STATUS_OF)
"""What reading a request raises where the client is wrong."""


def error_object(message: str, status: HTTPStatus) -> bytes:
    """Return the JSON object that every error is told by."""
    return msgspec.json.encode({"error": message, "status": status.value})


def over_limit() -> str:
    """Return the sentence about a body that is too large."""
    return f"the body is over {MAX_BODY} bytes"


def fault(status: HTTPStatus, message: str) -> bytes:
    """Return the whole answer, after which the connection ends."""
    body = error_object(message, status)
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


def fault_of(error: Exception) -> bytes:
    """Return the answer to what raised one of ``MALFORMED``."""
    status = next(status for kind, status in _STATUS_OF if isinstance(error, kind))
    if isinstance(error, TooLarge):
        return fault(status, over_limit())
    return fault(status, f"this is no HTTP/1.1 request that is answered here: {error}"[:LONGEST])
