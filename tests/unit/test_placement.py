"""Which models a pod may use, which of them it gets, what it is told where there is none, and what holds it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import strategies
from tests.builders import (
    LABELS,
    MODEL,
    POOL,
    Manifest,
    container,
    held_to,
    nodes,
    pod,
    required,
    requirement,
    term,
    vcuda_pod,
    view,
)
from tests.node_selection import may_run_on
from vcuda.placement.affinity import NodeLabels
from vcuda.placement.placement import (
    Candidates,
    Choice,
    FreeCards,
    Nodes,
    Pin,
    choose,
    choose_regardless,
    find_candidates,
    free_by_model,
    read_free_cards,
    read_pin,
    write_free_cards,
)
from vcuda.quota.model import Charge, Limit, NamespaceQuota, Shortage, Usage
from vcuda.requests.pod_request import read_request
from vcuda.requests.schemes import GPU_MANAGER, HAMI, NVIDIA_VCUDA, VGPU_MANAGER, Scheme

ANYWHERE = nodes()
CARDS = {
    "a": {MODEL: "M40", POOL: "public"},
    "b": {MODEL: "P100", POOL: "public"},
    "c": {MODEL: "P100", POOL: "lab"},
    "d": {POOL: "public"},
}


def quota_of(*models: str, pools: Iterable[str] = ()) -> NamespaceQuota:
    """Return a quota of eight cards of each model."""
    return NamespaceQuota({model: Limit(800) for model in models}, tuple(pools))


QUOTA = quota_of("M40", "P100", "A100")


def candidates_of(
    pod: Manifest, *schemes: Scheme, quota: NamespaceQuota = QUOTA, cluster: Nodes = ANYWHERE
) -> Candidates:
    return find_candidates(view(pod), schemes or (GPU_MANAGER,), quota, cluster)


WANTED, UNWANTED = "nvidia.com/use-gputype", "nvidia.com/nouse-gputype"
INCLUDED, EXCLUDED = "nvidia.com/include-gpu-type", "nvidia.com/exclude-gpu-type"


@pytest.mark.parametrize(
    ("scheme", "annotations", "models"),
    [
        pytest.param(HAMI, {}, ("M40", "P100", "A100"), id="none"),
        pytest.param(HAMI, {WANTED: "M40"}, ("M40",), id="wanted"),
        pytest.param(HAMI, {WANTED: "m40"}, ("M40",), id="in-any-case"),
        pytest.param(HAMI, {WANTED: "100"}, ("P100", "A100"), id="a-part-of-the-name"),
        pytest.param(HAMI, {WANTED: " a100 ,M40"}, ("M40", "A100"), id="blanks-around-names"),
        pytest.param(HAMI, {WANTED: ""}, ("M40", "P100", "A100"), id="empty-asks-for-nothing"),
        pytest.param(HAMI, {WANTED: " , ,"}, ("M40", "P100", "A100"), id="blank-entries-ask-for-nothing"),
        pytest.param(HAMI, {WANTED: ",M40,"}, ("M40",), id="blank-entries-beside-a-name"),
        pytest.param(HAMI, {WANTED: "V100"}, (), id="wanted-is-not-in-the-quota"),
        pytest.param(HAMI, {UNWANTED: "p1"}, ("M40", "A100"), id="unwanted"),
        pytest.param(HAMI, {UNWANTED: " "}, ("M40", "P100", "A100"), id="blank-excludes-nothing"),
        pytest.param(HAMI, {WANTED: "100", UNWANTED: "A"}, ("P100",), id="both-apply"),
        pytest.param(NVIDIA_VCUDA, {WANTED: "M40"}, ("M40",), id="nvidia-vcuda-has-the-same"),
        pytest.param(VGPU_MANAGER, {INCLUDED: "p100,m4"}, ("M40", "P100"), id="vgpu-manager-include"),
        pytest.param(VGPU_MANAGER, {EXCLUDED: "P100, m4"}, ("A100",), id="vgpu-manager-exclude"),
        pytest.param(VGPU_MANAGER, {WANTED: "M40"}, ("M40", "P100", "A100"), id="another-scheme-s-says-nothing"),
        pytest.param(
            GPU_MANAGER, {WANTED: "M40", INCLUDED: "P100"}, ("M40", "P100", "A100"), id="gpu-manager-has-none"
        ),
    ],
)
def test_annotations_choose_among_the_quota_s_models(
    scheme: Scheme, annotations: Mapping[str, str], models: tuple[str, ...]
) -> None:
    assert candidates_of(vcuda_pod(annotations=annotations), scheme).models == models


def test_annotations_of_every_scheme_that_the_pod_uses_apply() -> None:
    pod = vcuda_pod(annotations={WANTED: "100", INCLUDED: "A"})
    assert candidates_of(pod, HAMI, VGPU_MANAGER).models == ("A100",)


HOST = "kubernetes.io/hostname"


def selecting(key: str, operator: str, *values: str) -> Manifest:
    """Return the part of a spec that requires this of the node's labels, or of its name."""
    line = requirement(key, operator, *values)
    return {"affinity": required(term(fields=[line]) if key == "metadata.name" else term(line))}


@pytest.mark.parametrize(
    ("spec", "models"),
    [
        pytest.param({}, ("M40", "P100", "A100"), id="free"),
        pytest.param({"nodeSelector": {MODEL: "P100"}}, ("P100",), id="selector"),
        pytest.param({"nodeSelector": {"zone": "x"}}, ("M40", "P100", "A100"), id="selector-of-something-else"),
        pytest.param({"nodeSelector": {MODEL: "V100"}}, (), id="selector-outside-the-quota"),
        pytest.param(selecting(MODEL, "NotIn", "M40"), ("P100", "A100"), id="all-but-one"),
        pytest.param(selecting(MODEL, "DoesNotExist"), (), id="no-model-at-all"),
        pytest.param(selecting(MODEL, "Gt", "1"), (), id="no-model-is-a-number"),
        pytest.param(
            {
                "affinity": required(term(requirement(MODEL, "In", "M40")), term(requirement(MODEL, "In", "P100"))),
                "nodeSelector": {MODEL: "P100"},
            },
            ("P100",),
            id="selector-and-terms",
        ),
        pytest.param({"affinity": required({})}, (), id="an-empty-term-is-no-way-out"),
        pytest.param({"affinity": required()}, (), id="no-terms"),
        pytest.param(
            {"affinity": required(term(requirement("zone", "Exists"), requirement("zone", "DoesNotExist")))},
            (),
            id="contradiction-elsewhere",
        ),
        pytest.param({"nodeName": "a"}, ("M40",), id="known-node"),
        pytest.param({"nodeName": "d"}, (), id="known-node-without-a-model"),
        pytest.param({"nodeName": "b", "nodeSelector": {MODEL: "M40"}}, (), id="known-node-of-another-model"),
        pytest.param({"nodeName": "new"}, ("M40", "P100", "A100"), id="unknown-node-may-be-any"),
        pytest.param(selecting("metadata.name", "In", "c"), ("P100",), id="match-fields"),
        pytest.param(
            {
                "affinity": required(
                    term(fields=[requirement("metadata.name", "In", "a")]),
                    term(fields=[requirement("metadata.name", "In", "new")]),
                )
            },
            ("M40", "P100", "A100"),
            id="match-fields-with-an-unknown-node",
        ),
        pytest.param(
            selecting("metadata.name", "NotIn", "a"),
            ("M40", "P100", "A100"),
            id="match-fields-not-in-leaves-nodes-to-come",
        ),
        pytest.param(selecting(HOST, "In", "a"), ("M40", "P100", "A100"), id="a-label-is-no-name"),
    ],
)
def test_node_selection_chooses_among_the_quota_s_models(spec: Manifest, models: tuple[str, ...]) -> None:
    assert candidates_of(vcuda_pod(**spec), cluster=nodes(**CARDS)).models == models


@pytest.mark.parametrize(
    ("spec", "models"),
    [
        pytest.param({}, ("M40", "P100"), id="free"),
        pytest.param({"nodeSelector": {POOL: "lab"}}, ("M40", "P100"), id="one-of-them"),
        pytest.param({"nodeSelector": {POOL: "private"}}, (), id="another"),
        pytest.param(selecting(POOL, "NotIn", "lab", "spare"), (), id="all-excluded"),
        pytest.param(selecting(POOL, "DoesNotExist"), (), id="no-pool-at-all"),
        pytest.param({"nodeName": "c"}, ("P100",), id="known-node-in-them"),
        pytest.param({"nodeName": "a"}, (), id="known-node-outside"),
        pytest.param({"nodeName": "new"}, ("M40", "P100"), id="unknown-node"),
    ],
)
def test_a_pod_stays_in_the_quota_s_pools(spec: Manifest, models: tuple[str, ...]) -> None:
    quota = quota_of("M40", "P100", pools=("lab", "spare"))
    assert candidates_of(vcuda_pod(**spec), quota=quota, cluster=nodes(**CARDS)).models == models


@pytest.mark.parametrize(
    ("pod", "scheme", "quota", "sentence"),
    [
        pytest.param(
            vcuda_pod(),
            GPU_MANAGER,
            NamespaceQuota({}),
            "namespace team-a may use no GPU model: its quota lists none",
            id="empty-quota",
        ),
        pytest.param(
            vcuda_pod(annotations={WANTED: "V100"}),
            HAMI,
            quota_of("M40"),
            "no GPU model that this pod may use in namespace team-a: "
            "M40 is excluded by annotation nvidia.com/use-gputype",
            id="wanted",
        ),
        pytest.param(
            vcuda_pod(annotations={EXCLUDED: "M"}, nodeSelector={MODEL: "V100"}),
            VGPU_MANAGER,
            quota_of("M40", "P100"),
            "no GPU model that this pod may use in namespace team-a: "
            "M40 is excluded by annotation nvidia.com/exclude-gpu-type; "
            "P100 is excluded by the pod's nodeName, nodeSelector or required node affinity",
            id="each-its-own-reason",
        ),
        pytest.param(
            vcuda_pod(nodeSelector={POOL: "public"}),
            GPU_MANAGER,
            quota_of("M40", pools=("lab", "spare")),
            "no GPU model that this pod may use in namespace team-a: M40 is excluded by the pod's node selection, "
            "which leaves no node in the namespace's pools lab, spare",
            id="pools",
        ),
    ],
)
def test_a_pod_without_a_model_is_told_why(pod: Manifest, scheme: Scheme, quota: NamespaceQuota, sentence: str) -> None:
    found = candidates_of(pod, scheme, quota=quota)
    assert found.models == ()
    assert found.sentence("team-a", quota) == sentence


@pytest.mark.parametrize(
    ("spec", "pools", "present"),
    [
        pytest.param({}, (), {"M40", "P100"}, id="free"),
        pytest.param({}, ("lab",), {"P100"}, id="in-the-pools"),
        pytest.param({"nodeSelector": {"zone": "x"}}, (), set(), id="none-that-the-pod-may-use"),
        pytest.param({"nodeSelector": {MODEL: "M40"}}, (), {"M40"}, id="only-candidates"),
    ],
)
def test_present_are_the_models_of_nodes_that_the_pod_may_use_now(
    spec: Manifest, pools: tuple[str, ...], present: set[str]
) -> None:
    quota = quota_of("M40", "P100", "A100", pools=pools)
    assert candidates_of(vcuda_pod(**spec), quota=quota, cluster=nodes(**CARDS)).present == present


def test_the_labels_that_hold_model_and_pool_can_be_set() -> None:
    keys = NodeLabels("example.com/card", "example.com/pool")
    cluster = Nodes.of({"a": {"example.com/card": "M40", MODEL: "P100"}}, keys)
    assert cluster.model_of("a") == "M40"
    pod = vcuda_pod(nodeSelector={"example.com/card": "M40", MODEL: "V100"})
    assert candidates_of(pod, cluster=cluster).models == ("M40",)
    assert read_pin(view(pod), keys).model == "M40"


@pytest.mark.parametrize("name", ["d", "new"])
def test_a_node_without_a_model_has_none(name: str) -> None:
    assert nodes(**CARDS).model_of(name) is None


@given(strategies.pods(), strategies.quotas(), strategies.clusters())
@settings(max_examples=150)
def test_a_model_with_a_node_for_the_pod_is_a_candidate(pod: Manifest, quota: NamespaceQuota, cluster: Nodes) -> None:
    """By brute force over the nodes: nobody is refused a model that would have taken the pod."""
    found = find_candidates(view(pod), read_request(view(pod)).schemes, quota, cluster)
    usable = {model for model in quota.limits if wanted(pod, model) and takers(pod, model, quota, cluster)}
    assert found.present == usable
    assert usable <= set(found.models)
    assert set(found.models) | found.excluded.keys() == quota.limits.keys()
    assert not set(found.models) & found.excluded.keys()


@given(strategies.pods(), strategies.quotas(), strategies.clusters(), st.data())
@settings(max_examples=150)
def test_a_node_to_come_is_a_candidate_too(
    pod: Manifest, quota: NamespaceQuota, cluster: Nodes, data: st.DataObject
) -> None:
    """Placement looks at known nodes only where the pod names them: any other model may yet get its node."""
    labels = data.draw(strategies.label_sets())
    later = Nodes.of({**cluster.labels, "node-new": labels}, LABELS)
    found = find_candidates(view(pod), read_request(view(pod)).schemes, quota, cluster)
    assert found.models == find_candidates(view(pod), read_request(view(pod)).schemes, quota, later).models


def takers(pod: Manifest, model: str, quota: NamespaceQuota, cluster: Nodes) -> list[str]:
    """Return the nodes of the model that the pod may run on, in the quota's pools."""
    return [
        name
        for name, labels in cluster.labels.items()
        if labels.get(MODEL) == model
        and (not quota.pools or labels.get(POOL) in quota.pools)
        and may_run_on(pod, name, labels)
    ]


def wanted(pod: Mapping[str, Any], model: str) -> bool:
    """Return whether the pod's annotations allow a model, for the schemes that its containers use."""
    resources = " ".join(name for one in pod["spec"]["containers"] for name in one["resources"]["limits"])
    annotations = pod["metadata"].get("annotations") or {}

    def parts(key: str) -> list[str]:
        return [part.strip().lower() for part in annotations.get(key, "").split(",") if part.strip()]

    pairs = []
    if "nvidia.com/gpu" in resources or "nvidia.com/vcuda" in resources:
        pairs.append((WANTED, UNWANTED))
    if "nvidia.com/vgpu-number" in resources:
        pairs.append((INCLUDED, EXCLUDED))
    for include, exclude in pairs:
        if parts(include) and not any(part in model.lower() for part in parts(include)):
            return False
        if any(part in model.lower() for part in parts(exclude)):
            return False
    return True


CARD, SHARE, SHARES = Charge(100, card_memory=100), Charge(50, 1024), Charge(120, 2048)


def used(**cores: int) -> dict[str, Usage]:
    """Return what is used of each model, in cores."""
    return {model: Usage(Charge(used)) for model, used in cores.items()}


@pytest.mark.parametrize(
    ("present", "usage", "model", "reason"),
    [
        pytest.param("", {}, "M40", "most room, 8 cards of 8 cards free", id="first-in-the-document"),
        pytest.param("", {"M40": 100}, "P100", "most room, 8 cards of 8 cards free", id="most-room"),
        pytest.param("", {"M40": 1, "P100": 1, "A100": 2}, "M40", "most room, 7.99 cards of 8 cards free", id="tie"),
        pytest.param(
            "A100", {"A100": 700}, "A100", "a node of it can take the pod now, 1 card of 8 cards free", id="present"
        ),
        pytest.param(
            "M40 A100",
            {"M40": 300},
            "A100",
            "a node of it can take the pod now, 8 cards of 8 cards free",
            id="two-present",
        ),
        pytest.param("M40 P100 A100", {"M40": 300}, "P100", "most room, 8 cards of 8 cards free", id="all-present"),
        pytest.param("A100", {"A100": 750}, "M40", "most room, 8 cards of 8 cards free", id="present-but-full"),
        pytest.param(
            "M40",
            {"M40": 800, "P100": 701},
            "A100",
            "the only model with room, 8 cards of 8 cards free",
            id="the-only-one-with-room",
        ),
    ],
)
def test_the_choice_goes_by_present_nodes_then_room_then_order(
    present: str, usage: dict[str, int], model: str, reason: str
) -> None:
    candidates = Candidates(("M40", "P100", "A100"), frozenset(present.split()), {})
    assert choose(candidates, QUOTA, Charge(100), used(**usage)) == Choice(model, reason)


@pytest.mark.parametrize(
    ("free", "asked", "model"),
    [
        pytest.param({"M40": FreeCards(8, 2, 300), "P100": FreeCards(8, 3, 300)}, CARD, "P100", id="whole cards"),
        pytest.param({"M40": FreeCards(8, 2, 300), "P100": FreeCards(8, 3, 300)}, SHARE, "M40", id="a share, first"),
        pytest.param({"M40": FreeCards(8, 0, 100), "P100": FreeCards(8, 0, 200)}, SHARE, "P100", id="a share, free"),
        pytest.param({"M40": FreeCards(8, 1, 100), "P100": FreeCards(8, 0, 200)}, SHARES, "P100", id="several shares"),
        pytest.param({"A100": FreeCards(8, 1, 100)}, CARD, "A100", id="none of the others"),
        pytest.param({}, CARD, "M40", id="not published"),
    ],
)
def test_where_it_is_published_the_model_with_the_most_free_cards_is_chosen(
    free: dict[str, FreeCards], asked: Charge, model: str
) -> None:
    present = frozenset(("M40", "P100", "A100"))
    candidates = Candidates(("M40", "P100", "A100"), present, {}, free)
    chosen = choose(candidates, QUOTA, asked, {})
    assert isinstance(chosen, Choice)
    assert chosen.model == model
    assert chosen.reason.startswith("most room" if model == "M40" else "most cards are free")


def test_what_was_admitted_a_moment_ago_counts_as_no_longer_free() -> None:
    """The figures are some seconds old: a burst of pods must not all go to one model."""
    free = {"M40": FreeCards(8, 3, 300), "P100": FreeCards(8, 2, 200)}
    candidates = Candidates(("M40", "P100"), frozenset(("M40", "P100")), {}, free)
    pending = {"M40": Usage(Charge(200), Charge(200))}
    chosen = choose(candidates, QUOTA, CARD, pending)
    assert isinstance(chosen, Choice)
    assert chosen.model == "P100"


def test_free_cards_of_other_pools_are_not_the_pods() -> None:
    figures = {
        ("M40", "lab"): FreeCards(8, 8, 800),
        ("M40", "public"): FreeCards(8, 1, 100),
        ("P100", ""): FreeCards(1),
    }
    assert free_by_model(figures, ["public"]) == {"M40": FreeCards(8, 1, 100)}
    assert free_by_model(figures, []) == {"M40": FreeCards(16, 9, 900), "P100": FreeCards(1)}


def test_figures_are_read_as_they_were_published() -> None:
    figures = {("M40", "lab"): FreeCards(8, 7, 760, 60, 100), ("P100", ""): FreeCards(1)}
    assert read_free_cards(write_free_cards(figures)) == figures
    assert free_by_model(figures, []) == {"M40": FreeCards(8, 7, 760, 60, 100), "P100": FreeCards(1)}
    with pytest.raises(ValueError, match="Expected"):
        read_free_cards("{}")


def test_figures_of_an_earlier_and_of_a_later_release_are_read() -> None:
    row = {"model": "M40", "pool": "lab", "free": {"cards": 8, "free_cores": 80, "new": 1}, "new": 1}
    assert read_free_cards(json.dumps([row])) == {("M40", "lab"): FreeCards(8, 0, 80)}


HALVES, WHOLE = FreeCards(8, 0, 400, 400, 50), FreeCards(1, 1, 100, 0, 100)
"""Eight cards of which half is used, and one free card."""


@pytest.mark.parametrize(
    ("containers", "halves", "chosen"),
    [
        pytest.param([(60, 10)], HALVES, ("P100", "a card of it has room now, 8 cards of 8 cards free"), id="60"),
        pytest.param([(50, 10)], HALVES, ("M40", "most cards are free, 8 cards of 8 cards free"), id="50"),
        pytest.param([(25, 10)] * 4, HALVES, ("M40", "most cards are free, 8 cards of 8 cards free"), id="4 of 25"),
        pytest.param([(100, 0)], HALVES, ("P100", "a card of it has room now, 8 cards of 8 cards free"), id="a card"),
        pytest.param(
            [(60, 10)],
            FreeCards(8, 0, 400, 400),
            ("M40", "most cards are free, 8 cards of 8 cards free"),
            id="published by an earlier release",
        ),
    ],
)
def test_a_model_none_of_whose_cards_has_room_for_a_container_comes_last(
    containers: list[tuple[int, int]], halves: FreeCards, chosen: tuple[str, str]
) -> None:
    """A pod is held to its model for good: the sum of what is free on many cards is no use to it."""
    limits = [{"tencent.com/vcuda-core": cores, "tencent.com/vcuda-memory": memory} for cores, memory in containers]
    asking = view(pod(*(container(each) for each in limits)))
    request, quota = read_request(asking), quota_of("M40", "P100")
    whole = WHOLE if halves.largest else msgspec.structs.replace(WHOLE, largest=0)
    nodes = Nodes(free={("M40", ""): halves, ("P100", ""): whole})
    candidates = find_candidates(asking, request.schemes, quota, nodes, request.share)
    assert choose(candidates, quota, request.charge, {}) == Choice(*chosen)


def test_the_only_candidate_is_taken_as_such() -> None:
    candidates = Candidates(("P100",), frozenset({"P100"}), {"M40": "annotation x"})
    assert choose(candidates, QUOTA, Charge(100), {}) == Choice(
        "P100", "the only model it may use, 8 cards of 8 cards free"
    )


def test_what_no_model_has_room_for_is_told_in_the_order_of_the_document() -> None:
    quota = NamespaceQuota({"M40": Limit(200), "P100": Limit(400)})
    candidates = Candidates(("M40", "P100"), frozenset({"P100"}), {})
    usage = {"P100": Usage(Charge(350), pending=Charge(50))}
    assert choose(candidates, quota, Charge(250), usage) == (
        Shortage("M40", Charge(250), Usage(), Limit(200)),
        Shortage("P100", Charge(250), usage["P100"], Limit(400)),
    )


@pytest.mark.parametrize(
    ("memory", "model"),
    [
        pytest.param(None, "M40", id="not-limited"),
        pytest.param(2048, "M40", id="just-enough"),
        pytest.param(2047, "P100", id="too-little"),
    ],
)
def test_a_model_needs_room_in_memory_too(memory: int | None, model: str) -> None:
    quota = NamespaceQuota({"M40": Limit(800, memory), "P100": Limit(100)})
    candidates = Candidates(("M40", "P100"), frozenset(), {})
    usage = {"M40": Usage(Charge(50, 1024))}
    choice = choose(candidates, quota, Charge(50, 1024), usage)
    assert isinstance(choice, Choice)
    assert choice.model == model


def test_whole_cards_take_their_share_of_the_memory() -> None:
    """Two of four cards are half of the memory, so a share that needs more than the other half goes elsewhere."""
    quota = NamespaceQuota({"M40": Limit(400, 4096), "P100": Limit(50)})
    candidates = Candidates(("M40", "P100"), frozenset(), {})
    usage = {"M40": Usage(Charge(200, card_memory=200))}
    assert isinstance(choose(candidates, quota, Charge(50, 2048), usage), Choice)
    assert choose(candidates, quota, Charge(50, 2049), usage) == Choice(
        "P100", "the only model with room, 0.5 cards of 0.5 cards free"
    )


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        pytest.param(300, "the only model with room, 3 cards of 4 cards free", id="room"),
        pytest.param(900, "over quota on every model, and this quota does not enforce", id="no-room"),
    ],
)
def test_a_quota_that_does_not_enforce_always_chooses(asked: int, reason: str) -> None:
    quota = NamespaceQuota({"M40": Limit(200), "P100": Limit(400)})
    candidates = Candidates(("M40", "P100"), frozenset(), {})
    assert choose_regardless(candidates, quota, Charge(asked), used(P100=100)) == Choice("P100", reason)


@pytest.mark.parametrize(
    ("stored", "models", "pools", "within"),
    [
        pytest.param(vcuda_pod(), None, None, False, id="not-held"),
        pytest.param(vcuda_pod(affinity=held_to("M40", "lab")), {"M40"}, {"lab"}, True, id="held"),
        pytest.param(vcuda_pod(nodeSelector={MODEL: "M40", POOL: "lab"}), {"M40"}, {"lab"}, True, id="by-selector"),
        pytest.param(vcuda_pod(affinity=held_to("M40")), {"M40"}, None, False, id="any-pool"),
        pytest.param(
            vcuda_pod(affinity=held_to("M40", "lab", "public")), {"M40"}, {"lab", "public"}, False, id="more-pools"
        ),
        pytest.param(vcuda_pod(affinity=held_to("V100", "lab")), {"V100"}, {"lab"}, False, id="not-in-the-quota"),
        pytest.param(
            vcuda_pod(affinity=required(term(requirement(MODEL, "In", "M40", "P100"), requirement(POOL, "In", "lab")))),
            {"M40", "P100"},
            {"lab"},
            False,
            id="two-models",
        ),
        pytest.param(
            vcuda_pod(affinity=required(term(requirement(MODEL, "In", "M40")), term(requirement(MODEL, "In", "P100")))),
            {"M40", "P100"},
            None,
            False,
            id="two-terms",
        ),
        pytest.param(
            vcuda_pod(affinity=required(term(requirement(MODEL, "In", "M40")), term(requirement("x", "Exists")))),
            None,
            None,
            False,
            id="a-term-leaves-it-open",
        ),
        pytest.param(vcuda_pod(affinity=required({})), frozenset(), frozenset(), False, id="nowhere"),
        pytest.param(vcuda_pod(nodeName="c"), None, None, False, id="a-node-name-holds-no-model"),
        pytest.param(
            vcuda_pod(annotations={"quota.vcuda.io/model": "M40", "nvidia.com/use-gputype": "M40"}),
            None,
            None,
            False,
            id="annotations-hold-nothing",
        ),
    ],
)
def test_a_stored_pod_is_held_by_its_spec_alone(
    stored: Manifest, models: Iterable[str] | None, pools: Iterable[str] | None, within: bool
) -> None:
    pin = read_pin(view(stored), LABELS)
    assert pin == Pin(None if models is None else frozenset(models), None if pools is None else frozenset(pools))
    assert pin.within(quota_of("M40", "P100", pools=("lab",))) is within


@pytest.mark.parametrize(
    ("pin", "within"),
    [
        pytest.param(Pin(frozenset({"M40"}), None), True, id="any-pool"),
        pytest.param(Pin(frozenset({"M40"}), frozenset()), True, id="no-node-at-all"),
        pytest.param(Pin(frozenset(), None), False, id="no-model"),
        pytest.param(Pin(None, None), False, id="any-model"),
    ],
)
def test_without_pools_in_the_quota_only_the_model_counts(pin: Pin, within: bool) -> None:
    assert pin.within(quota_of("M40")) is within
