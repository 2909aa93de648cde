"""Events on pods that no quota counts: each is told once, and nobody whom the report does not name."""

from __future__ import annotations

from typing import Any

import pytest
import structlog

from controller.auditor import UnpinnedPods
from tests.api_double import ApiDouble, Script, lost_reply, lost_request
from vcuda.allocations.stored_pods import StoredPod
from vcuda.errors import ApiError
from vcuda.ledger.ledger import NamespaceUse
from vcuda.quota.model import Charge

REFUSED = ApiError(422, "metadata.name: too long")


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing wait for its turn."""
    for seconds in ("SPACING", "RETRY"):
        monkeypatch.setattr(f"controller.auditor.{seconds}", 0.0)


def pod(name: str, uid: str) -> StoredPod:
    """Return one that is held to no model."""
    return StoredPod(uid, "team-a", name, None, "", True, Charge(100), "")


def use(*unpinned: str, mode: str = "enforce") -> NamespaceUse:
    """Return a report that names these pods."""
    return NamespaceUse("team-a", mode, (), unpinned)


def tell(api: ApiDouble, pods: list[StoredPod], *reports: NamespaceUse | None) -> list[Any]:
    """Take the reports one after the other; return what was logged. Another namespace brings them, and the end."""
    unpinned: UnpinnedPods
    left = list(reports)

    def pods_of(namespace: str) -> list[StoredPod]:
        if namespace == "team-a":
            return list(pods)
        if left:
            unpinned.report("team-a", left.pop(0))
        elif not unpinned.due.holds("team-a"):
            unpinned.due.close()
        unpinned.due.add("next")
        return []

    unpinned = UnpinnedPods(api.kube, pods_of)
    unpinned.due.add("next")
    with structlog.testing.capture_logs() as logs:
        unpinned.run()
    return [line["event"] for line in logs]


def about(api: ApiDouble) -> list[tuple[str, str]]:
    """Return the name and uid of the pod that each Event is about."""
    subjects = [event["involvedObject"] for event in api.objects.values()]
    return [(subject["name"], subject["uid"]) for subject in subjects]


def test_a_pod_is_told_once_however_often_it_is_reported(api: ApiDouble) -> None:
    tell(api, [pod("train", "u1"), pod("counted", "u2")], use("train"), use("train"), use("train"))
    assert about(api) == [("train", "u1")]
    assert api.calls == ["POST"]
    (event,) = api.objects.values()
    assert (event["type"], event["reason"]) == ("Warning", "NotCounted")
    assert "the GPU quota of namespace team-a does not count this pod" in event["message"]
    assert event["involvedObject"]["namespace"] == "team-a"


def test_another_leader_says_nothing_twice(api: ApiDouble) -> None:
    for _ in range(2):
        tell(api, [pod("train", "u1")], use("train"))
    assert (about(api), api.calls) == ([("train", "u1")], ["POST", "POST"])


def test_a_pod_made_again_under_its_name_is_told_anew(api: ApiDouble) -> None:
    for uid in ("u1", "u2"):
        tell(api, [pod("train", uid)], use("train"))
    assert about(api) == [("train", "u1"), ("train", "u2")]


@pytest.mark.parametrize(
    "report",
    [
        pytest.param(None, id="no longer limited"),
        pytest.param(use(), id="counted meanwhile"),
        pytest.param(use("train", mode="audit"), id="a quota that only audits"),
    ],
)
def test_nobody_else_is_told(api: ApiDouble, report: NamespaceUse | None) -> None:
    tell(api, [pod("train", "u1")], report)
    assert api.calls == []


@pytest.mark.parametrize("lost", [lost_request, lost_reply])
def test_an_event_that_may_not_have_been_written_is_tried_again(api: ApiDouble, lost: Any) -> None:
    api.deliver = Script(lost)
    logged = tell(api, [pod("train", "u1")], use("train"))
    assert logged[0] == "event not written"
    assert about(api) == [("train", "u1")]


def test_a_refusal_is_told_once_and_holds_up_no_other_pod(api: ApiDouble) -> None:
    def refused(*_: Any) -> bytes:
        raise REFUSED

    api.deliver = Script(refused)
    logged = tell(
        api, [pod("train-0", "u1"), pod("train-1", "u2")], use("train-0", "train-1"), use("train-0", "train-1")
    )
    assert sorted(logged) == ["event refused", "told that a pod is not counted"]
    assert len(about(api)) == 1
