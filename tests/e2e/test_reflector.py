"""Tests of the reflector (a cache of objects that a watch updates) with a real API server.

After any disturbance, the cache equals the stored objects.
"""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.compaction import expire, token_of
from tests.integration.rounds import running
from tools.control_plane import ControlPlane
from vcuda.errors import ApiError, Conflict, NotFound, Unavailable
from vcuda.kube import MERGE_PATCH, Kube, Params, Reflector

TIMEOUT = 60  # seconds
ATTEMPTS = 20
OBJECTS = 1000
# Kubernetes creates a ConfigMap in every namespace. This selector leaves it out.
OURS = {"labelSelector": "test=reflector"}


Item = dict[str, Any]
Seen = tuple[Item | None, Item | None]


def item(raw: bytes) -> Item:
    found: Item = msgspec.json.decode(raw)
    return found


def values(items: Iterable[Item]) -> dict[str, str]:
    return {one["metadata"]["name"]: one["data"]["value"] for one in items}


def manifest(name: str, value: str) -> bytes:
    metadata = {"name": name, "labels": {"test": "reflector"}}
    return msgspec.json.encode({"metadata": metadata, "data": {"value": value}})


@contextmanager
def following(kube: Kube, path: str, **settings: Any) -> Iterator[tuple[Reflector[Item], queue.SimpleQueue[Seen]]]:
    """Yield a synced reflector (a cache that a watch updates), and the queue of its events.

    Stop the reflector after the ``with`` statement. Otherwise an idle watch would last for minutes.
    """
    seen: queue.SimpleQueue[Seen] = queue.SimpleQueue()
    settings = {"params": OURS, **settings}
    reflector = Reflector(kube, path, item, on_event=lambda old, new: seen.put((old, new)), **settings)
    reflector.start()
    try:
        assert reflector.synced.wait(TIMEOUT)
        yield reflector, seen
    finally:
        reflector.stop()
        reflector.join(TIMEOUT)
        assert not reflector.alive


@dataclass
class Writer:
    """Creates, changes and deletes ConfigMaps, even while the API server restarts."""

    kube: Kube
    path: str
    up: threading.Event = field(default_factory=threading.Event)
    written: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def life(self, number: int) -> None:
        """Create object ``number``. Then change it if the number is odd, and delete it if it is a multiple of three."""
        name = f"cm-{number:04}"
        one = f"{self.path}/{name}"
        self._insist(lambda: self.kube.post(self.path, manifest(name, "first")), Conflict)
        if number % 2:
            change = msgspec.json.encode({"data": {"value": f"second {number}"}})
            self._insist(lambda: self.kube.patch(one, change, MERGE_PATCH), NotFound)
        if number % 3 == 0:
            self._insist(lambda: self.kube.delete(one), NotFound)

    def _insist(self, write: Callable[[], object], landed: type[ApiError]) -> None:
        """Repeat the write until the API server answers.

        ``landed``: the error of a repeated write after an earlier one has succeeded. It counts as success.
        """
        for _ in range(ATTEMPTS):
            assert self.up.wait(TIMEOUT)
            with suppress(Unavailable):
                with suppress(landed):
                    write()
                self.written.release()
                return
        pytest.fail("the API server did not come back")


def test_the_cache_equals_the_store_after_a_thousand_objects_and_two_restarts(
    kube: Kube, control_plane: ControlPlane, path: str
) -> None:
    """The reflector's events, applied one after another, must lead to the same objects."""
    writer = Writer(kube, path)
    writer.up.set()
    with following(kube, path, page_size=50) as (reflector, seen), ThreadPoolExecutor(4) as threads:
        lives = [threads.submit(writer.life, number) for number in range(OBJECTS)]
        for _ in range(2):
            for _ in range(OBJECTS // 2):
                assert writer.written.acquire(timeout=TIMEOUT)
            writer.up.clear()
            control_plane.apiserver.kill()
            control_plane.apiserver.start()
            writer.up.set()
        for life in lives:
            life.result(TIMEOUT)
        kube.post(path, manifest("last", "of all"))
        told = replayed(seen, until="last")
        listed = [item(raw) for page in kube.list_pages(path, OURS, limit=300) for raw in page.items]
        assert len(listed) == OBJECTS - len(range(0, OBJECTS, 3)) + 1
        assert values(reflector.snapshot().values()) == values(listed)
        assert values(told.values()) == values(listed)
        assert reflector.counts.watches >= 3


@pytest.mark.parametrize("collection", ["configmaps", "events"])
def test_a_list_continues_as_a_watch(kube: Kube, namespace: str, collection: str) -> None:
    """The API server has no watch cache for Events."""
    path = f"/api/v1/namespaces/{namespace}/{collection}"
    told: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    reflector = Reflector(kube, path, named, params=OURS, on_event=lambda _old, new: told.put(new))
    kube.post(path, about(namespace, "first"))
    with running(reflector):
        assert told.get(timeout=TIMEOUT) == "first"
        kube.post(path, about(namespace, "second"))
        assert told.get(timeout=TIMEOUT) == "second"
        counts = reflector.counts
        assert (counts.lists, counts.watches, counts.failures) == (1, 1, 0)


def about(namespace: str, name: str) -> bytes:
    metadata = {"name": name, "labels": {"test": "reflector"}}
    involved = {"kind": "Namespace", "namespace": namespace, "name": namespace}
    return msgspec.json.encode({"metadata": metadata, "involvedObject": involved})


def named(raw: bytes) -> str:
    return str(item(raw)["metadata"]["name"])


def test_a_paged_list_whose_token_expires_restarts_and_shows_no_partial_result(
    cluster: Cluster, control_plane: ControlPlane, path: str
) -> None:
    asked: list[Params | None] = []

    class Interrupted(Kube):
        def get(self, path: str, params: Params | None = None, timeout: float = 10, most: int = 2**20) -> bytes:
            asked.append(params)
            page = Kube.get(self, path, params, timeout, most)
            if len(asked) == 1:
                self.post(path, manifest("late", "first"))
                expire(control_plane, cluster, path, {**OURS, "limit": 2, "continue": token_of(page)})
            return page

    with closing(Interrupted.connect(cluster.kubeconfig)) as kube:
        for number in range(5):
            kube.post(path, manifest(f"cm-{number}", "first"))
        with following(kube, path, page_size=2) as (reflector, _seen):
            assert len(reflector.snapshot()) == 6
            assert (reflector.counts.lists, reflector.counts.failures) == (1, 1)
    assert len(asked) == 2 + 3


def replayed(seen: queue.SimpleQueue[Seen], until: str) -> dict[str, Item]:
    """Apply the reflector's events up to the creation of ``until``, and return the objects.

    The old object of each event must be the new object of the event before it with the same name.
    """
    state: dict[str, Item] = {}
    while until not in state:
        old, new = seen.get(timeout=TIMEOUT)
        name = next(one["metadata"]["name"] for one in (old, new) if one is not None)
        assert state.pop(name, None) == old
        if new is not None:
            state[name] = new
    return state


def test_events_missed_while_the_api_server_was_down_are_reported_after_a_410(
    kube: Kube, control_plane: ControlPlane, path: str
) -> None:
    """After a restart, the API server's watch cache is empty.

    So it answers 410 to a watch from an earlier version, and the reflector lists the objects.
    """
    kube.post(path, manifest("changed", "first"))
    kube.post(path, manifest("gone", "first"))
    pause = Gate()
    with following(kube, path, wait=pause) as (reflector, seen):
        assert [seen.get(timeout=TIMEOUT)[0] for _ in range(2)] == [None, None]
        # The reflector does not select this object. After its creation, the newest resourceVersion is newer than that
        # of the reflector's watch.
        kube.post(path, msgspec.json.encode({"metadata": {"name": "unselected"}}))
        control_plane.apiserver.kill()
        assert pause.reached.wait(TIMEOUT)
        control_plane.apiserver.start()
        kube.patch(f"{path}/changed", b'{"data": {"value": "second"}}', MERGE_PATCH)
        kube.delete(f"{path}/gone")
        kube.post(path, manifest("new", "first"))
        pause.open.set()
        told = [seen.get(timeout=TIMEOUT) for _ in range(3)]
        changes = [(old and old["metadata"]["name"], new and new["data"]["value"]) for old, new in told]
        assert changes == [("gone", None), ("changed", "second"), (None, "first")]
        assert reflector.counts.lists == 2
        assert values(reflector.snapshot().values()) == {"changed": "second", "new": "first"}


class Gate:
    """Replaces the reflector's wait between two attempts. The wait lasts until the test sets ``open``."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()

    def __call__(self, _seconds: float) -> bool:
        self.reached.set()
        return not self.open.wait(TIMEOUT)


def test_an_object_selected_by_name_is_watched_before_it_exists(kube: Kube, path: str) -> None:
    """The webhook watches the quota ConfigMap by a field selector with the ConfigMap's name."""
    with following(kube, path, params={"fieldSelector": "metadata.name=gpuquota"}) as (reflector, seen):
        assert dict(reflector.snapshot()) == {}
        kube.post(path, manifest("other", "x"))
        kube.post(path, manifest("gpuquota", "first"))
        old, new = seen.get(timeout=TIMEOUT)
        assert (old, new and new["data"]["value"]) == (None, "first")
        version = int(reflector.resource_version)
        kube.delete(f"{path}/gpuquota")
        assert seen.get(timeout=TIMEOUT) == (new, None)
        assert int(reflector.resource_version) > version
