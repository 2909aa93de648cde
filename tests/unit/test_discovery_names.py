"""Tests that every source's name of a GPU product leads to one name of the product, and to the model in the quota."""

import re

import pytest
from hypothesis import given, strategies as st

from examples.discovery import rows
from tests.tables import cases
from vcuda.discovery.sources import model_of, normalise
from vcuda.placement.missing_models import MAX_NAMES, model_warnings
from vcuda.quota.values import listed, read_label_value


@cases(
    "written, product",
    nvml=("NVIDIA A100-SXM4-40GB", "NVIDIA-A100-SXM4-40GB"),
    feature_discovery=("NVIDIA-A100-SXM4-40GB", "NVIDIA-A100-SXM4-40GB"),
    hami_up_to_2_7=("NVIDIA-NVIDIA A100-SXM4-40GB", "NVIDIA-A100-SXM4-40GB"),
    an_old_driver=("Tesla V100-PCIE-32GB", "NVIDIA-Tesla-V100-PCIE-32GB"),
    hami_with_an_old_driver=("NVIDIA-Tesla V100-PCIE-32GB", "NVIDIA-Tesla-V100-PCIE-32GB"),
    blanks=("  NVIDIA   GeForce RTX 3090 ", "NVIDIA-GeForce-RTX-3090"),
    letter_case=("nvidia L40S", "NVIDIA-L40S"),
    part_of_a_card=("NVIDIA-A100-SXM4-40GB-MIG-1g.5gb", "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb"),
    no_name=("", ""),
    only_the_vendor=("NVIDIA NVIDIA", ""),
    only_blanks=(" - ", ""),
    another_vendor=("NVIDIAX A100", "NVIDIA-NVIDIAX-A100"),
)
def test_the_names_of_all_sources_lead_to_one_form(written: str, product: str) -> None:
    assert normalise(written) == product
    assert normalise(product) == product


@cases(
    "product, model",
    a_pattern=("NVIDIA-A100-SXM4-40GB", "A100"),
    any_letter_case=("NVIDIA-a100-pcie-80gb", "A100"),
    no_row=("NVIDIA-L40S", "NVIDIA-L40S"),
    the_pattern_is_anchored=("NVIDIA-A100-SXM4-40GB-MIG-INVALID", "NVIDIA-A100-SXM4-40GB-MIG-INVALID"),
    a_row_without_the_vendor=("NVIDIA-Tesla-V100-PCIE-32GB", "V100"),
    the_name_of_a_row=("NVIDIA-A100", "A100"),
)
def test_a_product_has_the_model_of_its_row_or_its_own_name(product: str, model: str) -> None:
    assert model_of(product, rows("{A100: [NVIDIA-A100-*GB], V100: [Tesla V100-*]}")) == model


@given(st.text(max_size=200))
def test_every_product_becomes_a_valid_label_value(name: str) -> None:
    product = normalise(name)
    model = model_of(product, rows(""))
    assert read_label_value(model) == model if product else model == ""
    assert re.fullmatch(r"(NVIDIA-(?!NVIDIA-).*)?", product, re.DOTALL | re.IGNORECASE)


def test_a_quota_for_a_model_that_no_node_has_is_reported_with_the_nearest_name() -> None:
    known = {"NVIDIA-A100-SXM4-40GB", "NVIDIA-Tesla-T4"}
    assert model_warnings(["NVIDIA-Tesla-T4"], known) == ()
    assert model_warnings(["T4", "NVIDIA-Tesla-T5", "H100"], known) == (
        "no node has GPU model H100; nodes have NVIDIA-A100-SXM4-40GB, NVIDIA-Tesla-T4",
        "no node has GPU model NVIDIA-Tesla-T5; did you mean NVIDIA-Tesla-T4?",
        "no node has GPU model T4; did you mean NVIDIA-Tesla-T4?",
    )


def test_a_cluster_without_any_model_is_no_reason_to_doubt_each_name() -> None:
    assert model_warnings(["T4", "A100"], ()) == ("no node has a GPU model, so pods that request GPUs stay pending",)
    assert model_warnings([], ()) == ()


def test_only_a_few_of_ten_thousand_wrong_names_are_reported() -> None:
    *first, last = model_warnings([f"X{number:05}" for number in range(10_000)], {"A100"})
    assert (len(first), last) == (MAX_NAMES, f"and {10_000 - MAX_NAMES} more models that no node has")


@pytest.mark.parametrize(("count", "more"), [(MAX_NAMES, ""), (MAX_NAMES + 2, " and 2 more")])
def test_a_message_names_a_few_of_many(count: int, more: str) -> None:
    names = [f"n{number}" for number in range(count)]
    assert listed(names, MAX_NAMES) == ", ".join(names[:MAX_NAMES]) + more
