"""No order of admissions, repeated calls, dry runs, settlements and quota edits ever admits more than the quota."""

from __future__ import annotations

from fractions import Fraction

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from vcuda.charge import Charge, Usage
from vcuda.ledger import Granted, Ledger, Refused, StoredView, settle
from vcuda.quota import Limit, Mode, NamespaceQuota
from webhook.ledgers import Busy, Demand, MemoryLedgers

MODELS = ("M40", "P100")
CHARGES = st.builds(Charge, st.integers(1, 300), st.integers(0, 2000), st.integers(0, 300))
LIMITS = st.builds(Limit, st.integers(0, 1000), st.none() | st.integers(1, 5000))
QUOTAS = st.builds(NamespaceQuota, st.dictionaries(st.sampled_from(MODELS), LIMITS), mode=st.sampled_from(Mode))
ROOMY = NamespaceQuota(dict.fromkeys(MODELS, Limit(1000)))
Decision = Granted | Refused | Busy


def total(charges: list[Charge]) -> Charge:
    """Return the sum, worked out apart from the code under test."""
    return Charge(
        sum(charge.cores for charge in charges),
        sum(charge.memory for charge in charges),
        sum(charge.card_memory for charge in charges),
    )


def within(charge: Charge, limit: Limit | None) -> bool:
    """Return whether a total is within a limit, in exact arithmetic; a model without a limit may not be used."""
    limit = limit or Limit(0)
    if limit.memory is None:
        return charge.cores <= limit.cores
    cards = Fraction(charge.card_memory * limit.memory, limit.cores) if limit.cores else 0
    return charge.cores <= limit.cores and charge.memory + cards <= limit.memory


class Admissions(RuleBasedStateMachine):
    """Any interleaving on one namespace, beside a plain record of the pods that were admitted and are not gone."""

    demands = Bundle[Demand]("demands")

    def __init__(self) -> None:
        super().__init__()
        self.quota = ROOMY
        self.admitted: dict[str, Demand] = {}
        self.finished: set[str] = set()
        self.numbered = 0

    def decide(self, demand: Demand) -> Decision:
        """Put the demand to the store under test."""
        raise NotImplementedError

    def counted(self, model: str) -> Charge:
        """Return the most that the store may count now."""
        raise NotImplementedError

    def taken(self, model: str) -> list[Charge]:
        return [demand.charge for demand in self.admitted.values() if demand.model == model]

    def put(self, demand: Demand) -> None:
        """Have a demand decided: an enforced quota grants only what fits the limit in force, any other everything."""
        limit, counted = demand.quota.limits.get(demand.model), self.counted(demand.model)
        fits = within(total([*self.taken(demand.model), demand.charge]), limit)
        decision = self.decide(demand)
        if isinstance(decision, Granted):
            assert fits or (demand.quota.mode is not Mode.ENFORCE and decision.shortage)
            if not demand.dry_run:
                self.admitted[demand.uid] = demand
        else:
            assert isinstance(decision, Refused)
            assert demand.quota.mode is Mode.ENFORCE
            assert not within(total([counted, demand.charge]), limit)

    @rule(quota=QUOTAS)
    def edit_quota(self, quota: NamespaceQuota) -> None:
        self.quota = quota

    @rule(target=demands, model=st.sampled_from(MODELS), charge=CHARGES, dry_run=st.booleans())
    def admit(self, model: str, charge: Charge, dry_run: bool) -> Demand:
        self.numbered += 1
        name, uid = f"pod-{self.numbered}", f"uid-{self.numbered}"
        demand = Demand("team-a", name, uid, model, charge, self.quota, 0, float("inf"), dry_run)
        self.put(demand)
        return demand

    @rule(demand=demands)
    def repeat(self, demand: Demand) -> None:
        """What was granted is granted again, whatever the quota is by now; what was refused is decided anew."""
        if demand.uid in self.admitted:
            assert isinstance(self.decide(demand), Granted)
        elif demand.uid not in self.finished:
            self.put(msgspec.structs.replace(demand, quota=self.quota))


class InMemory(Admissions):
    """The store of the embedded mode: it is exact."""

    def __init__(self) -> None:
        super().__init__()
        self.ledgers = MemoryLedgers()

    def decide(self, demand: Demand) -> Decision:
        return self.ledgers.charge(demand)

    def counted(self, model: str) -> Charge:
        return total(self.taken(model))

    @invariant()
    def every_admitted_uid_is_charged_once(self) -> None:
        usages = self.ledgers.headroom("team-a")
        assert {model: usages.get(model, Usage()).used for model in MODELS} == {
            model: total(self.taken(model)) for model in MODELS
        }
        assert self.ledgers.headroom("team-b") == {}


class Settled(Admissions):
    """The ledger beside a controller that recounts from views which may be late: it never forgets a pod."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.stored: dict[str, Demand] = {}
        self.lost: set[str] = set()
        self.version = 0
        self.views = [StoredView("0", {}, frozenset())]

    def decide(self, demand: Demand) -> Decision:
        if demand.uid in self.stored:
            return Granted(self.ledger, Usage(), Limit(0))  # the API server asks no more about a pod it has stored
        decision = demand.decide(self.ledger)
        if isinstance(decision, Granted) and not demand.dry_run:
            self.ledger = decision.ledger
        return decision

    def counted(self, model: str) -> Charge:
        return self.ledger.usage(model).used

    def finish(self, uid: str) -> None:
        del self.admitted[uid]
        self.finished.add(uid)

    @precondition(lambda self: self.admitted.keys() - self.stored.keys())
    @rule(data=st.data())
    def store_a_pod(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from(sorted(self.admitted.keys() - self.stored.keys())))
        self.stored[uid] = self.admitted[uid]
        self.version += 1

    @precondition(lambda self: self.admitted.keys() - self.stored.keys())
    @rule(data=st.data())
    def lose_a_pod(self, data: st.DataObject) -> None:
        """Another webhook refuses it, or the API server fails: it is never stored."""
        uid = data.draw(st.sampled_from(sorted(self.admitted.keys() - self.stored.keys())))
        self.lost.add(uid)
        self.finish(uid)

    @precondition(lambda self: self.stored)
    @rule(data=st.data())
    def delete_a_pod(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from(sorted(self.stored)))
        del self.stored[uid]
        self.version += 1
        self.finish(uid)

    def list_pods(self) -> StoredView:
        committed = {model: total([d.charge for d in self.stored.values() if d.model == model]) for model in MODELS}
        seen = frozenset(self.stored.keys() | (self.finished - self.lost))
        return StoredView(str(self.version), committed, seen)

    @rule()
    def settle_late(self) -> None:
        """A leader that was replaced a while ago, and has not noticed, writes what it saw then."""
        self.ledger = settle(self.ledger, self.views[0], self.lost)
        self.views = self.views[1:] or self.views

    @rule()
    def settle(self) -> None:
        self.views.append(self.list_pods())
        self.ledger = settle(self.ledger, self.views[-1], self.lost)

    @invariant()
    def no_admitted_pod_is_forgotten(self) -> None:
        for model in MODELS:
            counted, taken = self.ledger.usage(model).used, total(self.taken(model))
            assert counted.peak(taken) == counted


@pytest.mark.parametrize("machine", [InMemory, Settled])
def test_never_more_than_the_limit_in_force_at_admission(machine: type[Admissions]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=150, stateful_step_count=30, deadline=None))
