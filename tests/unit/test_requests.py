"""What a pod is charged, for every way to ask and every shape of pod."""

from __future__ import annotations

from typing import Any

import pytest

from tests.builders import Manifest, container, pod, sidecar, vcuda_pod, view
from vcuda.quota.model import Charge
from vcuda.requests.pod_request import asks_for_vcuda, read_request
from vcuda.requests.schemes import GPU_MANAGER, HAMI, NVIDIA_VCUDA, SCHEMES, VGPU_MANAGER, Scheme


def charge_of(manifest: Manifest) -> Charge:
    """Return the charge of a pod that has nothing wrong with it."""
    request = read_request(view(manifest))
    assert request.faults == ()
    return request.charge


def gpu_manager(cores: int, blocks: int = 0) -> dict[str, int]:
    """Ask gpu-manager for cores and for blocks of 256 MiB."""
    memory = {"tencent.com/vcuda-memory": blocks} if blocks else {}
    return {"tencent.com/vcuda-core": cores, **memory}


# One container


@pytest.mark.parametrize(
    ("limits", "charge"),
    [
        pytest.param({"tencent.com/vcuda-core": 20, "tencent.com/vcuda-memory": 4}, Charge(20, 1024), id="blocks"),
        pytest.param({"tencent.com/vcuda-core": 99, "tencent.com/vcuda-memory": 1}, Charge(99, 256), id="most"),
        pytest.param({"tencent.com/vcuda-core": 1, "tencent.com/vcuda-memory": 1}, Charge(1, 256), id="least"),
        pytest.param({"tencent.com/vcuda-core": 100}, Charge(100, 0, 100), id="one exclusive card"),
        pytest.param({"tencent.com/vcuda-core": 800}, Charge(800, 0, 800), id="exclusive cards"),
        pytest.param(
            {"tencent.com/vcuda-core": 100, "tencent.com/vcuda-memory": 1}, Charge(100, 0, 100), id="all of its memory"
        ),
        pytest.param({"tencent.com/vcuda-core": "2e2"}, Charge(200, 0, 200), id="a quantity with an exponent"),
        pytest.param({"nvidia.com/vcuda-core": 20, "nvidia.com/vcuda-memory": 1000}, Charge(20, 1000), id="MiB"),
        pytest.param({"nvidia.com/vcuda-core": 300}, Charge(300, 0, 300), id="exclusive cards of the nvidia fork"),
    ],
)
def test_cores_and_memory_of_the_pod(limits: dict[str, Any], charge: Charge) -> None:
    assert charge_of(vcuda_pod(limits)) == charge


@pytest.mark.parametrize(
    ("cores", "memory", "count"),
    [
        pytest.param("nvidia.com/gpucores", "nvidia.com/gpumem", "nvidia.com/gpu", id="hami"),
        pytest.param("nvidia.com/vgpu-cores", "nvidia.com/vgpu-memory", "nvidia.com/vgpu-number", id="vgpu-manager"),
    ],
)
@pytest.mark.parametrize(
    ("asked", "charge"),
    [
        pytest.param({"count": 1}, Charge(100, 0, 100), id="a count alone is whole cards"),
        pytest.param({"count": 8}, Charge(800, 0, 800), id="a count of several"),
        pytest.param({"count": 2, "memory": 1000}, Charge(200, 2000), id="without cores each is a whole card"),
        pytest.param({"count": 2, "cores": 0, "memory": 1000}, Charge(200, 2000), id="no cores are a whole card"),
        pytest.param({"count": 2, "cores": 30, "memory": 1000}, Charge(60, 2000), id="both are per vGPU"),
        pytest.param({"cores": 30, "memory": 1000}, Charge(30, 1000), id="without a count one is meant"),
        pytest.param({"count": 0, "cores": 30, "memory": 1000}, Charge(30, 1000), id="a count of none counts as one"),
        pytest.param({"memory": 1000}, Charge(100, 1000), id="memory alone is on a whole card"),
        pytest.param({"count": 2, "cores": 100}, Charge(200, 0, 200), id="all cores are exclusive cards"),
        pytest.param({"count": 2, "cores": 100, "memory": 9}, Charge(200, 0, 200), id="exclusive, so all its memory"),
    ],
)
def test_cores_and_memory_of_each_vgpu(
    cores: str, memory: str, count: str, asked: dict[str, int], charge: Charge
) -> None:
    names = {"count": count, "cores": cores, "memory": memory}
    assert charge_of(vcuda_pod({names[key]: amount for key, amount in asked.items()})) == charge


@pytest.mark.parametrize(
    ("asked", "charge"),
    [
        pytest.param({"gpumem-percentage": 50}, Charge(100, 0, 50), id="half the memory of a whole card"),
        pytest.param({"gpu": 4, "gpumem-percentage": 25}, Charge(400, 0, 100), id="per vGPU"),
        pytest.param({"gpu": 1, "gpucores": 10, "gpumem-percentage": 30}, Charge(10, 0, 30), id="on a share"),
        pytest.param({"gpu": 1, "gpucores": 100, "gpumem-percentage": 30}, Charge(100, 0, 100), id="exclusive"),
        pytest.param({"gpu": 2, "gpumem": 500, "gpumem-percentage": 30}, Charge(200, 1000), id="MiB come first"),
        pytest.param({"gpu": 1, "gpumem": 0, "gpumem-percentage": 0}, Charge(100, 0, 100), id="none said is all"),
    ],
)
def test_memory_in_percent(asked: dict[str, int], charge: Charge) -> None:
    """HAMi's percentage counts as that share of a card's memory, whatever a card has."""
    assert charge_of(vcuda_pod({f"nvidia.com/{name}": amount for name, amount in asked.items()})) == charge


def test_requests_stand_in_for_limits_that_are_left_out() -> None:
    resources = {"requests": {"tencent.com/vcuda-core": 20}, "limits": {"tencent.com/vcuda-memory": 2}}
    assert charge_of(pod(container(resources=resources))) == Charge(20, 512)


def test_limits_come_before_requests() -> None:
    resources = {"requests": {"tencent.com/vcuda-core": 100}, "limits": {"tencent.com/vcuda-core": 300}}
    assert charge_of(pod(container(resources=resources))) == Charge(300, 0, 300)


def test_requests_alone() -> None:
    assert charge_of(pod(container(resources={"requests": {"nvidia.com/gpu": "2"}}))) == Charge(200, 0, 200)


# Many containers: max(containers and sidecars, largest init container beside the sidecars before it), as KEP-753 counts

SMALL, LARGE = container(gpu_manager(10, 1)), container(gpu_manager(30, 4))


@pytest.mark.parametrize(
    ("manifest", "charge"),
    [
        pytest.param(pod(SMALL, LARGE), Charge(40, 5 * 256), id="containers add up"),
        pytest.param(pod(SMALL, container()), Charge(10, 256), id="one of the containers asks"),
        pytest.param(pod(SMALL, init=[LARGE]), Charge(30, 4 * 256), id="a larger init container"),
        pytest.param(pod(LARGE, init=[SMALL]), Charge(30, 4 * 256), id="a smaller init container"),
        pytest.param(pod(container(), init=[SMALL]), Charge(10, 256), id="an init container alone"),
        pytest.param(pod(SMALL, init=[LARGE, LARGE]), Charge(30, 4 * 256), id="init containers run one by one"),
        pytest.param(pod(SMALL, init=[sidecar(gpu_manager(30, 4))]), Charge(40, 5 * 256), id="a sidecar adds up"),
        pytest.param(
            pod(SMALL, init=[sidecar(gpu_manager(30, 4)), LARGE]),
            Charge(60, 8 * 256),
            id="init beside a sidecar",
        ),
        pytest.param(
            pod(SMALL, init=[LARGE, sidecar(gpu_manager(30, 4))]), Charge(40, 5 * 256), id="a sidecar starts after init"
        ),
        pytest.param(
            pod(
                SMALL,
                init=[
                    sidecar(gpu_manager(10, 1)),
                    container(gpu_manager(40, 2)),
                    sidecar(gpu_manager(20, 1)),
                    container(gpu_manager(30, 9)),
                ],
            ),
            Charge(60, 11 * 256),
            id="sidecars gather between init containers",
        ),
        pytest.param(
            pod(LARGE, init=[container(gpu_manager(80, 1))]), Charge(80, 4 * 256), id="the peak is per resource"
        ),
        pytest.param(
            pod(SMALL, init=[container(gpu_manager(200))]), Charge(200, 256, 200), id="an exclusive init container"
        ),
        pytest.param(pod(LARGE, restartPolicy="Always"), Charge(30, 4 * 256), id="the pod's own restartPolicy is none"),
        pytest.param(
            pod(SMALL, init=[container(gpu_manager(30, 4), restartPolicy="OnFailure")]),
            Charge(30, 4 * 256),
            id="only Always makes a sidecar",
        ),
        pytest.param(
            pod(SMALL, container(gpu_manager(30, 4), restartPolicy="Always")),
            Charge(40, 5 * 256),
            id="a container may have its own restartPolicy",
        ),
        pytest.param(pod(container(gpu_manager(100)), SMALL), Charge(110, 256, 100), id="exclusive beside shared"),
        pytest.param(
            pod(container({"nvidia.com/gpu": 1}), container(gpu_manager(20, 2))),
            Charge(120, 512, 100),
            id="two schemes in a pod",
        ),
        pytest.param(
            pod(container({"nvidia.com/gpu": 2}), init=[container(gpu_manager(20, 2))]),
            Charge(220, 512, 200),
            id="two schemes, one of them in an init container: no resource is set against another",
        ),
    ],
)
def test_many_containers(manifest: Manifest, charge: Charge) -> None:
    assert charge_of(manifest) == charge


def test_schemes_are_named_once_in_the_order_of_the_containers() -> None:
    manifest = pod(SMALL, container({"nvidia.com/gpu": 1}), LARGE, init=[container({"nvidia.com/vgpu-number": 1})])
    assert read_request(view(manifest)).schemes == (VGPU_MANAGER, GPU_MANAGER, HAMI)


# Who asks for none

ALL = [pytest.param(scheme, id=scheme.name) for scheme in SCHEMES]


@pytest.mark.parametrize("scheme", ALL)
def test_every_resource_of_a_scheme_is_seen_wherever_it_stands(scheme: Scheme) -> None:
    for resource in scheme.resources:
        asking = container({"cpu": 1, resource: 1})
        assert asks_for_vcuda(view(pod(container(), asking)))
        assert asks_for_vcuda(view(pod(container(), init=[asking])))
        assert asks_for_vcuda(view(pod(container(resources={"requests": {resource: 1}}))))
        assert read_request(view(pod(asking))).schemes == (scheme,)


@pytest.mark.parametrize(
    "manifest",
    [
        pytest.param(pod(), id="no container"),
        pytest.param(pod(container()), id="no resources"),
        pytest.param(pod(container(resources=None)), id="resources null"),
        pytest.param(pod(container(resources={"limits": None, "requests": None})), id="limits null"),
        pytest.param(pod(container({"cpu": 2, "memory": "1Gi"})), id="cpu and memory"),
        pytest.param(pod(container({"amd.com/gpu": 1})), id="another vendor"),
        pytest.param(pod(container({"nvidia.com/mig-1g.5gb": 1})), id="MIG is not counted"),
        pytest.param(pod(container({"tencent.com/vcuda-core-limit": 1})), id="an annotation's name"),
        pytest.param(
            pod(container(), annotations={"tencent.com/vcuda-core": "100"}), id="a resource's name as an annotation"
        ),
    ],
)
def test_a_pod_that_asks_for_no_vcuda(manifest: Manifest) -> None:
    assert not asks_for_vcuda(view(manifest))
    request = read_request(view(manifest))
    assert (request.charge, request.schemes, request.faults, request.warnings) == (Charge(), (), (), ())


@pytest.mark.parametrize("scheme", ALL)
@pytest.mark.parametrize("zero", [0, "0"])
def test_zero_of_everything_is_no_request(scheme: Scheme, zero: str | int) -> None:
    """Charts write ``nvidia.com/gpu: 0`` for their pods without a card."""
    manifest = vcuda_pod(dict.fromkeys(scheme.resources, zero))
    assert not asks_for_vcuda(view(manifest))
    request = read_request(view(manifest))
    assert (request.charge, request.schemes, request.faults) == (Charge(), (), ())


@pytest.mark.parametrize("scheme", ALL)
@pytest.mark.parametrize("amount", [1, "1", "-1", "0.5", "two", "1m", ""])
def test_anything_but_zero_is_a_request(scheme: Scheme, amount: str | int) -> None:
    """A request that cannot be read is still one: it must not slip through as none."""
    for resource in scheme.resources:
        zeros = dict.fromkeys(scheme.resources, "0")
        assert asks_for_vcuda(view(vcuda_pod({**zeros, resource: amount})))


def test_zero_by_another_scheme_is_no_second_scheme() -> None:
    limits = {"nvidia.com/gpu": 0, "nvidia.com/vcuda-core": 20, "nvidia.com/vcuda-memory": 100}
    request = read_request(view(vcuda_pod(limits)))
    assert (request.charge, request.schemes, request.faults) == (Charge(20, 100), (NVIDIA_VCUDA,), ())
