"""A tenant's pods with node selections of the maximum size do not delay the webhook's answers to other tenants."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus

from tests.builders import required, requirement, term
from tests.e2e.cluster import Cluster, Json
from tests.e2e.installation import Installation, charged, tenant_of
from tests.e2e.ledgers import await_ledger
from tests.integration.reviews import card_pod, with_spec

BOUNDS = required(term(*(requirement("rank", "Gt", str(n)) for n in range(490)), requirement("rank", "Lt", "0")))
"""A node selection that matches no node. In an earlier version the webhook needed minutes to prove that."""
SELECTOR = {f"key-{n}": "v" for n in range(40_000)}
TERMS = required(*(term(requirement(f"key-{n}", "Exists")) for n in range(50)))
MANY_TERMS = required(*(term(requirement(f"key-{n}", "Exists")) for n in range(5000)))


def of_tenant(name: str, namespace: str, **spec: object) -> Json:
    return with_spec(card_pod(name, namespace), **spec)


def test_pods_with_a_huge_node_selection_do_not_delay_other_pods(
    cluster: Cluster, installation: Installation, team: Callable[[Json], str]
) -> None:
    namespace, other = team({"quota": {"M40": 50, "P100": 1}}), team({"quota": {"M40": 50}})
    with tenant_of(cluster, namespace) as tenant, ThreadPoolExecutor(8) as many:
        impossible = [of_tenant(f"bounds-{n}", namespace, affinity=BOUNDS) for n in range(41)]
        refused = [many.submit(tenant.try_create, pod) for pod in impossible]
        large = [of_tenant(f"selector-{n}", namespace, nodeSelector=SELECTOR, affinity=TERMS) for n in range(3)]
        large += [of_tenant(f"terms-{n}", namespace, affinity=MANY_TERMS) for n in range(3)]
        created = [many.submit(tenant.create, pod) for pod in large]
        beside = [many.submit(cluster.create, card_pod(f"pod-{n}", other)) for n in range(20)]
        for answer in (each.result() for each in refused):
            assert answer.status == HTTPStatus.FORBIDDEN
            assert f"this pod may use no GPU model in namespace {namespace}" in answer.message
        stored = [each.result() for each in (*created, *beside)]
    assert {pod["metadata"]["annotations"]["quota.vcuda.io/model"] for pod in stored} == {"M40"}
    # The ledger also charges the replica's reservation until the replica releases it.
    await_ledger(installation, namespace, lambda ledger: charged(ledger) == {"M40": 600})
    await_ledger(installation, other, lambda ledger: charged(ledger) == {"M40": 2000})
