"""Which of the rights in the manifests are needed: by what was asked for, and by what the API server then refuses.

The API server's audit log tells what each account asked for. A right is needed if one of these requests is covered by
that rule alone; the rule is then really taken away, and the API server asked whether the request may still be made.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from tests.e2e.cluster import TIMEOUT, Cluster
from tests.e2e.manifests.audit import Asked, Permission
from tests.e2e.rest import Json

RBAC = "/apis/rbac.authorization.k8s.io/v1"
REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"


def lists_in_pages(requests: set[Asked]) -> set[Asked]:
    """The LISTs in place of these watches, of an API server that streams lists.

    They are made after a stream that was cut short, and where lists are not streamed, as Kubernetes 1.30 shows.
    """
    return {replace(each, verb="list") for each in requests if each.verb == "watch"}


def needing(permission: Permission, requests: set[Asked], rules: Sequence[Permission]) -> dict[tuple[str, str], Asked]:
    """For each verb and resource of the rule a request that it covers, and no other rule of the account's."""
    others = [each for each in rules if each.account == permission.account and each != permission]
    needed = {each for each in requests if permission.allows(each) and not any(other.allows(each) for other in others)}
    return {(each.verb, each.resource): each for each in sorted(needed, key=str)}


def spare(permission: Permission, requests: set[Asked], rules: Sequence[Permission]) -> set[tuple[str, str]]:
    """The rule's verbs and resources that no request needed."""
    rule = permission.rule
    held = {(verb, resource) for verb in rule["verbs"] for resource in rule["resources"]}
    return held - needing(permission, requests, rules).keys()


def check_refused_without(
    cluster: Cluster, user: str, permission: Permission, requests: set[Asked], rules: Sequence[Permission]
) -> None:
    """Assert that the API server refuses what needs the rule while the rule is away."""
    needed = needing(permission, requests, rules)
    assert needed
    for request in needed.values():
        await_answer(cluster, user, request, allowed=True)
    with without(cluster, permission):
        for request in needed.values():
            await_answer(cluster, user, request, allowed=False)


@contextmanager
def without(cluster: Cluster, permission: Permission) -> Iterator[None]:
    """`with` this, the role lacks the rule."""
    where = f"/namespaces/{permission.namespace}" if permission.namespace else ""
    path = f"{RBAC}{where}/{permission.kind.lower()}s/{permission.role}"
    role = cluster.rest.get(path)
    rules = [each for index, each in enumerate(role["rules"]) if index != permission.index]
    cluster.rest.merge_patch(path, {"rules": rules})
    try:
        yield
    finally:
        cluster.rest.merge_patch(path, {"rules": role["rules"]})


def await_answer(cluster: Cluster, user: str, request: Asked, *, allowed: bool) -> None:
    """Return once the API server's authorizer, which follows the roles by a watch, decides so."""
    deadline = time.monotonic() + TIMEOUT
    while (status := decision(cluster, user, request))["allowed"] is not allowed:
        assert time.monotonic() < deadline, (request, status)
        time.sleep(0.02)


def decision(cluster: Cluster, user: str, request: Asked) -> Json:
    """What a SubjectAccessReview says."""
    status: Json = cluster.rest.send("POST", REVIEWS, request.review(user)).ok()["status"]
    return status
