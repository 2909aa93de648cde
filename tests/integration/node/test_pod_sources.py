"""If the LIST of the node's pods failed or is incomplete, the node agent removes nothing."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from controller.garbage.node.names import MustStay
from controller.garbage.node.pods import KubeletPods, RecentPodList, WatchedPods, list_uids
from tests.integration.scripted import Answer, Script, item, page, status
from tests.processes import PATIENCE
from vcuda.errors import Gone, Unavailable, VcudaError
from vcuda.kube import Kube, OnEvent

NODE = "gpu-7"
STATIC = "4dbbbc6a1bd7a7d1d1e2b6c6a9c1a4f0"


def mirror(name: str, version: int) -> dict[str, object]:
    pod = item(name, version)
    metadata = pod["metadata"]
    assert isinstance(metadata, dict)
    return {"metadata": {**metadata, "annotations": {"kubernetes.io/config.mirror": STATIC}}}


@contextmanager
def watching(kube: Kube, own_uid: str | None = None) -> Iterator[WatchedPods]:
    pods = WatchedPods(kube, NODE, own_uid, None, on_gone=lambda: None)
    pods.reflector.start()
    try:
        yield pods
    finally:
        pods.reflector.stop()
        pods.reflector.join(PATIENCE)


def test_the_list_has_all_pods_of_the_node_and_no_others(kube: Kube, script: Script) -> None:
    script.answers.extend([page(7, item("a", 1), token="t"), page(7, mirror("b", 2))])
    assert list_uids(kube, NODE) == {"uid-a", "uid-b", STATIC}
    assert {request.params["fieldSelector"] for request in script.seen} == {f"spec.nodeName={NODE}"}
    assert "resourceVersion" not in script.seen[0].params


@pytest.mark.parametrize(
    ("second", "error"),
    [
        pytest.param(status(410, "The provided continue parameter is too old"), Gone, id="its token has expired"),
        pytest.param(status(500, "etcdserver: leader changed"), Unavailable, id="an error"),
        pytest.param(Answer({"kind": "Status"}), Unavailable, id="no list"),
        pytest.param(page(7, {"metadata": {"name": "b"}}), Unavailable, id="a pod without a uid"),
    ],
)
def test_a_list_whose_second_page_fails_is_not_used(
    kube: Kube, script: Script, second: Answer, error: type[VcudaError]
) -> None:
    script.answers.extend([page(7, item("a", 1), token="t"), second])
    with pytest.raises(error):
        list_uids(kube, NODE)


def test_a_list_is_cached_for_seconds_and_a_failure_is_not(kube: Kube, script: Script) -> None:
    now = [0.0]
    listing = RecentPodList(kube, NODE, "uid-a", clock=lambda: now[0])
    script.answers.extend([page(7, item("a", 1)), status(500, "down"), page(9, item("b", 1)), page(10, item("a", 2))])
    assert listing.known() == listing.known() == {"uid-a"}
    now[0] = 6.0
    with pytest.raises(Unavailable):
        listing.known()
    with pytest.raises(MustStay):
        listing.known()
    assert listing.known() == {"uid-a"}


def test_before_the_first_complete_list_no_pods_are_reported(kube: Kube, script: Script) -> None:
    """The first page alone must not be used, because pods on later pages would seem to be deleted."""
    whole = page(9, item("a", 1), item("b", 2))
    script.answers.extend([page(7, item("a", 1), token="t"), status(410, "too old"), *[status(500, "no")] * 3, whole])
    with watching(kube) as pods:
        with pytest.raises(MustStay, match="not complete"):
            pods.known()
        assert pods.reflector.synced.wait(PATIENCE)
        assert pods.known() == {"uid-a", "uid-b"}


def test_an_old_view_is_not_used(kube: Kube, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    script.answers.append(page(7, item("a", 1)))
    with watching(kube) as pods:
        assert pods.reflector.synced.wait(PATIENCE)
        assert pods.known() == {"uid-a"}
        monkeypatch.setattr(pods.reflector, "last_event_age", lambda _now: 121.0)
        with pytest.raises(MustStay, match="has had no event for too long"):
            pods.known()


def test_a_view_without_the_agents_own_pod_is_not_used(kube: Kube, script: Script) -> None:
    script.answers.append(page(7, item("a", 1)))
    with watching(kube, own_uid="uid-own") as pods:
        assert pods.reflector.synced.wait(PATIENCE)
        with pytest.raises(MustStay, match="does not include the agent's own pod"):
            pods.known()


class View:
    """A test double of a reflector whose cache is always complete and current. A test sets the pods in it."""

    def __init__(self, on_event: OnEvent[tuple[str, ...]]) -> None:
        self.synced, self.alive = threading.Event(), True
        self.synced.set()
        self._pods: dict[str, tuple[str, ...]] = {}
        self._on_event = on_event

    def set(self, **pods: tuple[str, ...]) -> None:
        before, self._pods = self._pods, pods
        for name in before.keys() | pods.keys():
            self._on_event(before.get(name), pods.get(name))

    def last_event_age(self, _now: float) -> float:
        return 0.0

    def snapshot(self) -> dict[str, tuple[str, ...]]:
        return self._pods


@pytest.fixture
def kubelet(tmp_path: Path) -> KubeletPods:
    return KubeletPods(tmp_path)


@pytest.fixture
def views(monkeypatch: pytest.MonkeyPatch) -> list[View]:
    made: list[View] = []

    def make(*_: object, on_event: OnEvent[tuple[str, ...]], **__: object) -> View:
        made.append(View(on_event))
        return made[-1]

    monkeypatch.setattr("controller.garbage.node.pods.Reflector", make)
    return made


def watched(kube: Kube, views: list[View], kubelet: KubeletPods) -> tuple[list[None], WatchedPods, View]:
    """Return a list with one item per call of ``on_gone``, the `WatchedPods`, and the double of their reflector."""
    gone: list[None] = []
    pods = WatchedPods(kube, NODE, None, kubelet, on_gone=lambda: gone.append(None))
    [view] = views
    return gone, pods, view


def test_the_uid_of_a_mirror_pod_stays_present_while_its_static_pod_has_another_mirror(
    kube: Kube, views: list[View], kubelet: KubeletPods
) -> None:
    """The device plugin named a directory after the first mirror pod, and uses it while the static pod runs."""
    gone, pods, view = watched(kube, views, kubelet)
    view.set(own=("own",), first=("mirror-1", STATIC))
    assert pods.known() == {"own", "mirror-1", STATIC}
    view.set(own=("own",), again=("mirror-2", STATIC))
    assert pods.known() == {"own", "mirror-1", "mirror-2", STATIC}
    assert len(gone) == 1
    view.set(own=("own",))
    assert pods.known() == {"own"}
    view.set(own=("own",), third=("mirror-3", STATIC))
    assert pods.known() == {"own", "mirror-3", STATIC}


def test_the_uid_of_a_mirror_pod_stays_present_while_kubelet_keeps_its_static_pod(
    kube: Kube, views: list[View], kubelet: KubeletPods
) -> None:
    """The namespace was deleted, so the kubelet can create no new mirror pod, but the static pod still runs."""
    _, pods, view = watched(kube, views, kubelet)
    view.set(own=("own",), mirror=("mirror-1", STATIC))
    (kubelet.path / STATIC).mkdir()
    view.set(own=("own",))
    assert pods.known() == {"own", "mirror-1"}
    (kubelet.path / STATIC).rmdir()
    assert pods.known() == {"own"}


def test_only_a_deleted_pod_triggers_a_sweep(kube: Kube, views: list[View], kubelet: KubeletPods) -> None:
    gone, _, view = watched(kube, views, kubelet)
    view.set(own=("own",), other=("a",))
    view.set(own=("own",), other=("a",))
    assert gone == []
    view.set(own=("own",))
    assert len(gone) == 1
