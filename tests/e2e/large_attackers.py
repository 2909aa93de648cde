"""A tenant attacks the memory of our programs by objects and admission reviews of the maximum size."""

import json
import random
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from itertools import count

from tests.builders import MODEL, required, requirement, term
from tests.e2e.attackers import NO_MODEL, NODE, outcome
from tests.e2e.chaos import API_AWAY, BUSY, LEDGER_LOST, NOT_PINNED, OVER_QUOTA, STORED, WEBHOOK_AWAY, path_of
from tests.e2e.cluster import Json
from tests.e2e.dra import NVIDIA, VERSION, claim, request, template
from tests.e2e.observer import AWAY
from tests.e2e.rest import Rest
from tests.integration.reviews import card_pod, gpu_pod, with_spec
from vcuda.quota.rejections import OVER_QUOTA as SAID

KEPT = 60
"""The maximum number of objects of 1.2 MB that one attacker keeps stored."""

PAUSE = 1.5
"""Average seconds between two creates of one attacker. They are limited, as etcd keeps deleted objects for a while."""

LARGE = {"env": [{"name": f"SETTING_{number}", "value": "x" * 100_000} for number in range(12)]}
ESCAPED = {"env": [{"name": f"SETTING_{number}", "value": "&" * 100_000} for number in range(6)]}
GATED = {"schedulingGates": [{"name": "example.com/wait"}]}
SELECTORS = [{"cel": {"expression": f'"{number}" != "{"x" * 10_200}"'}} for number in range(30)]
REQUESTS = 4
HEAVY = {
    "nodeSelector": {f"key-{number}": "v" for number in range(40_000)},
    "affinity": required(*(term(requirement(f"key-{number}", "Exists")) for number in range(50))),
}

DEPTH = 2_000
NESTED = "replaced by nested fields"
FIELDS = '{"f:a":' * DEPTH + "{}" + "}" * DEPTH
"""The fields of a manager, nested deeper than a decoder of Python or msgspec can read."""

LISTS = {f"hami.io/vgpu-devices-{part}": "x" * 16_000 for part in ("to-allocate", "allocated")}
VALUES = required(term(requirement(MODEL, "In", *(f"NVIDIA-{number}" for number in range(3_500)))))

NAMED = "large-0"
"""The name of the ResourceClaimTemplate from which pods in a dry run request a hundred claims each."""

TOO_LARGE = "too large to be reviewed"
GIVEN_UP = frozenset({API_AWAY, WEBHOOK_AWAY, NOT_PINNED, BUSY})
"""The permitted outcomes of dry runs that end without a decision about the quota.

A dry run has a timeout of only one second, and the webhook is busy if too many large reviews wait.
"""

ATTACKS: Mapping[str, frozenset[str]] = {
    "large pods without GPUs": frozenset({STORED}),
    "GPU pods meanwhile": frozenset({STORED, OVER_QUOTA, BUSY}),
    "deeply nested pods": frozenset({STORED}),
    "forced deletions without a quota": frozenset({STORED}),
    "dry runs of pods that list thousands of models": GIVEN_UP | {STORED, OVER_QUOTA, NO_MODEL},
    "large Events": frozenset({STORED}),
    "dry runs of heavy pods": GIVEN_UP | {STORED, OVER_QUOTA},
    "pods that become larger when encoded": GIVEN_UP | {TOO_LARGE},
}
"""The permitted outcomes of each attack with large objects, by the name of the attack."""

# While one replica creates the first ledger of a namespace, the other rejects claims, and lets pods retry (`BUSY`).
CLAIM_ATTACKS: Mapping[str, frozenset[str]] = {
    "large templates": frozenset({STORED}),
    "dry runs that name a template a hundred times": GIVEN_UP | {STORED},
    "large claims": frozenset({STORED, OVER_QUOTA, LEDGER_LOST}),
    "claims of 64 partitions": frozenset({STORED, OVER_QUOTA, LEDGER_LOST}),
    "dry runs of claims of 64 partitions": GIVEN_UP | {STORED, OVER_QUOTA, LEDGER_LOST},
}


@dataclass(frozen=True)
class LargeSiege:
    """Attacks with large objects by a tenant who may edit two namespaces, of which one has a quota."""

    tenant: Rest
    limited: str
    unlimited: str
    claims: bool
    counts: Mapping[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    def attackers(self) -> list[Callable[[threading.Event], None]]:
        """Return functions that attack until a stop event is set. The caller runs each in its own thread."""
        creates: dict[str, Callable[[int], Json]] = {
            "large pods without GPUs": partial(large_pod, self.limited),
            "GPU pods meanwhile": lambda number: card_pod(f"card-{number}", self.limited),
            "deeply nested pods": partial(nested_pod, self.unlimited),
            "forced deletions without a quota": partial(vanishing_pod, self.unlimited),
            "large Events": partial(large_event, self.limited),
        }
        dry_runs: dict[str, Callable[[int], Json]] = {
            "dry runs of heavy pods": partial(heavy_pod, self.limited),
            "dry runs of pods that list thousands of models": partial(listing_pod, self.limited),
            "pods that become larger when encoded": partial(escaped_pod, self.limited),
        }
        if self.claims:
            creates["large templates"] = partial(large_template, self.unlimited)
            creates["large claims"] = partial(large_claim, self.limited)
            creates["claims of 64 partitions"] = partial(parted_claim, self.limited)
            dry_runs["dry runs of claims of 64 partitions"] = partial(parted_claim, self.limited)
            self.tenant.send("POST", *addressed(large_template(self.limited, 0))).ok()
            dry_runs["dry runs that name a template a hundred times"] = partial(naming_pod, self.limited)
        kept = {"GPU pods meanwhile": 1, "large claims": 2, "claims of 64 partitions": 0}
        kept["forced deletions without a quota"] = 0
        return [
            *(partial(self._store, name, make, kept.get(name, KEPT)) for name, make in creates.items()),
            *(partial(self._try, name, make) for name, make in dry_runs.items()),
        ]

    def _store(self, name: str, make: Callable[[int], Json], kept: int, stop: threading.Event) -> None:
        """Create large objects until ``stop`` is set. If more than ``kept`` are stored, delete the oldest."""
        stored: deque[str] = deque()
        for number in count():
            if stop.wait(random.uniform(0, 2 * PAUSE)):  # noqa: S311  # random load
                return
            with suppress(*AWAY):
                path, made = addressed(make(number))
                answer = self._send("POST", path, made)
                self.counts[name][answer] += 1
                if answer == STORED:
                    stored.append(f"{path}/{made['metadata']['name']}")
                while len(stored) > kept:
                    self._send("DELETE", stored.popleft(), {"gracePeriodSeconds": 0})

    def _send(self, method: str, path: str, body: Json) -> str:
        # The client encodes JSON by a recursive function, but sends text unchanged. The server reads JSON as YAML.
        text = json.dumps(body).replace(json.dumps(NESTED), FIELDS)
        return outcome(self.tenant.send(method, path, text, content_type="application/yaml"))

    def _try(self, name: str, make: Callable[[int], Json], stop: threading.Event) -> None:
        """Create large objects in dry runs until ``stop`` is set. Each request has a timeout of one second."""
        for number in count():
            if stop.wait(random.uniform(0, PAUSE / 2)):  # noqa: S311  # random load
                return
            try:
                answer = self.tenant.send("POST", *addressed(make(number)), dryRun="All", timeout="1s")
            except AWAY:
                self.counts[name][API_AWAY] += 1
            else:
                too_large = answer.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE
                self.counts[name][TOO_LARGE if too_large else outcome(answer)] += 1


def heavy_pod(namespace: str, number: int) -> Json:
    return with_spec(card_pod(f"heavy-{number}", namespace), **HEAVY)


def escaped_pod(namespace: str, number: int) -> Json:
    """Return a pod with 600 KB of `&`. In a review, Go encodes each `&` in six bytes."""
    pod = card_pod(f"escaped-{number}", namespace)
    pod["spec"]["containers"][0] |= ESCAPED
    return pod


def listing_pod(namespace: str, number: int) -> Json:
    return with_spec(card_pod(f"listing-{number}", namespace), affinity=VALUES)


def nested_pod(namespace: str, number: int) -> Json:
    """Return a pod whose managedFields are `NESTED`, which is replaced by `FIELDS` when the pod is sent."""
    pod = with_spec(gpu_pod(f"nested-{number}", namespace, {"cpu": "1"}), **GATED)
    fields = {"apiVersion": "v1", "manager": "a", "operation": "Update", "fieldsType": "FieldsV1", "fieldsV1": NESTED}
    pod["metadata"]["managedFields"] = [fields]
    return pod


def vanishing_pod(namespace: str, number: int) -> Json:
    """Return a GPU pod that is bound to a node, with the largest lists of cards that our programs keep."""
    pod = with_spec(gpu_pod(f"vanishing-{number}", namespace, {"tencent.com/vcuda-core": "100"}), nodeName=NODE)
    pod["metadata"]["annotations"] = LISTS
    return pod


def naming_pod(namespace: str, number: int) -> Json:
    claims = [{"name": f"claim-{each}", "resourceClaimTemplateName": NAMED} for each in range(100)]
    return with_spec(gpu_pod(f"small-{number}", namespace, {"cpu": "1"}), resourceClaims=claims)


def large_pod(namespace: str, number: int) -> Json:
    """Return a large pod without GPUs. It has a scheduling gate, so no scheduler binds it to a node."""
    pod = with_spec(gpu_pod(f"large-{number}", namespace, {"cpu": "1"}), **GATED)
    pod["spec"]["containers"][0] |= LARGE
    return pod


def large_claim(namespace: str, number: int) -> Json:
    """Return a large claim. Its digest (the fields that decide the charge) is unique, so that a cache does not help."""
    return claim(namespace, f"large-{number}", *requests(f"gpu-{number}"))


def requests(name: str) -> list[Json]:
    return [request(NVIDIA, f"{name}-{number}", selectors=SELECTORS) for number in range(REQUESTS)]


def parted_claim(namespace: str, number: int) -> Json:
    """Return a claim of eight requests with eight alternatives each. Each alternative is charged by its MIG profile."""
    ways = [{"name": f"way-{way}", "deviceClassName": "mig.nvidia.com", "count": 1 + way % 2} for way in range(8)]
    parts = [{"name": f"part-{part}", "firstAvailable": ways} for part in range(8)]
    return claim(namespace, f"parted-{number}", *parts)


def large_template(namespace: str, number: int) -> Json:
    return template(namespace, f"large-{number}", *requests("gpu"))


def large_event(namespace: str, number: int) -> Json:
    """Return a large Event. The controller reads it when quota is released, to find rejected workloads."""
    about = {"kind": "ReplicaSet", "name": f"train-{number}", "namespace": namespace, "uid": f"u-{number}"}
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"rejected-{number}", "namespace": namespace},
        "involvedObject": about,
        "reason": "FailedCreate",
        "message": f"{SAID}: M40 {'x' * 1_000_000}",
        "type": "Warning",
    }


def addressed(made: Json) -> tuple[str, Json]:
    namespace = made["metadata"]["namespace"]
    match made["kind"]:
        case "Event":
            return f"/api/v1/namespaces/{namespace}/events", made
        case "ResourceClaimTemplate":
            return f"/apis/{VERSION}/namespaces/{namespace}/resourceclaimtemplates", made
    return path_of(made), made
