"""Paths of the API server's objects."""

from __future__ import annotations

from urllib.parse import quote


def segment(name: str) -> str:
    """Return a name as one segment of a path.

    Whoever writes an Event, a flag or a manifest chooses some of them: a slash in one leads to no other object.
    """
    return quote(name, safe="")
