"""A rolling restart of the webhook under load, by the manifests' probes, preStop and times: nobody notices."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from http import HTTPStatus

import pytest

from tests.builders import MODEL
from tests.e2e.cluster import TIMEOUT, Cluster
from tests.e2e.controller_process import await_enforced
from tests.e2e.manifests.rollout import Rollout, deployed
from tests.e2e.manifests.system import NODE, System, applied, port_of
from tests.e2e.quota_config_map import QuotaConfigMap
from tests.e2e.rest import Answer
from tests.integration.reviews import gpu_pod

PACE = 20
"""Pods created a second."""

MORE = 2 * PACE
"""Pods created when every old replica has ended: by the new ones alone."""

SHARE = {"tencent.com/vcuda-core": "1", "tencent.com/vcuda-memory": "1"}


@pytest.fixture
def system(admin: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    admin.create_node(NODE, {MODEL: "M40"})
    with applied(admin, tmp_path_factory.mktemp("restart")) as system:
        yield system
    admin.delete_node(NODE)


class Load:
    """Creates pods at a steady pace, whatever becomes of them; ``answers`` holds what was answered."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._stopping = threading.Event()
        self._answers: list[Future[Answer]] = []
        self._progress = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="load")
        self._thread.start()

    def await_more(self, count: int) -> None:
        """Return once so many more pods are under way than now."""
        goal = len(self._answers) + count
        with self._progress:
            assert self._progress.wait_for(lambda: len(self._answers) >= goal, TIMEOUT)

    def stop(self) -> list[Answer]:
        """End it; return every answer."""
        self._stopping.set()
        self._thread.join()
        return [each.result() for each in self._answers]

    def _run(self) -> None:
        begun = time.monotonic()
        with ThreadPoolExecutor(32) as callers:
            while not self._stopping.wait(max(0.0, begun + len(self._answers) / PACE - time.monotonic())):
                pod = gpu_pod(f"load-{len(self._answers)}", self._namespace, SHARE)
                with self._progress:
                    self._answers.append(callers.submit(self._cluster.try_create, pod))
                    self._progress.notify_all()


@contextmanager
def limited(cluster: Cluster) -> Iterator[str]:
    """A namespace with room for all of them, enforced."""
    quota = QuotaConfigMap(cluster.rest, "kube-system", "gpuquota")
    namespace = cluster.create_namespace()
    quota.limit(**{namespace: {"quota": {"M40": 1000}}})
    await_enforced(cluster, namespace)
    yield namespace
    quota.lift(namespace)
    cluster.delete_namespace(namespace)


@pytest.mark.timeout(240)
def test_not_one_create_fails_while_every_replica_is_replaced(admin: Cluster, system: System) -> None:
    done = system.rotate()
    assert done.returncode == 0, done.stdout + done.stderr
    with deployed(system) as rollout, system.controller() as controller:
        controller.await_synced()
        answers = restarted_under_load(admin, rollout)
        failed = [f"{each.status} {each.message}" for each in answers if each.status != HTTPStatus.CREATED]
        assert failed == []
        assert len(answers) > 10 * PACE
        assert {each.body["metadata"]["annotations"]["quota.vcuda.io/model"] for each in answers} == {"M40"}
        told = [
            each.process.metric("vcuda_admissions_total", path="/validate", outcome="charged")
            for each in rollout.current
        ]
        assert sum(told) >= MORE
        print(f"\n{len(answers)} pods created while {len(told)} replicas were replaced, {sum(told):g} by the new ones")


def restarted_under_load(cluster: Cluster, rollout: Rollout) -> list[Answer]:
    """The answers to all creates while every replica was replaced by a new one, and the old ones ended."""
    before = [port_of(each.process) for each in rollout.current]
    with limited(cluster) as namespace:
        load = Load(cluster, namespace)
        try:
            rollout.restart()
            load.await_more(MORE)
        finally:
            answers = load.stop()
        assert len(cluster.pods(namespace)) == sum(each.status == HTTPStatus.CREATED for each in answers)
    after = [port_of(each.process) for each in rollout.current]
    assert len(after) == len(before) == len({*before, *after}) / 2
    return answers
