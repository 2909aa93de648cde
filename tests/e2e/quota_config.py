"""The quota ConfigMap of a test. After each edit the test waits until every replica uses it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus

from tests.e2e.cluster import Cluster, Json
from tests.e2e.rest import Answer, Rest
from tests.processes import WebhookProcess

KEY = "gpu_quota"
CONFIG = {"quota.vcuda.io/config": "true"}
"""The label by which the API server calls /quota for an edit."""


@dataclass(frozen=True)
class QuotaConfigMap:
    """The ConfigMap ``name`` in ``namespace``, created with ``labels``. ``readers`` are the replicas that watch it.

    ``further`` are keys in addition to the quota.
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
        """The stored quota by namespace. It is empty if there is no ConfigMap."""
        found = self.rest.send("GET", self.path)
        if found.status == HTTPStatus.NOT_FOUND:
            return {}
        document: Json = json.loads(found.ok()["data"][KEY])
        return document

    def limit(self, **entries: Json) -> None:
        """Add these entries, or replace them. Return when every replica uses them."""
        self.limit_anew(**{**self.document(), **entries})

    def limit_anew(self, **entries: Json) -> None:
        """Replace the whole document by these entries. Return when every replica uses it."""
        self.await_read(self.write(json.dumps(entries)).ok()["metadata"]["resourceVersion"])

    def lift(self, *namespaces: str) -> None:
        """Remove the entries of these namespaces. Return when no replica uses them."""
        self.limit_anew(**{name: entry for name, entry in self.document().items() if name not in namespaces})

    @contextmanager
    def limited(self, **entries: Json) -> Iterator[None]:
        """Add the entries during the ``with`` statement."""
        self.limit(**entries)
        try:
            yield
        finally:
            self.lift(*entries)

    def write(self, text: str) -> Answer:
        """Store ``text``, which may be malformed, as the document. Return the answer without waiting for replicas."""
        answer = self.rest.send("POST", self.collection, self.manifest(text))
        replacing = answer.status == HTTPStatus.CONFLICT
        return self.rest.send("PUT", self.path, self.manifest(text)) if replacing else answer

    def await_read(self, version: str) -> None:
        """Return when every replica uses the document of ``version``, or of a later one."""
        for reader in self.readers:
            reader.await_log("quota read", lambda line: int(line["version"]) >= int(version))

    def manifest(self, text: str) -> Json:
        """Return the ConfigMap as a person writes it, with ``text`` as the document."""
        metadata = {"namespace": self.namespace, "name": self.name, "labels": dict(self.labels)}
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {KEY: text, **self.further}}


def named_quota(cluster: Cluster) -> QuotaConfigMap:
    """The quota ConfigMap that the manifests name. It is empty, and its edits are not checked."""
    quota = QuotaConfigMap(cluster.rest, "kube-system", "gpuquota", labels={})
    quota.write("{}").ok()
    return quota
