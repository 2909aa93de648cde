"""Tests that cause each failure of "The bad night" in docs/troubleshooting.md, and repair it by the page's commands.

Every test runs on an installation with kustomize and on one with Helm.
"""

import base64
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from http import HTTPStatus
from pathlib import Path

import pytest

from certs.parsing import read_authority
from tests.builders import MODEL, POOL
from tests.e2e.cluster import Cluster, Json
from tests.e2e.installation import SYSTEM_NAMESPACE, await_enforced, ledger_path
from tests.e2e.ledgers import await_published
from tests.e2e.manifests.operations import SOON, TEAM, apply_again, commands, installed, rejected_run, run
from tests.e2e.manifests.release import empty_cluster, installed_by_helm
from tests.e2e.manifests.system import NODE, System, mount_secret, port_of
from tests.e2e.stage import CA_SECRET, SERVING_SECRET
from tests.integration.reviews import card_pod, gpu_pod, pinned
from tests.processes import ControllerProcess, eventually
from tests.rendered import MANIFESTS, container
from vcuda.x509 import make_leaf, service_names

pytestmark = pytest.mark.one_version

POLICY = "exempt.quota.vcuda.io"
Night = tuple[System, ControllerProcess]


WAYS = {"kustomize": installed, "helm": installed_by_helm}


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def admin(way: str, assets: Path | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with empty_cluster(assets, tmp_path_factory.mktemp(way) / "plane") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def night(way: str, admin: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Night]:
    with WAYS[way](admin, tmp_path_factory.mktemp("night") / "system", **SOON) as (system, controller):
        first = system.balancer.endpoints()
        yield system, controller
        serve_from(system, *first)


def tell(what: str, began: float) -> None:
    """Print a step's name and the seconds since ``began``. docs/troubleshooting.md quotes such times."""
    print(f"bad night: {what}: {time.monotonic() - began:.1f} s")


@contextmanager
def told(what: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    tell(what, began)


def rejection(cluster: Cluster, pod: Json) -> str:
    """Create the pod in a dry run, which charges nothing. Return the reason of its rejection, or an empty text."""
    return cluster.try_create(pod, dryRun="All").message


def await_rejection(cluster: Cluster, pod: Json, words: str, before: Callable[[], None] = lambda: None) -> None:
    """Create the pod in dry runs until it is rejected with ``words`` in the message.

    ``before`` is called before each attempt.
    """
    seen: list[str] = []

    def rejected() -> bool:
        before()
        seen.append(rejection(cluster, pod))
        return words in seen[-1]

    eventually(rejected, lambda: seen[-1], timeout=60)


def await_created(cluster: Cluster, pod: Json) -> None:
    eventually(lambda: not rejection(cluster, pod), lambda: rejection(cluster, pod), timeout=60)


def serve_from(system: System, *ports: int) -> None:
    for port in system.balancer.endpoints():
        system.balancer.remove(port)
    for port in ports:
        system.balancer.add(port)
    system.balancer.hang_up()


@contextmanager
def another_replica(system: System, what: str) -> Iterator[None]:
    """Run a new webhook replica, as the Deployment would do. The webhook's Service only routes to it."""
    began = time.monotonic()
    with system.webhook() as replica:
        replica.await_ready()
        serve_from(system, port_of(replica))
        tell(what, began)
        yield


def test_pods_are_created_while_a_webhook_that_is_down_is_restored(admin: Cluster, night: Night) -> None:
    """While no replica answers, the failure policy Ignore admits all pods. They are charged when they are on a node.

    Fail only admits pods without a GPU, and pods of exempt namespaces and of our own namespace.
    """
    system, _ = night
    doctor, ignore, fail = commands("The bad night")
    look, restart = commands("The webhook is down")
    admin.kubectl("scale", "deployment", "vcuda-webhook", "-n", SYSTEM_NAMESPACE, "--replicas=0")
    serve_from(system)
    for pod in (card_pod("train", TEAM), pinned(card_pod("train", TEAM))):
        await_rejection(admin, pod, 'failed calling webhook "validate.quota.vcuda.io"')
    with admin.fresh_namespace() as free:
        await_enforced(admin, free, enforced=False)
        ordinary, of_the_system = gpu_pod("web", TEAM, {"cpu": "1"}), restricted(card_pod("train", SYSTEM_NAMESPACE))
        assert [rejection(admin, pod) for pod in (card_pod("train", free), ordinary, of_the_system)] == [""] * 3
    rejected_run(system, doctor)
    run(system, look)
    apply_again(system)
    run(system, restart)
    assert system.cluster.rest.get(DEPLOYMENT)["spec"]["replicas"] == 3

    with told("webhook down, pods admitted"):
        run(system, ignore)
        await_created(admin, card_pod("train", TEAM))
    admin.create_node(NODE, {MODEL: "M40", POOL: "public"})
    admin.bind(card_pod("meanwhile", TEAM), NODE)
    await_published(admin, TEAM, lambda use: use["models"][0]["used"] == 1)

    with another_replica(system, "webhook down, a replica ready"), told("webhook back, it rejects and charges"):
        run(system, fail)
        await_rejection(admin, card_pod("train", TEAM, cards=2), "used: 1 (0 pending), limited: 2, 1 more needed")
    admin.delete_pod(TEAM, "meanwhile")
    admin.delete_node(NODE)


def restricted(pod: Json) -> Json:
    """Return the pod, which has one container, with the fields that our namespace's Pod Security Standard requires."""
    [container] = pod["spec"]["containers"]
    of_pod = {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
    of_container = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    containers = [{**container, "securityContext": of_container}]
    return {**pod, "spec": {**pod["spec"], "securityContext": of_pod, "containers": containers}}


DEPLOYMENT = f"/apis/apps/v1/namespaces/{SYSTEM_NAMESPACE}/deployments/vcuda-webhook"
VALIDATING = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations/vcuda-quota"
POLICIES = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"
QUOTA = "/api/v1/namespaces/kube-system/configmaps/gpuquota"


@pytest.fixture
def served(night: Night) -> Iterator[System]:
    with another_replica(night[0], "a replica ready"):
        yield night[0]


@pytest.fixture
def other_team(admin: Cluster) -> Iterator[str]:
    """The namespace team-b, which the example quota also limits."""
    with admin.fresh_namespace(name="team-b") as name:
        yield name
    admin.await_gone("/api/v1/namespaces", name)


@pytest.mark.timeout(300)
def test_a_lost_ledger_is_opened_by_itself_and_a_damaged_one_after_its_deletion(
    admin: Cluster, served: System, other_team: str
) -> None:
    """A new ledger is closed (it admits no charge). It opens when no pod in the lost ledger can still be stored."""
    unbind, [delete] = commands("A wrong quota or policy")[2], commands("A damaged ledger")
    here, other = card_pod("train", TEAM, cards=2), memory_pod(other_team)
    admin.create(card_pod("first", TEAM))
    admin.create(memory_pod(other_team, "first"))
    run(served, unbind)
    eventually(lambda: patched(admin, other_team, {"data": {"ledger": "{"}}) == HTTPStatus.OK)
    eventually(lambda: patched(admin, TEAM, {"metadata": {"finalizers": None}}) == HTTPStatus.OK)
    admin.rest.send("DELETE", ledger_path(TEAM)).ok()
    began = time.monotonic()
    await_rejection(admin, here, f"the ledger of namespace {TEAM} was lost. ")
    await_published(admin, TEAM, lambda use: use["ledger_lost"] and not use["models"][0]["available"])
    await_rejection(admin, other, "cannot be read")
    apply_again(served)
    with told("damaged ledger deleted"):
        run(served, delete.replace("NAMESPACE", other_team))
        await_created(admin, other)
    await_rejection(admin, here, "used: 1 (0 pending), limited: 2, 1 more needed")
    tell("lost ledger recreated", began)
    await_published(admin, TEAM, lambda use: not use["ledger_lost"])
    admin.delete_pod(TEAM, "first")


def patched(cluster: Cluster, namespace: str, patch: Json) -> int:
    """Patch the ledger, and return the HTTP status. It is 403 while the policy that protects ledgers is in effect."""
    return cluster.rest.try_merge_patch(ledger_path(namespace), patch).status


def memory_pod(namespace: str, name: str = "train") -> Json:
    """Return a pod that requests a share of a card with memory, because team-b's example quota limits both."""
    return gpu_pod(name, namespace, {"tencent.com/vcuda-core": "10", "tencent.com/vcuda-memory": "4"})


def test_a_quota_that_rejects_every_pod_is_replaced_or_deleted(admin: Cluster, served: System) -> None:
    (served.directory / "gpuquota.yaml").write_text((MANIFESTS / "examples" / "gpuquota.yaml").read_text())
    replace, delete = commands("A wrong quota or policy")[:2]
    for command, what in ((replace, "quota replaced"), (delete, "quota deleted")):
        admin.rest.merge_patch(QUOTA, {"data": {"gpu_quota": '{"team-a": {"quota": {"M40": 0}}}'}})
        await_rejection(admin, card_pod("train", TEAM), "limited: 0, can never fit")
        with told(what):
            run(served, command)
            await_created(admin, card_pod("train", TEAM))
    run(served, replace.splitlines()[1])
    await_rejection(admin, card_pod("train", TEAM, cards=3), "limited: 2, can never fit")


def test_a_policy_that_rejects_everything_is_disabled_and_an_apply_restores_it(admin: Cluster, served: System) -> None:
    """`kubectl apply` also restores deleted webhooks. A quota that was stored without webhooks then takes effect."""
    replace, delete, unbind, register = commands("A wrong quota or policy")
    wrong = [{"expression": "false", "message": "nobody"}]
    admin.rest.merge_patch(f"{POLICIES}/{POLICY}", {"spec": {"validations": wrong}})
    anybody = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "anybody"}}
    await_rejection(admin, anybody, f"ValidatingAdmissionPolicy '{POLICY}' with binding")
    with told("policies out of effect"):
        run(served, unbind)
        await_created(admin, anybody)
    nowhere = [{"op": "replace", "path": "/webhooks/0/clientConfig/service/path", "value": "/nowhere"}]
    admin.rest.json_patch(VALIDATING, nowhere)
    await_rejection(admin, card_pod("train", TEAM), 'failed calling webhook "validate.quota.vcuda.io"')
    run(served, delete)
    await_created(admin, card_pod("train", TEAM))
    run(served, replace.splitlines()[1])
    await_published(admin, TEAM, lambda use: use["taking_effect"])

    with told("policies and registration applied"):
        create, wait, remove = register.splitlines()
        apply_again(served)
        run(served, create)
        run_job(served, "certs-now")
        run(served, f"{wait}\n{remove}")
        await_published(admin, TEAM, lambda use: not use["taking_effect"])
        await_created(admin, card_pod("train", TEAM))
    await_rejection(admin, card_pod("train", TEAM, cards=3), "limited: 2, can never fit")


@pytest.mark.timeout(240)
def test_an_expired_certificate_is_renewed_by_a_job_and_served(admin: Cluster, served: System) -> None:
    renew, client = commands("The certificate has expired")[:2]
    create, wait, restart, delete = renew.splitlines()
    # For the client certificate, the page has the same commands with another Job and without the restart. They are not
    # run here, because test_client_certificates.py tests that rotation.
    assert client.replace("client-certs", "certs").splitlines() == [create, wait, delete]
    serve_expired(served)
    expired = "x509: certificate has expired or is not yet valid"
    await_rejection(admin, card_pod("train", TEAM), expired, served.balancer.hang_up)
    with told("certificate renewed and taken up"):
        run(served, create)
        run_job(served, "certs-now")
        run(served, "\n".join((wait, restart, delete)))
        with another_replica(served, "the renewed certificate's replica ready"):
            await_created(admin, card_pod("train", TEAM))


def test_the_commands_for_a_controller_that_is_down_need_no_leader(night: Night) -> None:
    system, _ = night
    logs, lease = commands("The controller is down")[0].splitlines()
    labels = system.workload("Deployment", "vcuda-controller")["spec"]["template"]["metadata"]["labels"]
    assert f" logs -l app.kubernetes.io/name={labels['app.kubernetes.io/name']} " in logs
    assert run(system, lease).startswith(f"{socket.gethostname()}-")


def test_the_commands_of_the_usage_page_name_the_pod_of_the_leader(night: Night) -> None:
    """The page's last command is only printed, because no kubelet runs. The leader's pod is named like this machine."""
    system, _ = night
    read_lease, use_pod = commands("The usage page")[0].splitlines()
    assert use_pod.startswith(f"kubectl -n {SYSTEM_NAMESPACE} port-forward ")
    printed = run(system, f"{read_lease}\necho {use_pod}")
    assert f" port-forward pod/{socket.gethostname()}" in printed


def serve_expired(system: System) -> None:
    data = {key: base64.b64decode(text) for key, text in system.cluster.rest.get(CA_SECRET)["data"].items()}
    authority = read_authority(data["ca.crt"], data["ca.key"], "the CA")
    then = authority.certificate.not_valid_before_utc
    leaf = make_leaf(authority, service_names("vcuda-webhook", SYSTEM_NAMESPACE), then, timedelta(seconds=1))
    pair = {"tls.crt": leaf.certificate_pem(), "tls.key": leaf.key_pem()}
    encoded = {key: base64.b64encode(text).decode() for key, text in pair.items()}
    system.cluster.rest.merge_patch(SERVING_SECRET, {"data": encoded})
    deployment = system.workload("Deployment", "vcuda-webhook")
    mount_secret(system.cluster, deployment, system.directory / "certificates")


def run_job(system: System, name: str) -> None:
    """Act as the kubelet for the Job's pod: run its command, and set its status to succeeded."""
    path, selector = f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/pods", f"batch.kubernetes.io/job-name={name}"
    [pod] = system.cluster.await_collection(path, lambda pods: len(pods) == 1, labelSelector=selector)
    assert pod["spec"]["containers"][0]["args"] == container(system.workload("CronJob", "vcuda-certs"))["args"]
    system.renew()
    system.cluster.finish_pod(SYSTEM_NAMESPACE, pod["metadata"]["name"])
