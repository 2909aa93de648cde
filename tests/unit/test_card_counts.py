"""Tests of the number of cards of each GPU model, from which an edit of the quota gets a warning."""

import msgspec

from examples.claims import A100, HAMI, M40, NVIDIA, claim_policy, device, shared, slice_of
from tests.builders import LABELS, MODEL
from tests.tables import cases
from tests.unit.test_quota_edit import edited
from vcuda.claims.objects import ResourceSlice
from vcuda.placement.nodes import COUNT_LABEL, NodeAvailability, Nodes, NodeStates
from vcuda.placement.registers import Card
from vcuda.quota.model import Quota
from webhook.review.context import PolicySnapshot

REGISTER = {"hami": tuple(Card(f"GPU-{number}", "NVIDIA A100") for number in range(4))}


def policy(
    *nodes: tuple[dict[str, str], dict[str, int]], slices: tuple[ResourceSlice, ...] = (), registered: int = 0
) -> PolicySnapshot:
    """Return a policy with A100 nodes, each with labels and offered resources. ``registered``: nodes of HAMi."""
    names = [f"n{number}" for number, _ in enumerate(nodes)]
    labels = {name: {MODEL: "A100", **own} for name, (own, _) in zip(names, nodes, strict=True)}
    found = Nodes.of({**labels, "bare": {}}, LABELS, dict.fromkeys(names[:registered], REGISTER))
    offers = (NodeAvailability(offered=frozenset(offered.items())) for _, offered in nodes)
    states = NodeStates.of(found.index.names, dict(zip(names, offers, strict=True)))
    return PolicySnapshot(Quota(), found, claims=claim_policy(slices, nodes=found), states=states)


def in_pool(slices: int, *names: str) -> ResourceSlice:
    """Return one of the ResourceSlices of a pool."""
    published = slice_of(NVIDIA, "n0", *(device(A100, name=name) for name in names))
    pool = msgspec.structs.replace(published.spec.pool, resource_slice_count=slices)
    return msgspec.structs.replace(published, spec=msgspec.structs.replace(published.spec, pool=pool))


@cases(
    "given, cards",
    by_label=(policy(({COUNT_LABEL: "8"}, {})), 8),
    by_register=(policy(({COUNT_LABEL: "40"}, {"nvidia.com/gpu": 40}), registered=1), 4),
    by_gpu_manager=(policy(({}, {"tencent.com/vcuda-core": 800, "tencent.com/vcuda-memory": 640})), 8),
    by_nvidias_plugin=(policy(({}, {"nvidia.com/gpu": 2})), 2),
    all_nodes_together=(policy(({COUNT_LABEL: "8"}, {}), ({}, {"tencent.com/vcuda-core": 400})), 12),
    a_node_that_says_nothing=(policy(({COUNT_LABEL: "8"}, {}), ({}, {})), None),
    a_label_that_is_no_number=(policy(({COUNT_LABEL: "many"}, {})), None),
    cards_in_mig_mode_are_not_offered=(policy(({}, {"nvidia.com/gpu": 2, "nvidia.com/mig-1g.5gb": 7})), None),
    by_slices=(policy(({}, {}), slices=(slice_of(NVIDIA, "n0", device(A100), device(A100, name="gpu-1")),)), 2),
    by_two_drivers=(
        policy(
            ({}, {}),
            slices=(
                slice_of(HAMI, "n0", shared(A100, "hami-gpu")),
                slice_of(NVIDIA, "n0", device(A100), device(A100, name="gpu-1")),
            ),
        ),
        2,
    ),
    by_several_slices=(policy(({}, {}), slices=(in_pool(2, "gpu-0", "gpu-1"), in_pool(2, "gpu-2"))), 3),
    a_slice_is_missing=(policy(({}, {}), slices=(in_pool(2, "gpu-0"),)), None),
    only_mig_devices=(policy(({}, {}), slices=(slice_of(NVIDIA, "n0", device(A100, "mig", "1g.5gb")),)), None),
    an_unknown_driver=(policy(({}, {}), slices=(slice_of("gpu.example.com", "n0", device(M40)),)), None),
)
def test_a_limit_above_the_cards_of_the_nodes_gives_a_warning(given: PolicySnapshot, cards: int | None) -> None:
    limit = 100 if cards is None else cards + 1
    present = f"{cards} card{'s' if cards != 1 else ''}"
    raised = f"is raised from 0 cards to {limit} cards, but the nodes have {present}"
    told = [f"team-a.quota.A100: the limit {raised}", f"A100: the sum of all limits {raised}"]
    assert edited(f"team-a: {{quota: {{A100: {limit}}}}}", given).warnings == ([] if cards is None else told)
    assert not edited(f"team-a: {{quota: {{A100: {cards or 0}}}}}", given).warnings
