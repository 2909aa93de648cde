"""The messages in docs/reference.md about the quota document. The code produces them from example documents."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from typing import Any, Never
from unittest import mock

import msgspec

from tools.reference.examples import LABELS, MODEL, POOL, policy_for, review
from tools.reference.told import Chapter, Told
from vcuda.admission_review import AdmissionResponse, GroupVersionKind
from vcuda.claims.charges import ClaimPolicy
from vcuda.claims.devices import ClassFacts, Devices
from vcuda.errors import MAX_FAULTS, QuotaFault, Unavailable
from vcuda.k8s_types import Pod
from vcuda.kube import QuotaPlace
from vcuda.placement.nodes import COUNT_LABEL, Nodes
from vcuda.quota.document import MAX_EXCEPTED, MAX_NAMESPACES
from vcuda.quota.grant_entries import MAX_GRANTS, MAX_RECURRING
from vcuda.quota.model import Charge, Limit, NamespaceQuota, Usage
from vcuda.quota.yaml import MAX_DEPTH, MAX_ENTRIES, MAX_TEXT
from vcuda.requests.config import MODELS, QUOTA, SCHEME_SETTINGS, TIME_ZONE, UNITS, parse_config
from vcuda.requests.resources import PLAIN_CARDS, CardModels, ProductRow
from vcuda.requests.schemes import HAMI
from webhook.ledger.charging import Ledgers
from webhook.ledger.ledgers import MemoryLedgers
from webhook.review import first_limits, quota_edit
from webhook.review.answers import written
from webhook.review.quota_edit import MAX_WARNINGS, check_edit

NODES = Nodes.of({"one": {MODEL: "M40", POOL: "public"}}, LABELS)

VALUES = (
    "Team-A: {quota: {M40: 1}}",
    "a: {allow: [everything]}",
    "a: {allow: privileged}",
    "a: {quota: [M40]}",
    "[a]",
    "a: 8",
    "a: {M40: 8}",
    "a: {qouta: {M40: 8}}",
    "a: {quota: {M40: {memory: 1Gi}}}",
    "a: {quota: {M40: {}}}",
    "a: {quota: {M40: {cards: 1, GB: 1}}}",
    "a: {quota: {'Tesla M40': 1}}",
    "a: {quota: {M40: '8'}}",
    "a: {quota: {M40: 160Gi}}",
    "a: {quota: {M40: all}}",
    "a: {quota: {M40: }}",
    "a: {quota: {M40: [1]}}",
    "a: {quota: {M40: -1}}",
    "a: {quota: {M40: 2.555}}",
    "a: {quota: {M40: {cards: 1, memory: all}}}",
    "a: {quota: {M40: {cards: 1, memory: 1000000E}}}",
    "a: {quota: {M40: {cards: 1, memory: 0}}}",
    "a: {quota: {M40: {cards: 1, memory: 160}}}",
    "a: {quota: {M40: {cards: 1, memory: 160k}}}",
    "a: {pool: public}",
    "a: {pool: [public, public]}",
    "a: {pool: [7]}",
    "a: {pool: [{}]}",
    "a: {mode: wran}",
    "a: {order: [A10O], quota: {A100: 1}}",
    "a: {order: [T4], quota: {A100: 1}}",
    "a: {one_model: 1}",
    "a: {total: 20}",
    "a: {quota: {A100: 8, total: 20}}",
    "require_nodes: 1",
    "a: {time_zone: Europe/Berln}",
    "a: {time_zone: Mars}",
    "a: {grants: 4}",
    "a: {grants: [4]}",
    "a: {grants: [{T4: 1, until: 2026-02-30}]}",
    "a: {grants: [{T4: 1, from: 2026-12-02, until: 2026-12-01}]}",
    "a: {grants: [{T4: 1, untill: 2026-12-01}]}",
    "a: {grants: [{T4: 1, weekly: Sat, time_zone: UTC}]}",
    "a: {grants: [{T4: 1, weekly: Samstag}]}",
    "a: {grants: [{T4: 1, daily: 20-6}]}",
    "a: {grants: [{T4: 0, weekly: Sat}]}",
    "a: {grants: [{weekly: Sat}]}",
    "a: {grants: [{T4: 1}]}",
    "a: {grants: [{T4: 1, weekly: Sat, why: 1}]}",
    "a: {quota: {T4: {cards: 1, memory: 16Gi}}, grants: [{T4: 1, weekly: Sat}]}",
    "a: {quota: {T4: 1}, grants: [{T4: {cards: 1, memory: 16Gi}, weekly: Sat}]}",
    "a: {grants: [{T4: {memory: 16Gi}, weekly: Sat}, {T4: {cards: 1, memory: 16Gi}, weekly: Sun}]}",
    "a: {quota: {T4: {cards: 1, memory: 16Gi}}, grants: [{T4: {memory: 16Gi}, weekly: Sat}]}",
    json.dumps({"a": {"grants": [{"T4": 1, "weekly": "Sat"}] * (MAX_GRANTS + 1)}}),
    "a: {mode: 7}",
    "a: {mode: soft}",
    "a: {except: [b]}",
    "'*': {except: b}",
    "'*': {except: ['*', b, b]}",
    json.dumps({"*": {"except": [f"n{number}" for number in range(MAX_EXCEPTED + 1)]}}),
    "a: {quota: {M40: 8, M40: 2}}",
    "a: {quota: {<<: 8}}",
    "a: &a {quota: {M40: 1}}\nb: {<<: *a, <<: *a}",
)
"""Quota documents that are valid JSON or YAML, but have wrong values."""

_FURTHER = (
    ("gpu_unit", "{}"),
    ("gpu_x", "{}"),
    (SCHEME_SETTINGS, "{hami: {default_cores: half}}"),
    (UNITS, "{nvidia.com/gpu: {cards: 1}}"),
    (UNITS, "{nvidia.com/hostdev: {cards: 1}}"),
    (UNITS, "{nvidia.com/mig-1g.5gb: {}}"),
    (UNITS, "{deviceclass.resource.kubernetes.io/rdma.example.com: {}}"),
    (UNITS, "{gpu: {cards: 1}}"),
    (UNITS, "{amd.com/gpu: 1}"),
    (UNITS, "{amd.com/gpu: {cards: 0}}"),
    (UNITS, "{amd.com/gpu: {memory: 10Gi}}"),
    (UNITS, "{amd.com/gpu: {weight: 1}}"),
    (SCHEME_SETTINGS, "{hami: {scheduler: Hami_1, memory_mib: 0, service_accounts: [hami]}, hamis: {}, x: {}}"),
    (SCHEME_SETTINGS, "{hami: {resources: {count: gpu, cores: nvidia.com/mig-1g.5gb}, schedulr: a, x: 1}}"),
    (SCHEME_SETTINGS, "{hami: {resources: {count: nvidia.com/vgpu-number}}, gpu-manager: {memory_mib: 1}}"),
    (SCHEME_SETTINGS, "{vgpu-manager: {resources: {memory_percentage: nvidia.com/part}}}"),
    (SCHEME_SETTINGS, "{hami: hami-scheduler}"),
    (MODELS, "{A100: NVIDIA-A100}"),
    (MODELS, "{A100: {products: NVIDIA-A100, card: 1, x: 1}}"),
    (MODELS, "{A100: [1, 'NVIDIA-[AH]100', '*']}"),
    (MODELS, "{A100: {cards: 0}, H100: {cards: 1.5}, T4: {cards: 0.125}}"),
    (MODELS, "{A100: [NVIDIA-A100-*, NVIDIA-A100-*], Shared: {products: [NVIDIA-A100-*-SHARED], cards: 0.25}}"),
    (MODELS, "{A100: {mig: {slices: 9, memory: 8}}}"),
    (MODELS, "{A100: [A*], A10: [], a100: []}"),
    (MODELS, json.dumps({"A100": [f"A100-{number}" for number in range(33)]})),
    (MODELS, json.dumps({f"m{number}": [] for number in range(257)})),
    (MODELS, "[A100]"),
    (TIME_ZONE, "Mars"),
)
"""Pairs of a key of the quota ConfigMap, other than the key of the quota document, and an invalid value."""


def many_times(number: int) -> str:
    """Return a quota document with ``number`` grants (dated quota), each at another time."""
    hours = [f"{minute // 60:02}:{minute % 60:02}-24:00" for minute in range(number)]
    return json.dumps({f"n{at}": {"grants": [{"T4": 1, "daily": each}]} for at, each in enumerate(hours)})


LARGE = (
    "#" * (MAX_TEXT + 1),
    "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1),
    json.dumps({"a": [1] * MAX_ENTRIES}),
    json.dumps({f"n{number}": {} for number in range(MAX_NAMESPACES + 1)}),
    many_times(MAX_RECURRING + 1),
)
"""Quota documents that are too large."""

UNREADABLE = (
    '{\n  "a": {"quota": {"M40": 2 "P100": 3}}}',
    "a: {quota: ]}",
    "a:\n  quota: M40: 8",
    "a:\n\tquota: {}",
    "a: {}\n---\nb: {}",
    "a: !x {}",
    "? [a]\n: {}",
    "a: {quota: *b}",
    "a: \0",
)
"""Quota documents that are not valid JSON or YAML, or that use features of YAML that are not supported."""


def chapters() -> tuple[Chapter, ...]:
    printed = (
        "kubectl prints the faults of a malformed quota document after `The request is invalid:`, one"
        " on each line. The whole message of the webhook, which kubectl does not print, is `admission"
        ' webhook "config.quota.vcuda.io" denied the request: the quota document is malformed:`,'
        " followed by all faults. `vcuda-webhook check` prints one fault on each line. The Event"
        " `MalformedQuota` has all faults. Each fault begins with the path of the wrong value, and"
        " says what to write instead."
    )
    spots_of_keys = (
        "Faults of the other keys of the quota ConfigMap are printed like the faults of the quota"
        " document. The path of each fault begins with the key."
    )
    spots = (
        "If a document is not valid JSON or YAML, its faults are printed like the faults of a valid"
        " document. The line and the column of the fault precede the message. Some of the messages"
        " come from the parsers of JSON and YAML."
    )
    return (
        Chapter("Faults of the quota document", printed, tuple(Told(_fault(text)) for text in (*VALUES, *LARGE))),
        Chapter("Faults of its other keys", spots_of_keys, tuple(Told(_fault(*each)) for each in _FURTHER)),
        Chapter("Faults of its JSON or YAML", spots, tuple(Told(_fault(text)) for text in UNREADABLE)),
        Chapter(
            "Edits of the quota ConfigMap",
            "kubectl prints the messages about a rejected edit of the quota ConfigMap like the faults"
            " of a quota document.",
            tuple(_edits()),
        ),
        Chapter(
            "Warnings about an edit of the quota ConfigMap",
            ("kubectl prints warnings about an edit of the quota ConfigMap after `Warning:`. The edit is accepted."),
            tuple(_warnings()),
        ),
    )


def _fault(*key_and_text: str) -> str:
    *key, text = key_and_text
    try:
        parse_config({QUOTA: "", **dict.fromkeys(key or [QUOTA], text)})
    except QuotaFault as fault:
        return str(fault)
    raise AssertionError(f"the example document {text[:80]!r} must have a fault")


def _edited(
    data: object,
    ledgers: Ledgers | None = None,
    limits: Mapping[str, Limit] | None = None,
    *,
    nodes: Nodes = NODES,
    namespaces: quota_edit.NamespaceNames | None = None,
    pods: first_limits.Pods | None = None,
    total: Limit | None = None,
    **fields: Any,
) -> AdmissionResponse:
    """Return the answer of the webhook's path /quota to an edit of the quota ConfigMap.

    ``data``: the data of the ConfigMap after the edit. ``fields``: other fields of the review.
    ``limits``, ``total``: the limits before the edit; by default, eight cards of model M40.
    """
    place = QuotaPlace()
    kind = GroupVersionKind(version="v1", kind="ConfigMap")
    raw = msgspec.Raw(msgspec.json.encode({"data": data}))
    given = {"kind": kind, "namespace": place.namespace, "name": place.name, "operation": "UPDATE", "object": raw}
    request = review(None, dry_run=True, **{**given, **fields})
    policy = policy_for(NamespaceQuota(limits or {"M40": Limit(800)}, total=total), nodes)
    devices = Devices(classes={"gpu.nvidia.com": ClassFacts(extended_resource=PLAIN_CARDS)})
    claims = ClaimPolicy.of(devices, NODES.model_of, policy.quota, policy.resources)
    policy = msgspec.structs.replace(policy, claims=claims)
    ledgers = ledgers or MemoryLedgers()
    edit = check_edit(request, place, policy, ledgers, callers_known=True, namespaces=namespaces, pods=pods)
    return written(asyncio.run(edit))


def _document(text: str) -> dict[str, str]:
    return {QuotaPlace().key: text}


def _edits() -> Iterator[Told]:
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

    async def usage(self, _namespace: str, _seconds: float | None = None) -> Mapping[str, Usage]:
        return {"M40": Usage(Charge(300, 0, 300))}


class _Silent(MemoryLedgers):
    """A test double of the ledgers, which cannot be read."""

    async def usage(self, _namespace: str, _seconds: float | None = None) -> Mapping[str, Usage]:
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


def _warnings() -> Iterator[Told]:
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
    with mock.patch.object(quota_edit, "COMPARING_SECONDS", 0):
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
