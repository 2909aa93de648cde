"""A state machine for the extender: calls fail, the leader changes, and tenants write annotations, in any order.

No card may be over-allocated, and no pod may be bound with other cards than the journal of its node has.
"""

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.api_double import ApiDouble, Delivery, Effect, Late, Script, delivered, lost_reply, lost_request
from tests.extended import CARD_BLOCKS, UNBOUND_SECONDS, Leader, as_stored, on_card, pod_path, store_pod

pytestmark = pytest.mark.slow

CARDS = {"n1": 2, "n2": 1}
DELIVERIES: dict[str, Delivery] = {"delivered": delivered, "lost request": lost_request, "lost reply": lost_reply}
FAULTS = st.sampled_from(["delivered"] * 6 + ["lost request", "lost reply", "late"])
"""The outcomes of an API call. Most calls succeed, because many pods must be placed before a card could be allocated
twice.
"""
LEADERS = st.sampled_from([1, 1, 1, 2])
"""The number of the leader that acts: 1 is the newest leader, and 2 is its predecessor."""
SIZES = st.sampled_from([30, 60, 75, 100, 200])
NODES = st.sampled_from([["n1"], ["n2"], ["n1", "n2"]])
TARGETS = st.sampled_from([None, None, *CARDS])
WHICH = st.integers(0, 5)
Shares = Iterable[tuple[int, int, int]]
"""For each share of a card: the number of the card, the cores, and the memory."""


class Placements(RuleBasedStateMachine):
    """Successive leaders that share one API server. Each former leader still believes that it is the leader."""

    def __init__(self) -> None:
        super().__init__()
        self.api = ApiDouble()
        self.leaders: list[Leader] = []
        self.late = Late()
        self.shown: dict[tuple[int, str], Any] = {}
        self.created = 0
        # Maps each bound pod to its node and to the cards in its annotations at its binding. The device plugin gives
        # the pod these cards.
        self.bound: dict[str, tuple[str, str]] = {}

    @initialize(before=st.booleans())
    def first(self, before: bool) -> None:
        """Start the first leader. Some pods may have been bound before the extender was installed."""
        if before:
            store_pod(self.api, "before", 60, nodeName="n1", annotations=on_card(1))
        self.take_over()

    @rule()
    @precondition(lambda self: len(self.leaders) < 4)
    def take_over(self) -> None:
        """Make another process the leader. The former leader does not notice the change."""
        leader = Leader(self.api, CARDS)
        self.leaders.append(leader)
        for name in self.pods():
            self.show(leader, name)
        leader.allocator.load()
        leader.allocator.tidy()

    @rule(cores=SIZES, nodes=NODES)
    def create(self, cores: int, nodes: list[str]) -> None:
        self.created += 1
        self.leaders[-1].filter(store_pod(self.api, f"pod-{self.created}", cores), nodes)

    @rule(which=WHICH, card=st.integers(0, 3), node=st.sampled_from(["n1", "n2", "n3"]), who=WHICH)
    @precondition(lambda self: self.pods())
    def forge(self, which: int, card: int, node: str, who: int) -> None:
        """Write forged cards into the annotations of a pod, as its owner can do, and deliver them to a leader."""
        name = self.pods()[which % len(self.pods())]
        pod = as_stored(self.api, name)
        forged = {**on_card(card, node=node), "tencent.com/predicate-time": "9" * 19}
        self.api.store(pod_path(name), {**pod, "metadata": {**pod["metadata"], "annotations": forged}})
        self.show(self.leaders[who % len(self.leaders)], name)

    @rule(which=WHICH, put=FAULTS, who=LEADERS, nodes=NODES)
    @precondition(lambda self: self.pods())
    def schedule(self, which: int, put: str, who: int, nodes: list[str]) -> None:
        """Act as the scheduler: let a leader place a pod. The leader's API calls may be lost or arrive late."""
        name = self.pods()[which % len(self.pods())]
        self.api.deliver = self.faults(PUT=put)
        self.leader(who).filter(as_stored(self.api, name), nodes)
        self.api.deliver = delivered

    @rule(which=WHICH, post=FAULTS | st.just("late"), put=FAULTS, who=LEADERS, node=TARGETS)
    @precondition(lambda self: self.placed())
    def bind(self, which: int, post: str, put: str, who: int, node: str | None) -> None:
        """Act as the scheduler: request a binding to ``node``, by default the node of the pod's last placement."""
        placed = self.placed()
        name, last = sorted(placed.items())[which % len(placed)]
        self.api.deliver = self.faults(POST=post, PUT=put)
        error = self.leader(who).bind(name, node or last)
        self.api.deliver = delivered
        assert error or as_stored(self.api, name)["spec"].get("nodeName") == (node or last)

    @rule(which=WHICH, nodes=NODES)
    @precondition(lambda self: self.placed())
    def move(self, which: int, nodes: list[str]) -> None:
        """Let a leader bind a pod by a late API call. Before it arrives, the newest leader places the pod again."""
        name = sorted(self.placed())[which % len(self.placed())]
        self.bind(which, "late", "delivered", 1, None)
        self.leaders[-1].filter(as_stored(self.api, name), nodes)

    @rule()
    def land(self) -> None:
        self.late.land()

    @rule(which=WHICH, who=WHICH)
    @precondition(lambda self: self.pods())
    def watch(self, which: int, who: int) -> None:
        self.show(self.leaders[who % len(self.leaders)], self.pods()[which % len(self.pods())])

    @rule(which=WHICH, phase=st.sampled_from(["Running", "Succeeded", None]))
    @precondition(lambda self: self.pods())
    def change(self, which: int, phase: str | None) -> None:
        name = self.pods()[which % len(self.pods())]
        pod = as_stored(self.api, name)
        if phase is None:
            self.api.remove(pod_path(name))
        elif pod["spec"].get("nodeName") and pod.get("status", {}).get("phase") != "Succeeded":
            self.api.store(pod_path(name), {**pod, "status": {"phase": phase}})

    @rule(who=WHICH, seconds=st.sampled_from([0, UNBOUND_SECONDS]))
    def tidy(self, who: int, seconds: int) -> None:
        """Let some time pass. Then let one leader remove expired placements from the journals."""
        leader = self.leaders[who % len(self.leaders)]
        leader.seconds += seconds
        leader.allocator.tidy()

    @invariant()
    def no_card_is_given_over_what_it_has(self) -> None:
        self.check({(node, uid): shares for node, uid, shares in self.entries() if self.counts(node, uid)})

    @invariant()
    def no_card_is_in_use_over_what_it_has(self) -> None:
        in_use: dict[tuple[str, str], Shares] = {}
        for name in self.pods():
            pod = as_stored(self.api, name)
            node = pod["spec"].get("nodeName")
            if not node:
                continue
            written = pod["metadata"]["annotations"]
            place = written["tencent.com/predicate-node"], written["tencent.com/predicate-gpu-idx-0"]
            bound_to, cards = self.bound.setdefault(name, place)
            assert bound_to == node
            if pod.get("status", {}).get("phase") != "Succeeded":
                limits = pod["spec"]["containers"][0]["resources"]["limits"]
                asked, blocks = limits["tencent.com/vcuda-core"], limits["tencent.com/vcuda-memory"]
                in_use[node, name] = [(int(card), min(asked, 100), blocks * 256) for card in cards.split(",")]
        self.check(in_use)

    def check(self, taken: dict[tuple[str, str], Shares]) -> None:
        cores: Counter[tuple[str, int]] = Counter()
        memory: Counter[tuple[str, int]] = Counter()
        for (node, _), shares in taken.items():
            for card, share, amount in shares:
                assert card < CARDS[node]
                cores[node, card] += share
                memory[node, card] += CARD_BLOCKS * 256 if share == 100 else amount
        assert all(used <= 100 for used in cores.values()), taken
        assert all(used <= CARD_BLOCKS * 256 for used in memory.values()), taken

    def entries(self) -> list[tuple[str, str, Shares]]:
        texts = (stored["data"]["placements"] for path, stored in self.api.objects.items() if "/configmaps/" in path)
        return [
            (node["node"], entry["uid"], [share for shares in entry["shares"].values() for share in shares])
            for node in map(json.loads, texts)
            for entry in node["placements"]
        ]

    def counts(self, node: str, uid: str) -> bool:
        name = uid.removeprefix("uid-")
        if name not in self.pods():
            return False
        pod = as_stored(self.api, name)
        return pod.get("status", {}).get("phase") != "Succeeded" and pod["spec"].get("nodeName") in (None, node)

    def pods(self) -> list[str]:
        return sorted(path.rpartition("/")[2] for path in self.api.objects if "/pods/" in path)

    def show(self, leader: Leader, name: str) -> None:
        before = self.shown.get((id(leader), name))
        leader.sees(name, before)
        self.shown[id(leader), name] = as_stored(self.api, name)

    def leader(self, who: int) -> Leader:
        return self.leaders[-min(who, len(self.leaders))]

    def placed(self) -> dict[str, str]:
        given = {uid.removeprefix("uid-"): node for node, uid, _ in self.entries()}
        return {
            name: node
            for name, node in given.items()
            if name in self.pods() and "nodeName" not in as_stored(self.api, name)["spec"]
        }

    def faults(self, **by_method: str) -> Delivery:
        """Return a network with a fault for each named HTTP method. The fault applies to the method's next call."""
        known: dict[str, Delivery] = {**DELIVERIES, "late": self.late}
        scripts = {method: Script(known[fault], methods=(method,)) for method, fault in by_method.items()}

        def deliver(method: str, timeout: float, effect: Effect) -> bytes:
            return scripts.get(method, delivered)(method, timeout, effect)

        return deliver


def test_no_order_of_calls_over_allocates_a_card() -> None:
    run_state_machine_as_test(Placements, settings=settings(max_examples=200, stateful_step_count=40))
