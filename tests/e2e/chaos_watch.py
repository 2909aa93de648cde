"""Looks at what is stored, again and again, and remembers the most that it ever saw."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Sequence

from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from tests.builders import MODEL
from tests.e2e.rest import Json, Rest
from tests.e2e.watching import states

CORES = "tencent.com/vcuda-core"
PODS = "/api/v1/pods"
PAUSE = 0.02
WATCH_SECONDS = 5.0
AWAY = (ApiException, HTTPError, json.JSONDecodeError)
"""What the client raises where the API server is away, or goes away within an answer."""


def held(pods: Sequence[Json]) -> Counter[str]:
    """The cores that the pods hold of each model. It shares no line with the code it judges."""
    cores: Counter[str] = Counter()
    for pod in pods:
        if pod["status"].get("phase") not in ("Succeeded", "Failed"):
            cores[model_of(pod)] += sum(
                int(container["resources"]["limits"][CORES]) for container in pod["spec"]["containers"]
            )
    return cores


def model_of(pod: Json) -> str:
    """The one model that the pod is held to."""
    required = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    [model] = {
        value
        for term in required["nodeSelectorTerms"]
        for expression in term["matchExpressions"]
        if expression["key"] == MODEL
        for value in expression["values"]
    }
    return str(model)


class Observer:
    """What was seen of some namespaces.

    ``most``: the most cores of each model, by namespace. ``looks``: how often. ``lost``: how often in vain.
    """

    def __init__(self, namespaces: Sequence[str]) -> None:
        self.most: dict[str, dict[str, int]] = {namespace: {} for namespace in namespaces}
        self.looks = 0
        self.lost = 0

    def see(self, pods: Sequence[Json]) -> None:
        """Take note of one state."""
        self.looks += 1
        for namespace, most in self.most.items():
            for model, cores in held([pod for pod in pods if pod["metadata"]["namespace"] == namespace]).items():
                most[model] = max(most.get(model, 0), cores)

    def list(self, rest: Rest, stop: threading.Event) -> None:
        """LIST until told to stop. Without a resourceVersion that is a quorum read of one moment."""
        while not stop.wait(PAUSE):
            try:
                self.see(rest.get(PODS)["items"])
            except AWAY:
                self.lost += 1

    def follow(self, rest: Rest, stop: threading.Event) -> None:
        """See the state after every single change, until told to stop; LIST anew where the watch ends or breaks."""
        while not stop.wait(PAUSE):
            try:
                for pods in states(rest, PODS, time.monotonic() + WATCH_SECONDS, {}):
                    self.see(pods)
            except (*AWAY, RuntimeError):
                self.lost += 1
