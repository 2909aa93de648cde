"""The path of one pod create through our modules: `/mutate`, then `/validate`, as the API server calls them.

Run `python -m tools.create_path` for each module with the functions of it that were called; `--check` fails where
there are more modules than `MAX_MODULES`. What Python runs inside msgspec and the other libraries is not counted.
"""

from __future__ import annotations

import asyncio
import base64
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import jsonpatch
import msgspec
import structlog

from vcuda.placement.affinity import NodeLabels
from vcuda.placement.placement import Nodes
from vcuda.quota.model import Limit, NamespaceQuota, Quota
from webhook.admission import Gate, Service
from webhook.ledger.ledgers import MemoryLedgers, ReviewDeadline
from webhook.metrics import Metrics
from webhook.review.context import PolicySnapshot

ROOT = Path(__file__).parent.parent
PACKAGES = ("webhook", "vcuda", "controller", "certs")
MAX_MODULES = 17
API_SERVER_TIMEOUT = 10.0

POD: dict[str, Any] = {
    "metadata": {"generateName": "train-", "namespace": "team-a"},
    "spec": {"containers": [{"name": "main", "resources": {"limits": {"tencent.com/vcuda-core": "100"}}}]},
}

Json = dict[str, Any]


class Tracer:
    """Collects the functions that are called while it is on, by module."""

    def __init__(self) -> None:
        self.functions: dict[str, set[CodeType]] = defaultdict(set)

    def during(self, work: Callable[[], None]) -> None:
        """Do the work, and note what it calls in this thread."""
        sys.setprofile(self._note)
        try:
            work()
        finally:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _arg: object) -> None:
        # A comprehension or a lambda is part of the function that it stands in.
        if event != "call" or frame.f_code.co_name.startswith("<"):
            return
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES:
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            self.functions[module].add(frame.f_code)


def service() -> Service:
    """Return a webhook without a cluster: four M40 for one namespace, and a node that has them."""
    labels = NodeLabels()
    nodes = Nodes.of({"node-1": {labels.model: "M40"}}, labels)
    policy = PolicySnapshot(Quota({"team-a": NamespaceQuota({"M40": Limit(400)})}, version="1"), nodes)
    return Service(lambda: policy, MemoryLedgers(), Metrics(), Gate(), structlog.get_logger())


def create(webhook: Service) -> None:
    """Create one pod: ask both webhooks, as the API server does."""
    proposed = _asked(webhook, "/mutate", POD)
    patched: Json = jsonpatch.apply_patch(POD, base64.b64decode(proposed["patch"]))
    stored = {**patched, "metadata": {**patched["metadata"], "name": "train-1", "uid": "uid-1"}}
    verdict = _asked(webhook, "/validate", stored)
    if not verdict["allowed"]:
        raise SystemExit(f"the pod was refused: {verdict}")


def _asked(webhook: Service, path: str, pod: Json) -> Json:
    kind = {"group": "", "version": "v1", "kind": "Pod"}
    request = {"uid": "review-1", "kind": kind, "namespace": "team-a", "operation": "CREATE", "object": pod}
    review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    answer = asyncio.run(webhook.answer(path, msgspec.json.encode(review), ReviewDeadline.after(API_SERVER_TIMEOUT)))
    response: Json = msgspec.json.decode(answer)["response"]
    return response


def main() -> None:
    """Print the modules; with ``--check``, exit with 1 where there are too many."""
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    tracer, webhook = Tracer(), service()
    tracer.during(lambda: create(webhook))
    for module, codes in sorted(tracer.functions.items()):
        names = ", ".join(sorted(code.co_qualname for code in codes))
        print(f"{len(codes):4d}  {module}: {names}")
    total = sum(map(len, tracer.functions.values()))
    print(f"{len(tracer.functions)} modules (at most {MAX_MODULES}), {total} functions")
    if "--check" in sys.argv[1:] and len(tracer.functions) > MAX_MODULES:
        sys.exit(1)


if __name__ == "__main__":
    main()
