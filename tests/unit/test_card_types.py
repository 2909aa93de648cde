"""Tests of the card types that HAMi and vgpu-manager may allocate, on nodes whose annotations list their cards."""

from collections.abc import Mapping

from hypothesis import assume, given, strategies as st

from tests.both_calls import Webhook, patched
from tests.builders import LABELS, MODEL, Manifest, held_to, policy_for, vcuda_pod
from tests.tables import cases
from vcuda.placement.nodes import Nodes, matches_model
from vcuda.placement.placement import MAX_CHOICE
from vcuda.placement.registers import Card
from vcuda.quota.model import Limit, NamespaceQuota

USE, NOT_USE = "nvidia.com/use-gputype", "nvidia.com/nouse-gputype"
INCLUDE = "nvidia.com/include-gpu-type"
SHARE = {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 1000, "nvidia.com/gpucores": 10}
VGPU = {"nvidia.com/vgpu-number": 1}


def cluster(scheme: str, /, **types: tuple[str, ...]) -> Nodes:
    """Return one node per model, with cards of these types. In a keyword, ``_`` stands for a model's ``-``."""
    models = {model.replace("_", "-"): kinds for model, kinds in types.items()}
    cards = {model: tuple(Card(f"GPU-{kind}", kind) for kind in kinds) for model, kinds in models.items()}
    registers = {model: {scheme: tuple(cards[model])} for model, kinds in models.items()}
    return Nodes.of({model: {MODEL: model} for model in models}, LABELS, registers)


def webhook(nodes: Nodes) -> Webhook:
    return Webhook(policy_for(NamespaceQuota({model: Limit(800) for model in sorted(nodes.models)}), nodes))


TESLA = cluster("hami", M40=("Tesla M40 24GB",), P100=("Tesla P100-PCIE-16GB",))
MIXED = cluster("hami", A10=("NVIDIA A10", "NVIDIA A100-SXM4-40GB"))
SIZES = cluster("hami", A100=("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB"))
PRODUCT = cluster("hami", NVIDIA_A100_SXM4_40GB=("NVIDIA A100-SXM4-40GB",))
ALIAS = cluster("hami", gold=("NVIDIA A10", "NVIDIA A100-SXM4-40GB"))
ELSEWHERE = cluster("hami", L4=("NVIDIA L4",), L40S=("NVIDIA L40S",))


@cases(
    "nodes, wants, told",
    in_the_register_s_words_not_the_label_s=(PRODUCT, {}, {USE: "NVIDIA A100-SXM4-40GB"}),
    nothing_without_a_register=(Nodes.of({"a": {MODEL: "M40"}}, LABELS), {}, {}),
    wanted_by_its_type=(TESLA, {USE: "tesla p100"}, {USE: "Tesla P100-PCIE-16GB"}),
    wanted_by_its_label=(PRODUCT, {USE: "NVIDIA-A100"}, {USE: "NVIDIA A100-SXM4-40GB"}),
    unwanted_by_its_type=(TESLA, {NOT_USE: "Tesla M40"}, {USE: "Tesla P100-PCIE-16GB", NOT_USE: "Tesla M40"}),
    one_size_of_two=(SIZES, {USE: "80GB"}, {USE: "NVIDIA A100-SXM4-80GB"}),
    not_the_other_size=(SIZES, {NOT_USE: "80gb"}, {USE: "NVIDIA A100-SXM4-40GB", NOT_USE: "80gb"}),
    both_sizes=(SIZES, {}, {USE: "NVIDIA A100-SXM4-40GB,NVIDIA A100-SXM4-80GB"}),
    never_the_card_beside=(MIXED, {}, {USE: "NVIDIA A10", NOT_USE: "NVIDIA A100-SXM4-40GB"}),
    beside_what_the_user_wrote=(MIXED, {NOT_USE: "T4"}, {USE: "NVIDIA A10", NOT_USE: "T4,NVIDIA A100-SXM4-40GB"}),
    nor_one_that_may_come_beside=(ELSEWHERE, {USE: "L4", NOT_USE: "T4"}, {USE: "NVIDIA L4", NOT_USE: "T4,NVIDIA L40S"}),
    a_label_that_names_no_type_is_all_of_them=(ALIAS, {}, {USE: "NVIDIA A10,NVIDIA A100-SXM4-40GB"}),
)
def test_the_pod_names_the_card_types_of_its_model_to_its_scheduler(
    nodes: Nodes, wants: Mapping[str, str], told: Mapping[str, str]
) -> None:
    sent = vcuda_pod(SHARE, annotations=wants)
    asked = webhook(nodes)
    result = patched(sent, asked.mutate(sent).patch)
    assert {key: text for key, text in result["metadata"]["annotations"].items() if "gputype" in key} == told
    assert list(asked.mutate(result).patch) == []
    assert asked.validate(result).allowed


def test_vgpu_manager_gets_the_types_in_its_own_format() -> None:
    nodes = cluster("vgpu-manager", GTX=("NVIDIA GeForce GTX 1050 Ti",))
    sent = vcuda_pod(VGPU, annotations={INCLUDE: "geforce"})
    result = patched(sent, webhook(nodes).mutate(sent).patch)
    assert result["metadata"]["annotations"][INCLUDE] == "NVIDIA GeForce GTX 1050 Ti"


@cases(
    "annotations",
    wanted={USE: "V100"},
    unwanted_type={NOT_USE: "Tesla"},
    all_wanted_are_unwanted={USE: "M40", NOT_USE: "24GB,P100"},
    too_long_a_text={NOT_USE: "T4," * MAX_CHOICE},
)
def test_type_annotations_that_leave_no_model_or_are_too_long_are_rejected(annotations: Mapping[str, str]) -> None:
    answer = webhook(TESLA).mutate(vcuda_pod(SHARE, annotations=annotations))
    assert (answer.allowed, answer.outcome) == (False, "not-allowed")


@cases(
    "annotations",
    none={},
    of_the_other={USE: "A100"},
    a_part_of_both={USE: "NVIDIA A10"},
    an_empty_text={USE: "T4,"},
    what_is_not_ascii={NOT_USE: "\u017fXM4"},
)
def test_a_pod_that_bypassed_mutate_and_could_get_another_models_card_is_rejected(
    annotations: Mapping[str, str],
) -> None:
    stored: Manifest = vcuda_pod(SHARE, annotations=annotations, affinity=held_to("A10"))
    answer = webhook(MIXED).validate(stored)
    assert (answer.allowed, "which is not of model A10" in answer.message) == (False, True)
    exact = {USE: "NVIDIA A10", NOT_USE: "A100"}
    assert webhook(MIXED).validate({**stored, "metadata": {"name": "a", "annotations": exact}}).allowed


def sliced(*mig: bool) -> Nodes:
    """Return one node with a HAMi card for each value of ``mig``, which is True for a card in MIG mode."""
    cards = tuple(Card(f"GPU-{number}", "NVIDIA A100", mode) for number, mode in enumerate(mig))
    return Nodes.of({"a": {MODEL: "A100"}}, LABELS, {"a": {"hami": tuple(cards)}})


MODE = "nvidia.com/vgpu-mode"
BOTH, ALL_MIG = sliced(True, False), sliced(True)
ANY_SLICE = "a share may get a MIG slice of any size; use a model whose cards are not in MIG mode"


@cases(
    "nodes, limits, mode, written, told",
    a_share_keeps_off_slices=(BOTH, SHARE, None, "hami-core", ""),
    that_it_wanted_anyway=(BOTH, SHARE, "hami-core", "hami-core", ""),
    it_wants_slices_too=(BOTH, SHARE, "hami-core,mig", None, f"annotation {MODE}: {ANY_SLICE}"),
    no_other_card_is_there=(ALL_MIG, SHARE, None, None, f"because its cards are in MIG mode: {ANY_SLICE}"),
    whole_cards_are_charged_whole=(ALL_MIG, {"nvidia.com/gpu": 1}, "mig", "mig", ""),
    no_card_in_MIG_mode=(sliced(False), SHARE, None, None, ""),
)
def test_a_share_never_gets_a_card_in_mig_mode(
    nodes: Nodes, limits: Mapping[str, int], mode: str | None, written: str | None, told: str
) -> None:
    """HAMi chooses the size of a MIG slice. For shares of one core each, it gave pods 14, 42, 100 and 100 cores."""
    sent = vcuda_pod(limits, annotations={MODE: mode} if mode else {})
    asked = webhook(nodes)
    answer = asked.mutate(sent)
    assert (answer.allowed, told in answer.message) == (not told, True)
    if answer.allowed:
        result = patched(sent, answer.patch)
        assert result["metadata"]["annotations"].get(MODE) == written
        assert (list(asked.mutate(result).patch), asked.validate(result).allowed) == ([], True)


@cases(
    "mode, reached",
    none=(None, True),
    slices=("mig", True),
    both=("hami-core,mig", True),
    neither=("hami-core", False),
)
def test_a_share_that_bypassed_mutate_and_could_get_a_mig_slice_is_rejected(mode: str | None, *, reached: bool) -> None:
    annotations = {USE: "NVIDIA A100", **({MODE: mode} if mode else {})}
    answer = webhook(BOTH).validate(vcuda_pod(SHARE, annotations=annotations, affinity=held_to("A100")))
    assert ("the pod's annotations allow a MIG slice of A100 of any size" in answer.message, answer.allowed) == (
        reached,
        not reached,
    )


@cases(
    "kind, model, named",
    a_word=("Tesla M40 24GB", "M40", True),
    in_any_case=("NVIDIA-Tesla V100-PCIE-32GB", "v100", True),
    a_part_of_a_word=("NVIDIA A100-SXM4-40GB", "A10", False),
    words_in_order=("NVIDIA A100-SXM4-40GB", "A100-40GB", True),
    another_size=("NVIDIA A100-SXM4-40GB", "A100-80GB", False),
    written_together=("NVIDIA GeForce RTX 3090", "RTX3090", True),
    a_product_label=("NVIDIA A100-SXM4-40GB", "NVIDIA-A100-SXM4-40GB", True),
    no_word_at_all=("T4", "-", False),
)
def test_a_label_names_a_type_by_whole_words(kind: str, model: str, *, named: bool) -> None:
    assert matches_model(kind, model) is named


KINDS = ("NVIDIA A10", "NVIDIA A100", "NVIDIA A100X", "Tesla M40", "tesla m40 24GB", "A10")
WANTS = st.dictionaries(
    st.sampled_from([USE, NOT_USE]), st.lists(st.sampled_from(["a10", "A100", "M40", "X", "24gb", ""])).map(",".join)
)


def as_hami_chooses(kind: str, annotations: Mapping[str, str]) -> bool:
    """Return what HAMi's function `checkGPUtype` in pkg/device/nvidia decides."""
    use, nouse = annotations.get(USE), annotations.get(NOT_USE)
    wanted = use is None or any(text.upper() in kind.upper() for text in use.split(","))
    return wanted and not (nouse is not None and any(text.upper() in kind.upper() for text in nouse.split(",")))


CLUSTERS = st.dictionaries(
    st.sampled_from(["A10", "A100", "M40", "gold"]), st.sets(st.sampled_from(KINDS), min_size=1), min_size=1
)


@given(CLUSTERS, WANTS)
def test_the_pod_gets_a_card_of_its_model_on_a_mixed_node(
    found: Mapping[str, set[str]], wants: Mapping[str, str]
) -> None:
    nodes = cluster("hami", **{model: tuple(sorted(kinds)) for model, kinds in found.items()})
    sent, asked = vcuda_pod(SHARE, annotations=wants), webhook(nodes)
    answer = asked.mutate(sent)
    assume(answer.outcome == "pinned")
    result = patched(sent, answer.patch)
    told, key = result["metadata"]["annotations"], ("hami", answer.model)
    assert not any(as_hami_chooses(kind, told) for kind in nodes.types.cards[key].foreign)
    assert "" in wants.get(NOT_USE, "-").split(",") or any(
        as_hami_chooses(kind, told) for kind in nodes.types.cards[key].own
    )
    assert list(asked.mutate(result).patch) == []
    assert asked.validate(result).allowed
