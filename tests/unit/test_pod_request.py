"""Tests of the charge of a pod, and of malformed requests."""

from typing import Any

import pytest

from tests.builders import Manifest, container, pod, sidecar, vcuda_pod, view
from tests.tables import cases
from vcuda.quota.model import Charge
from vcuda.requests.pod_request import MAX_UNITS, read_request, requests_gpus
from vcuda.requests.schemes import GPU_MANAGER, HAMI, NVIDIA_VCUDA, SCHEMES, VGPU_MANAGER, Scheme

CORES, MEMORY = GPU_MANAGER.cores, GPU_MANAGER.memory


def charge_of(manifest: Manifest) -> Charge:
    """Return the charge of a pod, which must have no faults."""
    request = read_request(view(manifest))
    assert request.faults == ()
    return request.charge


def gpu_manager(cores: int, blocks: int = 0) -> dict[str, int]:
    """Return limits in gpu-manager's resources: hundredths of a card's cores, and blocks of 256 MiB of memory."""
    return {CORES: cores, **({MEMORY: blocks} if blocks else {})}


# Tests of pods with one container


@cases(
    "limits, charge",
    blocks=({CORES: 20, MEMORY: 4}, Charge(20, 1024)),
    most=({CORES: 99, MEMORY: 1}, Charge(99, 256)),
    least=({CORES: 1, MEMORY: 1}, Charge(1, 256)),
    one_exclusive_card=({CORES: 100}, Charge(100, 0, 100)),
    exclusive_cards=({CORES: 800}, Charge(800, 0, 800)),
    all_of_its_memory=({CORES: 100, MEMORY: 1}, Charge(100, 0, 100)),
    a_quantity_with_an_exponent=({CORES: "2e2"}, Charge(200, 0, 200)),
    MiB=({"nvidia.com/vcuda-core": 20, "nvidia.com/vcuda-memory": 1000}, Charge(20, 1000)),
    exclusive_cards_of_the_nvidia_fork=({"nvidia.com/vcuda-core": 300}, Charge(300, 0, 300)),
)
def test_cores_and_memory_of_the_pod_are_charged(limits: dict[str, Any], charge: Charge) -> None:
    assert charge_of(vcuda_pod(limits)) == charge


@cases(
    "cores, memory, count",
    hami=("nvidia.com/gpucores", "nvidia.com/gpumem", "nvidia.com/gpu"),
    vgpu_manager=("nvidia.com/vgpu-cores", "nvidia.com/vgpu-memory", "nvidia.com/vgpu-number"),
)
@cases(
    "asked, charge",
    a_count_alone_is_whole_cards=({"count": 1}, Charge(100, 0, 100)),
    a_count_of_several=({"count": 8}, Charge(800, 0, 800)),
    without_cores_each_is_a_whole_card=({"count": 2, "memory": 1000}, Charge(200, 2000)),
    no_cores_are_a_whole_card=({"count": 2, "cores": 0, "memory": 1000}, Charge(200, 2000)),
    both_are_per_vGPU=({"count": 2, "cores": 30, "memory": 1000}, Charge(60, 2000)),
    without_a_count_one_is_meant=({"cores": 30, "memory": 1000}, Charge(30, 1000)),
    a_count_of_none_counts_as_one=({"count": 0, "cores": 30, "memory": 1000}, Charge(30, 1000)),
    memory_alone_is_on_a_whole_card=({"memory": 1000}, Charge(100, 1000)),
    all_cores_are_exclusive_cards=({"count": 2, "cores": 100}, Charge(200, 0, 200)),
    exclusive_so_all_its_memory=({"count": 2, "cores": 100, "memory": 9}, Charge(200, 0, 200)),
)
def test_cores_and_memory_of_each_vgpu_are_charged(
    cores: str, memory: str, count: str, asked: dict[str, int], charge: Charge
) -> None:
    names = {"count": count, "cores": cores, "memory": memory}
    assert charge_of(vcuda_pod({names[key]: amount for key, amount in asked.items()})) == charge


@cases(
    "asked, charge",
    half_the_memory_of_a_whole_card=({"gpumem-percentage": 50}, Charge(100, 0, 50)),
    per_vGPU=({"gpu": 4, "gpumem-percentage": 25}, Charge(400, 0, 100)),
    on_a_share=({"gpu": 1, "gpucores": 10, "gpumem-percentage": 30}, Charge(10, 0, 30)),
    exclusive=({"gpu": 1, "gpucores": 100, "gpumem-percentage": 30}, Charge(100, 0, 100)),
    MiB_come_first=({"gpu": 2, "gpumem": 500, "gpumem-percentage": 30}, Charge(200, 1000)),
    none_said_is_all=({"gpu": 1, "gpumem": 0, "gpumem-percentage": 0}, Charge(100, 0, 100)),
)
def test_memory_in_percent_is_that_share_of_a_card(asked: dict[str, int], charge: Charge) -> None:
    assert charge_of(vcuda_pod({f"nvidia.com/{name}": amount for name, amount in asked.items()})) == charge


@cases(
    "resources, charge",
    requests_stand_in_for_limits_that_are_left_out=({"requests": {CORES: 20}, "limits": {MEMORY: 2}}, Charge(20, 512)),
    limits_come_before_requests=({"requests": {CORES: 100}, "limits": {CORES: 300}}, Charge(300, 0, 300)),
    requests_alone=({"requests": {"nvidia.com/gpu": "2"}}, Charge(200, 0, 200)),
)
def test_limits_are_charged_and_requests_only_without_them(resources: dict[str, Any], charge: Charge) -> None:
    assert charge_of(pod(container(resources=resources))) == charge


# Tests of pods with several containers, charged as in KEP-753. The charge is the larger of two amounts: all containers
# with the sidecars, or the largest init container with the sidecars before it.


def asking(cores: int, blocks: int = 0, **fields: Any) -> Manifest:
    return container(gpu_manager(cores, blocks), **fields)


SMALL, LARGE = asking(10, 1), asking(30, 4)
BESIDE, TWO_CARDS = sidecar(gpu_manager(30, 4)), container({"nvidia.com/gpu": 2})
IN_TURN = [sidecar(gpu_manager(10, 1)), asking(40, 2), sidecar(gpu_manager(20, 1)), asking(30, 9)]


@cases(
    "manifest, charge",
    containers_add_up=(pod(SMALL, LARGE), Charge(40, 5 * 256)),
    one_of_the_containers_asks=(pod(SMALL, container()), Charge(10, 256)),
    a_larger_init_container=(pod(SMALL, init=[LARGE]), Charge(30, 4 * 256)),
    a_smaller_init_container=(pod(LARGE, init=[SMALL]), Charge(30, 4 * 256)),
    an_init_container_alone=(pod(container(), init=[SMALL]), Charge(10, 256)),
    init_containers_run_one_by_one=(pod(SMALL, init=[LARGE, LARGE]), Charge(30, 4 * 256)),
    a_sidecar_adds_up=(pod(SMALL, init=[BESIDE]), Charge(40, 5 * 256)),
    init_beside_a_sidecar=(pod(SMALL, init=[BESIDE, LARGE]), Charge(60, 8 * 256)),
    a_sidecar_starts_after_init=(pod(SMALL, init=[LARGE, BESIDE]), Charge(40, 5 * 256)),
    sidecars_gather_between_init_containers=(pod(SMALL, init=IN_TURN), Charge(60, 11 * 256)),
    the_peak_is_per_resource=(pod(LARGE, init=[asking(80, 1)]), Charge(80, 4 * 256)),
    an_exclusive_init_container=(pod(SMALL, init=[asking(200)]), Charge(200, 256, 200)),
    the_pods_own_restartPolicy_is_none=(pod(LARGE, restartPolicy="Always"), Charge(30, 4 * 256)),
    only_Always_makes_a_sidecar=(pod(SMALL, init=[asking(30, 4, restartPolicy="OnFailure")]), Charge(30, 4 * 256)),
    a_container_may_have_its_own_restartPolicy=(pod(SMALL, asking(30, 4, restartPolicy="Always")), Charge(40, 5 * 256)),
    exclusive_beside_shared=(pod(asking(100), SMALL), Charge(110, 256, 100)),
    two_schemes_in_a_pod=(pod(container({"nvidia.com/gpu": 1}), asking(20, 2)), Charge(120, 512, 100)),
    no_scheme_is_set_against_another=(pod(TWO_CARDS, init=[asking(20, 2)]), Charge(220, 512, 200)),
)
def test_a_pod_is_charged_the_most_that_its_containers_use_at_once(manifest: Manifest, charge: Charge) -> None:
    assert charge_of(manifest) == charge


def test_schemes_are_named_once_in_the_order_of_the_containers() -> None:
    manifest = pod(SMALL, container({"nvidia.com/gpu": 1}), LARGE, init=[container({"nvidia.com/vgpu-number": 1})])
    assert read_request(view(manifest)).schemes == (VGPU_MANAGER, GPU_MANAGER, HAMI)


# Tests of pods that request no GPU

EACH = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)


@EACH
def test_every_resource_of_a_scheme_is_found_in_any_field(scheme: Scheme) -> None:
    for resource in scheme.resources:
        asking = container({"cpu": 1, resource: 1})
        assert requests_gpus(view(pod(container(), asking)))
        assert requests_gpus(view(pod(container(), init=[asking])))
        assert requests_gpus(view(pod(container(resources={"requests": {resource: 1}}))))
        assert read_request(view(pod(asking))).schemes == (scheme,)


@cases(
    "manifest",
    no_container=pod(),
    no_resources=pod(container()),
    resources_null=pod(container(resources=None)),
    limits_null=pod(container(resources={"limits": None, "requests": None})),
    cpu_and_memory=pod(container({"cpu": 2, "memory": "1Gi"})),
    another_vendor=pod(container({"amd.com/gpu": 1})),
    without_a_value=pod(container({"nvidia.com/hostdev": 1})),
    an_annotations_name=pod(container({"tencent.com/vcuda-core-limit": 1})),
    a_resources_name_as_an_annotation=pod(container(), annotations={CORES: "100"}),
)
def test_a_pod_without_a_vcuda_request_is_charged_nothing(manifest: Manifest) -> None:
    assert not requests_gpus(view(manifest))
    request = read_request(view(manifest))
    assert (request.charge, request.schemes, request.faults) == (Charge(), (), ())


@EACH
@pytest.mark.parametrize("zero", [0, "0"])
def test_zero_of_everything_is_no_request(scheme: Scheme, zero: str | int) -> None:
    """Helm charts write ``nvidia.com/gpu: 0`` for pods without a GPU."""
    manifest = vcuda_pod(dict.fromkeys(scheme.resources, zero))
    assert not requests_gpus(view(manifest))
    request = read_request(view(manifest))
    assert (request.charge, request.schemes, request.faults) == (Charge(), (), ())


@EACH
@pytest.mark.parametrize("amount", [1, "1", "-1", "0.5", "two", "1m", ""])
def test_anything_but_zero_is_a_request(scheme: Scheme, amount: str | int) -> None:
    """If an amount cannot be parsed, the pod must not be admitted without a charge."""
    for resource in scheme.resources:
        zeros = dict.fromkeys(scheme.resources, "0")
        assert requests_gpus(view(vcuda_pod({**zeros, resource: amount})))


def test_zero_by_another_scheme_is_no_second_scheme() -> None:
    limits = {"nvidia.com/gpu": 0, "nvidia.com/vcuda-core": 20, "nvidia.com/vcuda-memory": 100}
    request = read_request(view(vcuda_pod(limits)))
    assert (request.charge, request.schemes, request.faults) == (Charge(20, 100), (NVIDIA_VCUDA,), ())


LIMITS = "spec.containers[0].resources.limits"


def rejections(manifest: Manifest) -> list[str]:
    return [str(fault) for fault in read_request(view(manifest)).faults]


# Tests of the amounts in a pod's GPU request


@pytest.mark.parametrize("resource", [name for scheme in SCHEMES for name in scheme.resources])
@cases(
    "amount, why",
    negative=("-1", "-1 is negative"),
    fractional=("0.5", "0.5 is not a whole number"),
    thousandths=("1500m", "1500m is not a whole number"),
    text=("two", "'two' is not a quantity"),
    empty=("", "'' is not a quantity"),
    absurd=("1e30", "1e30 is larger than any cluster"),
)
def test_an_amount_that_is_no_whole_number_is_rejected(resource: str, amount: str, why: str) -> None:
    """Other faults that only follow from the wrong amount are not reported."""
    sentence = f"{LIMITS}[{resource}]: must be a whole number of at least 0: {why}"
    assert rejections(vcuda_pod({resource: amount})) == [sentence]


@pytest.mark.parametrize("resource", [name for scheme in SCHEMES for name in scheme.resources])
def test_an_amount_beyond_every_cluster_is_rejected_and_charged_as_the_largest(resource: str) -> None:
    """In modes warn and audit, the pod is admitted, and the sums in the ledger must stay readable."""
    asked = vcuda_pod({resource: str(2**53)})
    assert rejections(asked) == [f"{LIMITS}[{resource}]: must be at most {MAX_UNITS}; got {2**53}"]
    assert read_request(view(asked)).charge == read_request(view(vcuda_pod({resource: MAX_UNITS}))).charge


WITHIN = "must be a whole number from {} (the requested cores) to 100"
LEAVE_OUT = "must not be set, because whole cards cannot have a lower limit"
NO_CORE_LIMITS = ("29", "101", "1000", "0", "-30", "50.0", "5e1", " 50", "50\n", "+50", "", "half", "\u0665\u0660")
WRONG_CORE_LIMITS = [
    *((text, (30,), WITHIN.format(30)) for text in NO_CORE_LIMITS),
    ("99", (100,), WITHIN.format(100)),
    *(("50", cores, WITHIN.format(60)) for cores in ((10, 60), (60, 10))),
    *((text, (200,), LEAVE_OUT) for text in ("100", "200", "x")),
]
"""Wrong core limits. Each has the annotation's text, the cores that each container requests, and the expected message.

The limit must suit the container that requests the most cores.
"""


@pytest.mark.parametrize("scheme", [GPU_MANAGER, NVIDIA_VCUDA], ids=lambda scheme: scheme.name)
class TestCoresOfTheContainer:
    """Tests of the requests of gpu-manager and nvidia-vcuda, which state cores and memory of the whole container."""

    @pytest.mark.parametrize("memory", [0, 4])
    @pytest.mark.parametrize(
        ("cores", "instead"), [(101, "100 or 200"), (150, "100 or 200"), (199, "100 or 200"), (250, "200 or 300")]
    )
    def test_more_than_a_card_but_not_whole_cards_is_rejected(
        self, scheme: Scheme, memory: int, cores: int, instead: str
    ) -> None:
        sentence = f"{LIMITS}[{scheme.cores}]: {cores} is more than one card but not whole cards; write {instead}"
        assert rejections(vcuda_pod({scheme.cores: cores, scheme.memory: memory})) == [sentence]

    @pytest.mark.parametrize("cores", [1, 50, 99])
    def test_a_share_without_memory_is_rejected(self, scheme: Scheme, cores: int) -> None:
        unit = {GPU_MANAGER: "blocks of 256 MiB", NVIDIA_VCUDA: "MiB"}[scheme]
        sentence = f"{LIMITS}[{scheme.cores}]: a share of a card needs memory; add {scheme.memory} in {unit}"
        assert rejections(vcuda_pod({scheme.cores: cores})) == [sentence]
        assert rejections(vcuda_pod({scheme.cores: cores, scheme.memory: 0})) == [sentence]

    def test_memory_without_cores_is_rejected(self, scheme: Scheme) -> None:
        sentence = f"{LIMITS}[{scheme.memory}]: GPU memory must be requested together with cores; add {scheme.cores}"
        assert rejections(vcuda_pod({scheme.memory: 4})) == [sentence]
        assert rejections(vcuda_pod({scheme.memory: 4, scheme.cores: 0})) == [sentence]

    @pytest.mark.parametrize(("cores", "text"), [(30, "30"), (30, "31"), (30, "100"), (30, "030"), (100, "100")])
    def test_a_valid_core_limit_is_accepted(self, scheme: Scheme, cores: int, text: str) -> None:
        assert core_limit_rejections(scheme, text, cores) == []

    @pytest.mark.parametrize(("text", "cores", "advice"), WRONG_CORE_LIMITS)
    def test_a_wrong_core_limit_is_rejected(
        self, scheme: Scheme, text: str, cores: tuple[int, ...], advice: str
    ) -> None:
        sentence = f"metadata.annotations[{scheme.core_limit}]: {advice}; got {text!r}"
        assert core_limit_rejections(scheme, text, *cores) == [sentence]


def core_limit_rejections(scheme: Scheme, text: str, *cores: int) -> list[str]:
    """Return the faults of a pod with this core limit. ``cores``: the amount of each container."""
    containers = [container({scheme.cores: number, scheme.memory: 4}) for number in cores]
    return rejections(pod(*containers, annotations={str(scheme.core_limit): text}))


def test_a_core_limit_of_another_scheme_is_not_read() -> None:
    annotations = {"nvidia.com/vcuda-core-limit": "x"}
    assert rejections(vcuda_pod({CORES: 100}, annotations=annotations)) == []
    assert rejections(vcuda_pod({"nvidia.com/gpu": 1}, annotations=annotations)) == []


@pytest.mark.parametrize("scheme", [HAMI, VGPU_MANAGER], ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("count", [0, 1, 2])
class TestCoresOfEachVgpu:
    """Tests of the requests of HAMi and vgpu-manager, which state the number of vGPUs, and the cores of each vGPU."""

    @pytest.mark.parametrize("memory", [0, 100])
    @pytest.mark.parametrize("cores", [101, 150, 200, 300])
    def test_more_than_the_card_of_a_vgpu_is_rejected(
        self, scheme: Scheme, count: int, cores: int, memory: int
    ) -> None:
        """A vGPU is at most one card, so 200 cores per vGPU are a fault. More cards are requested by more vGPUs."""
        sentence = f"{LIMITS}[{scheme.cores}]: a vGPU must have at most 100 cores (one card); got {cores}"
        limits = {str(scheme.count): count, scheme.cores: cores, scheme.memory: memory}
        assert rejections(vcuda_pod(limits)) == [sentence]

    @pytest.mark.parametrize("cores", [1, 50, 99])
    def test_a_share_without_memory_is_charged_all_memory_of_its_card(
        self, scheme: Scheme, count: int, cores: int
    ) -> None:
        limits = {str(scheme.count): count, scheme.cores: cores}
        for asked in (limits, {**limits, scheme.memory: 0}):
            assert read_request(view(vcuda_pod(asked))).faults == ()
            assert read_request(view(vcuda_pod(asked))).charge == Charge((count or 1) * cores, 0, (count or 1) * 100)


def test_more_than_all_memory_of_a_card_is_rejected() -> None:
    limits = {"nvidia.com/gpu": 1, "nvidia.com/gpucores": 50, "nvidia.com/gpumem-percentage": 101}
    sentence = f"{LIMITS}[nvidia.com/gpumem-percentage]: must be at most 100 percent; got 101"
    assert rejections(vcuda_pod(limits)) == [sentence]


# Tests of pods that request GPUs by the resources of two vendors


@cases(
    "limits, names",
    hami_first=({"nvidia.com/gpu": 1, CORES: 100}, "hami and gpu-manager"),
    both_counted=({"nvidia.com/gpumem": 10, "nvidia.com/vgpu-number": 1}, "hami and vgpu-manager"),
    one_domain=({"nvidia.com/gpu": 1, "nvidia.com/vcuda-core": 100}, "hami and nvidia-vcuda"),
    cores_and_memory=({"nvidia.com/vcuda-core": 100, MEMORY: 1}, "nvidia-vcuda and gpu-manager"),
    three=({"nvidia.com/gpu": 1, CORES: 100, "nvidia.com/vgpu-number": 1}, "hami and gpu-manager and vgpu-manager"),
)
def test_two_schemes_in_one_container_are_rejected(limits: dict[str, Any], names: str) -> None:
    """The message names the resources of both vendors in the order in which the API server stores them."""
    sentence = f"{LIMITS}: a container must request resources of only one vendor; got resources of {names}"
    assert rejections(vcuda_pod(limits)) == [sentence]


def test_two_schemes_in_limits_and_requests_are_rejected() -> None:
    resources = {"limits": {"nvidia.com/gpu": 1}, "requests": {CORES: 100}}
    (rejection,) = rejections(pod(container(resources=resources)))
    assert rejection.startswith(f"{LIMITS}: a container must request resources of only one vendor; ")


# Tests of the paths in the reported faults, and of their number


@cases(
    "manifest, path",
    second_container=(pod(container(), container({"nvidia.com/gpu": -1})), "spec.containers[1]"),
    init=(pod(container(), init=[container({"nvidia.com/gpu": -1})]), "spec.initContainers[0]"),
    sidecar=(pod(init=[container(), sidecar({"nvidia.com/gpu": -1})]), "spec.initContainers[1]"),
)
def test_the_path_names_the_container(manifest: Manifest, path: str) -> None:
    sentence = "must be a whole number of at least 0: -1 is negative"
    assert rejections(manifest) == [f"{path}.resources.limits[nvidia.com/gpu]: {sentence}"]


def test_all_faults_of_a_pod_are_found_at_once_in_the_order_of_its_containers() -> None:
    manifest = pod(
        container({CORES: 150}),
        container({MEMORY: "-1", CORES: "x"}),
        init=[container({"nvidia.com/vcuda-memory": 5})],
        annotations={"tencent.com/vcuda-core-limit": "x"},
    )
    assert [fault.path for fault in read_request(view(manifest)).faults] == [
        "spec.initContainers[0].resources.limits[nvidia.com/vcuda-memory]",
        "spec.containers[0].resources.limits[tencent.com/vcuda-core]",
        "spec.containers[1].resources.limits[tencent.com/vcuda-core]",
        "spec.containers[1].resources.limits[tencent.com/vcuda-memory]",
        "metadata.annotations[tencent.com/vcuda-core-limit]",
    ]
