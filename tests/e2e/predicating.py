"""The real scheduler with an extender that treats allocated pods as gpu-admission does: it refuses them for ever."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.control_plane import ControlPlane
from tests.e2e.json_server import answering
from tests.e2e.rest import Json
from tests.e2e.second_scheduler import scheduling

NAME = "predicating"
"""The schedulerName of pods that it schedules."""

REFUSAL = "had been predicated!"
MARKS = ("predicate-time", "gpu-assigned", "predicate-gpu-idx-")


def answer(_path: str, asked: Json) -> Json:
    return decide(asked["Pod"], asked["Nodes"])


def decide(pod: Json, nodes: Json) -> Json:
    """The ExtenderFilterResult (k8s.io/kube-scheduler ``extender/v1``).

    No node for a pod with gpu-admission's annotations, else the first of its nodes.
    """
    if any(mark in key for key in pod["metadata"].get("annotations", {}) for mark in MARKS):
        return {"Error": f"pod {pod['metadata']['name']} {REFUSAL}"}
    return {"Nodes": {**nodes, "items": nodes["items"][:1]}, "FailedNodes": {}, "Error": ""}


@contextmanager
def predicating_scheduler(control_plane: ControlPlane, directory: Path) -> Iterator[None]:
    """A scheduler for the pods that name it, beside the cluster's own; ``directory`` (fresh) gets its files."""
    with answering(answer) as url:
        config = config_file(control_plane, directory, url)
        with scheduling(control_plane, f"--config={config}"):
            yield


def config_file(control_plane: ControlPlane, directory: Path, extender: str) -> Path:
    config: Json = {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "clientConnection": {"kubeconfig": str(control_plane.kubeconfig)},
        "leaderElection": {"leaderElect": False},
        "profiles": [{"schedulerName": NAME}],
        "extenders": [{"urlPrefix": extender, "filterVerb": "filter"}],
    }
    path = directory / "scheduler.json"
    path.write_text(json.dumps(config))
    return path
