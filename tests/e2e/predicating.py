"""The real scheduler with an extender that treats allocated pods as gpu-admission does: it refuses them for ever."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.e2e.control_plane import ControlPlane
from tests.e2e.ports import free_ports
from tests.e2e.rest import Json
from tests.e2e.second_scheduler import LAST_MINOR_WITH_HTTP, VERSIONS, scheduling

NAME = "predicating"
"""The schedulerName of pods that it schedules."""

REFUSAL = "had been predicated!"
MARKS = ("predicate-time", "gpu-assigned", "predicate-gpu-idx-")


class Predicate(BaseHTTPRequestHandler):
    """Answers an ExtenderArgs: no node for a pod with gpu-admission's annotations, else the first of its nodes."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.dumps(decide(asked["Pod"], asked["Nodes"])).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def decide(pod: Json, nodes: Json) -> Json:
    """The ExtenderFilterResult (k8s.io/kube-scheduler ``extender/v1``)."""
    if any(mark in key for key in pod["metadata"].get("annotations", {}) for mark in MARKS):
        return {"Error": f"pod {pod['metadata']['name']} {REFUSAL}"}
    return {"Nodes": {**nodes, "items": nodes["items"][:1]}, "FailedNodes": {}, "Error": ""}


@contextmanager
def predicating_scheduler(control_plane: ControlPlane, directory: Path) -> Iterator[None]:
    """A scheduler for the pods that name it, beside the cluster's own; ``directory`` (fresh) gets its files."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Predicate)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        config = config_file(control_plane, directory, f"http://127.0.0.1:{server.server_port}")
        with scheduling(control_plane, f"--config={config}"):
            yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def config_file(control_plane: ControlPlane, directory: Path, extender: str) -> Path:
    """The scheduler's configuration: one profile, and the extender."""
    version = next(version for first, version in VERSIONS if control_plane.minor >= first)
    config: Json = {
        "apiVersion": f"kubescheduler.config.k8s.io/{version}",
        "kind": "KubeSchedulerConfiguration",
        "clientConnection": {"kubeconfig": str(control_plane.kubeconfig)},
        "leaderElection": {"leaderElect": False},
        "profiles": [{"schedulerName": NAME}],
        "extenders": [{"urlPrefix": extender, "filterVerb": "filter"}],
    }
    if control_plane.minor <= LAST_MINOR_WITH_HTTP:
        plain = f"127.0.0.1:{free_ports(1)[0]}"
        config |= {"healthzBindAddress": plain, "metricsBindAddress": plain}
    path = directory / "scheduler.json"
    path.write_text(json.dumps(config))
    return path
