"""The Pod Security Standard "restricted", for the fields that pods of these manifests could use.

Source: https://kubernetes.io/docs/concepts/security/pod-security-standards/
"""

from collections.abc import Iterator
from typing import Any

Json = dict[str, Any]

VOLUMES = frozenset(
    {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
)


def offences(spec: Json) -> set[str]:
    """Return the parts of a pod's spec that "restricted" forbids: names of fields and kinds of volumes."""
    containers = [*spec["containers"], *spec.get("initContainers", [])]
    return set(_of_pod(spec)) | {found for container in containers for found in _of_container(container, spec)}


def _of_pod(spec: Json) -> Iterator[str]:
    yield from (name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name))
    for volume in spec.get("volumes", []):
        yield from volume.keys() - {"name"} - VOLUMES


def _of_container(container: Json, spec: Json) -> Iterator[str]:
    context = {**spec.get("securityContext", {}), **container.get("securityContext", {})}
    if context.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation"
    if context.get("privileged"):
        yield "privileged"
    if context.get("runAsNonRoot") is not True:
        yield "runAsNonRoot"
    if context.get("runAsUser") == 0:
        yield "runAsUser"
    if context.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
        yield "seccompProfile"
    capabilities = context.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", []):
        yield "capabilities.drop"
    yield from (f"capabilities.add {name}" for name in capabilities.get("add", []) if name != "NET_BIND_SERVICE")
    if any("hostPort" in port for port in container.get("ports", [])):
        yield "hostPort"
