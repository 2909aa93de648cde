"""The quota: which GPU models, and how much of each, a namespace may use.

These are the values that decisions are made from; ``vcuda.quota.document`` reads them from what people write.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import msgspec

SYSTEM_NAMESPACES = frozenset({"kube-system", "kube-public", "kube-node-lease"})

UNASKED_NAMESPACES = frozenset({"kube-system", "vcuda-quota", "vcuda-quota-node"})
"""Namespaces about whose pods the API server asks nobody, as manifests/base/registration.yaml has it."""


class Mode(enum.StrEnum):
    """What happens to a pod over quota: refused, admitted with a warning, or admitted and only recorded."""

    ENFORCE = "enforce"
    WARN = "warn"
    AUDIT = "audit"


class Limit(msgspec.Struct, frozen=True):
    """What one namespace may use of one model.

    ``cores`` are hundredths of a card: 8 cards are 800; 0 is a hard block. ``memory`` is in MiB; None: not limited.
    """

    cores: int
    memory: int | None = None


class NamespaceQuota(msgspec.Struct, frozen=True):
    """What one namespace may use.

    ``limits`` maps a model to its limit, in the order of the document; a model that is not in it may not be used.
    ``pools`` are the pools its pods may run in; empty: every pool.
    """

    limits: Mapping[str, Limit]
    pools: tuple[str, ...] = ()
    mode: Mode = Mode.ENFORCE


class Quota(msgspec.Struct, frozen=True):
    """The whole quota; ``Quota()`` limits nobody.

    ``default`` is the ``*`` entry, for namespaces without their own; None: those are not limited. It never applies
    to the namespaces in ``system``, where a refused pod can stop the cluster. ``version`` is the resourceVersion of the
    document in a cluster: an etcd revision, so a count of pods at one that is not older has every pod that was
    admitted by an earlier document, and stored by then.
    """

    namespaces: Mapping[str, NamespaceQuota] = {}
    default: NamespaceQuota | None = None
    system: frozenset[str] = SYSTEM_NAMESPACES
    version: str = ""

    def for_namespace(self, name: str) -> NamespaceQuota | None:
        """Return the quota of namespace ``name``, None where it is not limited.

        Its own entry always applies, to a system namespace too; but where the API server asks nobody about its pods,
        as about those of kube-system, they are only counted.
        """
        own = self.namespaces.get(name)
        if own is not None:
            return own
        return None if name in self.system else self.default


EMPTY = Quota()
