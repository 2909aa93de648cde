"""The pods and claims that a test creates concurrently while replicas admit from reservations."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from tests import builders
from vcuda.allocations.stored_pods import read_stored
from vcuda.claims.names import API_PATH
from vcuda.quota.model import Charge, Limit

TEAM = "team-a"
CARDS = 60
LIMITS = {"M40": Limit(100 * CARDS), "P100": Limit(100 * CARDS, 1000 * CARDS)}
CORES = "tencent.com/vcuda-core"
MEMORY = "tencent.com/vcuda-memory"
SIZES: Mapping[str, Mapping[str, int]] = {
    "card": {CORES: 100},
    "half": {CORES: 50, MEMORY: 8},
    "fifth": {CORES: 20, MEMORY: 1},
    "twentieth": {CORES: 5, MEMORY: 1},
    "pair": {CORES: 200},
    "five": {CORES: 500},
}


class Subject(NamedTuple):
    """A pod or claim to be created.

    ``created``: the creation time that the API server set. ``edit``: the index of the quota edit that decides about the
    object. ``before``: the index of the newest quota edit when it was admitted; negative if it was not admitted.
    """

    uid: str
    model: str
    size: str
    created: float
    edit: int
    claim: bool = False
    before: int = -1

    @property
    def charge(self) -> Charge:
        return _charge_of(self.size)

    @property
    def path(self) -> str:
        collection = f"{API_PATH}/namespaces/{TEAM}/resourceclaims" if self.claim else f"/api/v1/namespaces/{TEAM}/pods"
        return f"{collection}/{self.uid}"

    @property
    def manifest(self) -> Mapping[str, Any]:
        metadata = {"name": self.uid, "namespace": TEAM, "uid": self.uid}
        if self.claim:
            requests = [{"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com"}}]
            return {"metadata": metadata, "spec": {"devices": {"requests": requests}}}
        pod = builders.stored_pod(SIZES[self.size], self.uid, affinity=builders.held_to(self.model))
        return {**pod, "metadata": metadata}


@functools.cache
def _charge_of(size: str) -> Charge:
    stored = read_stored(builders.view(builders.stored_pod(SIZES[size])), builders.LABELS)
    assert stored
    return stored.charge
