"""Reads the body of an admission review up to a maximum size, and finds uid and namespace in its first bytes."""

import re
from http import HTTPStatus
from typing import NamedTuple

from a2wsgi import asgi_typing

from vcuda.errors import BadReview

MAX_BODY = 3 * 2**20
"""The maximum size of an admission review in bytes. A larger review is rejected.

The API server also accepts requests of at most 3 MiB (MaxRequestBodyBytes in k8s.io/apiserver, pkg/server/config.go).
etcd accepts at most 1.5 MiB with an object (--max-request-bytes). A review carries one object for CREATE, and two for
UPDATE, as JSON. Go writes each &, < and > in JSON as six bytes (encoding/json, HTMLEscape). So the review of an
accepted object may have over 18 MiB. Useful objects are far smaller: the review of a pod has 4 to 20 KiB. The review of
an edit of the quota has two versions of the ConfigMap with at most 1 MiB of data each, and few escaped characters."""

LARGE_BODY = 2**16
"""The number of bytes that are read from each request body without delay. The review of a longer body waits in a queue
before the remaining bytes are read. The review's uid and namespace are searched in these bytes, because a pod's name,
which precedes the namespace, may be long: the API server has not validated it before /mutate."""

# The first field of an AdmissionRequest (k8s.io/api, admission/v1) is uid. The namespace follows kind, resource and
# name. JSON escapes quotes inside strings, so these regular expressions cannot match inside a pod's name.
_UID = re.compile(rb'"request"\s*:\s*\{\s*"uid"\s*:\s*"([-0-9A-Za-z]{1,64})"')
_NAMESPACE = re.compile(rb'"namespace"\s*:\s*"([a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?)"')


class BodyTooLarge(BadReview):
    """Raised if a body has more than `MAX_BODY` bytes."""

    def __init__(self) -> None:
        super().__init__(f"the request body has more than {MAX_BODY} bytes", HTTPStatus.REQUEST_ENTITY_TOO_LARGE)


class ReviewHead(NamedTuple):
    """The uid and the namespace in the first bytes of a review; empty if not found. No admission depends on them."""

    uid: str
    namespace: str

    @classmethod
    def read(cls, body: bytes) -> "ReviewHead":
        uid, namespace = (pattern.search(body, 0, LARGE_BODY) for pattern in (_UID, _NAMESPACE))
        return cls(uid[1].decode() if uid else "", namespace[1].decode() if namespace else "")


async def read_body(receive: asgi_typing.Receive, chunks: list[bytes], enough: int = MAX_BODY) -> bool:
    """Append the received parts of a body to ``chunks`` until the body is complete or has over ``enough`` bytes.

    Return True if the body is complete. Raises BodyTooLarge. Raises ConnectionAbortedError if the caller disconnects.
    """
    size = sum(map(len, chunks))
    while size <= enough:
        message = await receive()
        if message["type"] != "http.request":
            raise ConnectionAbortedError
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > MAX_BODY:
            raise BodyTooLarge
        if not message.get("more_body", False):
            return True
    return False
