"""A tenant attacks the quota in many ways while the chaos test kills and suspends our processes.

For each attack, this module counts the answers of the API server.
"""

import itertools
import json
import random
import socket
import ssl
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from http.client import HTTPException
from urllib.parse import urlsplit

from tests.builders import MODEL, required, requirement, term
from tests.e2e.chaos import API_AWAY, CLAIM_REQUESTS, GPU_REQUESTS, REASONS, STORED, Callers, path_of, reason
from tests.e2e.cluster import Cluster, Json
from tests.e2e.dra import NVIDIA, PRODUCTS, claim
from tests.e2e.installation import ENFORCED
from tests.e2e.observer import AWAY, Ghosts
from tests.e2e.rest import Answer, Rest
from tests.integration.reviews import gpu_pod, pinned, review_of, with_uid
from tests.processes import WebhookProcess
from vcuda.claims.pin import ClaimPin, write_pin

NODE = "chaos-m40"
FORGED = {
    "tencent.com/predicate-node": NODE,
    "tencent.com/predicate-gpu-idx-0": "0",
    "tencent.com/gpu-assigned": "true",
    "tencent.com/predicate-time": "9999999999999999999",
}
FPGA = "example.com/fpga"
PROTECTION = "resource.kubernetes.io/delete-protection"
CLEAN = "stored without the forged fields"
DIRTY = "STORED WITH FORGED FIELDS"
TORN = "bound, then deleted by force"
GONE = "deleted before"
ALLOWED, HUNG_UP = "allowed", "not answered"
NO_RIGHT = "rejected by RBAC"
"""The outcome of a request that RBAC forbids. Just after a restart, the API server may also forbid permitted requests,
because it has not read all roles yet."""
NOT_ALLOWED = frozenset({"403", "429", "503", NO_RIGHT, HUNG_UP})
INVENTED = "invented"

NO_MODEL = "no GPU model"
KINDS: Sequence[tuple[str, int, str]] = (
    (NO_MODEL, 403, " may use no GPU model in namespace "),
    (NO_RIGHT, 403, " cannot "),
    ("rejected by policy", 403, "ValidatingAdmissionPolicy"),
    ("rejected by ResourceQuota", 403, f"exceeded quota: {NODE}"),
    (API_AWAY, 403, "not yet ready to handle request"),
    (GONE, 404, "not found"),
    (GONE, 409, "is being deleted"),
)
REJECTED = REASONS - {STORED} | {NO_RIGHT}
ATTACKS: Mapping[str, frozenset[str]] = {
    "hundreds of Gt and an Lt": REJECTED | {STORED, NO_MODEL},
    "forged annotations and a node": REJECTED | {CLEAN, NO_MODEL},
    "allocation of a stored pod": REJECTED | {"rejected by policy", GONE},
    "binding of a stored pod": frozenset({NO_RIGHT, API_AWAY}),
    "force-deletion of a bound pod": REJECTED | {TORN, GONE},
    "label enforced=false": frozenset({"rejected by policy", NO_RIGHT, API_AWAY}),
    "label enforced removed": frozenset({"200", NO_RIGHT, API_AWAY}),
    "rejected by ResourceQuota after the charge": REJECTED | {"rejected by ResourceQuota"},
    "forged review of an existing namespace": frozenset({ALLOWED, *NOT_ALLOWED}),
    "forged review of an invented namespace": NOT_ALLOWED | {"400"},
    # A replica answers 408 if it was suspended while the body arrived.
    "review of 2.8 MiB": frozenset({ALLOWED, *NOT_ALLOWED, "408"}),
    "half a body, then silence": frozenset({HUNG_UP}),
}
"""The permitted outcomes of each attack, by the name of the attack."""

CLAIM_ATTACKS: Mapping[str, frozenset[str]] = {
    "claim pinned to a model by hand, marked as the scheduler's": REJECTED | {STORED, NO_MODEL},
    "finalizer of a claim": REJECTED | {"rejected by policy", GONE},
}
"""The permitted outcomes of the attacks that create ResourceClaims, by the name of the attack."""

FEW_CORES = {"tencent.com/vcuda-core": 5, "tencent.com/vcuda-memory": 1}
"""The GPU request of attacking pods that are charged but never stored. It is small, to leave quota for other pods."""

SELECTIONS = (
    required(term(*(requirement("rank", "Gt", str(n)) for n in range(490)), requirement("rank", "Lt", "0"))),
    required(term(*(requirement("rank", "Gt", str(n)) for n in range(490)), requirement("rank", "Lt", "1000"))),
)
LARGE = {"env": [{"name": f"SETTING_{number}", "value": "x" * 80} for number in range(25_000)]}
SILENT, SILENT_SECONDS = 30, 3.0
PAUSE = 0.8
"""Average number of seconds between two attempts of the same attack."""


def outcome(answer: Answer) -> str:
    """Return the name of an answer's outcome, or its status and message if the kind of answer is unknown."""
    named = (name for name, status, text in KINDS if answer.status == status and text in answer.message)
    told = next(named, "") or (str(answer.status) if answer.status == HTTPStatus.OK else reason(answer))
    return API_AWAY if told not in REASONS and answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR else told


@dataclass(frozen=True)
class Siege:
    """Attacks by a tenant with ClusterRole `edit`, in the last of the namespaces that the callers use now.

    ``callers``: the clients with the usual load, which change the group of namespaces from time to time. ``admin``: a
    client that acts as the scheduler. ``replicas``: the webhook replicas that the tenant calls directly, without the
    API server. ``ghosts``: records the bound pods that the tenant deleted by force.
    """

    callers: Callers
    admin: Rest
    tenant: Rest
    replicas: Sequence[WebhookProcess]
    ghosts: Ghosts
    counts: Mapping[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def attackers(self) -> list[Callable[[threading.Event], None]]:
        """Return a function for each attack, which runs in its own thread until its event is set."""
        attacks: Sequence[Callable[[], str]] = (
            *(self._selection, self._forged, self._allocation, self._binding, self._tear_away),
            *(partial(self._label, "false"), partial(self._label, None), self._beyond_resource_quota),
            *(self._existing, self._invented, self._large, self._silence),
        )
        does = dict(zip(ATTACKS, attacks, strict=True))
        if self.callers.claims:
            does |= dict(zip(CLAIM_ATTACKS, (self._planted, self._unprotected), strict=True))

        def repeat(name: str, once: Callable[[], str]) -> Callable[[threading.Event], None]:
            def attack(stop: threading.Event) -> None:
                while not stop.wait(random.uniform(0, 2 * PAUSE)):  # noqa: S311
                    with suppress(*AWAY):  # the API server does not run at the moment
                        self.counts[name][once()] += 1

            return attack

        return [repeat(name, once) for name, once in does.items()]

    @property
    def _namespace(self) -> str:
        return self.callers.present()[-1]

    def _pod(self, limits: Json = GPU_REQUESTS[0], **metadata: object) -> Json:
        """Return a pod whose label selects a webhook replica. Successive pods select all replicas in turn."""
        number = next(self.numbers)
        return gpu_pod(f"attack-{number}", self._namespace, limits, labels=self.callers.labels(number), **metadata)

    def _create(self, pod: Json, **spec: object) -> tuple[str, Json]:
        answer = self.tenant.send("POST", path_of(pod), {**pod, "spec": {**pod["spec"], **spec}})
        return outcome(answer), answer.body

    def _selection(self) -> str:
        pod = self._pod()
        answer, _ = self._create(pod, affinity=random.choice(SELECTIONS))  # noqa: S311  # random load
        self._delete(pod)
        return answer

    def _forged(self) -> str:
        pod = self._pod(annotations=FORGED)
        answer, stored = self._create(pod, nodeName=NODE)
        self._delete(pod)
        if answer != STORED:
            return answer
        forged = stored["spec"].get("nodeName") or stored["metadata"]["annotations"].keys() & FORGED.keys()
        return DIRTY if forged else CLEAN

    def _allocation(self) -> str:
        pod = self._pod()
        answer, _ = self._create(pod)
        if answer != STORED:
            return answer
        patched = self._patch(f"{path_of(pod)}/{pod['metadata']['name']}", {"annotations": FORGED})
        self._delete(pod)
        return patched

    def _binding(self) -> str:
        return outcome(self.tenant.send("POST", *binding(self._pod())))

    def _tear_away(self) -> str:
        pod = self._pod()
        answer, stored = self._create(pod)
        if answer != STORED:
            return answer
        if self.admin.send("POST", *binding(pod)).status != HTTPStatus.CREATED:
            return GONE
        asked = time.monotonic()
        if not self._delete(pod):
            return API_AWAY
        self.ghosts.add(stored, asked)
        return TORN

    def _delete(self, pod: Json) -> bool:
        path = f"{path_of(pod)}/{pod['metadata']['name']}"
        return self.tenant.send("DELETE", path, {"gracePeriodSeconds": 0}).status == HTTPStatus.OK

    def _planted(self) -> str:
        """Create a claim that looks as if /mutate had pinned it to a model and the scheduler had created it.

        The tenant forges the CEL expression of the pin, and the annotation of claims that the scheduler creates.
        """
        entry = CLAIM_REQUESTS[1]["exactly"]
        expression = write_pin(ClaimPin(NVIDIA, (random.choice([*PRODUCTS]).lower(),)))  # noqa: S311  # random load
        asked = {"name": "gpu", "exactly": {**entry, "selectors": [{"cel": {"expression": expression}}]}}
        answer, made = self._claim(asked, annotations={"resource.kubernetes.io/extended-resource-claim": "true"})
        self._delete(made)
        return answer

    def _unprotected(self) -> str:
        answer, made = self._claim(CLAIM_REQUESTS[0], finalizers=[PROTECTION])
        if answer != STORED:
            return answer
        patched = self._patch(f"{path_of(made)}/{made['metadata']['name']}", {"finalizers": None})
        self._delete(made)
        return patched

    def _claim(self, asked: Json, **metadata: object) -> tuple[str, Json]:
        number = next(self.numbers)
        made = claim(self._namespace, f"attack-{number}", asked)
        made["metadata"] |= {"labels": self.callers.labels(number), **metadata}
        return outcome(self.tenant.send("POST", path_of(made), made)), made

    def _label(self, value: str | None) -> str:
        path = f"/api/v1/namespaces/{self._namespace}"
        return self._patch(path, {"labels": {ENFORCED: value}})

    def _patch(self, path: str, metadata: Json) -> str:
        return outcome(self.tenant.try_merge_patch(path, {"metadata": metadata}))

    def _beyond_resource_quota(self) -> str:
        return self._create(self._pod({**FEW_CORES, FPGA: 1}))[0]

    def _existing(self) -> str:
        return self._review(with_uid(pinned(self._pod(FEW_CORES))))

    def _invented(self) -> str:
        return self._review(with_uid(pinned(gpu_pod("x", f"{INVENTED}-{next(self.numbers)}", GPU_REQUESTS[0]))))

    def _large(self) -> str:
        pod = with_uid(pinned(self._pod()))
        pod["spec"]["containers"][0] |= LARGE
        return self._review(pod, dryRun=True)

    def _replica(self) -> WebhookProcess:
        """Return a random webhook replica. If it was killed, its replacement listens at the same address."""
        return random.choice(self.replicas)  # noqa: S311  # random load

    def _review(self, pod: Json, **fields: object) -> str:
        try:
            reply = self._replica().send("POST", "/validate", json.dumps(review_of(pod, **fields)))
        except (OSError, HTTPException):
            return HUNG_UP
        if reply.status == HTTPStatus.INTERNAL_SERVER_ERROR:
            said = reply.body.decode()
            return NO_RIGHT if "forbidden: User" in said else said
        if reply.status != HTTPStatus.OK:
            return str(reply.status)
        response = reply.decoded()["response"]
        return ALLOWED if response["allowed"] else str(response["status"]["code"])

    def _silence(self) -> str:
        """Open `SILENT` connections to replicas, and leave them open without a complete request.

        Half of the connections send a part of a large body, and the others send nothing.
        """
        with ExitStack() as held, suppress(OSError):
            for number in range(SILENT):
                connection = held.enter_context(connected(self._replica()))
                if number % 2:
                    connection.sendall(
                        b"POST /validate HTTP/1.1\r\nHost: x\r\nContent-Length: 2900000\r\n\r\n" + b" " * 2**16
                    )
            time.sleep(SILENT_SECONDS)
        return HUNG_UP


def binding(pod: Json) -> tuple[str, Json]:
    """Return the path and body of a request that binds the pod to `NODE`. The body has forged annotations."""
    name, target = pod["metadata"]["name"], {"apiVersion": "v1", "kind": "Node", "name": NODE}
    body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name, "annotations": FORGED}, "target": target}
    return f"{path_of(pod)}/{name}/binding", body


@contextmanager
def connected(replica: WebhookProcess) -> Iterator[ssl.SSLSocket]:
    parts = urlsplit(replica.url)
    with (
        socket.create_connection((parts.hostname, parts.port or 0), timeout=SILENT_SECONDS) as raw,
        replica.tls.wrap_socket(raw, server_hostname=parts.hostname) as connection,
    ):
        yield connection


def prepare(cluster: Cluster, namespaces: Sequence[str]) -> None:
    """Let user `tenant` edit these namespaces and their labels, and create the node `NODE`.

    Also create a ResourceQuota in each namespace, which rejects pods that request FPGAs.
    """
    rbac = {"apiVersion": "rbac.authorization.k8s.io/v1"}
    rule = {"apiGroups": [""], "resources": ["namespaces"], "verbs": ["get", "patch"]}
    cluster.create({**rbac, "kind": "ClusterRole", "metadata": {"name": NODE}, "rules": [rule]})
    cluster.create_node(NODE, {MODEL: "M40"}, {"tencent.com/vcuda-core": "100000"})
    for namespace in namespaces:
        metadata = {"namespace": namespace, "name": NODE}
        hard = {"hard": {f"requests.{FPGA}": "0"}}
        cluster.create({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": metadata, "spec": hard})
        # The API server enforces a ResourceQuota only when the quota has a status, which the controller manager would
        # write late. So the test writes the status.
        path = f"/api/v1/namespaces/{namespace}/resourcequotas/{NODE}/status"
        cluster.rest.merge_patch(path, {"status": {**hard, "used": {f"requests.{FPGA}": "0"}}})
        for role in ("edit", NODE):
            about = {**rbac, "kind": "RoleBinding", "metadata": {**metadata, "name": role}}
            refers = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role}
            subject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "tenant"}
            cluster.create({**about, "roleRef": refers, "subjects": [subject]})
