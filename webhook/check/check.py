"""Reviews the pods and ResourceClaims in manifests, and formats the answers as a table.

The command `check` decides the reviews in its own process. The project's demo sends the reviews to a webhook server.
"""

import asyncio
import math
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import jsonpatch
import msgspec
from jsonpointer import JsonPointer

from vcuda import cli, k8s_types
from vcuda.admission_review import AdmissionRequest, AdmissionResponse, GroupVersionKind
from vcuda.claims import objects, request as claim_requests
from vcuda.claims.digest import digest_of
from vcuda.claims.names import CLAIM, GROUP, TEMPLATE
from vcuda.placement.affinity import NodeSelection
from vcuda.quota.model import CORES_PER_CARD, Charge
from vcuda.quota.well_known import UNASKED_NAMESPACES
from vcuda.requests.pod_request import read_request
from vcuda.workloads import Manifest, Unread, Workload, made_claims
from webhook.caches import RecentChoices
from webhook.check import files
from webhook.review import answers, context
from webhook.review.decisions import Creation

Ask = Callable[[str, AdmissionRequest], Awaitable[AdmissionResponse]]
"""A function that takes a path of the webhook, such as /mutate, and an admission review. It returns the answer."""

PODS = GroupVersionKind(version="v1", kind="Pod")

ADMITTED, REJECTED, UNKNOWN, SKIPPED, MALFORMED = "admitted", "rejected", "unknown", "skipped", "malformed"

NOT_COUNTED = "the object does not state how many of these pods it creates, so only one pod is checked"

_WORDS = {"ignored": "no GPU", "unlimited": "not limited"}

_COUNTED = "the webhook is not called for {} in this system namespace, so they are charged but never rejected"

_NODES = "the nodes that the pod selects by labels or names (see --nodes)"

_MADE_LATER = "each claim that Kubernetes creates from this template is charged"


class Row(msgspec.Struct, frozen=True):
    """One line of the table: the decision about ``count`` equal pods or claims of one object."""

    object: str
    namespace: str
    count: int
    decision: str
    """One of admitted, rejected, no GPU, not limited, counted, unknown, skipped, malformed."""
    outcome: str = ""
    """The outcome of the review, as in the metrics of the webhook; empty if there was no review."""
    model: str = ""
    rule: str = ""
    """The rule from which the order of the GPU models came; empty if no model was chosen."""
    charge: Charge = Charge()
    """The GPU quota that each of these pods or claims is charged."""
    reason: str = ""

    @property
    def charge_text(self) -> str:
        return str(self.charge) if self.charge.cores else ""

    def as_json(self) -> Manifest:
        """Return the row as JSON. ``cards`` and ``memory_mib`` are the charge of each pod or claim."""
        fields = msgspec.structs.asdict(self)
        del fields["charge"]
        return {**fields, "cards": math.ceil(self.charge.cores) / CORES_PER_CARD, "memory_mib": self.charge.memory}


def exit_status(rows: Iterable[Row], *, strict: bool) -> int:
    """Return the exit status: 2 if an object is malformed, 1 if an object is rejected, otherwise 0.

    With ``strict``, an object without a decision counts as rejected.
    """
    decisions = {row.decision for row in rows}
    failing = {REJECTED, UNKNOWN, SKIPPED} if strict else {REJECTED}
    return 2 if MALFORMED in decisions else int(bool(decisions & failing))


def read_workloads(paths: Sequence[Path], namespace: str) -> list[Workload | Unread]:
    """Return all claims, and all objects that create pods, in the order of the files.

    Raises BadInput if a file cannot be read.
    """
    return [each for path in paths for each in files.typed_workloads(str(path), files.read_file(path), namespace)]


def check_objects(workloads: Sequence[Workload | Unread], cluster: files.OfflineCluster) -> list[Row]:
    """Decide the objects in order. Stored objects, and objects admitted earlier in this run, use up quota."""
    cluster = with_templates(cluster, workloads)
    policy, ledgers, choices = cluster.policy, cluster.ledgers(), RecentChoices()

    async def ask(path: str, request: AdmissionRequest) -> AdmissionResponse:
        return await answers.answer(path, Creation(request, policy, ledgers, choices))

    return asyncio.run(decide_workloads(workloads, ask, cluster))


def with_templates(cluster: files.OfflineCluster, workloads: Iterable[Workload | Unread]) -> files.OfflineCluster:
    specs = ((each.namespace, each.name, each.claim_spec) for each in workloads if isinstance(each, Workload))
    own = {(home, name): msgspec.convert(spec, objects.ClaimSpec) for home, name, spec in specs if spec is not None}
    return msgspec.structs.replace(cluster, templates={**cluster.templates, **own})


async def decide_workloads(
    workloads: Iterable[Workload | Unread], ask: Ask, cluster: files.OfflineCluster
) -> list[Row]:
    """Decide workloads and return table rows. A workload's pods with equal answers share a row. Their claims follow."""
    rows = []
    for workload in workloads:
        if isinstance(workload, Unread):
            word = MALFORMED if workload.malformed else SKIPPED
            rows.append(Row(workload.title, workload.namespace, 0, word, reason=workload.reason))
            continue
        decided: dict[str, list[tuple[Hashable, Row]]] = {}
        for _ in range(workload.count):
            async for decision in _decide(workload, ask, cluster):
                decided.setdefault(decision[1].object, []).append(decision)
        for decisions in decided.values():
            for _, alike in groupby(decisions, key=lambda decision: decision[0]):
                (_, first), *rest = alike
                rows.append(msgspec.structs.replace(first, count=1 + len(rest)))
    return rows


async def _decide(workload: Workload, ask: Ask, cluster: files.OfflineCluster) -> AsyncIterator[tuple[Hashable, Row]]:
    """Decide one pod or claim of a workload. Yield its table row. For a pod, also yield the rows of the pod's claims.

    Each row is yielded with a key. Rows with equal keys have equal answers, and can be merged.
    """
    namespace, created, policy = workload.namespace, workload.created, cluster.policy
    notes = [workload.warning] if workload.warning else []
    if not workload.is_counted:
        notes.append(NOT_COUNTED)
    if created["kind"] != "Pod":
        yield await _decide_one(workload.title, created, ask, policy, notes)
        return
    limited = policy.quota.for_namespace(namespace) is not None
    alike, row = await _decide_one(workload.title, created, ask, policy, notes)
    if limited and row.decision == ADMITTED and _needs_nodes(created, policy):
        reason = "; ".join(filter(None, (_missing(_NODES), row.reason)))
        row = msgspec.structs.replace(row, decision=UNKNOWN, reason=reason)
    yield alike, row
    for each in made_claims(created) if row.decision != REJECTED else ():
        name, spec = f"{CLAIM}/{each.name}", cluster.templates.get((namespace, each.template))
        if spec is not None:
            claim = {**each.claim, "spec": msgspec.json.decode(msgspec.json.encode(spec))}
            yield await _decide_one(name, claim, ask, policy)
        elif limited:
            yield UNKNOWN, Row(name, namespace, 1, UNKNOWN, reason=_missing(f"{TEMPLATE} {each.template}"))


def _missing(what: str) -> str:
    return f"the decision depends on objects that are not in the given files: {what}"


def _needs_nodes(pod: Manifest, policy: context.PolicySnapshot) -> bool:
    """Return True if the pod selects nodes by labels or names, but the given files contain no node."""
    if policy.nodes.labels:
        return False
    selection = NodeSelection.of(msgspec.convert(pod, k8s_types.Pod).spec)
    keys = set(selection.selector).union(*selection.terms)
    return not keys <= {policy.pin_settings.labels.model, policy.pin_settings.labels.pool}


async def _decide_one(
    name: str, created: Manifest, ask: Ask, policy: context.PolicySnapshot, notes: Sequence[str] = ()
) -> tuple[Hashable, Row]:
    namespace = created["metadata"]["namespace"]
    stored, answers = await _create(created, namespace, ask)
    first, last = answers[0], answers[-1]
    untouched, kind = _WORDS.get(first.outcome), created["kind"]
    model = last.model or first.model
    charge = _charge(stored, model, policy)
    if kind == TEMPLATE and last.allowed and not untouched:
        notes = [_MADE_LATER, *notes]
    # If a quota only warns, the message may also be the beginning of a warning. Then only the warning is shown.
    message = "" if any(each.startswith(last.message) for each in last.warnings) else last.message
    stories = [message, first.reason, *patch_story(first.patch), *last.warnings, *(notes if last.allowed else ())]
    row = Row(
        object=name,
        namespace=namespace,
        count=1,
        decision=(untouched or ADMITTED) if last.allowed else REJECTED,
        outcome=last.outcome,
        model=model,
        rule=first.rule,
        charge=charge,
        reason="; ".join(story for story in stories if story),
    )
    if namespace in UNASKED_NAMESPACES and not untouched:
        counted = _COUNTED.format("pods" if kind == "Pod" else "claims")
        return "counted", msgspec.structs.replace(row, decision="counted", model="", reason=counted)
    return (last.outcome, last.model, bool(last.warnings)), row


def _charge(stored: Manifest, model: str, policy: context.PolicySnapshot) -> Charge:
    """Return the charge of a pod or claim. A claim that is pinned to no GPU model gets its largest possible charge."""
    if stored["kind"] == "Pod":
        return read_request(msgspec.convert(stored, k8s_types.Pod), policy.resources).charge_on(model)
    if stored["kind"] == TEMPLATE:
        return Charge()
    spec = msgspec.convert(stored.get("spec", {}), objects.ClaimSpec)
    return claim_requests.read_claim(digest_of(spec), policy.claim_policy).charge(model)


async def _create(created: Manifest, namespace: str, ask: Ask) -> tuple[Manifest, list[AdmissionResponse]]:
    """Call /mutate and /validate for an object, as the API server does. Return the stored object and the answers."""
    answers, patched = [], created
    # The API server calls only /validate for a claim template, because /mutate is not registered for templates.
    if created["kind"] != TEMPLATE:
        answers.append(await ask("/mutate", _request(created, namespace)))
        if not answers[0].allowed:
            return created, answers
        patched = jsonpatch.apply_patch(created, msgspec.json.encode(answers[0].patch))
    # The API server sets the uid of an object after /mutate. The ledger needs the uid, by which it identifies a charge.
    stored = {**patched, "metadata": {**patched["metadata"], "uid": str(uuid.uuid4())}}
    return stored, [*answers, await ask("/validate", _request(stored, namespace))]


def _request(created: Manifest, namespace: str) -> AdmissionRequest:
    # `enc_hook=str` encodes values of types that YAML has and JSON lacks, such as dates, as strings.
    raw = msgspec.Raw(msgspec.json.encode(created, enc_hook=str))
    kind = PODS if created["kind"] == "Pod" else GroupVersionKind(GROUP, "v1", created["kind"])
    return AdmissionRequest(uid=str(uuid.uuid4()), kind=kind, namespace=namespace, operation="CREATE", object=raw)


def patch_story(patch: Sequence[k8s_types.Operation]) -> Iterator[str]:
    """Yield a text for each kind of change in the patch of /mutate that may surprise the pod's owner."""
    removed = [operation["path"] for operation in patch if operation["op"] == "remove"]
    records = [path for path in removed if path.startswith("/metadata/")]
    if records:
        yield f"the webhook removes allocation records: {', '.join(JsonPointer(path).parts[-1] for path in records)}"
    if "/spec/nodeName" in removed:
        yield "the webhook replaces the pod's nodeName by a required node affinity"
    for operation in patch:
        if operation["path"] == "/spec/schedulerName":
            yield f"the webhook sets the pod's scheduler to {operation['value']}"


def decision_table(rows: Iterable[Row]) -> Iterator[str]:
    heading = ("OBJECT", "NAMESPACE", "COUNT", "DECISION", "MODEL", "CHARGE", "REASON")
    cells = [
        heading,
        *((r.object, r.namespace, str(r.count), r.decision, r.model, r.charge_text, r.reason) for r in rows),
    ]
    yield from cli.aligned(cells)
