"""The oldest Kubernetes that this release supports, compared with the API server's before anything else is sent."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import NoReturn

import msgspec

from vcuda.errors import ApiError, UnsupportedVersion
from vcuda.k8s_types import UNDECODABLE

OLDEST = (1, 30)
"""Major and minor version."""

EXIT_STATUS = 1

_VERSION = re.compile(r"v?(\d{1,4})\.(\d{1,4})(?!\d)", re.ASCII)


class _Info(msgspec.Struct, frozen=True, rename="camel"):
    """What is read of the answer to GET /version. Managed clouds have a ``minor`` such as ``30+``."""

    git_version: str = ""
    major: str = ""
    minor: str = ""


_INFO = msgspec.json.Decoder(_Info)


def check_version(answer: bytes, server: str) -> str:
    """Return a warning where the version cannot be told from ``answer``, the body of GET /version; else "".

    A cluster that works must not stop for a version in words of its own, so that is no error. A build to which nobody
    gave a version says v0.0.0: that cannot be told either.

    Raises:
        UnsupportedVersion: it is older than OLDEST.

    """
    try:
        info = _INFO.decode(answer)
    except UNDECODABLE as error:
        return unknown_version(server, str(error))
    texts = (info.git_version, f"{info.major}.{info.minor}")
    found = next((match for match in map(_VERSION.match, texts) if match and int(match[1])), None)
    if found is None:
        return unknown_version(server, f"it says {info.git_version[:60]!r}")
    if (int(found[1]), int(found[2])) < OLDEST:
        named = found.string.removeprefix("v")[:60]
        raise UnsupportedVersion(
            f"Kubernetes v{named} at {server} is older than {_oldest()}, the oldest version that this release"
            " supports: upgrade the cluster first"
        )
    return ""


def unknown_version(server: str, why: str) -> str:
    """Return the warning for a version that is not known."""
    return f"the version of Kubernetes at {server} is not known ({why}): {_oldest()} is the oldest that is supported"


def _oldest() -> str:
    return f"v{OLDEST[0]}.{OLDEST[1]}"


def end_process(message: str) -> NoReturn:
    """Print an error and end the process with status 1 at once, from any thread."""
    sys.stderr.write(f"Error: {message}\n")
    sys.stderr.flush()
    os._exit(EXIT_STATUS)


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
        except ApiError as error:
            if error.status == HTTPStatus.UNAUTHORIZED:
                raise
            answer, refused = b"", str(error)
        with self._lock:  # several threads may have asked; one of them tells, and may end the process
            if self.passed:
                return
            try:
                warning = unknown_version(server, refused) if refused else check_version(answer, server)
            except UnsupportedVersion as error:
                self.end(str(error))
                raise
            self.passed = True
        if warning:
            self.warn(warning)
