"""Tests of `kubectl gpuquota nodes`, which shows the models and cards of nodes."""

import json
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from examples import claims
from examples.discovery import A100, A100_PRODUCT, DELETED, T4, T4_PRODUCT, features, hami, labelled, node, vgpu_manager
from tests.api_double import lost_request, rejected
from tests.builders import MODEL, Manifest, container, pod, vcuda_pod
from tests.documented import DOCS
from tests.gpuquota import Cluster, run
from tests.quota_map import store_quota
from tests.tables import cases
from vcuda.claims.names import API_PATH
from vcuda.errors import Forbidden

HEADING = ["NODE", "MODELS", "CARDS", "MEMORY", "MiB", "SOURCE", "SCHEME", "FREE", "TAKES", "PODS"]


FEATURES = "gpu-feature-discovery"
TAINTS = [{"key": "c", "effect": "NoExecute"}, {"key": "a", "value": "b", "effect": "NoSchedule"}]
OUT_OF_SERVICE = {
    "unschedulable": True,
    "taints": [*TAINTS, {"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}],
}


def store_nodes(cluster: Cluster, *manifests: Manifest) -> None:
    for manifest in manifests:
        cluster.store(f"/api/v1/nodes/{manifest['metadata']['name']}", manifest)


def store_pod(cluster: Cluster, name: str, node_name: str, limits: Manifest, **status: Any) -> None:
    stored = vcuda_pod(limits, nodeName=node_name)
    metadata = {"name": name, "uid": name, "namespace": "team-a"}
    cluster.store(f"/api/v1/namespaces/team-a/pods/{name}", {**stored, "metadata": metadata, "status": status})


def table(*arguments: str) -> list[list[str]]:
    """Return the cells of the table of nodes. The table of models follows this table."""
    return [line.split() for line in run("nodes", *arguments).stdout.partition("\n\n")[0].splitlines()]


def rows(kind: str = "nodes", key: str = "node") -> dict[str, dict[str, Any]]:
    told: Iterable[dict[str, Any]] = json.loads(run("nodes", "-o", "json").stdout)[kind]
    return {each.pop(key): each for each in told}


def models() -> dict[str, dict[str, Any]]:
    return rows("models", "model")


@pytest.mark.usefixtures("cluster")
def test_the_headings_are_those_of_the_walk_through() -> None:
    page = (DOCS / "first-rejection.md").read_text(encoding="utf-8")
    assert table()[0] == HEADING
    assert HEADING in map(str.split, page.splitlines())


def test_the_nodes_of_a_mixed_cluster_are_shown_as_a_table(cluster: Cluster) -> None:
    store_nodes(
        cluster,
        {**node(hami(A100, A100), features(A100_PRODUCT), labelled("A100"), name="h1"), "spec": OUT_OF_SERVICE},
        node(vgpu_manager(T4), name="v1"),
        {
            **node(features("Tesla-T4", count="4", offered="4"), labelled(T4_PRODUCT, by=FEATURES), name="p1"),
            "spec": {"taints": TAINTS},
        },
        node({"allocatable": {"tencent.com/vcuda-core": "800"}}, labelled("M40"), name="g1"),
        node({"allocatable": {"cpu": "8"}}, name="cpu"),
    )
    assert table() == [
        HEADING,
        ["g1", "M40", "8", "?", "label", "gpu-manager", "8", "yes"],
        ["h1", "A100,", A100_PRODUCT, "2", "40960", "label", "hami", "2", "no:", "cordoned,", "not", "ready"],
        [
            "p1",
            T4_PRODUCT,
            "4",
            "15360",
            "gpu-feature-discovery",
            "nvidia.com/gpu",
            "4",
            *["if", "tolerated:", "a=b:NoSchedule,", "c:NoExecute"],
        ],
        ["v1", "none", "1", "16384", "vgpu-manager", "vgpu-manager", "1", "yes"],
    ]


def test_the_cards_of_a_register_are_shown_once(cluster: Cluster) -> None:
    """Both HAMi's and NVIDIA's plugins offer nvidia.com/gpu: HAMi several for each card, and NVIDIA one."""
    store_nodes(
        cluster,
        node(hami(A100, A100, handshake=DELETED, offered="20"), labelled("A100"), name="h1"),
        node(hami(A100, A100, handshake=DELETED, offered="2"), labelled("A100"), name="p1"),
        node({"allocatable": {"nvidia.com/mig-1g.10gb": "7"}}, name="x1"),
    )
    assert [row[:6] for row in table()[1:]] == [
        ["h1", "A100,", A100_PRODUCT, "2", "40960", "label"],
        ["p1", "A100", "2", "?", "label", "nvidia.com/gpu"],
        ["x1", "none", "?", "?", "none", "?"],
    ]
    assert rows()["h1"]["scheme"] == "hami"
    contradiction, unnamed = run("nodes").stderr.splitlines()
    assert "does not answer, but the node offers 20 nvidia.com/gpu" in contradiction
    assert "x1: the node offers nvidia.com/mig-1g.10gb, but no source names its GPU model" in unnamed


def test_rows_of_the_quota_set_the_models_and_the_value_of_a_device(cluster: Cluster) -> None:
    store_quota(
        cluster, "{}", gpu_models=f"{{A100: [NVIDIA-A100-*GB], S: {{products: [{T4_PRODUCT}-SHARED], cards: 0.25}}}}"
    )
    store_nodes(
        cluster,
        node(hami(A100, A100, T4), labelled(A100_PRODUCT, by="hami"), name="h1"),
        node(features("Tesla-T4-SHARED", count="2", offered="8"), labelled("S"), name="s1"),
        node({"allocatable": {"nvidia.com/gpu": "8"}}, labelled("S"), name="s2"),
    )
    store_pod(cluster, "one", "s1", {"nvidia.com/gpu": 1})
    found = rows()
    assert found["h1"]["models"] == ["A100", T4_PRODUCT]
    assert (found["s1"]["cards"], found["s1"]["free"]) == (2, 1.75)
    assert (found["s2"]["cards"], found["s2"]["free"]) == (2, 2)


def test_free_cards_are_those_that_no_pod_and_no_claim_uses(cluster: Cluster) -> None:
    store_nodes(cluster, node(hami(A100, A100, A100, A100), labelled("A100"), name="h1"))
    store_pod(cluster, "whole", "h1", {"nvidia.com/gpu": 1})
    store_pod(cluster, "share", "h1", {"nvidia.com/gpu": 1, "nvidia.com/gpucores": 30, "nvidia.com/gpumem": 1})
    store_pod(cluster, "waits", "", {"nvidia.com/gpu": 1})
    store_pod(cluster, "ended", "h1", {"nvidia.com/gpu": 1}, phase="Succeeded")
    cluster.store("/api/v1/namespaces/team-a/pods/none", {**pod(container()), "metadata": {"name": "none"}})
    assert (rows()["h1"]["cards"], rows()["h1"]["free"]) == (4, 2.7)


def test_cards_of_a_driver_are_used_by_allocated_claims(cluster: Cluster) -> None:
    cluster.store(API_PATH, {"kind": "APIResourceList"})
    made = claims.slice_of(claims.NVIDIA, "d1", *(claims.device(claims.A100, name=f"gpu-{n}") for n in range(4)))
    cluster.store(f"{API_PATH}/resourceslices/one", slice_manifest(made))
    store_nodes(cluster, node(labelled("A100", by="resourceslices"), name="d1"))
    for name, device in (("used", "gpu-0"), ("waits", None), ("extended", "gpu-1")):
        claim = claims.claim(name=name, namespace="team-a", uid=name)
        result = {"request": "r0", "driver": claims.NVIDIA, "pool": "d1", "device": device}
        status = {"allocation": {"devices": {"results": [result]}}} if device else {}
        cluster.store(f"{API_PATH}/namespaces/team-a/resourceclaims/{name}", {**claim, "status": status})
    extended = {"resourceClaimName": "extended"}
    store_pod(cluster, "asks", "d1", {"nvidia.com/gpu": 1}, extendedResourceClaimStatus=extended)
    found = rows()["d1"]
    assert found == {
        "models": ["A100", A100_PRODUCT],
        "cards": 4,
        "memory": 40960,
        "source": "resourceslices",
        "scheme": claims.NVIDIA,
        "free": 2.0,
        "doubts": [],
        "takes_pods": "yes",
    }


def slice_manifest(made: Any) -> Manifest:
    spec = {
        "driver": made.spec.driver,
        "nodeName": made.spec.node_name,
        "pool": {"name": made.spec.pool.name, "generation": 1, "resourceSliceCount": 1},
        "devices": msgspec.json.decode(msgspec.json.encode(made.spec.devices)),
    }
    return {"metadata": {"name": made.metadata.name}, "spec": spec}


def test_doubts_and_models_that_no_node_has_are_shown_as_warnings(cluster: Cluster) -> None:
    store_quota(cluster, f"team-a: {{quota: {{{T4_PRODUCT}: 1, A100: 1}}}}")
    store_nodes(cluster, node(hami(A100, T4), labelled(T4_PRODUCT), name="h1"))
    warnings = run("nodes").stderr.splitlines()
    assert warnings == [
        (
            "Warning: h1: the node has cards of several GPU models according to the register of hami: "
            f"{A100_PRODUCT} (1), {T4_PRODUCT} (1); the quota uses model {T4_PRODUCT}"
        ),
        f"Warning: no node has GPU model A100; nodes have {T4_PRODUCT}",
    ]
    told = run("nodes", "-o", "json")
    assert (len(json.loads(told.stdout)["nodes"][0]["doubts"]), told.stderr) == (1, "")


def test_a_cluster_without_models_is_reported(cluster: Cluster) -> None:
    store_quota(cluster, "team-a: {quota: {A100: 1}}")
    assert "no node has a GPU model" in run("nodes").stderr


def test_a_malformed_quota_does_not_hide_the_nodes(cluster: Cluster) -> None:
    store_quota(cluster, "{team-a: 8}")
    store_nodes(cluster, node(hami(A100), name="h1"))
    told = run("nodes")
    assert (told.exit_code, "h1" in told.stdout, "is malformed" in told.stderr) == (0, True, True)


def test_a_malformed_quota_shows_no_wrong_figure(cluster: Cluster) -> None:
    """The last valid quota stays in force. Only the controller knows it, and the models of its products."""
    store_quota(cluster, "{team-a: 8}", gpu_models="{A100: {products: [NVIDIA-A100-*GB], cards: 0.5}}")
    store_nodes(cluster, node(hami(A100, A100), name="h1"), node(features(T4_PRODUCT), labelled("T4"), name="n1"))
    store_pod(cluster, "one", "n1", {"nvidia.com/gpu": 1})
    cluster.publish("team-a", {"model": "T4", "limit": 3, "used": 1, "pending": 0, "available": 2})
    assert [models()["T4"][each] for each in ("promised", "charged", "free")] == [None] * 3
    assert rows()["n1"]["free"] is None
    told = run("nodes")
    assert ["T4", "?", "1", "1", "?", "?"] in [line.split() for line in told.stdout.splitlines()]
    assert told.stderr.count("because the quota ConfigMap is malformed: ") == 1
    assert told.stderr.count("Warning: ") == 1


@cases(
    "container, schemes, warned",
    no_flag=({"args": ["vcuda-webhook", "serve"]}, "", True),
    the_flag_of_another_scheme=({"args": ["--scheme-schedulers=vgpu-manager=x"]}, "", True),
    the_flag_of_the_overlay=({"args": ["--scheme-schedulers=hami=hami-scheduler"]}, "", False),
    two_words=({"args": ["--scheme-schedulers", "vgpu-manager=x,hami=y"]}, "", False),
    the_variable=({"env": [{"name": "VCUDA_SCHEME_SCHEDULERS", "value": "hami=y"}]}, "", False),
    one_scheduler_of_all=({"args": ["--scheduler-name=mine"]}, "", False),
    the_quota_config_map=({"args": []}, "hami: {scheduler: mine}", False),
    no_permission_or_no_deployment=(None, "", False),
)
def test_hami_nodes_without_a_scheduler_of_hami_are_shown_as_a_warning(
    cluster: Cluster, container: Manifest | None, schemes: str, *, warned: bool
) -> None:
    store_quota(cluster, "{}", gpu_schemes=f"{{{schemes}}}")
    store_nodes(cluster, node(hami(A100), name="h1"))
    if container is not None:
        deployment = {"metadata": {}, "spec": {"template": {"spec": {"containers": [container]}}}}
        cluster.store("/apis/apps/v1/namespaces/vcuda-quota/deployments/vcuda-webhook", deployment)
    told = run("nodes")
    assert told.exit_code == 0
    warning = "neither the webhook's flags nor gpu_schemes name a scheduler for the nodes of hami"
    assert (warning in told.stderr) == warned


def test_another_label_may_contain_the_model(cluster: Cluster) -> None:
    store_nodes(cluster, node(labels={"acme.com/gpu": "A100", MODEL: "T4"}, name="h1"))
    assert table("--model-label", "acme.com/gpu")[1][:2] == ["h1", "A100"]


def test_terminal_codes_in_a_label_are_escaped(cluster: Cluster) -> None:
    store_nodes(cluster, node(hami(A100), labels={MODEL: "\x1b[31m"}, name="h1"))
    assert "\x1b" not in run("nodes").stdout + run("nodes").stderr


@pytest.mark.parametrize("forbidden", [True, False])
def test_without_an_answer_the_command_fails_and_says_why(cluster: Cluster, forbidden: bool) -> None:
    cluster.deliver = rejected(Forbidden(403, "nodes is forbidden"), "GET", "LIST") if forbidden else lost_request
    told = run("nodes")
    assert (told.exit_code, ("forbidden" if forbidden else "timed out") in told.stderr) == (1, True)


def test_promised_cards_are_shown_beside_the_present_taking_charged_and_free_ones(cluster: Cluster) -> None:
    store_quota(cluster, "{team-a: {quota: {A100: 3}}, team-b: {quota: {A100: 2.5, H100: 1}}}")
    store_nodes(
        cluster,
        node(hami(A100, A100), labelled("A100"), name="h1"),
        {**node(hami(A100), labelled("A100"), name="h2"), "spec": OUT_OF_SERVICE},
        {**node(hami(A100), labelled("A100"), name="h3"), "spec": {"taints": TAINTS}},
    )
    store_pod(cluster, "half", "h1", {"nvidia.com/gpu": 1, "nvidia.com/gpucores": 50, "nvidia.com/gpumem": 1})
    for team, used in (("team-a", 0.5), ("team-b", 0.25)):
        cluster.publish(team, {"model": "A100", "limit": 3, "used": used, "pending": 0, "available": 2})
    cluster.publish("team-c", text="{")
    a100 = {"promised": 5.5, "present": 4, "taking_pods": 3, "charged": 0.75, "free": 2.5}
    h100 = {"promised": 1, "present": 0, "taking_pods": 0, "charged": 0, "free": 0}
    assert models() == {"A100": a100, "H100": h100}
    shown = run("nodes")
    assert [line.split() for line in shown.stdout.partition("\n\n")[2].splitlines()] == [
        ["MODEL", "PROMISED", "PRESENT", "TAKING", "PODS", "CHARGED", "FREE"],
        ["A100", "5.5", "4", "3", "0.75", "2.5"],
        ["H100", "1", "0", "0", "0", "0"],
    ]
    promise = "Warning: the quotas promise 5.5 cards of A100, but the nodes have 4"
    assert [line for line in shown.stderr.splitlines() if "promise" in line] == [promise]


def test_grants_count_as_promised_only_while_they_apply(cluster: Cluster) -> None:
    grants = "[{A100: 4, until: 2999-01-01}, {A100: 8, until: 2020-01-01}, {A100: 16, from: 2998-01-01}]"
    store_quota(cluster, f"team-a: {{quota: {{A100: 1}}, grants: {grants}}}")
    assert models()["A100"]["promised"] == 5


def test_the_entry_for_all_namespaces_is_promised_once_for_each_namespace_that_it_limits(cluster: Cluster) -> None:
    store_quota(cluster, '{"*": {quota: {A100: 1}, except: [free]}, team-a: {quota: {A100: 4}}}')
    for name in ("team-a", "team-b", "team-c", "free", "kube-system", "vcuda-quota"):
        cluster.store(f"/api/v1/namespaces/{name}", {"metadata": {"name": name}})
    assert models()["A100"]["promised"] == 4 + 2


def test_the_cards_of_a_team_are_promised_once_for_all_its_members(cluster: Cluster) -> None:
    """The limit of a member's own entry is a part of the team's limit. The entry "*" does not apply to members."""
    store_quota(
        cluster,
        '{"*": {quota: {A100: 1}}, team-a: {quota: {A100: 4}}}',
        gpu_teams="vision: {namespaces: [team-a, 'team-b*'], quota: {A100: 6}}",
    )
    for name in ("team-a", "team-b", "team-b2", "team-c", "kube-system"):
        cluster.store(f"/api/v1/namespaces/{name}", {"metadata": {"name": name}})
    assert models()["A100"]["promised"] == 6 + 1


def test_a_team_of_an_installation_with_other_namespaces_is_not_malformed(cluster: Cluster) -> None:
    store_quota(cluster, "{}", gpu_teams="vision: {namespaces: ['vcuda-*'], quota: {A100: 6}}")
    assert models()["A100"]["promised"] == 6


def test_a_limit_above_the_total_of_its_namespace_promises_only_the_total(cluster: Cluster) -> None:
    store_quota(cluster, "{team-a: {total: 6, quota: {A100: 8, T4: 4}}, team-b: {quota: {A100: 2}}}")
    assert {name: each["promised"] for name, each in models().items()} == {"A100": 6 + 2, "T4": 4}


def test_a_limit_of_memory_alone_promises_the_cards_with_this_memory(cluster: Cluster) -> None:
    store_quota(cluster, "team-a: {quota: {A100: {memory: 80Gi}}}", gpu_models="{A100: {memory: 40Gi}}")
    assert models()["A100"]["promised"] == 2


def test_mig_nodes_have_the_cards_that_their_slices_are_charged(cluster: Cluster) -> None:
    slices = {"nvidia.com/mig-1g.5gb": "7", "nvidia.com/mig-3g.20gb": "2", "nvidia.com/gpu": "1"}
    store_nodes(cluster, node({"allocatable": slices}, labelled("A100"), name="m1"))
    store_quota(cluster, "{}", gpu_models="{A100: {memory: 40Gi}}")
    assert (rows()["m1"]["cards"], models()["A100"]["present"]) == (3, 3)


def test_mig_nodes_of_a_driver_have_the_cards_that_their_slices_are_charged(cluster: Cluster) -> None:
    cluster.store(API_PATH, {"kind": "APIResourceList"})
    parts = (claims.device(claims.A100, "mig", "1g.5gb", f"mig-{n}") for n in range(14))
    cluster.store(f"{API_PATH}/resourceslices/one", slice_manifest(claims.slice_of(claims.NVIDIA, "d1", *parts)))
    store_nodes(cluster, node(labelled("A100", by="resourceslices"), name="d1"))
    assert (rows()["d1"]["cards"], models()["A100"]["present"]) == (2, 2)


def test_a_node_without_a_number_of_cards_is_left_out_and_a_warning_says_so(cluster: Cluster) -> None:
    store_nodes(cluster, node(labelled("A100"), name="h1"), node(hami(A100), labelled("A100"), name="h2"))
    assert models()["A100"]["present"] == 1
    assert "the number of cards of 1 nodes of A100 is unknown" in run("nodes").stderr
