"""What holds for every quota document whatsoever."""

from __future__ import annotations

import json
import random
from decimal import Decimal
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from vcuda.errors import Fault, QuotaFault
from vcuda.quota.document import parse_quota
from vcuda.quota.model import Limit, Mode, NamespaceQuota, Quota
from vcuda.quota.yaml import read_text

LABEL_VALUES = st.from_regex(r"[A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?", fullmatch=True)
NAMESPACES = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", fullmatch=True)
LIMITS = st.builds(Limit, st.integers(0, 10_000_000), st.none() | st.integers(1, 104_857_600_000))
ENTRIES = st.builds(
    NamespaceQuota,
    st.dictionaries(LABEL_VALUES, LIMITS, max_size=4),
    st.lists(LABEL_VALUES, unique=True, max_size=3).map(tuple),
    st.sampled_from(Mode),
)
QUOTAS = st.builds(Quota, st.dictionaries(NAMESPACES, ENTRIES, max_size=4), st.none() | ENTRIES)

SYNTAX = st.text(st.sampled_from("{}[]:,\"'-?&*!|>%@`#<=~ \n\t\\.0123ea\ud800\u0661é"), max_size=60)
JSON_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["8", "1Gi", "warn"]),
    lambda children: (
        st.lists(children, max_size=3)
        | st.dictionaries(st.sampled_from(["quota", "pool", "mode", "cards", "memory", "M40", "[key]"]), children)
        | st.dictionaries(st.text(max_size=5), children, max_size=3)
    ),
    max_leaves=12,
)


def written_limit(limit: Limit) -> Any:
    cards = limit.cores / 100 if limit.cores % 100 else limit.cores // 100
    return cards if limit.memory is None else {"cards": cards, "memory": f"{limit.memory}Mi"}


def written_entry(entry: NamespaceQuota) -> dict[str, Any]:
    models = {model: written_limit(limit) for model, limit in entry.limits.items()}
    return {"quota": models, "pool": list(entry.pools), "mode": str(entry.mode)}


def written(quota: Quota) -> dict[str, Any]:
    entries = {name: written_entry(entry) for name, entry in quota.namespaces.items()}
    return entries if quota.default is None else {**entries, "*": written_entry(quota.default)}


def faults_of(text: str) -> tuple[Fault, ...]:
    """Return the faults of ``text``, none where it is a quota; any other exception fails the test."""
    try:
        parse_quota(text)
    except QuotaFault as refusal:
        return refusal.faults
    return ()


@given(QUOTAS, st.sampled_from([None, 2, "\t"]))
def test_a_quota_written_as_json_is_read_back(quota: Quota, indent: int | str | None) -> None:
    assert parse_quota(json.dumps(written(quota), indent=indent)) == quota


@given(QUOTAS, st.booleans())
def test_a_quota_written_as_yaml_is_read_back(quota: Quota, flow: bool) -> None:
    assert parse_quota(yaml.safe_dump(written(quota), default_flow_style=flow, sort_keys=False)) == quota


@given(st.text() | SYNTAX)
def test_any_text_is_a_quota_or_a_quota_fault(text: str) -> None:
    faults_of(text)


@given(QUOTAS, st.booleans(), st.lists(SYNTAX, min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_any_damaged_document_is_a_quota_or_a_quota_fault(
    quota: Quota, as_json: bool, splinters: list[str], chance: random.Random
) -> None:
    text = json.dumps(written(quota)) if as_json else yaml.safe_dump(written(quota))
    for splinter in splinters:
        start = chance.randrange(len(text) + 1)
        text = text[:start] + splinter + text[start + chance.randrange(9) :]
    faults_of(text)


@given(JSON_VALUES)
@settings(max_examples=300)
def test_faults_are_short_lines_that_can_be_sent(value: Any) -> None:
    """For any JSON: no control characters, no surrogates, no value of any length in a message."""
    for fault in faults_of(json.dumps({"team-a": value})):
        assert str(fault).isprintable()
        assert str(fault).encode()
        assert len(fault.message) < 300


@given(QUOTAS, st.data())
def test_every_broken_limit_is_found_and_nothing_else(quota: Quota, data: st.DataObject) -> None:
    document = written(quota)
    limits = [(name, model) for name, entry in document.items() for model in entry["quota"]]
    broken = [limit for limit in limits if data.draw(st.booleans())]
    for name, model in broken:
        document[name]["quota"][model] = data.draw(st.sampled_from([-1, "8", None, True, [], 0.001, 1e9]))
    paths = [fault.path for fault in faults_of(json.dumps(document))]
    assert paths == [f"{name}.quota[{model}]" if "." in model else f"{name}.quota.{model}" for name, model in broken]


ASCII = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=8)


@given(
    st.recursive(ASCII | st.none() | st.booleans() | st.integers(), lambda c: st.lists(c) | st.dictionaries(ASCII, c))
)
def test_json_read_as_yaml_is_the_same(value: Any) -> None:
    text = json.dumps({"value": value})
    assert read_text(f"---\n{text}") == read_text(text)


@given(st.decimals(0, 100_000, places=2))
def test_hundredths_are_exact(cards: Decimal) -> None:
    quota = parse_quota(f"a: {{quota: {{M40: {cards}}}}}")
    assert quota.namespaces["a"].limits["M40"].cores == int(cards.scaleb(2))
