"""The accounts and pods with which the tests of the policies send their requests."""

from tests.e2e.cluster import Cluster, Json
from tests.e2e.installation import SYSTEM_NAMESPACE
from tests.e2e.rest import Answer
from tests.integration.reviews import gpu_pod, with_spec

CARD: Json = {"annotations": {"tencent.com/predicate-gpu-idx-0": "7"}}
PHASE = {"labels": {"nvidia.com/assigned-phase": "succeed"}}
TYPE: Json = {"annotations": {"nvidia.com/use-gputype": "A100"}}


def controller_account(admin: Cluster) -> Cluster:
    return Cluster(admin.control_plane, admin.service_account_token(SYSTEM_NAMESPACE, "vcuda-controller"))


def ordinary(name: str, namespace: str, **spec: object) -> Json:
    return with_spec(gpu_pod(name, namespace, {"cpu": "1"}), **{"schedulerName": "none", **spec})


def patch(cluster: Cluster, path: str, change: Json) -> Answer:
    return cluster.rest.try_merge_patch(path, change)


def pod_path(namespace: str, subresource: str = "", name: str = "train") -> str:
    return f"/api/v1/namespaces/{namespace}/pods/{name}{subresource}"


def cleared(metadata: Json) -> Json:
    return {part: dict.fromkeys(marks) for part, marks in metadata.items()}
