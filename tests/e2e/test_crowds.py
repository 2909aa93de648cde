"""Many large reviews at once: other tenants are served, late reviews are dropped, and a denial has the reason."""

from collections.abc import Callable
from http import HTTPStatus

from tests.e2e.cluster import Cluster, Json
from tests.e2e.installation import tenant_of
from tests.e2e.large_attackers import ESCAPED
from tests.integration.reviews import card_pod


def test_a_pod_that_grows_beyond_the_bound_when_it_is_escaped_is_denied_with_the_reason(
    cluster: Cluster, team: Callable[[Json], str]
) -> None:
    """Go writes each & as six bytes: the API server accepts 600 KB of them, and sends 3.6 MB."""
    namespace = team({"quota": {"M40": 50}})
    pod = card_pod("escaped", namespace)
    pod["spec"]["containers"][0] |= ESCAPED
    with tenant_of(cluster, namespace) as tenant:
        answer = tenant.try_create(pod)
    assert (answer.status, answer.body["reason"]) == (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "RequestEntityTooLarge")
    assert "in more than 3145728 bytes (3 MiB): each &, < and > counts as six bytes" in answer.message
