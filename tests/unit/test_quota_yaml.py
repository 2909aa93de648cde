"""Quota documents that cannot be read at all: one fault each, never a crash, however they are built."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tables import cases
from vcuda.errors import QuotaFault
from vcuda.quota.document import parse_quota
from vcuda.quota.yaml import read_text


def faults(text: str) -> list[str]:
    """Return every fault of ``text`` as people read it."""
    with pytest.raises(QuotaFault) as caught:
        parse_quota(text)
    return [str(fault) for fault in caught.value.faults]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{\n "a": {"quota": {"M40": 2 "P100": 3}}}', "line 2, column 27: Expecting ',' delimiter"),
        (
            "{team-a: {},\n team-b: {pool: [}}",
            "line 2, column 18: did not find expected node content while parsing a flow node",
        ),
        ('{"a": {"pool": ["x"', "line 1, column 20: Expecting ',' delimiter"),
        ('{"a" {}}', "line 1, column 6: Expecting ':' delimiter"),
        ('{"a": {}}}', "line 1, column 10: Extra data"),
        (
            "a:\n\tquota: {}",
            (
                "line 2, column 1: found character that cannot start any token while scanning for the next token; "
                "indent with spaces, not tabs"
            ),
        ),
        ("a: {quota: {M: 1}", "line 1, column 18: did not find expected ',' or '}' while parsing a flow mapping"),
        (
            "a: {quota:{M: 1}}",
            "line 1, column 10: found unexpected ':' while scanning a plain scalar; write a space behind the colon",
        ),
        ("a: {}\n b: {}", "line 2, column 2: did not find expected key while parsing a block mapping"),
        ("a:\n  b: c: 1", "line 2, column 7: mapping values are not allowed in this context"),
        ("a: 'b", "line 1, column 6: found unexpected end of stream while scanning a quoted scalar"),
        ("é: {}\nb: \x07", "line 2, column 4: a character that YAML does not allow"),
        ("a: !!python/object:os.system {}", "line 1, column 4: tags (`!`) are not read; leave them out"),
        ("a: !x {}", "line 1, column 4: tags (`!`) are not read; leave them out"),
        ("a: {}\n---\nb: {}", "line 2, column 1: a second document starts here; write all namespaces in one"),
        ("? [a]\n: {}", "line 1, column 3: a key must be text, not a list, a mapping or an alias"),
        ("a: &a {}\n*a : {}", "line 2, column 1: a key must be text, not a list, a mapping or an alias"),
        (
            "a: &a {quota: *a}",
            "line 1, column 15: this alias (`*`) stands for nothing, or for something that it is itself part of",
        ),
        (
            'é: "\\UFFFFFFFF"',
            "line 1, column 7: found invalid Unicode character escape code while parsing a quoted scalar",
        ),
        (
            f"%YAML 1.{'9' * 5000}\n---\n{{}}",
            "line 1, column 18: found extremely long version number while scanning a %YAML directive",
        ),
    ],
)  # fmt: skip
def test_a_syntax_error_is_one_fault_with_line_and_column(text: str, found: str) -> None:
    assert faults(text) == [found]


def test_json_within_yaml_needs_no_space_behind_a_colon() -> None:
    assert parse_quota('a: {"quota":{"M40":1}}').namespaces["a"].limits.keys() == {"M40"}


@pytest.mark.parametrize("opening", ["[", "{", '{"a":', "{a: ", "- ", "? ", "a: &a {<<: "])
def test_no_depth_of_nesting_crashes(opening: str) -> None:
    assert len(faults(opening * 100_000)) == 1


def bomb(mapping: str) -> str:
    """Return ten lines of which each holds ten aliases of the line above: ten thousand million entries."""
    names = [f"a{n}" for n in range(10)]
    lines = (mapping.format(this=b, above=",".join(10 * [f"*{a}"])) for a, b in pairwise(names))
    return "a0: &a0 {x: 1}\n" + "\n".join(lines)


CHAIN = "a0: &a0 {x: 1}\n" + "\n".join(f"a{n}: &a{n} {{<<: *a{n - 1}}}" for n in range(1, 2000))
TOO_MANY = "the document has more than 200000 entries, those behind aliases included"
TOO_DEEP = "the document is nested more than 16 levels deep; a quota needs four"


@cases(
    "text, found",
    aliases_of_aliases=(bomb("{this}: &{this} [{above}]"), TOO_MANY),
    merges_of_merges=(bomb("{this}: &{this} {{<<: [{above}]}}"), TOO_MANY),
    chain_of_merges=(CHAIN, TOO_DEEP),
    deep_json=('{"a":' * 17 + "1" + "}" * 17, TOO_DEEP),
    deep_yaml=("[" * 17 + "]" * 17, TOO_DEEP),
    namespaces=(
        "{" + ",".join(f'"n{n}": {{}}' for n in range(10_001)) + "}",
        "there are 10001 namespaces; at most 10000 are read",
    ),
    length=(
        "#" * (1024 * 1024 + 1),
        "the document is 1048577 characters long; a ConfigMap holds at most 1048576 bytes",
    ),
)
def test_an_oversized_document_is_one_fault(text: str, found: str) -> None:
    assert faults(text) == [found]


ASCII = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=8)


@given(
    st.recursive(ASCII | st.none() | st.booleans() | st.integers(), lambda c: st.lists(c) | st.dictionaries(ASCII, c))
)
def test_json_read_as_yaml_is_the_same(value: Any) -> None:
    text = json.dumps({"value": value})
    assert read_text(f"---\n{text}") == read_text(text)
