"""Reads a LIST in pages. A page has a few MiB, even if the objects are large."""

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import msgspec

from vcuda import errors
from vcuda.k8s_types import UNDECODABLE, Decoder

MAX_PAGE_BYTES = 8 * 2**20
"""The maximum bytes of a page with several objects. If a page is larger, it is requested again with fewer objects."""

MAX_OBJECT_BYTES = 16 * 2**20
"""The most bytes that are read of one object. etcd stores objects up to 1.5 MiB (--max-request-bytes). Go writes each
``<``, ``>`` and ``&`` as six bytes of JSON (encoding/json, HTMLEscape). So an object may have over 9 MiB of JSON."""

FIRST_PAGE = 32
"""The number of objects in the first page of a LIST."""

GROWTH = 4
"""After a successful request, the number of objects in the next page grows at most by this factor. After a failed
request, the number is divided by this factor, and the same page is requested again."""

AIM_BYTES = 4 * 2**20
"""The number of objects in a page of a LIST is chosen so that the page has about this many bytes."""


class Page(NamedTuple):
    """One page of a LIST. ``resource_version``: the version of the whole LIST. ``items``: the undecoded objects."""

    resource_version: str
    items: list[msgspec.Raw]


class _ListMeta(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str
    continue_: str = msgspec.field(name="continue", default="")


class _List(msgspec.Struct, frozen=True):
    metadata: _ListMeta
    items: list[msgspec.Raw] | None = None


_LIST = Decoder(_List)


def read_page(body: bytes) -> tuple[Page, str]:
    """Return a pair: the page in ``body``, and the next page's continue token, or "". Raises one of ``UNDECODABLE``."""
    listed = _LIST.decode(body)
    return Page(listed.metadata.resource_version, listed.items or []), listed.metadata.continue_


class SkippedObject(NamedTuple):
    """An object that is too large to be read. The fields are empty if its first bytes do not contain its name."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name or "an object without a name"


_ITEMS = re.compile(rb',\s*"items"\s*:\s*\[')
# The API server writes an object's name and namespace before any long field. So the first bytes contain both.
_NAME = re.compile(
    rb'"metadata":\{"name":"([^"]{1,253})"(?:,"generateName":"[^"]{0,253}")?(?:,"namespace":"([^"]{1,63})")?'
)


def read_skipped(head: bytes) -> tuple[Page, str, SkippedObject]:
    """Read the first bytes of a page that has one object, which is too large.

    Return the page without the object, the continue token of the next page, and the name of the object.
    """
    found = _ITEMS.search(head)
    page, token = read_page((head[: found.end()] if found else head) + b"]}")
    return page, token, name_in(head[found.end() :] if found else b"")


def name_in(head: bytes) -> SkippedObject:
    found = _NAME.search(head)
    if found is None:
        return SkippedObject("", "")
    return SkippedObject((found[2] or b"").decode(), found[1].decode())


Fetch = Callable[[int, str, float, int], bytes]
"""A function that returns the bytes of a page of a LIST. It gets the maximum number of objects, the continue token, the
timeout in seconds, and the maximum number of bytes. Raises TooLarge for a larger page, or TimedOut."""

Skip = Callable[[SkippedObject], None]
"""A function that is called with each object that is too large to be read."""


@dataclass(eq=False)
class Pager:
    """Reads one LIST page by page. ``what`` names the LIST in errors.

    ``most``: the most objects of a page.
    ``timeout``: seconds for one page.
    ``seconds``: seconds for the whole LIST.
    """

    fetch: Fetch
    what: str
    _: KW_ONLY
    most: int
    timeout: float
    seconds: float
    skip: Skip | None = None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._objects = min(FIRST_PAGE, self.most)
        self._overdue = errors.ListOverdue(f"{self.what} took longer than {self.seconds:g} s")
        self._deadline = self.clock() + self.seconds

    def __iter__(self) -> Iterator[Page]:
        """Yield the pages of the LIST. Raises the errors of `Kube.list_pages`."""
        page, token = self._next("")
        yield page
        while token:
            page, token = self._next(token)
            yield page

    def _next(self, token: str) -> tuple[Page, str]:
        """Return a pair: the page at a continue token, and the next page's token, which is empty at the end."""
        while (left := self._deadline - self.clock()) > 0:
            try:
                return self._read(token, min(self.timeout, left))
            except errors.TooLarge as error:
                if self._objects == 1:
                    return self._skipped(error)
            except errors.TimedOut as error:
                if left <= self.timeout:
                    raise self._overdue from error
                # A page with more objects than the first page may be too large to arrive in time. So request fewer.
                if self._objects <= FIRST_PAGE:
                    raise
            self._objects = max(1, self._objects // GROWTH)
        raise self._overdue

    def _read(self, token: str, timeout: float) -> tuple[Page, str]:
        number = self._objects
        body = self.fetch(number, token, timeout, MAX_PAGE_BYTES if number > 1 else MAX_OBJECT_BYTES)
        try:
            page, following = read_page(body)
        except UNDECODABLE as error:
            raise errors.Unavailable(f"{self.what}: the answer is not a list: {error}") from error
        fitting = AIM_BYTES * len(page.items) // len(body) if page.items else number
        self._objects = max(1, min(fitting, number * GROWTH, self.most))
        return page, following

    def _skipped(self, error: errors.TooLarge) -> tuple[Page, str]:
        try:
            page, token, skipped = read_skipped(error.head)
        except UNDECODABLE:
            raise error from None
        if self.skip is None:
            raise errors.TooLarge(f"{self.what}: {skipped} has more than {MAX_OBJECT_BYTES} bytes", b"") from error
        self.skip(skipped)
        return page, token
