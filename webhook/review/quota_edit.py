"""Decides edits of the quota ConfigMap, at the path /quota.

An edit to a malformed quota document is rejected. An edit to a valid document that looks wrong gets warnings.
"""

import itertools
import time
from collections.abc import Callable, Collection, Iterator, Mapping

import msgspec
import structlog

from vcuda import errors, k8s_types, kube
from vcuda.admission_review import AdmissionRequest, AdmissionResponse, Outcome
from vcuda.errors import Fault
from vcuda.k8s_types import Decoder
from vcuda.placement.missing_models import nearest
from vcuda.quota import changes, grant_words
from vcuda.quota.model import CORES_PER_CARD, NamespaceQuota, Quota
from vcuda.quota.teams import has_own_limits
from vcuda.quota.values import suggestion
from vcuda.quota.well_known import SYSTEM_NAMESPACES, team_path
from vcuda.registration import CALLED, PROBE
from vcuda.requests.config import QuotaConfig, parse_config
from vcuda.requests.resources import NO_ROWS, PLAIN_CARDS, CardModels, CardValue, GpuResources
from webhook.ledger import charging
from webhook.review import context, first_limits, usage_warnings
from webhook.review.decisions import Rejection, Simple

# The answer to a quota edit has at most this many warnings, as the API server truncates their text to 4 KiB.
MAX_WARNINGS = 20

# An edit of the quota may change ten thousand entries. At most this many changes are logged one by one.
MAX_LOGGED_CHANGES = 50

NamespaceNames = Callable[[], Collection[str]]
"""A function that returns the names of all namespaces within two seconds. It raises VcudaError if it cannot."""

LABEL = "quota.vcuda.io/config"
"""The label of ConfigMaps whose edits the API server sends to /quota."""

NOT_CHECKED = (
    f'label {LABEL} is removed, so the next edits of this quota are not checked. Set the label to "true" again'
)

_CONFIG_MAP = Decoder(k8s_types.ConfigMap)


async def check_edit(
    request: AdmissionRequest,
    source: kube.QuotaSource,
    policy: context.PolicySnapshot | None,
    charged: charging.Ledgers,
    *,
    callers_known: bool,
    namespaces: NamespaceNames | None = None,
    pods: first_limits.Pods | None = None,
    check: k8s_types.Check = k8s_types.no_check,
) -> Simple:
    """Return the verdict about an edit of the quota ConfigMap. A rejection names the field path of every fault.

    ``policy``: the present quota and nodes; None if they have not been read yet. ``callers_known``: True if only the
    API server can send reviews. Otherwise the answer depends on the review and the nodes only, and no change is logged,
    because a tenant may have forged the review. ``namespaces``: a function that lists all namespaces; None without an
    API server. ``pods``: a function that lists all pods; None without an API server. ``check``: called again and again
    during the work. It raises Dropped if the work must stop.
    """
    if other := _of_another_object(request, source):
        return other
    try:
        read = _parse(request.object, source, policy.quota.system if policy else SYSTEM_NAMESPACES)
    except errors.QuotaFault as fault:
        return _rejected(source, fault.faults)
    check()
    now = time.time()
    quota = read.quota.at(now)
    before = (policy.quota if policy else None) if callers_known else _stored(request, source, now)
    check()
    named = policy.nodes.named if policy else NO_ROWS
    if policy:
        policy = msgspec.structs.replace(policy, nodes=policy.nodes.named_by(read.resources.models))
    old, warnings = before or quota, list[Fault]()
    if _is_labelled(request.old_object) and not _is_labelled(request.object):
        warnings.append(Fault("", NOT_CHECKED))
    pods = pods if callers_known else None
    existing, unknown = _existing(old, quota, namespaces) if callers_known else (None, None)
    warnings += limit_changes(old, quota, policy, existing)
    warnings += _first_limits(before or Quota(), quota, read.resources, policy, pods=pods, check=check)
    if callers_known:
        warnings += await usage_warnings.usage_warnings(before, quota, existing, charged, check)
        if not request.dry_run:
            _log_changes(request, old, quota)
        warnings += [unknown] if unknown else _absent(old, quota, existing)
    warnings += document_warnings(quota, read.resources, policy, named)
    shown = changes.grouped(warnings)
    if len(shown) > MAX_WARNINGS:
        shown[MAX_WARNINGS:] = [f"{len(shown) - MAX_WARNINGS} more warnings are not shown"]
    return AdmissionResponse(Outcome.QUOTA_ACCEPTED, warnings=shown)


def _first_limits(
    old: Quota,
    new: Quota,
    resources: GpuResources,
    policy: context.PolicySnapshot | None,
    *,
    pods: first_limits.Pods | None,
    check: k8s_types.Check,
) -> Iterator[Fault]:
    if policy is None or pods is None:
        return first_limits.general_warning(old, new)
    new = msgspec.structs.replace(new, system=policy.quota.system)
    policy = msgspec.structs.replace(policy, quota=new, resources=resources)
    return first_limits.named_warnings(old, policy, pods, check)


def limit_changes(
    old: Quota, new: Quota, policy: context.PolicySnapshot | None, existing: Collection[str] | None = None
) -> Iterator[Fault]:
    """Yield the most important warnings: about limits that vanish, become less strict, or exceed the cards.

    ``existing``: the names of all namespaces; None if they are unknown.
    """
    yield from changes.without_team(old, new, existing)
    yield from changes.weakened(old, new)
    yield from changes.beyond(old, new, policy.cards if policy else {})


def document_warnings(
    new: Quota, resources: GpuResources, policy: context.PolicySnapshot | None, named: CardModels
) -> Iterator[Fault]:
    """Yield those warnings about a new quota that depend on no ledger, no list of namespaces and no earlier quota.

    ``policy``: the snapshot with the nodes, whose models must have their names from ``resources``. It may be None.
    ``named``: the entries of ``gpu_models`` before the edit.
    """
    yield from _doubts(new, policy, named)
    yield from _without_effect(resources, policy)


def _of_another_object(request: AdmissionRequest, source: kube.QuotaSource) -> Simple | None:
    """Return the verdict about a probe, or about an object that is not the quota ConfigMap; otherwise None."""
    if request.name == PROBE:
        return Rejection(Outcome.PROBED, CALLED)
    own, read = f"{request.namespace}/{request.name}", f"{source.namespace}/{source.name}"
    if request.kind.kind == "ConfigMap" and own == read:
        return None
    text = f"ConfigMap {own} has label {LABEL}, but the quota is read from ConfigMap {read}, so {own} limits nobody"
    return AdmissionResponse(Outcome.IGNORED, warnings=[text] if _is_labelled(request.object) else ())


def _is_labelled(config_map: msgspec.Raw) -> bool:
    try:
        return (_CONFIG_MAP.decode(config_map).metadata.labels or {}).get(LABEL) == "true"
    except k8s_types.UNDECODABLE:
        return False


def _parse(stored: msgspec.Raw, source: kube.QuotaSource, system: frozenset[str] = SYSTEM_NAMESPACES) -> QuotaConfig:
    try:
        data = _CONFIG_MAP.decode(stored).data or {}
    except k8s_types.UNDECODABLE as error:
        raise errors.QuotaFault((Fault("", f"the ConfigMap cannot be read: {error}"),)) from error
    return parse_config(data, source.key, system)


def _stored(request: AdmissionRequest, source: kube.QuotaSource, moment: float) -> Quota | None:
    """Return the quota before the edit, as the review has it; None if the review has none, or a malformed one. A new
    ConfigMap replaces a quota without limits."""
    if request.operation == "CREATE":
        return Quota()
    try:
        return _parse(request.old_object, source).quota.at(moment)
    except errors.QuotaFault:
        return None


def _log_changes(request: AdmissionRequest, old: Quota, new: Quota) -> None:
    log = structlog.get_logger().bind(by=request.user_info.username, uid=request.uid)
    different = changes.changes(old, new)
    for change in itertools.islice(different, MAX_LOGGED_CHANGES):
        log.info("quota edited", path=change.path, before=change.before, after=change.after)
    if left := sum(1 for _ in different):
        log.info("quota edited", more_changes=left)


def _rejected(source: kube.QuotaSource, faults: tuple[Fault, ...]) -> Rejection:
    # kubectl prints the path of each fault. So a fault without a path gets the path of the whole quota document.
    document = f"data.{source.key}"
    shown = errors.limited(faults, document)
    message = "the quota document is malformed: " + "; ".join(map(str, shown))
    causes = tuple(fault._replace(path=fault.path or document) for fault in shown)
    return Rejection(Outcome.QUOTA_REJECTED, message, causes)


def _existing(old: Quota, new: Quota, namespaces: NamespaceNames | None) -> tuple[Collection[str] | None, Fault | None]:
    """Return the names of all namespaces if the edit names more of them or changes a team, or the warning that they
    could not be listed. Both are None if the names are not needed."""
    is_needed = new.named - old.named or (old.teams, old.members) != (new.teams, new.members)
    if not is_needed or namespaces is None:
        return None, None
    try:
        return namespaces(), None
    except errors.VcudaError as error:
        text = f"the webhook could not check whether the namespaces of the new entries exist: {error}"
        return None, Fault("", text)


def _absent(old: Quota, new: Quota, existing: Collection[str] | None) -> Iterator[Fault]:
    """Yield a warning for each new name of a missing namespace. It may be created later, so this is no fault."""
    if existing is None:
        return
    for number, name in enumerate(sorted(new.named - old.named - {*existing})):
        # Only warnings that are shown suggest a similar name. For each, ten thousand names may be compared.
        near = suggestion(name, existing) if number < MAX_WARNINGS else ""
        team = new.members.names.get(name) if name not in new.namespaces else None
        path = f"{team_path(team)}.namespaces" if team else name
        yield Fault(path, f"namespace {f'{name} ' if team else ''}not found{near and '; '}{near}")


def _doubts(quota: Quota, policy: context.PolicySnapshot | None, named: CardModels) -> Iterator[Fault]:
    entries = quota.entries
    if policy:
        near: dict[str, str] = {}
        renamed: dict[str, set[str]] = {}
        for model, values in policy.nodes.seen.items():
            for value in values:
                renamed.setdefault(named.model_of(value), set()).add(model)
        for namespace, entry in entries.items():
            yield from _unknown_names(namespace, entry.at(None), policy, renamed, near)
    for namespace, entry in ((path, entry) for path, entry in entries.items() if has_own_limits(quota, path)):
        for path, doubt in grant_words.without_effect(entry, quota.moment or 0):
            yield Fault(f"{namespace}.{path}", doubt)
        yield from changes.ineffective_total(namespace, entry, quota.moment)
    yield from changes.above_team(quota)
    system = policy.quota.system if policy else quota.system
    for namespace in sorted(quota.namespaces.keys() & system):
        why = "system namespace; if the webhook is not called for its pods, they are charged but never rejected"
        yield Fault(namespace, why)


def _without_effect(resources: GpuResources, policy: context.PolicySnapshot | None) -> Iterator[Fault]:
    extended = policy.claims.devices.extended_resources if policy and policy.claims else ()
    if resources.with_claimed(extended) is not resources:
        models = ", ".join(name for name, each in resources.models.card_values.items() if each.cores != CORES_PER_CARD)
        text = f"`cards` of {models} has no effect while a DeviceClass offers devices as {PLAIN_CARDS}"
        yield Fault("gpu_models", text)
    if policy:
        registered = policy.nodes.named_by(resources.models).registered_cards
        for model, value in resources.with_registered(registered).registered.items():
            if value.cores != resources.models.card_values.get(model, CardValue()).cores:
                text = f"`cards` of {model} has no effect while a node of this model has a register of HAMi"
                yield Fault("gpu_models", text)


def _unknown_names(
    namespace: str,
    entry: NamespaceQuota,
    policy: context.PolicySnapshot,
    renamed: Mapping[str, Collection[str]],
    near: dict[str, str],
) -> Iterator[Fault]:
    # ``near`` has the most similar known model for some unknown models, because comparing all would take too long.
    # A model or pool without nodes causes a warning and not a rejection, because such nodes may join the cluster later.
    nodes = policy.nodes
    for model in entry.limits:
        if model not in nodes.models and (names := renamed.get(model)):
            new = " and ".join(sorted(names))
            text = f"by this `gpu_models`, the nodes of {model} have model {new}; write {new}"
            yield Fault(f"{namespace}.quota.{model}", text)
        elif model not in nodes.models:
            if model not in near and len(near) < MAX_WARNINGS:
                near[model] = f"; {nearest(model, tuple(sorted(nodes.models)))}"
            text = f"no node has GPU model {model} in label {nodes.keys.model}{near.get(model, '')}"
            yield Fault(f"{namespace}.quota.{model}", text)
    pools = {node.get(nodes.keys.pool) for node in nodes.labels.values()}
    for pool in entry.pools:
        if pool not in pools:
            yield Fault(f"{namespace}.pool", f"no node has pool {pool} in label {nodes.keys.pool}")
