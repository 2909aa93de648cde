"""What is written of a ledger is read back, stays small, and earlier formats are understood."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcuda.ledger.ledger import MOST_PENDING, Ledger, Pending, read_ledger, write_ledger
from vcuda.quota.model import Charge

SAMPLE = Path(__file__).parents[1] / "data" / "ledger-format-1.json"
CHARGES = st.builds(Charge, st.integers(0, 800), st.integers(0, 10_000), st.integers(0, 800))
UIDS = st.uuids().map(str) | st.text(max_size=40)
LEDGERS = st.builds(
    Ledger,
    st.dictionaries(st.text(max_size=8), CHARGES, max_size=3),
    st.integers(0).map(str) | st.just(""),
    st.dictionaries(UIDS, st.builds(Pending, st.sampled_from(("M40", "P100", "a b")), CHARGES), max_size=8),
)


@given(LEDGERS)
def test_what_is_written_is_read_back(ledger: Ledger) -> None:
    assert read_ledger(write_ledger(ledger)) == ledger


@given(st.uuids())
def test_a_uid_is_read_back_only_as_it_was(made: uuid.UUID) -> None:
    """The API server compares uids letter by letter, so one in capitals is another one."""
    uids = {str(made), str(made).upper(), made.hex}
    ledger = Ledger(pending={uid: Pending("M40", Charge(1)) for uid in uids})
    assert read_ledger(write_ledger(ledger)).pending.keys() == uids


@pytest.mark.parametrize(
    ("shapes", "bytes_"),
    [pytest.param(1, 12_000, id="alike"), pytest.param(20, 13_000, id="of 20 shapes")],
)
def test_a_ledger_stays_small_with_as_many_pending_as_there_may_be(shapes: int, bytes_: int) -> None:
    """In bytes of the ConfigMap's JSON, where every quote is escaped; 20 kB is where writes get slow."""
    pending = {
        str(uuid.uuid4()): Pending("M40", Charge(100 + number % shapes, 512, 0)) for number in range(MOST_PENDING)
    }
    ledger = Ledger({f"model-{number}": Charge(800, 4096, 800) for number in range(8)}, "123456789", pending)
    assert len(json.dumps(write_ledger(ledger))) < bytes_


def test_the_first_format_is_read_and_replaced() -> None:
    """The sample was written by the first build that kept ledgers."""
    ledger = read_ledger(SAMPLE.read_text())
    assert ledger.committed == {"M40": Charge(250, 1024, 100), "P100": Charge(100, 0, 100)}
    assert ledger.pod_resource_version == "48213"
    assert ledger.pending == {
        "5b0b9a9e-4a5e-4a38-9c63-6f3a1d1f6a10": Pending("M40", Charge(100, 0, 100)),
        "c2f7d0a4-8a5f-4f0e-b1d2-93f5c1d7e811": Pending("P100", Charge(50, 2048)),
    }
    assert json.loads(write_ledger(ledger))["format"] == 2


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="nothing"),
        pytest.param("[]", id="no object"),
        pytest.param("{", id="cut off"),
        pytest.param('{"format": 3}', id="of a later release"),
        pytest.param('{"format": "2"}', id="a format that is no number"),
        pytest.param('{"format": 2}', id="without what belongs in it"),
        pytest.param(
            '{"format": 2, "committed": {}, "podResourceVersion": "", "pending": {"M40": [[1, 0]]}}', id="short"
        ),
        pytest.param(
            '{"format": 2, "committed": {}, "podResourceVersion": "", "pending": {"M40": [[1, 0, 0, "abc"]]}}',
            id="a uid cut off",
        ),
        pytest.param(
            '{"format": 2, "committed": {}, "podResourceVersion": "", "pending": {"M40": [[1, 0, 0, "'
            + "!" * 22
            + '"]]}}',
            id="no Base64",
        ),
    ],
)
def test_what_is_damaged_is_not_guessed_at(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_ledger(text)
