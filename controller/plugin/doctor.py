"""The command ``kubectl gpuquota doctor``: checks a whole installation, and says for each fault what to do.

The checks use only requests to the API server, as an administrator's kubeconfig allows them. If something cannot be
read, its check says so, and does not guess. `controller.plugin.installation` reads the objects.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from controller import registration
from controller.plugin.defects import MAX_NAMES, MISSING_PERMISSION, OK, UNKNOWN, Defect
from controller.plugin.installation import (
    BROKEN,
    CERTIFICATES,
    CONTROLLER,
    SCHEDULER,
    WEBHOOK,
    Installation,
    Json,
    NamespaceFault,
    Place,
    Replica,
)
from controller.plugin.issued import certificate_defects
from controller.plugin.ledgers import ledger_defects
from controller.plugin.nodes import connect_to_cluster
from controller.plugin.rights import fault_of_account, missing_rights
from controller.recount import labels
from vcuda import errors
from vcuda.placement.missing_models import model_warnings
from vcuda.quota.values import listed
from vcuda.quota.well_known import team_path
from vcuda.registration import DECLARED, summarize_missing

CORRECT_PLACE = "Set the flag --quota-configmap, or the chart's value quota.name, to the ConfigMap that has the limits"
NO_QUOTA_READ = (
    'Set the failurePolicy to Ignore by the command under "The bad night" in docs/troubleshooting.md, because no '
    "replica can answer. Then apply the corrected document, and set the failurePolicy to Fail again"
)
REMOVE_FINALIZERS = 'the commands under "The namespace of the ledgers is being deleted" in docs/troubleshooting.md'
REPLICAS = {WEBHOOK: 3, CONTROLLER: 2, SCHEDULER: 2}
"""The number of replicas that the manifests set for each Deployment."""
_REFUSED = (registration.NO_TRUST, registration.EXPIRED)
_CALL_FAILED, _NO_SERVICE = "failed calling webhook", f'service "{WEBHOOK}" not found'
_NO_CLIENT_CERTIFICATE = "the server has asked for the client to provide credentials"
"""The API server's answer contains this text if the webhook requires a client certificate that it does not present."""
NOT_PRESENTED = 'Follow "An API server lacks the client certificate" in docs/troubleshooting.md'


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check. ``state``: `OK`, `WRONG` or `UNKNOWN`. ``action``: what to do; empty if nothing."""

    check: str
    state: str
    text: str
    action: str = ""


Examination = Callable[[Installation], Iterator[Defect | str]]
"""A function that makes a check. It yields the faults that it finds, and a text to show if there is no fault."""


def examine(
    kubeconfig: Path | None, context: str | None, quota: tuple[str, str, str], names: Mapping[str, str]
) -> Iterator[Finding]:
    """Yield the findings of all checks. Raises VcudaError if the API server does not answer.

    ``quota``: namespace, name and key of the quota ConfigMap. ``names``: the remaining fields of `Place`.
    """
    seen = Installation(connect_to_cluster(kubeconfig, context), Place(quota=quota, **names))
    seen.kube.get("/version")
    for name, check in CHECKS.items():
        found: list[Defect | str] = []
        try:
            found += check(seen)
        except (errors.VcudaError, *BROKEN) as error:
            action = MISSING_PERMISSION if isinstance(error, errors.Forbidden) else ""
            found.append(Defect(f"cannot be read: {error}", action, UNKNOWN))
        faults = [each for each in found if isinstance(each, Defect)]
        yield from (Finding(name, each.state, each.text, each.action) for each in faults)
        yield from (Finding(name, OK, each) for each in found if not faults and isinstance(each, str))


def finding_row(finding: Finding) -> tuple[str, ...]:
    end = "" if finding.text.endswith("?") else "."
    text = f"{finding.text}{end} Do this: {finding.action}" if finding.action else finding.text
    return finding.check, finding.state, text


def _registration(seen: Installation) -> Iterator[Defect | str]:
    limited = [name for name, label in seen.namespaces.items() if seen.limits(name) and label != labels.EXEMPT]
    missing, failure = registration.inspect(seen.kube, lambda: labels.is_evaluated(seen.kube, limited), time.sleep)
    for each in missing:
        if each in (registration.NO_POLICIES, registration.NO_WEBHOOKS):
            yield Defect(str(each), "Enable this admission plugin in each API server")
        elif each in _REFUSED:
            yield Defect(str(each), seen.renewal())
    declared = [each for each in missing if (each.kind, each.name) in DECLARED and each not in _REFUSED]
    unread = [each for each in declared if each.unread]
    if unread:
        yield Defect(summarize_missing(unread), MISSING_PERMISSION, UNKNOWN)
    if wrong := [each for each in declared if each not in unread]:
        yield Defect(summarize_missing(wrong), f"{seen.apply}. Then register the webhooks: {seen.run(CERTIFICATES)}")
    if failure and _CALL_FAILED in str(failure):
        known = {_NO_SERVICE: seen.apply, _NO_CLIENT_CERTIFICATE: NOT_PRESENTED}
        action = next((known[text] for text in known if text in str(failure)), seen.describe(WEBHOOK))
        yield Defect(f"the API server cannot call the webhook: {failure}", action)
    elif failure:
        yield Defect(f"the API server did not answer the probe of the webhooks and policies: {failure}", "", UNKNOWN)
    yield f"{len(DECLARED)} webhook configurations, policies and bindings are as declared and in effect"


def _webhook(seen: Installation) -> Iterator[Defect | str]:
    yield from _rollout(seen, WEBHOOK, seen.replicas)
    for each in seen.replicas:
        if each.forbidden:
            yield Defect(f"pod {each.pod} {each.fault}", MISSING_PERMISSION, UNKNOWN)
        elif each.fault:
            yield Defect(f"pod {each.pod} {each.fault}", seen.describe(WEBHOOK))
    yield f"all {len(seen.replicas)} replicas answer, each at its own address"


def _controller(seen: Installation) -> Iterator[Defect | str]:
    pods = seen.pods(CONTROLLER)
    yield from _rollout(seen, CONTROLLER, pods)
    for name, pod in pods.items():
        if fault := seen.fault_of(pod):
            yield Defect(f"pod {name} {fault}", seen.describe(CONTROLLER))
    holder, renewed, expires, now = seen.lease()
    if not holder:
        yield Defect(f"no controller holds Lease {seen.system}/{CONTROLLER}", seen.describe(CONTROLLER))
    elif expires < now:
        yield Defect(f"the leader {holder} has not renewed its Lease since {renewed:%FT%TZ}", seen.describe(CONTROLLER))
    yield f"{holder} leads, and renewed its Lease at {renewed:%FT%TZ}"


def _rights(seen: Installation) -> Iterator[Defect | str]:
    if fault := seen.fault_of_namespace(seen.system):
        gone = f"Wait for its deletion: kubectl wait --for=delete namespace/{seen.system} --timeout=10m. Then: "
        action = f"{gone if fault is NamespaceFault.TERMINATING else ''}{seen.apply}"
        yield Defect(f"namespace {seen.system} {fault}, so no pod of webhook and controller can be created", action)
        return
    for account in (WEBHOOK, CONTROLLER, CERTIFICATES):
        if text := fault_of_account(seen, account):
            restart = f". Then restart its pods: {seen.kubectl(f'rollout restart deployment/{account}')}"
            yield Defect(text, f"{seen.apply}{restart if account in REPLICAS else ''}")
        if lacking := [*missing_rights(seen, account)]:
            yield Defect(f"ServiceAccount {account} must be allowed to {'; '.join(lacking)}", seen.apply)
    yield f"the accounts {WEBHOOK}, {CONTROLLER} and {CERTIFICATES} exist and have their key rights"


def _rollout(seen: Installation, name: str, found: Collection[str | Replica]) -> Iterator[Defect]:
    deployment = seen.deployment(name)
    if deployment is None:
        yield Defect(f"Deployment {seen.system}/{name} does not exist", seen.apply)
    elif not deployment["spec"].get("replicas", 1):
        scale = f"scale deployment/{name} --replicas={REPLICAS[name]}"
        yield Defect(f"Deployment {name} has 0 replicas", seen.kubectl(scale))
    elif text := _incomplete(deployment, len(found)):
        yield Defect(text, seen.kubectl(f"describe deployment/{name}"))


def _incomplete(deployment: Json, pods: int) -> str:
    """Return why the rollout of a Deployment is not complete; empty if it is. ``pods``: the number of its pods."""
    metadata, status, wanted = deployment["metadata"], deployment.get("status") or {}, deployment["spec"]["replicas"]
    if status.get("observedGeneration", 0) < metadata["generation"]:
        return f"the last change of Deployment {metadata['name']} has not been rolled out yet"
    counts = {
        "exist": pods,
        "have its current template": status.get("updatedReplicas", 0),
        "are available": status.get("availableReplicas", 0),
    }
    failed = {("ReplicaFailure", "True"), ("Progressing", "False")}
    conditions = (each for each in status.get("conditions") or () if (each["type"], each["status"]) in failed)
    reasons = "".join(f": {each.get('message', '')}" for each in conditions)
    for state, count in counts.items():
        if count < wanted:
            return f"{count} of {wanted} pods of Deployment {metadata['name']} {state}{reasons}"
    return ""


def _versions(seen: Installation) -> Iterator[Defect | str]:
    # An image policy may rewrite the images of pods, but not of templates. So a pod is not compared with a template.
    for kind, images in (("pods", seen.images), ("templates", seen.template_images())):
        if len(set(images.values())) > 1:
            pairs = [f"{name} has {image}" for name, image in sorted(images.items())]
            action = f"Finish the upgrade: {seen.kubectl(f'rollout status deployment/{WEBHOOK}')}"
            yield Defect(f"{kind} have different images: {listed(pairs, MAX_NAMES)}", action)
    yield f"all pods run {next(iter(seen.images.values()), 'no image')}"


def _scheduler(seen: Installation) -> Iterator[Defect | str]:
    # The scheduler is optional. If the default scheduler calls the extender instead, it does not exist.
    if seen.deployment(SCHEDULER) is None and f"--scheduler-name={SCHEDULER}" not in seen.arguments(WEBHOOK):
        return
    pods = seen.pods(SCHEDULER)
    yield from _rollout(seen, SCHEDULER, pods)
    for name, pod in pods.items():
        if fault := seen.fault_of(pod):
            yield Defect(f"pod {name} {fault}", seen.describe(SCHEDULER))
    yield f"all {len(pods)} pods of Deployment {SCHEDULER} are ready"


def _quota(seen: Installation) -> Iterator[Defect | str]:
    namespace, name, _ = seen.place.quota
    where = f"ConfigMap {namespace}/{name}"
    for deployment, other in seen.other_quotas.items():
        text = f"Deployment {deployment} uses ConfigMap {other}, and this command reads {where}"
        yield Defect(text, CORRECT_PLACE)
    if seen.quota_map is None:
        yield _missing_quota(where, sorted(seen.ledgers.texts))
        return
    try:
        config = seen.config
    except errors.QuotaFault as fault:
        yield _malformed_quota(where, fault, seen.replicas)
        return
    metadata = seen.quota_map["metadata"]
    if (metadata.get("labels") or {}).get("quota.vcuda.io/config") != "true":
        command = f"kubectl -n {namespace} label configmap {name} quota.vcuda.io/config=true"
        yield Defect(f"{where} lacks the label quota.vcuda.io/config, so edits are not checked", command)
    for each in seen.replicas:
        if each.metrics.get("vcuda_quota_config_valid") == 0:
            text = f"pod {each.pod} uses an older quota, because it finds {where} malformed"
            yield Defect(text, seen.kubectl(f"logs {each.pod}"))
    limited = listed([name.replace(team_path(""), "team ") for name in config.quota.entries], MAX_NAMES)
    version = f"resourceVersion {config.quota.version}"
    yield f"{where} is in force, last changed at {seen.quota_changed()} ({version}). It limits {limited}"


def _missing_quota(where: str, ledgers: Collection[str]) -> Defect | str:
    text = f"{where} does not exist, so no namespace is limited"
    if not ledgers:
        return text
    had = f"these namespaces had limits: {listed(ledgers, MAX_NAMES)}"
    return Defect(f"{text}, although {had}", f"Create it again. Or: {CORRECT_PLACE}")


def _malformed_quota(where: str, fault: errors.QuotaFault, replicas: Collection[Replica]) -> Defect:
    if any(not each.fault for each in replicas):
        return Defect(f"{where} is malformed, and the last good quota is in force: {fault}", "Correct the document")
    if any(each.forbidden for each in replicas):
        return Defect(f"{where} is malformed: {fault}", "Correct the document")
    return Defect(f"{where} is malformed, and no ready replica has an earlier quota: {fault}", NO_QUOTA_READ)


def _namespaces(seen: Installation) -> Iterator[Defect | str]:
    exempt, taking, unlabelled = list[str](), list[str](), list[str]()
    for name, label in seen.namespaces.items():
        if seen.limits(name):
            exempt += [name] * (label == labels.EXEMPT)
            taking += [name] * (label == labels.TAKING_EFFECT)
        else:
            unlabelled += [name] * (label != labels.EXEMPT)
    logs = seen.kubectl(f"logs -l app.kubernetes.io/name={CONTROLLER}")
    wait = f"Wait some seconds for the controller to correct the label. If this lasts, read its log: {logs}"
    action = CORRECT_PLACE if seen.other_quotas else wait
    for names, text in (
        (exempt, "are limited, but their label exempts them from the quota"),
        (taking, "are limited, but the quota is not in effect there yet"),
        (unlabelled, f"are not limited, but lack the label {labels.ENFORCED_LABEL}={labels.EXEMPT}"),
    ):
        if names:
            yield Defect(f"these namespaces {text}: {listed(names, MAX_NAMES)}", action)
    limited = sum(1 for name in seen.namespaces if seen.limits(name))
    yield f"{limited} of {len(seen.namespaces)} namespaces are limited, and all labels are right"
    # A namespace may be created later than its quota, so this is no fault.
    if missing := sorted(seen.config.quota.named - {*seen.namespaces}):
        yield f"these namespaces of the quota do not exist: {listed(missing, MAX_NAMES)}"


def _models(seen: Installation) -> Iterator[Defect | str]:
    present = {each.models[0] for each in seen.nodes.nodes if each.models}
    for text in model_warnings(seen.config.quota.models, present):
        yield Defect(text, "Correct the quota, or label the nodes: kubectl gpuquota nodes")
    yield f"every model of the quota has nodes: {listed(sorted(seen.config.quota.models), MAX_NAMES)}"


def _nodes(seen: Installation) -> Iterator[Defect | str]:
    if bare := [each.node for each in seen.nodes.nodes if not each.models]:
        label = f"kubectl label node {bare[0]} {seen.place.model_label}=MODEL"
        yield Defect(f"these GPU nodes have no model: {listed(bare, MAX_NAMES)}", f"Name the model: {label}")
    yield f"all {len(seen.nodes.nodes)} GPU nodes have a model"


def _ledgers(seen: Installation) -> Iterator[Defect | str]:
    where = seen.place.ledger_namespace
    if fault := seen.fault_of_namespace(where):
        finalizers = f"Remove the finalizers of the ConfigMaps in {where}, by {REMOVE_FINALIZERS}. Then: "
        action = f"{finalizers}{seen.apply}" if fault is NamespaceFault.TERMINATING else seen.apply
        yield Defect(f"namespace {where} {fault}, so no ledger can be created, and GPU pods are rejected", action)
        return
    yield from ledger_defects(seen)


CHECKS: dict[str, Examination] = {
    "registration": _registration,
    "webhook": _webhook,
    "controller": _controller,
    "rights": _rights,
    "scheduler": _scheduler,
    "versions": _versions,
    "certificates": certificate_defects,
    "quota": _quota,
    "namespaces": _namespaces,
    "models": _models,
    "nodes": _nodes,
    "ledgers": _ledgers,
}
"""The checks by name, in the order in which their findings are shown."""
