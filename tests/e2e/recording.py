"""A webhook that allows everything and remembers who it was asked about."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e.json_server import answering, ca_bundle, reviewed
from tests.e2e.rest import Json


@dataclass
class Recorder:
    """Listens at ``url`` and keeps each request of a review; ``ca_bundle`` is what its caller needs to trust it.

    ``patches``: the JSON Patch that is the answer at a path; without one nothing is changed.
    """

    ca_bundle: str
    url: str = ""
    patches: dict[str, list[Json]] = field(default_factory=dict)
    _asked: list[tuple[str, Json]] = field(default_factory=list)

    def take(self) -> list[tuple[str, Json]]:
        """The path and the request of every review since the last call."""
        asked, self._asked = self._asked, []
        return asked

    def answer(self, path: str, review: Json) -> Json:
        """Remember a review that came at ``path``, and allow it."""
        self._asked.append((path, review["request"]))
        if path not in self.patches:
            return reviewed(review)
        patch = base64.b64encode(json.dumps(self.patches[path]).encode()).decode()
        return reviewed(review, patchType="JSONPatch", patch=patch)


@contextmanager
def recording(certificates: Path) -> Iterator[Recorder]:
    """A recorder that serves the certificates in this directory; closed at the end."""
    recorder = Recorder(ca_bundle(certificates))
    with answering(recorder.answer, certificates) as recorder.url:
        yield recorder
