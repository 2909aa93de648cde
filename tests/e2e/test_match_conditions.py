"""Tests of the matchConditions, by which a real API server decides for which pods it calls the webhooks.

The tests register the webhooks of manifests/base, as `kubectl kustomize` renders them, with two changes: their URL is
that of a server that records each call, and they are only called for the namespace of the test. Some tests use
conditions that always fail.
"""

import base64
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from http import HTTPStatus

import pytest

from tests.builders import container, pod
from tests.e2e.cluster import Cluster, Json
from tests.e2e.dra import claim, request, require_dra, template
from tests.e2e.installation import make_certificates
from tests.e2e.json_server import answering, ca_bundle, reviewed
from tests.match_conditions import ASKING, ORDINARY, PLAIN, RUNTIME_CLASS
from tests.rendered import BASE, rendered, webhooks
from vcuda.registration import BINDING, MUTATING, POLICY, VALIDATING, find_missing

MUTATE, VALIDATE = "/mutate", "/validate"
FAILING = "object.spec.nosuch == 'a field that no pod has'"
LABEL, APART = "e2e.vcuda.io/match-conditions", "e2e.vcuda.io/own-match-conditions"


@dataclass
class Recorder:
    """A webhook that records the request of each review.

    ``patches``: the JSON Patches that it returns, by path. At other paths it returns none.
    """

    ca_bundle: str
    url: str = ""
    patches: dict[str, list[Json]] = field(default_factory=dict)
    _asked: list[tuple[str, Json]] = field(default_factory=list)

    def take(self) -> list[tuple[str, Json]]:
        asked, self._asked = self._asked, []
        return asked

    def answer(self, path: str, review: Json) -> Json:
        self._asked.append((path, review["request"]))
        if path not in self.patches:
            return reviewed(review)
        patch = base64.b64encode(json.dumps(self.patches[path]).encode()).decode()
        return reviewed(review, patchType="JSONPatch", patch=patch)


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorder]:
    certificates = tmp_path_factory.mktemp("recorder")
    make_certificates(certificates)
    recorder = Recorder(ca_bundle(certificates))
    with answering(recorder.answer, certificates) as recorder.url:
        yield recorder


@pytest.fixture
def asked(recorder: Recorder) -> Recorder:
    recorder.take()
    recorder.patches.clear()
    return recorder


def hook(recorder: Recorder, name: str, label: str = LABEL) -> Json:
    """Return this webhook of manifests/base, but with the recorder's URL, and only for namespaces with this label."""
    found = webhooks(rendered(BASE))[f"{name}.quota.vcuda.io"]
    return {
        **found,
        "clientConfig": {"url": f"{recorder.url}/{name}", "caBundle": recorder.ca_bundle},
        "namespaceSelector": {"matchLabels": {label: "true"}},
    }


@pytest.fixture(scope="module")
def registered(cluster: Cluster, recorder: Recorder) -> Iterator[None]:
    with cluster.register_webhooks(mutating=[hook(recorder, "mutate")], validating=[hook(recorder, "validate")]):
        yield


@pytest.fixture
def watched(cluster: Cluster) -> Iterator[str]:
    with cluster.fresh_namespace({LABEL: "true"}) as name:
        yield name


@pytest.fixture
def apart(cluster: Cluster) -> Iterator[str]:
    with cluster.fresh_namespace({APART: "true"}) as name:
        yield name


@pytest.fixture(scope="module")
def runtime_class(cluster: Cluster) -> Iterator[None]:
    """Create the RuntimeClass that the pod names. The API server rejects a pod whose RuntimeClass is missing."""
    metadata = {"name": RUNTIME_CLASS}
    manifest = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": metadata, "handler": RUNTIME_CLASS}
    cluster.create(manifest)
    yield
    cluster.rest.send("DELETE", f"/apis/node.k8s.io/v1/runtimeclasses/{RUNTIME_CLASS}").ok()


def in_namespace(manifest: Json, namespace: str, name: str = "train-0") -> Json:
    return {**manifest, "metadata": {**manifest["metadata"], "namespace": namespace, "name": name}}


def calls(recorder: Recorder) -> list[str]:
    return [path for path, _ in recorder.take()]


# Tests of the pods and claims for which the API server calls the webhooks


@pytest.mark.usefixtures("registered")
def test_ordinary_pods_cause_no_call_of_the_webhook(cluster: Cluster, asked: Recorder, watched: str) -> None:
    pods = [in_namespace(each, watched, f"p-{number}") for number, each in enumerate(ORDINARY.values())]
    listed = {"apiVersion": "v1", "kind": "List", "items": pods}
    # Kubernetes 1.30 does not know the field `resources` of a pod's spec, so kubectl must not validate these pods.
    cluster.kubectl("create", "--validate=ignore", "-f", "-", stdin=json.dumps(listed))
    assert {each["metadata"]["name"] for each in cluster.pods(watched)} == {each["metadata"]["name"] for each in pods}
    assert calls(asked) == []
    cluster.create(in_namespace(ASKING["a container"], watched))
    assert calls(asked) == [MUTATE, VALIDATE], "the recorder counts"


@pytest.mark.usefixtures("registered", "runtime_class")
@pytest.mark.parametrize("manifest", ASKING.values(), ids=ASKING)
def test_a_pod_that_may_request_a_gpu_causes_one_call_to_each_webhook(
    cluster: Cluster, asked: Recorder, watched: str, manifest: Json
) -> None:
    """An API server that serves no claims removes a pod's claims after /mutate, and then does not call /validate."""
    stored = cluster.create(in_namespace(manifest, watched))
    dropped = "resourceClaims" in manifest["spec"] and "resourceClaims" not in stored["spec"]
    assert calls(asked) == ([MUTATE] if dropped else [MUTATE, VALIDATE])


def test_only_a_claim_that_may_be_for_a_gpu_causes_a_call(cluster: Cluster, asked: Recorder, apart: str) -> None:
    """A claim without requests is stored with `requests: null`. The evaluation of the condition must not fail then."""
    require_dra(cluster)
    hooks = {name: [hook(asked, f"{name}-claims", APART)] for name in ("mutate", "validate")}
    domain = request("compute-domain-daemon.nvidia.com")
    with cluster.register_webhooks(mutating=hooks["mutate"], validating=hooks["validate"]):
        cluster.create({**claim(apart, "none"), "spec": {}})
        cluster.create(claim(apart, "domains", domain))
        cluster.create(claim(apart, "rdma", domain, request("rdma", "other")))
        cluster.create(template(apart, "domains", domain))
    told = [(path, each["object"]["metadata"]["name"]) for path, each in asked.take()]
    assert told == [("/mutate-claims", "rdma"), ("/validate-claims", "rdma"), ("/validate-claims", "domains")]


REJECTED: dict[str, tuple[Json, str]] = {
    "a resource in requests alone": (
        pod(container(resources={"requests": {"nvidia.com/gpu": "1"}})),
        "Limit must be set for non overcommitable resources",
    ),
    "ephemeral containers": (pod(PLAIN, ephemeralContainers=[container(name="debug")]), "cannot be set on create"),
}
"""Pods that the API server itself rejects, so that the matchCondition need not match them."""


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(("manifest", "message"), REJECTED.values(), ids=REJECTED)
def test_the_api_server_itself_rejects_pods_that_the_condition_ignores(
    cluster: Cluster, asked: Recorder, watched: str, manifest: Json, message: str
) -> None:
    rejected = cluster.try_create(in_namespace(manifest, watched))
    assert (rejected.status, message in rejected.message) == (HTTPStatus.UNPROCESSABLE_ENTITY, True), rejected.message
    assert VALIDATE not in calls(asked)


def test_a_request_that_a_later_webhook_adds_bypasses_mutate_but_not_validate(
    cluster: Cluster, asked: Recorder, apart: str
) -> None:
    """The API server evaluates /validate's condition after the patches of all webhooks.

    /validate rejects a pod that is not pinned, so no pod is admitted uncharged.
    """
    asked.patches["/vendor"] = [
        {"op": "add", "path": "/spec/containers/0/resources/limits/nvidia.com~1gpu", "value": "1"},
        {"op": "add", "path": "/spec/containers/0/resources/requests/nvidia.com~1gpu", "value": "1"},
    ]
    ours = hook(asked, "mutate", APART)
    called = {**ours["clientConfig"], "url": f"{asked.url}/vendor"}
    vendor = {**ours, "name": "vendor.e2e.vcuda.io", "clientConfig": called, "matchConditions": []}
    ordinary = pod(container(resources={"limits": {"cpu": "1"}, "requests": {"cpu": "1"}}), labels={"queue": "gold"})
    with cluster.register_webhooks(mutating=[ours, vendor], validating=[hook(asked, "validate", APART)]):
        cluster.create(in_namespace(ordinary, apart))
    [(first, _), (second, request)] = asked.take()
    assert (first, second) == ("/vendor", VALIDATE)
    assert request["object"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"


# Pods of the maximum size


VARIABLES = [{"name": "NVIDIA_MI_CUDA_VISIBLE_DEVICE", "value": ""}] * 300
"""Environment variables whose names begin like a name that the matchCondition searches for. So it compares each whole
name.
"""

NOT_PRIVILEGED: Json = {"securityContext": {"privileged": False, "windowsOptions": {"hostProcess": False}}}

LARGEST = pod(
    *[container(name=f"c{n}", env=VARIABLES, **NOT_PRIVILEGED) for n in range(50)],
    init=[container(name=f"i{n}", env=VARIABLES, **NOT_PRIVILEGED) for n in range(50)],
    annotations={f"{n:0>250}/{n:0>63}": "" for n in range(200)},
)
"""The pod whose matchCondition is the most expensive to evaluate.

Each of its lists has the maximum length that the condition searches.
"""


@pytest.mark.usefixtures("registered")
def test_the_largest_pod_that_is_searched_costs_less_than_the_api_server_allows(
    cluster: Cluster, asked: Recorder, watched: str
) -> None:
    """An evaluation beyond the API server's budget fails. The failurePolicy of /validate would then reject the pod."""
    created = cluster.try_create(in_namespace(LARGEST, watched), dryRun="All")
    assert created.status == HTTPStatus.CREATED, created.message
    assert calls(asked) == []


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    "manifest",
    [
        pytest.param(pod(container(env=[{"name": "A", "value": ""}] * 50_000)), id="variables"),
        pytest.param(pod(*[container(name=f"c{number}") for number in range(2_000)]), id="containers"),
        pytest.param(pod(PLAIN, annotations={f"a{number}": "" for number in range(20_000)}), id="annotations"),
    ],
)
def test_the_webhook_is_called_for_every_pod_that_is_too_large_to_be_searched(
    cluster: Cluster, asked: Recorder, watched: str, manifest: Json
) -> None:
    created = cluster.try_create(in_namespace(manifest, watched), dryRun="All")
    assert created.status == HTTPStatus.CREATED, created.message
    assert calls(asked) == [MUTATE, VALIDATE]


# Conditions that fail


def with_failing(cluster: Cluster, recorder: Recorder, name: str) -> AbstractContextManager[None]:
    """Register both webhooks during the ``with`` statement. The matchCondition of webhook ``name`` always fails."""
    hooks = {each: hook(recorder, each, APART) for each in ("mutate", "validate")}
    hooks[name]["matchConditions"] = [{"name": "failing", "expression": FAILING}]
    return cluster.register_webhooks(mutating=[hooks["mutate"]], validating=[hooks["validate"]])


def test_a_failing_condition_of_mutate_leaves_the_pod_to_validate(
    cluster: Cluster, asked: Recorder, apart: str
) -> None:
    """By its failurePolicy Ignore, /mutate is not called then. /validate would reject a pod that is not pinned."""
    with with_failing(cluster, asked, "mutate"):
        cluster.create(in_namespace(ASKING["a container"], apart))
    assert calls(asked) == [VALIDATE]


def test_a_failing_condition_of_validate_rejects_every_pod(cluster: Cluster, asked: Recorder, apart: str) -> None:
    with with_failing(cluster, asked, "validate"):
        rejected = cluster.try_create(in_namespace(ORDINARY["cpu and memory"], apart))
    assert (rejected.status, rejected.body["reason"]) == (HTTPStatus.FORBIDDEN, "Forbidden")
    assert f"expression '{FAILING}' resulted in error: no such key: nosuch" in rejected.message
    assert calls(asked) == []
    assert cluster.pods(apart) == []


def test_each_policy_of_the_manifests_is_stored_as_it_is_declared(cluster: Cluster) -> None:
    """The API server adds default values. A dry run returns the policy as the API server would store it."""
    stored: dict[tuple[str, str], Json] = {}
    for manifest in (each for each in rendered(BASE) if each["kind"] in (POLICY, BINDING)):
        name = manifest["metadata"]["name"]
        answer = cluster.try_create({**manifest, "metadata": {"name": f"dry.{name}"}}, dryRun="All")
        assert answer.status == HTTPStatus.CREATED, answer.message
        stored[manifest["kind"], name] = {**answer.body, "metadata": {"name": name}}
    webhooks_of = (MUTATING, VALIDATING)
    assert [each for each in find_missing(lambda *of: stored.get(of)) if each.kind not in webhooks_of] == []
