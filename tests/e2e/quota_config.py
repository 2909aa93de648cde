"""The quota ConfigMap of a test. Its methods edit the quota, and wait until every replica uses the edit."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus

from tests.e2e.cluster import Cluster, Json
from tests.e2e.rest import Answer, Rest
from tests.processes import WebhookProcess

KEY, TEAMS = "gpu_quota", "gpu_teams"
CONFIG = {"quota.vcuda.io/config": "true"}
"""The label of the quota ConfigMaps whose edits the API server sends to /quota for a check."""


@dataclass(frozen=True)
class QuotaConfigMap:
    """A quota ConfigMap in a cluster.

    ``namespace``, ``name``, ``labels``: its metadata. ``readers``: the webhook replicas that use it. ``further``: the
    texts of its other keys, such as `gpu_models`.
    """

    rest: Rest
    namespace: str
    name: str
    labels: Mapping[str, str] = field(default_factory=lambda: dict(CONFIG))
    readers: Sequence[WebhookProcess] = ()
    further: Mapping[str, str] = field(default_factory=dict)

    @property
    def collection(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/configmaps"

    @property
    def path(self) -> str:
        return f"{self.collection}/{self.name}"

    def document(self) -> Json:
        found = self.rest.send("GET", self.path)
        if found.status == HTTPStatus.NOT_FOUND:
            return {}
        document: Json = json.loads(found.ok()["data"][KEY])
        return document

    def limit(self, **entries: Json) -> None:
        """Add or replace the quota entries of these namespaces. Return when every replica uses the new entries."""
        self.limit_anew(**{**self.document(), **entries})

    def limit_anew(self, **entries: Json) -> None:
        """Replace the whole quota document by these entries. Return when every replica uses it."""
        self.await_read(self.write(json.dumps(entries)).ok()["metadata"]["resourceVersion"])

    def lift(self, *namespaces: str) -> None:
        """Remove the quota entries of these namespaces. Return when no replica uses them any more."""
        self.limit_anew(**{name: entry for name, entry in self.document().items() if name not in namespaces})

    def delete(self) -> None:
        """Delete the ConfigMap. A policy of manifests/base rejects this until the document is empty."""
        self.write("{}").ok()
        self.rest.send("DELETE", self.path).ok()

    @contextmanager
    def limited(self, **entries: Json) -> Iterator[None]:
        self.limit(**entries)
        try:
            yield
        finally:
            self.lift(*entries)

    def write(self, text: str) -> Answer:
        """Store ``text`` as the quota document, even if it is malformed. Do not wait for the replicas."""
        answer = self.rest.send("POST", self.collection, self.manifest(text))
        replacing = answer.status == HTTPStatus.CONFLICT
        return self.rest.send("PUT", self.path, self.manifest(text)) if replacing else answer

    def await_read(self, version: str) -> None:
        """Return when every replica uses the ConfigMap with this resourceVersion, or a later version."""
        for reader in self.readers:
            reader.await_log("quota read", lambda line: int(line["version"]) >= int(version))

    def manifest(self, text: str) -> Json:
        metadata = {"namespace": self.namespace, "name": self.name, "labels": dict(self.labels)}
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {KEY: text, **self.further}}


def named_quota(cluster: Cluster) -> QuotaConfigMap:
    """Create an empty quota with the name in the manifests. Without a label, /quota does not check its edits."""
    quota = QuotaConfigMap(cluster.rest, "kube-system", "gpuquota", labels={})
    quota.write("{}").ok()
    return quota
