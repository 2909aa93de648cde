"""kubeconfig files, written as JSON, which is YAML too."""

from __future__ import annotations

import json
from pathlib import Path


def write_kubeconfig(path: Path, server: str, ca_file: Path, token: str) -> None:
    """Write a kubeconfig for the bearer of ``token`` at ``server``, whose certificate ``ca_file`` signs."""
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "e2e", "cluster": {"server": server, "certificate-authority": str(ca_file)}}],
        "users": [{"name": "bearer", "user": {"token": token}}],
        "contexts": [{"name": "e2e", "context": {"cluster": "e2e", "user": "bearer"}}],
        "current-context": "e2e",
    }
    path.touch(mode=0o600)
    path.write_text(json.dumps(document))
