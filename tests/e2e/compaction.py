"""Compacts etcd at once, to make continue tokens expire. The API server itself compacts only every five minutes."""

import base64
import json
import urllib.request
from collections.abc import Mapping
from http import HTTPStatus

from tests.e2e.cluster import Cluster, Json
from tests.processes import eventually
from tools.control_plane import ControlPlane

COMPACT_REVISION = "compact_rev_key"
"""The key in etcd by which API servers share the revision of the last compaction (``etcd3/compact.go``)."""


def token_of(page: bytes) -> str:
    token: str = json.loads(page)["metadata"]["continue"]
    return token


def expire(control_plane: ControlPlane, cluster: Cluster, path: str, query: Mapping[str, str | int]) -> None:
    """Compact etcd, and return when the API server answers the continue token in ``query`` with 410.

    The caller must have written an object after the API server issued the token. From 1.34 on, API servers serve the
    pages of a compacted list from a snapshot of their cache. Every 15 s they read the last compacted revision from a
    key in etcd, and drop older snapshots. This function writes that key, as another API server would do.
    """
    version = int(cluster.rest.get("/api/v1/namespaces")["metadata"]["resourceVersion"])
    call_etcd(control_plane, "put", {"key": encoded(COMPACT_REVISION), "value": encoded(str(version))})
    call_etcd(control_plane, "compaction", {"revision": version, "physical": True})
    texts = {key: str(value) for key, value in query.items()}
    eventually(lambda: cluster.rest.send("GET", path, **texts).status == HTTPStatus.GONE, lambda: f"token of {path}")


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def call_etcd(control_plane: ControlPlane, method: str, body: Json) -> None:
    flags = control_plane.apiserver.command
    endpoint = next(flag.partition("=")[2] for flag in flags if flag.startswith("--etcd-servers="))
    url = f"{endpoint}/v3/kv/{method}"
    with urllib.request.urlopen(url, json.dumps(body).encode()) as answer:  # noqa: S310  # the URL of our own etcd
        assert answer.status == HTTPStatus.OK
