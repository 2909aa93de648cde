"""The data of the usage page: one JSON document, which is made at most once a second while browsers request it."""

import datetime
import hashlib
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from controller.certificates import ServedCertificate
from controller.seen_events import ReportedObject
from vcuda.ledger.report import NamespaceUse

MIN_INTERVAL_SECONDS = 1.0
"""The minimum number of seconds between two documents."""

MAX_HOLDERS = 5000
"""The most pods and claims of one namespace that are returned. The record of a pod or claim has less than a KiB."""


class ModelCards(msgspec.Struct, frozen=True):
    """The cards of one GPU model in the whole cluster.

    ``cards``: the number of cards on all nodes; None if a node's number is unknown.
    ``used``: the charged cards. Pods and claims that are not placed yet count only if their quota is enforced.
    ``limits``: the sum of all namespaces' limits, each at most the namespace's `total`.
    """

    model: str
    cards: float | None
    used: float
    limits: float


class Holder(msgspec.Struct, frozen=True):
    """A pod or claim that is charged for cards.

    ``model``: the GPU model; None if no model is known for the pod or claim.
    ``memory``: the charge in MiB.
    ``node``: the name of the node; empty until the pod is bound or the claim is allocated.
    ``created``: the time of creation (RFC 3339).
    """

    kind: str
    name: str
    model: str | None
    cards: float
    memory: int
    node: str
    created: str


class Holders(msgspec.Struct, frozen=True):
    """The pods and claims of a namespace, the most cards first. ``left_out``: how many pods and claims are left out."""

    items: Sequence[Holder]
    left_out: int = 0

    @classmethod
    def of(cls, holders: Sequence[Holder]) -> "Holders":
        ordered = sorted(holders, key=lambda each: (-each.cards, each.name))
        return cls(ordered[:MAX_HOLDERS], len(ordered[MAX_HOLDERS:]))


class Document(msgspec.Struct, frozen=True):
    """The data of the usage page, except the pods and claims of each namespace.

    ``namespaces``: the usage of each limited namespace, as `kubectl gpuquota` prints it, without its pods.
    ``rejections``, ``removals``, ``certificates``: None until the controller knows them.
    ``beyond``: the stored pods and claims that the quota would not admit now, each with the time of its first finding.
    ``docs``, ``grafana``: the URLs to which the page links; empty if there is none.
    """

    namespaces: Sequence[NamespaceUse] = ()
    models: Sequence[ModelCards] = ()
    rejections: Sequence[ReportedObject] | None = ()
    removals: Sequence[ReportedObject] | None = None
    certificates: Sequence[ServedCertificate] | None = None
    beyond: Sequence[ReportedObject] = ()
    docs: str = ""
    grafana: str = ""


class Body(msgspec.Struct, frozen=True):
    """JSON with the time when it was made. ``tag``: an ETag, which depends on the data and not on the time."""

    text: bytes
    tag: str

    @classmethod
    def of(cls, data: Document | Holders, now: datetime.datetime) -> "Body":
        text = msgspec.json.encode(data)
        updated = f"{now.astimezone(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}"
        return cls(b'{"updated":"%s",' % updated.encode() + text[1:], hashlib.sha256(text).hexdigest()[:16])


class Documents:
    """Makes the document when it is requested, unless the last document is less than a second old.

    ``read``: returns a new document. ``holders``: returns the pods and claims of a namespace.
    """

    def __init__(
        self,
        read: Callable[[], Document],
        holders: Callable[[str], Sequence[Holder]],
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
    ) -> None:
        self.holders = holders
        self.now = now
        self._read = read
        self._clock = clock
        self._lock = threading.Lock()
        self._last: tuple[float, Document, Body] | None = None

    def current(self) -> tuple[Document, Body]:
        """Return a document that is at most `MIN_INTERVAL_SECONDS` old, and its JSON."""
        with self._lock:
            if self._last is None or self._clock() >= self._last[0] + MIN_INTERVAL_SECONDS:
                document = self._read()
                self._last = self._clock(), document, Body.of(document, self.now())
            return self._last[1:]
