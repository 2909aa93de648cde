"""Whatever fails, whoever leads and whatever the watch has shown yet: no card is ever given over what it has.

And no pod is ever bound to another node than the one its cards are on.
"""

from collections import Counter
from typing import Any

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.api_double import ApiDouble, Delivery, Effect, Late, Script, delivered, lost_reply, lost_request
from tests.extended import CARD_BLOCKS, Leader, as_stored, pod_path, seen, store_pod

CARDS = {"n1": 2, "n2": 1}
DELIVERIES: dict[str, Delivery] = {"delivered": delivered, "lost request": lost_request, "lost reply": lost_reply}
FAULTS = st.sampled_from(["delivered"] * 6 + ["lost request", "lost reply", "late"])
"""Mostly none: pods have to be placed for anything to be given twice."""
LEADERS = st.sampled_from([1, 1, 1, 2])
"""The newest leader, or the one before it."""
SIZES = st.sampled_from([30, 60, 75, 100, 200])
NODES = st.sampled_from([["n1"], ["n2"], ["n1", "n2"]])
TARGETS = st.sampled_from([None, None, *CARDS])
WHICH = st.integers(0, 5)


class Placements(RuleBasedStateMachine):
    """Leaders that come one after the other, of which each thinks that it still leads, beside one API server."""

    def __init__(self) -> None:
        super().__init__()
        self.api = ApiDouble()
        self.leaders: list[Leader] = []
        self.late = Late()
        self.shown: dict[tuple[int, str], Any] = {}
        self.created = 0

    @initialize()
    def first(self) -> None:
        self.take_over()

    @rule()
    @precondition(lambda self: len(self.leaders) < 4)
    def take_over(self) -> None:
        """Another process takes the lease, and with it the journal; the last one does not know."""
        leader = Leader(self.api, f"leader-{len(self.leaders)}", CARDS)
        leader.takes()
        self.leaders.append(leader)
        for name in self.pods():
            self.show(leader, name)

    @rule(cores=SIZES, nodes=NODES)
    def create(self, cores: int, nodes: list[str]) -> None:
        """A pod comes, and the scheduler asks about it."""
        self.created += 1
        self.leaders[-1].filter(store_pod(self.api, f"pod-{self.created}", cores), nodes)

    @rule(which=WHICH, patch=FAULTS, put=FAULTS, who=LEADERS, nodes=NODES)
    @precondition(lambda self: self.pods())
    def schedule(self, which: int, patch: str, put: str, who: int, nodes: list[str]) -> None:
        """The scheduler asks about a pod, the newest leader or the one before it; calls get lost, or come late."""
        name = self.pods()[which % len(self.pods())]
        self.api.deliver = self.faults(PATCH=patch, PUT=put)
        self.leader(who).filter(as_stored(self.api, name), nodes)
        self.api.deliver = delivered

    @rule(which=WHICH, post=FAULTS | st.just("late"), put=FAULTS, who=LEADERS, node=TARGETS)
    @precondition(lambda self: self.placed())
    def bind(self, which: int, post: str, put: str, who: int, node: str | None) -> None:
        """The scheduler has a pod bound to the node that it was placed on, or to one from which it may have moved."""
        name = self.placed()[which % len(self.placed())]
        node = node or as_stored(self.api, name)["metadata"]["annotations"]["tencent.com/predicate-node"]
        self.api.deliver = self.faults(POST=post, PUT=put)
        error = self.leader(who).bind(name, node)
        self.api.deliver = delivered
        assert error or as_stored(self.api, name)["spec"].get("nodeName") == node

    @rule(which=WHICH, nodes=NODES)
    @precondition(lambda self: self.placed())
    def move(self, which: int, nodes: list[str]) -> None:
        """While a pod is being bound the scheduler's next leader has it placed anew."""
        name = self.placed()[which % len(self.placed())]
        self.bind(which, "late", "delivered", 1, None)
        self.leaders[-1].filter(as_stored(self.api, name), nodes)

    @rule()
    def land(self) -> None:
        """What was on its way gets there."""
        self.late.land()

    @rule(which=WHICH, who=WHICH)
    @precondition(lambda self: self.pods())
    def watch(self, which: int, who: int) -> None:
        """One leader is shown one pod as it is."""
        self.show(self.leaders[who % len(self.leaders)], self.pods()[which % len(self.pods())])

    @rule(which=WHICH, phase=st.sampled_from(["Running", "Succeeded", None]))
    @precondition(lambda self: self.pods())
    def change(self, which: int, phase: str | None) -> None:
        """A pod runs where it is bound, ends, or is deleted."""
        name = self.pods()[which % len(self.pods())]
        pod = as_stored(self.api, name)
        if phase is None:
            self.api.remove(pod_path(name))
        elif pod["spec"].get("nodeName") and pod.get("status", {}).get("phase") != "Succeeded":
            self.api.store(pod_path(name), {**pod, "status": {"phase": phase}})

    @rule(who=WHICH)
    def look(self, who: int) -> None:
        self.leaders[who % len(self.leaders)].allocator.forget_gone()

    @invariant()
    def no_card_is_given_over_what_it_has(self) -> None:
        cores: Counter[tuple[str, int]] = Counter()
        memory: Counter[tuple[str, int]] = Counter()
        for name in self.pods():
            pod = as_stored(self.api, name)
            annotations = pod["metadata"].get("annotations", {})
            if not annotations or pod.get("status", {}).get("phase") == "Succeeded":
                continue
            assert pod["spec"].get("nodeName") in (None, annotations["tencent.com/predicate-node"])
            limits = pod["spec"]["containers"][0]["resources"]["limits"]
            asked, blocks = limits["tencent.com/vcuda-core"], limits["tencent.com/vcuda-memory"]
            for card in annotations["tencent.com/predicate-gpu-idx-0"].split(","):
                key = (annotations["tencent.com/predicate-node"], int(card))
                cores[key] += min(asked, 100)
                memory[key] += CARD_BLOCKS if asked >= 100 else blocks
        assert all(used <= 100 for used in cores.values()), cores
        assert all(used <= CARD_BLOCKS for used in memory.values()), memory

    def pods(self) -> list[str]:
        return sorted(path.rpartition("/")[2] for path in self.api.objects if "/pods/" in path)

    def show(self, leader: Leader, name: str) -> None:
        key = (id(leader), name)
        new = seen(as_stored(self.api, name))
        leader.cache.pod_changed(self.shown.get(key), new)
        self.shown[key] = new

    def leader(self, who: int) -> Leader:
        """The newest leader, or the one before it."""
        return self.leaders[-min(who, len(self.leaders))]

    def placed(self) -> list[str]:
        """The pods that have cards and are not bound."""
        pods = {name: as_stored(self.api, name) for name in self.pods()}
        return [n for n, pod in pods.items() if "annotations" in pod["metadata"] and "nodeName" not in pod["spec"]]

    def faults(self, **by_method: str) -> Delivery:
        """Deliver the next call of each of these methods as named, and all others as they are."""
        known: dict[str, Delivery] = {**DELIVERIES, "late": self.late}
        scripts = {method: Script(known[fault], methods=(method,)) for method, fault in by_method.items()}

        def deliver(method: str, timeout: float, effect: Effect) -> bytes:
            return scripts.get(method, delivered)(method, timeout, effect)

        return deliver


TestPlacements = Placements.TestCase
TestPlacements.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
