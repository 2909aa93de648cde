"""Maps kustomize components to the Helm chart's values that enable them, and renders the base with components."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

Json = Any
"""The content of a YAML document."""

MANIFESTS = Path(__file__).parents[2] / "manifests"
CHART = MANIFESTS / "chart"

COMPONENTS: Mapping[str, str] = {
    "hami": ".Values.hami.enabled",
    "node-agent-gpu-manager": ".Values.nodeAgent.gpuManager",
    "node-agent-nvidia-vcuda": ".Values.nodeAgent.nvidiaVcuda",
    "node-agent-hami": ".Values.nodeAgent.hami",
    "node-agent-vgpu-manager": ".Values.nodeAgent.vgpuManager",
    "cert-manager": ".Values.certManager.enabled",
    "client-certificates": ".Values.clientCertificates.enabled",
    "require-client-certificate": ".Values.clientCertificates.required",
    "evict-violations": ".Values.evictViolations.enabled",
    "scheduler": ".Values.scheduler.enabled",
    "prometheus": ".Values.prometheus.enabled",
    "page": ".Values.page.enabled",
}
"""The chart's value that enables each kustomize component, in the syntax of a Helm template."""


EXCLUSIVE: Mapping[frozenset[str], str] = {
    frozenset({"node-agent-gpu-manager", "node-agent-nvidia-vcuda"}): "both vendors use directory /etc/gpu-manager/vm",
    frozenset({"hami", "scheduler"}): "a pod has one scheduler",
}
"""Components that exclude each other, with the reason. The chart's ``contradictions.yaml`` has the same rules."""
NEEDED: Mapping[str, str] = {"require-client-certificate": "client-certificates"}
"""For each component that uses objects of another component: the name of the other component."""


def fault_of(components: Collection[str]) -> str:
    """Return why these components cannot be combined, or an empty text."""
    for both, reason in EXCLUSIVE.items():
        if both <= set(components):
            return f"the components {' and '.join(sorted(both))} exclude each other: {reason}"
    for name, other in NEEDED.items():
        if name in components and other not in components:
            return f"the component {name} needs the component {other}"
    return ""


class Identity(NamedTuple):
    """The fields of a manifest that identify its object in a cluster."""

    api: str
    kind: str
    namespace: str
    name: str


Objects = Mapping[Identity, Json]


def identity_of(found: Json) -> Identity:
    metadata = found["metadata"]
    return Identity(found["apiVersion"], found["kind"], metadata.get("namespace", ""), metadata["name"])


def render(*components: str, manifests: Path = MANIFESTS) -> Objects:
    """Return the objects that kustomize prints for the kustomize base with ``components`` enabled.

    ``manifests``: the directory of the base and the components. Raises FileNotFoundError if neither kustomize nor
    kubectl is installed, and subprocess.CalledProcessError if kustomize fails.
    """
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "manifests"
        shutil.copytree(manifests, copy, ignore=shutil.ignore_patterns("chart"))
        target = copy / "one"
        target.mkdir()
        whole = {"resources": ["../base"], "components": [f"../components/{name}" for name in components]}
        (target / "kustomization.yaml").write_text(yaml.safe_dump(whole), encoding="utf-8")
        command = (*_kustomize(), str(target))
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    found = (each for each in yaml.safe_load_all(done.stdout) if each)
    return {identity_of(each): each for each in found}


def _kustomize() -> tuple[str, str]:
    """Return the command that renders a directory: kustomize, or the kustomize that kubectl contains."""
    if found := shutil.which("kustomize"):
        return found, "build"
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    if found := shutil.which("kubectl", path=assets) or shutil.which("kubectl"):
        return found, "kustomize"
    raise FileNotFoundError(
        "kustomize was not found. Put kustomize or kubectl on PATH, for example the kustomize of"
        " `tests/e2e/build-tools kustomize`"
    )
