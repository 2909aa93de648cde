"""Tests of placement: which models a pod may use, and the message if it may use none."""

import itertools
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
from hypothesis import given, settings, strategies as st

from tests import strategies
from tests.builders import LABELS, MODEL, POOL, Manifest, nodes, required, requirement, term, vcuda_pod, view
from tests.node_selection import may_run_on
from tests.tables import cases
from vcuda.k8s_types import Pod
from vcuda.placement.affinity import NodeLabels
from vcuda.placement.nodes import Nodes
from vcuda.placement.placement import Candidates, Pin, find_candidates, read_pod_pin
from vcuda.quota.model import Charge, Limit, NamespaceQuota
from vcuda.requests.pod_request import PodRequest, read_request
from vcuda.requests.schemes import GPU_MANAGER, HAMI, NVIDIA_VCUDA, VGPU_MANAGER, Scheme

ALL = ("M40", "P100", "A100")
ANYWHERE = nodes()
CARDS = nodes(
    a={MODEL: "M40", POOL: "public"},
    b={MODEL: "P100", POOL: "public"},
    c={MODEL: "P100", POOL: "lab"},
    d={POOL: "public"},
)


def quota_of(*models: str, pools: Iterable[str] = ()) -> NamespaceQuota:
    return NamespaceQuota({model: Limit(800) for model in models}, tuple(pools))


QUOTA = quota_of(*ALL)


def candidates_of(
    pod: Manifest, *schemes: Scheme, quota: NamespaceQuota = QUOTA, cluster: Nodes = ANYWHERE
) -> Candidates:
    return find_candidates(view(pod), PodRequest(Charge(), schemes or (GPU_MANAGER,)), quota, cluster)


WANTED, UNWANTED = "nvidia.com/use-gputype", "nvidia.com/nouse-gputype"
INCLUDED, EXCLUDED = "nvidia.com/include-gpu-type", "nvidia.com/exclude-gpu-type"


@cases(
    "scheme, annotations, models",
    none=(HAMI, {}, ALL),
    wanted=(HAMI, {WANTED: "M40"}, ("M40",)),
    in_any_case=(HAMI, {WANTED: "m40"}, ("M40",)),
    a_part_of_the_name=(HAMI, {WANTED: "100"}, ("P100", "A100")),
    blanks_around_names=(HAMI, {WANTED: " a100 ,M40"}, ("M40", "A100")),
    empty_asks_for_nothing=(HAMI, {WANTED: ""}, ALL),
    blank_entries_ask_for_nothing=(HAMI, {WANTED: " , ,"}, ALL),
    blank_entries_beside_a_name=(HAMI, {WANTED: ",M40,"}, ("M40",)),
    wanted_is_not_in_the_quota=(HAMI, {WANTED: "V100"}, ()),
    unwanted=(HAMI, {UNWANTED: "p1"}, ("M40", "A100")),
    blank_excludes_nothing=(HAMI, {UNWANTED: " "}, ALL),
    both_apply=(HAMI, {WANTED: "100", UNWANTED: "A"}, ("P100",)),
    nvidia_vcuda_has_the_same=(NVIDIA_VCUDA, {WANTED: "M40"}, ("M40",)),
    vgpu_manager_include=(VGPU_MANAGER, {INCLUDED: "p100,m4"}, ("M40", "P100")),
    vgpu_manager_exclude=(VGPU_MANAGER, {EXCLUDED: "P100, m4"}, ("A100",)),
    another_scheme_s_says_nothing=(VGPU_MANAGER, {WANTED: "M40"}, ALL),
    gpu_manager_has_none=(GPU_MANAGER, {WANTED: "M40", INCLUDED: "P100"}, ALL),
)
def test_annotations_choose_among_the_quota_s_models(
    scheme: Scheme, annotations: Mapping[str, str], models: tuple[str, ...]
) -> None:
    assert candidates_of(vcuda_pod(annotations=annotations), scheme).models == models


def test_annotations_of_every_scheme_that_the_pod_uses_apply() -> None:
    pod = vcuda_pod(annotations={WANTED: "100", INCLUDED: "A"})
    assert candidates_of(pod, HAMI, VGPU_MANAGER).models == ("A100",)


EITHER = required(term(requirement(MODEL, "In", "M40")), term(requirement(MODEL, "In", "P100")))
NOWHERE = required(term(requirement("zone", "Exists"), requirement("zone", "DoesNotExist")))
A_OR_NEW = required(*(term(fields=[requirement("metadata.name", "In", name)]) for name in ("a", "new")))


def selecting(key: str, operator: str, *values: str) -> Manifest:
    """Return fields of a pod spec that select nodes by this label, or by name if the key is metadata.name."""
    line = requirement(key, operator, *values)
    return {"affinity": required(term(fields=[line]) if key == "metadata.name" else term(line))}


@cases(
    "spec, models",
    free=({}, ALL),
    selector=({"nodeSelector": {MODEL: "P100"}}, ("P100",)),
    selector_of_something_else=({"nodeSelector": {"zone": "x"}}, ALL),
    selector_outside_the_quota=({"nodeSelector": {MODEL: "V100"}}, ()),
    all_but_one=(selecting(MODEL, "NotIn", "M40"), ("P100", "A100")),
    no_model_at_all=(selecting(MODEL, "DoesNotExist"), ()),
    no_model_is_a_number=(selecting(MODEL, "Gt", "1"), ()),
    selector_and_terms=({"affinity": EITHER, "nodeSelector": {MODEL: "P100"}}, ("P100",)),
    an_empty_term_is_no_way_out=({"affinity": required({})}, ()),
    no_terms=({"affinity": required()}, ()),
    contradiction_elsewhere=({"affinity": NOWHERE}, ()),
    known_node=({"nodeName": "a"}, ("M40",)),
    known_node_without_a_model=({"nodeName": "d"}, ()),
    known_node_of_another_model=({"nodeName": "b", "nodeSelector": {MODEL: "M40"}}, ()),
    unknown_node_may_be_any=({"nodeName": "new"}, ALL),
    match_fields=(selecting("metadata.name", "In", "c"), ("P100",)),
    match_fields_with_an_unknown_node=({"affinity": A_OR_NEW}, ALL),
    match_fields_not_in_leaves_nodes_to_come=(selecting("metadata.name", "NotIn", "a"), ALL),
    a_label_is_no_name=(selecting("kubernetes.io/hostname", "In", "a"), ALL),
)
def test_node_selection_chooses_among_the_quota_s_models(spec: Manifest, models: tuple[str, ...]) -> None:
    assert candidates_of(vcuda_pod(**spec), cluster=CARDS).models == models


@cases(
    "spec, models",
    free=({}, ("M40", "P100")),
    one_of_them=({"nodeSelector": {POOL: "lab"}}, ("M40", "P100")),
    another=({"nodeSelector": {POOL: "private"}}, ()),
    all_excluded=(selecting(POOL, "NotIn", "lab", "spare"), ()),
    no_pool_at_all=(selecting(POOL, "DoesNotExist"), ()),
    known_node_in_them=({"nodeName": "c"}, ("P100",)),
    known_node_outside=({"nodeName": "a"}, ()),
    unknown_node=({"nodeName": "new"}, ("M40", "P100")),
)
def test_a_pod_stays_in_the_quota_s_pools(spec: Manifest, models: tuple[str, ...]) -> None:
    quota = quota_of("M40", "P100", pools=("lab", "spare"))
    assert candidates_of(vcuda_pod(**spec), quota=quota, cluster=CARDS).models == models


NODE_SELECTION = "the pod's nodeName, nodeSelector or required node affinity"


@cases(
    "pod, quota, sentence",
    wanted=(
        vcuda_pod(annotations={WANTED: "V100"}),
        quota_of("M40"),
        "M40 is excluded by annotation nvidia.com/use-gputype",
    ),
    each_its_own_reason=(
        vcuda_pod(annotations={EXCLUDED: "M"}, nodeSelector={MODEL: "V100"}),
        quota_of("M40", "P100"),
        f"M40 is excluded by annotation nvidia.com/exclude-gpu-type; P100 is excluded by {NODE_SELECTION}",
    ),
    pools=(
        vcuda_pod(nodeSelector={POOL: "public"}),
        quota_of("M40", pools=("lab", "spare")),
        "M40 is excluded by the pod's node selection, which leaves no node in the namespace's pools lab, spare",
    ),
)
def test_the_message_for_a_pod_without_a_model_has_the_reason(
    pod: Manifest, quota: NamespaceQuota, sentence: str
) -> None:
    found = candidates_of(pod, HAMI, VGPU_MANAGER, quota=quota)
    assert found.models == ()
    assert found.sentence("pod", "team-a", quota) == f"this pod may use no GPU model in namespace team-a: {sentence}"


@cases(
    "spec, pools, present",
    free=({}, (), {"M40", "P100"}),
    in_the_pools=({}, ("lab",), {"P100"}),
    none_that_the_pod_may_use=({"nodeSelector": {"zone": "x"}}, (), set()),
    only_candidates=({"nodeSelector": {MODEL: "M40"}}, (), {"M40"}),
)
def test_present_models_are_those_of_nodes_that_the_pod_may_use_now(
    spec: Manifest, pools: tuple[str, ...], present: set[str]
) -> None:
    quota = quota_of("M40", "P100", "A100", pools=pools)
    assert candidates_of(vcuda_pod(**spec), quota=quota, cluster=CARDS).ready == present


def test_the_labels_for_model_and_pool_can_be_set() -> None:
    keys = NodeLabels("example.com/card", "example.com/pool")
    cluster = Nodes.of({"a": {"example.com/card": "M40", MODEL: "P100"}}, keys)
    assert cluster.model_of("a") == "M40"
    pod = vcuda_pod(nodeSelector={"example.com/card": "M40", MODEL: "V100"})
    assert find_candidates(view(pod), PodRequest(Charge(), (GPU_MANAGER,)), QUOTA, cluster).models == ("M40",)
    assert read_pod_pin(view(pod), keys).model == "M40"


@given(strategies.pods(), strategies.quotas(), strategies.clusters())
@settings(max_examples=150)
def test_a_model_with_a_node_for_the_pod_is_a_candidate(pod: Manifest, quota: NamespaceQuota, cluster: Nodes) -> None:
    found = find_candidates(view(pod), read_request(view(pod)), quota, cluster)
    usable = {model for model in quota.limits if wanted(pod, model) and takers(pod, model, quota, cluster)}
    assert found.ready == usable
    assert usable <= set(found.models)
    assert set(found.models) | found.excluded.keys() == quota.limits.keys()
    assert not set(found.models) & found.excluded.keys()


@given(strategies.pods(), strategies.quotas(), strategies.clusters(), st.data())
@settings(max_examples=150)
def test_the_model_of_a_future_node_is_a_candidate_too(
    pod: Manifest, quota: NamespaceQuota, cluster: Nodes, data: st.DataObject
) -> None:
    """A node that is added later may suit the pod. So the pod's candidate models must not depend on present nodes."""
    labels = data.draw(strategies.label_sets())
    later = Nodes.of({**cluster.labels, "node-new": labels}, LABELS)
    found = find_candidates(view(pod), read_request(view(pod)), quota, cluster)
    assert found.models == find_candidates(view(pod), read_request(view(pod)), quota, later).models


def takers(pod: Manifest, model: str, quota: NamespaceQuota, cluster: Nodes) -> list[str]:
    return [
        name
        for name, labels in cluster.labels.items()
        if labels.get(MODEL) == model
        and (not quota.pools or labels.get(POOL) in quota.pools)
        and may_run_on(pod, name, labels)
    ]


def wanted(pod: Mapping[str, Any], model: str) -> bool:
    """Return whether the model is permitted by the annotations of all vendors whose resources the pod requests."""
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


@cases(
    "pin, within",
    any_pool=(Pin(frozenset({"M40"}), None), True),
    no_node_at_all=(Pin(frozenset({"M40"}), frozenset()), True),
    no_model=(Pin(frozenset(), None), False),
    any_model=(Pin(None, None), False),
)
def test_without_pools_in_the_quota_only_the_model_counts(pin: Pin, within: bool) -> None:
    assert pin.within(quota_of("M40")) is within


def at_length(n: int, *lines: Manifest) -> Manifest:
    """Return a pod with one node selector term: ``n`` different requirements for one key, and the given ones."""
    above = [requirement("example.com/rank", "Gt", str(number)) for number in range(n)]
    return vcuda_pod(affinity=required(term(*above, *lines)))


def by_model(n: int) -> Manifest:
    above = (requirement(MODEL, "Gt", str(number)) for number in range(n))
    return vcuda_pod(affinity=required(term(requirement(MODEL, "In", *map(str, range(n))), *above)))


def by_many(n: int, terms: int) -> Manifest:
    """Return a pod with ``n`` keys in its nodeSelector. Each of ``terms`` node selector terms contradicts one key."""
    alternatives = (term(requirement(f"key-{number}", "NotIn", "v")) for number in range(terms))
    return vcuda_pod(nodeSelector={f"key-{number}": "v" for number in range(n)}, affinity=required(*alternatives))


def by_terms(n: int, key: str, operator: str, *values: str) -> Manifest:
    return vcuda_pod(affinity=required(*(term(requirement(key, operator, *values)) for _ in range(n))))


@cases(
    "pod_of",
    bounds_that_contradict=lambda n: at_length(n, requirement("example.com/rank", "Lt", "0")),
    bounds_and_lists=lambda n: at_length(n, requirement("example.com/rank", "NotIn", *map(str, range(n)))),
    node_selector_beside_terms=lambda n: by_many(n, n // 8),
    lists_and_bounds_on_the_model=by_model,
    terms=lambda n: by_terms(n, "zone", "In", "none"),
    terms_for_the_model=lambda n: by_terms(n, MODEL, "Gt", "1"),
    terms_for_the_pool=lambda n: by_terms(n, POOL, "NotIn", "public"),
    terms_with_lists=lambda n: by_terms(n, "zone", "In", *map(str, range(n // 10))),
)
def test_placement_takes_linear_time_in_the_pods_size_and_not_more_for_more_nodes(
    pod_of: Callable[[int], Manifest],
) -> None:
    """Tenants write these terms.

    With an earlier algorithm, N requirements for one key took N³ steps per model, which stopped admission. A tenant can
    also add terms to a gated pod, and the leader reads all stored pods.
    """
    small, large = msgspec.json.encode(pod_of(200)), msgspec.json.encode(pod_of(800))
    growth = len(large) / len(small)
    assert steps(large, nodes_of(50)) < 1.3 * growth * steps(small, nodes_of(50))
    assert steps(large, nodes_of(500)) < 1.3 * steps(large, nodes_of(50))


def nodes_of(count: int) -> Nodes:
    by_name = {f"n{number}": {MODEL: "M40", POOL: "lab", "zone": str(number % 40)} for number in range(count)}
    return nodes(**by_name)


def steps(pod: bytes, cluster: Nodes) -> int:
    """Count the function calls that find a pod's candidate models. The count is the same on every machine."""
    read, quota = msgspec.json.decode(pod, type=Pod), quota_of(*ALL, pools=("lab", "spare"))
    find_candidates(read, PodRequest(Charge(), ()), quota, cluster)  # fills the nodes' caches, and must not be counted
    counted = itertools.count()
    sys.setprofile(lambda *_: next(counted) and None)
    try:
        find_candidates(read, PodRequest(Charge(), ()), quota, cluster)
        read_pod_pin(read, LABELS)
    finally:
        sys.setprofile(None)
    return next(counted)
