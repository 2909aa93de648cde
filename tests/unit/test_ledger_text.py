"""Tests of the stored text of a ledger."""

import json
import uuid
from fractions import Fraction

import pytest
from hypothesis import example, given, strategies as st

from tests.tables import cases
from vcuda.ledger.ledger import MAX_PENDING, Ledger, Pending, Terminating
from vcuda.ledger.text import read_ledger, write_ledger
from vcuda.quota.model import MAX_CARD_SHARES, Charge, total
from vcuda.requests.pod_request import MAX_UNITS

ANY_PARTS = st.builds(Fraction, st.integers(0, 10**6), st.sampled_from((1, 2, 3, 6, 7, 8, 14, 42, 47, 10_000)))
ANY_CORES = st.integers(0, 800) | ANY_PARTS
ANY_CHARGES = st.builds(Charge, ANY_CORES, st.integers(0, 10_000), ANY_CORES)
ANY_MODELS = st.sampled_from(("M40", "P100", "a b"))
ANY_UIDS = st.uuids().map(str) | st.text(max_size=40)
ANY_COUNTS = st.dictionaries(st.text(max_size=8), ANY_CHARGES, max_size=3)
ANY_VERSIONS = st.integers(0, 10**20 - 1).map(str) | st.just("")
ANY_LEDGERS = st.builds(
    Ledger,
    ANY_COUNTS,
    ANY_VERSIONS,
    st.dictionaries(ANY_UIDS, st.builds(Pending, ANY_MODELS, ANY_CHARGES), max_size=8),
    st.dictionaries(ANY_UIDS, st.builds(Terminating, ANY_MODELS, ANY_CHARGES, st.integers(0, 86400)), max_size=8),
    ANY_VERSIONS,
    ANY_COUNTS,
    ANY_VERSIONS,
)


@given(ANY_LEDGERS)
def test_a_ledger_is_read_back_as_it_was_written(ledger: Ledger) -> None:
    assert read_ledger(write_ledger(ledger)) == ledger


LARGEST = Charge(MAX_UNITS * MAX_UNITS, MAX_UNITS * MAX_UNITS, MAX_UNITS * MAX_UNITS)
"""At least the charge of one container, by the largest amounts that tenants can write."""


@given(
    st.lists(st.integers(1, MAX_CARD_SHARES), max_size=MAX_CARD_SHARES), st.integers(1, 10**6), st.integers(1, 15_000)
)
@example([*range(1, MAX_CARD_SHARES + 1)], 10**6, 15_000)
def test_the_largest_sums_that_tenants_can_cause_are_read_back(parts: list[int], pods: int, containers: int) -> None:
    """The charges of MIG profiles and shares are fractions, so the denominator of their sum may be large."""
    fractions = [Charge(Fraction(100, part), 0, Fraction(100, part)) for part in parts]
    ledger = Ledger({"M40": total([LARGEST * (pods * containers), *fractions])})
    assert read_ledger(write_ledger(ledger)) == ledger


@given(st.uuids())
def test_a_uid_is_read_back_literally(made: uuid.UUID) -> None:
    """Uids that differ only in letter case or in dashes are different to the API server."""
    uids = {str(made), str(made).upper(), made.hex}
    ledger = Ledger(pending={uid: Pending("M40", Charge(1)) for uid in uids})
    assert read_ledger(write_ledger(ledger)).pending.keys() == uids


@pytest.mark.parametrize(
    ("shapes", "bytes_"), [pytest.param(1, 12_000, id="alike"), pytest.param(20, 13_000, id="charges of 20 sizes")]
)
def test_a_ledger_stays_small_with_as_many_pending_as_there_may_be(shapes: int, bytes_: int) -> None:
    """The sizes are bytes of the ConfigMap's JSON, with escaped quotes. Writes of more than 20 kB are slow."""
    pending = {
        str(uuid.uuid4()): Pending("M40", Charge(100 + number % shapes, 512, 0)) for number in range(MAX_PENDING)
    }
    ledger = Ledger({f"model-{number}": Charge(800, 4096, 800) for number in range(8)}, "123456789", pending)
    assert len(json.dumps(write_ledger(ledger))) < bytes_


VERSIONS = '{"format": 2, "committed": {}, "podResourceVersion": "7", "pending": {}, %s}'
COUNTED = '{"format": 2, "committed": {}, "podResourceVersion": "", "pending": {"M40": [[%s]]}}'


@cases(
    "text",
    nothing="",
    no_object="[]",
    no_format='{"committed": {}, "podResourceVersion": "", "pending": {}}',
    cut_off="{",
    a_later_releases_format='{"format": 3}',
    a_format_that_is_not_a_number='{"format": "1"}',
    a_missing_field='{"format": 2}',
    short=COUNTED % '{"cores": 1}',
    a_uid_without_its_end=COUNTED % '{"cores": 1}, "abc"',
    no_Base64=COUNTED % f'{{"cores": 1}}, "{"!" * 22}"',
    a_part_of_a_core_that_is_not_exact=COUNTED % '{"cores": 14.2857}, ""',
    a_denominator_that_no_charge_has=COUNTED % '{"cores": "100/53"}, ""',
    a_denominator_of_0=COUNTED % '{"cores": "100/0"}, ""',
    an_endless_numerator=COUNTED % f'{{"cores": "{"9" * 65}/7"}}, ""',
    cores_of_another_type=COUNTED % '{"cores": true}, ""',
    pod_version_without_digits='{"format": 2, "committed": {}, "podResourceVersion": "x", "pending": {}}',
    claim_version_without_digits=VERSIONS % '"claimResourceVersion": "x"',
    config_version_without_digits=VERSIONS % '"configVersion": "x"',
    config_version_with_non_ASCII_digits=VERSIONS % '"configVersion": "\u0661"',
    config_version_with_5000_digits=VERSIONS % f'"configVersion": "{"9" * 5000}"',
)
def test_damaged_text_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_ledger(text)
