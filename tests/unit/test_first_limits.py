"""Tests of the warnings about an edit of the quota whose entry `*` limits namespaces for the first time."""

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.tables import cases
from tests.unit.test_quota_edit import NODES, config_map, edited
from vcuda.errors import Dropped, DropReason, Unavailable
from vcuda.k8s_types import Pod
from vcuda.quota.document import parse_quota
from vcuda.quota.model import NamespaceQuota, Quota
from webhook.review import first_limits
from webhook.review.context import PolicySnapshot
from webhook.review.first_limits import MAX_NAMED_NAMESPACES, UNNAMED


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


def test_a_member_of_a_team_is_not_limited_by_the_entry_for_all_others() -> None:
    teams = "infra: {namespaces: [gpu-operator, 'longhorn-*']}"
    answer = edited(f'{ENTRIES}"*": {{quota: {{}}}}', BEFORE, pods=lambda _seconds: iter(RUNNING), teams=teams)
    assert answer.warnings == [f"{REJECTED}other", f'{PASTE}["other"]']


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
    """The clock advances by a third of a second at each reading. So there is no time to judge the last pods."""
    clock = itertools.count(0, 0.3)
    monkeypatch.setattr(first_limits, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    pods = iter([running("a"), *[running(f"n{number}") for number in range(100)]])
    told = edited('"*": {quota: {}}', pods=lambda _seconds: pods).warnings
    assert told[:3] == [OVERDUE, str(UNNAMED), f"{REJECTED}a"]
    assert len(list(pods)) > 90


def test_an_edit_is_accepted_while_the_pods_cannot_be_listed() -> None:
    def silent(_seconds: float) -> Iterator[Pod]:
        raise Unavailable("no answer")

    told = edited('"*": {quota: {}}', pods=silent).warnings
    assert told == ["*: not all pods could be compared with this entry: no answer", str(UNNAMED)]


def test_a_review_that_is_dropped_ends_the_reading_of_the_pods() -> None:
    def dropped(_seconds: float) -> Iterator[Pod]:
        raise Dropped("late", DropReason.LATE)

    with pytest.raises(Dropped):
        edited('"*": {quota: {}}', pods=dropped)


@cases(
    "before, after, told",
    a_creation=(None, '"*": {quota: {}}', [str(UNNAMED)]),
    a_new_entry=("{}", '"*": {quota: {}}', [str(UNNAMED)]),
    fewer_excepted=('"*": {except: [a, b]}', '"*": {except: [a]}', [str(UNNAMED)]),
    as_before=('"*": {except: [a]}', '"*": {quota: {}, except: [a]}', []),
    privileged_pods_allowed=("{}", '"*": {allow: [privileged]}', []),
    no_entry_for_all=("{}", "{}", []),
)
def test_an_unknown_caller_gets_a_warning_without_names_and_no_pod_is_read(
    before: str | None, after: str, told: list[str]
) -> None:
    old = config_map(before)
    answer = edited(after, callers_known=False, old_object=old, pods=lambda _seconds: pytest.fail("pods were listed"))
    assert answer.warnings == told
