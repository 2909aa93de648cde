"""Which models a pod may use, and what it is told where there is none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import strategies
from tests.builders import LABELS, MODEL, POOL, Manifest, nodes, required, requirement, term, vcuda_pod, view
from tests.node_selection import may_run_on
from vcuda.placement.affinity import NodeLabels
from vcuda.placement.placement import Candidates, Nodes, find_candidates, read_pin
from vcuda.quota.model import Limit, NamespaceQuota
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
    pod: Manifest,
    *schemes: Scheme,
    quota: NamespaceQuota = QUOTA,
    cluster: Nodes = ANYWHERE,
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


@pytest.mark.parametrize(
    ("spec", "models"),
    [
        pytest.param({}, ("M40", "P100", "A100"), id="free"),
        pytest.param({"nodeSelector": {MODEL: "P100"}}, ("P100",), id="selector"),
        pytest.param({"nodeSelector": {"zone": "x"}}, ("M40", "P100", "A100"), id="selector-of-something-else"),
        pytest.param({"nodeSelector": {MODEL: "V100"}}, (), id="selector-outside-the-quota"),
        pytest.param(
            {"affinity": required(term(requirement(MODEL, "NotIn", "M40")))}, ("P100", "A100"), id="all-but-one"
        ),
        pytest.param({"affinity": required(term(requirement(MODEL, "DoesNotExist")))}, (), id="no-model-at-all"),
        pytest.param({"affinity": required(term(requirement(MODEL, "Gt", "1")))}, (), id="no-model-is-a-number"),
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
        pytest.param(
            {"affinity": required(term(fields=[requirement("metadata.name", "In", "c")]))}, ("P100",), id="match-fields"
        ),
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
            {"affinity": required(term(fields=[requirement("metadata.name", "NotIn", "a")]))},
            ("M40", "P100", "A100"),
            id="match-fields-not-in-leaves-nodes-to-come",
        ),
        pytest.param(
            {"affinity": required(term(requirement(HOST, "In", "a")))}, ("M40", "P100", "A100"), id="a-label-is-no-name"
        ),
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
        pytest.param({"affinity": required(term(requirement(POOL, "NotIn", "lab", "spare")))}, (), id="all-excluded"),
        pytest.param({"affinity": required(term(requirement(POOL, "DoesNotExist")))}, (), id="no-pool-at-all"),
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
