"""The messages in docs/reference.md about edits of the quota ConfigMap. The code answers example edits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any, Never
from unittest import mock

import msgspec

from tools.reference.examples import LABELS, MODEL, POOL, policy_for, review
from tools.reference.told import Told
from vcuda.admission_review import AdmissionResponse, GroupVersionKind
from vcuda.claims.charges import ClaimPolicy
from vcuda.claims.devices import ClassFacts, Devices
from vcuda.errors import MAX_FAULTS, Unavailable
from vcuda.k8s_types import Pod
from vcuda.kube import QuotaSource
from vcuda.placement.nodes import COUNT_LABEL, Nodes
from vcuda.quota.model import Charge, Limit, NamespaceQuota, Usage
from vcuda.quota.well_known import TEAMS
from vcuda.requests.config import MODELS, QUOTA, parse_config
from vcuda.requests.resources import PLAIN_CARDS, CardModels, ProductRow
from vcuda.requests.schemes import HAMI
from webhook.ledger.charging import Ledgers
from webhook.ledger.ledgers import MemoryLedgers
from webhook.review import first_limits, quota_edit, usage_warnings
from webhook.review.answers import written
from webhook.review.quota_edit import MAX_WARNINGS, check_edit

NODES = Nodes.of({"one": {MODEL: "M40", POOL: "public"}}, LABELS)


def _edited(
    data: object,
    ledgers: Ledgers | None = None,
    limits: Mapping[str, Limit] | None = None,
    *,
    nodes: Nodes = NODES,
    namespaces: quota_edit.NamespaceNames | None = None,
    pods: first_limits.Pods | None = None,
    total: Limit | None = None,
    old_teams: str | None = None,
    **fields: Any,
) -> AdmissionResponse:
    """Return the answer of the webhook's path /quota to an edit of the quota ConfigMap.

    ``data``: the data of the ConfigMap after the edit. ``fields``: other fields of the review.
    ``limits``, ``total``: the limits before the edit; by default, eight cards of model M40. ``old_teams``: the teams
    before the edit, without any entry.
    """
    place = QuotaSource()
    kind = GroupVersionKind(version="v1", kind="ConfigMap")
    raw = msgspec.Raw(msgspec.json.encode({"data": data}))
    given = {"kind": kind, "namespace": place.namespace, "name": place.name, "operation": "UPDATE", "object": raw}
    request = review(None, dry_run=True, **{**given, **fields})
    policy = policy_for(NamespaceQuota(limits or {"M40": Limit(800)}, total=total), nodes)
    if old_teams:
        policy = msgspec.structs.replace(policy, quota=parse_config({QUOTA: "{}", TEAMS: old_teams}).quota)
    devices = Devices(classes={"gpu.nvidia.com": ClassFacts(extended_resource=PLAIN_CARDS)})
    claims = ClaimPolicy.of(devices, NODES.model_of, policy.quota, policy.resources)
    policy = msgspec.structs.replace(policy, claims=claims)
    ledgers = ledgers or MemoryLedgers()
    edit = check_edit(request, place, policy, ledgers, callers_known=True, namespaces=namespaces, pods=pods)
    return written(asyncio.run(edit))


def _document(text: str) -> dict[str, str]:
    return {QuotaSource().key: text}


def edits() -> Iterator[Told]:
    many = ", ".join(f"M{number}: -1" for number in range(MAX_FAULTS + 5))
    yield Told(_edited({}).message, "Add the document. Without the document, no namespace would be limited.")
    yield Told(_edited(5).message, "Correct `data`: it must be a mapping from keys to texts.")
    long = _edited(_document(f"a: {{quota: {{{many}}}}}")).message
    yield Told(
        f"…{long[long.rindex(';') :]}",
        "Correct the listed faults. The message does not list all faults; the next edit reports the remaining faults.",
    )


class _Used(MemoryLedgers):
    """A test double of the ledgers, in which three cards are used."""

    async def usage(self, _namespace: str, *_: object) -> Mapping[str, Usage]:
        return {"M40": Usage(Charge(300, 0, 300))}


class _Silent(MemoryLedgers):
    """A test double of the ledgers, which cannot be read."""

    async def usage(self, _namespace: str, *_: object) -> Mapping[str, Usage]:
        raise Unavailable("the API server does not answer")


def _silent_namespaces() -> Never:
    raise Unavailable("the API server does not answer")


def _running_pods(_seconds: float) -> Iterator[Pod]:
    container = {"name": "main", "securityContext": {"privileged": True}}
    yield msgspec.convert({"metadata": {"namespace": "longhorn-system"}, "spec": {"containers": [container]}}, Pod)
    raise Unavailable("the API server does not answer")


def _warnings_about_total() -> Iterator[Told]:
    useless = _edited(_document("team-a: {quota: {M40: 8}, total: 8}")).warnings[0]
    yield Told(useless, "Write a `total` below this sum, or remove the key.")
    removed = _edited(_document("team-a: {quota: {M40: 8}}"), total=Limit(400)).warnings[0]
    yield Told(removed, "Check that you intend to limit only each model by itself.")


def warnings_about_teams() -> Iterator[Told]:
    vision = "vision: {namespaces: [team-a, 'team-b*'], quota: {M40: 2}}"
    other = "speech: {namespaces: [team-c], quota: {M40: 2}}"
    used = "Check that you intend the namespace to use the quota of this team. Its running pods count there at once."

    def edited(before: str, after: str, entries: str = "{}", ledgers: Ledgers | None = None) -> Iterator[str]:
        data = {TEAMS: after, QUOTA: entries}
        names = ["team-a", "team-b", "team-c"]
        yield from _edited(data, ledgers or _Used(), old_teams=before, namespaces=lambda: names).warnings

    joins, lowered = edited(other, f"{vision}\n{other}".replace(", 'team-b*'", ""))
    yield Told(joins, used)
    yield Told(lowered, "Agree with the users of the team which pods to delete.")
    moves, *_ = edited(f"{vision}\n{other}", f"{vision}\n{other}".replace("[team-c]", "[team-c, team-b]"))
    yield Told(moves, used)
    *_, unknown = edited(other, f"{vision}\n{other}".replace(", 'team-b*'", ""), ledgers=_Silent())
    yield Told(unknown, "Look up the usage with `kubectl gpuquota -A`.")
    lost, removed, leaves, *_ = edited(f"{vision}\n{other}", other)
    yield Told(lost, "Check that the edit keeps the key `gpu_teams`, and each team and name in it.")
    yield Told(removed, "Check that the team was not removed or renamed by mistake.")
    yield Told(leaves, "Give the namespace an entry or a team, if its pods must stay limited.")
    above, *_ = edited(vision, vision, "team-a: {quota: {M40: 4}}")
    yield Told(above, "Lower the limit of the entry, or raise the limit of the team.")
    absent, *_ = edited(other, f"{other}\nvision: {{namespaces: [team-d]}}")
    yield Told(absent, "Correct the name of the namespace. Ignore the warning if the namespace will be created later.")


def warnings() -> Iterator[Told]:
    models = ", ".join(f"B{number}: 1" for number in range(MAX_WARNINGS + 5))
    many = f"team-a: {{quota: {{M40: 8, {models}}}}}"
    alike = "".join(f"team-{name}: {{quota: {{M40: 8}}, pool: [pubic]}}\n" for name in "abcdef")
    slip = (
        "Check the name of the model or pool, and the number of cards. Ignore the warning if the nodes are added later."
    )
    yield Told(_edited(_document("team-a: {quota: {M4O: 8}}")).warnings[0], slip)
    yield Told(_edited(_document("team-a: {quota: {M40: 8}, pool: [pubic]}")).warnings[0], slip)
    yield Told(
        _edited(_document(alike)).warnings[0], f"{slip} The warning applies to all entries that it names or counts."
    )
    tesla = Nodes.of({"one": {MODEL: "Tesla-M40"}}, NODES.keys, named=CardModels({"M40": ProductRow(("Tesla-M40",))}))
    renamed = {**_document("team-a: {quota: {M40: 8}}"), MODELS: "{Maxwell: [Tesla-M40]}"}
    yield Told(_edited(renamed, nodes=tesla).warnings[0], "Write the new name of the model into the quota.")
    lowered = _edited(_document("team-a: {quota: {M40: 2}}"), ledgers=_Used()).warnings[0]
    yield Told(lowered, "Agree with the users of the namespace which pods to delete.")
    silent = _edited(_document("team-a: {quota: {M40: 2}}"), ledgers=_Silent()).warnings[0]
    yield Told(silent, "Compare the new limits with the usage that `kubectl gpuquota -A` shows.")
    with mock.patch.object(usage_warnings, "COMPARING_SECONDS", 0):
        late = _edited(_document("team-a: {quota: {M40: 2}}")).warnings[0]
    yield Told(late, "After the edit, compare the usage that `kubectl gpuquota -A` shows with the limits.")
    over = _edited(_document("team-a: {quota: {M40: 0}, grants: [{M40: 1, until: 2000-01-01}]}")).warnings
    yield Told(over[0], "Remove the grant.")
    yield Told(over[1], "Remove the grant, or the 0 in `quota`.")
    yield from _warnings_about_total()
    system = _edited(_document("kube-system: {quota: {M40: 2}}")).warnings[-1]
    yield Told(system, "Remove the quota entry, unless you only want to see the usage of the namespace.")
    lost = _edited(_document("team-b: {quota: {M40: 1}}")).warnings[0]
    yield Told(lost, "Check that the entry of the namespace was not removed or renamed by mistake.")
    everywhere = _document('team-a: {quota: {M40: 8}}\n"*": {quota: {}}')
    unread, general, named, line = _edited(everywhere, pods=_running_pods).warnings
    yield Told(unread, "List the privileged pods in namespaces without an entry by the command in docs/install.md.")
    yield Told(general, "List the namespaces with privileged pods by the command in docs/install.md.")
    yield Told(named, "Decide for each namespace whether its pods may be privileged.")
    yield Told(line, "Paste `except` into the entry, without the namespaces that must be limited.")
    softer = _edited(_document("team-a: {quota: {M40: 8}, mode: warn}")).warnings[0]
    yield Told(softer, "Check that you intend to admit pods over the limit.")
    added = _document("team-a: {quota: {M40: 8}}\nteam-bb: {quota: {M40: 1}}")
    absent = _edited(added, namespaces=lambda: ["team-a", "team-b"]).warnings[0]
    yield Told(absent, "Correct the name of the namespace. Ignore the warning if the namespace will be created later.")
    yield Told(
        _edited(added, namespaces=_silent_namespaces).warnings[0],
        "Compare the new entries with `kubectl get namespaces`.",
    )
    counted = Nodes.of({"one": {MODEL: "M40", COUNT_LABEL: "4"}}, NODES.keys)
    for told in _edited(_document("team-a: {quota: {M40: 800}}"), nodes=counted).warnings:
        yield Told(told, slip)
    valued = {**_document("team-a: {quota: {M40: 8}}"), MODELS: "{M40: {cards: 0.5}}"}
    yield Told(
        _edited(valued).warnings[-1], "Remove `cards` from the model, or `extendedResourceName` from the DeviceClass."
    )
    hami = Nodes.of({"one": {MODEL: "M40"}}, NODES.keys, {"one": {HAMI.name: ()}})
    yield Told(
        _edited(valued, nodes=hami).warnings[-1],
        "Give the nodes that run HAMi a model of their own, by their model label.",
    )
    labelled = {"metadata": {"labels": {quota_edit.LABEL: "true"}}, "data": _document("team-a: {quota: {M40: 8}}")}
    raw = msgspec.Raw(msgspec.json.encode(labelled))
    unchecked = _edited(labelled["data"], old_object=raw).warnings[0]
    yield Told(unchecked, "Add the label again, so that the webhook rejects a malformed quota.")
    elsewhere = _edited(None, object=raw, namespace="team-a").warnings[0]
    yield Told(elsewhere, "Write the quota into the ConfigMap from which the webhook reads it, or remove the label.")
    yield Told(
        _edited(_document(many)).warnings[-1],
        "Correct the quota by the warnings that are shown. Then apply it again to see further warnings.",
    )
