"""Tests that a request for a GPU is charged or rejected, in every way that ClusterRole `edit` permits."""

import json
from collections.abc import Callable, Iterator
from http import HTTPStatus

import pytest

from tests.builders import container, pod, vcuda_pod
from tests.e2e.cluster import Cluster, Json
from tests.e2e.dra import served
from tests.e2e.installation import Installation, controlling, installed, ledger_path

CLASS = "deviceclass.resource.kubernetes.io/"
UNITS = "{nvidia.com/gpu.shared: {cards: %s}, deviceclass/rdma.example.com: {}}"
FOUR: Json = {"quota": {"M40": 4}}
HAMI_SHARE: Json = {"nvidia.com/gpu": "1", "nvidia.com/gpucores": "30", "nvidia.com/gpumem": "1000"}
PRIVILEGED: Json = {"securityContext": {"privileged": True}}
ALL: Json = {"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]}


@pytest.fixture(scope="module")
def own(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    with installed(cluster, tmp_path_factory.mktemp("own")) as installation:
        # A webhook may be ready before it has listed the RuntimeClasses that these tests need.
        installation.replica.await_log("listed", lambda line: line["resource"] == RUNTIME_CLASSES)
        yield installation


RUNTIME_CLASSES = "/apis/node.k8s.io/v1/runtimeclasses"
RUNTIME_CLASS = "fast"


@pytest.fixture(scope="module", autouse=True)
def runtime_class(cluster: Cluster) -> Iterator[None]:
    """Create a RuntimeClass. The API server rejects a pod with a missing RuntimeClass before it calls webhooks."""
    manifest = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": RUNTIME_CLASS}}
    cluster.create({**manifest, "handler": "nvidia"})
    yield
    cluster.rest.send("DELETE", f"{RUNTIME_CLASSES}/{RUNTIME_CLASS}").ok()


@pytest.fixture
def join(own: Installation, tenant: Callable[[str], Cluster]) -> Iterator[Callable[..., tuple[str, Cluster]]]:
    """A function that creates a namespace with a quota entry. It returns the namespace, and a client of its tenant."""
    teams = []

    def enter(**entry: object) -> tuple[str, Cluster]:
        team = own.team({**FOUR, **entry})
        teams.append(team)
        name = team.__enter__()
        say_worth(own, "0.25")
        return name, tenant(name)

    yield enter
    for team in teams:
        team.__exit__(None, None, None)


def say_worth(own: Installation, cards: str) -> None:
    manifest = own.quota.manifest(json.dumps(own.quota.document()))
    manifest["data"]["gpu_units"] = UNITS % cards
    stored = own.cluster.rest.send("PUT", own.quota.path, manifest).ok()
    own.quota.await_read(stored["metadata"]["resourceVersion"])


def named(manifest: Json, namespace: str, name: str = "train") -> Json:
    return {**manifest, "metadata": {**manifest["metadata"], "namespace": namespace, "name": name}}


@pytest.mark.parametrize(
    ("limits", "cores"),
    [
        pytest.param({"nvidia.com/mig-3g.20gb": "2"}, 100, id="MIG"),
        pytest.param({"nvidia.com/gpu.shared": "6"}, 150, id="shared"),
        pytest.param({f"{CLASS}gpu.nvidia.com": "2"}, 200, id="a class"),
        pytest.param(
            {f"{CLASS}rdma.example.com": "2", "nvidia.com/gpu": "1"}, 100, id="with a resource that has no value"
        ),
    ],
)
def test_every_resource_of_the_tables_is_charged_and_pinned(
    own: Installation, join: Callable[..., tuple[str, Cluster]], limits: Json, cores: int
) -> None:
    """Another pod requests nine times the amount, which exceeds the limit."""
    namespace, tenant = join()
    stored = tenant.create(named(vcuda_pod(limits), namespace))
    assert stored["metadata"]["annotations"]["quota.vcuda.io/model"] == "M40"
    assert own.charged(namespace) == {"M40": cores}
    many = {name: str(int(amount) * 9) for name, amount in limits.items()}
    assert tenant.try_create(named(vcuda_pod(many), namespace, "more")).is_over_quota


@pytest.mark.parametrize(
    ("limit", "profile", "fit"),
    [
        pytest.param({"A30": 4}, "4g.24gb", 4, id="whole cards with four slices"),
        pytest.param({"A100": 1}, "1g.5gb", 7, id="a seventh of a card"),
        pytest.param({"A100": 1}, "1g.10gb", 4, id="a quarter of the memory"),
        pytest.param({"RTX-PRO-5000": 1}, "1g.24gb-me", 2, id="without media engines"),
    ],
)
def test_a_quota_admits_as_many_mig_slices_as_its_cards_have(
    own: Installation, join: Callable[..., tuple[str, Cluster]], limit: dict[str, int], profile: str, fit: int
) -> None:
    """The charges of the admitted pods together are exactly the limit."""
    namespace, tenant = join(quota=limit)
    [(model, cards)] = limit.items()
    pod_of = vcuda_pod({f"nvidia.com/mig-{profile}": "1"})
    for number in range(fit):
        stored = tenant.create(named(pod_of, namespace, f"slice-{number}"))
        assert stored["metadata"]["annotations"]["quota.vcuda.io/model"] == model
    assert tenant.try_create(named(pod_of, namespace, "more")).is_over_quota
    assert own.ledger(namespace).usage(model).used.cores == cards * 100


REJECTED = {
    "a resource": (vcuda_pod({"amd.com/gpu": "1"}), "`amd.com/gpu: {cards: 1}`", ""),
    "a variable": (
        pod(container(), init=[container(name="init", **ALL)]),
        "initContainers[0].env[0]",
        "visible-devices",
    ),
    "a runtime class": (
        pod(container(), runtimeClassName=RUNTIME_CLASS),
        f"spec.runtimeClassName: runtime class {RUNTIME_CLASS} gives GPUs to a pod",
        "runtime-class",
    ),
    "privileged with a card": (
        pod(container({"nvidia.com/gpu": "1"}), container(name="other", **PRIVILEGED)),
        "spec.containers[1].securityContext.privileged",
        "privileged",
    ),
    "a mount": (
        pod(
            container(
                HAMI_SHARE, volumeMounts=[{"name": "own", "mountPath": "/etc//ld.so.preload", "subPath": "none"}]
            ),
            volumes=[{"name": "own", "emptyDir": {}}],
        ),
        "spec.containers[0].volumeMounts[0].mountPath",
        "limit-library",
    ),
    "an annotation": (
        pod(container(name="main"), annotations={"nvidia.cdi.k8s.io/container.main": "nvidia.com/gpu=all"}),
        "metadata.annotations[nvidia.cdi.k8s.io/container.main]",
        "visible-devices",
    ),
}
"""One pod for each part of a pod that can give access to GPUs. tests/unit/test_bypasses.py has every such field."""


@pytest.mark.one_version
@pytest.mark.parametrize(("manifest", "told", "allowance"), REJECTED.values(), ids=REJECTED)
def test_unknown_resources_and_extra_access_are_rejected_unless_allowed(
    own: Installation, join: Callable[..., tuple[str, Cluster]], manifest: Json, told: str, allowance: str
) -> None:
    namespace, tenant = join()
    answer = tenant.try_create(named(manifest, namespace))
    assert (answer.status, own.charged(namespace)) == (HTTPStatus.UNPROCESSABLE_ENTITY, {})
    assert told in answer.message
    if allowance:
        allowing, tenant = join(allow=[allowance])
        tenant.create(named(manifest, allowing))


def test_a_pod_with_a_claim_is_rejected_if_claims_are_not_counted(
    own: Installation, cluster: Cluster, join: Callable[..., tuple[str, Cluster]]
) -> None:
    """An API server with claims admits the pod, because it charges the claim. An older one may drop the field."""
    namespace, tenant = join()
    claims = [{"name": "gpu", "resourceClaimName": "mine"}]
    answer = tenant.try_create(named(pod(container(), resourceClaims=claims), namespace))
    dropped = answer.status == HTTPStatus.CREATED and "resourceClaims" not in answer.body["spec"]
    assert served(cluster) or dropped or answer.status == HTTPStatus.UNPROCESSABLE_ENTITY
    assert own.charged(namespace) == {}


@pytest.mark.one_version
def test_an_edit_of_the_units_takes_effect_and_stored_pods_are_counted_again(
    own: Installation, cluster: Cluster, join: Callable[..., tuple[str, Cluster]]
) -> None:
    """The controller counts the stored pods by the new value, even without a new pod."""
    namespace, tenant = join()
    tenant.create(named(vcuda_pod({"nvidia.com/gpu.shared": "4"}), namespace))
    assert own.charged(namespace) == {"M40": 100}
    say_worth(own, "1")
    rejected = tenant.try_create(named(vcuda_pod({"nvidia.com/gpu.shared": "1"}), namespace, "more"))
    assert rejected.is_over_quota
    ledgers, _, ledger = ledger_path(namespace).rpartition("/")
    with controlling(own):
        say_worth(own, "0.5")
        cluster.await_object(ledgers, ledger, lambda found: charged_to(found) == 200)
        say_worth(own, "0.75")
        cluster.await_object(ledgers, ledger, lambda found: charged_to(found) == 300)


def charged_to(ledger: Json) -> int:
    committed: int = json.loads(ledger["data"]["ledger"])["committed"].get("M40", {}).get("cores", 0)
    return committed
