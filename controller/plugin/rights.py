"""Checks for ``kubectl gpuquota doctor`` that the ServiceAccounts exist and have their key rights.

RBAC grants a role as a whole. So a few rights of each role show whether the role and its binding exist.
"""

import datetime
from collections.abc import Iterator, Mapping

import msgspec

from controller.plugin.installation import CERTIFICATES, CONTROLLER, SECRET, WEBHOOK, Installation, Place

_REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
_TOKEN_LIFE = datetime.timedelta(hours=1)
"""The time within which kubelet replaces the token of a running pod."""


def fault_of_account(seen: Installation, account: str) -> str:
    """Return why the API server rejects the account's pods with status 401; empty if it accepts them.

    A SubjectAccessReview does not show this fault, because it does not need the account.
    """
    found = seen.account(account)
    if found is None:
        return (
            f"ServiceAccount {account} does not exist, so the API server rejects every request of its pods (HTTP 401)"
        )
    created = datetime.datetime.fromisoformat(found["metadata"]["creationTimestamp"])
    # The pods of a Job need no check, because the Job replaces a failed pod.
    if account == CERTIFICATES or datetime.datetime.now(datetime.UTC) - created > _TOKEN_LIFE:
        return ""
    pods = (each["metadata"]["creationTimestamp"] for each in seen.pods(account).values())
    if any(datetime.datetime.fromisoformat(each) < created for each in pods):
        return f"ServiceAccount {account} was created again, so tokens of older pods are invalid"
    return ""


def missing_rights(seen: Installation, account: str) -> Iterator[str]:
    """Yield each key right that the account lacks, for example ``list nodes``.

    Namespaces that are not active are left out, because they have no roles. Raises VcudaError if the API server does
    not answer, and Forbidden if the user must not create SubjectAccessReviews.
    """
    for where, group, resource, verbs, name in _key_rights(seen.place)[account]:
        if not (where and seen.fault_of_namespace(where)):
            attributes = {"namespace": where, "group": group, "resource": resource, "name": name}
            lacking = [verb for verb in verbs if not _may(seen, account, {**attributes, "verb": verb})]
            if lacking:
                yield f"{', '.join(lacking)} {resource}{where and f' in namespace {where}'}"


def _key_rights(place: Place) -> Mapping[str, tuple[tuple[str, str, str, tuple[str, ...], str], ...]]:
    """Return the rights by account: namespace, API group, resource, verbs, and name. Empty values mean any."""
    namespace, name, _ = place.quota
    return {
        WEBHOOK: (
            (place.ledger_namespace, "", "configmaps", ("get", "create", "update"), ""),
            (namespace, "", "configmaps", ("list",), name),
            ("", "", "nodes", ("list",), ""),
            ("", "", "pods", ("list",), ""),
        ),
        CONTROLLER: (
            (place.ledger_namespace, "", "configmaps", ("list", "update"), ""),
            (namespace, "", "configmaps", ("list",), name),
            (place.system_namespace, "coordination.k8s.io", "leases", ("update",), CONTROLLER),
            ("", "", "pods", ("list",), ""),
            ("", "", "namespaces", ("patch",), ""),
        ),
        CERTIFICATES: (
            (place.system_namespace, "", "secrets", ("get",), SECRET),
            ("", "admissionregistration.k8s.io", "validatingwebhookconfigurations", ("list",), ""),
        ),
    }


def _may(seen: Installation, account: str, attributes: Mapping[str, str]) -> bool:
    everybody = "system:serviceaccounts"
    spec = {
        "user": f"system:serviceaccount:{seen.system}:{account}",
        "groups": [everybody, f"{everybody}:{seen.system}", "system:authenticated"],
        "resourceAttributes": attributes,
    }
    body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
    answer = msgspec.json.decode(seen.kube.post(_REVIEWS, msgspec.json.encode(body)))
    return answer["status"]["allowed"] is True
