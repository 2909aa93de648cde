"""Waits until a ledger, or a namespace's published usage, has the content that a test expects."""

import json
from collections.abc import Callable

from tests.e2e.cluster import TIMEOUT, Cluster, Json
from tests.e2e.installation import LEDGERS, USAGE, Installation
from tests.integration.reviews import gpu_pod
from vcuda.ledger.ledger import Ledger, charges_by_model
from vcuda.ledger.text import read_ledger
from vcuda.quota.model import Cores


def await_ledger(
    installation: Installation, namespace: str, wanted: Callable[[Ledger], bool], timeout: float = TIMEOUT
) -> Ledger:
    """Return the ledger of ``namespace`` once ``wanted`` is true for it. Raises TimeoutError with the last ledger."""
    await_collection, named = installation.cluster.await_collection, f"metadata.name=gpu-ledger-{namespace}"
    return ledger_in(await_collection(LEDGERS, lambda found: wanted(ledger_in(found)), timeout, fieldSelector=named))


def ledger_in(objects: list[Json]) -> Ledger:
    return next((read_ledger(found["data"]["ledger"]) for found in objects), Ledger())


def await_committed(installation: Installation, namespace: str, timeout: float = TIMEOUT, **cores: int) -> Ledger:
    """Return the ledger once it charges stored objects exactly these cores by model, and has no pending charge."""

    def wanted(ledger: Ledger) -> bool:
        return committed(ledger) == cores and not ledger.pending

    return await_ledger(installation, namespace, wanted, timeout)


def committed(ledger: Ledger) -> dict[str, Cores]:
    counted = charges_by_model([*ledger.committed.items(), *ledger.claimed.items()])
    return {model: charge.cores for model, charge in counted.items()}


def await_published(cluster: Cluster, namespace: str, wanted: Callable[[Json], bool] = bool) -> Json:
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    found = cluster.await_object(path, USAGE, lambda found: wanted(json.loads(found["data"]["usage.json"])))
    return dict(json.loads(found["data"]["usage.json"]))


def await_unpublished(cluster: Cluster, namespace: str) -> None:
    cluster.await_gone(f"/api/v1/namespaces/{namespace}/configmaps", USAGE)


def pass_by(cluster: Cluster, namespace: str) -> None:
    """Create and delete a pod without a GPU.

    When the controller's watch has delivered these events, it has also delivered all earlier changes.
    """
    cluster.create(gpu_pod("passer-by", namespace, {"cpu": "1"}))
    cluster.delete_pod(namespace, "passer-by")


def await_ledger_gone(cluster: Cluster, namespace: str) -> None:
    """Return when the ledger is deleted, and also the ConfigMap that records that the namespace had a ledger."""
    for each in (f"gpu-ledger-{namespace}", f"gpu-ledger-opened.{namespace}"):
        cluster.await_gone(LEDGERS, each)
