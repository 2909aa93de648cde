"""What becomes of a report that cannot be published."""

import pytest
import structlog

from controller.publisher import Publisher
from tests.api_double import ApiDouble, Delivery, Effect, Script, delivered, lost_reply
from vcuda.errors import ApiError, Cause, NotFound, VcudaError
from vcuda.ledger.ledger import NamespaceUse

TERMINATING = ApiError(
    403,
    'configmaps "gpu-quota-usage" is forbidden: unable to create new content in namespace team-a because it is being '
    "terminated",
    (Cause("NamespaceTerminating", "namespace team-a is being terminated"),),
)
FORBIDDEN = ApiError(403, 'User "nobody" cannot create resource "configmaps" in API group "" in the namespace "team-a"')
USE = NamespaceUse("team-a", "enforce", ())


@pytest.fixture
def publisher(api: ApiDouble) -> Publisher:
    publisher = Publisher(api.kube)
    publisher.report("team-a", USE)
    return publisher


def publish(publisher: Publisher, times: int = 1) -> list[str]:
    """Publish in team-a so many times; return what was warned of."""
    with structlog.testing.capture_logs() as logs:
        for _ in range(times):
            publisher.reconciler.turn("team-a")
    return [line["event"] for line in logs if line["log_level"] == "warning"]


def published_in(api: ApiDouble) -> list[str]:
    return [path.split("/")[4] for path in api.objects]


def refused(error: VcudaError) -> Delivery:
    """Return a network whose API server lets nothing be created."""

    def deliver(method: str, _timeout: float, effect: Effect) -> bytes:
        if method == "POST":
            raise error
        return effect()

    return deliver


@pytest.mark.parametrize("refusal", [TERMINATING, NotFound(404, "no such namespace")], ids=["terminating", "gone"])
def test_a_namespace_that_is_going_is_left_alone(api: ApiDouble, publisher: Publisher, refusal: VcudaError) -> None:
    api.deliver = refused(refusal)
    assert publish(publisher) == []


def test_any_other_refusal_is_told_and_tried_again(api: ApiDouble, publisher: Publisher) -> None:
    api.deliver = refused(FORBIDDEN)
    assert publish(publisher) == ["usage not published"]
    api.deliver = delivered
    assert publish(publisher) == []
    assert published_in(api) == ["team-a"]


def test_a_write_whose_answer_is_lost_is_made_again(api: ApiDouble, publisher: Publisher) -> None:
    """The second try finds what the first has stored."""
    api.deliver = Script(lost_reply, methods=("POST",))
    assert publish(publisher, times=2) == ["usage not published"]
    assert (published_in(api), api.calls) == (["team-a"], ["PATCH", "POST", "PATCH"])
