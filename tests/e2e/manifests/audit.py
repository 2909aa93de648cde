"""Compares the requests in the API server's audit log with the RBAC rules of the accounts that sent these requests."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.cluster import Json


@dataclass(frozen=True)
class Asked:
    """A kind of request to the API server.

    An empty ``namespace`` means all namespaces, and an empty ``name`` all objects.
    """

    verb: str
    group: str
    resource: str
    namespace: str
    name: str


@dataclass(frozen=True)
class Permission:
    """One rule of a Role or ClusterRole that is bound to a ServiceAccount.

    ``kind``, ``namespace``, ``role``: the kind, namespace and name of the role. The namespace of a ClusterRole is
    empty.
    ``index``: the position of the rule in the role.
    """

    account: str
    kind: str
    namespace: str
    role: str
    index: int
    rule: Json

    def allows(self, asked: Asked) -> bool:
        names = self.rule.get("resourceNames")
        return (
            self.namespace in ("", asked.namespace)
            and asked.verb in self.rule["verbs"]
            and asked.group in self.rule["apiGroups"]
            and asked.resource in self.rule["resources"]
            and (not names or asked.name in names)
        )

    def __str__(self) -> str:
        where = f"{self.kind} {self.namespace}/{self.role}" if self.namespace else f"{self.kind} {self.role}"
        return f"{where} rule {self.index}: {json.dumps(self.rule, sort_keys=True)}"


@dataclass(frozen=True)
class AuditLog:
    """The audit log of the API server, at level Metadata: the part of ``file`` from byte ``start`` on."""

    file: Path
    start: int

    def requests(self, user: str) -> set[Asked]:
        """Return every kind of request that ``user`` sent and RBAC permitted, including requests that failed."""
        return {asked_in(event) for event in self._events() if event["user"]["username"] == user and was_allowed(event)}

    def rejected(self, user: str) -> set[Asked]:
        events = [event for event in self._events() if event["user"]["username"] == user and not was_allowed(event)]
        return {asked_in(event) for event in events}

    def _events(self) -> Iterator[Json]:
        for line in self.file.read_bytes()[self.start :].splitlines():
            event = json.loads(line)
            if "objectRef" in event:
                yield event


def was_allowed(event: Json) -> bool:
    return bool(event["annotations"]["authorization.k8s.io/decision"] == "allow")


def asked_in(event: Json) -> Asked:
    about = event["objectRef"]
    resource = "/".join(filter(None, [about["resource"], about.get("subresource")]))
    return Asked(event["verb"], about.get("apiGroup", ""), resource, about.get("namespace", ""), about.get("name", ""))


def permissions(objects: Sequence[Json], account: str) -> list[Permission]:
    """Return every RBAC rule that the manifests bind to this ServiceAccount. Kubernetes' own roles are left out."""
    roles = {
        (each["kind"], each["metadata"].get("namespace", ""), each["metadata"]["name"]): each["rules"]
        for each in objects
        if each["kind"] in ("Role", "ClusterRole")
    }
    bound = [each for each in bindings(objects) if [subject["name"] for subject in each["subjects"]] == [account]]
    keys = [(each["roleRef"]["kind"], each["metadata"].get("namespace", ""), each["roleRef"]["name"]) for each in bound]
    return [Permission(account, *key, index, rule) for key in keys for index, rule in enumerate(roles.get(key, ()))]


def bindings(objects: Sequence[Json]) -> list[Json]:
    return [each for each in objects if each["kind"] in ("RoleBinding", "ClusterRoleBinding")]


def spare(permission: Permission, requests: set[Asked], rules: Sequence[Permission]) -> set[tuple[str, str]]:
    """Return the pairs (verb, resource) of the rule that no request needs.

    A request does not need the rule if another of the ``rules`` of the same account permits the request.
    """
    others = [each for each in rules if each.account == permission.account and each != permission]
    needed = {each for each in requests if permission.allows(each) and not any(other.allows(each) for other in others)}
    held = {(verb, resource) for verb in permission.rule["verbs"] for resource in permission.rule["resources"]}
    return held - {(each.verb, each.resource) for each in needed}
