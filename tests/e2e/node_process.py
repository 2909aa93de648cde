"""``vcuda-controller node`` as a process of its own, on a disk made for the test."""

from __future__ import annotations

import http.client
import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from tests.e2e.cluster import Cluster
from tests.e2e.controller_process import PROGRAM
from tests.integration.node.disk import Disk
from tests.processes import PATIENCE, OwnProcess, Reply

PERIOD, GRACE = 0.5, 2.0
POLL = 0.05


class NodeProcess(OwnProcess):
    """A running node agent."""

    def __init__(self, *flags: str | Path) -> None:
        super().__init__((PROGRAM, "node", *flags), {})
        with self.starting():
            self.port: int = self.await_log("serving status")["port"]

    def get(self, path: str) -> Reply:
        """GET from its status server."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)) as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            return Reply(response.status, response.headers, response.read())

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples of this name that have these labels."""
        return sum(self.get("/metrics").samples(name, labels))

    def await_metric(self, name: str, least: float, **labels: str) -> None:
        """Return once a metric has grown so far."""
        deadline = time.monotonic() + PATIENCE
        while self.metric(name, **labels) < least:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name} {labels} never came to {least}:\n{self.output()}")
            time.sleep(POLL)

    def await_sweeps(self, count: int, result: str = "complete") -> None:
        """Return after so many further sweeps with this result."""
        so_far = self.metric("vcuda_vm_sweeps_total", result=result)
        self.await_metric("vcuda_vm_sweeps_total", so_far + count, result=result)

    def await_moved(self, name: str) -> None:
        """Return once a directory is in the trash."""
        self.await_log("moved", lambda line: line["directory"] == name)


def flags_of(cluster: Cluster, disk: Disk, node: str, *more: str | Path) -> list[str | Path]:
    """The flags of an agent of ``node`` with the rights of ``cluster``'s user; ``more`` may set them anew."""
    return [
        *("--scheme", disk.scheme, "--root", disk.root, "--node", node, "--kubeconfig", cluster.kubeconfig),
        *("--status-address", "127.0.0.1:0", "--period", str(PERIOD), "--grace", str(GRACE)),
        *more,
    ]


@contextmanager
def sweeping(cluster: Cluster, disk: Disk, node: str, *more: str | Path) -> Iterator[NodeProcess]:
    """An agent, stopped at the end of the block as kubelet stops it."""
    process = NodeProcess(*flags_of(cluster, disk, node, *more))
    try:
        yield process
        assert process.terminate() == 0, process.output()
    finally:
        if process.process.poll() is None:
            process.kill()


def aged(path: Path) -> Path:
    """Let a directory have been made long ago."""
    os.utime(path, (time.time() - 3600,) * 2)
    return path
