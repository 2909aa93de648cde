"""Tests of /quota, the webhook's check of edits of the quota ConfigMap."""

import asyncio
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from tests.builders import MODEL, POOL, nodes, review
from tests.tables import cases
from vcuda.admission_review import AdmissionResponse, GroupVersionKind
from vcuda.errors import MAX_FAULTS, Fault, VcudaError
from vcuda.kube import QuotaSource
from vcuda.placement.nodes import COUNT_LABEL
from vcuda.quota.model import Charge, Limit, NamespaceQuota, Quota, Usage
from vcuda.registration import PROBE
from webhook.ledger.ledgers import MemoryLedgers
from webhook.review.answers import written
from webhook.review.context import PolicySnapshot
from webhook.review.first_limits import Pods
from webhook.review.quota_edit import LABEL, MAX_LOGGED_CHANGES, NOT_CHECKED, NamespaceNames, check_edit

PLACE = QuotaSource("kube-system", "gpuquota", "gpu_quota")
CONFIG_MAP = GroupVersionKind(version="v1", kind="ConfigMap")
NODES = nodes(a={MODEL: "M40", POOL: "public"}, b={MODEL: "P100", POOL: "lab"})
NOBODY = PolicySnapshot(Quota(), NODES)


class Used(MemoryLedgers):
    """Test ledgers in which each namespace has the given usage."""

    def __init__(self, **used: Charge | Usage | VcudaError) -> None:
        super().__init__()
        self._used = used

    async def usage(self, namespace: str, *_: object) -> Mapping[str, Usage]:
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
    teams: str | None = None,
    **fields: Any,
) -> AdmissionResponse:
    written_keys = {"gpu_quota": document, "gpu_teams": teams}
    data = {key: text for key, text in written_keys.items() if text is not None}
    manifest = {"kind": "ConfigMap", "metadata": {"name": "gpuquota"}, "data": data}
    given = {"kind": CONFIG_MAP, "namespace": "kube-system", "name": "gpuquota", "operation": "UPDATE", **fields}
    sent = review(manifest, **given), PLACE, policy, ledgers or Used()
    return written(asyncio.run(check_edit(*sent, callers_known=callers_known, namespaces=namespaces, pods=pods)))


# Tests of which edits of which objects are checked


@pytest.mark.parametrize(
    "fields",
    [{"name": "other"}, {"namespace": "default"}, {"kind": GroupVersionKind(version="v1", kind="Secret")}],
    ids=["another name", "another namespace", "another kind"],
)
def test_other_objects_are_ignored(fields: dict[str, Any]) -> None:
    assert edited("{{{", **fields) == AdmissionResponse("ignored")


def config_map(document: str | None, models: str = "{}", **labels: str) -> msgspec.Raw:
    """Return the quota ConfigMap with this document and these `gpu_models`; JSON null without a document."""
    metadata = {"name": "gpuquota", "labels": {f"quota.vcuda.io/{key}": value for key, value in labels.items()}}
    data = {"gpu_quota": document, "gpu_models": models}
    return msgspec.Raw(msgspec.json.encode({"metadata": metadata, "data": data} if document else None))


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
    """The old object has the label, so the API server calls the webhook for this edit, but not for later edits."""
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


# Tests of reviews that anybody may have sent. They are possible if the webhook runs without --client-ca.


def test_an_unknown_caller_learns_nothing_of_a_namespace_and_logs_no_edit() -> None:
    secret = PolicySnapshot(Quota({"secret": NamespaceQuota({"M40": Limit(800)})}), NODES)
    used, names = Used(team_a=Charge(900)), lambda: pytest.fail("the namespaces were listed")
    with capture_logs() as logged:
        answer = edited("team-a: {quota: {M40: 1}}", secret, used, names, callers_known=False)
    assert (answer, logged) == (AdmissionResponse("quota-accepted", warnings=[]), [])


def test_the_first_quota_is_warned_of_limits_above_the_cards() -> None:
    cards = PolicySnapshot(Quota(), nodes(a={MODEL: "M40", COUNT_LABEL: "4"}))
    for callers_known in (True, False):
        told = edited("team-a: {quota: {M40: 8}}", cards, callers_known=callers_known, operation="CREATE").warnings
        assert "team-a.quota.M40: the limit is raised from 0 cards to 8 cards, but the nodes have 4 cards" in told


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
    new = "team-a: {mode: warn, quota: {M40: 8, X: 1}}"
    answer = edited(new, callers_known=False, old_object=config_map(before))
    assert answer.warnings == [*told, f"team-a.quota.X: {no_node('X')}"]
