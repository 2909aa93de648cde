"""The quota ConfigMap of an API server double."""

from tests.api_double import Api

QUOTA = "/api/v1/namespaces/kube-system/configmaps/gpuquota"


def store_quota(api: Api, document: str, **keys: str) -> None:
    """Create or overwrite the quota ConfigMap. ``keys`` are its further keys, for example ``gpu_models``."""
    metadata = {"name": "gpuquota", "namespace": "kube-system"}
    api.store(QUOTA, {"metadata": metadata, "data": {"gpu_quota": document, **keys}})
