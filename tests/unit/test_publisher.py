"""What becomes of a report that cannot be published."""

from __future__ import annotations

import itertools

import pytest
import structlog

from controller.publisher import Publisher
from tests.api_double import ApiDouble, Effect, lost_reply
from vcuda.errors import ApiError, Cause, NotFound, VcudaError
from vcuda.ledger.ledger import NamespaceUse

TERMINATING = ApiError(
    403,
    'configmaps "gpu-quota-usage" is forbidden: unable to create new content in namespace team-a because it is being '
    "terminated",
    (Cause("NamespaceTerminating", "namespace team-a is being terminated"),),
)
FORBIDDEN = ApiError(403, 'User "nobody" cannot create resource "configmaps" in API group "" in the namespace "team-a"')


@pytest.fixture
def publisher(api: ApiDouble, monkeypatch: pytest.MonkeyPatch) -> Publisher:
    """Return one that waits for nothing."""
    for seconds in ("MIN_INTERVAL_SECONDS", "RETRY_SECONDS"):
        monkeypatch.setattr(f"controller.workqueue.{seconds}", 0.0)
    return Publisher(api.kube)


def publish_beside_others(api: ApiDouble, publisher: Publisher, refusal: VcudaError) -> list[str]:
    """Publish in team-a, refused once, and in two namespaces one after the other; return what was warned of.

    The second of them is due after team-a's next try, if there is one, and ends the loop.
    """
    creations = itertools.count()

    def deliver(method: str, _timeout: float, effect: Effect) -> bytes:
        creation = next(creations) if method == "POST" else None
        if creation == 0:
            raise refusal
        if creation == 1:
            publisher.report("last", NamespaceUse("last", "enforce", ()))
        answer = effect()
        if "last" in published_in(api):
            publisher.reconciler.stop()
        return answer

    api.deliver = deliver
    for namespace in ("team-a", "team-b"):
        publisher.report(namespace, NamespaceUse(namespace, "enforce", ()))
    with structlog.testing.capture_logs() as logs:
        publisher.reconciler.run()
    return [line["event"] for line in logs if line["log_level"] == "warning"]


def published_in(api: ApiDouble) -> list[str]:
    """Return the namespaces that hold a report."""
    return [path.split("/")[4] for path in api.objects]


@pytest.mark.parametrize("refusal", [TERMINATING, NotFound(404, "no such namespace")], ids=["terminating", "gone"])
def test_a_namespace_that_is_going_is_left_alone_without_a_word(
    api: ApiDouble, publisher: Publisher, refusal: VcudaError
) -> None:
    assert publish_beside_others(api, publisher, refusal) == []
    assert published_in(api) == ["team-b", "last"]


def test_any_other_refusal_is_told_and_tried_again(api: ApiDouble, publisher: Publisher) -> None:
    assert publish_beside_others(api, publisher, FORBIDDEN) == ["usage not published"]
    assert published_in(api) == ["team-b", "team-a", "last"]


def test_a_write_whose_answer_is_lost_is_made_again(api: ApiDouble, publisher: Publisher) -> None:
    """The second try finds what the first has stored."""
    api.deliver = lambda *call: lost_reply(*call) if call[0] == "POST" else call[2]()
    with structlog.testing.capture_logs() as logs:
        publisher.report("team-a", NamespaceUse("team-a", "enforce", ()))
        close_with_a_patch(api, publisher)
        publisher.reconciler.run()
    assert [line["event"] for line in logs] == ["usage not published"]
    assert published_in(api) == ["team-a"]


def close_with_a_patch(api: ApiDouble, publisher: Publisher) -> None:
    """End the loop with the first patch that finds its object."""
    before = api.deliver

    def deliver(method: str, timeout: float, effect: Effect) -> bytes:
        answer = before(method, timeout, effect)
        if method == "PATCH":
            publisher.reconciler.stop()
        return answer

    api.deliver = deliver
