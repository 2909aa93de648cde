"""Computes the free cards of every node from the journals (the stored placements of pods) and from the pod watch."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping

import msgspec

from controller.extender.journal import JournalEntry, NodeJournal
from controller.extender.strategy import NodeCards
from vcuda.allocations.cards import Cards, Unplaceable, read_capacity
from vcuda.allocations.stored_pods import StoredPod
from vcuda.k8s_types import Node
from vcuda.ledger.ledger import is_older

UNREAD = Unplaceable("the placements on the node are not known yet", final=False)


class CardCache:
    """The cards of all nodes, used and free, computed from the journals and the pod watch. Thread-safe.

    ``now``: returns Unix seconds.
    ``max_terminating_seconds``: the most seconds for which a pod keeps its cards after it was deleted while it ran.

    A pod's cards count as used until the watch reports that the pod has ended, was deleted or is bound to another node.
    A pod cannot undo any of these changes. So if the watch is behind, too many cards may count as used, never too few.
    """

    def __init__(self, now: Callable[[], float] = time.time, max_terminating_seconds: float = 600.0) -> None:
        self._now = now
        self._max_terminating_seconds = max_terminating_seconds
        self._lock = threading.Lock()
        self._unused: dict[str, Cards | Unplaceable] = {}
        self._cards: dict[str, Cards | Unplaceable] = {}
        # `_entries`: the placements that use cards, by node and pod uid. A node is missing until its journal is read.
        self._entries: dict[str, dict[str, JournalEntry]] = {}
        self._versions: dict[str, str] = {}
        # `_outdated`: the nodes whose stored journals still contain placements of pods that no longer use the cards.
        self._outdated: set[str] = set()
        self._nodes_of: dict[str, set[str]] = {}
        self._pods: dict[str, StoredPod] = {}
        self._bound: dict[str, dict[str, StoredPod]] = {}

    def node_changed(self, old: Node | None, new: Node | None) -> None:
        node = new or old
        if node is None or (old and new and old.capacity == new.capacity):
            return
        with self._lock:
            if new is None:
                self._unused.pop(node.metadata.name, None)
            else:
                self._unused[node.metadata.name] = read_capacity(new.capacity)
            self._recount(node.metadata.name)

    def pod_changed(self, old: StoredPod | None, new: StoredPod | None) -> None:
        pod = new or old
        if pod is None:
            return
        with self._lock:
            if old and old.node and (bound := self._bound.get(old.node)):
                bound.pop(old.uid, None)
                if not bound:
                    del self._bound[old.node]
            if new is None:
                self._pod_deleted(pod)
                return
            self._pods[pod.uid] = new
            if new.node:
                self._bound.setdefault(new.node, {})[new.uid] = new
            for node in tuple(self._nodes_of.get(new.uid, ())):
                if _is_over(node, new):
                    self._drop(node, new.uid)

    def load(self, journal: NodeJournal) -> None:
        """Use this journal for its node from now on, unless a newer version of the node's journal was loaded before."""
        with self._lock:
            node = journal.node
            if is_older(journal.version, self._versions.get(node, "")):
                return  # Another thread has loaded a newer journal of the node.
            for uid in self._entries.get(node, ()):
                self._unlink(node, uid)
            over = {uid for uid in journal.entries if uid in self._pods and _is_over(node, self._pods[uid])}
            self._entries[node] = {uid: entry for uid, entry in journal.entries.items() if uid not in over}
            self._versions[node] = journal.version
            (self._outdated.add if over else self._outdated.discard)(node)
            for uid in self._entries[node]:
                self._nodes_of.setdefault(uid, set()).add(node)
            self._recount(node)

    def close(self, node: str) -> None:
        with self._lock:
            for uid in self._entries.pop(node, {}):
                self._unlink(node, uid)
            self._outdated.discard(node)
            self._recount(node)

    def forget(self, uid: str) -> None:
        """Remove all placements of a pod. The caller must have verified that the pod does not exist."""
        with self._lock:
            self._forget(uid)

    def journal(self, node: str) -> NodeJournal | None:
        """Return a node's journal (stored placements) without ended pods; None if it was not read yet."""
        with self._lock:
            entries = self._entries.get(node)
            return None if entries is None else NodeJournal(node, self._versions[node], dict(entries))

    def entries_of(self, uid: str) -> Mapping[str, JournalEntry]:
        with self._lock:
            return {node: self._entries[node][uid] for node in sorted(self._nodes_of.get(uid, ()))}

    def pod(self, uid: str) -> StoredPod | None:
        return self._pods.get(uid)

    def bound_to(self, node: str) -> tuple[StoredPod, ...]:
        with self._lock:
            return tuple(self._bound.get(node, {}).values())

    def unopened(self) -> frozenset[str]:
        """Return the nodes with cards whose journal (the stored placements of pods) was not read or created yet."""
        with self._lock:
            return frozenset(n for n, cards in self._unused.items() if isinstance(cards, Cards)) - self._entries.keys()

    def abandoned(self) -> frozenset[str]:
        """Return the deleted nodes whose journals (stored placements of pods) are empty and can be deleted."""
        with self._lock:
            return frozenset(n for n, entries in self._entries.items() if not entries and n not in self._unused)

    def outdated(self) -> frozenset[str]:
        with self._lock:
            return frozenset(self._outdated)

    def entries(self) -> list[tuple[str, JournalEntry]]:
        with self._lock:
            return [(node, entry) for node, entries in self._entries.items() for entry in entries.values()]

    def cards(self) -> NodeCards:
        with self._lock:
            return dict(self._cards)

    def without(self, uid: str) -> NodeCards:
        """Return the cards of all nodes as if this pod used no card, so that cards can be chosen for the pod again."""
        with self._lock:
            return {**self._cards, **{node: self._without(node, (uid,)) for node in self._nodes_of.get(uid, ())}}

    def node_without(self, node: str, uids: Iterable[str]) -> Cards | Unplaceable:
        with self._lock:
            return self._without(node, uids)

    # The callers of the private methods below must have acquired `self._lock`.

    def _without(self, node: str, uids: Iterable[str]) -> Cards | Unplaceable:
        cards, entries = self._cards.get(node, UNREAD), self._entries.get(node, {})
        if isinstance(cards, Unplaceable):
            return cards
        return cards.returned(share for uid in set(uids) if uid in entries for share in entries[uid].all_shares())

    def _pod_deleted(self, pod: StoredPod) -> None:
        # After a forced deletion, the containers of the pod may still use its cards until the grace period is over.
        ends = int(self._now() + min(pod.grace_seconds, self._max_terminating_seconds))
        entry = self._entries.get(pod.node, {}).get(pod.uid)
        self._forget(pod.uid)
        if entry and pod.live and pod.grace_seconds:
            self._entries[pod.node][pod.uid] = msgspec.structs.replace(entry, ends=ends)
            self._nodes_of.setdefault(pod.uid, set()).add(pod.node)
            self._recount(pod.node)

    def _forget(self, uid: str) -> None:
        self._pods.pop(uid, None)
        for node in tuple(self._nodes_of.get(uid, ())):
            self._drop(node, uid)

    def _drop(self, node: str, uid: str) -> None:
        cards, entry = self._cards.get(node), self._entries[node].pop(uid)
        self._unlink(node, uid)
        self._outdated.add(node)
        if isinstance(cards, Cards):
            self._cards[node] = cards.returned(entry.all_shares())

    def _unlink(self, node: str, uid: str) -> None:
        self._nodes_of[uid].discard(node)
        if not self._nodes_of[uid]:
            del self._nodes_of[uid]

    def _recount(self, node: str) -> None:
        cards = self._unused.get(node)
        if cards is None:
            self._cards.pop(node, None)
            return
        if isinstance(cards, Cards):
            entries = self._entries.get(node)
            taken = (share for entry in (entries or {}).values() for share in entry.all_shares())
            cards = UNREAD if entries is None else cards.taken(taken)
        self._cards[node] = cards


def _is_over(node: str, pod: StoredPod) -> bool:
    """Return True if the pod uses no card of this node, because it has ended or is bound to another node."""
    return not pod.live or bool(pod.node and pod.node != node)
