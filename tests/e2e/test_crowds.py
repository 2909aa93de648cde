"""Large reviews in crowds: other tenants are served, what is late is dropped, and a denial tells the reason."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from http import HTTPStatus

from urllib3.exceptions import HTTPError

from tests.e2e.cluster import Cluster, Json
from tests.e2e.installation import Installation, await_ledger, charged, tenant_of
from tests.e2e.large_attackers import ESCAPED, HEAVY
from tests.e2e.steady import in_threads
from tests.integration.reviews import card_pod
from tests.processes import eventually
from tests.waiting import PATIENT

CROWD = 32
"""Dry runs at once. A replica takes some tenths of a second for each."""

LARGE = {"example.com/note": "x" * 100_000}


@contextmanager
def crowd(tenant: Cluster, pod: Json, timeouts: Sequence[int] = (30,)) -> Iterator[None]:
    """Send a pod as dry runs, many at once, until the block ends. The block begins when some are answered.

    ``timeouts``: seconds after which the callers give up, in turn.
    """
    answered = threading.Semaphore(0)

    def send(seconds: int, stop: threading.Event) -> None:
        while not stop.is_set():
            with suppress(HTTPError):  # the API server may close the connection when the time is over
                tenant.try_create(pod, dryRun="All", timeout=f"{seconds}s")
            answered.release()

    with in_threads([partial(send, timeouts[number % len(timeouts)]) for number in range(CROWD)]):
        for _ in range(CROWD):
            assert answered.acquire(timeout=PATIENT)
        yield


def test_large_pods_of_other_tenants_are_admitted_beside_a_crowd(
    cluster: Cluster, installation: Installation, team: Callable[[Json], str]
) -> None:
    namespace, other = team({"quota": {"M40": 50}}), team({"quota": {"M40": 50}})
    large = [card_pod(f"large-{number}", other) for number in range(10)]
    for pod in large:
        pod["metadata"]["annotations"] = LARGE
    worker = installation.replica.worker()
    with tenant_of(cluster, namespace) as tenant, crowd(tenant, heavy_pod(namespace)):
        for pod in large:
            cluster.create(pod)
    eventually(lambda: installation.replica.metric("vcuda_large_reviews_waiting") == 0)
    assert installation.replica.worker() == worker
    await_ledger(installation, other, lambda ledger: charged(ledger) == {"M40": 1000})


def heavy_pod(namespace: str) -> Json:
    pod = card_pod("heavy", namespace)
    return {**pod, "spec": {**pod["spec"], **HEAVY}}


def test_of_a_crowd_what_is_late_is_dropped_and_the_next_one_is_decided(
    cluster: Cluster, installation: Installation, team: Callable[[Json], str]
) -> None:
    """The callers give up after one to four seconds.

    On a busy machine the API server may need more than a second before it calls the webhook.
    """
    namespace, replica = team({"quota": {"M40": 50}}), installation.replica
    with tenant_of(cluster, namespace) as tenant:
        with crowd(tenant, heavy_pod(namespace), range(1, 5)):
            replica.await_metric("vcuda_reviews_dropped_total", 1)
        eventually(lambda: replica.metric("vcuda_large_reviews_waiting") == 0)
        tenant.create(heavy_pod(namespace))
    await_ledger(installation, namespace, lambda ledger: charged(ledger) == {"M40": 100})


def test_a_pod_that_grows_beyond_the_bound_when_it_is_escaped_is_denied_with_the_reason(
    cluster: Cluster, team: Callable[[Json], str]
) -> None:
    """Go writes each & as six bytes: the API server takes 600 KB of them, and sends 3.6 MB."""
    namespace = team({"quota": {"M40": 50}})
    pod = card_pod("escaped", namespace)
    pod["spec"]["containers"][0] |= ESCAPED
    with tenant_of(cluster, namespace) as tenant:
        answer = tenant.try_create(pod)
    assert (answer.status, answer.body["reason"]) == (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "RequestEntityTooLarge")
    assert "in more than 3145728 bytes (3 MiB): each &, < and > counts as six bytes" in answer.message
