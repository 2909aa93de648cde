"""Compares two quota documents for the command `check`: the changes, and the warnings that an edit would get."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from vcuda import cli
from vcuda.quota.changes import QuotaChange, changes
from webhook.check import files
from webhook.review.quota_edit import document_warnings


class QuotaEdit(msgspec.Struct, frozen=True):
    """The edit of a quota document."""

    changes: tuple[QuotaChange, ...]
    """Every value that differs; empty without an old document."""
    warnings: tuple[str, ...]
    """The sentences of the webhook, without those that need the ledgers or the namespaces of a cluster."""

    def as_json(self) -> dict[str, Any]:
        return {"changes": [each._asdict() for each in self.changes], "warnings": self.warnings}

    def table(self) -> Iterator[str]:
        rows = ((each.path, each.before or "-", each.after or "-") for each in self.changes)
        yield from cli.aligned([("CHANGED", "OLD", "NEW"), *rows])


def read_edit(old: Path | None, new: Path, cluster: files.OfflineCluster, now: float, *, has_nodes: bool) -> QuotaEdit:
    """Return the edit of the quota in file ``old`` to that in ``new``, whose ``cluster`` is given. Raises BadInput."""
    after = files.read_quota(new)
    quota = after.quota.at(now)
    before = files.read_quota(old).quota.at(now) if old else quota
    policy = msgspec.structs.replace(cluster.policy, quota=before) if has_nodes else None
    return QuotaEdit(tuple(changes(before, quota)), tuple(document_warnings(before, quota, after.resources, policy)))
