"""Tests of the controller's watch of pods, the pods that it shows of a namespace, and the events that it reports."""

from typing import Any, cast

import structlog

from controller.pods import KeptPod, PodInformer
from tests.api_double import ApiDouble
from tests.builders import LABELS, Manifest, stored_pod, view
from tests.replicas import POD, Clock
from tests.tables import cases
from vcuda.allocations.stored_pods import StoredPod, read_stored
from vcuda.kube import Reflector
from vcuda.ledger.ledger import Terminating
from vcuda.placement.nodes import Nodes
from vcuda.quota.model import Charge
from vcuda.requests.resources import GpuResources


class Readable:
    """A reflector that has decoded all its objects."""

    def check_read(self, _namespace: str) -> None:
        """Raise no error."""


class Busy(Readable):
    """A reflector whose store always changes: each access adds one pod of one card."""

    _version = 0
    listed_version = "0"

    def versioned(self, namespace: str) -> tuple[str, list[StoredPod]]:
        pods = self.within(namespace)
        return str(self._version), pods

    def within(self, _namespace: str) -> list[StoredPod]:
        self._version += 1
        found = read_stored(view(stored_pod({"tencent.com/vcuda-core": 100})), LABELS)
        assert found
        return [found] * self._version


def test_a_view_counts_exactly_the_pods_of_its_version_during_changes(api: ApiDouble) -> None:
    """With a newer version than the counted pods', a pod created between both versions would never be charged.

    With an older version, another leader could release its charge.
    """
    watch = PodInformer(api.kube, LABELS, lambda _: None)
    watch.reflector = cast("Reflector[KeptPod]", Busy())
    seen = watch.observed("team-a", Nodes(LABELS))
    assert seen.committed["M40"].cores == 100 * int(seen.resource_version)


def store(api: ApiDouble, manifest: Manifest, **metadata: Any) -> None:
    """Store a pod in namespace team-a. ``metadata`` is added to the manifest's own metadata."""
    api.store(POD, {**manifest, "metadata": {**manifest["metadata"], "namespace": "team-a", **metadata}})


CARD = {"tencent.com/vcuda-core": 100}
BOUND = {"nodeName": "gpu-1"}


@cases(
    "spec, phase, metadata, seconds",
    Kubernetes_own_default=(BOUND, "Running", {}, 30),
    its_own=({**BOUND, "terminationGracePeriodSeconds": 45}, "Running", {}, 45),
    at_most_max_terminating_seconds=({**BOUND, "terminationGracePeriodSeconds": 31_536_000}, "Running", {}, 100),
    a_deletion_with_a_longer_period=(BOUND, "Running", {"deletionGracePeriodSeconds": 90}, 90),
    a_pending_bound_pod=(BOUND, "Pending", {}, 30),
    a_grace_period_of_0=({**BOUND, "terminationGracePeriodSeconds": 0}, "Running", {}, 5),
    a_pod_that_had_ended=(BOUND, "Succeeded", {}, None),
    a_pod_that_was_never_bound=({}, "Pending", {}, None),
)
def test_a_bound_pod_deleted_before_its_end_is_reported_for_as_long_as_it_may_run(
    api: ApiDouble, spec: dict[str, Any], phase: str, metadata: dict[str, Any], seconds: int | None
) -> None:
    clock = Clock()
    store(api, {**stored_pod(CARD, "uid-1", **spec), "status": {"phase": phase}}, **metadata)
    watch = PodInformer(api.kube, LABELS, lambda _: None, clock.monotonic, max_terminating_seconds=100)
    watch.reflector.relist()
    assert not watch.observed("team-a", Nodes(LABELS)).vanished
    api.remove(POD)
    watch.reflector.relist()
    expected = {"uid-1": Terminating("M40", Charge(100, 0, 100), seconds)} if seconds else {}
    clock.now += (seconds or 0) - 1
    assert watch.observed("team-a", Nodes(LABELS)).vanished == expected
    clock.now += 1
    assert not watch.observed("team-a", Nodes(LABELS)).vanished


def test_a_pod_is_reported_as_vanished_before_its_event(api: ApiDouble) -> None:
    """While a deletion moves the pod's charge from committed to terminating, the pod must be counted at all times."""
    store(api, stored_pod(CARD, "uid-1", **BOUND))
    watch = PodInformer(api.kube, LABELS, lambda _: None)
    watch.reflector.relist()
    watch.reflector = cast("Reflector[KeptPod]", Empty())
    assert watch.observed("team-a", Nodes(LABELS)).vanished.keys() == {"uid-1"}


class Empty(Readable):
    """A reflector whose store has lost all its objects."""

    listed_version = "1000"

    def versioned(self, _namespace: str) -> tuple[str, list[StoredPod]]:
        return "1000", []


ENDED = {"status": {"phase": "Succeeded"}}


@cases(
    "before, after, told",
    a_new_pod=(None, {}, ["grown"]),
    only_an_annotation_changed=({}, {"metadata": {"annotations": {"a": "b"}}}, []),
    bound_to_a_node=({}, {"spec": {"nodeName": "gpu-1"}}, ["grown"]),
    the_pod_ended=({}, ENDED, ["freed"]),
    a_change_after_its_end=(ENDED, {**ENDED, "metadata": {"annotations": {"a": "b"}}}, []),
    deleted=({}, None, ["freed"]),
)
def test_only_changes_that_may_release_quota_are_reported(
    api: ApiDouble, before: dict[str, Any] | None, after: dict[str, Any] | None, told: list[str]
) -> None:
    heard: list[str] = []
    watch = PodInformer(api.kube, LABELS, lambda _: heard.append("freed"), on_growth=lambda _: heard.append("grown"))
    for state in (before, after):
        heard.clear()
        if POD in api.objects:
            api.remove(POD)
        if state is not None:
            manifest = stored_pod(CARD, "uid-1", **state.get("spec", {}))
            store(api, {**manifest, "status": state.get("status", {})}, **state.get("metadata", {}))
        watch.reflector.relist()
        if watch.pods("team-a"):
            heard.pop()  # a LIST also reports each namespace that has pods, so drop that report
    assert heard == told


def test_a_count_has_the_version_of_the_quota_by_which_models_are_known(api: ApiDouble) -> None:
    """The nodes may be read just before a new quota document. The new document may name more models."""
    pods = PodInformer(api.kube, LABELS, lambda _: None, resources=lambda: GpuResources(version="9"))
    pods.reflector.relist()
    for version, counted in (("7", "7"), ("9", "9"), ("", "9")):
        assert pods.observed("team-a", Nodes(LABELS, version=version)).config_version == counted


def test_a_pod_whose_records_are_cut_is_charged_and_reported_once(api: ApiDouble) -> None:
    huge = {"hami.io/vgpu-devices-allocated": "GPU-1,NVIDIA,1000,30:" * 10_000}
    manifest = stored_pod({"nvidia.com/gpu": 1}, "uid-1", annotations=huge)
    watch = PodInformer(api.kube, LABELS, lambda _: None)
    with structlog.testing.capture_logs() as logs:
        for version in range(3):
            store(api, manifest, labels={"version": str(version)})
            watch.reflector.relist()
    assert watch.observed("team-a", Nodes(LABELS)).committed == {"M40": Charge(100, 0, 100)}
    [line] = [line for line in logs if line["log_level"] == "warning"]
    assert "Only the beginning is checked" in line["event"]
    assert (line["namespace"], line["pod"], line["uid"]) == ("team-a", "train-0", "uid-1")
