"""Tests of Kubernetes quantities: the notations of whole numbers, and the errors for all other texts."""

import re
from decimal import Decimal

import pytest
from hypothesis import given, strategies as st

from vcuda.k8s_types import parse_quantity, parse_whole

WHOLE = (
    "0=0 -0=0 100=100 100.0=100 +7=7 007=7 5.=5 .5k=500 1k=1000 2Ki=2048 1.5Ki=1536 1e2=100 1E2=100 100e-1=10 3000m=3"
    " 4000000000n=4 9007199254740992=9007199254740992"
)


@pytest.mark.parametrize(
    ("written", "number"), [*(pair.split("=") for pair in WHOLE.split()), (0, 0), (100, 100), (100.0, 100)]
)
def test_a_whole_number_is_read(written: str | float, number: str | int) -> None:
    assert parse_whole(written) == int(number)


NOT_WHOLE: dict[str, tuple[str | float, ...]] = {
    "is negative": ("-1", -3, "-0.5", "-1Ki"),
    "is not a whole number": ("0.5", 2.5, "1500m", "1n"),
    "is larger than any cluster": ("9007199254740993", "1E", 1e22, "1e99"),
}


@pytest.mark.parametrize(("why", "written"), [(why, each) for why, written in NOT_WHOLE.items() for each in written])
def test_a_quantity_that_is_no_whole_number_is_rejected_with_the_reason(why: str, written: str | float) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(str(written))} {why}$"):
        parse_whole(written)


NOT_QUANTITIES = (
    ". + - k Ki e5 1e 1e1e1 1e100 1kk 1ki 1K 1mi --1 1,000 1_000 0x10 NaN nan Infinity -inf true \u0661 1\u00b2"
)


@pytest.mark.parametrize(
    "written",
    [*NOT_QUANTITIES.split(), "", " ", " 1", "1 ", "1\n", "1 k", "9" * 31, float("nan"), float("inf"), True],
    ids=repr,
)
def test_a_text_that_is_no_quantity_is_rejected(written: str | float) -> None:
    """Python would parse some of these texts as numbers, but Kubernetes' apimachinery rejects them."""
    with pytest.raises(ValueError, match="is not a quantity"):
        parse_quantity(written)


@given(st.text("0123456789+-.eEnumkKMGTPi _", max_size=8))
def test_any_text_is_read_or_rejected_with_a_message(written: str) -> None:
    try:
        number = parse_quantity(written)
    except ValueError:
        with pytest.raises(ValueError, match="is not a quantity"):
            parse_quantity(written)
    else:
        assert isinstance(number, Decimal)
        assert number.is_finite()
