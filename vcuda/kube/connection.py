"""What is settled before the first request: whose credentials we use, and whether that Kubernetes is supported."""

import os
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import NoReturn

import msgspec
from kubernetes.client import Configuration
from kubernetes.config import ConfigException, load_incluster_config, load_kube_config
from yaml import YAMLError

from vcuda import errors, k8s_types

Load = Callable[[Configuration], None]
"""Reads the credentials anew into a configuration; raises BadInput."""

# The official loader checks little: a kubeconfig that is no mapping fails somewhere inside it.
_UNREADABLE = (ConfigException, OSError, YAMLError, AttributeError, LookupError, TypeError, ValueError)


def loader(kubeconfig: Path | None, context: str | None) -> Load:
    """Choose the source: the file given; else the service account when in a pod; else kubectl's default."""
    if kubeconfig is not None:
        return _from_kubeconfig(str(kubeconfig), context)
    # A context names an entry of a kubeconfig, so giving one rules the service account out.
    if context is None and os.environ.get("KUBERNETES_SERVICE_HOST"):
        return _from_service_account
    return _from_kubeconfig(os.environ.get("KUBECONFIG") or "~/.kube/config", context)


def _from_service_account(configuration: Configuration) -> None:
    try:
        load_incluster_config(configuration)  # type: ignore[no-untyped-call]  # the loader has no type hints
    except _UNREADABLE as error:
        raise errors.BadInput(
            f"KUBERNETES_SERVICE_HOST is set, but the pod's service account cannot be read: {error} "
            "Mount its token (automountServiceAccountToken), or name a kubeconfig."
        ) from error


def _from_kubeconfig(paths: str, context: str | None) -> Load:
    def load(configuration: Configuration) -> None:
        try:
            load_kube_config(  # type: ignore[no-untyped-call]  # the loader has no type hints
                config_file=paths, context=context, client_configuration=configuration, persist_config=False
            )
        except _UNREADABLE as error:
            where = f"{paths} (context {context})" if context else paths
            raise errors.BadInput(
                f"No usable kubeconfig at {where}: {error} "
                "Name a readable one, set KUBECONFIG, or run in a pod with a service account."
            ) from error

    return load


OLDEST = (1, 30)  # major and minor version
_OLDEST = f"v{OLDEST[0]}.{OLDEST[1]}"

_VERSION = re.compile(r"v?(\d{1,4})\.(\d{1,4})(?!\d)", re.ASCII)


class _Info(msgspec.Struct, frozen=True, rename="camel"):
    """What is read of the answer to GET /version. Managed clouds have a ``minor`` such as ``30+``."""

    git_version: str = ""
    major: str = ""
    minor: str = ""


_INFO = msgspec.json.Decoder(_Info)


def check_version(answer: bytes, server: str) -> str:
    """Return a warning where the version cannot be told from ``answer``, the body of GET /version; else "".

    Raises UnsupportedVersion: it is older than OLDEST.
    """
    # A cluster that works must not stop for a version in words of its own, so that is no error. A build to which nobody
    # gave a version says v0.0.0: that cannot be told either.
    try:
        info = _INFO.decode(answer)
    except k8s_types.UNDECODABLE as error:
        return unknown_version(server, str(error))
    texts = (info.git_version, f"{info.major}.{info.minor}")
    found = next((match for match in map(_VERSION.match, texts) if match and int(match[1])), None)
    if found is None:
        return unknown_version(server, f"it says {info.git_version[:60]!r}")
    if (int(found[1]), int(found[2])) < OLDEST:
        named = found.string.removeprefix("v")[:60]
        raise errors.UnsupportedVersion(
            f"Kubernetes v{named} at {server} is older than {_OLDEST}, the oldest version that this release"
            " supports: upgrade the cluster first"
        )
    return ""


def unknown_version(server: str, why: str) -> str:
    """Return the warning for a version that is not known."""
    return f"the version of Kubernetes at {server} is not known ({why}): {_OLDEST} is the oldest that is supported"


def end_process(message: str) -> NoReturn:
    """Print an error and end the process with status 1 at once, from any thread."""
    sys.stderr.write(f"Error: {message}\n")
    sys.stderr.flush()
    # Not sys.exit: in a thread that would end the thread, and the process would go on without it.
    os._exit(1)


@dataclass(slots=True)
class VersionCheck:
    """The check that a `Kube` makes before its first request, once for all threads.

    ``end`` is called with an error where the version is too old, and must end the process: the loops of a component
    try again whatever is raised. ``warn`` is called with a warning where the version cannot be told.
    """

    warn: Callable[[str], None]
    end: Callable[[str], None] = end_process
    passed: bool = field(default=False, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def make(self, read: Callable[[], bytes], server: str) -> None:
        """Check the answer to GET /version, which ``read`` returns.

        Raises what ``read`` does where there is no answer, or one that our credentials are not valid: the check is made
        with the next request then. Any other refusal to tell the version is a warning.
        """
        try:
            answer, refused = read(), ""
        except errors.ApiError as error:
            if error.status == HTTPStatus.UNAUTHORIZED:
                raise
            answer, refused = b"", str(error)
        with self._lock:  # several threads may have asked; one of them tells, and may end the process
            if self.passed:
                return
            try:
                warning = unknown_version(server, refused) if refused else check_version(answer, server)
            except errors.UnsupportedVersion as error:
                self.end(str(error))
                raise
            self.passed = True
        if warning:
            self.warn(warning)
