"""Tests of charges on nodes with a register (a node annotation that lists the cards)."""

import json
from typing import Any

from tests.api_double import ApiDouble
from tests.builders import LABELS, MODEL, container, pod, vcuda_pod, view
from tests.quota_map import store_quota
from tests.recounting import Recounting
from tests.replicas import Replica
from tests.tables import cases
from vcuda.kube import ClaimPolicies, DeviceInformer, NodeInformer, QuotaInformer, QuotaSource
from vcuda.placement.nodes import Nodes
from vcuda.placement.placement import find_candidates
from vcuda.placement.registers import Card, read_register
from vcuda.quota.model import Charge, Limit, NamespaceQuota
from vcuda.requests.config import parse_config
from vcuda.requests.pod_request import read_request
from vcuda.requests.resources import BUILT_IN, GpuResources
from vcuda.requests.schemes import HAMI, VGPU_MANAGER

GPU = {"nvidia.com/gpu": 1}
SHARE = {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 4096}
WHOLE, QUARTER = Charge(100, 0, 100), Charge(25, 0, 25)
SMALL, LARGE, FAULTY = (
    Card("GPU-1", "Tesla T4", memory=16384),
    Card("GPU-2", "Tesla T4", memory=40960),
    Card("GPU-3", "Tesla T4", memory=8192, healthy=False),
)


def configured(models: str = "", schemes: str = "") -> GpuResources:
    return parse_config({"gpu_quota": "{}", "gpu_models": models, "gpu_schemes": schemes}).resources


def nodes_with(*cards: Card, scheme: str = HAMI.name, named: GpuResources = BUILT_IN) -> Nodes:
    """Return two T4 nodes, one with a register (an annotation) of these cards, and one without a register."""
    labels = {name: {MODEL: "T4"} for name in ("registered", "plain")}
    return Nodes.of(labels, LABELS, {"registered": {scheme: tuple(cards)}}, named.models)


def charged(limits: dict[str, int], known: GpuResources, nodes: Nodes, model: str = "T4") -> Charge:
    return read_request(view(pod(container(limits))), known.with_registered(nodes.registered_cards)).charge_on(model)


@cases(
    "models, scheme, model, charge",
    where_hami_gives_cards=("{T4: {cards: 0.25}}", HAMI.name, "T4", WHOLE),
    of_another_model=("{T4: {cards: 0.25}, L4: {cards: 0.25}}", HAMI.name, "L4", QUARTER),
    where_vgpu_manager_gives_other_resources=("{T4: {cards: 0.25}}", VGPU_MANAGER.name, "T4", QUARTER),
    without_a_row=("", HAMI.name, "T4", WHOLE),
)
def test_a_plain_count_is_whole_cards_on_a_model_of_which_a_node_runs_hami(
    models: str, scheme: str, model: str, charge: Charge
) -> None:
    known = configured(models)
    assert charged(GPU, known, nodes_with(SMALL, scheme=scheme, named=known), model) == charge


def test_a_register_without_cards_makes_a_plain_count_whole_cards_too() -> None:
    known = configured("{T4: {cards: 0.25}}")
    assert charged(GPU, known, nodes_with(named=known)) == WHOLE


@cases(
    "models, cards, cores",
    of_the_only_card=("", (LARGE,), 10),
    of_the_smallest=("", (LARGE, SMALL), 25),
    of_the_smallest_healthy=("", (LARGE, FAULTY), 10),
    of_the_row=("{T4: {memory: 8Gi}}", (LARGE,), 50),
    unknown=("", (FAULTY, Card("GPU-4", "Tesla T4")), 100),
)
def test_a_share_is_charged_by_its_part_of_the_registered_cards_memory(
    models: str, cards: tuple[Card, ...], cores: int
) -> None:
    known = configured(models, "{hami: {default_cores: memory}}")
    assert charged(SHARE, known, nodes_with(*cards, named=known)) == Charge(cores, 4096)


@cases(
    "known",
    no_parts_and_no_price=configured(),
    a_stated_memory=configured("{T4: {memory: 8Gi}}", "{hami: {default_cores: memory}}"),
)
def test_registers_that_change_no_charge_leave_the_resources_as_they_are(known: GpuResources) -> None:
    """A new GpuResources object makes the controller LIST all pods again, so a register must not lead to one without
    need.
    """
    assert known.with_registered(nodes_with(SMALL).registered_cards) is known


def test_a_register_that_changes_a_charge_makes_different_resources() -> None:
    known = configured("{T4: {cards: 0.25}}")
    assert not known.with_registered(nodes_with(SMALL, named=known).registered_cards).counts_like(known)


def test_a_model_whose_registered_cards_are_all_too_small_is_excluded() -> None:
    manifest = view(pod(container({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 40961})))
    quota = NamespaceQuota({"T4": Limit(800)})
    found = find_candidates(manifest, read_request(manifest), quota, nodes_with(SMALL, LARGE))
    assert found.excluded == {
        "T4": "T4 is excluded, because its cards have 40960 MiB and a container requests 40961 MiB of one card"
    }
    fits = view(pod(container({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 40960})))
    assert find_candidates(fits, read_request(fits), quota, nodes_with(SMALL, LARGE)).models == ("T4",)


@cases(
    "text, healthy",
    hami=('[{"id": "GPU-1", "type": "T4", "health": true}]', True),
    hami_faulty=('[{"id": "GPU-1", "type": "T4", "health": false}]', False),
    hami_leaves_it_out=('[{"id": "GPU-1", "type": "T4"}]', True),
    a_number=('[{"id": "GPU-1", "type": "T4", "health": 0}]', True),
    vgpu_manager_faulty=('[{"id": 0, "uuid": "GPU-1", "type": "T4", "healthy": false}]', False),
    hami_up_to_2_7=("GPU-1,10,15360,100,T4,0,true:", True),
    hami_up_to_2_7_faulty=("GPU-1,10,15360,100,T4,0,false,0,mig:", False),
)
def test_a_card_is_faulty_only_if_its_register_says_so(text: str, healthy: bool) -> None:
    assert [card.healthy for card in read_register(text)] == [healthy]


def test_charges_follow_the_registers_even_without_served_claims(api: ApiDouble) -> None:
    store_quota(api, "{}", gpu_models="{T4: {cards: 0.25}}")
    quota = QuotaInformer(api.kube, QuotaSource(), frozenset())
    nodes = NodeInformer(api.kube, LABELS, resources=quota.resources)
    policies = ClaimPolicies(quota, nodes, DeviceInformer(api.kube))
    quota.reflector.relist()

    def resources_with(*cards: dict[str, Any]) -> GpuResources:
        annotations = {str(HAMI.register): json.dumps(cards)} if cards else {}
        metadata = {"name": "one", "labels": {MODEL: "T4"}, "annotations": annotations}
        api.store("/api/v1/nodes/one", {"metadata": metadata})
        nodes.reflector.relist()
        return policies.resources()

    parts, whole = resources_with(), resources_with({"id": "GPU-1", "type": "Tesla T4", "devmem": 15360})
    request = view(pod(container(GPU)))
    assert [read_request(request, known).charge_on("T4") for known in (parts, whole)] == [QUARTER, WHOLE]
    # A new register that changes no charge must lead to the same GpuResources
    # object. Otherwise all pods would be decoded again.
    assert resources_with({"id": "GPU-1", "type": "Tesla T4", "devmem": 16384}) is whole


def test_a_ledger_is_counted_by_present_values_before_the_watch_decodes_the_pods_again(
    api: ApiDouble, replica: Replica
) -> None:
    known = [configured("{M40: {cards: 0.25}}")]
    replica.store.resources = lambda: known[0]
    stored = vcuda_pod(GPU, metadata={"name": "train", "uid": "u"}, nodeSelector={MODEL: "M40"})
    recounting = Recounting(api, replica, None, stored)
    recounting.recount()
    assert replica.store.open("team-a").ledger.committed == {"M40": QUARTER}
    recounting.relist()
    hami = Nodes.of({"h": {MODEL: "M40"}}, LABELS, {"h": {HAMI.name: (SMALL,)}})
    known[0] = known[0].with_registered(hami.registered_cards)
    recounting.recount()
    assert replica.store.open("team-a").ledger.committed == {"M40": WHOLE}
