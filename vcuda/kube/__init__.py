"""The one place that talks to the API server: a client of raw bytes, reflectors that follow it, and the ledgers in it.

The official ``kubernetes`` client brings configuration, authentication and transport. Its typed models are not used:
they cost seventy times the decoding, and they drop the fields that they do not know.
"""

from vcuda.kube.backoff import Backoff
from vcuda.kube.cards_watch import CardsWatch
from vcuda.kube.client import JSON_PATCH, MERGE_PATCH, Heard, Kube, Page, Params
from vcuda.kube.events import Event, Subject, post_event
from vcuda.kube.ledger_store import NOT_TRACKED, LedgerStore, NamedLedger, Stored, ledger_name
from vcuda.kube.node_watch import NodeWatch
from vcuda.kube.paths import segment
from vcuda.kube.quota_watch import QuotaPlace, QuotaWatch
from vcuda.kube.reflector import OnEvent, Reflector
from vcuda.kube.stream import Stream
from vcuda.kube.version import VersionCheck, end_process
from vcuda.kube.view import Counts, Key

__all__ = [
    "JSON_PATCH",
    "MERGE_PATCH",
    "NOT_TRACKED",
    "Backoff",
    "CardsWatch",
    "Counts",
    "Event",
    "Heard",
    "Key",
    "Kube",
    "LedgerStore",
    "NamedLedger",
    "NodeWatch",
    "OnEvent",
    "Page",
    "Params",
    "QuotaPlace",
    "QuotaWatch",
    "Reflector",
    "Stored",
    "Stream",
    "Subject",
    "VersionCheck",
    "end_process",
    "ledger_name",
    "post_event",
    "segment",
]
