"""The command ``kubectl gpuquota why``: shows why a workload has no pods, and how much quota must become free."""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from controller.plugin.explain import ADMITTED, NOT_ASKED, ExplainedObject, ask_about, explain_made, pinned_model
from controller.plugin.kubectl import Kubectl, in_path, read_json
from controller.plugin.rejections import read_rejections
from controller.plugin.usage_table import holder_cells
from controller.seen_events import ReportedObject
from vcuda import errors
from vcuda.claims.names import API_PATH, CLAIM
from vcuda.cli import aligned
from vcuda.ledger.report import NamespaceUse, PodUse
from vcuda.quota.model import CORES_PER_CARD, cards, mebibytes
from vcuda.quota.rejections import lacks_node
from vcuda.quota.shortage import MissingQuota, read_shortages
from vcuda.quota.well_known import MODEL_ANNOTATION, TOTAL
from vcuda.workloads import check_shape, entries, workloads_in

Json = dict[str, Any]


class ReadKind(NamedTuple):
    """A kind of workload. ``short``: kubectl's short name. ``children``: the kind that it creates instead of pods."""

    kind: str
    api: str
    plural: str
    short: str = ""
    children: str = ""


_KINDS = (
    ReadKind("Pod", "/api/v1", "pods", "po"),
    ReadKind("ReplicationController", "/api/v1", "replicationcontrollers", "rc"),
    ReadKind("Deployment", "/apis/apps/v1", "deployments", "deploy", children="replicasets"),
    ReadKind("ReplicaSet", "/apis/apps/v1", "replicasets", "rs"),
    ReadKind("StatefulSet", "/apis/apps/v1", "statefulsets", "sts"),
    ReadKind("DaemonSet", "/apis/apps/v1", "daemonsets", "ds"),
    ReadKind("Job", "/apis/batch/v1", "jobs"),
    ReadKind("CronJob", "/apis/batch/v1", "cronjobs", "cj", children="jobs"),
)

KINDS: Mapping[str, ReadKind] = {
    name: each for each in _KINDS for name in (each.kind.lower(), each.plural, each.short) if name
}
"""The kinds of workloads by the names that kubectl accepts (singular, plural, short), in lower case."""

MAX_PENDING_SHOWN = 3
"""The most pending pods of a workload whose states are shown."""


@dataclass(frozen=True, slots=True)
class Missing:
    """The quota of one GPU model, or of all models together, that is missing to admit a rejected pod or claim.

    ``needed``: the missing cards, or the missing MiB if ``of_memory``; None if the request is larger than the limit.
    ``held_by``: the pods and claims of the namespace that are charged for the model, the largest first.
    ``team``: the team whose limit is exceeded; empty if it is the limit of the namespace. ``others``: the cards that
    other namespaces of the team use.
    """

    model: str
    needed: float | None
    of_memory: bool
    held_by: tuple[PodUse, ...]
    team: str = ""
    others: float = 0

    def sentence(self) -> str:
        model = "any GPU model" if self.model == TOTAL else self.model
        if self.needed is None:
            return f"the request for {model} is larger than the limit, so it never fits, even if other pods end"
        amount = mebibytes(round(self.needed)) if self.of_memory else cards(round(self.needed * CORES_PER_CARD))
        return f"{amount} of {model} must become free before the request fits"


@dataclass(frozen=True, slots=True)
class Why:
    """The reasons why a workload has no pods.

    ``rejected``: the recent rejections of its pods, the newest first.
    ``now``: the states of its pending pods and their claims, and then the decisions of a dry run. There is no dry run
    if all pods exist. For a pod that exists, its state and those of its claims.
    ``missing``: the quota that must become free.
    ``hints``: likely causes, and what to do about them.
    ``pending_left_out``: the number of pending pods that ``now`` leaves out.
    """

    object: str
    namespace: str
    rejected: tuple[ReportedObject, ...]
    now: tuple[ExplainedObject, ...]
    missing: tuple[Missing, ...]
    hints: tuple[str, ...] = ()
    pending_left_out: int = 0

    @property
    def is_admitted(self) -> bool:
        """True if the named pod exists, or if everything in the dry run was admitted."""
        return bool(self.now) and all(each.decision == ADMITTED for each in self.now)


def parse_object(text: str) -> tuple[ReadKind, str]:
    """Return the kind and the name in a text such as ``job/train``. Raises BadInput if the text is invalid."""
    kind, slash, name = text.partition("/")
    found = KINDS.get(kind.lower())
    if not (found and slash and name):
        kinds = ", ".join(each.kind.lower() for each in _KINDS)
        raise errors.BadInput(
            f"the object must be KIND/NAME, for example job/train; got {text!r}. The supported kinds are {kinds}"
        )
    return found, name


def explain_why(
    api: Kubectl, kind: ReadKind, name: str, namespace: str, usage: Callable[[], NamespaceUse | None]
) -> Why:
    """Return why the pods of a workload are rejected. ``usage``: reads the published usage of the namespace.

    Raises NotFound if the workload does not exist, or another VcudaError if the cluster does not answer.
    """
    stored = _read(api, kind, name, namespace)
    children = _children(api, kind, stored, namespace)
    family = {(kind.kind, name), *((KINDS[kind.children].kind, each["metadata"]["name"]) for each in children)}
    rejected = tuple(each for each in read_rejections(api, namespace) if _is_of(each, family))
    is_pod = kind.kind == "Pod"
    pods = [stored] if is_pod else _pending(api, (stored, *children), namespace)
    asked = () if is_pod else _complete(stored, namespace) or _asked(api, stored, namespace)
    shown = pods[:MAX_PENDING_SHOWN]
    now = (*(found for pod in shown for found in _stored_pod(api, pod, namespace)), *asked)
    reasons = [each.reason for each in now if each.decision not in (ADMITTED, NOT_ASKED)]
    shortages = {found.model: found for reason in reasons for found in read_shortages(reason)}
    use = usage() if shortages else None
    missing = tuple(_missing(each, use) for each in shortages.values())
    own = _held_by_itself(stored, children, missing) if kind.kind == "Deployment" else ""
    hints = tuple(filter(None, (own, _pinned_elsewhere(shown, asked), use.unstored_warning if use else "")))
    return Why(f"{kind.kind}/{name}", namespace, rejected, now, missing, hints, len(pods) - len(shown))


def _complete(stored: Json, namespace: str) -> tuple[ExplainedObject, ...]:
    """Return the state of a workload that has all pods that it wants now; empty for another workload."""
    spec, status = (stored.get(part) or {} for part in ("spec", "status"))
    if status.get("observedGeneration", 0) < stored["metadata"].get("generation", 0):
        return ()
    wanted, found = spec.get("replicas", 0), status.get("replicas", 0)
    if stored["kind"] in ("Deployment", "StatefulSet"):
        # Only pods of the current template count. The API server leaves out this field if it is 0.
        found = min(found, status.get("updatedReplicas", 0))
    if stored["kind"] == "Job":
        wanted = spec.get("parallelism", 1)
        if (completions := spec.get("completions")) is not None:
            wanted = min(wanted, completions - status.get("succeeded", 0))
        found = status.get("active", 0)
    if found < wanted or not (wanted or status.get("succeeded")):
        return ()
    reason = f"all pods exist that the workload wants now: {found}" if wanted else "all pods of the Job have succeeded"
    return (ExplainedObject(f"{stored['kind']}/{stored['metadata']['name']}", namespace, ADMITTED, "", reason),)


def _pending(api: Kubectl, owners: Sequence[Json], namespace: str) -> list[Json]:
    """Return the pods of these owners that exist and have not started, the oldest first."""
    uids = {each["metadata"]["uid"] for each in owners}
    found = api.list_objects(f"/api/v1/namespaces/{in_path(namespace)}/pods", {"fieldSelector": "status.phase=Pending"})
    own = [each for each in found if uids & _owner_uids(each) and "deletionTimestamp" not in each["metadata"]]
    return sorted(own, key=lambda each: str(each["metadata"].get("creationTimestamp", "")))


def _pinned_elsewhere(pods: Sequence[Json], asked: Sequence[ExplainedObject]) -> str:
    """Return a hint if the scheduler has not placed a pod, and a new pod would get a model with nodes for it."""
    for pod, new in itertools.product(pods, asked[:1]):
        # Give no hint if a new pod gets another model for lack of quota, which the deleted pod would release.
        name, model = f"Pod/{pod['metadata']['name']}", _model_of(pod)
        if model and _waits(pod) and lacks_node(model, new.reason):
            return (
                f"{name} stays pinned to {model}, but a new pod would be pinned to {new.model}. If you "
                f"delete {name}, its workload creates a new pod"
            )
    return ""


def _model_of(pod: Json) -> str:
    return str((pod["metadata"].get("annotations") or {}).get(MODEL_ANNOTATION, ""))


def _waits(pod: Json) -> list[str]:
    """Return why the scheduler has not placed a pod; empty if the pod is placed."""
    return [
        f"the scheduler has not placed the pod: {each.get('message', '')}"
        for each in (pod.get("status") or {}).get("conditions") or ()
        if each.get("type") == "PodScheduled" and each.get("status") == "False"
    ]


def _held_by_itself(stored: Json, replica_sets: Sequence[Json], missing: Sequence[Missing]) -> str:
    """Return a hint if old pods of a Deployment hold the quota that its new pods need; otherwise an empty text."""
    spec = stored.get("spec") or {}
    surge = ((spec.get("strategy") or {}).get("rollingUpdate") or {}).get("maxSurge", 0)
    waiting = {each["metadata"]["name"] for each in replica_sets if _lacks_pods(each)}
    old = tuple(f"{each['metadata']['name']}-" for each in replica_sets if each["metadata"]["name"] not in waiting)
    held = [pod.name for each in missing for pod in each.held_by if not pod.claim and pod.name.startswith(old)]
    if not held or not waiting or surge in (0, "0%"):
        return ""
    return (
        f"{held[0]}, an old pod of this Deployment, holds quota that its new pod needs. In "
        "spec.strategy.rollingUpdate, write maxSurge: 0 and maxUnavailable: 1, so that the old pod is deleted first"
    )


def _lacks_pods(replica_set: Json) -> bool:
    wanted, found = (replica_set.get(part) or {} for part in ("spec", "status"))
    return bool(wanted.get("replicas", 1) > found.get("replicas", 0))


def _read(api: Kubectl, kind: ReadKind, name: str, namespace: str) -> Json:
    path = f"{kind.api}/namespaces/{in_path(namespace)}/{kind.plural}/{in_path(name)}"
    try:
        found: Json = read_json(api.get(path))
    except errors.NotFound as error:
        text = f"{kind.kind}/{name} does not exist in namespace {namespace}"
        if kind.kind == "Pod":
            text = f"{text}. A rejected pod is not stored, so name the workload of the pod instead"
        raise errors.NotFound(error.status, text) from error
    return found


def _children(api: Kubectl, kind: ReadKind, stored: Json, namespace: str) -> Sequence[Json]:
    """Return the objects through which ``stored`` creates pods, such as its ReplicaSets."""
    if not kind.children:
        return ()
    child, uid = KINDS[kind.children], stored["metadata"]["uid"]
    found = api.list_objects(f"{child.api}/namespaces/{in_path(namespace)}/{child.plural}")
    return [each for each in found if uid in _owner_uids(each)]


def _owner_uids(stored: Json) -> set[str]:
    return {own["uid"] for own in stored["metadata"].get("ownerReferences") or ()}


def _is_of(rejection: ReportedObject, family: set[tuple[str, str]]) -> bool:
    # An Event about a rejected claim refers to the claim's pod. The name of this pod begins with the workload's name.
    own = (rejection.kind, rejection.name) in family
    return own or (rejection.kind == "Pod" and any(rejection.name.startswith(f"{name}-") for _, name in family))


def _asked(api: Kubectl, stored: Json, namespace: str) -> tuple[ExplainedObject, ...]:
    text = json.dumps({key: stored[key] for key in ("apiVersion", "kind", "metadata", "spec") if key in stored})
    return tuple(ask_about(api, workloads_in(stored["metadata"]["name"], text, namespace, check_shape)))


def _stored_pod(api: Kubectl, stored: Json, namespace: str) -> Iterator[ExplainedObject]:
    """Yield the state of a pod, and of each of its claims."""
    name, model, claims = stored["metadata"]["name"], _model_of(stored), [*_claims(api, stored, namespace)]
    state = f"the pod exists in phase {(stored.get('status') or {}).get('phase', 'Pending')}"
    pinned = f"the pod is pinned to {model}" if model else "the pod is pinned to no model"
    lacking = [f"the pod cannot start without {each.object}" for each in claims if each.decision != ADMITTED]
    reason = "; ".join([state, pinned, *lacking, *_waits(stored)])
    yield ExplainedObject(f"Pod/{name}", namespace, ADMITTED, model, reason)
    yield from claims


def _claims(api: Kubectl, pod: Json, namespace: str) -> Iterator[ExplainedObject]:
    """Yield the states of a pod's claims. For each claim that Kubernetes has not created yet, try it in a dry run."""
    status, requested = pod.get("status") or {}, entries(pod.get("spec") or {}, "resourceClaims")
    # Kubernetes writes each claim that it has created into the pod's status. A claim without a name is not needed.
    made = {each["name"]: each.get("resourceClaimName") for each in entries(status, "resourceClaimStatuses")}
    names = [each.get("resourceClaimName") or made.get(each["name"]) for each in requested]
    names.append((status.get("extendedResourceClaimStatus") or {}).get("resourceClaimName"))
    for name in filter(None, names):
        yield _stored_claim(api, name, namespace)
    missing = [each for each in requested if each["name"] not in made]
    metadata = {**pod["metadata"], "namespace": namespace}
    yield from explain_made(api, {"metadata": metadata, "spec": {"resourceClaims": missing}}, {})


def _stored_claim(api: Kubectl, name: str, namespace: str) -> ExplainedObject:
    title = f"{CLAIM}/{name}"
    try:
        body = api.get(f"{API_PATH}/namespaces/{in_path(namespace)}/resourceclaims/{in_path(name)}")
    except errors.NotFound:
        return ExplainedObject(title, namespace, NOT_ASKED, "", "the pod waits for this claim, which does not exist")
    model, status = pinned_model(api, namespace, body), read_json(body).get("status") or {}
    devices = status.get("allocation", {}).get("devices", {})
    given = [f"{each['device']} of pool {each['pool']}" for each in entries(devices, "results")]
    pinned = f"the claim is pinned to {model}" if model else "the claim is pinned to no model"
    allocated = f"it has {', '.join(given)}" if given else "it has no device yet"
    return ExplainedObject(title, namespace, ADMITTED, model, f"the claim exists; {pinned}; {allocated}")


def _missing(shortage: MissingQuota, use: NamespaceUse | None) -> Missing:
    models = use.models if use else ()
    pods = (pod for each in models if shortage.model in (each.model, TOTAL) for pod in each.pods)
    held_by = tuple(sorted(pods, key=lambda pod: -pod.cores))
    needed, limits = shortage.needed, use.team.limits if use and use.team and shortage.team else ()
    others = (use.used_by_others(each) for each in limits if use and each.model == shortage.model)
    own = held_by if needed is not None else ()
    return Missing(shortage.model, needed, shortage.of_memory, own, shortage.team, next(others, 0))


def why_lines(why: Why) -> Iterator[str]:
    yield f"{why.object} in namespace {why.namespace}"
    yield ""
    yield "Rejected in the last hour:" if why.rejected else "No rejection in the last hour."
    for each in why.rejected:
        times = "once" if each.count == 1 else f"{each.count} times"
        yield f"  {each.at}  {each.kind}/{each.name}, {times}: {each.message}"
    yield ""
    yield "Now:" if why.now else "Now: the workload creates no pods."
    for verdict in why.now:
        yield f"  {verdict.object} {verdict.decision}: {verdict.reason}"
    if why.pending_left_out:
        yield f"  and {why.pending_left_out} more pending"
    for missing in why.missing:
        yield from ("", missing.sentence())
        rows = [(f"  {kind}", *cells) for kind, *cells in map(holder_cells, missing.held_by)]
        if rows:
            yield from aligned([("  HELD BY", "NAME", "CARDS", "MEMORY MiB"), *rows])
        if missing.others:
            yield f"  other namespaces of team {missing.team} use {missing.others:g} cards"
    for hint in why.hints:
        yield from ("", hint)
