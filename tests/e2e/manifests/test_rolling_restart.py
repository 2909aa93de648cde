"""A rolling restart of the webhook under load, by the manifests' probes, preStop and times: nobody notices."""

from __future__ import annotations

import http.client
import signal
import subprocess
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
from tests.e2e.installation import QuotaConfigMap
from tests.e2e.manifests.system import NODE, System, applied, port_of
from tests.e2e.rest import Answer, Json
from tests.integration.reviews import gpu_pod
from tests.processes import WebhookProcess
from tests.rendered import container, pod_spec

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


LEARNED = 4.0
"""Seconds until a Service's endpoints, and whoever goes by them, have followed a change: slow, but seen."""


class Replica:
    """A pod of the webhook. It is an endpoint of the Service while it is ready and is not told to go."""

    def __init__(self, system: System, deployment: Json) -> None:
        self.process: WebhookProcess = system.webhook()
        self.ready = threading.Event()
        self._balancer = system.balancer
        self._container = container(deployment)
        self._grace = float(pod_spec(deployment)["terminationGracePeriodSeconds"])
        self._going = threading.Event()
        self._prober = threading.Thread(target=self._probe, name="probes")
        self._prober.start()

    def go(self) -> None:
        """Delete the pod: it leaves the endpoints, and meanwhile preStop, SIGTERM and the grace period take their way.

        Raises AssertionError where it has to be killed, or did not end well.
        """
        started = time.monotonic()
        self._going.set()
        leaving = threading.Timer(LEARNED, self._leave)
        leaving.start()
        command = self._container["lifecycle"]["preStop"]["exec"]["command"]
        subprocess.run(command, check=True, timeout=self._grace)
        self.process.process.send_signal(signal.SIGTERM)
        status = self.process.process.wait(self._grace - (time.monotonic() - started))
        leaving.join()
        assert status == 0, self.process.output()

    def kill(self) -> None:
        self._going.set()
        self._prober.join()
        self._leave()
        self.process.kill()

    def _probe(self) -> None:
        """Startup probe until the first success; from then on readiness, which takes failures in a row to be lost."""
        self._await_startup(self._container["startupProbe"])
        probe, failures = self._container["readinessProbe"], 0
        while not self._going.is_set():
            if self._asked(probe):
                failures = 0
                self._enter()
            else:
                failures += 1
                if failures == probe["failureThreshold"]:
                    self._leave()
            self._going.wait(probe["periodSeconds"])

    def _await_startup(self, probe: Json) -> None:
        for _ in range(probe["failureThreshold"]):
            if self._asked(probe) or self._going.wait(probe["periodSeconds"]):
                return
        raise TimeoutError("the startup probe never succeeded")

    def _asked(self, probe: Json) -> bool:
        try:
            return self.process.get(probe["httpGet"]["path"]).status == HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False

    def _enter(self) -> None:
        if not self.ready.is_set():
            self._balancer.add(port_of(self.process))
            self.ready.set()

    def _leave(self) -> None:
        self.ready.clear()
        self._balancer.remove(port_of(self.process))


class Rollout:
    """A Deployment of so many replicas as the manifest has, restarted one by one as its strategy says."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._deployment = system.workload("Deployment", "vcuda-webhook")
        self._every: list[Replica] = []
        self.current: list[Replica] = []

    def start(self) -> None:
        self.current = [self._new() for _ in range(self._deployment["spec"]["replicas"])]
        for replica in self.current:
            assert replica.ready.wait(60)

    def restart(self) -> None:
        """`kubectl rollout restart`: return when the last of the old ones has ended.

        As maxUnavailable is 0 and maxSurge 1, one new replica at a time is started and available for minReadySeconds
        before an old one is deleted. The controller does not wait for its end.
        """
        strategy = self._deployment["spec"]["strategy"]["rollingUpdate"]
        assert (strategy["maxSurge"], strategy["maxUnavailable"]) == (1, 0)
        old, self.current = self.current, []
        going = []
        for replica in old:
            new = self._new()
            assert new.ready.wait(60)
            time.sleep(self._deployment["spec"]["minReadySeconds"])
            self.current.append(new)
            going.append(Ending(replica))
        for each in going:
            each.join()

    def stop(self) -> None:
        for replica in self._every:
            replica.kill()

    def _new(self) -> Replica:
        replica = Replica(self._system, self._deployment)
        self._every.append(replica)
        return replica


class Ending:
    """A replica that goes, in a thread of its own; ``join`` raises what went wrong."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="going")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._replica.go()
        except BaseException as error:  # noqa: BLE001  # raised again by `join`
            self._error = error

    def join(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error


@contextmanager
def deployed(system: System) -> Iterator[Rollout]:
    rollout = Rollout(system)
    try:
        rollout.start()
        yield rollout
    finally:
        rollout.stop()
