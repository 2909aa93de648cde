"""The manifests with the few addresses changed that a machine without a pod network lacks, applied by kubectl."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.e2e.cluster import Cluster
from tests.kubectl import kubectl
from tests.rendered import composed

TIMEOUT = 120


def reachable(directory: Path, components: Sequence[str], port: int) -> Path:
    """A kustomization of the base and these components whose webhook is called at ``port`` of this machine.

    The API server resolves a Service of type ExternalName to its name, and still asks for the certificate of
    NAME.NAMESPACE.svc.
    """
    target = composed(directory, components)
    spec = {"type": "ExternalName", "externalName": "localhost"}
    service = [{"op": "replace", "path": "/spec", "value": spec}]
    called = [{"op": "replace", "path": "/webhooks/0/clientConfig/service/port", "value": port}]
    also = [*called, {"op": "replace", "path": "/webhooks/1/clientConfig/service/port", "value": port}]
    patches = [
        {"target": {"kind": "Service", "name": "vcuda-webhook"}, "patch": json.dumps(service)},
        {"target": {"kind": "MutatingWebhookConfiguration"}, "patch": json.dumps(called)},
        {"target": {"kind": "ValidatingWebhookConfiguration"}, "patch": json.dumps(also)},
    ]
    file = target / "kustomization.yaml"
    file.write_text(json.dumps({**json.loads(file.read_text()), "patches": patches}))
    return target


def kubectl_k(cluster: Cluster, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the kubectl that renders, as admin of ``cluster``; whatever its exit status."""
    cache = cluster.control_plane.directory / "kubectl-k-cache"
    command = (kubectl(), f"--kubeconfig={cluster.kubeconfig}", f"--cache-dir={cache}", *map(str, arguments))
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT)


def apply(cluster: Cluster, directory: Path, *flags: str) -> str:
    """`kubectl apply -k` of the directory; what it said."""
    done = kubectl_k(cluster, "apply", *flags, "-k", directory)
    assert done.returncode == 0, done.stderr
    return done.stdout
