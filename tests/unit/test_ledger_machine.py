"""The ledger under every interleaving: webhooks admit, pods come and go, leaders settle from views of any age."""

from dataclasses import dataclass, field

from hypothesis import settings, strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from vcuda.ledger.ledger import Admitted, Ledger, ObservedPods, Pending, admit, is_older, settle
from vcuda.quota.model import Charge, Limit, NamespaceQuota

MODELS = ("M40", "P100")
LIMITS = st.fixed_dictionaries({model: st.integers(0, 500) for model in MODELS})
models = st.sampled_from(MODELS)
amounts = st.sampled_from([20, 50, 100, 200])


@dataclass
class World:
    """What is true, whatever anybody believes: the pods that are stored, and those that may still be."""

    version: int = 1
    stored: dict[str, Pending] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    in_flight: dict[str, Pending] = field(default_factory=dict)

    def held(self, model: str) -> int:
        """Cores that stored pods take, or pods that are admitted and may be stored at any moment."""
        pods = [*self.stored.values(), *self.in_flight.values()]
        return sum(pod.charge.cores for pod in pods if pod.model == model)

    def view(self) -> ObservedPods:
        """What a consistent LIST followed by a watch knows now."""
        committed: dict[str, Charge] = {}
        for pod in self.stored.values():
            committed[pod.model] = committed.get(pod.model, Charge()) + pod.charge
        return ObservedPods(str(self.version), committed, frozenset(self.stored) | self.gone)


class LedgerMachine(RuleBasedStateMachine):
    """Each rule is one step of one actor; writes are atomic, as compare-and-swap makes them."""

    admitted = Bundle("admitted")
    pods = Bundle("pods")
    views = Bundle("views")

    @initialize(limits=LIMITS)
    def start(self, limits: dict[str, int]) -> None:
        self.world = World()
        self.ledger = Ledger()
        self.set_limits(limits)
        self.uids = 0

    @rule(limits=LIMITS)
    def set_limits(self, limits: dict[str, int]) -> None:
        """An edit of the quota document; a model that is left out has no limit entry at all."""
        self.quota = NamespaceQuota({model: Limit(cores) for model, cores in limits.items() if cores})
        self.world.version += 1
        self.edited = str(self.world.version)

    @rule(target=pods, limits=LIMITS, model=models)
    def store_while_not_limited(self, limits: dict[str, int], model: str) -> str:
        """The quota is taken away, a pod is stored that nobody charges, and the quota is given back."""
        self.uids += 1
        uid = f"uid-{self.uids}"
        self.world.version += 1
        self.world.stored[uid] = Pending(model, Charge(100, card_memory=100))
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
            self.ledger = settle(self.ledger, self.world.view(), counted_since=self.edited)
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
        """A pod ends or is deleted."""
        self.world.version += 1
        del self.world.stored[uid]
        self.world.gone.add(uid)

    @rule(target=views)
    def look(self) -> ObservedPods:
        """A controller lists and watches up to now. The view may be used much later, by a leader that was asleep."""
        return self.world.view()

    @rule(view=views, proves=st.booleans())
    def settle(self, view: ObservedPods, proves: bool) -> None:
        """A leader settles from a view of any age; it may have proven which pending pods can never be stored."""
        known = self.world.in_flight.keys() | self.world.stored.keys()
        absent = {uid for uid in self.ledger.pending if uid not in known} if proves else set()
        self.ledger = settle(self.ledger, view, absent, self.edited)

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
        ledger = settle(self.ledger, self.world.view(), absent)
        assert ledger.pending == {}
        assert ledger.committed == self.world.view().committed


LedgerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestLedger = LedgerMachine.TestCase
