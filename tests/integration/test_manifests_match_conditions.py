"""The condition by which the API server of 1.28 and later asks only about pods with GPUs: never too narrow."""

from __future__ import annotations

import celpy
import msgspec
import pytest
from celpy.adapter import json_to_cel
from hypothesis import given

from tests.builders import container, pod, sidecar
from tests.rendered import MANIFESTS, Json, rendered, webhooks
from tests.strategies import storable_pods
from vcuda.objects import Pod
from vcuda.requests import asks_for_vcuda
from vcuda.schemes import SCHEME_OF_RESOURCE

HOOKS = ("mutate.quota.vcuda.io", "validate.quota.vcuda.io")


@pytest.fixture(scope="module", params=HOOKS)
def condition(request: pytest.FixtureRequest) -> celpy.Runner:
    """The one condition of a webhook, compiled."""
    hook = webhooks(rendered(MANIFESTS / "overlays" / "match-conditions"))[request.param]
    [condition] = hook["matchConditions"]
    environment = celpy.Environment()
    return environment.program(environment.compile(condition["expression"]))


def asks(condition: celpy.Runner, manifest: Json) -> bool:
    """Whether the API server asks about the pod; an evaluation that fails raises CELEvalError."""
    return bool(condition.evaluate({"object": json_to_cel(manifest)}))


@pytest.mark.parametrize("part", ["limits", "requests"])
@pytest.mark.parametrize("resource", SCHEME_OF_RESOURCE)
def test_every_resource_that_is_charged_is_asked_about_wherever_it_stands(
    condition: celpy.Runner, resource: str, part: str
) -> None:
    with_it = {"name": "a", "resources": {part: {"cpu": "1", resource: "1"}}}
    without = container({"cpu": "1"})
    assert asks(condition, pod(with_it))
    assert asks(condition, pod(without, with_it))
    assert asks(condition, pod(without, init=[without, with_it]))
    assert asks(condition, pod(without, init=[{**with_it, "restartPolicy": "Always"}]))


@pytest.mark.parametrize(
    "manifest",
    [
        pod({"name": "a"}),
        pod({"name": "a", "resources": {}}),
        pod(container({"cpu": "1", "memory": "1Gi"}), init=[{"name": "b"}]),
        pod(container({"tencent.com/eni": "1", "example.com/nvidia.com": "1"}), init=[sidecar({"cpu": "1"})]),
        pod(container({"cpu": "1"}), annotations={"nvidia.com/use-gputype": "M40"}, labels={"nvidia.com/gpu": "1"}),
    ],
    ids=["no-resources", "empty-resources", "cpu", "others", "annotated"],
)
def test_no_pod_without_gpus_is_asked_about(condition: celpy.Runner, manifest: Json) -> None:
    assert not asks(condition, manifest)


@given(manifest=storable_pods())
def test_whatever_the_webhook_takes_for_a_vcuda_pod_is_asked_about(condition: celpy.Runner, manifest: Json) -> None:
    if asks_for_vcuda(msgspec.convert(manifest, Pod)):
        assert asks(condition, manifest)
