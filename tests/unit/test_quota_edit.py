"""Tests of /quota, the webhook's check of edits of the quota ConfigMap."""

import asyncio
import itertools
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pytest
from structlog.testing import capture_logs

from tests.builders import LABELS, MODEL, POOL, nodes, review
from tests.tables import cases
from vcuda.admission_review import AdmissionResponse, GroupVersionKind
from vcuda.claims.charges import ClaimPolicy
from vcuda.claims.devices import ClassFacts, Devices
from vcuda.errors import MAX_FAULTS, Dropped, DropReason, Fault, Unavailable, UnreadableLedger, VcudaError
from vcuda.k8s_types import Pod
from vcuda.kube import QuotaPlace
from vcuda.placement.nodes import COUNT_LABEL, Nodes
from vcuda.placement.registers import Card
from vcuda.quota.document import parse_quota
from vcuda.quota.model import Charge, Limit, NamespaceQuota, Quota, Usage
from vcuda.registration import PROBE
from vcuda.requests.resources import BUILT_IN, CardModels, ProductRow
from vcuda.requests.schemes import HAMI
from webhook.ledger.ledgers import MemoryLedgers
from webhook.review import first_limits, quota_edit
from webhook.review.answers import written
from webhook.review.context import PolicySnapshot
from webhook.review.first_limits import MAX_NAMED_NAMESPACES, UNNAMED, Pods
from webhook.review.quota_edit import (
    LABEL,
    MAX_LOGGED_CHANGES,
    MAX_WARNINGS,
    NOT_CHECKED,
    READING_SECONDS,
    NamespaceNames,
    check_edit,
)

PLACE = QuotaPlace("kube-system", "gpuquota", "gpu_quota")
CONFIG_MAP = GroupVersionKind(version="v1", kind="ConfigMap")
NODES = nodes(a={MODEL: "M40", POOL: "public"}, b={MODEL: "P100", POOL: "lab"})
NOBODY = PolicySnapshot(Quota(), NODES)


class Used(MemoryLedgers):
    """Test ledgers in which each namespace has the given usage."""

    def __init__(self, **used: Charge | Usage | VcudaError) -> None:
        super().__init__()
        self._used = used

    async def usage(self, namespace: str, _seconds: float | None = None) -> Mapping[str, Usage]:
        found = self._used.get(namespace.replace("-", "_"))
        if isinstance(found, VcudaError):
            raise found
        return {"M40": found if isinstance(found, Usage) else Usage(found)} if found else {}


def edited(
    document: str | None,
    policy: PolicySnapshot | None = NOBODY,
    ledgers: MemoryLedgers | None = None,
    namespaces: NamespaceNames | None = None,
    *,
    pods: Pods | None = lambda _seconds: iter(()),
    callers_known: bool = True,
    **fields: Any,
) -> AdmissionResponse:
    data = {} if document is None else {"gpu_quota": document}
    manifest = {"kind": "ConfigMap", "metadata": {"name": "gpuquota"}, "data": data}
    given = {"kind": CONFIG_MAP, "namespace": "kube-system", "name": "gpuquota", "operation": "UPDATE", **fields}
    sent = review(manifest, **given), PLACE, policy, ledgers or Used()
    return written(asyncio.run(check_edit(*sent, callers_known=callers_known, namespaces=namespaces, pods=pods)))


def warnings(document: str, policy: PolicySnapshot | None = NOBODY, **used: Charge | Usage | VcudaError) -> list[str]:
    answer = edited(document, policy, Used(**used))
    assert (answer.outcome, answer.allowed) == ("quota-accepted", True)
    return list(answer.warnings)


# Tests of which edits of which objects are checked


@pytest.mark.parametrize(
    "fields",
    [{"name": "other"}, {"namespace": "default"}, {"kind": GroupVersionKind(version="v1", kind="Secret")}],
    ids=["another name", "another namespace", "another kind"],
)
def test_other_objects_are_ignored(fields: dict[str, Any]) -> None:
    assert edited("{{{", **fields) == AdmissionResponse("ignored")


def config_map(document: str, **labels: str) -> msgspec.Raw:
    metadata = {"name": "gpuquota", "labels": {f"quota.vcuda.io/{key}": value for key, value in labels.items()}}
    return msgspec.Raw(msgspec.json.encode({"metadata": metadata, "data": {"gpu_quota": document}}))


@cases(
    "before, after, told",
    removed=({"config": "true"}, {}, True),
    another_value=({"config": "true"}, {"config": "yes"}, True),
    kept=({"config": "true"}, {"config": "true"}, False),
    added=({}, {"config": "true"}, False),
)
def test_an_edit_that_removes_the_label_of_the_quota_gives_a_warning(
    before: dict[str, str], after: dict[str, str], *, told: bool
) -> None:
    """The API server still calls the webhook for this edit, because the old object has the label, but not later."""
    document = "{team-a: {quota: {M40: 1}}}"
    answer = edited(None, object=config_map(document, **after), old_object=config_map(document, **before))
    assert list(answer.warnings) == [NOT_CHECKED] * told


@cases(
    "fields, own",
    another_name=({"name": "gpu-quota"}, "kube-system/gpu-quota"),
    another_namespace=({"namespace": "team-a"}, "team-a/gpuquota"),
)
def test_a_labelled_config_map_that_is_not_read_gives_a_warning(fields: dict[str, Any], own: str) -> None:
    told = f"ConfigMap {own} has label {LABEL}, but the quota is read from ConfigMap kube-system/gpuquota"
    answer = edited(None, object=config_map("{}", config="true"), **fields)
    assert answer == AdmissionResponse("ignored", warnings=[f"{told}, so {own} limits nobody"])


def test_an_edit_warns_of_removed_limits_and_logs_each_change_once() -> None:
    before = PolicySnapshot(Quota({"team-a": NamespaceQuota({"M40": Limit(800)})}), NODES)
    with capture_logs() as logged:
        answer = edited("team-b: {quota: {M40: 1}}", before)
    assert answer.warnings == ["team-a: the entry (M40: 8 cards) is removed. No limit applies any more"]
    changed = [(line["path"], line["before"], line["after"]) for line in logged]
    assert changed == [("team-a", "M40: 8 cards", ""), ("team-b", "", "M40: 1 card")]


def test_a_dry_run_of_an_edit_logs_nothing() -> None:
    with capture_logs() as logged:
        assert edited("team-b: {quota: {M40: 1}}", dry_run=True).allowed
    assert logged == []


def test_only_the_first_of_very_many_changes_are_logged() -> None:
    with capture_logs() as logged:
        edited("".join(f"team-{number}: {{quota: {{M40: 1}}}}\n" for number in range(MAX_LOGGED_CHANGES + 7)))
    assert (len(logged), logged[-1]["more_changes"]) == (MAX_LOGGED_CHANGES + 1, 7)


@pytest.mark.parametrize("operation", ["CREATE", "UPDATE"])
def test_creation_and_update_are_checked(operation: str) -> None:
    assert edited("team-a: {quota: {M40: 8}}", operation=operation) == AdmissionResponse("quota-accepted", warnings=[])
    rejected = edited("{{{", operation=operation)
    [whole] = rejected.faults
    assert (rejected.outcome, whole.path) == ("quota-rejected", "data.gpu_quota")


def test_the_probe_of_the_controller_is_rejected_so_that_it_shows_a_call() -> None:
    answer = edited("{}", name=PROBE, operation="CREATE")
    assert (answer.outcome, answer.allowed, answer.status) == ("probed", False, HTTPStatus.FORBIDDEN)


# Tests of malformed documents


def test_a_malformed_document_is_rejected_with_the_path_of_every_fault() -> None:
    answer = edited("team-a: {quota: {M40: 8, V100: {cards: -1}}, pools: [x]}")
    assert (answer.outcome, answer.allowed, answer.status) == ("quota-rejected", False, HTTPStatus.UNPROCESSABLE_ENTITY)
    assert [fault.path for fault in answer.faults] == ["team-a.quota.V100.cards", "team-a.pools"]
    assert answer.message == "the quota document is malformed: " + "; ".join(str(fault) for fault in answer.faults)


@pytest.mark.parametrize("raw", [b'{"data": {}}', b'{"data": null}'])
def test_a_config_map_without_the_document_is_rejected(raw: bytes) -> None:
    """Without the document, no namespace would have a quota."""
    answer = edited(None, object=msgspec.Raw(raw))
    missing = Fault("data.gpu_quota", "is required; this key must have the quota document")
    assert (answer.outcome, answer.allowed, answer.faults) == ("quota-rejected", False, (missing,))


@pytest.mark.parametrize("raw", [b"null", b'{"data": {"gpu_quota": 5}}', b'{"data": {"gpu_quota": "\xff"}}'])
def test_an_object_that_is_no_config_map_is_rejected(raw: bytes) -> None:
    answer = edited(None, object=msgspec.Raw(raw))
    assert (answer.outcome, answer.allowed) == ("quota-rejected", False)
    assert answer.message.startswith("the quota document is malformed: the ConfigMap cannot be read: ")


def test_a_rejection_stays_readable_for_any_number_of_faults() -> None:
    entries = ", ".join(f"M{number}: -1" for number in range(MAX_FAULTS + 5))
    answer = edited(f"team-a: {{quota: {{{entries}}}}}")
    *named, last = answer.faults
    assert (len(named), last) == (MAX_FAULTS, Fault("data.gpu_quota", "5 more faults are not listed"))
    assert answer.message.endswith("; data.gpu_quota: 5 more faults are not listed")


# Tests of the warnings about a valid quota document


def no_node(model: str, near: str = "nodes have M40, P100") -> str:
    return f"no node has GPU model {model} in label {MODEL}; {near}"


@cases(
    "document, told",
    known=("team-a: {quota: {M40: 8}, pool: [public]}", []),
    a_model_that_no_node_has=(
        "team-a: {quota: {M4O: 8}}",
        [f"team-a.quota.M4O: {no_node('M4O', 'did you mean M40?')}"],
    ),
    a_pool_that_no_node_has=(
        "team-a: {quota: {M40: 8}, pool: [lab, publik]}",
        [f"team-a.pool: no node has pool publik in label {POOL}"],
    ),
    in_the_default_entry=("'*': {quota: {V100: 1}}", [f"*.quota.V100: {no_node('V100', 'did you mean P100?')}"]),
    an_empty_document=("{}", []),
)
def test_names_that_no_node_has_give_a_warning(document: str, told: list[str]) -> None:
    assert warnings(document) == told


def test_a_cluster_without_a_gpu_node_gives_one_warning() -> None:
    told = warnings("team-a: {quota: {M40: 8}}", PolicySnapshot(Quota(), nodes()))
    assert told == [f"team-a.quota.M40: {no_node('M40', 'nodes have none')}"]


TAIL = "new pods are rejected until less is in use"
MEMORY = "M40: {cards: 8, memory: 1Gi}"


@cases(
    "limit, used, told",
    as_much_as_the_limit=("M40: 8", Charge(800), []),
    cards=("M40: 7.5", Charge(800), [f"the limit is 7.5 cards, but the usage is 8 cards; {TAIL}"]),
    blocked=("M40: 0", Charge(1), [f"the limit is 0 cards, but the usage is 0.01 cards; {TAIL}"]),
    a_model_no_longer_listed=("P100: 1", Charge(100), [f"the limit is 0 cards, but the usage is 1 card; {TAIL}"]),
    as_much_memory_as_the_limit=(MEMORY, Charge(10, 1024), []),
    memory=(
        MEMORY,
        Charge(10, 1025),
        [f"the limit is 8 cards, 1024 MiB, but the usage is 0.1 cards, 1025 MiB; {TAIL}"],
    ),
)
def test_a_limit_below_the_usage_gives_a_warning(limit: str, used: Charge, told: list[str]) -> None:
    expected = [f"team-a.quota.M40: {sentence}" for sentence in told]
    assert warnings(f"team-a: {{quota: {{{limit}}}}}", team_a=used) == expected


def test_reservations_are_not_in_use() -> None:
    reserved = Usage(Charge(500), reserved=Charge(100))
    assert warnings("team-a: {quota: {M40: 4}}", team_a=reserved) == []


def test_entries_that_do_not_change_are_not_compared_again() -> None:
    same = PolicySnapshot(Quota({"team-a": NamespaceQuota({"M40": Limit(100)})}), NODES)
    document = "{team-a: {quota: {M40: 1}}, team-b: {quota: {M40: 1}}}"
    told = warnings(document, same, team_a=Charge(900), team_b=Charge(900))
    assert [warning.partition(".")[0] for warning in told] == ["team-b"]


@pytest.mark.parametrize("error", [Unavailable("no answer"), UnreadableLedger("damaged")])
def test_an_edit_is_accepted_although_the_usage_is_not_known(error: VcudaError) -> None:
    told = warnings("{team-a: {quota: {M40: 1}}, team-b: {quota: {M40: 1}}}", team_a=error, team_b=Charge(200))
    assert told == [
        f"team-a: the quota was not compared with the current usage: {error}",
        f"team-b.quota.M40: the limit is 1 card, but the usage is 2 cards; {TAIL}",
    ]


def test_before_a_quota_is_in_force_only_the_usage_is_compared() -> None:
    """The stored document is malformed, so no quota is in force yet. A correction of the document must be accepted."""
    assert warnings("team-a: {quota: {M40: 1, X: 1}}", None, team_a=Charge(200)) == [
        f"team-a.quota.M40: the limit is 1 card, but the usage is 2 cards; {TAIL}"
    ]


def test_a_system_namespace_with_a_quota_gives_a_warning() -> None:
    [told] = warnings("kube-system: {quota: {M40: 1}}")
    assert told.startswith("kube-system: system namespace; if the webhook is not called for its pods, they are charged")


def test_an_edit_whose_usage_cannot_be_compared_in_time_is_accepted_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each ledger is read by its own API call. If the comparison exceeded the API server's timeout, no edit could be
    stored any more.
    """
    monkeypatch.setattr("webhook.review.quota_edit.COMPARING_SECONDS", 0)
    document = "{a: {quota: {M40: 1}}, b: {quota: {M40: 1}}}"
    answer = edited(document, ledgers=Used(a=Charge(200), b=Charge(200)))
    told = "the usage could not be read in time; entries not compared with the usage: 2"
    assert answer == AdmissionResponse("quota-accepted", warnings=[told])
    many = ", ".join(f"X{number}: 1" for number in range(MAX_WARNINGS + 7))
    assert edited(f"team-a: {{quota: {{{many}}}}}").warnings[0].endswith("not compared with the usage: 1")


class Slow(Used):
    """Test ledgers in which the ledger of namespace slow never answers, so each read of it takes all of its time."""

    async def usage(self, namespace: str, seconds: float | None = None) -> Mapping[str, Usage]:
        if namespace != "slow":
            return await super().usage(namespace)
        assert seconds is not None
        assert seconds <= READING_SECONDS
        raise Unavailable("the ledger could not be read in time")


def test_a_ledger_that_does_not_answer_delays_no_edit_and_the_others_are_compared() -> None:
    """A tenant can make the read of its ledger slow. Only the warning about its own namespace is lost."""
    answer = edited("{slow: {quota: {M40: 1}}, b: {quota: {M40: 1}}}", ledgers=Slow(b=Charge(200)))
    assert answer.warnings == [
        "slow: the quota was not compared with the current usage: the ledger could not be read in time",
        f"b.quota.M40: the limit is 1 card, but the usage is 2 cards; {TAIL}",
    ]


# Tests of reviews that anybody may have sent, because the webhook runs without --client-ca


def test_an_unknown_caller_learns_nothing_of_a_namespace_and_logs_no_edit() -> None:
    secret = PolicySnapshot(Quota({"secret": NamespaceQuota({"M40": Limit(800)})}), NODES)
    used, names = Used(team_a=Charge(900)), lambda: pytest.fail("the namespaces were listed")
    with capture_logs() as logged:
        answer = edited("team-a: {quota: {M40: 1}}", secret, used, names, callers_known=False)
    assert (answer, logged) == (AdmissionResponse("quota-accepted", warnings=[]), [])


@cases(
    "before, told",
    an_edit=(
        "{gone: {quota: {M40: 1}}, team-a: {quota: {M40: 8}}}",
        [
            "gone: the entry (M40: 1 card) is removed. No limit applies any more",
            "team-a.mode: the mode changes from enforce to warn",
        ],
    ),
    of_a_malformed_document=("{{{", []),
    a_creation=(None, []),
)
def test_an_unknown_caller_is_warned_by_the_documents_in_its_review(before: str | None, told: list[str]) -> None:
    data = {"data": {"gpu_quota": before}} if before else None
    old = msgspec.Raw(msgspec.json.encode(data))
    answer = edited("team-a: {mode: warn, quota: {M40: 8, X: 1}}", callers_known=False, old_object=old)
    assert answer.warnings == [*told, f"team-a.quota.X: {no_node('X')}"]


# Tests of an edit whose entry "*" limits namespaces for the first time


def running(namespace: str, **spec: Any) -> Pod:
    container = {"name": "main", "securityContext": {"privileged": True}}
    return msgspec.convert({"metadata": {"namespace": namespace}, "spec": {"containers": [container], **spec}}, Pod)


def of(namespace: str, **container: Any) -> Pod:
    return running(namespace, containers=[{"name": "main", **container}])


RUNNING = (
    running("longhorn-system"),
    running("longhorn-system"),
    running("kube-system"),
    running("team-a"),
    running("before"),
    of("gpu-operator", env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]),
    of("other", resources={"limits": {"amd.com/gpu": "1"}}),
    of("plain", resources={"limits": {"cpu": "1"}}),
)
BEFORE = PolicySnapshot(Quota({"before": NamespaceQuota({}), "team-a": NamespaceQuota({})}), NODES)
ENTRIES = "before: {quota: {}}\nteam-a: {quota: {}}\n"
REJECTED = "*: pods in these namespaces would be rejected at their next restart: "
PASTE = "*: to leave these namespaces without a limit, write in this entry: except: "
OVERDUE = "*: not all pods could be compared with this entry: this takes longer than 1 s"


@cases(
    "written, told",
    all_rejected=(
        '"*": {quota: {}}',
        [
            f"{REJECTED}gpu-operator, longhorn-system, other",
            f'{PASTE}["gpu-operator","longhorn-system","other"]',
        ],
    ),
    some_excepted=(
        '"*": {quota: {}, except: ["longhorn-*"]}',
        [f"{REJECTED}gpu-operator, other", f'{PASTE}["gpu-operator","longhorn-*","other"]'],
    ),
    some_allowed=(
        '"*": {quota: {}, allow: [privileged, visible-devices]}',
        [f"{REJECTED}other", f'{PASTE}["other"]'],
    ),
    all_excepted=('"*": {quota: {}, except: ["longhorn-*", gpu-operator, other]}', []),
    a_mode_that_rejects_nothing=('"*": {mode: warn, quota: {}}', []),
)
def test_an_edit_that_limits_all_namespaces_names_those_whose_running_pods_would_be_rejected(
    written: str, told: list[str]
) -> None:
    assert edited(ENTRIES + written, BEFORE, pods=lambda _seconds: iter(RUNNING)).warnings == told


@cases(
    "before, told",
    without_names=('"*": {quota: {}}', []),
    of_more_excepted=(
        '"*": {quota: {}, except: [other, lab]}',
        [f"{REJECTED}other", f'{PASTE}["other"]'],
    ),
    of_a_mode_that_rejects_nothing=(
        '"*": {mode: audit, quota: {}, except: [longhorn-system]}',
        [f"{REJECTED}gpu-operator, longhorn-system, other", f'{PASTE}["gpu-operator","longhorn-system","other"]'],
    ),
)
def test_only_namespaces_that_were_not_limited_before_are_named(before: str, told: list[str]) -> None:
    old = PolicySnapshot(parse_quota(ENTRIES + before), NODES)
    assert edited(f'{ENTRIES}"*": {{quota: {{}}}}', old, pods=lambda _seconds: iter(RUNNING)).warnings == told


def test_at_most_twenty_namespaces_are_named_and_the_number_of_the_others() -> None:
    many = [running(f"n{number:03}") for number in range(MAX_NAMED_NAMESPACES + 5)]
    first, second = edited('"*": {quota: {}}', pods=lambda _seconds: iter(many)).warnings
    assert first.endswith(", n019 and 5 more")
    assert second.endswith(',"n019"]')


def test_pods_that_cannot_be_read_in_time_do_not_delay_the_edit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock advances by a third of a second whenever it is read. So the last pods are not judged."""
    clock = itertools.count(0, 0.3)
    monkeypatch.setattr(first_limits, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    pods = iter([running("a"), *[running(f"n{number}") for number in range(100)]])
    told = edited('"*": {quota: {}}', pods=lambda _seconds: pods).warnings
    assert told[:3] == [OVERDUE, UNNAMED, f"{REJECTED}a"]
    assert len(list(pods)) > 90


def test_an_edit_is_accepted_while_the_pods_cannot_be_listed() -> None:
    def silent(_seconds: float) -> Iterator[Pod]:
        raise Unavailable("no answer")

    told = edited('"*": {quota: {}}', pods=silent).warnings
    assert told == ["*: not all pods could be compared with this entry: no answer", UNNAMED]


def test_a_review_that_is_dropped_ends_the_reading_of_the_pods() -> None:
    def dropped(_seconds: float) -> Iterator[Pod]:
        raise Dropped("late", DropReason.LATE)

    with pytest.raises(Dropped):
        edited('"*": {quota: {}}', pods=dropped)


@cases(
    "before, after, told",
    a_creation=(None, '"*": {quota: {}}', [UNNAMED]),
    a_new_entry=("{}", '"*": {quota: {}}', [UNNAMED]),
    fewer_excepted=('"*": {except: [a, b]}', '"*": {except: [a]}', [UNNAMED]),
    as_before=('"*": {except: [a]}', '"*": {quota: {}, except: [a]}', []),
    privileged_pods_allowed=("{}", '"*": {allow: [privileged]}', []),
    no_entry_for_all=("{}", "{}", []),
)
def test_an_unknown_caller_gets_a_warning_without_names_and_no_pod_is_read(
    before: str | None, after: str, told: list[str]
) -> None:
    old = msgspec.Raw(msgspec.json.encode({"data": {"gpu_quota": before}} if before else None))
    answer = edited(after, callers_known=False, old_object=old, pods=lambda _seconds: pytest.fail("pods were listed"))
    assert answer.warnings == told


def test_warnings_about_nodes_use_the_edited_rows_of_models() -> None:
    """By the edited gpu_models, product M40 of a node belongs to model Tesla. Field `cards` of Tesla has no effect,
    because a DeviceClass offers devices as nvidia.com/gpu.
    """
    whole = Devices(classes={"gpu.nvidia.com": ClassFacts(extended_resource="nvidia.com/gpu")})
    claims = ClaimPolicy.of(whole, NODES.model_of, Quota(), BUILT_IN)
    rows = "{Tesla: {products: ['?40'], cards: 0.5}, P100: []}"
    data = {"gpu_quota": "team-a: {quota: {Tesla: 1, M41: 1}}", "gpu_models": rows}
    object_ = msgspec.Raw(msgspec.json.encode({"metadata": {"name": "gpuquota"}, "data": data}))
    assert list(edited(None, PolicySnapshot(Quota(), NODES, claims=claims), object=object_).warnings) == [
        f"team-a.quota.M41: {no_node('M41', 'nodes have P100, Tesla')}",
        "gpu_models: `cards` of Tesla has no effect while a DeviceClass offers devices as nvidia.com/gpu",
    ]


def test_an_edit_that_renames_the_model_of_nodes_names_the_new_model() -> None:
    """The entry "*" was written before the edit. It would then limit no node's model any more."""
    before = NODES.named_by(CardModels({"Tesla": ProductRow(("M*",))}))
    data = {"gpu_quota": '{"*": {quota: {Tesla: 1, P100: 1}}}', "gpu_models": "{Maxwell: ['M*']}"}
    object_ = msgspec.Raw(msgspec.json.encode({"metadata": {"name": "gpuquota"}, "data": data}))
    answer = edited(None, PolicySnapshot(Quota({}, NamespaceQuota({"Tesla": Limit(100)})), before), object=object_)
    renamed = "by this `gpu_models`, the nodes of Tesla have model Maxwell; write Maxwell"
    assert f"*.quota.Tesla: {renamed}" in answer.warnings


EXISTING = frozenset({"team-a", "team-b", "default"})


@cases(
    "document, told",
    a_typo=("{team-aa: {quota: {M40: 1}}}", ["team-aa: namespace not found; did you mean `team-a`?"]),
    nothing_near=("{lab: {quota: {M40: 1}}}", ["lab: namespace not found"]),
    one_that_exists=("{team-b: {quota: {M40: 1}}}", []),
    all_others=('{"*": {quota: {M40: 1}}}', []),
)
def test_a_new_entry_without_a_namespace_gives_a_warning(document: str, told: list[str]) -> None:
    assert list(edited(document, namespaces=lambda: EXISTING).warnings) == told


def test_an_entry_that_was_there_before_is_not_looked_up() -> None:
    before = PolicySnapshot(Quota({"gone": NamespaceQuota({"M40": Limit(100)})}), NODES)
    answer = edited("gone: {quota: {M40: 2}}", before, namespaces=lambda: pytest.fail("looked up"))
    assert not answer.warnings


def test_an_edit_is_accepted_while_the_namespaces_cannot_be_listed() -> None:
    def silent() -> frozenset[str]:
        raise Unavailable("no answer")

    told = "the webhook could not check whether the namespaces of the new entries exist: no answer"
    assert edited("team-a: {quota: {M40: 1}}", namespaces=silent).warnings == [told]


def test_the_value_of_a_device_without_effect_on_hami_nodes_gives_a_warning() -> None:
    registers = {"node-1": {HAMI.name: (Card("GPU-1", "Tesla M40"),)}}
    nodes = Nodes.of({"node-1": {LABELS.model: "M40"}, "node-2": {LABELS.model: "P100"}}, LABELS, registers)
    data = {"gpu_quota": "team-a: {quota: {M40: 1}}", "gpu_models": "{M40: {cards: 0.5}, P100: {cards: 0.5}}"}
    object_ = msgspec.Raw(msgspec.json.encode({"metadata": {"name": "gpuquota"}, "data": data}))
    assert list(edited(None, PolicySnapshot(Quota(), nodes), object=object_).warnings) == [
        "gpu_models: `cards` of M40 has no effect while a node of this model has a register of HAMi",
    ]


def test_warnings_end_before_the_api_server_cuts_them_off() -> None:
    models = ", ".join(f"X{number}: 1" for number in range(MAX_WARNINGS + 7))
    told = warnings(f"team-a: {{quota: {{{models}}}}}")
    assert len(told) == MAX_WARNINGS + 1
    assert told[-1] == "7 more warnings are not shown"


def test_warnings_that_differ_only_in_the_field_are_one_line_with_their_number() -> None:
    entries = "".join(f"team-{number}: {{quota: {{M4O: 1, M40: 1}}, pool: [publik]}}\n" for number in range(30))
    models = "team-0.quota.M4O, team-1.quota.M4O, team-2.quota.M4O and 27 more"
    assert warnings(f"{entries}last: {{quota: {{M4O: 1, B200: 1}}}}") == [
        f"{models.replace('27', '28')}: {no_node('M4O', 'did you mean M40?')}",
        f"team-0.pool, team-1.pool, team-2.pool and 27 more: no node has pool publik in label {POOL}",
        f"last.quota.B200: {no_node('B200')}",
    ]


def test_lost_entries_and_raised_limits_are_the_first_of_many_warnings() -> None:
    counted = nodes(a={MODEL: "M40", COUNT_LABEL: "4"})
    before = PolicySnapshot(Quota({"team-a": NamespaceQuota({"M40": Limit(100)})}), counted)
    models = ", ".join(f"X{number}: 1" for number in range(MAX_WARNINGS + 7))
    answer = edited(f"team-b: {{quota: {{M40: 800, {models}}}}}", before, namespaces=frozenset)
    assert [text.partition(":")[0] for text in answer.warnings[:4]] == ["team-a", "team-b.quota.M40", "M40", "team-b"]
    assert answer.warnings[3] == "team-b: namespace not found"


def test_only_as_many_unknown_models_as_are_shown_are_compared_with_the_known_models() -> None:
    """An edit may name ten thousand unknown models. To compare all of them would take seconds."""
    models = ", ".join(f"M4{number}: 1" for number in range(1, 500))
    with mock.patch.object(quota_edit, "nearest", return_value="did you mean M40?") as nearest:
        warnings(f"team-a: {{quota: {{{models}}}}}")
    assert nearest.call_count == MAX_WARNINGS
