"""Tests that the client tells a missing right from a rejection by an API server that has just started.

For some seconds after its start, an API server may reject permitted calls.
"""

import pytest

from tests.replicas import Clock
from vcuda.kube.authorization import FORGET_SECONDS, GRACE_SECONDS, AuthorizerGrace

LIST = 'configmaps is forbidden: User "b" cannot list resource "configmaps" in API group "" in the namespace "c"'
GET = LIST.replace("cannot list", "cannot get").replace("configmaps is", 'configmaps "gpu-ledger-a" is')


@pytest.fixture
def grace(clock: Clock) -> AuthorizerGrace:
    return AuthorizerGrace(clock.monotonic)


def test_a_missing_right_is_named_after_the_grace(grace: AuthorizerGrace, clock: Clock) -> None:
    found = []
    for _ in range(8):
        found.append(grace.covers(LIST))
        clock.pass_by(GRACE_SECONDS / 4)
    assert found == [True] * 4 + [False] * 4


def test_the_grace_of_one_right_does_not_extend_that_of_another(grace: AuthorizerGrace, clock: Clock) -> None:
    grace.covers(LIST)
    clock.pass_by(GRACE_SECONDS)
    assert grace.covers(GET)
    assert not grace.covers(LIST)


def test_the_next_start_of_an_api_server_has_its_own_grace(grace: AuthorizerGrace, clock: Clock) -> None:
    grace.covers(LIST)
    clock.pass_by(FORGET_SECONDS + 1)
    assert grace.covers(LIST)


@pytest.mark.parametrize(
    "message",
    [
        'pods "a" is forbidden: exceeded quota: gpus, requested: 2, used: 3, limited: 4',
        'admission webhook "other.example.com" denied the request: a is forbidden: User "b" cannot get resource "c"',
        "ValidatingAdmissionPolicy 'ledgers.quota.vcuda.io' with binding 'ledgers.quota.vcuda.io' denied request: no",
        "this account may not patch configmaps",
    ],
)
def test_the_rejection_of_an_admission_plugin_never_passes_by_itself(grace: AuthorizerGrace, message: str) -> None:
    assert not grace.covers(message)


@pytest.mark.parametrize("message", [GET, 'forbidden: User "x" cannot get path "/version"'])
def test_an_object_and_a_path_are_covered_too(grace: AuthorizerGrace, message: str) -> None:
    assert grace.covers(message)
