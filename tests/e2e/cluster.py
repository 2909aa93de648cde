"""Lets end-to-end tests create objects in a cluster, await states, and act as the kubelet.

A webhook configuration takes effect up to some seconds after it is stored, and the API server does not report when. So
each configuration gets one more webhook, the sentinel, which has no server. The API server calls the sentinel for
ConfigMaps with a unique label. While the configuration is in effect, this call fails, so a dry run of such a ConfigMap
fails. A configuration takes effect as a whole, so the sentinel shows the state of all its webhooks.
"""

import json
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import cached_property
from http import HTTPStatus
from pathlib import Path
from typing import Any

from tests.e2e.rest import Answer, Rest, api_client, states
from tests.processes import eventually
from tools.control_plane import ADMIN, ControlPlane, write_kubeconfig

Json = dict[str, Any]
Labels = Mapping[str, str]
Predicate = Callable[[list[Json]], bool]
"""A condition on the list of all objects of a collection, such as all pods of a namespace."""

TIMEOUT = 60.0
NODE_CAPACITY = {"cpu": "64", "memory": "256Gi", "pods": "250"}
NOT_READY = "node.kubernetes.io/not-ready"


class Cluster:
    """A client of the API server of ``control_plane``. Its user is the owner of ``token``, by default the admin.

    ``api`` is the official client for typed calls, and ``rest`` sends plain JSON over the same connections. Timeouts
    are in seconds.

    A method that awaits a state raises TimeoutError with the last state if it does not occur. A method whose request is
    rejected raises kubernetes' ApiException, or returns the rejection if it returns an Answer.
    """

    def __init__(self, control_plane: ControlPlane, token: str | None = None) -> None:
        self.control_plane = control_plane
        self.token = token or control_plane.tokens[ADMIN]
        self.server = control_plane.server
        self.ca_file = control_plane.ca_file
        self.kubeconfig = self.kubeconfig_for_token(self.token)
        self.api = api_client(self.server, self.ca_file, self.token)
        self.rest = Rest(self.api)
        self._resources: dict[tuple[str, str], tuple[str, bool]] = {}

    def close(self) -> None:
        self.api.rest_client.close()

    # Users

    def kubeconfig_for_token(self, token: str) -> Path:
        path = self.control_plane.directory / f"{secrets.token_hex(4)}.kubeconfig"
        write_kubeconfig(path, self.server, self.ca_file, token)
        return path

    def service_account_token(self, namespace: str, name: str) -> str:
        """Return a new token of an existing ServiceAccount. The token is valid for an hour."""
        about = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest"}
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
        return str(self.rest.send("POST", path, {**about, "spec": {"expirationSeconds": 3600}}).ok()["status"]["token"])

    # kubectl

    @cached_property
    def kubectl_program(self) -> str:
        """Return the path of the kubectl in the directory of the API server's binary, or else of the kubectl on PATH.

        Raises FileNotFoundError if neither exists.
        """
        assets = self.control_plane.assets
        found = shutil.which("kubectl", path=f"{assets}{os.pathsep}{os.environ.get('PATH', os.defpath)}")
        if found is None:
            raise FileNotFoundError(f"no kubectl in {assets} nor on PATH")
        return found

    def kubectl(
        self, *arguments: str, stdin: str | None = None, check: bool = True, kubeconfig: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl as this client's user, or as the user in ``kubeconfig``.

        If ``check`` is true, a failure raises CalledProcessError with the output.
        """
        cache = self.control_plane.directory / "kubectl-cache"
        options = (f"--kubeconfig={kubeconfig or self.kubeconfig}", f"--cache-dir={cache}")
        command = (self.kubectl_program, *options, *arguments)
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, timeout=TIMEOUT * 2)
        if check and done.returncode:
            error = subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
            error.add_note(done.stdout + done.stderr)
            raise error
        return done

    # Any object

    def apply(self, *manifests: Json) -> None:
        document = {"apiVersion": "v1", "kind": "List", "items": manifests}
        self.kubectl("apply", "-f", "-", stdin=json.dumps(document))

    def create(self, manifest: Json) -> Json:
        return self.try_create(manifest).ok()

    def try_create(self, manifest: Json, **query: str) -> Answer:
        """Send a POST of ``manifest``, and return the answer, even if it is a rejection.

        ``query``: parameters of the request, for example dryRun="All".
        """
        return self.rest.send("POST", self.path_of(manifest), manifest, **query)

    def create_decided(self, manifest: Json) -> Answer:
        """Send a POST of ``manifest``, again until it is created or firmly rejected. Return the last answer."""
        answers: list[Answer] = []

        def decided() -> bool:
            answers.append(self.try_create(manifest))
            return not answers[-1].may_pass_soon

        eventually(decided, lambda: answers[-1].message)
        return answers[-1]

    def path_of(self, manifest: Json) -> str:
        """Return the collection's path for ``manifest``, for example `/apis/apps/v1/namespaces/team-a/deployments`."""
        version, kind = manifest["apiVersion"], manifest["kind"]
        root = f"/apis/{version}" if "/" in version else f"/api/{version}"
        if (root, kind) not in self._resources:
            found = (one for one in self.rest.get(root)["resources"] if "/" not in one["name"])
            self._resources |= {(root, one["kind"]): (one["name"], one["namespaced"]) for one in found}
        resource, namespaced = self._resources[root, kind]
        place = f"namespaces/{manifest['metadata']['namespace']}/" if namespaced else ""
        return f"{root}/{place}{resource}"

    def await_collection(
        self, path: str, predicate: Predicate, timeout: float = TIMEOUT, **selectors: str
    ) -> list[Json]:
        """Return the objects of the collection ``path`` once ``predicate`` is true for the list of them.

        The predicate is called after the LIST and after each watch event. After ``timeout`` seconds, TimeoutError is
        raised with the last objects.

        ``selectors``: the parameters labelSelector and fieldSelector.
        """
        last: list[Json] = []
        with closing(states(self.rest, path, time.monotonic() + timeout, selectors)) as every:
            for last in every:
                if predicate(last):
                    return last
        raise TimeoutError(f"{path} {selectors or ''} not as awaited; last seen:\n{json.dumps(last, indent=1)}")

    def await_object(self, path: str, name: str, predicate: Callable[[Json], bool], timeout: float = TIMEOUT) -> Json:
        named = {"fieldSelector": f"metadata.name={name}"}
        return self.await_collection(path, lambda objects: any(map(predicate, objects)), timeout, **named)[0]

    def await_gone(self, path: str, name: str, timeout: float = TIMEOUT) -> None:
        self.await_collection(path, lambda objects: not objects, timeout, fieldSelector=f"metadata.name={name}")

    @contextmanager
    def register_webhooks(
        self, *, mutating: Sequence[Json] = (), validating: Sequence[Json] = (), timeout: float = TIMEOUT
    ) -> Iterator[None]:
        """Register the webhooks, items of a configuration's `webhooks`, during the ``with`` statement.

        The webhooks are in effect during the whole statement, and no longer after it. Both configurations are written
        before the wait for their effect, so that their delays overlap.

        Raises TimeoutError if a configuration does not take effect in time.
        """
        kinds = {"MutatingWebhookConfiguration": mutating, "ValidatingWebhookConfiguration": validating}
        stored: dict[str, str] = {}
        try:
            for kind, webhooks in kinds.items():
                if webhooks:
                    name, path = f"e2e-{secrets.token_hex(4)}", f"{GROUP}/{RESOURCES[kind]}"
                    self.rest.send("POST", path, configuration(kind, name, webhooks)).ok()
                    stored[name] = path
            for name in stored:
                await_effect(self.rest, name, timeout, wanted=True)
            yield
        finally:
            for name, path in stored.items():
                self.rest.send("DELETE", f"{path}/{name}").ok()
            for name in stored:
                await_effect(self.rest, name, timeout, wanted=False)

    def events(self, namespace: str) -> list[Json]:
        items: list[Json] = self.rest.get(f"/api/v1/namespaces/{namespace}/events")["items"]
        return items

    def await_events(self, namespace: str, selector: str = "", predicate: Predicate = bool) -> list[Json]:
        """Return the Events that match the field selector, once ``predicate`` is true for the list of them.

        By default, wait for one such Event.
        """
        return self.await_collection(f"/api/v1/namespaces/{namespace}/events", predicate, fieldSelector=selector)

    def delete(self, path: str) -> None:
        """Delete an object. If the object does not exist, do nothing."""
        answer = self.rest.send("DELETE", path, {"gracePeriodSeconds": 0})
        if answer.status != HTTPStatus.NOT_FOUND:
            answer.ok()

    # Namespaces and nodes

    def create_namespace(self, name: str | None = None, labels: Labels | None = None) -> str:
        metadata = {**({"name": name} if name else {"generateName": "e2e-"}), "labels": dict(labels or {})}
        created = self.create({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        return str(created["metadata"]["name"])

    @contextmanager
    def fresh_namespace(self, labels: Labels | None = None, name: str | None = None) -> Iterator[str]:
        name = self.create_namespace(name, labels)
        try:
            yield name
        finally:
            self.delete_namespace(name)

    def delete_namespace(self, name: str) -> None:
        """Delete the namespace and its pods, without waiting until the controller manager has removed the namespace."""
        self.rest.send("DELETE", f"/api/v1/namespaces/{name}").ok()
        self.rest.send("DELETE", f"/api/v1/namespaces/{name}/pods", {"gracePeriodSeconds": 0}).ok()

    def create_node(self, name: str, labels: Labels | None = None, capacity: Mapping[str, str] | None = None) -> Json:
        """Create a Ready node that the scheduler uses.

        ``capacity``: quantities of resources, in addition to `NODE_CAPACITY` or in place of its items.
        """
        metadata = {"name": name, "labels": {"kubernetes.io/hostname": name, **(labels or {})}}
        self.create({"apiVersion": "v1", "kind": "Node", "metadata": metadata})
        quantities = {**NODE_CAPACITY, **(capacity or {})}
        ready = [{"type": "Ready", "status": "True", "reason": "Harness", "message": "no kubelet runs here"}]
        status = {"capacity": quantities, "allocatable": quantities, "conditions": ready}
        node = self.rest.merge_patch(f"/api/v1/nodes/{name}/status", {"status": status})
        # The API server puts a taint on every new node. A controller would remove the taint only after the node's
        # kubelet has made a Lease, and no kubelet runs here.
        taints = [taint for taint in node["spec"].get("taints", []) if taint["key"] != NOT_READY]
        return self.rest.merge_patch(f"/api/v1/nodes/{name}", {"spec": {"taints": taints}})

    def delete_node(self, name: str) -> None:
        self.rest.send("DELETE", f"/api/v1/nodes/{name}").ok()

    # Pods

    def pods(self, namespace: str) -> list[Json]:
        items: list[Json] = self.rest.get(f"/api/v1/namespaces/{namespace}/pods")["items"]
        return items

    def pod(self, namespace: str, name: str = "train") -> Json:
        return self.rest.get(f"/api/v1/namespaces/{namespace}/pods/{name}")

    def await_pods(self, namespace: str, predicate: Predicate, timeout: float = TIMEOUT) -> list[Json]:
        return self.await_collection(f"/api/v1/namespaces/{namespace}/pods", predicate, timeout)

    def await_bound(self, namespace: str, name: str = "train", timeout: float = TIMEOUT) -> Json:
        return self.wait_pod(namespace, name, is_bound, timeout)

    def bind(self, pod: Json, node: str) -> None:
        """Create the pod, and bind it to the node. The cluster's scheduler ignores this pod."""
        self.create({**pod, "spec": {**pod["spec"], "schedulerName": "by-hand"}})
        name, target = pod["metadata"]["name"], {"apiVersion": "v1", "kind": "Node", "name": node}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
        path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{name}/binding"
        self.rest.send("POST", path, binding).ok()

    def wait_pod(self, namespace: str, name: str, predicate: Callable[[Json], bool], timeout: float = TIMEOUT) -> Json:
        return self.await_object(f"/api/v1/namespaces/{namespace}/pods", name, predicate, timeout)

    def set_pod_status(self, namespace: str, name: str, status: Json) -> Json:
        return self.rest.merge_patch(f"/api/v1/namespaces/{namespace}/pods/{name}/status", {"status": status})

    def run_pod(self, namespace: str, name: str) -> Json:
        true = ("PodScheduled", "Initialized", "ContainersReady", "Ready")
        conditions = [{"type": kind, "status": "True"} for kind in true]
        return self.set_pod_status(namespace, name, {"phase": "Running", "conditions": conditions})

    def finish_pod(self, namespace: str, name: str, phase: str = "Succeeded") -> Json:
        return self.set_pod_status(namespace, name, {"phase": phase})

    def delete_pod(self, namespace: str, name: str) -> None:
        """End and delete the pod as the kubelet would do, and wait until the pod no longer exists.

        A missing pod is no error.
        """
        answer = self.rest.send("GET", f"/api/v1/namespaces/{namespace}/pods/{name}")
        if answer.status == HTTPStatus.OK and is_bound(answer.body) and not has_ended(answer.body):
            self.finish_pod(namespace, name)
        self.delete_by_force(namespace, name)

    def delete_by_force(self, namespace: str, name: str) -> None:
        self.delete(f"/api/v1/namespaces/{namespace}/pods/{name}")


GROUP = "/apis/admissionregistration.k8s.io/v1"
RESOURCES = {
    "MutatingWebhookConfiguration": "mutatingwebhookconfigurations",
    "ValidatingWebhookConfiguration": "validatingwebhookconfigurations",
}
SENTINEL_LABEL = "e2e.vcuda.io/sentinel"
NOBODY = "https://127.0.0.1:1/"
"""A URL for webhooks without a server: nothing listens at its address."""


@contextmanager
def administering(control_plane: ControlPlane) -> Iterator[Cluster]:
    """Yield a client of the control plane with the rights of the admin.

    By then the default namespaces exist, and a running controller manager has filled ClusterRole `admin`.
    """
    with closing(Cluster(control_plane)) as admin:
        for name in ("default", "kube-system"):
            admin.await_object("/api/v1/namespaces", name, lambda _: True)
        if control_plane.controller_manager:
            roles = "/apis/rbac.authorization.k8s.io/v1/clusterroles"
            admin.await_object(roles, "admin", lambda role: bool(role.get("rules")))
        yield admin


def is_bound(pod: Json) -> bool:
    return bool(pod["spec"].get("nodeName"))


def has_ended(pod: Json) -> bool:
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def configuration(kind: str, name: str, webhooks: Sequence[Json]) -> Json:
    about = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": kind, "metadata": {"name": name}}
    return {**about, "webhooks": [*webhooks, sentinel(name)]}


def webhook(name: str, url: str = NOBODY, ca: str = "", resource: str = "pods", /, **fields: object) -> Json:
    """Return a webhook as an item of a webhook configuration.

    By default, the API server rejects the object if the call of the webhook fails.

    ``url``: the address of the webhook, by default one without a server. ``resource``: the webhook is called for new
    objects of this resource. ``ca``: the caBundle. ``fields``: fields of the webhook that replace the defaults.
    """
    return {
        "name": name,
        "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": [resource]}],
        "clientConfig": {"url": url, **({"caBundle": ca} if ca else {})},
        "failurePolicy": "Fail",
        "sideEffects": "NoneOnDryRun",
        "admissionReviewVersions": ["v1"],
        **fields,
    }


def sentinel(name: str) -> Json:
    """Return the sentinel: a webhook without a server, so that every ConfigMap with the label ``name`` is rejected."""
    selected = {"objectSelector": {"matchLabels": {SENTINEL_LABEL: name}}, "sideEffects": "None", "timeoutSeconds": 1}
    return webhook("sentinel.e2e.vcuda.io", NOBODY, "", "configmaps", **selected)


def await_effect(rest: Rest, name: str, timeout: float, *, wanted: bool) -> None:
    """Return when the configuration with sentinel ``name`` is in effect; if not ``wanted``, when it no longer is.

    This polls by dry runs, because the API server does not report when a configuration takes effect.
    """
    eventually(
        lambda: in_effect(rest, name) is wanted,
        lambda: f"webhooks {name} did not change their state in time; wanted in effect: {wanted}",
        timeout,
    )


def in_effect(rest: Rest, name: str) -> bool:
    labelled = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "labels": {SENTINEL_LABEL: name}}}
    answer = rest.send("POST", "/api/v1/namespaces/default/configmaps", labelled, dryRun="All")
    if answer.status == HTTPStatus.INTERNAL_SERVER_ERROR and "sentinel.e2e.vcuda.io" in answer.message:
        return True
    answer.ok()
    return False
