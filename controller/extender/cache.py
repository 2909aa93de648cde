"""What is taken of every node's cards, kept up with each event: what is stored, and what is on its way there."""

import threading
from collections.abc import Iterable

import msgspec

from controller.extender.strategy import NodeCards
from vcuda.allocations.cards import Cards, PodCards, Share, Unplaceable, read_cards
from vcuda.allocations.stored_pods import StoredPod
from vcuda.k8s_types import Node
from vcuda.ledger.ledger import is_older


class AssumedPlacement(msgspec.Struct, frozen=True):
    """A placement or binding that a leader has sent, or is about to, and that the watch has not shown yet.

    It is written by a call that only lands while the pod has resourceVersion ``base``; ``landed`` is the version that
    this made, and None while it may land still.
    """

    uid: str
    namespace: str
    name: str
    base: str
    cards: PodCards
    landed: str | None = None

    def is_settled_by(self, pod: StoredPod) -> bool:
        """Return whether the pod as it is seen shows the placement, or shows that it can never land."""
        if self.landed is not None:
            return not is_older(pod.version, self.landed)
        return is_older(self.base, pod.version)


class _PodShares(msgspec.Struct):
    """What counts for one pod: the cards it was last seen with, and those it is assumed to have."""

    seen: PodCards | None = None
    assumed: tuple[AssumedPlacement, ...] = ()

    def all(self) -> tuple[PodCards, ...]:
        found = [placement.cards for placement in self.assumed]
        # A placement that landed has replaced the one that was seen; while that is not known both count.
        if self.seen is not None and not any(placement.landed for placement in self.assumed):
            found.append(self.seen)
        return tuple(dict.fromkeys(found))


class CardCache:
    """The cards of all nodes, as the watches show them and as the allocator assumes them; it may be used by threads."""

    # While it is not known whether an assumed placement landed, both what was seen and what was assumed count: the
    # cache may only ever count too much, else two pods would get one share.

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unused: dict[str, Cards | Unplaceable] = {}
        self._cards: dict[str, Cards | Unplaceable] = {}
        self._pods: dict[str, _PodShares] = {}
        # The uids of pods with assumed placements, oldest first: a dict keeps the order that a set would not.
        self._assumed: dict[str, None] = {}
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
                assumed = self._shares_of(new.uid).assumed
                left = tuple(placement for placement in assumed if not placement.is_settled_by(new))
                self._set(new.uid, _PodShares(new.cards, left))
            elif old is not None:
                self._set(old.uid, _PodShares())

    def assume(self, placement: AssumedPlacement) -> None:
        """Count a placement that is about to be written."""
        with self._lock:
            self._set_assumed(placement, (*self._shares_of(placement.uid).assumed, placement))

    def confirm(self, placement: AssumedPlacement, version: str) -> None:
        """Count a placement as written: it made ``version`` of the pod. Others assumed for the pod are void."""
        with self._lock:
            # The watch may have shown that version before the answer to the patch was here: then it is settled.
            if placement in self._shares_of(placement.uid).assumed:
                self._set_assumed(placement, (msgspec.structs.replace(placement, landed=version),))

    def leave_open(self, placement: AssumedPlacement) -> None:
        """Go on counting a binding that may land still, but no earlier ones just like it beside it."""
        with self._lock:
            assumed = self._shares_of(placement.uid).assumed
            # Else each try whose outcome is not known would add one, to a journal that has an end.
            if any(other is placement for other in assumed):
                left = tuple(other for other in assumed if other is placement or other != placement)
                self._set_assumed(placement, left)

    def forget(self, placement: AssumedPlacement) -> None:
        """Count a placement no more that was not written, and never will be."""
        with self._lock:
            # By identity: one just like it may be on its way still.
            assumed = self._shares_of(placement.uid).assumed
            self._set_assumed(placement, tuple(other for other in assumed if other is not placement))

    def forget_pod(self, uid: str) -> None:
        """Count nothing more for a pod that is proven not to exist."""
        with self._lock:
            self._set(uid, _PodShares())

    def counts(self, uid: str, cards: PodCards) -> bool:
        """Return whether these shares are counted for the pod."""
        with self._lock:
            return cards in self._shares_of(uid).all()

    def assumed(self) -> tuple[AssumedPlacement, ...]:
        """Return the placements that the watch has not shown yet."""
        with self._lock:
            return tuple(placement for uid in self._assumed for placement in self._pods[uid].assumed)

    def cards(self) -> NodeCards:
        """Return the cards of every node as they are."""
        with self._lock:
            return dict(self._cards)

    def without(self, uid: str) -> NodeCards:
        """Return the cards of all nodes as they would be without this pod: what it may be placed anew on."""
        with self._lock:
            nodes = dict(self._cards)
            for node in {each.node for each in self._shares_of(uid).all()}:
                cards = nodes.get(node)
                if isinstance(cards, Cards):
                    nodes[node] = cards.returned(self._on_node[node][uid])
            return nodes

    def node_without(self, node: str, uids: Iterable[str]) -> Cards | Unplaceable | None:
        """Return the cards of one node as they would be without these pods; None where the node is not known."""
        with self._lock:
            cards = self._cards.get(node)
            held = self._on_node.get(node, {})
            if isinstance(cards, Cards):
                return cards.returned(share for uid in set(uids) for share in held.get(uid, ()))
            return cards

    # What follows is called with the lock held.

    def _shares_of(self, uid: str) -> _PodShares:
        return self._pods.get(uid, _PodShares())

    def _set_assumed(self, placement: AssumedPlacement, assumed: tuple[AssumedPlacement, ...]) -> None:
        self._set(placement.uid, _PodShares(self._shares_of(placement.uid).seen, assumed))

    def _set(self, uid: str, shares: _PodShares) -> None:
        before = self._shares_of(uid).all()
        if shares.seen is None and not shares.assumed:
            self._pods.pop(uid, None)
        else:
            self._pods[uid] = shares
        if shares.assumed:
            self._assumed[uid] = None
        else:
            self._assumed.pop(uid, None)
        after = shares.all()
        if before != after:
            for node in {each.node for each in (*before, *after)}:
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
