"""No order of admissions, repeated calls, dry runs, settlements and quota edits ever admits more than the quota."""

from __future__ import annotations

import asyncio
from fractions import Fraction

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from vcuda.ledger.ledger import Admitted, Refused
from vcuda.quota.model import Charge, Limit, Mode, NamespaceQuota, Usage
from webhook.ledgers import ChargeRequest, MemoryLedgers, RetryLater

MODELS = ("M40", "P100")
CHARGES = st.builds(Charge, st.integers(1, 300), st.integers(0, 2000), st.integers(0, 300))
LIMITS = st.builds(Limit, st.integers(0, 1000), st.none() | st.integers(1, 5000))
QUOTAS = st.builds(NamespaceQuota, st.dictionaries(st.sampled_from(MODELS), LIMITS), mode=st.sampled_from(Mode))
ROOMY = NamespaceQuota(dict.fromkeys(MODELS, Limit(1000)))
Decision = Admitted | Refused | RetryLater


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

    demands = Bundle[ChargeRequest]("demands")

    def __init__(self) -> None:
        super().__init__()
        self.quota = ROOMY
        self.admitted: dict[str, ChargeRequest] = {}
        self.finished: set[str] = set()
        self.numbered = 0

    def decide(self, demand: ChargeRequest) -> Decision:
        """Put the demand to the store under test."""
        raise NotImplementedError

    def counted(self, model: str) -> Charge:
        """Return the most that the store may count now."""
        raise NotImplementedError

    def taken(self, model: str) -> list[Charge]:
        return [demand.charge for demand in self.admitted.values() if demand.model == model]

    def put(self, demand: ChargeRequest) -> None:
        """Have a demand decided: an enforced quota grants only what fits the limit in force, any other everything."""
        limit, counted = demand.quota.limits.get(demand.model), self.counted(demand.model)
        fits = within(total([*self.taken(demand.model), demand.charge]), limit)
        decision = self.decide(demand)
        if isinstance(decision, Admitted):
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
    def admit(self, model: str, charge: Charge, dry_run: bool) -> ChargeRequest:
        self.numbered += 1
        uid = f"uid-{self.numbered}"
        demand = ChargeRequest("team-a", uid, model, charge, self.quota, float("inf"), dry_run=dry_run)
        self.put(demand)
        return demand

    @rule(demand=demands)
    def repeat(self, demand: ChargeRequest) -> None:
        """What was granted is granted again, whatever the quota is by now; what was refused is decided anew."""
        if demand.uid in self.admitted:
            assert isinstance(self.decide(demand), Admitted)
        elif demand.uid not in self.finished:
            self.put(msgspec.structs.replace(demand, quota=self.quota))


class InMemory(Admissions):
    """The store of the embedded mode: it is exact."""

    def __init__(self) -> None:
        super().__init__()
        self.ledgers = MemoryLedgers()

    def decide(self, demand: ChargeRequest) -> Decision:
        return asyncio.run(self.ledgers.charge(demand))

    def counted(self, model: str) -> Charge:
        return total(self.taken(model))

    @invariant()
    def every_admitted_uid_is_charged_once(self) -> None:
        usages = asyncio.run(self.ledgers.usage("team-a"))
        assert {model: usages.get(model, Usage()).used for model in MODELS} == {
            model: total(self.taken(model)) for model in MODELS
        }
        assert asyncio.run(self.ledgers.usage("team-b")) == {}


def test_never_more_than_the_limit_in_force_at_admission() -> None:
    run_state_machine_as_test(InMemory, settings=settings(max_examples=150, stateful_step_count=30, deadline=None))
