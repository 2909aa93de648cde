"""Tests of quotas: the quota of a namespace, the arithmetic of charges, and the texts of rejections."""

from fractions import Fraction

import msgspec
import pytest
from hypothesis import given, strategies as st

from tests.tables import cases
from vcuda.ledger.ledger import Ledger, Pending, Reservation, Terminating, charges_by_model
from vcuda.ledger.text import read_ledger, write_ledger
from vcuda.placement.choice import free_of
from vcuda.quota.model import Charge, Limit, NamespaceQuota, Quota, Usage, cards, fits, total
from vcuda.quota.shortage import Shortage
from webhook.ledger.reservations import Demand, plan_reservation

CHARGES = st.builds(Charge, st.integers(0, 2000), st.integers(0, 100_000), st.integers(0, 2000))
LIMITS = st.builds(Limit, st.integers(0, 2000), st.none() | st.integers(1, 200_000))

# Tests of which entry of the quota applies to a namespace


OWN, ELSE = NamespaceQuota({"M40": Limit(800)}), NamespaceQuota({})
SOME = NamespaceQuota({}, excepted=frozenset({"calico-system", "longhorn-*", "team-*"}))


@cases(
    "quota, namespace, applies",
    nothing_written_limits_nobody=(Quota(), "team-a", None),
    own_entry=(Quota({"team-a": OWN}), "team-a", OWN),
    without_an_entry_not_limited=(Quota({"team-a": OWN}), "team-b", None),
    own_entry_before_the_default=(Quota({"team-a": OWN}, ELSE), "team-a", OWN),
    default=(Quota({"team-a": OWN}, ELSE), "team-b", ELSE),
    default_never_in_kube_system=(Quota({}, ELSE), "kube-system", None),
    default_never_in_kube_public=(Quota({}, ELSE), "kube-public", None),
    default_never_in_kube_node_lease=(Quota({}, ELSE), "kube-node-lease", None),
    own_entry_in_kube_system=(Quota({"kube-system": OWN}, ELSE), "kube-system", OWN),
    default_never_in_a_set_system_namespace=(Quota({}, ELSE, frozenset({"infra"})), "infra", None),
    excepted_name=(Quota({}, SOME), "calico-system", None),
    excepted_beginning=(Quota({}, SOME), "longhorn-system", None),
    excepted_name_is_no_beginning=(Quota({}, SOME), "calico-systems", SOME),
    excepted_beginning_is_not_elsewhere=(Quota({}, SOME), "my-longhorn-system", SOME),
    own_entry_of_an_excepted_namespace=(Quota({"team-a": OWN}, SOME), "team-a", OWN),
    system_namespaces_are_settable=(Quota({}, ELSE, frozenset({"infra"})), "kube-system", ELSE),
)
def test_a_namespace_gets_its_own_quota_or_the_default_one(
    quota: Quota, namespace: str, applies: NamespaceQuota | None
) -> None:
    assert quota.for_namespace(namespace) == applies


# Tests of how figures are written in texts


@pytest.mark.parametrize(
    ("charge", "text"),
    [
        (Charge(), "0 cards"),
        (Charge(1), "0.01 cards"),
        (Charge(100, 0, 100), "1 card"),
        (Charge(10_000_000), "100000 cards"),
        (Charge(20, 1024), "0.2 cards, 1024 MiB"),
        (Charge(250, 1, 100), "2.5 cards, 1 MiB"),
    ],
)
def test_hundredths_are_shown_as_cards_and_memory_in_mib(charge: Charge, text: str) -> None:
    assert str(charge) == text


@given(st.integers(0, 10_000_000))
def test_rendered_numbers_are_exact(cores: int) -> None:
    assert Fraction(cards(cores).split()[0]) * 100 == cores


# Tests of the memory that a request for whole cards is charged


@cases(
    "charge, limit, memory",
    a_cards_part_of_the_limit=(Charge(100, 0, 100), Limit(400, 163840), 40960),
    all_of_a_limit_in_parts_of_a_card=(Charge(250, 0, 250), Limit(250, 1000), 1000),
    as_asked=(Charge(50, 700, 0), Limit(400, 163840), 700),
    both=(Charge(150, 700, 100), Limit(400, 400), 800),
    rounded_up=(Charge(100, 0, 100), Limit(300, 1000), 334),
    never_rounded_to_nothing=(Charge(1, 0, 1), Limit(10_000_000, 1), 1),
    memory_not_limited=(Charge(100, 7, 100), Limit(400), 7),
    a_model_that_is_blocked=(Charge(100, 7, 100), Limit(0, 1000), 7),
)
def test_a_whole_card_takes_its_part_of_a_limit_of_memory(charge: Charge, limit: Limit, memory: int) -> None:
    assert charge.memory_under(limit) == memory


@given(CHARGES, LIMITS)
def test_a_cards_memory_is_never_counted_too_low(charge: Charge, limit: Limit) -> None:
    """The memory of all whole cards of a model is rounded up once. So a charge is at most 1 MiB too high."""
    if limit.memory is None or limit.cores == 0:
        return
    exact = charge.memory + Fraction(charge.card_memory * limit.memory, limit.cores)
    assert exact <= charge.memory_under(limit) < exact + 1


@given(st.integers(1, 50), st.integers(1, 10**9))
def test_as_many_exclusive_cards_fit_as_the_limit_has(count: int, memory: int) -> None:
    """The memory of cards is rounded up, but the last card must still fit the limit on memory."""
    card, limit = Charge(100, 0, 100), Limit(count * 100, memory)
    used = Charge(100 * (count - 1), 0, 100 * (count - 1))
    assert fits(limit, used, card)
    assert not fits(limit, used + card, Charge(1))


# Tests of whether a charge fits within a limit


@cases(
    "limit, used, asked, fit",
    to_the_last_core=(Limit(800), Charge(700), Charge(100), True),
    one_core_too_many=(Limit(800), Charge(701), Charge(100), False),
    over_already=(Limit(800), Charge(900), Charge(1), False),
    blocked=(Limit(0), Charge(), Charge(1), False),
    nothing_always_fits=(Limit(0), Charge(), Charge(), True),
    memory_not_limited=(Limit(800), Charge(), Charge(1, 10**9), True),
    to_the_last_MiB=(Limit(800, 1000), Charge(1, 900), Charge(1, 100), True),
    one_MiB_too_many=(Limit(800, 1000), Charge(1, 900), Charge(1, 101), False),
    beside_an_exclusive_card=(Limit(200, 1000), Charge(100, 0, 100), Charge(50, 500), True),
    more_than_that_card_leaves=(Limit(200, 1000), Charge(100, 0, 100), Charge(50, 501), False),
    no_cards_memory_left=(Limit(200, 1000), Charge(50, 501), Charge(100, 0, 100), False),
)
def test_a_charge_fits_if_cores_and_memory_are_within_the_limit(
    limit: Limit, used: Charge, asked: Charge, fit: bool
) -> None:
    assert fits(limit, used, asked) is fit


@given(LIMITS, CHARGES, CHARGES)
def test_a_charge_that_fits_is_within_the_exact_limit(limit: Limit, used: Charge, asked: Charge) -> None:
    total = Charge(used.cores + asked.cores, used.memory + asked.memory, used.card_memory + asked.card_memory)
    within = total.cores <= limit.most_cores
    if limit.memory is not None and limit.cores:
        within = within and total.memory + Fraction(total.card_memory * limit.memory, limit.cores) <= limit.memory
    elif limit.memory is not None:
        within = within and total.memory <= limit.memory
    assert fits(limit, used, asked) is within


@given(CHARGES, CHARGES, CHARGES)
def test_charges_add_up_in_any_order_and_a_peak_is_never_below_either(a: Charge, b: Charge, c: Charge) -> None:
    assert a + b == b + a
    assert (a + b) + c == a + (b + c)
    assert a + Charge() == a
    peak = a.peak(b)
    for one in (a, b):
        assert peak.covers(one)


@pytest.mark.parametrize("field", Charge.__struct_fields__)
def test_no_arithmetic_drops_an_amount_of_a_charge(field: str) -> None:
    """The test reads the fields from the class. So it fails if a new amount is added that some operation drops."""
    one, three, five = (Charge(**{field: amount}) for amount in (1, 3, 5))
    assert one + one + one == three == one * 3 == five.mean(2) == one.peak(three) == three.minimum(five)
    assert five - one - one == three == total([one, one, one])
    assert five.covers(three)
    assert not one.covers(three)
    reserved = {"replica": Reservation({"M40": five}, 1)}
    pending, terminating = {"uid": Pending("M40", three)}, {"key": Terminating("M40", five, 30)}
    ledger = Ledger({"M40": one}, "1", pending, terminating, claimed={"M40": three}, reserved=reserved)
    assert read_ledger(write_ledger(ledger)) == ledger
    assert ledger.usage("M40") == Usage(Charge(**{field: 17}), three, five, five)
    assert charges_by_model([("M40", one), ("M40", three), ("M40", one)]) == {"M40": five}


@pytest.mark.parametrize("field", Charge.__struct_fields__)
def test_no_amount_of_a_charge_is_dropped_from_a_reservation(field: str) -> None:
    asked = Charge(100, 100, 100)
    asked = msgspec.structs.replace(asked, **{field: 200})
    demand = Demand(lambda: 0.0)
    for uid in "abcdefgh":
        demand.add(uid, "M40", asked)
    reserved = plan_reservation(Ledger(), NamespaceQuota({"M40": Limit(1_000_000)}), demand).charges["M40"]
    assert getattr(reserved, field) == 2 * min(msgspec.structs.astuple(reserved)) > 0


@given(CHARGES, CHARGES)
def test_a_charge_covers_another_if_no_resource_of_the_other_is_larger(a: Charge, b: Charge) -> None:
    pairs = zip(msgspec.structs.astuple(a), msgspec.structs.astuple(b), strict=True)
    assert a.covers(b) == all(own >= other for own, other in pairs)
    assert a.covers(a.minimum(b))


@cases(
    "usage, told",
    unused=(Usage(), "8 cards of 8 cards free"),
    used=(Usage(Charge(750), Charge(100)), "0.5 cards of 8 cards free"),
    reserved=(Usage(Charge(300), reserved=Charge(200)), "5 cards of 8 cards free, 2 reserved"),
    over=(Usage(Charge(900)), "-1 cards of 8 cards free"),
)
def test_free_cards_are_reported_with_reservations(usage: Usage, told: str) -> None:
    assert free_of(Limit(800), usage) == told


# Tests of rejections


# A Charge is immutable, so it may be a default value.
def shortage(limit: Limit, used: Charge, asked: Charge, pending: Charge = Charge()) -> Shortage:  # noqa: B008
    return Shortage("M40", asked, Usage(used, pending), limit)


@cases(
    "limit, used, asked, pending, figures",
    cards=(800, 700, 200, 100, "2 cards, used: 7 (1 pending), limited: 8, 1 more needed"),
    more_than_the_limit=(100, 0, 200, 0, "2 cards, used: 0 (0 pending), limited: 1, can never fit"),
    blocked=(0, 0, 100, 0, "1 card, used: 0 (0 pending), limited: 0, can never fit"),
    shares=(250, 240, 20, 20, "0.2 cards, used: 2.4 (0.2 pending), limited: 2.5, 0.1 more needed"),
    the_limit_was_lowered=(800, 1000, 100, 0, "1 card, used: 10 (0 pending), limited: 8, 3 more needed"),
)
def test_a_shortage_of_cards_is_reported_before_one_of_memory(
    limit: int, used: int, asked: int, pending: int, figures: str
) -> None:
    for memory in (None, 1000):
        short = shortage(Limit(limit, memory), Charge(used, 1000), Charge(asked, 300), Charge(pending))
        assert short.sentence("team-a") == f"M40 in namespace team-a, requested: {figures}"


CARD, SOME_PENDING = Charge(100, 0, 100), Usage(Charge(20, 900), Charge(0, 400))


@cases(
    "cores, used, asked, figures, end",
    as_asked=(400, SOME_PENDING, Charge(20, 300), "300 MiB, used: 900 (400 pending)", "200 more needed"),
    more_than_the_limit=(400, Usage(), Charge(20, 1001), "1001 MiB, used: 0 (0 pending)", "can never fit"),
    an_exclusive_card=(400, Usage(Charge(10, 900)), CARD, "250 MiB, used: 900 (0 pending)", "150 more needed"),
    a_third=(300, Usage(Charge(100, 466, 100)), CARD, "333 MiB, used: 800 (0 pending)", "133 more needed"),
)
def test_a_shortage_of_memory_is_reported_with_its_figures(
    cores: int, used: Usage, asked: Charge, figures: str, end: str
) -> None:
    """The requested figure is the increase of the rounded total, so that figures add up.

    Three cards have a limit of 1000 MiB: the first takes 334 MiB, the second 333 MiB.
    """
    short = Shortage("M40", asked, used, Limit(cores, 1000))
    sentence = f"memory of M40 in namespace team-a, requested: {figures}, limited: 1000, {end}"
    assert short.sentence("team-a") == sentence


@given(LIMITS, CHARGES, CHARGES)
def test_a_rejection_says_how_much_more_is_needed(limit: Limit, used: Charge, asked: Charge) -> None:
    """The amount must be exact. If the text says "can never fit", the pod must not fit even while nothing is used."""
    if fits(limit, used, asked):
        return
    short = shortage(limit, used, asked)
    sentence = short.sentence("team-a")
    if sentence.endswith("can never fit"):
        assert not fits(limit, Charge(), asked)
        return
    needed = Fraction(sentence.rsplit(", ", 1)[1].removesuffix(" more needed"))
    assert needed > 0
    if short.in_cores:
        assert used.cores + asked.cores - limit.most_cores == needed * 100
    else:
        assert limit.memory is not None
        assert (used + asked).memory_under(limit) - limit.memory == needed
