"""Where the API server is and who we are to it: kubeconfig or the pod's own service account."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from kubernetes.client import Configuration
from kubernetes.config import ConfigException, load_incluster_config, load_kube_config
from yaml import YAMLError

from vcuda.errors import BadInput

Load = Callable[[Configuration], None]
"""Reads the credentials anew into a configuration; raises BadInput."""

# The official loader checks little: a kubeconfig that is no mapping fails somewhere inside it.
_UNREADABLE = (ConfigException, OSError, YAMLError, AttributeError, LookupError, TypeError, ValueError)


def loader(kubeconfig: Path | None, context: str | None) -> Load:
    """Choose the source: the file given; else the service account when in a pod; else kubectl's default.

    A context names an entry of a kubeconfig, so giving one rules the service account out.
    """
    if kubeconfig is not None:
        return _from_kubeconfig(str(kubeconfig), context)
    if context is None and os.environ.get("KUBERNETES_SERVICE_HOST"):
        return _from_service_account
    return _from_kubeconfig(os.environ.get("KUBECONFIG") or "~/.kube/config", context)


def _from_service_account(configuration: Configuration) -> None:
    try:
        load_incluster_config(configuration)  # type: ignore[no-untyped-call]  # the loader has no type hints
    except _UNREADABLE as error:
        raise BadInput(
            f"KUBERNETES_SERVICE_HOST is set, but the pod's service account cannot be read: {error} "
            "Mount its token (automountServiceAccountToken), or name a kubeconfig."
        ) from error


def _from_kubeconfig(paths: str, context: str | None) -> Load:
    def load(configuration: Configuration) -> None:
        try:
            load_kube_config(  # type: ignore[no-untyped-call]  # the loader has no type hints
                config_file=paths,
                context=context,
                client_configuration=configuration,
                persist_config=False,
            )
        except _UNREADABLE as error:
            where = f"{paths} (context {context})" if context else paths
            raise BadInput(
                f"No usable kubeconfig at {where}: {error} "
                "Name a readable one, set KUBECONFIG, or run in a pod with a service account."
            ) from error

    return load
