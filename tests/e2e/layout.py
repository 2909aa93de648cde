"""Where one control plane has its binaries, files and ports."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Layout:
    """Where one control plane has its binaries, files and ports."""

    assets: Path
    directory: Path
    etcd_port: int
    peer_port: int
    apiserver_port: int
    scheduler_port: int
    manager_port: int

    @property
    def certs(self) -> Path:
        """The directory in which each server writes its self-signed certificate."""
        return self.directory / "certs"

    @property
    def signing_key(self) -> Path:
        """The key that signs ServiceAccount tokens."""
        return self.directory / "sa.key"

    @property
    def token_file(self) -> Path:
        """kube-apiserver's static tokens."""
        return self.directory / "tokens.csv"

    @property
    def admin_kubeconfig(self) -> Path:
        """The kubeconfig of the user in system:masters."""
        return self.directory / "admin.kubeconfig"

    @property
    def server(self) -> str:
        """The API server's URL."""
        return f"https://127.0.0.1:{self.apiserver_port}"

    def certificate(self, pair: str) -> Path:
        """The certificate, its signer included, that a server makes for itself at its first start."""
        return self.certs / f"{pair}.crt"

    def has(self, program: str) -> bool:
        """Whether the binaries include ``program``."""
        return os.access(self.assets / program, os.X_OK)
