"""Reads the body of a review within its bound, and the uid and namespace in its first bytes."""

import re
from http import HTTPStatus
from typing import NamedTuple

from a2wsgi import asgi_typing

from vcuda.errors import BadReview

MAX_BODY = 3 * 2**20
"""Bytes of the largest review that is read. The API server reads at most 3 MiB of a request (MaxRequestBodyBytes in
k8s.io/apiserver, pkg/server/config.go), and etcd takes at most 1.5 MiB with an object (--max-request-bytes). A review
of CREATE carries one object and one of UPDATE two, as JSON. Go writes each &, < and > in JSON as six bytes
(encoding/json, HTMLEscape), so the review of an object that the API server takes may have over 18 MiB. Useful objects
are far smaller: a pod's review has 4 to 20 KiB. The two versions of a quota ConfigMap have at most 1 MiB of data each,
and little in it is escaped. So the bound is that of the API server, and a larger review is denied with the reason."""

LARGE_BODY = 2**16
"""Bytes of a body that are read before its review has a place in a queue."""

HEAD = 2**12
"""Bytes in which uid and namespace are looked for: Go writes them before userInfo and the object."""

# AdmissionRequest in k8s.io/api, admission/v1: uid is its first field, and namespace stands behind kind, resource and
# name. A quote within a text is escaped, so neither pattern matches inside a pod's name.
_UID = re.compile(rb'"request"\s*:\s*\{\s*"uid"\s*:\s*"([-0-9A-Za-z]{1,64})"')
_NAMESPACE = re.compile(rb'"namespace"\s*:\s*"([a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?)"')


class BodyTooLarge(BadReview):
    """The body is over `MAX_BODY`."""

    def __init__(self) -> None:
        super().__init__(f"the body is over {MAX_BODY} bytes", HTTPStatus.REQUEST_ENTITY_TOO_LARGE)


class ReviewHead(NamedTuple):
    """The uid and namespace in the unparsed first bytes of a review; empty if missing. No decision uses these."""

    uid: str
    namespace: str

    @classmethod
    def read(cls, body: bytes) -> "ReviewHead":
        uid, namespace = (pattern.search(body, 0, HEAD) for pattern in (_UID, _NAMESPACE))
        return cls(uid[1].decode() if uid else "", namespace[1].decode() if namespace else "")


async def read_body(receive: asgi_typing.Receive, chunks: list[bytes], enough: int = MAX_BODY) -> bool:
    """Append parts until the body is whole or over ``enough`` bytes. Return if it is whole. Raises BodyTooLarge."""
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
