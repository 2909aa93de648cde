"""The page's style, script and picture: read once, so that no request touches a file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib import resources

import msgspec

TYPES: Mapping[str, str] = {
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


class Asset(msgspec.Struct, frozen=True):
    """A file as it is sent; ``tag`` is its entity tag, which changes with its bytes."""

    body: bytes
    content_type: str
    tag: str


def read_assets() -> Mapping[str, Asset]:
    """Return the assets by file name."""
    found = {}
    for file in resources.files("controller.ui").joinpath("static").iterdir():
        body, kind = file.read_bytes(), file.name.rpartition(".")[2]
        if kind in TYPES:
            found[file.name] = Asset(body, TYPES[kind], hashlib.sha256(body).hexdigest()[:16])
    return found
