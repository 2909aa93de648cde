"""Everything that is refused in the way a pod asks, with its field path and the sentence that says what to write."""

from __future__ import annotations

from typing import Any

import pytest

from tests.builders import Manifest, container, pod, sidecar, vcuda_pod, view
from vcuda.quota.model import Charge
from vcuda.requests.pod_request import read_request
from vcuda.requests.schemes import GPU_MANAGER, HAMI, NVIDIA_VCUDA, SCHEMES, VGPU_MANAGER, Scheme

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
        pytest.param(
            pod(init=[container(), sidecar({"nvidia.com/gpu": -1})]),
            "spec.initContainers[1]",
            id="sidecar",
        ),
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
