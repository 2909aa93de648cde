"""Counts the function calls by which the webhook's event loop decides a review, in a cluster of 100 GPU models.

Calls are counted instead of time, so that the count is the same on every machine. A count of calls does not show the
work inside one call of C code. Three examples are the decoding of JSON, a regular expression, and the encoding of a
patch. The decoding is linear in the size of the review. For a regular expression, its alternatives are counted. For the
encoding, the bytes are counted.
"""

import asyncio
import re
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import msgspec
import structlog

from examples.claims import CLASSES, HAMI, NVIDIA, claim, claim_policy, entry, slice_of
from tests.builders import LABELS, Manifest, vcuda_pod
from vcuda import admission_review
from vcuda.admission_review import AdmissionResponse, ReviewDeadline
from vcuda.placement.nodes import Nodes
from vcuda.placement.registers import Card
from vcuda.quota.model import Limit, NamespaceQuota, Quota
from vcuda.requests.mig import MigSlices
from vcuda.requests.resources import CardModels, GpuResources, ProductRow
from webhook.admission import Gate, Service
from webhook.ledger.ledgers import MemoryLedgers
from webhook.metrics import Metrics
from webhook.review.context import PolicySnapshot

MODELS = 100
"""The GPU models of the cluster, of the quota, and of ``gpu_models``."""

ALTERNATIVES_OF_A_CALL = 10
"""The number of alternatives of a regular expression, each a group, whose comparison takes as long as a call."""

BYTES_OF_A_CALL = 100
"""The number of bytes of a patch whose encoding takes as long as a call."""

MIXED = 200
"""The nodes of the first GPU model that HAMi serves. One node of the model has no register."""

_OWN = tuple(f"{Path(__file__).parents[1] / package}/" for package in ("webhook", "vcuda"))
_ENCODE = admission_review._encode_patch.__code__
_PROFILES = tuple(f"{slices}g.{memory}gb" for slices in (1, 2, 3, 4, 7) for memory in (5, 10, 20, 24, 40, 80))


def _device(model: int, kind: str, name: str, **fields: Any) -> Manifest:
    texts = {"type": kind, "productName": f"NVIDIA M{model} 80GB", **({"profile": name} if kind == "mig" else {})}
    attributes = {key: {"string": text} for key, text in texts.items()}
    return {"name": f"d-{name.replace('.', '-')}", "attributes": attributes, **fields}


def _slices(model: int) -> list[Any]:
    amounts = {"cores": {"value": "100"}, "memory": {"value": f"{80 + model}Gi"}}
    mig = [_device(model, "mig", profile) for profile in _PROFILES]
    sharable = _device(model, "hami-gpu", "whole", capacity=amounts, allowMultipleAllocations=True)
    return [
        slice_of(NVIDIA, f"node-{model}", _device(model, "gpu", "whole"), *mig),
        slice_of(HAMI, f"node-{model}", sharable),
    ]


def policy(models: int = MODELS) -> PolicySnapshot:
    """Return a policy in which every count that the administrator sets is large: models, products and MIG profiles."""
    names = [f"M{number}" for number in range(models)]
    rows = {
        name: ProductRow(
            (f"NVIDIA-{name}-*GB", f"*-{name}-PCIE"), 81920 + n, MigSlices(7, 8) if n % 5 == 0 else None, n % 100 + 1
        )
        for n, name in enumerate(names)
    }
    known = GpuResources(models=CardModels(rows))
    labels = {f"node-{n}": {LABELS.model: name, "kubernetes.io/hostname": f"node-{n}"} for n, name in enumerate(names)}
    cards = {f"node-{n}": {"hami": (Card(f"u{n}", f"NVIDIA-{name}-80GB"),)} for n, name in enumerate(names)}
    for n in range(MIXED + 1):
        name = f"ip-10-0-0-{n}.eu-central-1.compute.internal"
        labels[name] = {LABELS.model: names[0], "kubernetes.io/hostname": name}
        cards |= {name: cards["node-0"]} if n else {}
    nodes = Nodes.of(labels, LABELS, cards, known.models)
    quota = Quota({"team-a": NamespaceQuota({name: Limit(10**6) for name in names})}, version="1")
    slices = [each for number in range(models) for each in _slices(number)]
    claims = claim_policy(slices, classes=CLASSES, quota=quota, resources=known, nodes=nodes)
    return PolicySnapshot(quota, nodes, resources=known, claims=claims)


class Cost(NamedTuple):
    """The function calls of this project's code on the event loop, and the answer to the review."""

    calls: int
    functions: Counter[str]
    answer: AdmissionResponse


def review_of(manifest: Manifest, **fields: object) -> bytes:
    group, _, version = manifest["apiVersion"].rpartition("/")
    kind = {"group": group, "version": version, "kind": manifest["kind"]}
    request = {"uid": "r", "kind": kind, "namespace": "team-a", "operation": "CREATE", "object": manifest, **fields}
    return msgspec.json.encode({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request})


class CountedWebhook:
    """Answers reviews as the event loop does, and counts the calls of functions in the loop's thread."""

    def __init__(self, snapshot: PolicySnapshot) -> None:
        log = structlog.wrap_logger(structlog.ReturnLogger())
        self._service = Service(lambda: snapshot, MemoryLedgers(), Metrics(), Gate(), log)
        # The first reviews after a change of the quota, the nodes or the devices prepare what all reviews use.
        for first in (vcuda_pod(), claim(*map(entry, CLASSES))):
            self.cost("/mutate", review_of(first))

    def cost(self, path: str, body: bytes) -> Cost:
        functions: Counter[str] = Counter()
        thread = threading.get_ident()

        def count(frame: FrameType, event: str, called: Any) -> None:
            if not frame.f_code.co_filename.startswith(_OWN) or threading.get_ident() != thread:
                return
            if event == "return" and frame.f_code is _ENCODE and called is not None:
                functions["bytes of the patch"] += len(bytes(called)) // BYTES_OF_A_CALL
            elif event == "call":
                functions[frame.f_code.co_qualname] += 1
            elif event == "c_call" and isinstance(pattern := getattr(called, "__self__", None), re.Pattern):
                functions[called.__qualname__] += pattern.groups // ALTERNATIVES_OF_A_CALL

        async def answer() -> bytes:
            deadline = ReviewDeadline.after(60)
            sys.setprofile(count)
            try:
                return await self._service.answer(path, body, deadline, "team-a")
            finally:
                sys.setprofile(None)

        reply = msgspec.json.decode(asyncio.run(answer()))["response"]
        return Cost(functions.total(), functions, reply)
