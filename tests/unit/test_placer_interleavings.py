"""Whatever fails, whoever leads and whatever the watch has shown yet: no card is ever given over what it has."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.api_double import ApiDouble, Delivery, Late, Script, delivered, lost_reply, lost_request
from tests.extended import CARD_BLOCKS, Leader, as_stored, pod_path, seen, store_pod

CARDS = {"n1": 2, "n2": 1}
FAULTS = st.sampled_from(["delivered", "lost request", "lost reply", "late"])
SIZES = st.sampled_from([30, 60, 75, 100, 200])
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
        for promise in leader.journal.take():
            leader.book.promise(promise)
        self.leaders.append(leader)
        for name in self.pods():
            self.show(leader, name)

    @rule(cores=SIZES)
    def create(self, cores: int) -> None:
        self.created += 1
        store_pod(self.api, f"pod-{self.created}", cores)

    @rule(which=WHICH, patch=FAULTS, put=FAULTS, who=st.integers(1, 2), nodes=st.sampled_from([["n1"], ["n1", "n2"]]))
    @precondition(lambda self: self.pods())
    def schedule(self, which: int, patch: str, put: str, who: int, nodes: list[str]) -> None:
        """The scheduler asks about a pod, the newest leader or the one before it; calls get lost, or come late."""
        name = self.pods()[which % len(self.pods())]
        leader = self.leaders[-min(who, len(self.leaders))]
        patches, puts = Script(self.fault(patch), methods=("PATCH",)), Script(self.fault(put), methods=("PUT",))
        self.api.deliver = lambda method, timeout, effect: patches(
            method, timeout, lambda: puts(method, timeout, effect)
        )
        leader.filter(as_stored(self.api, name), nodes)
        self.api.deliver = delivered

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
        """A pod is bound where it was placed, ends, or is deleted."""
        name = self.pods()[which % len(self.pods())]
        pod = as_stored(self.api, name)
        node = pod["metadata"].get("annotations", {}).get("tencent.com/predicate-node")
        if phase is None:
            self.api.remove(pod_path(name))
        elif node:
            spec = {**pod["spec"], "nodeName": node}
            self.api.store(pod_path(name), {**pod, "spec": spec, "status": {"phase": phase}})

    @rule(who=WHICH)
    def look(self, who: int) -> None:
        self.leaders[who % len(self.leaders)].placer.look_for_the_gone()

    @invariant()
    def no_card_is_given_over_what_it_has(self) -> None:
        cores: Counter[tuple[str, int]] = Counter()
        memory: Counter[tuple[str, int]] = Counter()
        for name in self.pods():
            pod = as_stored(self.api, name)
            annotations = pod["metadata"].get("annotations", {})
            if not annotations or pod.get("status", {}).get("phase") == "Succeeded":
                continue
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
        leader.book.pod_changed(self.shown.get(key), new)
        self.shown[key] = new

    def fault(self, name: str) -> Delivery:
        faults: dict[str, Delivery] = {
            "delivered": delivered,
            "lost request": lost_request,
            "lost reply": lost_reply,
            "late": self.late,
        }
        return faults[name]


TestPlacements = Placements.TestCase
TestPlacements.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
