"""Property tests of any text as a quota document: it is either read back as written, or its faults are reported."""

import json
import random
from itertools import pairwise
from typing import Any

import pytest
import yaml
from hypothesis import given, settings, strategies as st

from tests.builders import quota_faults
from tests.tables import cases
from vcuda.quota.document import parse_quota
from vcuda.quota.model import Limit, Mode, NamespaceQuota, Quota
from vcuda.quota.yaml import read_content

NO_TOKEN = (
    "found character that cannot start any token while scanning for the next token. "
    "Lines must be indented with spaces, not with tabs"
)
NO_SPACE = "found unexpected ':' while scanning a plain scalar. A space must follow the colon"
TOO_LONG = "found extremely long version number while scanning a %YAML directive"


@pytest.mark.parametrize(
    ("text", "line", "column", "found"),
    [
        ('{\n "a": {"quota": {"M40": 2 "P100": 3}}}', 2, 27, "Expecting ',' delimiter"),
        ("{team-a: {},\n team-b: {pool: [}}", 2, 18, "did not find expected node content while parsing a flow node"),
        ('{"a": {"pool": ["x"', 1, 20, "Expecting ',' delimiter"),
        ('{"a" {}}', 1, 6, "Expecting ':' delimiter"),
        ('{"a": {}}}', 1, 10, "Extra data"),
        ("a:\n\tquota: {}", 2, 1, NO_TOKEN),
        ("a: {quota: {M: 1}", 1, 18, "did not find expected ',' or '}' while parsing a flow mapping"),
        ("a: {quota:{M: 1}}", 1, 10, NO_SPACE),
        ("a: {}\n b: {}", 2, 2, "did not find expected key while parsing a block mapping"),
        ("a:\n  b: c: 1", 2, 7, "mapping values are not allowed in this context"),
        ("a: 'b", 1, 6, "found unexpected end of stream while scanning a quoted scalar"),
        ("é: {}\nb: \x07", 2, 4, "YAML does not allow this character"),
        ("a: !!python/object:os.system {}", 1, 4, "tags (`!`) are not supported and must be removed"),
        ("a: !x {}", 1, 4, "tags (`!`) are not supported and must be removed"),
        ("a: {}\n---\nb: {}", 2, 1, "a second YAML document starts here. All namespaces must be in one document"),
        ("? [a]\n: {}", 1, 3, "a key must be text, not a list, a mapping or an alias"),
        ("a: &a {}\n*a : {}", 2, 1, "a key must be text, not a list, a mapping or an alias"),
        ("a: &a {quota: *a}", 1, 15, "an alias must be after its anchor, and not inside the anchored value"),
        ('é: "\\UFFFFFFFF"', 1, 7, "found invalid Unicode character escape code while parsing a quoted scalar"),
        (f"%YAML 1.{'9' * 5000}\n---\n{{}}", 1, 18, TOO_LONG),
    ],
)
def test_a_syntax_error_is_one_fault_with_line_and_column(text: str, line: int, column: int, found: str) -> None:
    assert [str(fault) for fault in quota_faults(text)] == [f"line {line}, column {column}: {found}"]


def test_json_within_yaml_needs_no_space_after_a_colon() -> None:
    assert parse_quota('a: {"quota":{"M40":1}}').namespaces["a"].limits.keys() == {"M40"}


@pytest.mark.parametrize("opening", ["[", "{", '{"a":', "{a: ", "- ", "? ", "a: &a {<<: "])
def test_no_depth_of_nesting_crashes(opening: str) -> None:
    assert len(quota_faults(opening * 100_000)) == 1


def bomb(mapping: str) -> str:
    """Return ten lines of YAML, each with ten aliases of the line before. The last has a thousand million entries."""
    names = [f"a{n}" for n in range(10)]
    lines = (mapping.format(this=b, above=",".join(10 * [f"*{a}"])) for a, b in pairwise(names))
    return "a0: &a0 {x: 1}\n" + "\n".join(lines)


CHAIN = "a0: &a0 {x: 1}\n" + "\n".join(f"a{n}: &a{n} {{<<: *a{n - 1}}}" for n in range(1, 2000))
MANY = "{" + ",".join(f'"n{n}": {{}}' for n in range(10_001)) + "}"
TOO_MANY = "the document must not have more than 200000 entries, including those that aliases repeat"
TOO_DEEP = "the document must not have more than 16 levels of nesting; a quota needs four levels"


@cases(
    "text, found",
    aliases_of_aliases=(bomb("{this}: &{this} [{above}]"), TOO_MANY),
    merges_of_merges=(bomb("{this}: &{this} {{<<: [{above}]}}"), TOO_MANY),
    chain_of_merges=(CHAIN, TOO_DEEP),
    deep_json=('{"a":' * 17 + "1" + "}" * 17, TOO_DEEP),
    deep_yaml=("[" * 17 + "]" * 17, TOO_DEEP),
    namespaces=(MANY, "the document must not have more than 10000 namespaces; got 10001"),
    length=("#" * 1048577, "the document must not be longer than 1048576 characters; got 1048577"),
)
def test_an_oversized_document_is_one_fault(text: str, found: str) -> None:
    assert [str(fault) for fault in quota_faults(text)] == [found]


ASCII = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=8)


PLAIN = ASCII | st.none() | st.booleans() | st.integers()


@given(st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(ASCII, inner)))
def test_json_read_as_yaml_is_the_same(value: Any) -> None:
    text = json.dumps({"value": value})
    assert read_content(f"---\n{text}") == read_content(text)


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
    cards = limit.most_cores / 100 if limit.most_cores % 100 else limit.most_cores // 100
    return cards if limit.memory is None else {"cards": cards, "memory": f"{limit.memory}Mi"}


def written_entry(entry: NamespaceQuota) -> dict[str, Any]:
    models = {model: written_limit(limit) for model, limit in entry.limits.items()}
    return {"quota": models, "pool": list(entry.pools), "mode": str(entry.mode)}


def written(quota: Quota) -> dict[str, Any]:
    entries = {name: written_entry(entry) for name, entry in quota.namespaces.items()}
    return entries if quota.default is None else {**entries, "*": written_entry(quota.default)}


@given(QUOTAS, st.sampled_from([None, 2, "\t"]))
def test_a_quota_written_as_json_is_read_back(quota: Quota, indent: int | str | None) -> None:
    assert parse_quota(json.dumps(written(quota), indent=indent)) == quota


@given(QUOTAS, st.booleans())
def test_a_quota_written_as_yaml_is_read_back(quota: Quota, flow: bool) -> None:
    assert parse_quota(yaml.safe_dump(written(quota), default_flow_style=flow, sort_keys=False)) == quota


@given(st.text() | SYNTAX)
def test_any_text_is_a_quota_or_a_quota_fault(text: str) -> None:
    quota_faults(text)


@given(QUOTAS, st.booleans(), st.lists(SYNTAX, min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_any_damaged_document_is_a_quota_or_a_quota_fault(
    quota: Quota, as_json: bool, splinters: list[str], chance: random.Random
) -> None:
    text = json.dumps(written(quota)) if as_json else yaml.safe_dump(written(quota))
    for splinter in splinters:
        start = chance.randrange(len(text) + 1)
        text = text[:start] + splinter + text[start + chance.randrange(9) :]
    quota_faults(text)


@given(JSON_VALUES)
@settings(max_examples=300)
def test_faults_are_short_lines_that_can_be_sent(value: Any) -> None:
    """A message must not contain control characters, surrogates or very long values."""
    for fault in quota_faults(json.dumps({"team-a": value})):
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
    paths = [fault.path for fault in quota_faults(json.dumps(document))]
    assert paths == [f"{name}.quota[{model}]" if "." in model else f"{name}.quota.{model}" for name, model in broken]
