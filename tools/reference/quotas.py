"""The messages in docs/reference.md about the quota document. The code produces them from example documents."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from tools.reference import quota_edits
from tools.reference.told import Chapter, Told
from vcuda.errors import QuotaFault
from vcuda.quota.document import MAX_NAMESPACES
from vcuda.quota.entries import MAX_EXCEPTED
from vcuda.quota.grant_entries import MAX_GRANTS, MAX_RECURRING
from vcuda.quota.teams import MAX_ITEMS, MAX_TEAMS
from vcuda.quota.well_known import TEAMS
from vcuda.quota.yaml import MAX_DEPTH, MAX_ENTRIES, MAX_TEXT
from vcuda.requests.config import MODELS, QUOTA, SCHEME_SETTINGS, TIME_ZONE, UNITS, parse_config

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

_TEAMS = (
    "",
    "[a]",
    "a: 8",
    "Vision: {namespaces: [a]}",
    "vision: {quota: {M40: 8}}",
    "vision: {namespaces: ['*']}",
    "vision: {namespaces: [team.x]}",
    "vision: {namespaces: ['kube-*']}",
    "vision: {namespaces: [b], teams: [speech]}",
    "vision: {namespaces: [speech]}\nspeech: {namespaces: [b]}",
    "vision: {namespaces: [b, 'c-*']}\nspeech: {namespaces: ['c-*']}",
    json.dumps({"vision": {"namespaces": [f"n{number}" for number in range(MAX_ITEMS + 1)]}}),
    json.dumps({f"t{number}": {"namespaces": [f"n{number}"]} for number in range(MAX_TEAMS + 1)}),
)
"""Teams that are valid JSON or YAML, but have wrong values."""

_OF_MEMBERS = (
    "a: {mode: warn}",
    "a: {quota: {H100: 1}}",
    "a: {grants: [{M40: 1, weekly: Sat}]}",
)
"""Quota documents with an entry that contradicts the team of its namespace."""

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
    of_teams = (
        "Faults of the key `gpu_teams` are printed like the faults of the quota document. The path of a fault in the"
        " entry of a member is the path in the quota document."
    )
    spots = (
        "If a document is not valid JSON or YAML, its faults are printed like the faults of a valid"
        " document. The line and the column of the fault precede the message. Some of the messages"
        " come from the parsers of JSON and YAML."
    )
    return (
        Chapter("Faults of the quota document", printed, tuple(Told(_fault(text)) for text in (*VALUES, *LARGE))),
        Chapter("Faults of its other keys", spots_of_keys, tuple(Told(_fault(*each)) for each in _FURTHER)),
        Chapter("Faults of its teams", of_teams, tuple(_team_faults())),
        Chapter("Faults of its JSON or YAML", spots, tuple(Told(_fault(text)) for text in UNREADABLE)),
        Chapter(
            "Edits of the quota ConfigMap",
            "kubectl prints the messages about a rejected edit of the quota ConfigMap like the faults"
            " of a quota document.",
            tuple(quota_edits.edits()),
        ),
        Chapter(
            "Warnings about an edit of the quota ConfigMap",
            ("kubectl prints warnings about an edit of the quota ConfigMap after `Warning:`. The edit is accepted."),
            (*quota_edits.warnings(), *quota_edits.warnings_about_teams()),
        ),
    )


def _fault(*key_and_text: str) -> str:
    *key, text = key_and_text
    # The examples without teams show also the message about the missing entries.
    return _faults({QUOTA: "{}" if key == [TEAMS] else "", **dict.fromkeys(key or [QUOTA], text)})


def _faults(data: Mapping[str, str]) -> str:
    try:
        parse_config(data)
    except QuotaFault as fault:
        return str(fault)
    raise AssertionError(f"the example documents must have a fault: {str(data)[:80]}")


def _team_faults() -> Iterator[Told]:
    for text in _TEAMS:
        yield Told(_fault(TEAMS, text))
    for entry in _OF_MEMBERS:
        yield Told(_faults({TEAMS: "vision: {namespaces: [a], quota: {M40: 8}}", QUOTA: entry}))
