"""Measures for how long the admission reviews of the largest pods block the webhook's event loop.

While the webhook decides about a large pod, small pods are reviewed, one every millisecond. For each kind of large pod,
the first table has the size of its review, the time until its answer, and the time until the answers to the small
reviews. The column "CPU ms a MiB" is the CPU time of one large review per MiB, without small reviews. The last column
is the maximum CPU time during a small review. Other programs on the machine do not affect this time. The second table
has the CPU time of one review by its size. It shows how large a review may be before a thread must decide it instead of
the event loop (`LARGE_REVIEW`).
"""

from __future__ import annotations

import asyncio
import copy
import gc
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import structlog

from tests.builders import container, pod, required, requirement, term
from vcuda.admission_review import ReviewDeadline
from vcuda.cli import aligned
from vcuda.placement.affinity import NodeLabels
from vcuda.placement.nodes import Nodes
from vcuda.quota.model import Limit, NamespaceQuota, Quota
from webhook import admission
from webhook.ledger.ledgers import MemoryLedgers
from webhook.metrics import Metrics
from webhook.review.context import PolicySnapshot

MAX_BODY = 3 * 2**20
ROUNDS = 5
CARD = {"tencent.com/vcuda-core": 100}
HOST, RANK = "kubernetes.io/hostname", "example.com/rank"
SMALL = pod(container(CARD), metadata={"namespace": "team-a", "uid": "small"})


class Measured(NamedTuple):
    """The times, in seconds, of large reviews, and of small reviews until all large reviews are answered.

    ``large``: elapsed time until all large reviews were answered.
    ``small``: elapsed time of each small review.
    ``cpu``: CPU time of the process during each small review.
    """

    large: float
    small: list[float]
    cpu: list[float]


def service() -> admission.Service:
    """Return the webhook's service without a cluster, and with a quota that is never used up."""
    labels = NodeLabels()
    by_name = {f"node-{n}": {labels.model: f"M{n % 20}", HOST: f"node-{n}", RANK: str(n)} for n in range(1000)}
    quota = NamespaceQuota({f"M{n}": Limit(10**9) for n in range(20)})
    policy = PolicySnapshot(Quota({"team-a": quota}, version="1"), Nodes.of(by_name, labels))
    log = structlog.wrap_logger(structlog.ReturnLogger())
    return admission.Service(lambda: policy, MemoryLedgers(), Metrics(), admission.Gate(), log)


def large_pods() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield pods whose admission reviews have the maximum size. In each pod, a different field is large.

    The API server rejects more than 256 KiB of annotations, but only after it has called /mutate.
    """
    most = MAX_BODY - 20_000
    yield "one annotation", _with("metadata", "annotations", {"note": "x" * most})
    yield "annotations", _with("metadata", "annotations", {f"a.example.com/{n}": "x" * 20 for n in range(most // 46)})
    names = ({**container(CARD), "name": f"c{n}"} for n in range(most // 110))
    yield "containers that request cards", _with("spec", "containers", list(names))
    plain = [container(CARD), *({"name": f"c{n}", "image": "i"} for n in range(most // 30))]
    yield "containers that request no cards", _with("spec", "containers", plain)
    env = [{"name": f"E{n}", "value": "x"} for n in range(most // 30)]
    yield "environment", _with("spec", "containers", [{**container(CARD), "env": env}])
    volumes = [{"name": f"v{n}", "emptyDir": {}} for n in range(most // 35)]
    yield "volumes", _with("spec", "volumes", volumes)
    yield from _node_selections(most)


def _node_selections(most: int) -> Iterator[tuple[str, dict[str, Any]]]:
    # A tenant could create pods with these node selectors and affinities to make the webhook slow. Older versions of
    # the webhook needed seconds or minutes for each of these pods.
    above = [requirement("k", "Gt", str(n)) for n in range(most // 50)]
    yield "490 Gt and one Lt", _with("spec", "affinity", required(term(*above[:490], requirement("k", "Lt", "0"))))
    yield "Gt and one Lt", _with("spec", "affinity", required(term(*above, requirement("k", "Lt", "0"))))
    selecting = _with("spec", "nodeSelector", {f"k{n}": "v" for n in range(40_000)})
    selecting["spec"]["affinity"] = required(*(term(requirement(f"k{n}", "Exists")) for n in range(50)))
    yield "40,000 nodeSelector keys x 50 terms", selecting
    yield "terms", _with("spec", "affinity", required(*[term(requirement("a", "DoesNotExist"))] * (most // 62)))
    ranks = (term(requirement(RANK, "Gt", str(n))) for n in range(most // 90))
    yield "terms with Gt on a node's label", _with("spec", "affinity", required(*ranks))
    models = [term(requirement(NodeLabels().model, "Gt", "1"))] * (most // 92)
    yield "terms with Gt on the model", _with("spec", "affinity", required(*models))
    keys = (requirement(f"k{n}", "NotIn", "a") for n in range(most // 54))
    yield "NotIn on many keys", _with("spec", "affinity", required(term(*keys)))
    hosts = term(requirement(HOST, "In", *(f"node-{n}" for n in range(1000))))
    yield "lists of all nodes' names", _with("spec", "affinity", required(*[hosts] * (most // 12_000)))
    names = (term(fields=[requirement("metadata.name", "In", f"node-{n % 1000}")]) for n in range(most // 84))
    yield "matchFields", _with("spec", "affinity", required(*names))


def _with(part: str, field: str, value: object) -> dict[str, Any]:
    large = copy.deepcopy(SMALL)
    large[part][field] = value
    return large


def review(manifest: dict[str, Any]) -> bytes:
    """Return an AdmissionReview of a pod that is created, as JSON."""
    kind = {"group": "", "version": "v1", "kind": "Pod"}
    request = {"uid": "r", "kind": kind, "namespace": "team-a", "operation": "CREATE", "object": manifest}
    return msgspec.json.encode({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request})


async def measure(webhook: admission.Service, path: str, large: bytes, at_once: int) -> Measured:
    """Review ``at_once`` large pods at the same time. Until all are decided, also review small pods, one at a time."""
    small, took, cpu = review(SMALL), [], []
    started = time.perf_counter()
    work = [asyncio.create_task(webhook.answer(path, large, ReviewDeadline.after(10))) for _ in range(at_once)]
    done = asyncio.gather(*work)
    while not done.done():
        before, used = time.perf_counter(), time.process_time()
        await asyncio.sleep(0.001)  # This sleep is longer while the event loop is blocked.
        await webhook.answer("/mutate", small, ReviewDeadline.after(10))
        took.append(time.perf_counter() - before)
        cpu.append(time.process_time() - used)
    await done
    return Measured(time.perf_counter() - started, took, cpu)


def main() -> None:
    heads = (
        "the large pod is full of",
        "path",
        "at once",
        "KiB",
        "its ms",
        "CPU ms a MiB",
        "small p50 ms",
        "max ms",
        "CPU ms",
    )
    rows: list[tuple[str, ...]] = [heads]
    webhook = service()
    # The benchmark keeps only encoded reviews in memory. The webhook's server keeps no manifests either.
    bodies = {name: review(manifest) for name, manifest in large_pods()}
    gc.freeze()  # The webhook's server also calls `gc.freeze` when it starts.
    for name, body in bodies.items():
        for path, at_once in (("/mutate", 1), ("/validate", 1), ("/mutate", 8)):
            rounds = [asyncio.run(measure(webhook, path, body, at_once)) for _ in range(ROUNDS)]
            small = [took for each in rounds for took in each.small]
            cpu = max(used for each in rounds for used in each.cpu)
            its, rate = statistics.median(each.large for each in rounds), _cpu(webhook, path, body) * 2**20 / len(body)
            figures = (its, rate, statistics.median(small), max(small), cpu)
            rows.append((name, path, str(at_once), str(len(body) // 1024), *(f"{s * 1000:.1f}" for s in figures)))
    print("\n".join(aligned(rows)))
    print()
    print("\n".join(aligned([("KiB of annotations", "CPU ms"), *_by_size(webhook)])))


def _cpu(webhook: admission.Service, path: str, body: bytes) -> float:
    # The result is the minimum of several runs without other reviews, because other programs can make a run slower.
    took = []
    for _ in range(ROUNDS):
        started = time.process_time()
        asyncio.run(webhook.answer(path, body, ReviewDeadline.after(10)))
        took.append(time.process_time() - started)
    return min(took)


def _by_size(webhook: admission.Service) -> Iterator[tuple[str, str]]:
    for kib in (4, 16, 32, 64):
        notes = {f"a.example.com/{n}": "x" * 20 for n in range(kib * 1024 // 46)}
        body, took = review(_with("metadata", "annotations", notes)), []
        for _ in range(20):
            started = time.thread_time()
            asyncio.run(webhook.answer("/mutate", body, ReviewDeadline.after(10)))
            took.append(time.thread_time() - started)
        yield str(len(body) // 1024), f"{min(took) * 1000:.1f}"


if __name__ == "__main__":
    main()
