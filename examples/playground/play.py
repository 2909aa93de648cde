"""Sends the changes of the teams' workloads to the API server, and counts running and rejected pods."""

import contextlib
import datetime
import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from controller.seen_events import CLAIM_REASON, REASON, SeenEvent, merge_by_workload, read_rejection
from examples.playground.teams import TEAMS, Change, Scale, changes, job_manifest
from tools.component import Component
from vcuda.errors import VcudaError
from vcuda.kube import MERGE_PATCH, Kube

CHANGE_SECONDS = 4.0
"""Seconds between two changes of the teams' workloads."""

NAMESPACES = frozenset(team.namespace for team in TEAMS)


class PartEnded(Exception):
    """Raised if a process of the playground ends by itself. The message has the last lines of the log."""


def play(kube: Kube, parts: Sequence[Component], seed: int, seconds: float | None) -> None:
    """Change the teams' workloads for ``seconds`` seconds, or without end if it is None.

    Raises PartEnded if a process of the playground ends.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    for change in changes(seed):
        # A change fails if the user has deleted the Deployment or the namespace. The change is then dropped.
        with contextlib.suppress(VcudaError):
            make(kube, change)
        left = CHANGE_SECONDS if deadline is None else deadline - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(left, CHANGE_SECONDS))
        check_running(parts)


def make(kube: Kube, change: Change) -> None:
    """Send a change to the API server. Raises VcudaError if it is rejected."""
    if isinstance(change, Scale):
        path = f"/apis/apps/v1/namespaces/{change.namespace}/deployments/{change.deployment}"
        kube.patch(path, msgspec.json.encode({"spec": {"replicas": change.replicas}}), MERGE_PATCH)
    else:
        path = f"/apis/batch/v1/namespaces/{change.namespace}/jobs"
        kube.post(path, msgspec.json.encode(job_manifest(change)))


def check_running(parts: Iterable[Component]) -> None:
    for part in parts:
        if not part.running:
            raise PartEnded(part.failure())


def count_running(kube: Kube) -> int:
    """Return the number of the teams' running pods."""
    pages = (
        page
        for namespace in NAMESPACES
        for page in kube.list_pages(f"/api/v1/namespaces/{namespace}/pods", {"fieldSelector": "status.phase=Running"})
    )
    return sum(len(page.items) for page in pages)


def count_rejected(kube: Kube) -> int:
    """Return the number of the teams' workloads that have a rejected pod."""
    now = datetime.datetime.now(datetime.UTC)
    reasons = [f"reason={reason}" for reason in (REASON, CLAIM_REASON)]
    pages = (page for reason in reasons for page in kube.list_pages("/api/v1/events", {"fieldSelector": reason}))
    events = (msgspec.json.decode(raw, type=dict[str, Any]) for page in pages for raw in page.items)
    rejected = filter(None, (read_rejection(SeenEvent.of(event, now)) for event in events))
    return sum(each.namespace in NAMESPACES for each in merge_by_workload(rejected))
