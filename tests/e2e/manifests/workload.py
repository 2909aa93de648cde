"""What the manifests start a process with: flags, account and Secret, with only paths and addresses changed."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path

from tests.e2e.cluster import Cluster
from tests.e2e.rest import Json
from tests.rendered import container, pod_spec


def command_of(workload: Json, changed: Mapping[str, str | Path], **fields: str) -> list[str]:
    """The program and its arguments. ``changed``: flags with their values here; ``fields``: of the downward API.

    A flag that the manifest has is changed in its place, any other is added at the end.
    """
    given = container(workload)["args"]
    left = dict(changed)
    arguments = []
    for each in given:
        flag, equals, value = expanded(each, fields).partition("=")
        if flag in left:
            arguments.append(f"{flag}={left.pop(flag)}")
        else:
            arguments.append(flag + equals + value)
    return [*arguments, *(f"{flag}={value}" for flag, value in left.items())]


def expanded(argument: str, fields: Mapping[str, str]) -> str:
    """Replace `$(NAME)` as kubelet does."""
    for name, value in fields.items():
        argument = argument.replace(f"$({name})", value)
    return argument


def account_of(cluster: Cluster, workload: Json) -> Path:
    """A kubeconfig with a token of the workload's ServiceAccount."""
    name = pod_spec(workload)["serviceAccountName"]
    return cluster.kubeconfig_for_token(cluster.service_account_token(workload["metadata"]["namespace"], name))


def user_of(workload: Json) -> str:
    """The name by which the API server knows that account."""
    return f"system:serviceaccount:{workload['metadata']['namespace']}:{pod_spec(workload)['serviceAccountName']}"


def mount_secret(cluster: Cluster, workload: Json, directory: Path) -> None:
    """Write the keys of the workload's one Secret, all or those its volume names, each whole, as kubelet does."""
    [secret] = [volume["secret"] for volume in pod_spec(workload)["volumes"] if "secret" in volume]
    path = f"/api/v1/namespaces/{workload['metadata']['namespace']}/secrets/{secret['secretName']}"
    data = cluster.rest.get(path)["data"]
    directory.mkdir(exist_ok=True)
    for item in secret.get("items", [{"key": key, "path": key} for key in data]):
        new = directory / f".{item['path']}"
        new.write_bytes(base64.b64decode(data[item["key"]]))
        new.replace(directory / item["path"])
