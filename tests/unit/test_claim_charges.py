"""Tests of the charges of ResourceClaims for the devices of three DRA drivers, and of malformed requests."""

from fractions import Fraction

import pytest

from examples.claims import (
    A100,
    CLASSES,
    HAMI,
    M40,
    NVIDIA,
    SLICES,
    claim,
    claim_policy,
    consumable,
    device,
    device_class,
    entry,
    first_of,
    selector,
    share,
    shared,
    slice_of,
    view,
)
from tests.builders import MODEL, Manifest, nodes
from tests.tables import cases
from vcuda.claims.charges import ClaimPolicy
from vcuda.claims.request import read_claim
from vcuda.quota.model import Charge, Limit, NamespaceQuota, Quota
from vcuda.requests.resources import GpuResources

SEVENTH = Fraction(100, 7)
CARD = Charge(100, 0, 100)
QUOTA = Quota({"team-a": NamespaceQuota({"M40": Limit(800), "A100": Limit(800)})})
UNITS = GpuResources(
    own_units={
        "deviceclass/half.example.com": Charge(50, 0, 50),
        "deviceclass/rdma.example.com": Charge(),
        "deviceclass/odd.example.com": CARD,
    }
)
OWN_CLASSES = {
    **CLASSES,
    "half.example.com": device_class('device.driver == "gpu.example.com"'),
    "rdma.example.com": device_class('device.driver == "rdma.example.com"'),
    "odd.example.com": device_class('device.driver.startsWith("gpu")'),
    "big": device_class(f'device.driver == "{NVIDIA}" && device.attributes["{NVIDIA}"].type == "gpu"'),
    "any-type": device_class(f'device.driver == "{NVIDIA}"'),
    "small-mig": device_class(
        f'device.driver == "{NVIDIA}" && device.attributes["{NVIDIA}"].type == "mig"',
        f'device.attributes["{NVIDIA}"].profile == "1g.5gb"',
    ),
}
POLICY = claim_policy(classes=OWN_CLASSES, quota=QUOTA, resources=UNITS)
MIG = "mig.nvidia.com"
PROFILE = 'device.attributes["gpu.nvidia.com"].profile'


def charged(*requests: Manifest, model: str = "A100", policy: ClaimPolicy = POLICY) -> Charge:
    found = read_claim(view(claim(*requests)), policy)
    assert found.faults == ()
    return found.charge(model)


@cases(
    "requests, expected",
    a_whole_card=([entry()], CARD),
    count_times_the_value=([entry(count=3)], Charge(300, 0, 300)),
    the_sum=([entry(), entry("vfio.gpu.nvidia.com", count=2)], Charge(300, 0, 300)),
    vgpu_manager_s_whole_card=([entry("gpu-manager")], CARD),
    the_operator_s_own_class_of_a_known_driver=([entry("big")], CARD),
    a_class_for_cards_and_partitions=([entry("any-type")], CARD),
    a_class_in_the_units_table=([entry("half.example.com", count=3)], Charge(150, 0, 150)),
    a_class_without_a_value_in_addition=([entry(), entry("rdma.example.com", count=8)], CARD),
    the_maximum=([first_of(share(cores="50", memory="1Gi"), entry())], Charge(100, 1024, 100)),
    a_capacity_that_only_filters=([entry(capacity={"requests": {"memory": "20Gi"}})], CARD),
)
def test_whole_cards_units_and_the_most_expensive_alternative_are_charged(
    requests: list[Manifest], expected: Charge
) -> None:
    assert charged(*requests) == expected


@cases(
    "asked, expected",
    as_requested=(share(cores="30", memory="3000Mi"), Charge(30, 3000)),
    rounded_up_by_the_steps_of_the_slices=(share(cores="0.5", memory="1500000"), Charge(1, 2)),
    no_memory_given_all_of_the_card_s=(share(cores="30"), Charge(30, 0, 100)),
    no_cores_given_a_whole_card=(share(memory="1Gi"), Charge(100, 1024)),
    neither_cores_nor_memory_given=(share(), CARD),
    _0_cores_drivers_then_do_not_limit_cores=(share(cores="0", memory="1Gi"), Charge(100, 1024)),
    _0_memory_the_smallest_amount=(share(cores="30", memory="0"), Charge(30, 1)),
    oversold_cores=(share("vgpu-manager", cores="150", memory="1Gi"), Charge(150, 1024)),
    the_default_of_a_card_with_oversold_cores=(share("vgpu-manager"), CARD),
)
def test_shares_are_charged_as_the_scheduler_counts_them(asked: Manifest, expected: Charge) -> None:
    assert charged(asked) == expected


@cases(
    "slices, expected",
    no_device_yet_means_all_memory=([], Charge(30, 0, 100)),
    no_shared_device_means_a_whole_card=([slice_of(HAMI, "new", device(A100, "hami-gpu"))], CARD),
    only_devices_of_the_model_count=(
        [slice_of(HAMI, "old", device(M40, "hami-gpu")), slice_of(HAMI, "new", shared(A100, "hami-gpu"))],
        Charge(30, 0, 100),
    ),
    of_contradicting_slices_the_newest_counts=(
        [
            slice_of(HAMI, "new", device(A100, "hami-gpu"), generation=1),
            slice_of(HAMI, "new", shared(A100, "hami-gpu"), generation=2),
        ],
        Charge(30, 0, 100),
    ),
)
def test_a_share_is_charged_by_the_published_devices_of_its_model(slices: list[object], expected: Charge) -> None:
    assert charged(share(cores="30"), policy=claim_policy(slices, quota=QUOTA)) == expected  # type: ignore[arg-type]


def mode(name: str, *others: Manifest, memory: str = "", units: GpuResources = UNITS) -> ClaimPolicy:
    """Return a policy with A100 cards that NVIDIA's driver shares in this mode, and perhaps other cards."""
    cards = slice_of(NVIDIA, "new", consumable(A100, name, memory), *others)
    return claim_policy([cards], classes=OWN_CLASSES, quota=QUOTA, resources=units)


QUARTER = GpuResources(own_units={f"deviceclass/{NVIDIA}": Charge(25, 0, 25)})


@cases(
    "policy, asked, expected",
    one_of_four_shares=(mode("4"), entry(), Charge(25, 0, 25)),
    two_of_four_shares=(mode("4"), share(NVIDIA, shares="2"), Charge(50, 0, 50)),
    a_part_of_a_share_is_one=(mode("4"), share(NVIDIA, shares="0.5"), Charge(25, 0, 25)),
    no_share_is_one=(mode("4"), share(NVIDIA, shares="0"), Charge(25, 0, 25)),
    several_devices=(mode("4"), entry(count=2), Charge(50, 0, 50)),
    shares_that_are_no_hundredths=(mode("3"), entry(), Charge(SEVENTH * 7 / 3, 0, SEVENTH * 7 / 3)),
    very_small_shares_are_rounded_up=(mode("53"), entry(), Charge(Fraction("1.8868"), 0, Fraction("1.8868"))),
    a_share_with_more_memory=(mode("4"), share(NVIDIA, memory="20Gi"), Charge(50, 0, 50)),
    memory=(mode("memory"), share(NVIDIA, memory="10Gi"), Charge(25, 10 * 1024)),
    memory_is_rounded_up=(mode("memory"), share(NVIDIA, memory="1"), Charge(Fraction("0.0025"), 1)),
    memory_of_an_odd_card=(
        mode("memory", memory="81559Mi"),
        share(NVIDIA, memory="1Gi"),
        Charge(Fraction("1.2556"), 1024),
    ),
    all_memory_by_default=(mode("memory"), entry(), CARD),
    unlimited=(mode("unlimited"), entry(), CARD),
    unlimited_with_memory=(mode("unlimited"), share(NVIDIA, memory="1Gi"), CARD),
    unlimited_with_a_value=(mode("unlimited", units=QUARTER), entry(count=2), Charge(50, 0, 50)),
    the_value_does_not_lower_shares=(mode("2", units=QUARTER), entry(), Charge(50, 0, 50)),
    the_value_does_not_lower_a_card=(claim_policy(resources=QUARTER, quota=QUOTA), entry(), CARD),
    the_value_before_any_slice=(claim_policy([], resources=QUARTER, quota=QUOTA), entry(), CARD),
    another_card_that_is_not_shared=(mode("4", device(A100, name="gpu-1")), entry(), CARD),
    another_card_in_fewer_shares=(mode("4", consumable(A100, "2", name="gpu-1")), entry(), Charge(50, 0, 50)),
    a_partition_is_not_divided=(
        mode("4", {**consumable(A100, "4"), **device(A100, "mig", "3g.20gb", "mig-0")}),
        entry(MIG),
        Charge(50, 20 * 1024),
    ),
)
def test_a_card_that_nvidia_s_driver_shares_is_charged_by_its_mode(
    policy: ClaimPolicy, asked: Manifest, expected: Charge
) -> None:
    assert charged(asked, policy=policy) == expected


def test_the_shares_of_a_card_are_charged_one_card() -> None:
    for number in range(1, 49):
        assert charged(entry(), policy=mode(str(number))) * number == CARD


@cases(
    "asked, expected",
    the_largest_profile_that_is_offered=(entry(MIG), Charge(50, 20 * 1024)),
    the_profile_that_the_claim_demands=(entry(MIG, f"{PROFILE} == '1g.5gb'"), Charge(SEVENTH, 5 * 1024)),
    the_profile_among_other_conditions=(
        entry(MIG, f'x && {PROFILE} == "1g.5gb"', count=2),
        Charge(SEVENTH, 5 * 1024) * 2,
    ),
    the_profile_that_its_class_demands=(entry("small-mig"), Charge(SEVENTH, 5 * 1024)),
    the_profile_is_not_really_demanded=(entry(MIG, f'{PROFILE} == "1g.5gb" || true'), Charge(50, 20 * 1024)),
    the_profile_is_excluded=(entry(MIG, f'!({PROFILE} == "1g.5gb")'), Charge(50, 20 * 1024)),
    no_published_partition_means_any_profile=(entry("mig-manager"), CARD),
)
def test_a_mig_partition_is_charged_by_its_profile(asked: Manifest, expected: Charge) -> None:
    assert charged(asked) == expected


@pytest.mark.parametrize(
    ("asked", "path", "sentence"),
    [
        (entry("foo"), "exactly.deviceClassName", "`deviceclass/foo: {cards: 1}`, or `deviceclass/foo: {}`"),
        (entry("odd.example.com"), "exactly.deviceClassName", "name no driver, so its devices cannot be pinned"),
        (entry(allocationMode="All"), "exactly.allocationMode", "must be ExactCount, with a count; got All"),
        (entry(adminAccess=True), "exactly.adminAccess", "because the claim could get devices of other claims"),
        (entry(count=0), "exactly.count", "must be from 1 to 32; got 0"),
        (entry(count=33), "exactly.count", "must be from 1 to 32; got 33"),
        (share(cores="-5"), "exactly.capacity.requests[cores]", "-5 is negative"),
        (share(memory="many"), "exactly.capacity.requests[memory]", "'many' is not a quantity"),
        (share(memory="9e18"), "exactly.capacity.requests[memory]", "larger than any cluster"),
        (share(core="5"), "exactly.capacity.requests[core]", "supported capacities: cores, memory"),
        (entry(capacity={"requests": {"cores": "5"}}), "exactly.capacity.requests[cores]", "capacities: memory"),
        (entry(selectors=[selector("true")] * 32), "exactly.selectors", "must not have more than 31 selectors"),
        (entry(MIG, f'{PROFILE} == "odd"'), "exactly.selectors", "unknown MIG profile odd. Ask your administrator"),
        (first_of(entry(), entry("foo")), "firstAvailable[1].deviceClassName", "no value is configured"),
        ({"firstAvailable": []}, "", "must have the field `exactly` or the field `firstAvailable`"),
    ],
)  # fmt: skip
def test_every_malformed_request_is_reported_with_its_path(asked: Manifest, path: str, sentence: str) -> None:
    [fault] = read_claim(view(claim(asked)), POLICY).faults
    assert fault.path == f"spec.devices.requests[0].{path}".rstrip(".")
    assert sentence in fault.message


@cases(
    "driver, requests, rejected",
    all_requests=(HAMI, None, True),
    the_share=(HAMI, ["r1"], True),
    one_alternative_of_the_share=(HAMI, ["r1/part"], True),
    a_whole_card=(HAMI, ["r0"], False),
    parameters_of_another_driver=(NVIDIA, None, False),
)
def test_parameters_for_the_driver_of_a_share_are_rejected(
    driver: str, requests: list[str] | None, *, rejected: bool
) -> None:
    asked = claim(entry(), share(cores="30"))
    parameters = {"kind": "GpuConfig", "sharing": {"strategy": "MPS"}}
    config: Manifest = {"opaque": {"driver": driver, "parameters": parameters}}
    asked["spec"]["devices"]["config"] = [{**config, "requests": requests} if requests else config]
    found = read_claim(view(asked), POLICY)
    assert [fault.path for fault in found.faults] == (["spec.devices.config[0].opaque"] if rejected else [])
    assert found.charge("A100") == Charge(130, 0, 200)


def test_all_and_admin_access_are_free_for_devices_without_a_value() -> None:
    found = read_claim(view(claim(entry("rdma.example.com", allocationMode="All", adminAccess=True))), POLICY)
    assert (found.faults, found.entries) == ((), ())


def test_compute_domains_are_no_gpus() -> None:
    channel = claim(entry("compute-domain-default-channel.nvidia.com"))
    assert not read_claim(view(channel), POLICY).entries
    assert read_claim(view(channel), POLICY).faults == ()


@cases(
    "rows, label, product, model",
    by_the_model_of_the_device_s_nodes=({}, "M40", M40, "M40"),
    nodes_of_a_model_without_a_product=({}, "tesla-m40-24gb", M40, "tesla-m40-24gb"),
    the_row_of_the_quota_precedes_the_nodes=({"A100": ("Tesla-M*",)}, "M40", M40, "A100"),
    rows_that_overlap=({"A100": ("tesla m??*",), "M40": ("Tesla-M40*",)}, "M40", M40, None),
    spaces_count_as_dashes_case_is_ignored=({"X": ("TESLA-M40-24GB",)}, "M40", M40, "X"),
    by_the_product_s_own_name=({"Tesla-M40-24GB": ()}, "M40", M40, "Tesla-M40-24GB"),
)
def test_a_product_has_the_model_of_its_nodes(
    rows: dict[str, tuple[str, ...]], label: str, product: str, model: str | None
) -> None:
    policy = claim_policy(SLICES[:1], quota=QUOTA, nodes=nodes(old={MODEL: label}), rows=rows)
    assert policy.products.model_of(product) == model


def test_a_product_on_nodes_of_two_models_has_neither_model() -> None:
    slices = [slice_of(NVIDIA, "old", device(M40)), slice_of(NVIDIA, "new", device(M40))]
    assert claim_policy(slices, quota=QUOTA).products.model_of(M40) is None
