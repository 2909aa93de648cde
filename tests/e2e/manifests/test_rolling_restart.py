"""Tests that a rolling restart of the webhook under load fails no create, with the manifests' probes and times."""

import http.client
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http import HTTPStatus

import pytest

from tests.builders import MODEL
from tests.e2e.cluster import Cluster, Json
from tests.e2e.manifests.scenes import limited
from tests.e2e.manifests.system import NODE, System, applied, port_of
from tests.e2e.quota_config import QuotaConfigMap
from tests.e2e.steady import creating, share
from tests.processes import WebhookProcess
from tests.rendered import container, pod_spec

pytestmark = [pytest.mark.slow, pytest.mark.one_version]

PACE = 20
"""The number of pods that are created per second."""

MORE = 2 * PACE
"""The number of pods that are created after every old webhook replica has ended."""


@pytest.fixture
def system(admin: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    admin.create_node(NODE, {MODEL: "M40"})
    with applied(admin, tmp_path_factory.mktemp("restart")) as system:
        yield system
    admin.delete_node(NODE)


@pytest.mark.timeout(240)
def test_no_create_fails_while_every_replica_is_replaced(admin: Cluster, system: System) -> None:
    done = system.rotate(timeout="0s")
    assert done.returncode == 0, done.stdout + done.stderr
    quota, entry = QuotaConfigMap(admin.rest, "kube-system", "gpuquota"), {"quota": {"M40": 1000}}
    deployment = system.workload("Deployment", "vcuda-webhook")
    with ExitStack() as replicas:

        def start() -> Replica:
            replica = Replica(system, deployment)
            replicas.callback(replica.kill)
            assert replica.ready.wait(60)
            return replica

        old = [start() for _ in range(deployment["spec"]["replicas"])]
        before = {port_of(each.process) for each in old}
        with system.controller(storable_seconds="2"), limited(admin, quota, entry) as namespace:
            system.register()
            with creating(admin, namespace, share, PACE) as creates:
                after = [each.process for each in restarted(deployment["spec"], old, start)]
                creates.await_more(MORE)
            assert creates.failures == []
            assert creates.succeeded > 10 * PACE
            pods = admin.pods(namespace)
            assert len(pods) == creates.succeeded
            assert {pod["metadata"]["annotations"]["quota.vcuda.io/model"] for pod in pods} == {"M40"}
            assert len(after) == len(before)
            assert not before & {port_of(each) for each in after}
            told = sum(each.metric("vcuda_admissions_total", path="/validate", outcome="charged") for each in after)
            assert told >= MORE
            print(f"\n{creates.succeeded} pods while {len(after)} replicas were replaced, {told:g} by new replicas")


LEARNED = 4.0
"""Seconds until a change of the endpoints of a Service has reached all clients. This is slow but realistic."""


class Replica:
    """A pod of the webhook. The Service routes to it while it is ready and not being deleted."""

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
        """End the webhook's pod as the kubelet does: run preStop, send SIGTERM, and wait for at most the grace period.

        The Service stops routing to the pod some time after its deletion. An error is raised if the process fails or
        does not end in time.
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
        """Run the startup probe until its first success, and then the readiness probe.

        After `failureThreshold` failures of the readiness probe in a row, the Service no longer routes to the pod.
        """
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


def restarted(spec: Json, old: Sequence[Replica], start: Callable[[], Replica]) -> list[Replica]:
    """Replace all replicas, as `kubectl rollout restart` does. Return the new replicas when the last old one has ended.

    With maxUnavailable 0 and maxSurge 1, one new replica at a time is started. An old replica is deleted when the new
    one has been ready for minReadySeconds. The next one is started before the old one has ended.
    """
    strategy = spec["strategy"]["rollingUpdate"]
    assert (strategy["maxSurge"], strategy["maxUnavailable"]) == (1, 0)
    new, going = [], []
    with ThreadPoolExecutor(len(old)) as threads:
        for replica in old:
            new.append(start())
            time.sleep(spec["minReadySeconds"])
            going.append(threads.submit(replica.go))
    for each in going:
        each.result()
    return new
