"""Tests of the key `gpu_models`: the GPU products of each model, and the value of one whole device."""

import fnmatch
import json
import re
from fractions import Fraction

import jsonpatch
import msgspec
import pytest
from hypothesis import example, given, strategies as st

from controller.pods import PodInformer
from tests.api_double import ApiDouble
from tests.builders import (
    LABELS,
    MODEL,
    Manifest,
    container,
    held_to,
    pod,
    required,
    requirement,
    term,
    vcuda_pod,
    view,
)
from tests.quota_map import store_quota
from tests.tables import cases
from vcuda.allocations.stored_pods import charges_of, read_stored
from vcuda.claims.devices import Devices
from vcuda.claims.pin import ClaimPin, write_pin
from vcuda.claims.products import Products
from vcuda.discovery.sources import model_of, normalise
from vcuda.errors import QuotaFault
from vcuda.kube import NodeInformer, QuotaInformer, QuotaSource
from vcuda.placement.nodes import Nodes
from vcuda.placement.patches import PinSettings, patch_for
from vcuda.placement.placement import find_candidates, read_pod_pin
from vcuda.quota.model import Charge, Limit, NamespaceQuota
from vcuda.requests.card_models import common_product
from vcuda.requests.config import parse_config
from vcuda.requests.folding import fold
from vcuda.requests.pod_request import PodRequest, read_request
from vcuda.requests.resources import CardModels, GpuResources, matcher, product_matcher

SHARED = "NVIDIA-A100-SXM4-40GB-SHARED"
ROWS = """
A100-shared: {products: ["NVIDIA A100-*-SHARED"], cards: 0.25}
A100: [NVIDIA-A100-*GB]
T4: [Tesla-T4]
MIG: {cards: 0.14}
"""


def known(rows: str = ROWS, **data: str) -> GpuResources:
    return parse_config({"gpu_quota": "{}", "gpu_models": rows, **data}).resources


@cases(
    "product, model",
    by_a_pattern=(SHARED, "A100-shared"),
    by_another=("NVIDIA-A100-SXM4-40GB", "A100"),
    in_another_case=("nvidia-a100-pcie-40gb-shared", "A100-shared"),
    with_a_space=("NVIDIA A100-SXM4-40GB", "A100"),
    by_its_name_in_full=("Tesla T4", "T4"),
    by_the_name_of_the_model=("A100-shared", "A100-shared"),
    by_a_model_without_products=("mig", "MIG"),
    of_no_row=("M40", "M40"),
    of_no_row_in_its_case=("m40", "m40"),
    longer_than_any_product=(f"NVIDIA-A100-{'x' * 60}GB", f"NVIDIA-A100-{'x' * 60}GB"),
)
def test_a_product_has_the_model_whose_row_it_matches_or_its_own_name(product: str, model: str) -> None:
    assert known().models.model_of(product) == model


SPELLINGS = ("Tesla-T4", "NVIDIA-Tesla-T4", "Tesla T4", "NVIDIA Tesla T4", "nvidia-tesla-t4", "NVIDIA-NVIDIA Tesla T4")
"""The same product as drivers, GPU feature discovery, HAMi and clouds write it."""


@pytest.mark.parametrize("written", [*SPELLINGS, "NVIDIA?Tesla*", "NVIDIA*T4", "*-T4", "*Tesla-T?"])
def test_every_spelling_of_a_product_has_one_model_on_nodes_by_discovery_and_in_claims(written: str) -> None:
    named = known(json.dumps({"T4": [written]})).models
    products = Products.of(["T4"], named, Devices(), lambda _: None)
    assert {named.model_of(each) for each in SPELLINGS} == {"T4"}
    assert {model_of(normalise(each), named) for each in SPELLINGS} == {"T4"}
    assert {products.model_of(each) for each in SPELLINGS} == {"T4"}


def test_a_wildcard_may_stand_for_the_vendor() -> None:
    assert known("{L4: ['*-L4']}").models.model_of("NVIDIA-L4") == "L4"
    assert known("{L4: ['*-L4']}").models.model_of("L40") == "L40"


GPU, TWO = {"nvidia.com/gpu": 1}, {"nvidia.com/gpu": 2}
SEVENTH = Fraction(100, 7)
WHOLE = Charge(100, 0, 100)
RENAMED = "{hami: {resources: {count: nvidia.com/vgpu}}}"


@cases(
    "manifest, charge",
    one=(vcuda_pod(GPU), Charge(25, 0, 25)),
    several=(vcuda_pod({"nvidia.com/gpu": 3}), Charge(75, 0, 75)),
    the_largest_init_container=(pod(container(GPU), init=[container(TWO)]), Charge(50, 0, 50)),
    beside_a_share=(pod(container(GPU), container({**GPU, "nvidia.com/gpucores": 30})), Charge(55, 0, 125)),
    a_share=(vcuda_pod({**GPU, "nvidia.com/gpucores": 30, "nvidia.com/gpumem": 10}), Charge(30, 10)),
    all_cores_of_a_card=(vcuda_pod({**GPU, "nvidia.com/gpucores": 100}), WHOLE),
    memory_alone=(vcuda_pod({**GPU, "nvidia.com/gpumem": 10}), Charge(100, 10)),
    cores_of_0=(vcuda_pod({**GPU, "nvidia.com/gpucores": 0}), WHOLE),
    a_card_of_cores=(vcuda_pod({"tencent.com/vcuda-core": 100}), WHOLE),
    a_vgpu_of_another_vendor=(vcuda_pod({"nvidia.com/vgpu-number": 1}), WHOLE),
    a_unit=(vcuda_pod({"nvidia.com/mig-1g.5gb": 1}), Charge(SEVENTH, 5120)),
    beside_a_unit=(vcuda_pod({**GPU, "nvidia.com/mig-1g.5gb": 1}), Charge(25 + SEVENTH, 5120, 25)),
    a_class=(vcuda_pod({"deviceclass.resource.kubernetes.io/gpu.nvidia.com": 1}), WHOLE),
)
def test_only_a_whole_device_is_charged_the_value_of_its_model(manifest: Manifest, charge: Charge) -> None:
    request = read_request(view(manifest), known())
    assert request.charge_on("A100-shared") == charge
    assert request.charge_on("A100") == request.charge_on("M40") == request.charge
    assert read_request(view(manifest)).charge == request.charge


def test_a_whole_device_is_charged_the_same_if_its_resource_is_no_vgpu() -> None:
    manifest = view(vcuda_pod({"nvidia.com/gpu": 2, "nvidia.com/vgpu": 1, "nvidia.com/gpucores": 10}))
    request = read_request(manifest, known(gpu_schemes=RENAMED))
    assert (request.charge_on("A100-shared"), request.charge) == (Charge(60, 0, 150), Charge(210, 0, 300))


def held_to_any(*values: str) -> Manifest:
    return required(term(requirement(MODEL, "In", *values)))


PINNED = held_to("A100-shared")
BY_LABEL = held_to(SHARED)
ANYWHERE = held_to_any(SHARED, "NVIDIA-A100-SXM4-40GB")
MODELS = known().models
NODES = Nodes.of({"one": {MODEL: SHARED}}, LABELS, named=MODELS)


@cases(
    "affinity, node, model, charge",
    held_to_the_model=(PINNED, "", "A100-shared", Charge(25, 0, 25)),
    held_to_a_label=(BY_LABEL, "", "A100-shared", Charge(25, 0, 25)),
    held_to_both=(held_to_any("A100-shared", SHARED), "", "A100-shared", Charge(25, 0, 25)),
    on_a_node_of_it=({}, "one", "A100-shared", Charge(25, 0, 25)),
    held_to_two_models_on_a_node=(ANYWHERE, "one", "A100-shared", Charge(25, 0, 25)),
    held_to_another=(held_to("NVIDIA-A100-SXM4-40GB"), "one", "A100", WHOLE),
    on_no_known_node=({}, "two", None, WHOLE),
    held_to_two_models=(ANYWHERE, "", None, WHOLE),
)
def test_a_stored_pod_is_charged_by_its_committed_model(
    affinity: Manifest, node: str, model: str | None, charge: Charge
) -> None:
    manifest = vcuda_pod(GPU, metadata={"uid": "u"}, affinity=affinity, nodeName=node)
    stored = read_stored(view(manifest), LABELS, known())
    assert stored
    assert (stored.model_on(NODES), stored.charge_on(NODES)) == (model, charge)
    assert dict(charges_of([stored], NODES)) == ({model: charge} if model else {})


def test_devices_that_the_scheduler_has_claimed_for_a_pod_are_whole() -> None:
    claimed = {
        "extendedResourceClaimStatus": {"resourceClaimName": "train-extended-resources-x", "requestMappings": []}
    }
    stored = read_stored(view({**vcuda_pod(GPU, affinity=PINNED), "status": claimed}), LABELS, known())
    assert stored
    assert stored.charge_on(NODES) == WHOLE


QUOTA = NamespaceQuota({"A100-shared": Limit(100), "A100": Limit(800), "T4": Limit(800), "M40": Limit(800)})


def selecting(*lines: Manifest, **spec: object) -> Manifest:
    return vcuda_pod(GPU, affinity=required(term(*lines)), **spec) if lines else vcuda_pod(GPU, **spec)


@cases(
    "manifest, models",
    none=(selecting(), ("A100-shared", "A100", "T4", "M40")),
    a_label_of_a_node=(selecting(requirement(MODEL, "In", SHARED)), ("A100-shared",)),
    a_label_of_no_node=(selecting(requirement(MODEL, "In", "NVIDIA-A100-PCIE-80GB")), ("A100",)),
    the_name_of_a_model=(selecting(nodeSelector={MODEL: "A100"}), ("A100",)),
    another_label_of_no_node=(selecting(nodeSelector={MODEL: "NVIDIA-A100-PCIE-80GB-SHARED"}), ("A100-shared",)),
    not_what_nodes_have=(selecting(requirement(MODEL, "NotIn", SHARED, "A100-shared")), ("A100", "T4", "M40")),
    a_product_of_no_row=(selecting(requirement(MODEL, "In", "M40", "P100")), ("M40",)),
)
def test_the_labels_that_a_pod_selects_are_read_as_models(manifest: Manifest, models: tuple[str, ...]) -> None:
    found = find_candidates(view(manifest), PodRequest(Charge(), ()), QUOTA, NODES)
    assert found.models == models
    assert found.ready <= {"A100-shared"}


VALUES = ["A100-shared", SHARED]


@cases(
    "manifest, values",
    where_nothing_is_said=(selecting(), [VALUES]),
    beside_the_label_of_a_node=(selecting(requirement(MODEL, "In", SHARED)), []),
    beside_labels_of_no_node=(selecting(requirement(MODEL, "In", "NVIDIA-A100-X-SHARED")), []),
    beside_labels_of_two_models=(
        selecting(requirement(MODEL, "In", "M40", "NVIDIA-A100-X-SHARED")),
        [[*VALUES, "NVIDIA-A100-X-SHARED"]],
    ),
    beside_a_selector=(selecting(nodeSelector={MODEL: "NVIDIA-A100-X-SHARED"}), [[*VALUES, "NVIDIA-A100-X-SHARED"]]),
    beside_a_selector_of_another=(selecting(nodeSelector={MODEL: "M40"}), [VALUES]),
)
def test_a_pod_is_pinned_to_the_labels_of_the_nodes_of_its_model_and_to_those_it_names(
    manifest: Manifest, values: list[list[str]]
) -> None:
    """A second call of /mutate changes nothing, even if a node with another label was created in between."""
    patch = patch_for(view(manifest), "A100-shared", (), {}, PinSettings(), nodes=NODES)
    found = re.findall(r'"operator":"In","values":(\[[^]]*\])', msgspec.json.encode(patch).decode())
    assert [json.loads(each) for each in found] == values
    pinned = jsonpatch.apply_patch(manifest, msgspec.json.encode(patch))
    nodes = Nodes.of({"one": {MODEL: SHARED}, "two": {MODEL: "NVIDIA-A100-Y-SHARED"}}, LABELS, named=MODELS)
    assert patch_for(view(pinned), "A100-shared", (), {}, PinSettings(), nodes=nodes) == []
    if manifest["spec"].get("nodeSelector") != {MODEL: "M40"}:
        assert read_pod_pin(view(pinned), LABELS, MODELS).model == "A100-shared"


LABELLED_BEFORE = Nodes.of({"old": {MODEL: "NVIDIA-Tesla-T4"}}, LABELS, named=MODELS)
T4_VALUES = ["T4", "NVIDIA-Tesla-T4", "Tesla-T4"]


@cases(
    "selector, left, values",
    the_models_name=({MODEL: "T4", "a/b": "c"}, {"a/b": "c"}, T4_VALUES),
    one_of_its_labels=({MODEL: "NVIDIA-Tesla-T4"}, {MODEL: "NVIDIA-Tesla-T4"}, T4_VALUES),
    a_model_of_no_row=({MODEL: "M40"}, {MODEL: "M40"}, ["M40"]),
)
def test_a_node_selector_with_the_name_of_a_model_stands_for_all_labels_of_its_nodes(
    selector: dict[str, str], left: dict[str, str], values: list[str]
) -> None:
    """Kueue writes the label of a ResourceFlavor into the node selector, which allows only one value of a label."""
    manifest = selecting(nodeSelector=selector)
    model = MODELS.model_of(selector[MODEL])
    patch = patch_for(view(manifest), model, (), {}, PinSettings(), nodes=LABELLED_BEFORE)
    pinned = jsonpatch.apply_patch(manifest, patch)
    assert pinned["spec"]["nodeSelector"] == left
    assert pinned["spec"]["affinity"] == held_to_any(*values)
    assert patch_for(view(pinned), model, (), {}, PinSettings(), nodes=LABELLED_BEFORE) == []
    assert read_pod_pin(view(pinned), LABELS, MODELS).model == model


def test_a_model_of_whose_nodes_none_has_its_name_as_label_is_present() -> None:
    manifest = selecting(nodeSelector={MODEL: "T4"})
    found = find_candidates(view(manifest), PodRequest(Charge(), ()), QUOTA, LABELLED_BEFORE)
    assert found.models == ("T4",)
    assert found.ready == {"T4"}


@given(st.text("aAb-*? ", max_size=6), st.text("aAb- ", max_size=8))
@example("*-*-a", "--a")
def test_a_pattern_has_the_meaning_of_a_shell_pattern(pattern: str, name: str) -> None:
    assert bool(matcher([fold(pattern)])(fold(name))) == fnmatch.fnmatchcase(fold(name), fold(pattern))


ANY = st.text(st.characters(codec="ascii", categories=["L", "N", "P", "S", "Zs"]), min_size=1, max_size=20)
PIECES = st.lists(st.sampled_from([*"aKs.+(){}|^$/:#&~ -", "*", "?", "\u212a", "\u017f"]), min_size=1, max_size=8)


@given(PIECES.map("".join) | ANY, st.data())
def test_cel_matches_the_same_products_as_the_row(pattern: str, data: st.DataObject) -> None:
    """CEL matches patterns by RE2. The test uses Python's `re`, which differs for these patterns only in case folding.

    A driver may leave the vendor out of a product's name. A wildcard in CEL does not match the missing vendor.
    """
    name = data.draw(PIECES.map("".join) | ANY | st.just(pattern).map(lambda text: text.replace("*", "x").swapcase()))
    written = re.search(r'matches\("(.*)"\)$', write_pin(ClaimPin("driver", (fold(pattern),))))
    assert written
    expression = json.loads(f'"{written[1]}"')
    by_cel, by_row = re.compile(expression.removesuffix("$") + r"\Z").search, product_matcher([[fold(pattern)]])
    assert bool(by_cel(f"NVIDIA {name}")) == bool(by_row(fold(f"NVIDIA {name}")))
    assert not by_cel(name) or by_row(fold(name))


GLOBS = st.text("ab*?", min_size=1, max_size=6)


@given(GLOBS, GLOBS, st.text("abx", max_size=8))
def test_patterns_overlap_if_a_product_matches_both(one: str, other: str, name: str) -> None:
    both = common_product(one, other)
    assert both is None or (matcher([one])(both) and matcher([other])(both))
    assert both is not None or not (matcher([one])(name) and matcher([other])(name))


def test_a_pattern_of_many_wildcards_is_matched_in_linear_time() -> None:
    """A matcher that backtracks would need days for this pattern."""
    assert not matcher([f"{'*a' * 30}*b"])("a" * 64)
    assert common_product(f"{'*a' * 30}b", f"{'a*' * 31}c") is None


EXAMPLE = (
    "must be a product of at most 64 printable ASCII characters, for example NVIDIA-A100-*GB, "
    "where * stands for any text and ? for one character"
)
ONE = "a product must belong to only one model"
PART = "must be the part of a card that one nvidia.com/gpu is, above 0 and at most 1"
CASE = "because two models must not differ only in letter case or in a leading NVIDIA-"
VENDOR = "the vendor's name"
NARROW = "Make the pattern more specific, for example NVIDIA-A100-*GB"


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        ("A100: NVIDIA", ".A100: must be the products of a model, for example [NVIDIA-A100-*GB], or {"),
        ("A100: {product: [x]}", ".A100.product: unknown key; did you mean `products`?"),
        ("A100: {products: x}", '.A100.products: must be a list, for example [NVIDIA-A100-*GB]; got "x"'),
        ("A100: [a, 1]", f".A100[1]: {EXAMPLE}; got 1"),
        ("A100: {products: [é]}", f'.A100.products[0]: {EXAMPLE}; got "é"'),
        ('A100: [""]', f'.A100[0]: {EXAMPLE}; got ""'),
        ("A100: ['A[12]']", '.A100[0]: must not contain [; got "A[12]"'),
        (
            "A100: ['*-?']",
            f'.A100[0]: must have a letter or digit after {VENDOR}, so as not to match every product; got "*-?"',
        ),
        (
            "A100: ['NVIDIA*']",
            f".A100[0]: must have a letter or digit after {VENDOR}, so as not to match every product",
        ),
        (f"A100: [{', '.join('abc' * 11)}]", ".A100: must not have more than 32 products; got 33"),
        ("A100: {cards: 0.125}", ".A100.cards: must have at most two decimals, for example 0.13; got 0.125"),
        ("A100: {cards: 0}", f".A100.cards: {PART}; got 0"),
        ("A100: {cards: 1.01}", f".A100.cards: {PART}; got 1.01"),
        ("A100: {cards: '0.5'}", '.A100.cards: must be a number without quotes, for example 0.5; got "0.5"'),
        ("A100: [a-*, a-*]", ".A100[1]: duplicate product; each product must be listed once"),
        ("A100: [a1], B: [A1]", f'.B[0]: {ONE}: "A1" also matches a1, which belongs to A100 by "a1". {NARROW}'),
        (
            "A100: [A100-*], B: {products: [x, A100-*-SHARED]}",
            f'.B.products[1]: {ONE}: "A100-*-SHARED" also matches a100--shared, which belongs to A100 by "A100-*"',
        ),
        (
            "V: [Tesla V100-*], W: [NVIDIA-Tesla-V100-*]",
            f'.W[0]: {ONE}: "NVIDIA-Tesla-V100-*" also matches tesla-v100-, which belongs to V by',
        ),
        ("V: ['*-V100'], W: [V100]", f'.W[0]: {ONE}: "V100" also matches nvidia-v100, which belongs to V by'),
        (
            "M40: [], NVIDIA-M40: []",
            f".NVIDIA-M40: must be written as M40, {CASE}",
        ),
        ("A100: [h*], H100: [x]", f'.A100[0]: {ONE}: "h*" also matches h100, which is itself a model. {NARROW}'),
        ("A100: ['p*']", f'.A100[0]: {ONE}: "p*" also matches p100, which is itself a model. {NARROW}'),
        ("m40: []", f".m40: must be written as M40, {CASE}"),
        ("A100: [], a100: []", f".a100: must be written as A100, {CASE}"),
        ("a b: []", '["a b"]'),
    ],
)
def test_a_malformed_row_is_rejected_with_its_path(rows: str, fault: str) -> None:
    with pytest.raises(QuotaFault) as caught:
        parse_config({"gpu_quota": "{team-a: {quota: {M40: 1, P100: 1}}}", "gpu_models": f"{{{rows}}}"})
    [found] = caught.value.faults
    assert str(found).startswith(f"gpu_models{fault}" if fault[0] != "[" else "gpu_models[a b]: ")


def test_the_number_of_rows_is_bounded() -> None:
    rows = json.dumps({f"m{number}": [f"p{number}-*"] for number in range(257)})
    with pytest.raises(QuotaFault, match="must not have more than 256 models or 256 products; got 257 models and 257"):
        known(rows)
    assert len(known(json.dumps({f"m{number}": [f"p{number}-*"] for number in range(256)})).models.rows) == 256


@pytest.mark.parametrize("rows", ["[1]", "A100", "1", "[a"])
def test_a_value_that_is_no_mapping_is_rejected(rows: str) -> None:
    with pytest.raises(QuotaFault) as caught:
        known(rows)
    assert [fault.path for fault in caught.value.faults] == ["data.gpu_models"]


def test_an_empty_key_changes_nothing() -> None:
    assert known("").models == CardModels()


def test_an_edit_of_the_rows_causes_pods_and_nodes_to_be_read_again(api: ApiDouble) -> None:
    """Pods that were read before the edit keep their old charges until the next LIST of pods."""
    quota = QuotaInformer(api.kube, QuotaSource(), frozenset())
    nodes = NodeInformer(api.kube, LABELS, resources=quota.resources)
    pods = PodInformer(api.kube, LABELS, lambda _: None, resources=quota.resources)

    def edit(rows: str) -> None:
        store_quota(api, "{}", gpu_models=rows)
        quota.reflector.relist()

    api.store("/api/v1/nodes/one", {"metadata": {"name": "one", "labels": {MODEL: SHARED}}})
    stored = vcuda_pod(GPU, metadata={"uid": "u", "namespace": "team-a"}, nodeName="one")
    api.store("/api/v1/namespaces/team-a/pods/train-0", {**stored, "status": {"phase": "Running"}})
    edit("")
    nodes.reflector.relist()
    pods.reflector.relist()
    assert pods.observed("team-a", nodes.current()).committed == {SHARED: WHOLE}
    before = pods.config_version
    edit(ROWS)
    assert pods.observed("team-a", nodes.current()).committed == {"A100-shared": WHOLE}
    assert pods.config_version == before != quota.resources().version
    pods.reflector.relist()  # in a cluster, an edit of the quota causes this LIST
    after = pods.observed("team-a", nodes.current())
    assert after.committed == {"A100-shared": Charge(25, 0, 25)}
    assert after.config_version == quota.resources().version


def test_a_pin_is_read_as_the_models_of_its_values() -> None:
    pin = read_pod_pin(view(vcuda_pod(affinity=ANYWHERE)), LABELS, known().models)
    assert pin.models == frozenset({"A100", "A100-shared"})


@cases(
    "extended, charge",
    none=((), Charge(25, 0, 25)),
    another=(("amd.com/gpu",), Charge(25, 0, 25)),
    this=(("amd.com/gpu", "nvidia.com/gpu"), WHOLE),
)
def test_a_device_is_a_whole_card_if_the_scheduler_may_claim_one_for_it(
    extended: tuple[str, ...], charge: Charge
) -> None:
    charged = known().with_claimed(extended)
    assert read_request(view(vcuda_pod(GPU)), charged).charge_on("A100-shared") == charge
    assert charged.models.model_of(SHARED) == "A100-shared"
    assert charged.counts_like(known()) == (charge != WHOLE)
