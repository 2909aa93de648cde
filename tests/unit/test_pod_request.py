"""What a pod is charged, for every way to ask and every shape of pod, and every way to ask that is refused."""

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


def asking(cores: int, blocks: int = 0, **fields: Any) -> Manifest:
    return container(gpu_manager(cores, blocks), **fields)


SMALL, LARGE = asking(10, 1), asking(30, 4)
BESIDE = sidecar(gpu_manager(30, 4))


@pytest.mark.parametrize(
    ("manifest", "charge"),
    [
        pytest.param(pod(SMALL, LARGE), Charge(40, 5 * 256), id="containers add up"),
        pytest.param(pod(SMALL, container()), Charge(10, 256), id="one of the containers asks"),
        pytest.param(pod(SMALL, init=[LARGE]), Charge(30, 4 * 256), id="a larger init container"),
        pytest.param(pod(LARGE, init=[SMALL]), Charge(30, 4 * 256), id="a smaller init container"),
        pytest.param(pod(container(), init=[SMALL]), Charge(10, 256), id="an init container alone"),
        pytest.param(pod(SMALL, init=[LARGE, LARGE]), Charge(30, 4 * 256), id="init containers run one by one"),
        pytest.param(pod(SMALL, init=[BESIDE]), Charge(40, 5 * 256), id="a sidecar adds up"),
        pytest.param(pod(SMALL, init=[BESIDE, LARGE]), Charge(60, 8 * 256), id="init beside a sidecar"),
        pytest.param(pod(SMALL, init=[LARGE, BESIDE]), Charge(40, 5 * 256), id="a sidecar starts after init"),
        pytest.param(
            pod(SMALL, init=[sidecar(gpu_manager(10, 1)), asking(40, 2), sidecar(gpu_manager(20, 1)), asking(30, 9)]),
            Charge(60, 11 * 256),
            id="sidecars gather between init containers",
        ),
        pytest.param(pod(LARGE, init=[asking(80, 1)]), Charge(80, 4 * 256), id="the peak is per resource"),
        pytest.param(pod(SMALL, init=[asking(200)]), Charge(200, 256, 200), id="an exclusive init container"),
        pytest.param(pod(LARGE, restartPolicy="Always"), Charge(30, 4 * 256), id="the pod's own restartPolicy is none"),
        pytest.param(
            pod(SMALL, init=[asking(30, 4, restartPolicy="OnFailure")]),
            Charge(30, 4 * 256),
            id="only Always makes a sidecar",
        ),
        pytest.param(
            pod(SMALL, asking(30, 4, restartPolicy="Always")),
            Charge(40, 5 * 256),
            id="a container may have its own restartPolicy",
        ),
        pytest.param(pod(asking(100), SMALL), Charge(110, 256, 100), id="exclusive beside shared"),
        pytest.param(
            pod(container({"nvidia.com/gpu": 1}), asking(20, 2)), Charge(120, 512, 100), id="two schemes in a pod"
        ),
        pytest.param(
            pod(container({"nvidia.com/gpu": 2}), init=[asking(20, 2)]),
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


LIMITS = "spec.containers[0].resources.limits"
PRIVILEGED = {"securityContext": {"privileged": True}}
SEES_ALL = "a privileged container sees every card of its node"


def refusals(manifest: Manifest) -> list[str]:
    """Return every fault as people read it."""
    return [str(fault) for fault in read_request(view(manifest)).faults]


# Amounts


@pytest.mark.parametrize("resource", [name for scheme in SCHEMES for name in scheme.resources])
@pytest.mark.parametrize(
    ("amount", "why"),
    [
        pytest.param("-1", "-1 is negative", id="negative"),
        pytest.param("0.5", "0.5 is not a whole number", id="fractional"),
        pytest.param("1500m", "1500m is not a whole number", id="thousandths"),
        pytest.param("two", "'two' is no quantity", id="text"),
        pytest.param("", "'' is no quantity", id="empty"),
        pytest.param("1e30", "1e30 is larger than any cluster", id="absurd"),
    ],
)
def test_an_amount_that_is_no_whole_number(resource: str, amount: str, why: str) -> None:
    """It is the only fault named: what else seems wrong may follow from it."""
    assert refusals(vcuda_pod({resource: amount})) == [f"{LIMITS}[{resource}]: {why}; write a whole number from 0 up"]


def test_every_wrong_amount_is_named() -> None:
    limits = {"tencent.com/vcuda-memory": "-1", "tencent.com/vcuda-core": "x"}
    assert refusals(vcuda_pod(limits)) == [
        f"{LIMITS}[tencent.com/vcuda-core]: 'x' is no quantity; write a whole number from 0 up",
        f"{LIMITS}[tencent.com/vcuda-memory]: -1 is negative; write a whole number from 0 up",
    ]


@pytest.mark.parametrize("scheme", [GPU_MANAGER, NVIDIA_VCUDA], ids=lambda scheme: scheme.name)
class TestCoresOfTheContainer:
    """gpu-manager and its nvidia.com fork: cores and memory are the container's own."""

    @pytest.mark.parametrize("memory", [0, 4])
    @pytest.mark.parametrize(
        ("cores", "instead"), [(101, "100 or 200"), (150, "100 or 200"), (199, "100 or 200"), (250, "200 or 300")]
    )
    def test_more_than_a_card_but_not_whole_cards(self, scheme: Scheme, memory: int, cores: int, instead: str) -> None:
        sentence = f"{LIMITS}[{scheme.cores}]: {cores} is more than one card but not whole cards; write {instead}"
        assert refusals(vcuda_pod({scheme.cores: cores, scheme.memory: memory})) == [sentence]

    @pytest.mark.parametrize("cores", [1, 50, 99])
    def test_a_share_without_memory(self, scheme: Scheme, cores: int) -> None:
        unit = {GPU_MANAGER: "blocks of 256 MiB", NVIDIA_VCUDA: "MiB"}[scheme]
        sentence = f"{LIMITS}[{scheme.cores}]: a share of a card needs memory; add {scheme.memory} in {unit}"
        assert refusals(vcuda_pod({scheme.cores: cores})) == [sentence]
        assert refusals(vcuda_pod({scheme.cores: cores, scheme.memory: 0})) == [sentence]

    def test_memory_without_cores(self, scheme: Scheme) -> None:
        sentence = f"{LIMITS}[{scheme.memory}]: memory without cores; add {scheme.cores}"
        assert refusals(vcuda_pod({scheme.memory: 4})) == [sentence]
        assert refusals(vcuda_pod({scheme.memory: 4, scheme.cores: 0})) == [sentence]

    @pytest.mark.parametrize(
        ("cores", "text"),
        [
            pytest.param(30, "30", id="the requested cores"),
            pytest.param(30, "31", id="one above"),
            pytest.param(30, "100", id="a whole card"),
            pytest.param(30, "030", id="a leading zero"),
            pytest.param(100, "100", id="an exclusive card"),
        ],
    )
    def test_core_limit(self, scheme: Scheme, cores: int, text: str) -> None:
        assert core_limit_refusals(scheme, text, cores) == []

    @pytest.mark.parametrize(
        ("cores", "text"),
        [
            pytest.param(30, "29", id="below the requested cores"),
            pytest.param(30, "101", id="above a card"),
            pytest.param(30, "1000", id="far above a card"),
            pytest.param(30, "0", id="none"),
            pytest.param(30, "-30", id="negative"),
            pytest.param(30, "50.0", id="a decimal"),
            pytest.param(30, "5e1", id="an exponent"),
            pytest.param(30, " 50", id="a space before"),
            pytest.param(30, "50\n", id="a line end"),
            pytest.param(30, "+50", id="a sign"),
            pytest.param(30, "", id="empty"),
            pytest.param(30, "half", id="a word"),
            pytest.param(30, "\u0665\u0660", id="other digits"),
            pytest.param(100, "99", id="below an exclusive card"),
        ],
    )
    def test_wrong_core_limit(self, scheme: Scheme, cores: int, text: str) -> None:
        advice = f"write a whole number from the requested cores to 100: {cores} to 100"
        assert core_limit_refusals(scheme, text, cores) == [core_limit_refusal(scheme, text, advice)]

    @pytest.mark.parametrize("text", ["100", "200", "x"])
    def test_core_limit_on_whole_cards(self, scheme: Scheme, text: str) -> None:
        advice = "leave it out: whole cards have no limit below them"
        assert core_limit_refusals(scheme, text, 200) == [core_limit_refusal(scheme, text, advice)]

    @pytest.mark.parametrize("cores", [(10, 60), (60, 10)])
    def test_core_limit_is_held_against_the_container_that_asks_for_most(
        self, scheme: Scheme, cores: tuple[int, int]
    ) -> None:
        advice = "write a whole number from the requested cores to 100: 60 to 100"
        assert core_limit_refusals(scheme, "50", *cores) == [core_limit_refusal(scheme, "50", advice)]


def core_limit_refusals(scheme: Scheme, text: str, *cores: int) -> list[str]:
    """Return the faults of a pod with this core limit and one container for each number of cores."""
    containers = [container({scheme.cores: number, scheme.memory: 4}) for number in cores]
    return refusals(pod(*containers, annotations={str(scheme.core_limit): text}))


def core_limit_refusal(scheme: Scheme, text: str, advice: str) -> str:
    return f"metadata.annotations[{scheme.core_limit}]: {text!r} is not allowed; {advice}"


def test_core_limit_of_another_scheme_is_nobodys_business() -> None:
    annotations = {"nvidia.com/vcuda-core-limit": "x"}
    assert refusals(vcuda_pod({"tencent.com/vcuda-core": 100}, annotations=annotations)) == []
    assert refusals(vcuda_pod({"nvidia.com/gpu": 1}, annotations=annotations)) == []


@pytest.mark.parametrize("scheme", [HAMI, VGPU_MANAGER], ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("count", [0, 1, 2])
class TestCoresOfEachVgpu:
    """HAMi and vgpu-manager: a count, and what each of them has of its card."""

    @pytest.mark.parametrize("memory", [0, 100])
    @pytest.mark.parametrize("cores", [101, 150, 200, 300])
    def test_more_than_its_card(self, scheme: Scheme, count: int, cores: int, memory: int) -> None:
        """Whole cards are asked for by the count, so 200 is as wrong here as 150."""
        sentence = f"{LIMITS}[{scheme.cores}]: {cores} is more than one card; write at most 100, the share of each vGPU"
        limits = {str(scheme.count): count, scheme.cores: cores, scheme.memory: memory}
        assert refusals(vcuda_pod(limits)) == [sentence]

    @pytest.mark.parametrize("cores", [1, 50, 99])
    def test_a_share_without_memory(self, scheme: Scheme, count: int, cores: int) -> None:
        sentence = f"{LIMITS}[{scheme.cores}]: a share of a card needs memory; add {scheme.memory} in MiB"
        limits = {str(scheme.count): count, scheme.cores: cores}
        assert refusals(vcuda_pod(limits)) == [sentence]
        assert refusals(vcuda_pod({**limits, scheme.memory: 0})) == [sentence]


def test_more_than_all_of_a_cards_memory() -> None:
    limits = {"nvidia.com/gpu": 1, "nvidia.com/gpucores": 50, "nvidia.com/gpumem-percentage": 101}
    assert refusals(vcuda_pod(limits)) == [f"{LIMITS}[nvidia.com/gpumem-percentage]: 101 is over 100 percent"]


# Two schemes


@pytest.mark.parametrize(
    ("limits", "names"),
    [
        ({"nvidia.com/gpu": 1, "tencent.com/vcuda-core": 100}, "hami and gpu-manager"),
        ({"nvidia.com/gpumem": 10, "nvidia.com/vgpu-number": 1}, "hami and vgpu-manager"),
        ({"nvidia.com/gpu": 1, "nvidia.com/vcuda-core": 100}, "hami and nvidia-vcuda"),
        ({"nvidia.com/vcuda-core": 100, "tencent.com/vcuda-memory": 1}, "nvidia-vcuda and gpu-manager"),
        (
            {"nvidia.com/gpu": 1, "nvidia.com/vcuda-core": 100, "nvidia.com/vgpu-number": 1},
            "hami and nvidia-vcuda and vgpu-manager",
        ),
    ],
)
def test_two_schemes_in_one_container(limits: dict[str, Any], names: str) -> None:
    """The limits stand here in the order in which the API server writes them."""
    sentence = f"{LIMITS}: asks by two schemes, {names}; write the resources of one of them"
    assert refusals(vcuda_pod(limits)) == [sentence]


def test_two_schemes_over_limits_and_requests() -> None:
    resources = {"limits": {"nvidia.com/gpu": 1}, "requests": {"tencent.com/vcuda-core": 100}}
    (refusal,) = refusals(pod(container(resources=resources)))
    assert refusal.startswith(f"{LIMITS}: asks by two schemes, ")


def test_two_schemes_in_two_containers_are_fine() -> None:
    assert refusals(pod(container({"nvidia.com/gpu": 1}), container({"tencent.com/vcuda-core": 100}))) == []


# Privileged


@pytest.mark.parametrize(
    "limits",
    [
        pytest.param({"tencent.com/vcuda-core": 100}, id="gpu-manager"),
        pytest.param({"nvidia.com/vcuda-core": 100}, id="nvidia-vcuda"),
        pytest.param({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 10}, id="hami, count and memory"),
        pytest.param({"nvidia.com/gpu": 1, "nvidia.com/gpucores": 100}, id="hami, count and cores"),
        pytest.param({"nvidia.com/gpumem-percentage": 10}, id="hami, percentage alone"),
        pytest.param({"nvidia.com/vgpu-number": 1}, id="vgpu-manager, count alone"),
    ],
)
def test_privileged(limits: dict[str, int]) -> None:
    request = read_request(view(pod(container(limits, **PRIVILEGED))))
    assert [str(fault) for fault in request.faults] == [
        f"spec.containers[0].securityContext.privileged: {SEES_ALL}; write false, or ask for no vcuda"
    ]
    assert request.warnings == ()


@pytest.mark.parametrize("limits", [{"nvidia.com/gpu": 2}, {"nvidia.com/gpu": 2, "nvidia.com/gpucores": 0}])
def test_privileged_with_plain_cards_is_only_a_warning(limits: dict[str, int]) -> None:
    """Drivers' own pods do so, and NVIDIA's device plugin allows it; it is charged like any other."""
    request = read_request(view(pod(container(limits, **PRIVILEGED))))
    assert request.faults == ()
    assert request.warnings == (
        f"spec.containers[0].securityContext.privileged: {SEES_ALL}, not just those it asks for",
    )
    assert request.charge == Charge(200, 0, 200)


@pytest.mark.parametrize("context", [None, {}, {"privileged": False}, {"privileged": None}])
def test_not_privileged(context: dict[str, Any] | None) -> None:
    request = read_request(view(pod(container({"tencent.com/vcuda-core": 100}, securityContext=context))))
    assert (request.faults, request.warnings) == ((), ())


def test_a_privileged_container_beside_one_that_asks_is_not_about_vcuda() -> None:
    request = read_request(view(pod(container({"tencent.com/vcuda-core": 100}), container(**PRIVILEGED))))
    assert (request.faults, request.warnings) == ((), ())


# Where, and how many


@pytest.mark.parametrize(
    ("manifest", "path"),
    [
        pytest.param(pod(container(), container({"nvidia.com/gpu": -1})), "spec.containers[1]", id="second container"),
        pytest.param(pod(container(), init=[container({"nvidia.com/gpu": -1})]), "spec.initContainers[0]", id="init"),
        pytest.param(pod(init=[container(), sidecar({"nvidia.com/gpu": -1})]), "spec.initContainers[1]", id="sidecar"),
    ],
)
def test_the_path_leads_to_the_container(manifest: Manifest, path: str) -> None:
    assert refusals(manifest) == [
        f"{path}.resources.limits[nvidia.com/gpu]: -1 is negative; write a whole number from 0 up"
    ]


def test_all_faults_of_a_pod_are_found_at_once_in_the_order_of_its_containers() -> None:
    manifest = pod(
        container({"tencent.com/vcuda-core": 150}, **PRIVILEGED),
        container({"nvidia.com/gpu": "1.5"}),
        init=[container({"nvidia.com/vcuda-memory": 5})],
        annotations={"tencent.com/vcuda-core-limit": "x"},
    )
    assert [fault.path for fault in read_request(view(manifest)).faults] == [
        "spec.initContainers[0].resources.limits[nvidia.com/vcuda-memory]",
        "spec.containers[0].resources.limits[tencent.com/vcuda-core]",
        "spec.containers[0].securityContext.privileged",
        "spec.containers[1].resources.limits[nvidia.com/gpu]",
        "metadata.annotations[tencent.com/vcuda-core-limit]",
    ]
