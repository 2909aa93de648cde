"""Whose quota applies, the arithmetic of charges, and the sentences about it, word for word."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcuda.quota.model import (
    EMPTY,
    Charge,
    Limit,
    NamespaceQuota,
    Quota,
    Shortage,
    Usage,
    cards,
    exceeded,
    fits,
    mebibytes,
)

CHARGES = st.builds(Charge, st.integers(0, 2000), st.integers(0, 100_000), st.integers(0, 2000))
LIMITS = st.builds(Limit, st.integers(0, 2000), st.none() | st.integers(1, 200_000))

# Whose quota applies


OWN, ELSE = NamespaceQuota({"M40": Limit(800)}), NamespaceQuota({})


@pytest.mark.parametrize(
    ("quota", "namespace", "applies"),
    [
        pytest.param(EMPTY, "team-a", None, id="nothing written limits nobody"),
        pytest.param(Quota({"team-a": OWN}), "team-a", OWN, id="own entry"),
        pytest.param(Quota({"team-a": OWN}), "team-b", None, id="without an entry not limited"),
        pytest.param(Quota({"team-a": OWN}, ELSE), "team-a", OWN, id="own entry before the default"),
        pytest.param(Quota({"team-a": OWN}, ELSE), "team-b", ELSE, id="default"),
        pytest.param(Quota({}, ELSE), "kube-system", None, id="default never in kube-system"),
        pytest.param(Quota({}, ELSE), "kube-public", None, id="default never in kube-public"),
        pytest.param(Quota({}, ELSE), "kube-node-lease", None, id="default never in kube-node-lease"),
        pytest.param(Quota({"kube-system": OWN}, ELSE), "kube-system", OWN, id="own entry in kube-system"),
        pytest.param(
            Quota({}, ELSE, frozenset({"infra"})), "infra", None, id="default never in a set system namespace"
        ),
        pytest.param(Quota({}, ELSE, frozenset({"infra"})), "kube-system", ELSE, id="system namespaces are settable"),
    ],
)
def test_quota_of_a_namespace(quota: Quota, namespace: str, applies: NamespaceQuota | None) -> None:
    assert quota.for_namespace(namespace) == applies


# Rendering


@pytest.mark.parametrize(
    ("cores", "text"),
    [(0, "0 cards"), (1, "0.01 cards"), (50, "0.5 cards"), (100, "1 card"), (10_000_000, "100000 cards")],
)
def test_cards(cores: int, text: str) -> None:
    assert cards(cores) == text


@pytest.mark.parametrize(
    ("charge", "text"),
    [
        (Charge(), "0 cards"),
        (Charge(100, 0, 100), "1 card"),
        (Charge(20, 1024), "0.2 cards, 1024 MiB"),
        (Charge(250, 1, 100), "2.5 cards, 1 MiB"),
    ],
)
def test_a_charge_in_a_table(charge: Charge, text: str) -> None:
    assert str(charge) == text


def test_mebibytes() -> None:
    assert mebibytes(256) == "256 MiB"


@given(st.integers(0, 10_000_000))
def test_what_is_rendered_is_exact(cores: int) -> None:
    assert Fraction(cards(cores).split()[0]) * 100 == cores


# What a card's memory is worth


@pytest.mark.parametrize(
    ("charge", "limit", "memory"),
    [
        pytest.param(Charge(100, 0, 100), Limit(400, 163840), 40960, id="a card's part of the limit"),
        pytest.param(Charge(250, 0, 250), Limit(250, 1000), 1000, id="all of a limit in parts of a card"),
        pytest.param(Charge(50, 700, 0), Limit(400, 163840), 700, id="as asked"),
        pytest.param(Charge(150, 700, 100), Limit(400, 400), 800, id="both"),
        pytest.param(Charge(100, 0, 100), Limit(300, 1000), 334, id="rounded up"),
        pytest.param(Charge(1, 0, 1), Limit(10_000_000, 1), 1, id="never rounded to nothing"),
        pytest.param(Charge(100, 7, 100), Limit(400), 7, id="memory not limited"),
        pytest.param(Charge(100, 7, 100), Limit(0, 1000), 7, id="a model that is blocked"),
    ],
)
def test_memory_under_a_limit(charge: Charge, limit: Limit, memory: int) -> None:
    assert charge.memory_under(limit) == memory


@given(CHARGES, LIMITS)
def test_a_cards_memory_is_never_counted_too_low(charge: Charge, limit: Limit) -> None:
    """Rounding goes up, and by less than 1 MiB for all charges of a model together."""
    if limit.memory is None or limit.cores == 0:
        return
    exact = charge.memory + Fraction(charge.card_memory * limit.memory, limit.cores)
    assert exact <= charge.memory_under(limit) < exact + 1


@given(st.integers(1, 50), st.integers(1, 10**9))
def test_as_many_exclusive_cards_fit_as_the_limit_has(count: int, memory: int) -> None:
    """Rounding up must not cost a namespace its last card."""
    card, limit = Charge(100, 0, 100), Limit(count * 100, memory)
    used = Charge(100 * (count - 1), 0, 100 * (count - 1))
    assert fits(limit, used, card)
    assert not fits(limit, used + card, Charge(1))


# What fits


@pytest.mark.parametrize(
    ("limit", "used", "asked", "fit"),
    [
        pytest.param(Limit(800), Charge(700), Charge(100), True, id="to the last core"),
        pytest.param(Limit(800), Charge(701), Charge(100), False, id="one core too many"),
        pytest.param(Limit(800), Charge(900), Charge(1), False, id="over already"),
        pytest.param(Limit(0), Charge(), Charge(1), False, id="blocked"),
        pytest.param(Limit(0), Charge(), Charge(), True, id="nothing always fits"),
        pytest.param(Limit(800), Charge(), Charge(1, 10**9), True, id="memory not limited"),
        pytest.param(Limit(800, 1000), Charge(1, 900), Charge(1, 100), True, id="to the last MiB"),
        pytest.param(Limit(800, 1000), Charge(1, 900), Charge(1, 101), False, id="one MiB too many"),
        pytest.param(Limit(200, 1000), Charge(100, 0, 100), Charge(50, 500), True, id="beside an exclusive card"),
        pytest.param(Limit(200, 1000), Charge(100, 0, 100), Charge(50, 501), False, id="more than that card leaves"),
        pytest.param(Limit(200, 1000), Charge(50, 501), Charge(100, 0, 100), False, id="no card's memory left"),
    ],
)
def test_fits(limit: Limit, used: Charge, asked: Charge, fit: bool) -> None:
    assert fits(limit, used, asked) is fit


@given(LIMITS, CHARGES, CHARGES)
def test_what_fits_is_within_the_exact_limit(limit: Limit, used: Charge, asked: Charge) -> None:
    total = Charge(used.cores + asked.cores, used.memory + asked.memory, used.card_memory + asked.card_memory)
    within = total.cores <= limit.cores
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
        assert (peak.cores >= one.cores, peak.memory >= one.memory, peak.card_memory >= one.card_memory) == (True,) * 3


# Refusals


def shortage(limit: Limit, used: Charge, asked: Charge, pending: Charge = Charge()) -> Shortage:  # noqa: B008  # frozen
    return Shortage("M40", asked, Usage(used, pending), limit)


@pytest.mark.parametrize(
    ("short", "sentence"),
    [
        pytest.param(
            shortage(Limit(800), Charge(700), Charge(200), pending=Charge(100)),
            "M40 in namespace team-a, requested: 2 cards, used: 7 (1 pending), limited: 8, 1 more needed",
            id="cards",
        ),
        pytest.param(
            shortage(Limit(100), Charge(), Charge(200)),
            "M40 in namespace team-a, requested: 2 cards, used: 0 (0 pending), limited: 1, can never fit",
            id="more cards than the limit",
        ),
        pytest.param(
            shortage(Limit(0), Charge(), Charge(100)),
            "M40 in namespace team-a, requested: 1 card, used: 0 (0 pending), limited: 0, can never fit",
            id="blocked",
        ),
        pytest.param(
            shortage(Limit(250), Charge(240, 512), Charge(20, 256), pending=Charge(20)),
            "M40 in namespace team-a, requested: 0.2 cards, used: 2.4 (0.2 pending), limited: 2.5, 0.1 more needed",
            id="shares",
        ),
        pytest.param(
            shortage(Limit(800), Charge(1000), Charge(100)),
            "M40 in namespace team-a, requested: 1 card, used: 10 (0 pending), limited: 8, 3 more needed",
            id="the limit was lowered",
        ),
        pytest.param(
            shortage(Limit(400, 1000), Charge(20, 900), Charge(20, 300), pending=Charge(10, 400)),
            "memory of M40 in namespace team-a, requested: 300 MiB, used: 900 (400 pending), limited: 1000, "
            "200 more needed",
            id="memory",
        ),
        pytest.param(
            shortage(Limit(400, 1000), Charge(), Charge(20, 1001)),
            "memory of M40 in namespace team-a, requested: 1001 MiB, used: 0 (0 pending), limited: 1000, can never fit",
            id="more memory than the limit",
        ),
        pytest.param(
            shortage(Limit(400, 1000), Charge(10, 900), Charge(100, 0, 100)),
            "memory of M40 in namespace team-a, requested: 250 MiB, used: 900 (0 pending), limited: 1000, "
            "150 more needed",
            id="an exclusive card's memory",
        ),
        pytest.param(
            shortage(Limit(400, 1000), Charge(400, 1000), Charge(20, 300)),
            "M40 in namespace team-a, requested: 0.2 cards, used: 4 (0 pending), limited: 4, 0.2 more needed",
            id="both are short: cards are said",
        ),
    ],
)
def test_shortage(short: Shortage, sentence: str) -> None:
    assert short.sentence("team-a") == sentence


def test_the_figures_of_a_memory_refusal_add_up_in_spite_of_rounding() -> None:
    """Requested is what the total grows by: here 334 MiB for the first third of 1000, and 333 for the second."""
    limit, card = Limit(300, 1000), Charge(100, 0, 100)
    text = (
        "memory of M40 in namespace team-a, requested: 333 MiB, used: 800 (0 pending), limited: 1000, 133 more needed"
    )
    assert shortage(limit, Charge(100, 466, 100), card).sentence("team-a") == text


def test_exceeded_names_every_model_in_order() -> None:
    m40 = shortage(Limit(800), Charge(700), Charge(200), pending=Charge(100))
    p100 = Shortage("P100", Charge(200), Usage(), Limit(100))
    of_m40 = "M40 in namespace team-a, requested: 2 cards, used: 7 (1 pending), limited: 8, 1 more needed"
    of_p100 = "P100 in namespace team-a, requested: 2 cards, used: 0 (0 pending), limited: 1, can never fit"
    assert exceeded("team-a", m40) == f"exceeded GPU quota: {of_m40}"
    assert exceeded("team-a", m40, p100) == f"exceeded GPU quota: {of_m40}; {of_p100}"


@given(LIMITS, CHARGES, CHARGES)
def test_a_refusal_says_how_much_would_make_it_fit(limit: Limit, used: Charge, asked: Charge) -> None:
    """Where it says so much more is needed, that much more is; where it says never, nothing running would help."""
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
        assert used.cores + asked.cores - limit.cores == needed * 100
    else:
        assert limit.memory is not None
        assert (used + asked).memory_under(limit) - limit.memory == needed
