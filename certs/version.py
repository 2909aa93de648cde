"""The oldest Kubernetes that this release supports, compared with the API server's before anything else is asked.

The same rule as `vcuda.kube.version`, which these programs do not import; a test gives both the same versions.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from certs.api import Api, ApiFault, Forbidden, Json

OLDEST = (1, 30)

_VERSION = re.compile(r"v?(\d{1,4})\.(\d{1,4})(?!\d)", re.ASCII)


class Unsupported(ApiFault):
    """Kubernetes is too old for this release."""


def check_version(info: Json, server: str) -> str:
    """Return a warning where ``info``, the answer to GET /version, does not tell the version; else "".

    Raises Unsupported where it is older than OLDEST.
    """
    texts = (str(info.get("gitVersion", "")), f"{info.get('major')}.{info.get('minor')}")
    found = next((match for match in map(_VERSION.match, texts) if match and int(match[1])), None)
    oldest = f"v{OLDEST[0]}.{OLDEST[1]}"
    if found is None:
        return f"the version of Kubernetes at {server} is not known: {oldest} is the oldest that is supported"
    if (int(found[1]), int(found[2])) < OLDEST:
        named = found.string.removeprefix("v")[:60]
        raise Unsupported(
            f"Kubernetes v{named} at {server} is older than {oldest}, the oldest version that this release supports:"
            " upgrade the cluster first"
        )
    return ""


@dataclass(slots=True)
class VersionCheck:
    """The check, made before the first read. ``warn`` is called with a warning where the version cannot be told."""

    warn: Callable[[str], None]
    _passed: bool = field(default=False, init=False)

    def make(self, api: Api) -> None:
        """Check the version once. Raises ApiFault: Unsupported, or that there is no answer; then it is made again."""
        if self._passed:
            return
        try:
            reply = api.get("/version")
        except Forbidden:
            reply = None
        warning = check_version(reply.body if reply else {}, api.server)
        self._passed = True
        if warning:
            self.warn(warning)
