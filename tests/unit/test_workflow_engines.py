"""Tests that a rejection for lack of quota has the words and the status after which other projects retry."""

import asyncio
from collections.abc import Callable, Mapping
from http import HTTPStatus
from unittest import mock

import pytest

from tests import builders
from tests.both_calls import creation
from tests.builders import pod_of_cores
from tests.tables import cases
from tools.reference import claims, pods
from tools.reviews import validate
from vcuda.admission_review import AdmissionResponse, Outcome
from vcuda.ledger.ledger import Rejected
from vcuda.quota.model import Charge, Limit, NamespaceQuota, Usage
from vcuda.quota.rejections import OVER_QUOTA, reports_shortage
from vcuda.quota.shortage import Shortage
from webhook.ledger.charging import CROWDED, Decision, PutOff
from webhook.ledger.namespace_ledger import TOO_MANY, UNSURE
from webhook.review.answers import written
from webhook.review.decisions import Rejection

RULES: Mapping[str, Callable[[int, str], bool]] = {
    # workflow/util (isExceededQuotaErr): the error is transient, so the workflow creates the pod again.
    "Argo Workflows": lambda status, text: status == HTTPStatus.FORBIDDEN and "exceeded quota" in text,
    # pkg/reconciler/taskrun (isExceededResourceQuotaError): the TaskRun stays pending.
    "Tekton": lambda status, text: status == HTTPStatus.FORBIDDEN and "exceeded quota" in text,
    # KubernetesExecutor (_handle_pod_publish_error): the task is published again.
    "Airflow": lambda status, text: status == HTTPStatus.FORBIDDEN and "exceeded quota" in text,
    # flyteplugins (IsResourceQuotaExceeded): the task waits for resources.
    "Flyte": lambda status, text: status == HTTPStatus.FORBIDDEN and "exceeded quota" in text,
    # actions-runner-controller, pull request 4305: the runner is created again.
    "GitHub's runner controller": lambda status, text: status == HTTPStatus.FORBIDDEN and "exceeded quota:" in text,
}
"""For each project, whether it waits after an answer to the creation of a pod. Otherwise its workload fails."""

LIMIT = Limit(800)


def short(asked: int = 200, used: int = 800, **usage: Charge) -> Shortage:
    return Shortage("M40", Charge(asked), Usage(Charge(used), **usage), LIMIT)


PART = Charge(100)
WAITED_FOR: Mapping[str, Decision] = {
    "full": Rejected(short()),
    "full, with deleted pods": Rejected(short(100, terminating=PART)),
    "pending": PutOff((short(100, pending=PART),)),
    "reserved by a dead replica": PutOff((short(100, reserved=PART),)),
    "deleted": PutOff((short(100, terminating=PART),)),
    "deleted and not recounted": PutOff((short(),)),
    "not counted": PutOff((short(),), counted=False),
    "too many pending charges": CROWDED,
}


def answer_to(decision: Decision) -> AdmissionResponse:
    ledgers = mock.Mock(charge=mock.AsyncMock(return_value=decision))
    policy = builders.policy_for(NamespaceQuota({"M40": LIMIT}))
    return asyncio.run(validate(creation(pod_of_cores(200), policy, ledgers)))


@pytest.mark.parametrize("project", RULES)
@pytest.mark.parametrize("name", WAITED_FOR)
def test_every_project_waits_after_a_rejection_that_ends_when_quota_is_free(name: str, project: str) -> None:
    answer = answer_to(WAITED_FOR[name])
    assert answer.message.startswith("exceeded quota: ")
    assert RULES[project](answer.status, answer.message)
    assert answer.retry_after is None


@pytest.mark.parametrize("outcome", Outcome)
def test_a_rejection_for_lack_of_quota_says_so_by_its_outcome_and_by_its_words(outcome: Outcome) -> None:
    assert reports_shortage(written(Rejection(outcome, "why")).message) is outcome.lacks_quota


@pytest.mark.parametrize("name", WAITED_FOR)
def test_the_outcome_tells_that_quota_is_missing(name: str) -> None:
    assert Outcome(answer_to(WAITED_FOR[name]).outcome).lacks_quota


@pytest.mark.parametrize("project", RULES)
def test_no_project_waits_for_a_request_that_can_never_fit(project: str) -> None:
    answer = answer_to(Rejected(short(900, 0)))
    assert answer.message.endswith("limited: 8, can never fit")
    assert not RULES[project](answer.status, answer.message)


@pytest.mark.parametrize("project", RULES)
def test_a_project_waits_after_a_message_of_the_reference_only_if_quota_is_missing(project: str) -> None:
    told = [each.message for chapter in (*pods.chapters(), *claims.chapters()) for each in chapter.messages]
    waits = [message for message in told if RULES[project](HTTPStatus.FORBIDDEN, message)]
    assert waits == [message for message in told if message.startswith(f"{OVER_QUOTA}: ")]
    assert all(map(reports_shortage, waits))


@cases(
    "decision",
    a_shortage=PutOff((short(),), soon=True),
    many_charges_at_once=TOO_MANY,
    an_unknown_outcome=UNSURE,
)
def test_every_429_says_when_to_retry(decision: Decision) -> None:
    """client-go repeats a request by itself only after an answer with status 429 and the header Retry-After."""
    answer = answer_to(decision)
    assert (answer.status, answer.retry_after) == (HTTPStatus.TOO_MANY_REQUESTS, 1)
