"""Which locks on nodes are stale. HAMi locks a node while it binds a pod there and its device plugin serves it.

The value is when that was, in RFC 3339, maybe followed by ``,NAMESPACE,POD`` (HAMi ``pkg/util/nodelock``). HAMi itself
breaks a lock of five minutes, or of a pod that is gone, but only when the next pod wants that node; until then its
device plugin fails on a lock whose pod is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from vcuda.objects import Node
from vcuda.schemes import SCHEMES, Scheme
from vcuda.stale import ABSURD, Removal, parse_rfc3339

HolderExists = Callable[[str, str], bool]
"""Whether there is a pod of this namespace and name."""


class Lock(msgspec.Struct, frozen=True):
    """A lock on a node. ``taken``: Unix seconds, or None where it does not tell; ``holder``: namespace and pod."""

    scheme: Scheme
    value: str
    taken: float | None
    holder: tuple[str, str] | None

    def expires(self, seen: float, now: float, timeout: float) -> float:
        """Return when its time is over, in Unix seconds.

        ``seen`` is when it was first seen, and counts where it does not tell a time, or one that cannot be.
        """
        believable = self.taken is not None and self.taken <= now + ABSURD
        return (self.taken if self.taken is not None and believable else seen) + timeout


def read_locks(node: Node) -> Iterator[Lock]:
    """Yield every scheme's lock on a node."""
    for scheme in SCHEMES:
        value = node.annotations.get(scheme.node_lock) if scheme.node_lock else None
        if value is not None:
            taken, *holder = value.split(",")
            named = (holder[0], holder[1]) if len(holder) == 2 and all(holder) else None  # noqa: PLR2004  # namespace, pod
            yield Lock(scheme, value, parse_rfc3339(taken), named)


def find_stale_lock(lock: Lock, expires: float, now: float, exists: HolderExists) -> Removal | None:
    """Return the removal of a lock whose time is over or whose pod is gone; ``exists`` is asked in time only."""
    keys = (str(lock.scheme.node_lock),)
    if expires <= now:
        return Removal(lock.scheme.name, "lock-expired", f"never given back: {lock.value}", keys)
    if lock.holder and not exists(*lock.holder):
        return Removal(lock.scheme.name, "lock-holder-gone", f"its pod {'/'.join(lock.holder)} does not exist", keys)
    return None
