"""Tests of the charges of MIG profiles by NVIDIA's tables and by the administrator's rows, and of unknown profiles."""

import itertools
from collections.abc import Iterator
from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from examples.claims import claim, claim_policy, entry, view as view_claim
from tests.builders import LABELS, held_to, vcuda_pod, view
from tests.tables import cases
from vcuda.allocations.stored_pods import read_stored
from vcuda.claims.request import read_claim
from vcuda.ledger.ledger import Admitted, Ledger, Pending, Rejected, admit
from vcuda.ledger.report import report
from vcuda.ledger.text import read_ledger, write_ledger
from vcuda.placement.nodes import Nodes
from vcuda.placement.placement import find_candidates
from vcuda.quota.model import Charge, Limit, NamespaceQuota, Quota, total
from vcuda.requests.bypasses import find_bypasses
from vcuda.requests.config import parse_config
from vcuda.requests.mig import PROFILE, TABLES, MigTable
from vcuda.requests.pod_request import read_request
from vcuda.requests.resources import BUILT_IN, WHOLE_CARD, GpuResources
from vcuda.requests.runtime_devices import RuntimeClasses

SEVENTH = Fraction(100, 7)
Layout = tuple[str, ...]


def known(models: str = "{}", units: str = "{}") -> GpuResources:
    return parse_config({"gpu_quota": "{}", "gpu_models": models, "gpu_units": units}).resources


def cores(profile: str, model: str, resources: GpuResources = BUILT_IN) -> object:
    """Return the cores that a slice of a card is charged. A pod and a claim must be charged the same."""
    request = read_request(view(vcuda_pod({f"{PROFILE}{profile}": 1})), resources)
    selector = f"device.attributes['gpu.nvidia.com'].profile == '{profile}'"
    policy = claim_policy(quota=Quota({"team-a": NamespaceQuota({model: Limit(800)})}), resources=resources)
    asked = read_claim(view_claim(claim(entry("mig.nvidia.com", selector))), policy)
    assert request.charge_on(model) == asked.charge(model)
    return request.charge_on(model).cores


def slices_of(profile: str) -> int:
    return int(profile.partition("g")[0])


def layouts(table: MigTable) -> Iterator[Layout]:
    """Yield every combination of profiles whose compute and memory slices fit one card."""

    def more(layout: Layout, profiles: list[str], slices: int, memory: int) -> Iterator[Layout]:
        yield layout
        for at, profile in enumerate(profiles):
            left = slices - slices_of(profile), memory - table.profiles[profile]
            if min(left) >= 0:
                yield from more((*layout, profile), profiles[at:], *left)

    return more((), [*table.profiles], table.slices, table.memory)


def used(table: MigTable, layout: Layout) -> tuple[Fraction, Fraction]:
    """Return the parts of a card's compute and memory slices that a layout uses."""
    compute = Fraction(sum(map(slices_of, layout)), table.slices)
    return compute, Fraction(sum(table.profiles[each] for each in layout), table.memory)


def charged(table: MigTable, layout: Layout) -> Fraction:
    charges = (BUILT_IN.value_of_profile(each, product_of(table)) or WHOLE_CARD for each in layout)
    return Fraction(total(charges).cores) / 100


def product_of(table: MigTable) -> str:
    """Return the name of a product in the table, with the memory of its cards."""
    name = table.product.partition("|")[0].replace("[18]00", "100").replace("x?", "").replace("[-_]?", "-")
    return f"{name}-{table.size}gb".upper()


TABLE = pytest.mark.parametrize("table", TABLES, ids=product_of)


@TABLE
def test_every_layout_is_charged_what_it_uses_and_at_most_8_percent_of_a_card_more(table: MigTable) -> None:
    """A layout is a set of slices. With a profile of 1 compute and 2 memory slices, it is charged up to 11 % more."""
    for layout in layouts(table):
        compute, memory = used(table, layout)
        doubled = any(table.profiles[each] > slices_of(each) == 1 for each in layout)
        most = Fraction(11 if doubled else 8, 100)
        assert max(compute, memory) <= charged(table, layout) <= max(compute, memory) + most


@given(st.sampled_from(TABLES).flatmap(lambda table: st.tuples(st.just(table), st.data())), st.integers(1, 50))
def test_no_layout_of_n_cards_is_charged_less_than_it_uses(drawn: tuple[MigTable, st.DataObject], cards: int) -> None:
    table, data = drawn
    every = [*layouts(table)]
    chosen = data.draw(st.lists(st.sampled_from(every), min_size=cards, max_size=cards))
    parts = [used(table, layout) for layout in chosen]
    together = charged(table, tuple(itertools.chain(*chosen)))
    assert together >= max(sum(compute for compute, _ in parts), sum(memory for _, memory in parts))
    assert together <= sum(max(each) for each in parts) + Fraction(11, 100) * cards


@TABLE
def test_a_full_card_of_equal_slices_is_charged_one_card(table: MigTable) -> None:
    """If a card has room for n slices of a profile, a quota of one card admits n of them."""
    for profile, memory in table.profiles.items():
        fit = min(table.slices // slices_of(profile), table.memory // memory)
        one = charged(table, (profile,))
        assert one * fit <= 1 < one * (fit + 1)


@cases(
    "profile, model, expected",
    one_of_seven=("1g.5gb", "A100", SEVENTH),
    twice_the_memory=("1g.10gb", "NVIDIA-A100-SXM4-40GB", 25),
    the_same_name_on_cards_of_80_GB=("1g.10gb", "NVIDIA-A100-SXM4-80GB", SEVENTH),
    a_model_of_both_takes_the_larger=("1g.10gb", "A100", 25),
    half_of_the_memory=("3g.20gb", "A100", 50),
    most_of_the_compute=("4g.20gb", "A100", 4 * SEVENTH),
    all_of_it=("7g.80gb", "A100-80", 100),
    a_quarter_of_an_A30=("1g.6gb", "A30", 25),
    a_whole_A30=("4g.24gb", "NVIDIA-A30", 100),
    a_half_of_an_RTX_PRO_5000=("1g.24gb", "RTX-PRO-5000", 50),
    a_quarter_of_an_RTX_PRO_6000=("1g.24gb", "NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition", 25),
    of_a_B300=("1g.67gb", "NVIDIA-B300-SXM6-AC", 25),
    of_a_GH200_that_names_the_memory_of_its_CPU=("1g.12gb", "NVIDIA-GH200-480GB", SEVENTH),
    another_card_whose_name_contains_A30=("4g.24gb", "gpu-A3000", 100),
    the_largest_of_all_if_the_product_is_unknown=("1g.24gb", "gpu-large", 50),
)
def test_a_profile_is_charged_the_larger_of_its_shares_of_compute_and_memory(
    profile: str, model: str, expected: object
) -> None:
    assert cores(profile, model) == expected


@pytest.mark.parametrize(
    "suffix", ["+me", ".me", "-me", "+gfx", ".gfx", "-gfx", "+me.all", ".me.all", "+gfx.me", "-me.gfx"]
)
def test_a_suffix_for_media_or_graphics_does_not_change_the_charge(suffix: str) -> None:
    assert cores(f"1g.24gb{suffix}", "RTX_PRO_6000") == 25


@cases(
    "models, units, profile, expected",
    the_slices_of_the_model=("M: {mig: {slices: 4, memory: 4}}", "{}", "2g.99gb", 50),
    the_memory_too=("M: {mig: {slices: 7, memory: 8}, memory: 320Gi}", "{}", "1g.40gb", SEVENTH),
    twice_the_memory=("M: {mig: {slices: 7, memory: 8}, memory: 320Gi}", "{}", "1g.80gb", 25),
    a_profile_larger_than_the_card=("M: {mig: {slices: 4, memory: 4}}", "{}", "7g.40gb", 100),
    the_memory_chooses_the_table=("M: {products: [NVIDIA-A100-*GB], memory: 80Gi}", "{}", "1g.10gb", SEVENTH),
    the_products_do=("M: [NVIDIA-A100-SXM4-80GB, NVIDIA-A100-80GB-PCIe]", "{}", "1g.10gb", SEVENTH),
    the_larger_of_two_products=("M: [NVIDIA-A100-SXM4-80GB, NVIDIA-A100-SXM4-40GB]", "{}", "1g.10gb", 25),
    products_say_more_than_the_name=("M: [NVIDIA-RTX-PRO-6000-*]", "{}", "1g.24gb", 25),
    a_unit=("{}", "nvidia.com/mig-1g.10gb: {cards: 0.2}", "1g.10gb", 20),
    a_unit_with_any_suffix=("{}", "nvidia.com/mig-1g.10gb: {cards: 0.2}", "1g.10gb+me", 20),
    a_unit_of_that_suffix=("{}", "nvidia.com/mig-1g.10gb.me: {cards: 0.3}", "1g.10gb+me", 30),
    a_unit_of_an_unknown_profile=("{}", "nvidia.com/mig-5g.1gb: {cards: 0.6}", "5g.1gb", 60),
)
def test_the_operator_can_state_slices_or_charges(models: str, units: str, profile: str, expected: object) -> None:
    assert cores(profile, "M", known(models, f"{{{units}}}" if ":" in units else units)) == expected


def test_seven_slices_are_one_card_and_a_quota_admits_no_eighth() -> None:
    """Sums of charges are exact: 350 slices fit a quota of 50 cards, and 351 do not."""
    charge = read_request(view(vcuda_pod({f"{PROFILE}1g.5gb": 1}))).charge_on("A100")
    for cards in (1, 50):
        quota = NamespaceQuota({"A100": Limit(100 * cards)})
        ledger = Ledger({"A100": charge * (7 * cards - 1)})
        last = admit(ledger, "last", Pending("A100", charge), quota, enforced=True)
        assert isinstance(last, Admitted)
        stored = read_ledger(write_ledger(last.ledger))
        assert stored.usage("A100").used.cores == 100 * cards
        assert isinstance(admit(stored, "more", Pending("A100", charge), quota, enforced=True), Rejected)


def test_no_usage_looks_smaller_than_it_is() -> None:
    """Six slices of seven are 85.71 hundredths of a card. The report shows 86 used, and 14 free."""
    ledger = Ledger({"A100": Charge(5 * SEVENTH)}, pending={"u": Pending("A100", Charge(SEVENTH))})
    quota = NamespaceQuota({"A100": Limit(100)})
    [use] = report("team-a", quota, ledger, [], Nodes(LABELS)).models
    assert (use.used, use.pending, use.available) == (0.86, 0.15, 0.14)
    rejected = admit(ledger, "v", Pending("A100", Charge(2 * SEVENTH)), quota, enforced=True)
    assert isinstance(rejected, Rejected)
    figures = "requested: 0.29 cards, used: 0.86 (0.15 pending), limited: 1, 0.15 more needed"
    assert figures in rejected.shortage.sentence("team-a")


@pytest.mark.parametrize("profile", ["8g.80gb", "1g.7gb", "3c.4g.20gb", "odd"])
def test_an_unknown_profile_is_rejected_with_the_line_to_write_and_a_stored_one_counts_a_card(profile: str) -> None:
    pod = vcuda_pod({f"{PROFILE}{profile}": 2}, metadata={"uid": "u"}, affinity=held_to("A100"))
    assert BUILT_IN.is_unknown_gpu(f"{PROFILE}{profile}")
    stored = read_stored(view(pod), LABELS)
    assert stored
    assert stored.charge_on(Nodes(LABELS)) == WHOLE_CARD * 2


def test_a_pod_may_not_use_a_model_that_lacks_its_profile() -> None:
    pod = view(vcuda_pod({f"{PROFILE}1g.5gb": 1}))
    quota = NamespaceQuota({"A30": Limit(400), "A100": Limit(400)})
    found = find_candidates(pod, read_request(pod), quota, Nodes(LABELS))
    assert found.models == ("A100",)
    assert "unknown MIG profile 1g.5gb of A30" in found.excluded["A30"]
    assert "`A30: {mig: {slices: 7, memory: 8}, memory: 80Gi}`" in found.excluded["A30"]


@cases(
    "models, model, is_candidate",
    an_L40S=("{}", "L40S", False),
    a_product_of_HAMi=("{}", "NVIDIA-NVIDIA L40S", False),
    a_T4=("{}", "NVIDIA-Tesla-T4", False),
    a_V100=("{}", "Tesla-V100-SXM2-16GB", False),
    an_A10G=("{}", "A10G", False),
    a_GeForce=("{}", "NVIDIA-GeForce-RTX-4090", False),
    an_RTX_6000_of_Ada=("{}", "NVIDIA-RTX-6000-Ada-Generation", False),
    an_RTX_A6000=("{}", "NVIDIA-RTX-A6000", False),
    a_model_of_products_without_MIG=("big: [NVIDIA-L40S, NVIDIA-L40]", "big", False),
    a_pattern_and_a_name_without_MIG=("L40S: [NVIDIA-L40S*]", "L40S", False),
    a_model_of_which_one_product_has_MIG=("big: [NVIDIA-L40S, NVIDIA-A100-SXM4-40GB]", "big", True),
    a_model_of_which_one_product_is_unknown=("big: [NVIDIA-L40S, NVIDIA-X1]", "big", True),
    products_say_more_than_the_name=("L40S: [NVIDIA-A100-SXM4-40GB]", "L40S", True),
    stated_slices_say_more=("L40S: {mig: {slices: 7, memory: 8}}", "L40S", True),
    an_unknown_name=("{}", "gpu-large", True),
    a_name_that_contains_a_product_without_MIG=("{}", "gpu-L4", True),
    the_name_of_a_machine_with_A100=("{}", "a2-highgpu-1g", True),
    a_name_that_may_mean_the_PRO_6000=("{}", "RTX-6000", True),
)
@pytest.mark.parametrize("units", ["{}", "{nvidia.com/mig-1g.5gb: {cards: 0.2}}"], ids=["tables", "unit"])
def test_a_model_that_is_known_to_have_no_mig_is_no_candidate_for_a_profile(
    models: str, model: str, *, is_candidate: bool, units: str
) -> None:
    """A pod that is stored on such a model is charged a card for each slice, so no pod is free of charge."""
    pod, resources = (
        view(vcuda_pod({f"{PROFILE}1g.5gb": 1})),
        known(f"{{{models}}}" if ":" in models else models, units),
    )
    request = read_request(pod, resources)
    found = find_candidates(pod, request, NamespaceQuota({model: Limit(200), "A100": Limit(100)}), Nodes(LABELS))
    assert (model in found.models, "A100" in found.models) == (is_candidate, True)
    assert is_candidate or request.charge_on(model) == WHOLE_CARD
    excluded = f"{model} is excluded: unknown MIG profile 1g.5gb of {model}. NVIDIA lists this profile for A100."
    assert is_candidate or found.excluded[model].startswith(excluded)


@TABLE
def test_no_product_with_mig_is_taken_for_one_without(table: MigTable) -> None:
    for name in (product_of(table), product_of(table).partition("-GB")[0], f"NVIDIA-{table.name}"):
        assert BUILT_IN.value_of_profile(next(iter(table.profiles)), name) is not None


def test_an_unknown_profile_is_rejected_with_lines_for_the_quota_config_map() -> None:
    manifest = view(vcuda_pod({f"{PROFILE}5g.40gb": 1}))
    [rejection] = find_bypasses(manifest, read_request(manifest), BUILT_IN, RuntimeClasses())
    assert rejection.path == f"spec.containers[0].resources.limits[{PROFILE}5g.40gb]"
    assert rejection.message == (
        "unknown MIG profile 5g.40gb. Ask your administrator to add a line to `gpu_models` in the quota ConfigMap: "
        "`MODEL: {mig: {slices: 7, memory: 8}, memory: 80Gi}` with the slices and the memory of one card, or to "
        "`gpu_units`: `nvidia.com/mig-5g.40gb: {cards: 0.5}`"
    )
