"""Tests of the webhooks' matchConditions: the API server must call a webhook for every pod that may request a GPU.

The evaluation of a condition must never fail. A CEL implementation in Python evaluates the conditions, because an API
server would be too slow for so many pods. tests/e2e/test_match_conditions.py compares both implementations.
"""

import json
from collections.abc import Mapping
from typing import Any

import celpy
import msgspec
import pytest
from celpy.adapter import json_to_cel
from hypothesis import given, strategies as st

from tests.builders import container, pod
from tests.guarded import MODEL_CHOICES
from tests.match_conditions import ASKING, ORDINARY
from tests.rendered import BASE, Json, rendered, webhooks
from tests.strategies import storable_pods
from vcuda.k8s_types import Pod
from vcuda.quota.model import Charge
from vcuda.requests.bypasses import could_reach_gpus
from vcuda.requests.pod_request import requests_gpus
from vcuda.requests.resources import BUILT_IN
from vcuda.requests.runtime_devices import DEVICE_ANNOTATIONS, GIVING_VARIABLES
from vcuda.requests.schemes import SCHEMES

pytestmark = pytest.mark.slow

HOOKS = ("mutate.quota.vcuda.io", "validate.quota.vcuda.io")
CLAIM_HOOKS = ("mutate-claims.quota.vcuda.io", "validate-claims.quota.vcuda.io")


def conditions(name: str) -> list[Json]:
    found: list[Json] = webhooks(rendered(BASE))[name]["matchConditions"]
    return found


class Condition:
    """The compiled matchCondition of a webhook."""

    def __init__(self, expression: str) -> None:
        environment = celpy.Environment()
        self._runner = environment.program(environment.compile(expression))

    def asks(self, manifest: Json) -> bool:
        """Return whether the API server calls the webhook for the pod. Raises CELEvalError if the evaluation fails."""
        return bool(self._runner.evaluate({"object": json_to_cel(manifest)}))


@pytest.fixture(scope="module")
def condition() -> Condition:
    [found] = conditions(HOOKS[0])
    return Condition(found["expression"])


@pytest.mark.parametrize("hooks", [HOOKS, CLAIM_HOOKS], ids=["pods", "claims"])
def test_both_webhooks_have_the_same_condition_and_no_other_has_one(hooks: tuple[str, str]) -> None:
    """The condition is twice in the manifest, because a YAML anchor is only valid within one document."""
    first, second = map(conditions, hooks)
    assert first == second
    with_one = {name for name, hook in webhooks(rendered(BASE)).items() if "matchConditions" in hook}
    assert with_one == {*HOOKS, *CLAIM_HOOKS}


def exactly(name: str) -> Json:
    return {"name": name, "exactly": {"deviceClassName": name, "count": 1}}


DOMAIN = exactly("compute-domain-daemon.nvidia.com")
CHANNEL = exactly("compute-domain-default-channel.nvidia.com")


@pytest.mark.parametrize(
    ("spec", "asks"),
    [
        pytest.param({}, False, id="nothing"),
        pytest.param({"devices": {}}, False, id="no requests"),
        pytest.param({"devices": {"requests": [DOMAIN, CHANNEL]}}, False, id="compute domains"),
        pytest.param({"devices": {"requests": [exactly("gpu.nvidia.com")]}}, True, id="a GPU"),
        pytest.param(
            {"devices": {"requests": [DOMAIN, exactly("rdma")]}}, True, id="another class, which may be of GPUs"
        ),
        pytest.param(
            {"devices": {"requests": [{"name": "a", "firstAvailable": [DOMAIN]}]}}, True, id="first available"
        ),
        pytest.param({"devices": {"requests": [{"name": "a", "exactly": {}}]}}, True, id="no class"),
        pytest.param({"devices": {"requests": [{"name": "a"}]}}, True, id="neither"),
        pytest.param({"devices": {"requests": [DOMAIN] * 33}}, True, id="more requests than a claim may have"),
        pytest.param({"spec": {"devices": {"requests": [DOMAIN]}}}, True, id="a template"),
    ],
)
def test_the_webhook_is_called_only_for_a_claim_that_may_be_for_a_gpu(spec: Json, asks: bool) -> None:
    [found] = conditions(CLAIM_HOOKS[0])
    assert Condition(found["expression"]).asks({"metadata": {"name": "mine"}, "spec": spec}) == asks


def test_the_webhook_is_called_for_every_device_class_that_is_counted() -> None:
    for each in (DOMAIN, CHANNEL):
        assert BUILT_IN.unit_of(f"deviceclass/{each['name']}") == Charge()


@pytest.mark.parametrize("name", [*ORDINARY, *ASKING])
def test_the_webhook_is_called_only_for_a_pod_that_may_request_a_gpu(condition: Condition, name: str) -> None:
    assert condition.asks({**ORDINARY, **ASKING}[name]) == (name in ASKING)


# Tests of the resources of pods for which the webhook is called


@pytest.mark.parametrize("part", ["limits", "requests"])
@pytest.mark.parametrize("resource", [*BUILT_IN.scheme_of, "example.com/anything", "kubernetes.io/anything"])
def test_the_webhook_is_called_for_every_resource_with_a_slash_in_any_field(
    condition: Condition, resource: str, part: str
) -> None:
    with_it = {"name": "a", "resources": {part: {"cpu": "1", resource: "1"}}}
    without = container({"cpu": "1"})
    assert condition.asks(pod(with_it))
    assert condition.asks(pod(without, with_it))
    assert condition.asks(pod(without, init=[without, with_it]))
    assert condition.asks(pod(without, init=[{**with_it, "restartPolicy": "Always"}]))
    assert condition.asks(pod(without, resources={part: {resource: "1"}}))


def without_nulls(manifest: Json) -> Json:
    """Return the pod without its null fields, as the API server sends it to webhooks."""
    shown: Json = json.loads(
        json.dumps(manifest), object_hook=lambda found: {k: v for k, v in found.items() if v is not None}
    )
    return shown


# Tests of the annotations of pods for which the webhook is called


RECORDS = {
    key + "0" * key.endswith("-")
    for scheme in SCHEMES
    for key in scheme.allocation_annotations
    if not key.startswith("tencent.com/predicate-") or key.endswith("-")
}


# The annotations tencent.com/predicate-time and predicate-node record no card without an index.
@pytest.mark.parametrize("key", sorted(MODEL_CHOICES | RECORDS))
def test_the_webhook_is_called_for_every_annotation_that_sets_an_allocation(condition: Condition, key: str) -> None:
    assert condition.asks(pod(container(), annotations={"note": "x", key: "M40"}))


# No pod is exempt


@given(
    manifest=storable_pods(),
    annotations=st.dictionaries(st.text(max_size=20), st.text(max_size=5), max_size=4),
    labels=st.dictionaries(st.text(max_size=20), st.text(max_size=5), max_size=4),
)
def test_no_label_or_annotation_exempts_a_pod_that_the_webhook_counts_as_a_vcuda_pod(
    condition: Condition, manifest: Json, annotations: Mapping[str, str], labels: Mapping[str, str]
) -> None:
    assert requests_gpus(msgspec.convert(manifest, Pod))
    assert condition.asks(without_nulls(manifest))
    metadata = {**manifest["metadata"], "annotations": annotations, "labels": labels}
    assert condition.asks(without_nulls({**manifest, "metadata": metadata}))


# Tests of pods of unusual size, for which the webhook is called


PAGES = {f"hugepages-{number}Mi": "0" for number in range(51)}


@pytest.mark.parametrize(
    "manifest",
    [
        pytest.param(pod(container(), annotations={f"a{number}": "" for number in range(201)}), id="annotations"),
        pytest.param(pod(*[container()] * 51), id="containers"),
        pytest.param(pod(container(), init=[container()] * 51), id="init containers"),
        pytest.param(pod(container(env=[{"name": "A"}] * 301)), id="variables"),
        pytest.param(pod(container(PAGES)), id="resources"),
        pytest.param(pod(container(), resources={"requests": PAGES}), id="resources of the pod"),
    ],
)
def test_the_webhook_is_called_for_a_pod_of_unusual_size(condition: Condition, manifest: Json) -> None:
    assert condition.asks(manifest)


# Tests that the API server can evaluate the match conditions for every pod, without an error


def optional(**parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Json]:
    return st.fixed_dictionaries({}, optional=parts)


def resources() -> st.SearchStrategy[Json]:
    quantities = st.dictionaries(st.sampled_from(["cpu", "memory", "nvidia.com/gpu", "/", ""]), st.just("1"))
    return optional(limits=quantities, requests=quantities, claims=st.just([]))


def on_windows() -> st.SearchStrategy[Json]:
    return optional(hostProcess=st.booleans(), runAsUserName=st.just("a"))


def containers() -> st.SearchStrategy[list[Json]]:
    """Containers with any of the fields that the matchCondition reads. Any field may be empty."""
    names = ["", "A", "CUDA_VISIBLE_DEVICES", *sorted(GIVING_VARIABLES)]
    variables = st.lists(st.fixed_dictionaries({"name": st.sampled_from(names)}), max_size=2)
    context = optional(privileged=st.booleans(), runAsUser=st.just(0), windowsOptions=on_windows())
    return st.lists(optional(resources=resources(), env=variables, securityContext=context), max_size=3)


def odd_pods() -> st.SearchStrategy[Json]:
    """Pods as the API server sends them to webhooks: without null fields, except for the list of containers."""
    spec = st.fixed_dictionaries(
        {"containers": st.none() | containers()},
        optional={
            "initContainers": containers(),
            "ephemeralContainers": containers(),
            "securityContext": optional(windowsOptions=on_windows()),
            "resources": resources(),
            "resourceClaims": st.sampled_from([[], [{"name": "gpu"}]]),
            "runtimeClassName": st.sampled_from(["", "nvidia"]),
        },
    )
    keys = st.sampled_from(["", "note", "gpu-fraction", "GPU-Memory", *DEVICE_ANNOTATIONS, "devices.gke.io/pod"])
    annotations = st.dictionaries(keys, st.sampled_from(["", "1"]))
    metadata = optional(annotations=annotations, labels=st.just({}), creationTimestamp=st.none())
    return st.fixed_dictionaries({"metadata": metadata, "spec": spec})


@given(manifest=odd_pods())
def test_no_evaluation_fails_and_the_webhook_is_called_for_every_pod_that_could_reach_gpus(
    condition: Condition, manifest: Json
) -> None:
    """The API server sends no null fields, except that a list of containers may be null."""
    asks = condition.asks(manifest)
    assert asks or not could_reach_gpus(msgspec.convert(manifest, Pod))


@pytest.mark.parametrize("name", sorted(GIVING_VARIABLES))
def test_the_webhook_is_called_for_every_variable_that_can_give_a_device(condition: Condition, name: str) -> None:
    variables: Json = {"env": [{"name": "A"}, {"name": name, "value": "all"}]}
    assert condition.asks(pod(container(), container(**variables)))
    assert condition.asks(pod(container(), init=[container(**variables)]))
