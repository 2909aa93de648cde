"""Tests of the conditions under which the GPU model of a node is in doubt, and of who wrote the model label."""

import pytest
from hypothesis import given, strategies as st

from examples import claims
from examples.discovery import A100, A100_PRODUCT, NAME, T4, features, found_on, hami, labelled, node
from tests.builders import MODEL, Manifest
from tests.tables import cases
from tests.unit.test_discovered import MIG_PRODUCT, ROWS
from vcuda.discovery.discovered import Doubt, Record
from vcuda.discovery.sources import SOURCES
from vcuda.placement.device_plugins import DISCOVERED, MAX_RECORD
from vcuda.requests.resources import NO_ROWS

# Tests of nodes whose GPU model is in doubt

DISAGREE = "the sources of the GPU model disagree"
SEVERAL = "the node has cards of several GPU models according to the register of hami"
INVALID_MIG = (
    f"label nvidia.com/gpu.product is {A100_PRODUCT}-MIG-INVALID, which names no product: the MIG devices of the node "
    "do not fit the strategy `single`"
)


@cases(
    "manifest, doubt, message",
    disagreeing=(
        node(features("Tesla-T4"), hami(A100)),
        Doubt.DISAGREE,
        f"{DISAGREE}: the register of hami reports A100, GPU feature discovery reports T4; the quota uses model A100",
    ),
    disagreeing_with_the_operator=(
        node(hami(A100), labelled("T4")),
        Doubt.DISAGREE,
        f"{DISAGREE}: the label is T4, the register of hami reports A100; the quota uses model T4",
    ),
    several_models=(
        node(hami(T4, A100, A100)),
        Doubt.SEVERAL,
        f"{SEVERAL}: A100 (2), T4 (1); the quota uses model A100",
    ),
    as_many_of_each=(node(hami(T4, A100)), Doubt.SEVERAL, f"{SEVERAL}: A100 (1), T4 (1); the quota uses model A100"),
    invalid_mig=(
        node(features(f"{A100_PRODUCT}-MIG-INVALID", count="0", memory="0")),
        Doubt.MIG_INVALID,
        f"{INVALID_MIG}; the node has no model",
    ),
    invalid_mig_of_a_labelled_node=(
        node(features(f"{A100_PRODUCT}-MIG-INVALID"), labelled("A100")),
        Doubt.MIG_INVALID,
        f"{INVALID_MIG}; the quota uses model A100",
    ),
    malformed_register=(
        node({"annotations": {"hami.io/node-nvidia-register": "[{"}}, features("Tesla-T4")),
        Doubt.MALFORMED,
        "the register in annotation hami.io/node-nvidia-register cannot be read; the quota uses model T4",
    ),
)
def test_a_doubt_is_reported_with_the_model_that_is_used(manifest: Manifest, doubt: Doubt, message: str) -> None:
    assert found_on(manifest, known=ROWS).doubts == {doubt: message}


def test_slices_without_a_product_are_reported() -> None:
    nameless = claims.slice_of(claims.NVIDIA, NAME, {"name": "gpu-0", "attributes": {"type": {"string": "gpu"}}})
    message = "the ResourceSlices of driver gpu.nvidia.com name no product; the node has no model"
    assert found_on(node(), [nameless], ROWS).doubts == {Doubt.NAMELESS: message}


@cases(
    "manifest",
    the_same=node(features(A100_PRODUCT), hami(A100)),
    a_share_of_the_same=node(features(f"{A100_PRODUCT}-SHARED"), hami(A100)),
    a_slice_of_the_same=node(features(MIG_PRODUCT), hami(A100)),
    one_of_several=node(hami(A100, A100, "NVIDIA A100-PCIE-80GB"), features("NVIDIA-A100-PCIE-80GB")),
    the_operator_s_model=node(hami(A100), labelled("A100")),
    words_of_the_name=node(hami("NVIDIA GeForce RTX 3090"), labelled("RTX3090")),
    gpu_manager_s_word=node(features("NVIDIA-Tesla-P4"), labelled("Tesla")),
    an_empty_label=node(hami(A100), labelled("")),
    no_source=node(labelled("A100")),
)
def test_sources_that_name_the_same_cards_agree(manifest: Manifest) -> None:
    assert found_on(manifest, known=ROWS).doubts == {}


# Tests of node labels that NVIDIA's operator or the controller has written


@cases(
    "manifest, source, missing, differs",
    none=(node(hami(A100)), "hami", True, False),
    ours=(node(hami(A100), labelled("A100", by="hami")), "hami", False, False),
    ours_by_the_products_name=(node(hami(A100), labelled(A100_PRODUCT, by="hami")), "hami", False, False),
    ours_of_another_model=(node(hami(A100), labelled("T4", by="hami")), "hami", False, True),
    the_operators=(node(hami(A100), labelled("T4")), "label", False, False),
    the_operators_in_place_of_ours=(
        node(hami(A100), {"annotations": {DISCOVERED: "A100 from hami"}}, labels={MODEL: "T4"}),
        "label",
        False,
        False,
    ),
    empty=(node(hami(A100), labelled("")), "label", False, False),
    removed=(node(hami(A100), {"annotations": {DISCOVERED: "T4 from hami"}}), "hami", True, False),
    lost=(node(labelled("T4", by="hami")), "hami", False, False),
    nothing=(node(), "", False, False),
)
def test_a_label_is_ours_only_with_the_value_that_our_annotation_records(
    manifest: Manifest, source: str, missing: bool, differs: bool
) -> None:
    found = found_on(manifest, known=ROWS)
    assert (found.source, found.is_missing(), found.differs(ROWS.models)) == (source, missing, differs)


def test_a_weaker_remaining_source_is_distinguished_from_a_stronger_one() -> None:
    lost = found_on(node(features("Tesla-T4"), labelled("A100", by="hami")), known=ROWS)
    assert (lost.differs(ROWS.models), lost.confirmed) == (True, None)
    assert "the source of the label, is lost" in lost.why_held(in_use=False)
    stronger = found_on(node(hami(A100), labelled("A100", by="gpu-feature-discovery")), known=ROWS)
    assert (stronger.differs(ROWS.models), stronger.why_held(in_use=False)) == (False, "")
    assert stronger.confirmed == Record("A100", "hami")


@given(st.text(max_size=300))
def test_any_text_in_our_annotation_is_a_record_or_none(text: str) -> None:
    found = found_on(node(hami(A100), {"annotations": {DISCOVERED: text}}, labels={MODEL: "T4"}))
    assert found.record is None or (found.record.model == "T4" and text[:MAX_RECORD].startswith("T4"))
    assert Record.read(str(Record("A100", "hami"))) == Record("A100", "hami")
    assert Record("A100", text).rank <= len(SOURCES)


def test_a_label_by_the_products_name_stays_when_a_row_names_it() -> None:
    """The controller keeps the product's name in the label, because pods may be restricted to this value."""
    manifest = node(hami(A100), labelled(A100_PRODUCT, by="hami"))
    assert not found_on(manifest).differs(NO_ROWS)
    assert not found_on(manifest, known=ROWS).differs(ROWS.models)


@given(
    st.dictionaries(st.sampled_from(["nvidia.com/gpu.product", "nvidia.com/gpu.count", MODEL]), st.text(max_size=90))
)
@pytest.mark.parametrize(
    "register", ["[{", '[{"id":"GPU-1","type":"A100"}]' + " " * 2**20, "GPU-0055,10,32768,100,NVI"]
)
def test_hostile_labels_and_registers_never_stop_the_discovery(register: str, labels: dict[str, str]) -> None:
    found = found_on(node({"annotations": {"hami.io/node-nvidia-register": register}}, labels=labels))
    assert Doubt.MALFORMED in found.doubts
    assert all(len(message) < 2000 for message in found.doubts.values())
