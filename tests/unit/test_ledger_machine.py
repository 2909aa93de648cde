"""The ledger in every order: webhooks admit, pods come, go and are torn away, leaders settle from views of any age."""

from dataclasses import dataclass, field

from hypothesis import settings, strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from vcuda.ledger.ledger import Admitted, Ledger, Pending, Terminating, admit, is_older
from vcuda.ledger.settle import Expired, ObservedPods, settle
from vcuda.quota.model import Charge, Limit, NamespaceQuota

MODELS = ("M40", "P100")
LIMITS = st.fixed_dictionaries({model: st.integers(0, 500) for model in MODELS})
models = st.sampled_from(MODELS)
amounts = st.sampled_from([20, 50, 100, 200])


@dataclass
class World:
    """What is true, whatever anybody believes: the pods that are stored, that may still be, and that still run.

    ``gone`` and ``vanished`` are what a watch has seen go since it listed, at version ``since``.
    """

    version: int = 1
    stored: dict[str, Pending] = field(default_factory=dict)
    in_flight: dict[str, Pending] = field(default_factory=dict)
    running: dict[str, Pending] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    vanished: dict[str, Terminating] = field(default_factory=dict)
    since: int = 1

    def held(self, model: str) -> int:
        """Cores that pods take which are stored, are admitted and may be stored at any moment, or run though gone."""
        pods = [*self.stored.values(), *self.in_flight.values(), *self.running.values()]
        return sum(pod.charge.cores for pod in pods if pod.model == model)

    def committed(self) -> dict[str, Charge]:
        sums: dict[str, Charge] = {}
        for pod in self.stored.values():
            sums[pod.model] = sums.get(pod.model, Charge()) + pod.charge
        return sums

    def view(self) -> ObservedPods:
        """What a consistent LIST followed by a watch knows now."""
        seen, vanished = frozenset(self.stored) | self.gone, dict(self.vanished)
        return ObservedPods(str(self.version), self.committed(), seen, vanished, str(self.since))

    def listed(self) -> ObservedPods:
        """What a consistent LIST alone knows."""
        return ObservedPods(str(self.version), self.committed(), frozenset(self.stored), since=str(self.version))


class LedgerMachine(RuleBasedStateMachine):
    """Each rule is one step of one actor; writes are atomic, as compare-and-swap makes them."""

    admitted = Bundle("admitted")
    pods = Bundle("pods")
    terminating = Bundle("terminating")
    views = Bundle("views")

    @initialize(limits=LIMITS)
    def start(self, limits: dict[str, int]) -> None:
        self.world = World()
        self.ledger = Ledger()
        self.set_limits(limits)
        self.uids = 0
        self.uncharged_at = ""

    @rule(limits=LIMITS)
    def set_limits(self, limits: dict[str, int]) -> None:
        """An edit of the quota document; a model that is left out has no limit entry at all."""
        self.quota = NamespaceQuota({model: Limit(cores) for model, cores in limits.items() if cores})
        self.world.version += 1
        self.edited = str(self.world.version)

    @rule(target=pods, limits=LIMITS, model=models)
    def store_while_not_limited(self, limits: dict[str, int], model: str) -> object:
        """The quota is taken away, a pod is stored that nobody charges, and the quota is given back."""
        if not self.world.running.keys() <= self.ledger.terminating.keys():
            return multiple()
        self.uids += 1
        uid = f"uid-{self.uids}"
        self.world.version += 1
        self.world.stored[uid] = Pending(model, Charge(100, card_memory=100))
        self.uncharged_at = str(self.world.version)
        self.set_limits(limits)
        return uid

    def complete(self) -> bool:
        """Whether the ledger's pods were counted since the last edit; a webhook decides against no other."""
        return not is_older(self.ledger.pod_resource_version, self.edited)

    @rule(target=admitted, model=models, cores=amounts)
    def ask(self, model: str, cores: int) -> object:
        """A pod is created: what is granted, beside all that is or may be stored, is within the limit in force."""
        self.uids += 1
        uid = f"uid-{self.uids}"
        asked = Pending(model, Charge(cores, card_memory=cores))
        if not self.complete():
            self.ledger = settle(self.ledger, self.world.listed(), counted_since=self.edited)
        decision = admit(self.ledger, uid, asked, self.quota, enforced=True)
        if not isinstance(decision, Admitted):
            return multiple()
        self.ledger = decision.ledger
        self.world.in_flight[uid] = asked
        assert self.world.held(model) <= self.quota.limits[model].cores
        return uid

    @rule(uid=admitted)
    def ask_again(self, uid: str) -> None:
        """The API server repeats a call whose answer was lost: nothing is charged twice."""
        if uid not in self.world.in_flight or not self.complete():
            return
        before = self.ledger
        decision = admit(before, uid, self.world.in_flight[uid], self.quota, enforced=True)
        assert isinstance(decision, Admitted)
        assert decision.ledger == before

    @rule(target=pods, uid=consumes(admitted))
    def store(self, uid: str) -> object:
        """The API server stores an admitted pod."""
        pod = self.world.in_flight.pop(uid, None)
        if pod is None:
            return multiple()
        self.world.version += 1
        self.world.stored[uid] = pod
        return uid

    @rule(uid=consumes(admitted))
    def lose(self, uid: str) -> None:
        """A pod is never stored: refused by a later webhook, its name taken, its client gone."""
        self.world.in_flight.pop(uid, None)

    @rule(uid=consumes(pods))
    def end(self, uid: str) -> None:
        """A pod ends, or is deleted before it was bound."""
        self.world.version += 1
        del self.world.stored[uid]
        self.world.gone.add(uid)

    @rule(target=terminating, uid=consumes(pods))
    def force_delete(self, uid: str) -> object:
        """A bound pod is deleted at once; kubelet lets its containers run on.

        Before pods are counted that nobody charged, they may hide it: no tenant has the quota taken away.
        """
        if is_older(self.ledger.pod_resource_version, self.uncharged_at):
            self.end(uid)
            return multiple()
        self.world.version += 1
        pod = self.world.running[uid] = self.world.stored.pop(uid)
        self.world.gone.add(uid)
        self.world.vanished[uid] = Terminating(pod.model, pod.charge, 600)
        return uid

    @rule(uid=consumes(terminating))
    def stop_running(self, uid: str) -> None:
        """The grace period is over."""
        del self.world.running[uid]
        self.world.vanished.pop(uid, None)

    @rule()
    def miss(self) -> None:
        """The watch has a gap, or another leader begins: how anything has gone before its list, it does not know."""
        self.world.gone.clear()
        self.world.vanished.clear()
        self.world.since = self.world.version

    @rule(target=views)
    def look(self) -> ObservedPods:
        """A controller lists and watches up to now. The view may be used much later, by a leader that was asleep."""
        return self.world.view()

    @rule(view=views, proves=st.booleans())
    def settle(self, view: ObservedPods, proves: bool) -> None:
        """A leader settles from a view of any age; it may have proven which pending pods can never be stored.

        That takes longer than what nobody saw go is held for, and so than anything runs in this model.
        """
        known = self.world.in_flight.keys() | self.world.stored.keys() | self.world.running.keys()
        absent = {uid for uid in self.ledger.pending if uid not in known} if proves else set()
        self.ledger = settle(self.ledger, view, Expired(absent), counted_since=max(self.edited, view.since, key=int))

    @rule()
    def release(self) -> None:
        """What is terminating goes in time: a pod with its grace period, and what nobody saw go when nothing runs."""
        running = self.world.running
        over = {key for key in self.ledger.terminating if key not in running and ("@" not in key or not running)}
        self.ledger = settle(self.ledger, ObservedPods("", {}, ()), Expired(ended=over))

    @invariant()
    def counts_enough(self) -> None:
        """A ledger that is decided against never shows less than what is stored or may be."""
        if hasattr(self, "world") and self.complete():
            for model in MODELS:
                assert self.ledger.usage(model).used.cores >= self.world.held(model)

    def teardown(self) -> None:
        """In the end every charge of a pod that is gone is released, and nothing else."""
        if not hasattr(self, "world"):
            return
        self.world.in_flight.clear()
        absent = self.ledger.pending.keys() - self.world.stored.keys()
        ledger = settle(self.ledger, self.world.view(), Expired(absent))
        ledger = settle(ledger, ObservedPods("", {}, ()), Expired(ended=ledger.terminating.keys()))
        assert (ledger.pending, ledger.terminating) == ({}, {})
        assert ledger.committed == self.world.committed()


LedgerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestLedger = LedgerMachine.TestCase
