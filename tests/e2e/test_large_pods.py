"""Tests that a tenant's pods of maximum size are decided or rejected, and do not delay answers to other tenants."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus

import pytest

from tests.builders import required, requirement, term
from tests.e2e.attackers import SELECTIONS
from tests.e2e.cluster import Cluster, Json
from tests.e2e.installation import Installation, charged, tenant_of
from tests.e2e.large_attackers import escaped_pod, heavy_pod
from tests.e2e.ledgers import await_ledger
from tests.integration.reviews import card_pod, with_spec

pytestmark = pytest.mark.one_version

BOUNDS = SELECTIONS[0]
"""A node selection that matches no node. In an earlier version the webhook needed minutes to prove that."""
MANY_TERMS = required(*(term(requirement(f"key-{n}", "Exists")) for n in range(5000)))


def test_pods_with_a_huge_node_selection_do_not_delay_other_pods(
    cluster: Cluster, installation: Installation, team: Callable[[Json], str]
) -> None:
    namespace, other = team({"quota": {"M40": 50, "P100": 1}}), team({"quota": {"M40": 50}})
    with tenant_of(cluster, namespace) as tenant, ThreadPoolExecutor(8) as many:
        impossible = [with_spec(card_pod(f"bounds-{n}", namespace), affinity=BOUNDS) for n in range(41)]
        rejected = [many.submit(tenant.try_create, pod) for pod in impossible]
        large = [heavy_pod(namespace, n) for n in range(3)]
        large += [with_spec(card_pod(f"terms-{n}", namespace), affinity=MANY_TERMS) for n in range(3)]
        created = [many.submit(tenant.create, pod) for pod in large]
        beside = [many.submit(cluster.create, card_pod(f"pod-{n}", other)) for n in range(20)]
        for answer in (each.result() for each in rejected):
            assert answer.status == HTTPStatus.FORBIDDEN
            assert f"this pod may use no GPU model in namespace {namespace}" in answer.message
        stored = [each.result() for each in (*created, *beside)]
    assert {pod["metadata"]["annotations"]["quota.vcuda.io/model"] for pod in stored} == {"M40"}
    # The ledger also charges the replica's reservation, until the replica releases it.
    await_ledger(installation, namespace, lambda ledger: charged(ledger) == {"M40": 600})
    await_ledger(installation, other, lambda ledger: charged(ledger) == {"M40": 2000})


def test_a_pod_whose_review_is_too_large_after_encoding_is_rejected_with_the_reason(
    team: Callable[[Json], str], tenant: Callable[[str], Cluster]
) -> None:
    namespace = team({"quota": {"M40": 50}})
    answer = tenant(namespace).try_create(escaped_pod(namespace, 0))
    assert (answer.status, answer.body["reason"]) == (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "RequestEntityTooLarge")
    assert "has more than 3145728 bytes (3 MiB). In a review, each &, < and > takes six bytes" in answer.message
