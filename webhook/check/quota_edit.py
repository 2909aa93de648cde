"""Compares two quota documents for the command `vcuda-webhook check`.

The result has the differences between the documents, and the warnings of the webhook for an edit from one to the other.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from vcuda import cli
from vcuda.quota.changes import QuotaChange, changes, grouped, moved, moves
from webhook.check import files
from webhook.review.first_limits import general_warning
from webhook.review.quota_edit import document_warnings, limit_changes


class QuotaEdit(msgspec.Struct, frozen=True):
    """The changes that an edit makes to a quota document, and the warnings about this edit."""

    changes: tuple[QuotaChange, ...]
    """Every value that differs between the old and the new quota document; empty if there is no old document."""
    warnings: tuple[str, ...]
    """The warnings that the webhook would give, except those that need the ledgers or namespaces of a cluster. If a
    namespace changes its team, its usage comes from the stored objects."""

    def as_json(self) -> dict[str, Any]:
        return {"changes": [each._asdict() for each in self.changes], "warnings": self.warnings}

    def table(self) -> Iterator[str]:
        rows = ((each.path, each.before or "-", each.after or "-") for each in self.changes)
        yield from cli.aligned([("CHANGED", "OLD", "NEW"), *rows])


def read_edit(old: Path | None, new: Path, cluster: files.OfflineCluster, now: float, *, has_nodes: bool) -> QuotaEdit:
    """Return the edit from the quota document in file ``old`` to the document in file ``new``. Raises BadInput.

    ``cluster``: a cluster with the new document as its quota. ``now``: the present time in Unix seconds.
    """
    after = files.read_quota(new)
    quota = after.quota.at(now)
    earlier = files.read_quota(old) if old else after
    before = earlier.quota.at(now)
    policy = msgspec.structs.replace(cluster.policy, quota=before) if has_nodes else None
    warnings = [*limit_changes(before, quota, policy), *general_warning(before, quota)]
    for name in moved(before, quota, before.named | quota.named | cluster.committed.keys()):
        warnings += moves(name, before, quota, cluster.committed.get(name, {}))
    warnings += document_warnings(quota, after.resources, policy, earlier.resources.models)
    return QuotaEdit(tuple(changes(before, quota)), tuple(grouped(warnings)))
