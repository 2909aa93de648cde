"""Messages in docs/reference.md: about the version of Kubernetes, in some Events, and of `kubectl gpuquota`."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import msgspec
import structlog
from click.testing import CliRunner
from prometheus_client import CollectorRegistry

from controller.extender.strategy import UNSEEN, assign, bin_pack
from controller.garbage.stale_gc import PatchRemover, StaleObject
from controller.metrics import GarbageMetrics
from controller.plugin import cli as plugin
from controller.plugin.explain import PROBE
from controller.plugin.kubectl import Kubectl
from controller.violations.violation_watcher import NOT_COUNTED_MESSAGE
from controller.violations.violations import CLAIM_NOT_COUNTED_MESSAGE
from examples.allocations import allocated_pod
from examples.claims import claim, template
from tools.reference.examples import LABELS, ExampleServer, Manifest, container, pod as pod_of
from tools.reference.told import Chapter, Told
from vcuda.allocations.cards import CardRequest, Cards, ContainerRequest, Unplaceable, read_capacity, read_card_request
from vcuda.allocations.given_cards import OtherCard
from vcuda.allocations.stale import Removal, find_stale, find_stale_lock, read_locks
from vcuda.allocations.stored_pods import read_stored
from vcuda.claims.names import API_PATH
from vcuda.errors import NotFound, Unavailable, UnsupportedVersion
from vcuda.k8s_types import Node, Pod
from vcuda.kube import Heard, InvolvedObject, QuotaInformer, QuotaSource
from vcuda.kube.connection import check_version
from vcuda.quota.well_known import USAGE_KEY, USAGE_NAME
from vcuda.requests.schemes import GPU_MANAGER, HAMI, NVIDIA_VCUDA

ALLOCATED = 1_700_000_000.0
TIMEOUT = 300.0


def chapters() -> tuple[Chapter, ...]:
    stale = (
        "You need not do anything. By one of its rules, the controller removed a stale allocation from a pod or a stale"
        " lock from a node. `vcuda_gc_annotations_total` counts the removals by rule."
    )
    return (
        Chapter(
            "The version of Kubernetes",
            "Every program of vcuda quota checks the version of the API server before its first other request.",
            tuple(_version()),
        ),
        Chapter(
            "Not placed by the extender",
            "If the scheduler extender (`--extender-address`) cannot place a pod, the pod's Event"
            " `FailedScheduling` has one of these reasons for each node.",
            tuple(_unplaced()),
        ),
        Chapter(
            "The Event MalformedQuota", "The Event `MalformedQuota` is on the quota ConfigMap.", tuple(_malformed())
        ),
        Chapter(
            "The Event NotCounted",
            "The Event is on the pod or on the claim.",
            (
                Told(NOT_COUNTED_MESSAGE.format("team-a"), "Delete the pod, and create it again."),
                Told(
                    CLAIM_NOT_COUNTED_MESSAGE.format("team-a"),
                    "Delete the claim, or the pod that uses it, and create it again.",
                ),
            ),
        ),
        Chapter(
            "The Event OtherModelAllocated",
            "The Event `OtherModelAllocated` is on the pod or on the claim. In an Event on a claim,"
            " the message has the name of the device, and it ends with `; the claim is charged for both models`.",
            (
                Told(
                    str(OtherCard("A10", "gpu-1", "GPU-0055", "NVIDIA A100-SXM4-40GB", ("A100",))),
                    "Use separate nodes for each type of card, or find out who changed the"
                    " annotations of the pod. Then delete the pod, and create it again.",
                ),
            ),
        ),
        Chapter(
            "The Event StaleAllocationRemoved",
            stale,
            tuple(Told(message, f"Rule `{rule}`.") for rule, message in _removed()),
        ),
        Chapter(
            "kubectl gpuquota",
            (
                "`kubectl gpuquota` prints these messages after `Error:`, as the reason in the output of"
                " `kubectl gpuquota explain`, or alone."
            ),
            tuple(_plugin()),
        ),
    )


def removal_rules() -> dict[str, str]:
    """Return the name of each rule that removes stale GPU allocations and node locks, with an example of the reason."""
    return {removal.rule: f"for example: {removal.why}" for removal in (*_of_pods(), *_of_nodes())}


def _version() -> Iterator[Told]:
    server = "https://10.96.0.1:443"
    try:
        check_version(b'{"gitVersion": "v1.29.4"}', server)
    except UnsupportedVersion as error:
        yield Told(str(error), "Upgrade Kubernetes. The program has changed nothing, and has exited with status 1.")
    warning = check_version(b'{"gitVersion": "our own build"}', server)
    yield Told(
        warning,
        "This message is a warning: the program continues. Check with `kubectl version` that the version"
        " of Kubernetes is supported.",
    )


def _unplaced() -> Iterator[Told]:
    cards = Cards.unused(GPU_MANAGER, 2, 64)
    half = CardRequest(GPU_MANAGER, (ContainerRequest(0, 50, 1),))
    wait = "Wait until pods on the node end. The scheduler retries by itself."
    pod = "Correct the pod's request: no node can run the pod."
    node = "Check the device plugin on the node: gpu-manager's device plugin reports another kind of capacity."
    yield Told(_why(assign(cards, [ContainerRequest(0, 300, 0)])), f"{wait} Or ask for no more cards than a node has.")
    yield Told(_why(assign(cards, [ContainerRequest(0, 50, 60000)])), pod)
    yield Told(_why(assign(cards, [ContainerRequest(number, 60, 256) for number in range(3)])), wait)
    yield Told(UNSEEN.text, "You need not do anything, because the node is new.")
    others = bin_pack(half, ["one"], {"one": Cards.unused(NVIDIA_VCUDA, 1, 64)})
    yield Told(_why(others), "You need not do anything, because the node has cards of another scheme.")
    core, memory, other = GPU_MANAGER.cores, GPU_MANAGER.memory, NVIDIA_VCUDA.cores
    yield Told(_why(read_capacity({})), "You need not do anything, because the node has no cards.")
    for capacity in ({core: "100", other: "100"}, {core: "50", memory: "1"}, {core: "100"}):
        yield Told(_why(read_capacity(capacity)), node)
    for spec in (
        {"initContainers": [_asking({core: 100})]},
        {"containers": [_asking({core: 100}), _asking({other: 100})]},
        {"containers": [_asking({core: 150})]},
    ):
        yield Told(_why(read_card_request(msgspec.convert({"spec": spec}, Pod))), pod)


def _asking(limits: Mapping[str, int]) -> Manifest:
    return {"name": "main", "resources": {"limits": limits}}


def _why(found: object) -> str:
    """Return why the scheduler extender left out a node. ``found``: the reason, or a mapping from nodes to reasons."""
    reason = next(iter(found.values())) if isinstance(found, Mapping) else found
    if not isinstance(reason, Unplaceable):
        raise AssertionError(f"{found} must be a reason")  # noqa: TRY004  # The example did not lead to a reason.
    return reason.text


def _malformed() -> Iterator[Told]:
    correct, place = "Correct the document.", QuotaSource()
    good, bad = "team-a: {quota: {M40: 8}}", "team-a: {quota: {M40: -8}}"
    yield Told(_event_about({place.key: bad}), correct)
    yield Told(_event_about({place.key: good}, {place.key: bad}), correct)
    yield Told(_event_about({"quota": "{}"}), "Move the quota document to the key `gpu_quota`.")


def _event_about(*documents: Mapping[str, str]) -> str:
    """Return the message of the Event that results if the quota ConfigMap's data is each of ``documents`` in turn."""
    server, place = ExampleServer(), QuotaSource()
    watch = QuotaInformer(server.kube, place, frozenset())
    with structlog.testing.capture_logs():
        for version, data in enumerate(documents, 101):
            metadata = {"name": place.name, "namespace": place.namespace, "resourceVersion": str(version)}
            path = f"/api/v1/namespaces/{place.namespace}/configmaps/{place.name}"
            server.objects[path] = {"metadata": metadata, "data": dict(data)}
            watch.reflector.relist()
    [message] = server.events
    return message


def _removed() -> Iterator[tuple[str, str]]:
    """Yield each rule that removes stale GPU allocations, and the message of the Event that reports its removals."""
    for removal in (*_of_pods(), *_of_nodes()):
        server = ExampleServer()
        subject = InvolvedObject("v1", "Pod", "train-0", "team-a", "uid-1", "101")
        found = StaleObject(subject, "/api/v1/namespaces/team-a/pods/train-0", (removal,))
        with structlog.testing.capture_logs():
            PatchRemover(server.kube, GarbageMetrics(CollectorRegistry())).remove(found)
        [message] = server.events
        yield removal.rule, message


def _of_pods() -> Iterator[Removal]:
    allocated = functools.partial(allocated_pod, GPU_MANAGER, ALLOCATED)
    binding = allocated_pod(HAMI, ALLOCATED, phase="allocating")
    cases: list[tuple[dict[str, Any], bool]] = [
        (allocated(status="Succeeded"), True),
        (allocated(), False),
        (allocated(bound="gpu-2"), True),
        (binding, True),
        (allocated(), True),
    ]
    for manifest, exists in cases:
        stored = read_stored(msgspec.convert(manifest, Pod), LABELS, whole_keys=True)
        if stored is None:
            raise AssertionError("every example pod must request a GPU")
        yield from find_stale(stored, {"gpu-1": exists}.__getitem__, ALLOCATED + 2 * TIMEOUT, TIMEOUT)


def _of_nodes() -> Iterator[Removal]:
    value = "2023-11-14T22:13:20Z,team-a,train-0"
    node = msgspec.convert({"metadata": {"name": "gpu-1", "annotations": {"hami.io/mutex.lock": value}}}, Node)
    for lock in read_locks(node):
        for now in (ALLOCATED + 2 * TIMEOUT, ALLOCATED):
            removal = find_stale_lock(lock, ALLOCATED + TIMEOUT, now, lambda *_: False)
            yield from filter(None, [removal])


class _Cluster(ExampleServer):
    """A test double of a cluster whose webhooks admit every pod unchanged.

    ``fault``: the error of HAMi-DRA's webhook; empty if this webhook is not installed.
    """

    fault = ""

    def post_heard(self, path: str, body: bytes, params: object) -> Heard:
        """Answer a dry run. Raises Unavailable if ``fault`` is set and the object has the invalid name `PROBE`."""
        if self.fault and PROBE.encode() in body:
            raise Unavailable(self.fault)
        if "/apis/" in path and not self.objects:
            raise NotFound(404, "the server could not find the requested resource")
        return super().post_heard(path, body, params)


def _plugin() -> Iterator[Told]:
    path = f"/api/v1/namespaces/team-a/configmaps/{USAGE_NAME}"
    none = (
        "There is no usage report: the namespace has no limit, the controller is down, or the controller has not"
        " published the report yet."
    )
    yield Told(_said(_Cluster()), none)
    damaged = _Cluster({path: {"metadata": {"name": USAGE_NAME, "namespace": "team-a"}, "data": {USAGE_KEY: "{"}}})
    with mock.patch.dict(os.environ, PATH=""):
        yield Told(
            CliRunner().invoke(plugin.main, ["-A"]).output.strip().removeprefix("Error: "),
            "Install kubectl, or add its directory to PATH.",
        )
    yield Told(
        _said(damaged),
        "Somebody has edited the usage report. Delete the ConfigMap `gpu-quota-usage`. The controller"
        " then publishes the report again.",
    )
    yield Told(
        _said(_Cluster(), "-n", "Team-A"),
        (
            "Correct the namespace: in `-n`, in the context of the kubeconfig, or in the manifest that the"
            " message names."
        ),
    )
    pod = json.dumps(pod_of(container()))
    table = _said(_Cluster(), "explain", "-f", "-", stdin=pod)
    yield Told(
        table.splitlines()[-1].split(maxsplit=3)[-1],
        "No quota applies to the pod: the namespace has no limit, or the pod requests no GPU.",
    )
    yield from _not_admitted(pod)
    nothing = _said(_Cluster(), "explain", "-f", "-", stdin="kind: Service")
    yield Told(
        nothing.splitlines()[-1],
        "Pass a manifest of an object that creates pods. For a custom resource, pass the pods that"
        " its controller would create. `vcuda-webhook check` prints the same message.",
    )


def _not_admitted(pod: str) -> Iterator[Told]:
    """Yield the reasons in the output of `kubectl gpuquota explain` that do not come from our webhook."""
    offline = "Use `vcuda-webhook check` with the quota and the objects of the cluster, as its `--help` shows."
    with_hami_dra = _Cluster()
    with_hami_dra.fault = 'admission webhook "mutate.hami.io" denied the request'
    long_name = json.dumps(pod_of(container(), metadata={"namespace": "n" * 51}))
    named = {"name": "gpu", "resourceClaimTemplateName": "one"}
    claiming = json.dumps({**json.loads(pod), "spec": {"resourceClaims": [named], "containers": []}})
    for cluster, manifest, todo in (
        (with_hami_dra, pod, offline),
        (with_hami_dra, long_name, offline),
        (
            _Cluster(),
            json.dumps(claim()),
            "Use a cluster that serves ResourceClaims: in this cluster, nobody can create claims.",
        ),
    ):
        yield Told(_reasons(cluster, manifest)[-1], todo)
    served = _Cluster({API_PATH: {}})
    yield Told(
        _reasons(served, json.dumps(template()))[-1],
        "A template alone is not charged. Explain a claim, or a pod that names the template.",
    )
    of_pod, of_claim = _reasons(served, claiming)
    yield Told(of_pod, "See the rows below this row: they list the claims that are created from templates for the pod.")
    yield Told(of_claim, "Pass the template too, with `-f`, or ask for the right to read the template in the cluster.")


def _reasons(cluster: _Cluster, manifest: str) -> list[str]:
    return [row["reason"] for row in json.loads(_said(cluster, "explain", "-f", "-", "-o", "json", stdin=manifest))]


def _said(cluster: _Cluster, *arguments: str, stdin: str = "") -> str:
    """Return the output of `kubectl gpuquota -n team-a` with ``arguments``."""
    with mock.patch.object(Kubectl, "find", return_value=cluster):
        said = CliRunner().invoke(plugin.main, ["-n", "team-a", *arguments], input=stdin)
    return said.output.strip().removeprefix("Error: ")
