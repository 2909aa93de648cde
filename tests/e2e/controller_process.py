"""Controllers beside an installation of the webhook and by its quota, and what is awaited of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.cluster import TIMEOUT, Cluster, Json
from tests.e2e.installation import ENFORCED, SYSTEM_NAMESPACE, Installation, ledger_path
from tests.integration.reviews import gpu_pod
from tests.processes import ControllerProcess
from vcuda.ledger.ledger import Ledger, read_ledger

LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{SYSTEM_NAMESPACE}/leases"
LEASE = "vcuda-controller"
USAGE = "gpu-quota-usage"

STORABLE = 3
"""Seconds, in these tests, after which a pod that was admitted can no longer be stored."""

PROMPTLY = 2.0
"""Seconds within which a charge is released."""


def flags_of(installation: Installation, *more: str | Path, kubeconfig: Path | None = None) -> list[str | Path]:
    """The flags of a controller that goes by the installation's quota, with the admin's rights unless told otherwise.

    Where a flag is given twice the last one counts, so ``more`` may set these anew.
    """
    quota = f"{installation.quota.namespace}/{installation.quota.name}"
    return [
        *("--kubeconfig", kubeconfig or installation.cluster.kubeconfig, "--status-address", "127.0.0.1:0"),
        *("--quota-configmap", quota, "--system-namespace", SYSTEM_NAMESPACE),
        *("--lease-seconds", "15", "--storable-seconds", str(STORABLE)),
        *more,
    ]


def candidate(installation: Installation, *more: str | Path, kubeconfig: Path | None = None) -> ControllerProcess:
    """A controller that serves its status, whether it leads or not; stopped at the end of the block."""
    return ControllerProcess(*flags_of(installation, *more, kubeconfig=kubeconfig))


@contextmanager
def controlling(
    installation: Installation, *more: str | Path, kubeconfig: Path | None = None
) -> Iterator[ControllerProcess]:
    """A controller that leads and has listed everything, and needs not wait for the end of an earlier one's lease."""
    drop_lease(installation.cluster)
    with candidate(installation, *more, kubeconfig=kubeconfig) as process:
        process.await_synced()
        yield process


@contextmanager
def two_candidates(
    installation: Installation, lease_seconds: int
) -> Iterator[tuple[ControllerProcess, ControllerProcess]]:
    """A controller that leads, identity `first`, and `second`, which waits."""
    short = ("--lease-seconds", str(lease_seconds))
    with (
        controlling(installation, *short, "--identity", "first") as first,
        candidate(installation, *short, "--identity", "second") as second,
    ):
        yield first, second
    drop_lease(installation.cluster)


def drop_lease(cluster: Cluster) -> None:
    """Delete the Lease that a killed controller has left; there may be none."""
    cluster.delete(f"{LEASES}/{LEASE}")


def lease_spec(cluster: Cluster) -> Json:
    spec: Json = cluster.rest.get(f"{LEASES}/{LEASE}")["spec"]
    return spec


@contextmanager
def limited_team(installation: Installation, entry: Json) -> Iterator[str]:
    """A fresh namespace with this entry in the quota, which the controller has labelled; deleted afterwards."""
    with installation.free_team() as namespace, installation.quota.limited(**{namespace: entry}):
        await_enforced(installation.cluster, namespace)
        yield namespace


def await_enforced(cluster: Cluster, namespace: str, *, enforced: bool = True) -> None:
    """Return once the namespace has the label that has its pods charged, or has it no longer."""
    wanted = "true" if enforced else None
    cluster.await_object(
        "/api/v1/namespaces", namespace, lambda found: found["metadata"].get("labels", {}).get(ENFORCED) == wanted
    )


def await_ledger(
    installation: Installation, namespace: str, wanted: Callable[[Ledger], bool], timeout: float = TIMEOUT
) -> Ledger:
    """Return the ledger of ``namespace`` once it is as wanted; TimeoutError with the last one after so many seconds."""
    collection, _, name = ledger_path(namespace).rpartition("/")
    found = installation.cluster.await_collection(
        collection, lambda objects: wanted(ledger_in(objects)), timeout, fieldSelector=f"metadata.name={name}"
    )
    return ledger_in(found)


def ledger_in(objects: list[Json]) -> Ledger:
    return next((read_ledger(found["data"]["ledger"]) for found in objects), Ledger())


def await_committed(installation: Installation, namespace: str, timeout: float = TIMEOUT, **cores: int) -> Ledger:
    """Return the ledger once it has these cores by model, and all of them counted from stored pods."""
    return await_ledger(
        installation, namespace, lambda ledger: committed(ledger) == cores and not ledger.pending, timeout
    )


def committed(ledger: Ledger) -> dict[str, int]:
    return {model: charge.cores for model, charge in ledger.committed.items()}


def await_published(cluster: Cluster, namespace: str, wanted: Callable[[Json], bool] = bool) -> Json:
    """The published usage of the namespace once it is as wanted."""
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    found = cluster.await_object(path, USAGE, lambda found: wanted(json.loads(found["data"]["usage.json"])))
    report: Json = json.loads(found["data"]["usage.json"])
    return report


def await_unpublished(cluster: Cluster, namespace: str) -> None:
    cluster.await_gone(f"/api/v1/namespaces/{namespace}/configmaps", USAGE)


def pass_by(cluster: Cluster, namespace: str) -> None:
    """Create and delete a pod without a GPU: what the controller has seen of pods is then as new as all before it."""
    cluster.create(gpu_pod("passer-by", namespace, {"cpu": "1"}))
    cluster.delete_pod(namespace, "passer-by")


def await_ledger_gone(cluster: Cluster, namespace: str) -> None:
    collection, _, name = ledger_path(namespace).rpartition("/")
    cluster.await_gone(collection, name)
