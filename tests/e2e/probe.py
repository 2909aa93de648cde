"""Whether a server of the control plane serves yet."""

from __future__ import annotations

import http.client
import ssl
from contextlib import closing
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

TIMEOUT_SECONDS = 2


@dataclass(frozen=True)
class Probe:
    """Calls to true once GET ``path`` on ``port`` of 127.0.0.1 answers 200; over TLS with a ``ca_file``."""

    port: int
    path: str
    ca_file: Path | None = None
    token: str = ""

    def __call__(self) -> bool:
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        try:
            with closing(self._connection()) as connection:
                connection.request("GET", self.path, headers=headers)
                return connection.getresponse().status == HTTPStatus.OK
        except (OSError, http.client.HTTPException):  # not up yet: its certificate is not written, or it refuses
            return False

    def _connection(self) -> http.client.HTTPConnection:
        if self.ca_file is None:
            return http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_SECONDS)
        context = ssl.create_default_context(cafile=self.ca_file)
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=TIMEOUT_SECONDS, context=context)
