"""A webhook that takes names: it creates a pod of the name that the API server is about to store another under.

That is how a generated name is made to conflict at will: validating webhooks see the name, and the API server learns
that it is taken only as it stores the pod.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e.cluster import Cluster
from tests.e2e.json_server import answering, asks_about_pods, reviewed
from tests.e2e.rest import Json
from tests.integration.reviews import gpu_pod

LABEL = "e2e.vcuda.io/squatted"
"""On the pods whose names are taken."""


@dataclass
class Squatter:
    """Takes the names of the first ``limit`` pods it is asked about; ``uids`` are of all those, in their order."""

    cluster: Cluster
    limit: int
    uids: list[str] = field(default_factory=list)

    def answer(self, _path: str, review: Json) -> Json:
        """Take the name, and let the pod pass."""
        request = review["request"]
        self.uids.append(request["object"]["metadata"]["uid"])
        if len(self.uids) <= self.limit:
            self.cluster.create(gpu_pod(request["name"], request["namespace"], {"cpu": "1"}))
        return reviewed(review)


@contextmanager
def squatting(cluster: Cluster, certificates: Path, limit: int) -> Iterator[Squatter]:
    """A squatter that is asked about every pod with the label. ``certificates`` has ca.crt, tls.crt and tls.key."""
    squatter = Squatter(cluster, limit)
    with (
        answering(squatter.answer, certificates) as url,
        cluster.register_webhooks(validating=[asks_about_pods("squatter.example.com", url, certificates, LABEL)]),
    ):
        yield squatter
