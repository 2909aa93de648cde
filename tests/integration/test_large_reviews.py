"""Large pods, and edits of the quota, are decided in threads: as any other, and while the event loop serves others."""

import asyncio
import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import structlog

from tests.builders import Manifest, held_to, pod_of_cores, policy_for, vcuda_pod
from tests.integration.reviews import review_of
from tests.waiting import PATIENT
from vcuda.errors import BadReview, Unavailable
from vcuda.quota.model import Limit, NamespaceQuota, Usage
from webhook import admission
from webhook.admission import LARGE_REVIEW, LARGE_REVIEW_THREADS, Gate, Service
from webhook.ledgers import ChargeRequest, Decision, MemoryLedgers
from webhook.metrics import Metrics

LARGE = {"note": "x" * LARGE_REVIEW}
EDIT = {"kind": {"group": "", "version": "v1", "kind": "ConfigMap"}, "operation": "UPDATE"}


class Ledgers(MemoryLedgers):
    """Tells in which thread they are asked. ``until`` is awaited before a charge is decided."""

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

    async def usage(self, namespace: str) -> Mapping[str, Usage]:
        self.threads.add(threading.current_thread().name)
        return await super().usage(namespace)


def service(ledgers: MemoryLedgers, cards: int = 4) -> Service:
    policy = policy_for(NamespaceQuota({"M40": Limit(cards * 100)}))
    log = structlog.wrap_logger(structlog.ReturnLogger(), processors=[])
    return Service(lambda: policy, ledgers, Metrics(), Gate(), log)


def large(uid: str = "pod-uid") -> bytes:
    return body(pod_of_cores(100, uid=uid, annotations=LARGE, affinity=held_to("M40")))


def body(manifest: Manifest, **fields: Any) -> bytes:
    return json.dumps(review_of(manifest, **{"namespace": "team-a", "uid": "review", **fields})).encode()


async def allowed(webhook: Service, path: str, raw: bytes) -> bool:
    answer = json.loads(await asyncio.wait_for(webhook.answer(path, raw, 10), PATIENT))
    return bool(answer["response"]["allowed"])


@pytest.mark.parametrize("path", ["/mutate", "/validate"])
def test_a_large_pod_is_answered_as_a_small_one(path: str) -> None:
    async def answers() -> list[Any]:
        small = body(pod_of_cores(100, annotations={"note": "x"}, affinity=held_to("M40")))
        told = [json.loads(await service(MemoryLedgers()).answer(path, raw, 10)) for raw in (small, large())]
        return [each["response"] for each in told]

    small, of_large = asyncio.run(answers())
    assert of_large == small


def test_only_the_event_loop_touches_the_ledgers() -> None:
    ledgers = Ledgers()

    async def create() -> None:
        webhook = service(ledgers)
        assert await allowed(webhook, "/mutate", body(vcuda_pod(annotations=LARGE)))
        assert await allowed(webhook, "/validate", large())
        document = {"data": {"gpu_quota": "team-a: {quota: {M40: 9}}"}, "metadata": {"name": "gpuquota"}}
        edit = {**EDIT, "namespace": "kube-system", "name": "gpuquota"}
        assert await allowed(webhook, "/quota", body(document, **edit))

    asyncio.run(create())
    assert ledgers.threads == {threading.current_thread().name}


def test_many_large_pods_at_once_fill_the_quota_exactly() -> None:
    ledgers = Ledgers()

    async def create() -> list[bool]:
        webhook = service(ledgers)
        return await asyncio.gather(*(allowed(webhook, "/validate", large(f"uid-{n}")) for n in range(16)))

    assert sorted(asyncio.run(create())) == [False] * 12 + [True] * 4


def test_large_pods_that_wait_for_their_ledger_keep_no_other_waiting() -> None:
    """They give away what lets one of them compute at a time: as many as there are threads come to the ledger."""

    async def create() -> list[bool]:
        together = asyncio.Event()

        async def until_all_are_there() -> None:
            if ledgers.arrived == LARGE_REVIEW_THREADS:
                together.set()
            await together.wait()

        ledgers = Ledgers(until_all_are_there)
        webhook = service(ledgers, cards=100)
        pods = (large(f"uid-{n}") for n in range(LARGE_REVIEW_THREADS))
        return await asyncio.gather(*(allowed(webhook, "/validate", raw) for raw in pods))

    assert all(asyncio.run(create()))


def test_the_event_loop_serves_others_while_a_large_pod_is_decided() -> None:
    """A thread that computes for long is stood in for by one that holds the lock of those that compute."""

    async def create() -> None:
        webhook = service(MemoryLedgers())
        held, free = threading.Event(), threading.Event()

        async def compute(_ledgers: object) -> None:
            held.set()
            assert free.wait(PATIENT)

        computing = asyncio.create_task(webhook.large_pods.run(compute, MemoryLedgers()))
        assert await asyncio.to_thread(held.wait, PATIENT)
        behind = asyncio.create_task(allowed(webhook, "/validate", large()))
        assert await allowed(webhook, "/validate", body(pod_of_cores(100, uid="small", affinity=held_to("M40"))))
        assert not behind.done()
        free.set()
        await computing
        assert await behind

    asyncio.run(create())


def test_a_caller_of_a_large_pod_that_goes_takes_nothing_from_the_others() -> None:
    async def create() -> None:
        webhook = service(MemoryLedgers())
        gone = asyncio.create_task(webhook.answer("/validate", large("gone"), 10))
        await asyncio.sleep(0)
        gone.cancel()
        assert all([await allowed(webhook, "/validate", large(f"uid-{n}")) for n in range(3)])

    asyncio.run(create())


@pytest.mark.parametrize("error", [Unavailable("no answer"), RuntimeError("a fault of ours")], ids=repr)
def test_an_error_reaches_the_caller_and_the_next_is_decided(error: Exception) -> None:
    async def fail() -> None:
        raise error

    async def create() -> None:
        failing, webhook = service(Ledgers(fail)), service(MemoryLedgers())
        for _ in range(2 * LARGE_REVIEW_THREADS):
            with pytest.raises(type(error)):
                await failing.answer("/validate", large(), 10)
        with pytest.raises(BadReview):
            await webhook.answer("/validate", b"x" * 2 * LARGE_REVIEW, 10)
        assert await allowed(webhook, "/validate", large())

    asyncio.run(create())


def test_a_large_pod_on_a_replica_that_stood_still_is_sent_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process was stopped while the pod waited for the ledger, for longer than the API server waits."""
    monkeypatch.setattr(admission, "MAX_WAIT_SECONDS", 0.01)

    async def create() -> None:
        ledgers = Ledgers(asyncio.Event().wait)
        webhook = service(ledgers)
        with pytest.raises(Unavailable, match="stood still"):
            await webhook.answer("/validate", large("uid-0"), 10)
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []
        ledgers.until = None
        assert await allowed(webhook, "/validate", large("uid-1"))

    asyncio.run(create())
