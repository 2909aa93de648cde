"""A test double of RBAC. It answers SubjectAccessReviews by the roles and bindings that a test cluster stores."""

from collections.abc import Iterator, Mapping
from typing import Any

Objects = Mapping[str, Mapping[str, Any]]
RBAC = "/apis/rbac.authorization.k8s.io/v1"


def path_of_rule(manifest: Mapping[str, Any]) -> str:
    """Return the path of a ServiceAccount, a role or a binding."""
    metadata, kind = manifest["metadata"], manifest["kind"].lower()
    namespace = f"/namespaces/{metadata['namespace']}" if "namespace" in metadata else ""
    return f"{'/api/v1' if kind == 'serviceaccount' else RBAC}{namespace}/{kind}s/{metadata['name']}"


def is_allowed(objects: Objects, review: Mapping[str, Any]) -> bool:
    spec, asked = review["spec"], review["spec"]["resourceAttributes"]
    return any(_covers(rule, asked) for rule in _rules(objects, spec["user"], asked["namespace"]))


def _rules(objects: Objects, user: str, namespace: str) -> Iterator[Mapping[str, Any]]:
    for scope in {"", f"/namespaces/{namespace}" if namespace else ""}:
        for path, each in objects.items():
            if path.startswith((f"{RBAC}{scope}/rolebindings/", f"{RBAC}{scope}/clusterrolebindings/")) and any(
                user == f"system:serviceaccount:{subject['namespace']}:{subject['name']}"
                for subject in each["subjects"]
            ):
                role = each["roleRef"]
                yield from objects.get(f"{RBAC}{scope}/{role['kind'].lower()}s/{role['name']}", {}).get("rules", ())


def _covers(rule: Mapping[str, Any], asked: Mapping[str, str]) -> bool:
    named = rule.get("resourceNames")
    fields = (("apiGroups", "group"), ("resources", "resource"), ("verbs", "verb"))
    return all(asked[of] in rule[field] for field, of in fields) and (not named or asked["name"] in named)
