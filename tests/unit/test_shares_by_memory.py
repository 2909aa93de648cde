"""Tests of `default_cores: memory`, by which the cores of a share are computed from its memory."""

import pytest
from hypothesis import given, strategies as st

from tests.builders import container, pod, view
from tests.tables import cases
from vcuda.allocations.stored_pods import read_stored
from vcuda.errors import QuotaFault
from vcuda.placement.affinity import NodeLabels
from vcuda.placement.nodes import Nodes
from vcuda.placement.placement import find_candidates
from vcuda.quota.model import Charge, Limit, NamespaceQuota
from vcuda.requests.config import parse_config
from vcuda.requests.pod_request import read_request
from vcuda.requests.resources import GpuResources

BY_MEMORY = "{hami: {default_cores: memory}, vgpu-manager: {default_cores: memory}}"
CARD_MEMORY = "{A100: {memory: 40Gi}, T4: {memory: 15Gi, products: [Tesla-T4]}, half: {cards: 0.5}}"


def configured(schemes: str = BY_MEMORY, models: str = CARD_MEMORY) -> GpuResources:
    return parse_config({"gpu_quota": "{}", "gpu_schemes": schemes, "gpu_models": models}).resources


def charged(limits: dict[str, int], model: str, known: GpuResources) -> Charge:
    return read_request(view(pod(container(limits))), known).charge_on(model)


@cases(
    "limits, model, charge",
    a_share=({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 3000}, "A100", Charge(8, 3000)),
    on_a_smaller_card=({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 3000}, "T4", Charge(20, 3000)),
    two_shares=({"nvidia.com/gpu": 2, "nvidia.com/gpumem": 3000}, "A100", Charge(16, 6000)),
    at_least_one_hundredth=({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 1}, "A100", Charge(1, 1)),
    all_of_its_memory=({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 40960}, "A100", Charge(100, 40960)),
    more_than_its_memory=({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 50000}, "A100", Charge(123, 50000)),
    a_percentage=({"nvidia.com/gpu": 1, "nvidia.com/gpumem-percentage": 25}, "A100", Charge(25, 0, 25)),
    a_part_of_an_unknown_card=(
        {"nvidia.com/gpu": 1, "nvidia.com/gpumem-percentage": 25},
        "L4",
        Charge(25, 0, 25),
    ),
    memory_of_an_unknown_card=({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 3000}, "L4", Charge(100, 3000)),
    with_cores=({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 3000, "nvidia.com/gpucores": 30}, "A100", Charge(30, 3000)),
    a_bare_count=({"nvidia.com/gpu": 2}, "A100", Charge(200, 0, 200)),
    a_bare_count_of_half_cards=({"nvidia.com/gpu": 2}, "half", Charge(100, 0, 100)),
    vgpu_manager=({"nvidia.com/vgpu-number": 1, "nvidia.com/vgpu-memory": 4096}, "A100", Charge(10, 4096)),
    gpu_manager=({"tencent.com/vcuda-core": 30, "tencent.com/vcuda-memory": 4}, "A100", Charge(30, 1024)),
)
def test_a_share_without_cores_is_charged_its_part_of_the_cards_memory(
    limits: dict[str, int], model: str, charge: Charge
) -> None:
    assert charged(limits, model, configured()) == charge


@pytest.mark.parametrize("schemes", ["", "{hami: {default_cores: card}}"])
def test_by_default_a_share_without_cores_is_charged_all_cores_of_its_card(schemes: str) -> None:
    assert charged({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 3000}, "A100", configured(schemes)) == Charge(100, 3000)


@given(st.integers(1, 8), st.integers(1, 200_000), st.integers(1, 200_000))
def test_the_shares_that_fill_a_card_are_charged_at_least_a_card(count: int, memory: int, card: int) -> None:
    known = configured(models=f"{{A100: {{memory: {card}Mi}}}}")
    charge = charged({"nvidia.com/gpu": count, "nvidia.com/gpumem": memory}, "A100", known)
    assert charge.cores >= count
    assert charge.cores * card >= 100 * memory * count
    assert charge.memory == count * memory


def test_a_stored_pod_is_charged_like_a_new_one() -> None:
    share = container({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 3000})
    pinned = view(pod(share, nodeSelector={NodeLabels().model: "A100"}))
    stored = read_stored(pinned, NodeLabels(), configured())
    assert stored
    assert stored.charge == Charge(8, 3000)


def test_an_init_container_is_compared_by_its_charge() -> None:
    small, large = ({"nvidia.com/gpu": 1, "nvidia.com/gpumem": memory} for memory in (4096, 20480))
    made = view(pod(container(small), initContainers=[container(large, name="init")]))
    assert read_request(made, configured()).charge_on("A100") == Charge(50, 20480)


@cases(
    "limits, models",
    as_much_as_the_largest_card=({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 40960}, ("A100", "L4")),
    as_much_as_both=({"nvidia.com/gpu": 2, "nvidia.com/gpumem": 15360}, ("A100", "T4", "L4")),
    more_than_any=({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 40961}, ("L4",)),
    whole_cards=({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 99999, "nvidia.com/gpucores": 100}, ("A100", "T4", "L4")),
    gpu_manager=({"tencent.com/vcuda-core": 30, "tencent.com/vcuda-memory": 61}, ("A100", "L4")),
)
def test_a_model_whose_cards_have_less_memory_than_a_container_requests_is_excluded(
    limits: dict[str, int], models: tuple[str, ...]
) -> None:
    known, manifest = configured(), view(pod(container(limits)))
    quota = NamespaceQuota({model: Limit(800) for model in ("A100", "T4", "L4")})
    nodes = Nodes.of({}, NodeLabels(), named=known.models)
    found = find_candidates(manifest, read_request(manifest, known), quota, nodes)
    assert found.models == models
    if "A100" not in models:
        assert found.excluded["A100"] == (
            "A100 is excluded, because its cards have 40960 MiB and a container requests 40961 MiB of one card"
        )


@cases(
    "schemes, models, fault",
    another_value=(
        "{hami: {default_cores: half}}",
        "{}",
        "gpu_schemes.hami.default_cores: must be card or memory; got",
    ),
    a_fixed_scheme=(
        "{gpu-manager: {default_cores: memory}}",
        "{}",
        "gpu_schemes.gpu-manager.default_cores: must not be set",
    ),
    no_memory=("{}", "{A100: {memory: 40}}", "gpu_models.A100.memory: must have a unit, for example 40Mi"),
)
def test_a_mistake_in_these_keys_is_a_fault_at_its_place(schemes: str, models: str, fault: str) -> None:
    with pytest.raises(QuotaFault) as rejected:
        configured(schemes, models)
    assert str(rejected.value.faults[0]).startswith(fault)
