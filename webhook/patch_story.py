"""Tells in words what a patch does to a pod, for tables that people read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vcuda.patches import Operation


def patch_story(patch: Sequence[Operation]) -> Iterator[str]:
    """Yield a phrase for each kind of change that its owner may not expect."""
    removed = [operation for operation in patch if operation["op"] == "remove"]
    allocations = [operation for operation in removed if operation["path"].startswith("/metadata/")]
    if allocations:
        keys = ", ".join(_key(operation["path"]) for operation in allocations)
        yield f"allocation records removed: {keys}"
    if any(operation["path"] == "/spec/nodeName" for operation in removed):
        yield "nodeName moved to a required node affinity"
    for operation in patch:
        if operation["path"] == "/spec/schedulerName":
            yield f"scheduler set to {operation['value']}"


def _key(path: str) -> str:
    return str(path).rpartition("/")[2].replace("~1", "/").replace("~0", "~")
