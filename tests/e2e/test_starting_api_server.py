"""Tests of an API server that has just started. It rejects permitted calls with 403 until it has read the RBAC roles.

For some time after its first call, each of our programs treats this 403 as temporary.
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http import HTTPStatus
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.installation import account_of, await_ready, running
from tests.e2e.quota_config import QuotaConfigMap
from tests.e2e.steady import in_threads
from tests.integration.reviews import card_pod, pinned, review_of, with_uid
from tests.processes import eventually
from tools.control_plane import ControlPlane
from vcuda.errors import Forbidden, Unavailable, VcudaError
from vcuda.kube import AuthorizerGrace, Kube
from vcuda.quota.rejections import reports_shortage

pytestmark = pytest.mark.timeout(180)

JUST_STARTED = "The API server may have just started, so retry."
STARTS = 15
"""The maximum number of starts of the API server. At least one of them must lead to a 403 for a permitted call."""


@pytest.fixture
def account(cluster: Cluster) -> Iterator[Cluster]:
    with account_of(cluster, "webhook-rbac.yaml", "vcuda-webhook") as account:
        yield account


@contextmanager
def repeating(call: Callable[[], str]) -> Iterator[list[str]]:
    """Repeat ``call`` in a thread during the ``with`` statement. Yield the list to which its results are added."""
    found: list[str] = []

    def repeat(stop: threading.Event) -> None:
        while not stop.wait(0.02):
            found.append(call())

    with in_threads([repeat]):
        yield found


def start_until(control_plane: ControlPlane, found: list[str], wanted: str) -> None:
    """Kill and start the API server repeatedly, until a result contains the text ``wanted``."""
    for _ in range(STARTS):
        with control_plane.apiserver.away(control_plane.apiserver.kill):
            pass
        if any(wanted in each for each in found):
            return
    pytest.fail(f"no start of the API server has shown {wanted!r}: {set(found)}")


def test_a_call_that_a_starting_api_server_rejects_can_be_retried(
    account: Cluster, control_plane: ControlPlane
) -> None:
    with closing(Kube.connect(account.kubeconfig, grace=AuthorizerGrace())) as kube:

        def call() -> str:
            try:
                kube.get("/api/v1/nodes?limit=1&watch=false")
            except VcudaError as error:
                return f"{type(error).__name__} {error}"
            return "answered"

        with repeating(call) as found:
            start_until(control_plane, found, JUST_STARTED)
            eventually(lambda: found[-1] == "answered")
    assert {each.partition(" ")[0] for each in found} <= {"answered", Unavailable.__name__, "TimedOut"}


def test_a_missing_right_is_reported_after_the_grace_period(account: Cluster) -> None:
    now = [0.0]
    with closing(Kube.connect(account.kubeconfig, grace=AuthorizerGrace(lambda: now[0]))) as kube:
        with pytest.raises(Unavailable, match="cannot list resource"):
            kube.get("/api/v1/secrets")
        now[0] += 11
        with pytest.raises(Forbidden, match=r'secrets is forbidden: User ".*" cannot list resource "secrets"'):
            kube.get("/api/v1/secrets")


def test_the_webhook_answers_429_or_503_while_an_api_server_starts(
    cluster: Cluster, account: Cluster, control_plane: ControlPlane, tmp_path: Path
) -> None:
    quota = QuotaConfigMap(cluster.rest, "kube-system", "gpuquota")
    with running(cluster, tmp_path, kubeconfig=account.kubeconfig, quota=quota) as own:
        await_ready(own)
        with own.team({"quota": {"M40": 1}}) as namespace:

            def call() -> str:
                review = review_of(with_uid(pinned(card_pod("train", namespace, cards=2))))
                reply = own.replica.send("POST", "/validate", json.dumps(review))
                text = reply.body.decode()
                if reply.status != HTTPStatus.OK:
                    return f"{reply.status} {text}"
                answer = json.loads(text)["response"]
                return f"{answer['status']['code']} {text}" if not answer["allowed"] else f"admitted {text}"

            with repeating(call) as found:
                start_until(control_plane, found, JUST_STARTED)
                eventually(lambda: reports_shortage(found[-1]), lambda: found[-1])
    assert {each.partition(" ")[0] for each in found} <= {"403", "429", "503"}
    assert all(reports_shortage(each) for each in found if each.startswith("403"))
