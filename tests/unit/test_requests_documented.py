"""Tests that each row of the tables in docs/requests.md is proved by a test.

The names of these tests are listed here, because the page is for users.
"""

import re
from pathlib import Path

import pytest

from vcuda.quota.model import Allowance

ROOT = Path(__file__).parents[2]
TESTS = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "unit").glob("test_*.py")}
HEAD = re.compile(r"^\| [^|]+ \| it is charged \|$")

PROOF = {
    "`tencent.com/vcuda-core` and": ("test_cores_and_memory_of_the_pod_are_charged",),
    "HAMi's or vgpu-manager's resources |": (
        "test_cores_and_memory_of_each_vgpu_are_charged",
        "test_memory_in_percent_is_that_share_of_a_card",
    ),
    "HAMi's or vgpu-manager's resources under other names": (
        "test_charge_pin_and_scheduler_are_the_same_in_either_order_of_the_webhooks",
        "test_a_share_with_a_resource_that_may_be_its_count_is_rejected_with_the_setting_to_make",
    ),
    "a share of a model whose cards HAMi has in MIG mode": ("test_a_share_never_gets_a_card_in_mig_mode",),
    "a card type by HAMi's or vgpu-manager's annotations": (
        "test_the_pod_gets_a_card_of_its_model_on_a_mixed_node",
        "test_given_cards.py",
    ),
    "`nvidia.com/gpu` alone |": ("test_cores_and_memory_of_each_vgpu_are_charged",),
    "`nvidia.com/gpu` alone, on a model": ("test_only_a_whole_device_is_charged_the_value_of_its_model",),
    "`nvidia.com/mig-3g.20gb`": (
        "test_a_profile_is_charged_the_larger_of_its_shares_of_compute_and_memory",
        "test_a_unit_is_charged_its_count_times_its_value",
    ),
    "a MIG profile that the tables": (
        "test_an_unknown_profile_is_rejected_with_the_line_to_write_and_a_stored_one_counts_a_card",
    ),
    "`deviceclass.resource.kubernetes.io/gpu.nvidia.com`": (
        "test_a_unit_is_charged_its_count_times_its_value",
        "test_only_the_schedulers_own_extended_resource_claims_are_admitted",
        "test_a_claim_is_left_out_only_if_a_charged_pods_status_names_it",
    ),
    "a MIG class of a DRA driver": ("test_a_class_without_a_fixed_value_is_rejected_with_an_alternative",),
    "the resource of a DeviceClass of your own": (
        "test_the_extended_resource_of_a_class_is_rejected_until_it_is_counted",
    ),
    "a resource with a row in `gpu_units`": ("test_a_unit_is_charged_its_count_times_its_value",),
    "`nvidia.com/hostdev`": ("test_a_unit_without_a_value_is_no_request", "test_compute_domains_are_no_gpus"),
    "any other resource of a GPU vendor": ("test_an_unknown_gpu_resource_is_rejected_with_the_line_to_add",),
    "`spec.resourceClaims`, before": ("test_a_resource_claim_is_rejected_with_any_permission",),
    "a GPU, with a `terminationGracePeriodSeconds`": (
        "test_a_grace_period_beyond_the_longest_charge_is_rejected_with_the_figure",
    ),
    "a GPU or a ResourceClaim, with the finalizer `orphan`": (
        "test_a_pod_whose_deletion_would_keep_its_claims_is_rejected",
    ),
    "a GPU in a way that is not counted": (
        "test_access_beyond_the_charge_is_rejected_unless_allowed",
        "test_a_pod_cannot_remove_the_limit_of_the_share_of_its_claim",
        "test_a_share_by_a_claim_keeps_its_limit_unless_the_quota_allows_otherwise",
    ),
    "a ResourceClaim, of any user": (
        "test_whole_cards_units_and_the_most_expensive_alternative_are_charged",
        "test_shares_are_charged_as_the_scheduler_counts_them",
        "test_a_mig_partition_is_charged_by_its_profile",
        "test_a_claim_is_pinned_to_the_first_model_with_room_and_charged_by_its_uid",
    ),
    "a claim with `allocationMode: All`": ("test_every_malformed_request_is_reported_with_its_path",),
    "a claim without devices": (
        "test_other_requests_are_ignored",
        "test_all_and_admin_access_are_free_for_devices_without_a_value",
    ),
    "a ResourceClaimTemplate": ("test_a_new_template_is_checked_and_not_charged",),
    "parameters for the driver of a share": ("test_parameters_for_the_driver_of_a_share_are_rejected",),
}
"""Maps the beginning of each row in docs/requests.md to the tests that prove the row.

A test is a function, or a file in tests/unit.
"""


def page() -> str:
    return (ROOT / "docs" / "requests.md").read_text(encoding="utf-8")


def rows() -> list[str]:
    """Return the rows of the tables that have a column "it is charged", each without its first bar."""
    lines = page().splitlines()
    found = []
    for at in (at for at, line in enumerate(lines) if HEAD.match(line)):
        end = lines.index("", at)
        found += [line.removeprefix("| ") for line in lines[at + 2 : end]]
    return found


def test_every_row_has_its_tests_and_every_test_its_row() -> None:
    proven = {row: [start for start in PROOF if row.startswith(start)] for row in rows()}
    assert {row for row, starts in proven.items() if len(starts) != 1} == set()
    assert PROOF.keys() - {starts[0] for starts in proven.values()} == set()


@pytest.mark.parametrize("start", PROOF)
def test_the_tests_of_a_row_exist(start: str) -> None:
    assert [name for name in PROOF[start] if not (name in TESTS or has_function(name))] == []


def test_the_page_lists_every_permission_of_a_quota_entry() -> None:
    section = page().partition("## What can be allowed\n")[2]
    first_cells = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    assert {name for cell in first_cells for name in re.findall(r"`([a-z-]+)`", cell)} == {*Allowance} | {"allow"}


def has_function(name: str) -> bool:
    return any(f"def {name}(" in text for text in TESTS.values())
