"""Computes from LISTs and watches how many cores of each GPU model the stored pods and claims use at each moment."""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import NamedTuple

from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from tests.builders import MODEL
from tests.e2e.cluster import Json
from tests.e2e.dra import PRODUCTS, VERSION
from tests.e2e.rest import Rest

CORES = "tencent.com/vcuda-core"
PODS, CLAIMS = "/api/v1/pods", f"/apis/{VERSION}/resourceclaims"
LOOK_PAUSE = 0.1
WATCH_SECONDS = 5.0
MAX_KEPT = 10_000
TOTAL = "total"
"""The key of the cores of all models together, as in the quota document."""

AWAY = (ApiException, HTTPError, json.JSONDecodeError)
"""The errors that the client raises if the API server is down, or stops in the middle of an answer."""


def held(objects: Sequence[Json]) -> Counter[str]:
    """Return the cores of each model that these objects use. The check is independent: it uses no webhook code."""
    cores: Counter[str] = Counter()
    for each in objects:
        cores.update(held_by_claim(each) if "devices" in each["spec"] else held_by_pod(each))
    return cores


def held_by_pod(pod: Json) -> dict[str, int]:
    # If a pod uses claims, its devices count for the claims only.
    if pod["status"].get("phase") in ("Succeeded", "Failed") or pod["spec"].get("resourceClaims"):
        return {}
    cores = sum(int(container["resources"]["limits"].get(CORES, 0)) for container in pod["spec"]["containers"])
    return {model_of(pod): cores} if cores else {}


def held_by_claim(claim: Json) -> Counter[str]:
    """Return the cores of each model that a claim uses: 100 per device, or the requested cores of a shared device."""
    cores: Counter[str] = Counter()
    for request in claim["spec"]["devices"]["requests"]:
        if "exactly" not in request:
            continue  # only attackers create alternatives, and these name MIG partitions, which the test does not have
        asked = request["exactly"]
        share = asked.get("capacity", {}).get("requests", {}).get("cores", 100)
        # The webhook's selector is after those of the tenant, which may name products that do not exist. So only the
        # last selector counts.
        cores[model_in(json.dumps(asked["selectors"][-1]))] += asked["count"] * int(share)
    return cores


def model_of(pod: Json) -> str:
    required = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    [model] = {
        value
        for term in required["nodeSelectorTerms"]
        for expression in term["matchExpressions"]
        if expression["key"] == MODEL
        for value in expression["values"]
    }
    return str(model)


def model_in(selector: str) -> str:
    """Return the only model in the selector of a claim, in which it is a part of product names."""
    [model] = [model for model in PRODUCTS if model.casefold() in selector.casefold()]
    return model


class Ghosts:
    """Bound pods that were deleted by force. They count for ``seconds`` more, because their containers may run."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._found: dict[str, tuple[float, str, str, int]] = {}

    def add(self, pod: Json, deleted: float) -> None:
        """Add a pod that was deleted by force. ``deleted``: the monotonic time just before the request for this."""
        [(model, cores)] = held([pod]).items()
        self._found[pod["metadata"]["uid"]] = (deleted + self._seconds, pod["metadata"]["namespace"], model, cores)

    def among(self, known: Set[str], there: Set[str], now: float) -> Iterator[tuple[str, str, int]]:
        """Yield namespace, model and cores of pods that are deleted at the time ``now`` but may still run.

        ``known``: the uids of all objects that were observed before. ``there``: the uids of the objects that exist at
        the time ``now``.
        """
        for uid, (until, namespace, model, cores) in list(self._found.items()):
            if uid in known and uid not in there and now < until:
                yield namespace, model, cores


class Change(NamedTuple):
    """An event of a watch.

    ``heard``: the monotonic time at which the event arrived.
    """

    version: int
    heard: float
    event: Json


class Stored:
    """The objects of several collections, which are listed at one resourceVersion and then updated by watches."""

    def __init__(self, rest: Rest, paths: Sequence[str]) -> None:
        self._rest = rest
        self._paths = paths
        # The first LIST has no resourceVersion, so it returns the newest state in etcd. The other LISTs ask for the
        # resourceVersion of that state.
        first = rest.get(paths[0])
        version = str(first["metadata"]["resourceVersion"])
        others = [rest.get(path, resourceVersion=version, resourceVersionMatch="Exact") for path in paths[1:]]
        items = chain.from_iterable(listing["items"] for listing in (first, *others))
        self._objects = {item["metadata"]["uid"]: item for item in items}
        self._version = int(version)

    def objects(self) -> list[Json]:
        return list(self._objects.values())

    def follow(self, threads: ThreadPoolExecutor, seconds: float) -> Iterator[tuple[list[Json], Change]]:
        """Watch all collections for ``seconds`` seconds. Then yield each change in order, with the objects after it.

        A change is left for the next call if some watch has not reached it yet. If a watch failed, its error is raised
        at the end.
        """
        logs: list[list[Change]] = [[] for _ in self._paths]
        ends = [threads.submit(self._record, *each, seconds) for each in zip(self._paths, logs, strict=True)]
        broken = [error for end in ends if (error := end.exception())]
        # Every watch has delivered all events up to this resourceVersion. Of the later events, some may be missing.
        until = min(log[-1].version if log else self._version for log in logs)
        for change in sorted(chain.from_iterable(logs), key=lambda change: change.version):
            if change.version <= until and change.event["type"] != "BOOKMARK":
                self._apply(change.event)
                yield self.objects(), change
        self._version = until
        for error in broken:
            raise error

    def _apply(self, event: Json) -> None:
        self._objects.pop(uid := event["object"]["metadata"]["uid"], None)
        if event["type"] != "DELETED":
            self._objects[uid] = event["object"]

    def _record(self, path: str, log: list[Change], seconds: float) -> None:
        about = {"resourceVersion": str(self._version), "allowWatchBookmarks": "true"}
        with closing(self._rest.watch(path, seconds, **about)) as events:
            for event in events:
                if event["type"] == "ERROR":
                    raise ApiException(reason=f"the watch ended with {event['object']}")
                version = int(event["object"]["metadata"]["resourceVersion"])
                log.append(Change(version, time.monotonic(), event))


@dataclass
class Observer:
    """Observes the pods and claims of some namespaces, and keeps the maxima of their use.

    ``most``: the maximum cores of each model, by namespace or team; for a team also of all models together (`TOTAL`).
    ``teams``: the team of each namespace that has one. ``ghosts``: pods that were deleted by force and still
    count. ``claims``: the maximum number of claims at a time. ``known``: the uids of all objects that were ever
    observed.
    """

    most: Mapping[str, dict[str, int]]
    ghosts: Ghosts
    paths: Sequence[str] = (PODS,)
    teams: Mapping[str, str] = field(default_factory=dict)
    looks: int = 0
    lost: int = 0
    claims: int = 0
    known: set[str] = field(default_factory=set)
    _held: dict[tuple[str, str], Counter[str]] = field(default_factory=dict)

    def see(self, objects: Sequence[Json], now: float) -> None:
        self.looks += 1
        self.claims = max(self.claims, sum("devices" in each["spec"] for each in objects))
        by_name = {name: Counter[str]() for name in self.most}
        for each in objects:
            if (namespace := each["metadata"]["namespace"]) in by_name:
                by_name[namespace].update(self._held_by(each))
        uids = {each["metadata"]["uid"] for each in objects}
        for namespace, model, cores in self.ghosts.among(self.known, uids, now):
            by_name[namespace][model] += cores
        self.known |= uids
        for namespace, team in self.teams.items():
            by_name[team].update(by_name[namespace])
            by_name[team][TOTAL] += by_name[namespace].total()
        for name, counts in by_name.items():
            most = self.most[name]
            most.update({model: max(most.get(model, 0), cores) for model, cores in counts.items()})

    def _held_by(self, each: Json) -> Counter[str]:
        """Return the cores that one object uses. They are cached, because each change counts every object again."""
        version = each["metadata"]["uid"], each["metadata"]["resourceVersion"]
        if version not in self._held:
            if len(self._held) >= MAX_KEPT:
                self._held.clear()
            self._held[version] = held([each])
        return self._held[version]

    def list(self, rest: Rest, stop: threading.Event) -> None:
        while not stop.wait(LOOK_PAUSE):
            try:
                self.see(Stored(rest, self.paths).objects(), time.monotonic())
            except AWAY:
                self.lost += 1

    def follow(self, rest: Rest, stop: threading.Event) -> None:
        start = partial(Stored, rest, self.paths)
        stored: Stored | None = None
        with ThreadPoolExecutor(len(self.paths)) as threads:
            while not stop.wait(LOOK_PAUSE):
                try:
                    if stored is None:
                        stored = start()
                        self.see(stored.objects(), time.monotonic())
                    for objects, change in stored.follow(threads, WATCH_SECONDS):
                        self.see(objects, change.heard)
                except AWAY:
                    self.lost += 1
                    stored = None
