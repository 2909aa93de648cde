"""Tests that reviews of large pods, and of edits of the quota, are not decided in the event loop's thread."""

import asyncio
import functools
import gc
import itertools
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any
from unittest import mock

import msgspec
import pytest
import structlog

from examples.claims import claim, entry
from tests.builders import (
    LABELS,
    MODEL,
    Manifest,
    container,
    held_to,
    pod,
    pod_of_cores,
    policy_for,
    required,
    requirement,
    term,
    vcuda_pod,
)
from tests.integration.reviews import review_of
from tests.tables import cases
from tests.waiting import PATIENT
from vcuda import k8s_types
from vcuda.admission_review import MAX_PATCH_BYTES, MAX_REPAIRED, ReviewDeadline
from vcuda.errors import BadReview, Dropped, DropReason, Unavailable
from vcuda.placement.nodes import Nodes
from vcuda.quota.model import Limit, Mode, NamespaceQuota, Usage
from vcuda.requests.mig import MigSlices
from vcuda.requests.resources import CardModels, GpuResources, ProductRow
from vcuda.shallow import shallow
from webhook.admission import LARGE_REVIEW, MAX_REVIEW_STEPS, Gate, Service
from webhook.intake.large_reviews import PLACES
from webhook.ledger.charging import ChargeRequest, Decision
from webhook.ledger.ledgers import MemoryLedgers
from webhook.metrics import Metrics
from webhook.review.context import PolicySnapshot, PolicySource

LARGE = {"note": "x" * LARGE_REVIEW}
EDIT = {"kind": {"group": "", "version": "v1", "kind": "ConfigMap"}, "operation": "UPDATE"}


def in_a_loop(test: Callable[..., Coroutine[None, None, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**fixtures: object) -> None:
        asyncio.run(test(**fixtures))

    return run


class Ledgers(MemoryLedgers):
    """A test double of the ledgers. It records the thread of each call. Before each charge, it awaits ``until``."""

    def __init__(self, until: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self.threads: set[str] = set()
        self.arrived = 0
        self.until = until

    async def charge(self, request: ChargeRequest) -> Decision:
        self.threads.add(threading.current_thread().name)
        self.arrived += 1
        if self.until:
            await self.until()
        return await super().charge(request)

    async def usage(self, namespace: str, *others: Any) -> Mapping[str, Usage]:
        self.threads.add(threading.current_thread().name)
        return await super().usage(namespace, *others)


def service(ledgers: MemoryLedgers, cards: int = 4, policy: PolicySource | None = None) -> Service:
    usual = policy_for(NamespaceQuota({"M40": Limit(cards * 100)}))
    log = structlog.wrap_logger(structlog.ReturnLogger(), processors=[])
    return Service(policy or (lambda: usual), ledgers, Metrics(), Gate(), log)


def large(uid: str = "pod-uid") -> bytes:
    return body(pod_of_cores(100, uid=uid, annotations=LARGE, affinity=held_to("M40")))


def body(manifest: Manifest, **fields: Any) -> bytes:
    return json.dumps(review_of(manifest, **{"namespace": "team-a", "uid": "review", **fields})).encode()


async def allowed(webhook: Service, path: str, raw: bytes) -> bool:
    answer = json.loads(await asyncio.wait_for(webhook.answer(path, raw, ReviewDeadline.after(10)), PATIENT))
    return bool(answer["response"]["allowed"])


@pytest.mark.parametrize("path", ["/mutate", "/validate"])
@in_a_loop
async def test_a_large_pod_gets_the_same_answer_as_a_small_one(path: str) -> None:
    small = body(pod_of_cores(100, annotations={"note": "x"}, affinity=held_to("M40")))
    told = [await service(MemoryLedgers()).answer(path, raw, ReviewDeadline.after(10)) for raw in (small, large())]
    assert json.loads(told[0])["response"] == json.loads(told[1])["response"]


@pytest.mark.parametrize("path", ["/mutate", "/validate"])
@in_a_loop
async def test_a_small_pod_whose_decision_takes_long_is_decided_by_the_thread_with_the_same_answer(path: str) -> None:
    """The pod lists many products. The webhook compares each of them with many rows of `gpu_models`."""
    models = CardModels({f"M{number}": ProductRow((f"*-{number}",)) for number in range(100)})
    policy = policy_for(NamespaceQuota({"M40": Limit(400)}), nodes=Nodes(named=models))
    listed = term(requirement(MODEL, "In", *(f"x-{number}-40" for number in range(MAX_REVIEW_STEPS))))
    raw = body(pod_of_cores(100, uid="u", affinity=required(listed)))
    assert len(raw) < LARGE_REVIEW
    answers, decided_by = [], set[str]()
    for size in (len(raw), LARGE_REVIEW + 1):

        def current() -> PolicySnapshot:
            decided_by.add(threading.current_thread().name)
            return msgspec.structs.replace(policy, resources=GpuResources(models=models))

        webhook = service(MemoryLedgers(), policy=current)
        answers.append(json.loads(await webhook.answer(path, raw.ljust(size), ReviewDeadline.after(10), "team-a")))
        assert answers[-1]["response"]["allowed"]
    assert answers[0] == answers[1]
    assert decided_by == {threading.current_thread().name, "large-review_0"}


@in_a_loop
async def test_a_small_pod_with_many_mig_profiles_is_decided_by_the_thread_in_any_namespace() -> None:
    """The webhook compares each profile with the cards whose slices `gpu_models` states."""
    models = CardModels({"M40": ProductRow(mig=MigSlices(7, 8), memory=80 * 1024)})
    policy = msgspec.structs.replace(
        policy_for(NamespaceQuota({"M40": Limit(400)})), resources=GpuResources(models=models)
    )
    limits = {f"nvidia.com/mig-{n % 9 + 1}g.{n + 1000}gb": "1" for n in range(MAX_REVIEW_STEPS + 1)}
    for namespace, allows in (("team-a", False), ("unlimited", True)):
        decided_by: list[str] = []

        def current() -> PolicySnapshot:
            decided_by.append(threading.current_thread().name)  # noqa: B023  # it is called in this round only
            return policy

        raw = body(vcuda_pod(limits), namespace=namespace)
        assert len(raw) < LARGE_REVIEW
        assert await allowed(service(MemoryLedgers(), policy=current), "/mutate", raw) == allows
        assert decided_by[-1] == "large-review_0"


MANY = term(requirement("a", "Exists"))
MANY_VALUES = {f"node-{n}": {MODEL: f"GRID-{n:050}"} for n in range(100)}
"""Nodes of one model with a hundred long values of the model label."""


@cases(
    "manifest, mode",
    a_long_node_name=(vcuda_pod(nodeName="n" * 2**15, affinity=required(*[MANY] * 500)), Mode.ENFORCE),
    with_a_quota_that_only_warns=(vcuda_pod(nodeName="n" * 2**15, affinity=required(*[MANY] * 500)), Mode.WARN),
    many_label_values_of_the_model=(vcuda_pod(affinity=required(*[MANY] * 5000)), Mode.ENFORCE),
    many_pools=(
        pod(container(), resourceClaims=[{"name": "c", "resourceClaimName": "c"}], affinity=required(*[MANY] * 5000)),
        Mode.ENFORCE,
    ),
)
@in_a_loop
async def test_a_pod_whose_patch_is_too_large_is_rejected_with_the_bound(manifest: Manifest, mode: Mode) -> None:
    """/mutate adds the same requirements, which may be long, to each term of the pod's node affinity."""
    named = CardModels({"M40": ProductRow(("GRID-*",))})
    pools = tuple(f"pool-{n:050}" for n in range(100)) if "resourceClaims" in manifest["spec"] else ()
    quota = NamespaceQuota({"M40": Limit(400)}, pools=pools, mode=mode)
    policy = policy_for(quota, nodes=Nodes.of(MANY_VALUES, LABELS, named=named))
    policy = msgspec.structs.replace(policy, resources=GpuResources(models=named), claims=policy.claim_policy)
    webhook = service(MemoryLedgers(), policy=lambda: policy)
    answer = await webhook.answer("/mutate", body(manifest), ReviewDeadline.after(60), "team-a")
    response = json.loads(answer)["response"]
    status = response["status"]
    assert (response["uid"], status["code"]) == ("review", HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
    assert f"have more than {MAX_PATCH_BYTES} bytes (8 MiB)" in status["message"]
    assert status["message"].endswith("Use fewer terms")
    assert "patch" not in response


def too_deep(size: int) -> bytes:
    """Return the review of a claim whose parameters are nested deeper than a decoder reads."""
    parameters = b"[" * 3000 + b"]" * 3000
    manifest = {**claim(entry()), "metadata": {"name": "c", "annotations": {"deep": "DEEP"}}}
    return body(manifest).replace(b'"DEEP"', parameters).ljust(size)


@in_a_loop
async def test_a_small_review_that_is_nested_too_deep_is_repaired_by_the_thread() -> None:
    threads = list[str]()

    def repaired(text: bytes) -> bytes:
        threads.append(threading.current_thread().name)
        return shallow(text)

    with mock.patch.object(k8s_types, "shallow", repaired):
        for size in (0, MAX_REPAIRED):
            await service(MemoryLedgers()).answer("/mutate", too_deep(size), ReviewDeadline.after(10), "team-a")
    assert threads == ["large-review_0"] * 2


@pytest.mark.parametrize("path", ["/mutate", "/validate"])
@in_a_loop
async def test_a_large_review_that_is_nested_too_deep_is_rejected_and_not_repaired(path: str) -> None:
    raw = too_deep(MAX_REPAIRED + 1)
    with mock.patch.object(k8s_types, "shallow") as repaired:
        response = json.loads(await service(MemoryLedgers()).answer(path, raw, ReviewDeadline.after(10), "team-a"))
    status = response["response"]["status"]
    assert (response["response"]["uid"], status["code"]) == ("review", HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
    assert f"more than {MAX_REPAIRED} bytes" in status["message"]
    repaired.assert_not_called()


@in_a_loop
async def test_only_the_event_loop_touches_the_ledgers() -> None:
    ledgers = Ledgers()
    webhook = service(ledgers)
    assert await allowed(webhook, "/mutate", body(vcuda_pod(annotations=LARGE)))
    assert await allowed(webhook, "/validate", large())
    document = {"data": {"gpu_quota": "team-a: {quota: {M40: 9}}"}, "metadata": {"name": "gpuquota"}}
    edit = {**EDIT, "namespace": "kube-system", "name": "gpuquota"}
    assert await allowed(webhook, "/quota", body(document, **edit))
    assert ledgers.threads == {threading.current_thread().name}


@in_a_loop
async def test_many_large_pods_at_once_fill_the_quota_exactly() -> None:
    ledgers = Ledgers()
    webhook = service(ledgers)
    admitted = await asyncio.gather(*(allowed(webhook, "/validate", large(f"uid-{n}")) for n in range(16)))
    assert sorted(admitted) == [False] * 12 + [True] * 4


@in_a_loop
async def test_large_pods_that_wait_for_their_ledger_delay_no_other() -> None:
    """All large reviews that may run at the same time can wait for their ledgers together."""
    together = asyncio.Event()

    async def until_all_are_there() -> None:
        if ledgers.arrived == PLACES.turns:
            together.set()
        await together.wait()

    ledgers = Ledgers(until_all_are_there)
    webhook = service(ledgers, cards=100)
    reviews = (allowed(webhook, "/validate", large(f"uid-{number}")) for number in range(PLACES.turns))
    assert all(await asyncio.gather(*reviews))


@in_a_loop
async def test_the_event_loop_serves_others_while_a_large_pod_is_decided() -> None:
    """A second large review waits while the thread for large reviews is busy."""
    webhook = service(MemoryLedgers())
    async with computing(webhook, ReviewDeadline.after(PATIENT)):
        behind = asyncio.create_task(allowed(webhook, "/validate", large()))
        assert await allowed(webhook, "/validate", body(pod_of_cores(100, uid="small", affinity=held_to("M40"))))
        assert not behind.done()
    assert await behind


@asynccontextmanager
async def computing(webhook: Service, deadline: ReviewDeadline) -> AsyncIterator["asyncio.Task[None]"]:
    held, free = threading.Event(), threading.Event()

    async def compute(_ledgers: object) -> None:
        held.set()
        assert free.wait(PATIENT)
        deadline.check()

    task = asyncio.create_task(webhook.large_reviews.run(compute, MemoryLedgers(), "team-b", deadline))
    assert await asyncio.to_thread(held.wait, PATIENT)
    try:
        yield task
    finally:
        free.set()
        await asyncio.wait([task])


@in_a_loop
async def test_a_large_pod_whose_caller_disconnects_is_no_longer_computed() -> None:
    """A thread cannot be interrupted. So it checks regularly whether its caller has disconnected."""
    logged: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
    async with computing(service(MemoryLedgers()), deadline := ReviewDeadline.after(PATIENT)) as task:
        task.cancel()
    assert task.cancelled()
    gc.collect()
    assert logged == []
    with pytest.raises(Dropped) as told:
        deadline.check()
    assert told.value.reason is DropReason.DISCONNECTED


@in_a_loop
async def test_a_large_pod_whose_deadline_passes_while_it_waits_for_its_turn_is_dropped() -> None:
    webhook = service(MemoryLedgers())
    async with computing(webhook, ReviewDeadline.after(PATIENT)):
        with pytest.raises(Dropped) as told:
            await webhook.answer("/validate", large(), ReviewDeadline.after(0.05))
    assert told.value.reason is DropReason.LATE


@pytest.mark.parametrize("path", ["/mutate", "/validate"])
def test_a_large_pod_whose_deadline_passes_while_it_is_computed_is_dropped(path: str) -> None:
    """The test runs the review 40 times. Each time, the deadline passes at a later one of its checks."""

    async def end_of(checks: int) -> DropReason | None:
        ticks = itertools.count(-checks)
        late = ReviewDeadline(0, lambda: next(ticks))
        ledgers = Ledgers()
        try:
            await service(ledgers)._answer(path, large(), 0, late, ledgers)  # a real review runs this call in a thread
        except Dropped as dropped:
            return None if ledgers.arrived else dropped.reason
        return None

    ends = [asyncio.run(end_of(checks)) for checks in range(40)]
    checks = ends.index(None)
    assert ends == [DropReason.LATE] * checks + [None] * (40 - checks)
    assert checks >= 5


@in_a_loop
async def test_a_large_pod_whose_charge_may_be_written_is_decided_even_after_its_deadline() -> None:
    """The charge might be written, and would use quota until it expires, although the review was dropped."""
    asked = asyncio.Event()

    async def outlast_the_deadline() -> None:
        asked.set()
        await asyncio.sleep(deadline.left + 0.01)

    deadline = ReviewDeadline.after(0.5)
    answer = json.loads(await service(Ledgers(outlast_the_deadline)).answer("/validate", large(), deadline))
    assert asked.is_set()
    assert answer["response"]["allowed"]


@in_a_loop
async def test_a_large_pod_that_only_reads_the_ledger_is_dropped_at_its_deadline() -> None:
    webhook = service(Ledgers(asyncio.Event().wait))
    dry_run = body(pod_of_cores(100, annotations=LARGE, affinity=held_to("M40")), dryRun=True)
    with pytest.raises(Dropped) as told:
        await webhook.answer("/validate", dry_run, ReviewDeadline.after(0.5))
    assert told.value.reason is DropReason.LATE


@in_a_loop
async def test_a_caller_of_a_large_pod_that_disconnects_does_not_affect_others() -> None:
    webhook = service(MemoryLedgers())
    gone = asyncio.create_task(webhook.answer("/validate", large("gone"), ReviewDeadline.after(10)))
    await asyncio.sleep(0)
    gone.cancel()
    assert all([await allowed(webhook, "/validate", large(f"uid-{n}")) for n in range(3)])


@pytest.mark.parametrize("error", [Unavailable("no answer"), RuntimeError("a fault of ours")], ids=repr)
@in_a_loop
async def test_an_error_reaches_the_caller_and_the_next_review_is_decided(error: Exception) -> None:
    async def fail() -> None:
        raise error

    failing, webhook = service(Ledgers(fail)), service(MemoryLedgers())
    for _ in range(2 * PLACES.turns):
        with pytest.raises(type(error)):
            await failing.answer("/validate", large(), ReviewDeadline.after(10))
    with pytest.raises(BadReview):
        await webhook.answer("/validate", b"x" * 2 * LARGE_REVIEW, ReviewDeadline.after(10))
    assert await allowed(webhook, "/validate", large())
