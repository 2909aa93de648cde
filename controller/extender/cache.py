"""What is taken of every node's cards, kept up with each event: what is stored, and what is on its way there."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

import msgspec

from controller.extender.strategy import NodeCards
from vcuda.allocations.cards import Cards, PodCards, Share, Unplaceable, read_cards
from vcuda.allocations.stored_pods import StoredPod
from vcuda.k8s_types import Node
from vcuda.ledger.ledger import is_older


class AssumedPlacement(msgspec.Struct, frozen=True):
    """A placement or binding of ours that the watch has not shown yet.

    It is written by a call that only lands while the pod has resourceVersion ``base``; ``landed`` is the version that
    this made, and None while it may land still. The shares are the pod's until its own version tells what came of it.
    """

    uid: str
    namespace: str
    name: str
    base: str
    holding: PodCards
    landed: str | None = None

    def is_settled_by(self, pod: StoredPod) -> bool:
        """Return whether the pod as it is seen shows the placement, or shows that it can never land."""
        if self.landed is not None:
            return not is_older(pod.version, self.landed)
        return is_older(self.base, pod.version)


class _Account(msgspec.Struct):
    """What counts for one pod: what it was last seen with, and what is promised to it."""

    seen: PodCards | None = None
    promises: tuple[AssumedPlacement, ...] = ()

    def holdings(self) -> tuple[PodCards, ...]:
        """Return all that the pod may have, each once. A placement that landed has replaced the one that was seen."""
        held = [promise.holding for promise in self.promises]
        if self.seen is not None and not any(promise.landed for promise in self.promises):
            held.append(self.seen)
        return tuple(dict.fromkeys(held))


class CardCache:
    """The cards of all nodes. Fed by the watches, each in its own thread, and by the placer with its promises.

    While it is not known whether a promise was kept, both what was seen and what was promised count: the book may only
    ever count too much.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unused: dict[str, Cards | Unplaceable] = {}
        self._cards: dict[str, Cards | Unplaceable] = {}
        self._accounts: dict[str, _Account] = {}
        self._promised: dict[str, None] = {}
        self._on_node: dict[str, dict[str, tuple[Share, ...]]] = {}

    def node_changed(self, old: Node | None, new: Node | None) -> None:
        """Take over a node that came, went or changed."""
        node = new or old
        if node is None or (old and new and old.capacity == new.capacity):
            return
        name = node.metadata.name
        with self._lock:
            if new is None:
                self._unused.pop(name, None)
                self._cards.pop(name, None)
            else:
                self._unused[name] = read_cards(new.capacity)
                self._recount(name)

    def pod_changed(self, old: StoredPod | None, new: StoredPod | None) -> None:
        """Take over a pod that came, went or changed."""
        with self._lock:
            if new is not None:
                account = self._accounts.get(new.uid, _Account())
                left = tuple(promise for promise in account.promises if not promise.is_settled_by(new))
                self._set(new.uid, _Account(new.cards, left))
            elif old is not None:
                self._set(old.uid, _Account())

    def promise(self, promise: AssumedPlacement) -> None:
        """Count a placement that is about to be written."""
        with self._lock:
            account = self._accounts.get(promise.uid, _Account())
            self._set(promise.uid, _Account(account.seen, (*account.promises, promise)))

    def withdraw(self, promise: AssumedPlacement) -> None:
        """Count a placement no more that was not written, and never will be."""
        with self._lock:
            account = self._accounts.get(promise.uid, _Account())
            self._set(promise.uid, _Account(account.seen, tuple(p for p in account.promises if p is not promise)))

    def linger(self, promise: AssumedPlacement) -> None:
        """Count a binding on that may land still; earlier ones just like it need not be counted beside it.

        Else each try whose outcome is not known would add one, to a journal that has an end.
        """
        with self._lock:
            account = self._accounts.get(promise.uid, _Account())
            if any(other is promise for other in account.promises):
                left = tuple(other for other in account.promises if other is promise or other != promise)
                self._set(promise.uid, _Account(account.seen, left))

    def keep(self, promise: AssumedPlacement, version: str) -> None:
        """Count a placement as written: it made ``version`` of the pod, and others that were promised to it are void.

        The watch may have shown that version before the answer to the patch was here; then there is nothing to do.
        """
        with self._lock:
            account = self._accounts.get(promise.uid, _Account())
            if promise in account.promises:
                kept = msgspec.structs.replace(promise, landed=version)
                self._set(promise.uid, _Account(account.seen, (kept,)))

    def holds(self, uid: str, holding: PodCards) -> bool:
        """Return whether these shares are counted for the pod."""
        with self._lock:
            return holding in self._accounts.get(uid, _Account()).holdings()

    def forget(self, uid: str) -> None:
        """Count nothing more for a pod that is proven not to exist."""
        with self._lock:
            self._set(uid, _Account())

    def promises(self) -> tuple[AssumedPlacement, ...]:
        """Return the placements that the watch has not shown yet."""
        with self._lock:
            return tuple(promise for uid in self._promised for promise in self._accounts[uid].promises)

    def without(self, uid: str) -> NodeCards:
        """Return the cards of all nodes as they would be without this pod: what it may be placed anew on."""
        with self._lock:
            known = dict(self._cards)
            for node in {holding.node for holding in self._accounts.get(uid, _Account()).holdings()}:
                cards = known.get(node)
                if isinstance(cards, Cards):
                    known[node] = cards.returned(self._on_node[node][uid])
            return known

    def without_all(self, node: str, uids: Iterable[str]) -> Cards | Unplaceable | None:
        """Return the cards of one node as they would be without these pods; None where the node is not known."""
        with self._lock:
            cards = self._cards.get(node)
            held = self._on_node.get(node, {})
            if isinstance(cards, Cards):
                return cards.returned(share for uid in set(uids) for share in held.get(uid, ()))
            return cards

    def cards(self) -> Mapping[str, Cards | Unplaceable]:
        """Return the cards of every node as they are."""
        with self._lock:
            return dict(self._cards)

    def _set(self, uid: str, account: _Account) -> None:
        """Replace a pod's account; the caller holds the lock."""
        before = self._accounts.get(uid, _Account()).holdings()
        if account.seen is None and not account.promises:
            self._accounts.pop(uid, None)
        else:
            self._accounts[uid] = account
        if account.promises:
            self._promised[uid] = None
        else:
            self._promised.pop(uid, None)
        after = account.holdings()
        if before != after:
            for node in {holding.node for holding in (*before, *after)}:
                self._move(node, uid, tuple(share for each in after if each.node == node for share in each.shares))

    def _move(self, node: str, uid: str, shares: tuple[Share, ...]) -> None:
        held = self._on_node.setdefault(node, {})
        before = held.pop(uid, ())
        if shares:
            held[uid] = shares
        elif not held:
            del self._on_node[node]
        cards = self._cards.get(node)
        if isinstance(cards, Cards):
            self._cards[node] = cards.returned(before).taken(shares)

    def _recount(self, node: str) -> None:
        cards = self._unused[node]
        if isinstance(cards, Cards):
            held = self._on_node.get(node, {})
            cards = cards.taken(share for shares in held.values() for share in shares)
        self._cards[node] = cards
