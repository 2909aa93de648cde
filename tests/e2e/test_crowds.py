"""The webhook denies a review that is too large. The answer gives the reason."""

from collections.abc import Callable
from http import HTTPStatus

from tests.e2e.cluster import Cluster, Json
from tests.e2e.installation import tenant_of
from tests.e2e.large_attackers import ESCAPED
from tests.integration.reviews import card_pod


def test_a_pod_whose_review_is_too_large_after_encoding_is_denied_with_the_reason(
    cluster: Cluster, team: Callable[[Json], str]
) -> None:
    """In a review, Go encodes each `&` in six bytes. So a pod with 600 KB of `&` has a review of 3.6 MB."""
    namespace = team({"quota": {"M40": 50}})
    pod = card_pod("escaped", namespace)
    pod["spec"]["containers"][0] |= ESCAPED
    with tenant_of(cluster, namespace) as tenant:
        answer = tenant.try_create(pod)
    assert (answer.status, answer.body["reason"]) == (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "RequestEntityTooLarge")
    assert "has more than 3145728 bytes (3 MiB). In a review, each &, < and > takes six bytes" in answer.message
