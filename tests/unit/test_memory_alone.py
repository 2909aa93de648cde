"""Tests of quotas that limit only memory."""

import math

import pytest
from hypothesis import assume, given, strategies as st

from controller.retry.retrier import FreeQuota
from tests.builders import LABELS, container, pod, view
from tests.tables import cases
from vcuda.errors import QuotaFault
from vcuda.ledger.ledger import Admitted, Ledger, Pending, Reservation, admit
from vcuda.ledger.report import ModelUse, NamespaceUse, report
from vcuda.placement.choice import Choice, Option, Rule, choose
from vcuda.placement.nodes import Nodes
from vcuda.quota import grant_words
from vcuda.quota.changes import beyond, changes
from vcuda.quota.model import Charge, Limit, NamespaceQuota, Quota, Usage, fits
from vcuda.quota.shortage import Shortage
from vcuda.requests.config import parse_config
from vcuda.requests.pod_request import read_request
from webhook.ledger.reservations import Demand, plan_reservation

GIB = 1024
CARD = Charge(100, 0, 100)
A100 = Limit(None, 160 * GIB, 80 * GIB)
"""A quota of 160 GiB of memory, on cards of 80 GiB each."""
ROWS = "{A100: {memory: 80Gi}, T4: {memory: 15Gi}}"


def quota_of(text: str, models: str = ROWS) -> Quota:
    return parse_config({"gpu_quota": text, "gpu_models": models}).quota


def faults(text: str, models: str = ROWS) -> list[str]:
    with pytest.raises(QuotaFault) as rejected:
        quota_of(text, models)
    return [str(fault) for fault in rejected.value.faults]


def test_a_limit_on_memory_alone_has_the_memory_of_one_card() -> None:
    quota = quota_of("team-a: {quota: {A100: {memory: 160Gi}, T4: 2}}\n'*': {quota: {T4: {memory: 15Gi}}}")
    assert quota.namespaces["team-a"].limits == {"A100": A100, "T4": Limit(200)}
    assert quota.default
    assert quota.default.limits == {"T4": Limit(None, 15 * GIB, 15 * GIB)}


MISSING = (
    "must have `cards`, because `gpu_models` does not state the memory of one A100 card. "
    "Alternatively, add the memory to `gpu_models`, for example"
)


@cases(
    "text, models, paths",
    no_row=("team-a: {quota: {A100: {memory: 160Gi}}}", "{}", ["team-a.quota.A100"]),
    a_row_without_memory=("team-a: {quota: {A100: {memory: 160Gi}}}", "{A100: []}", ["team-a.quota.A100"]),
    each_place=(
        "'*': {quota: {A100: {memory: 1Gi}}}\na: {grants: [{A100: {memory: 1Gi}, weekly: Sat}]}",
        "{}",
        ["a.grants[0].A100", "*.quota.A100"],
    ),
)
def test_a_limit_on_memory_alone_is_rejected_without_the_memory_of_a_card(
    text: str, models: str, paths: list[str]
) -> None:
    assert faults(text, models) == [f"{path}: {MISSING} A100: {{memory: 80Gi}}" for path in paths]


@cases(
    "grant, fault",
    cards_are_added=("A100: 1", "grants[0].A100: memory is required, because this model's memory is limited"),
    both_are_added=(
        "A100: {cards: 1, memory: 80Gi}",
        "grants[0].A100.cards: must not be set, because this model's cards are not limited",
    ),
    memory_is_added_to_cards=(
        "T4: {memory: 15Gi}",
        "grants[0].T4: cards are required, because this model's cards are limited",
    ),
)
def test_a_grant_must_limit_the_same_parts_as_its_limit(grant: str, fault: str) -> None:
    text = f"team-a: {{quota: {{A100: {{memory: 160Gi}}, T4: 2}}, grants: [{{{grant}, weekly: Sat}}]}}"
    assert faults(text)[0].startswith(f"team-a.{fault}")


def test_a_grant_adds_memory() -> None:
    grants = "grants: [{A100: {memory: 80Gi}, until: 2100-01-01}, {T4: {memory: 15Gi}, until: 2100-01-01}]"
    entry = quota_of(f"team-a: {{quota: {{A100: {{memory: 160Gi}}}}, {grants}}}").namespaces["team-a"]
    assert entry.at(0.0).limits == {"A100": Limit(None, 240 * GIB, 80 * GIB), "T4": Limit(None, 15 * GIB, 15 * GIB)}
    assert entry.at(None).limits == {"A100": A100, "T4": Limit(0)}
    ending = grant_words.ending("namespace team-a", entry.at(0.0), "A100", Charge(300, 0, 300))
    assert ending
    assert ending.endswith("falls from 245760 MiB to 163840 MiB. The namespace uses 245760 MiB")
    assert grant_words.ending("namespace team-a", entry.at(0.0), "A100", Charge(200, 0, 200)) is None


@cases(
    "limits, memory",
    a_whole_card=({"nvidia.com/gpu": 1}, 80 * GIB),
    whole_cards=({"tencent.com/vcuda-core": 200}, 160 * GIB),
    a_share=({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 3000}, 3000),
    a_share_with_cores=({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 3000, "nvidia.com/gpucores": 30}, 3000),
    a_percentage=({"nvidia.com/gpu": 1, "nvidia.com/gpumem-percentage": 25}, 20 * GIB),
    cores_and_no_memory=({"nvidia.com/gpu": 1, "nvidia.com/gpucores": 30}, 80 * GIB),
    a_partition=({"nvidia.com/mig-1g.10gb": 2}, 20 * GIB),
    a_share_of_gpu_manager=({"tencent.com/vcuda-core": 30, "tencent.com/vcuda-memory": 4}, 1024),
    a_share_of_gpu_manager_without_memory=({"tencent.com/vcuda-core": 25}, 20 * GIB),
)
def test_every_request_is_charged_memory(limits: dict[str, int], memory: int) -> None:
    charge = read_request(view(pod(container(limits)))).charge_on("A100")
    assert charge.memory_under(A100) == memory


@given(
    st.builds(Charge, st.integers(1, 10**6), st.integers(0, 10**6), st.integers(0, 10**6)),
    st.lists(st.builds(Charge, st.integers(1, 10**6), st.integers(0, 10**6), st.integers(0, 10**6)), max_size=5),
    st.integers(1, 10**6),
)
def test_admitted_charges_never_exceed_the_memory_limit(first: Charge, others: list[Charge], card_memory: int) -> None:
    limit = Limit(None, 10**6, card_memory)
    used = Charge()
    for charge in (first, *others):
        if fits(limit, used, charge):
            used += charge
    assert used.memory * 100 + used.card_memory * card_memory <= 10**6 * 100


def test_cores_are_not_limited() -> None:
    quota = NamespaceQuota({"A100": A100})
    shares = Ledger({"A100": Charge(100 * 50, 50 * 3000)})
    assert isinstance(admit(shares, "uid", Pending("A100", Charge(100, 3000)), quota, enforced=True), Admitted)


def test_a_rejection_has_memory_and_no_cards() -> None:
    shortage = Shortage("A100", CARD, Usage(Charge(100, 5000, 100)), A100)
    assert shortage.sentence("team-a") == (
        "memory of A100 in namespace team-a, requested: 81920 MiB, used: 86920 (0 pending), limited: 163840, "
        "5000 more needed"
    )
    assert not shortage.can_never_fit
    assert Shortage("A100", Charge(300, 0, 300), Usage(), A100).can_never_fit


def test_a_choice_names_the_free_memory() -> None:
    only = choose([Option("A100", CARD, NamespaceQuota({"A100": A100}), Usage(Charge(50, 3000)))], Rule.DOCUMENT)
    assert isinstance(only, Choice)
    assert only.reason == "the only possible model, 160840 of 163840 MiB free"


@given(st.integers(1, 2000), st.integers(0, 200_000), st.integers(0, 100), st.integers(1, 30))
def test_a_reservation_fits_the_memory_that_is_left(memory: int, used: int, percentage: int, number: int) -> None:
    assume(memory or percentage)
    charge = Charge(100, 0 if percentage else memory, percentage)
    demand = Demand(lambda: 0.0)
    for each in range(number):
        demand.add(str(each), "A100", charge)
    ledger = Ledger({"A100": Charge(100, used)})
    reserved = plan_reservation(ledger, NamespaceQuota({"A100": A100}), demand).charges
    assert all(fits(A100, ledger.usage("A100").used, each) for each in reserved.values())
    if number >= 10 and used < 100_000 and charge.memory_under(A100) < 100:
        assert reserved


def used_of(ledger: Ledger) -> NamespaceUse:
    return report("team-a", NamespaceQuota({"A100": A100}), ledger, (), Nodes(LABELS))


def test_a_report_omits_parts_without_a_limit() -> None:
    reserved = {"replica": Reservation({"A100": Charge(50, 0, 50)}, 1)}
    [use] = used_of(Ledger({"A100": Charge(150, 5000, 100)}, reserved=reserved)).models
    assert use == ModelUse(
        *("A100", None, 1.5, 0, None, 160 * GIB, 80 * GIB + 5000),
        reserved=0.5,
        memory_reserved=40 * GIB,
        card_memory=80 * GIB,
    )
    assert use.memory_available == 40 * GIB - 5000


def test_a_rejected_workload_is_retried_by_the_free_memory() -> None:
    [use] = used_of(Ledger({"A100": Charge(100, 0, 100)})).models
    free = FreeQuota.of(use)
    assert free == FreeQuota(math.inf, 80 * GIB)
    assert free.takes(CARD, A100)
    assert free.takes(Charge(10_000, 3000), A100)
    assert not free.takes(Charge(100, 80 * GIB + 2), A100)
    assert not free.without(CARD, A100).takes(CARD, A100)


def test_an_edit_shows_the_memory() -> None:
    old, new = (quota_of(f"team-a: {{quota: {{A100: {limit}}}}}") for limit in ("2", "{memory: 1600Gi}"))
    assert [str(change) for change in changes(old, new)] == ["team-a.quota.A100: 2 cards -> 1638400 MiB"]
    assert list(map(str, beyond(old, new, {"A100": 8}))) == [
        "team-a.quota.A100: the limit is raised from 2 cards to 20 cards, but the nodes have 8 cards",
        "A100: the sum of all limits is raised from 2 cards to 20 cards, but the nodes have 8 cards",
    ]
