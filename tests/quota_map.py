"""Stores the quota ConfigMap in a double of the API server."""

from tests.api_double import Api

QUOTA = "/api/v1/namespaces/kube-system/configmaps/gpuquota"


def store_quota(api: Api, document: str, **data: str) -> None:
    """Store the quota ConfigMap with this quota document. ``data``: more keys of the ConfigMap, such as gpu_models."""
    metadata = {"name": "gpuquota", "namespace": "kube-system"}
    api.store(QUOTA, {"metadata": metadata, "data": {"gpu_quota": document, **data}})
