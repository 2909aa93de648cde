"""Tests of the quota document: valid documents and their meaning, and the message for each mistake."""

import pytest

from tests.builders import quota_faults
from tests.tables import cases
from vcuda.quota.document import parse_quota
from vcuda.quota.model import Limit, Mode, NamespaceQuota, Quota

GIB = 1024


def faults(text: str) -> list[str]:
    """Return the text of every fault in the document ``text``."""
    return [str(fault) for fault in quota_faults(text)]


def limits(written: str) -> dict[str, Limit]:
    """Return the limits of a namespace whose quota is ``written`` in YAML's flow style."""
    return dict(parse_quota(f"team-a: {{quota: {{{written}}}}}").namespaces["team-a"].limits)


# Tests of valid documents


@pytest.mark.parametrize("text", ["", "  \n", "{}", "\ufeff{}", "# nobody yet\n", "---\n", "null"])
def test_an_empty_document_limits_no_namespace(text: str) -> None:
    assert parse_quota(text) == Quota()


GPU_ADMISSION = """{
\t"team-a": {
\t\t"pool": ["public"],
\t\t"quota": {"M40": 2, "P100": 3}
\t},
\t"team-b": {"quota": {"M40": 8, "P100": 2}, "pool": null},
\t"team-c": {"quota": null},
\t"team-d": {}
}"""


@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "with a byte order mark"])
def test_gpu_admissions_json_works_unchanged(mark: str) -> None:
    """The tools of gpu-admission write tabs, and null for pools. A namespace that has pools but no quota may use no
    model.
    """
    assert parse_quota(mark + GPU_ADMISSION) == Quota(
        {
            "team-a": NamespaceQuota({"M40": Limit(200), "P100": Limit(300)}, ("public",)),
            "team-b": NamespaceQuota({"M40": Limit(800), "P100": Limit(200)}),
            "team-c": NamespaceQuota({}),
            "team-d": NamespaceQuota({}),
        }
    )


EXTENDED = """
team-a: {pool: [public, wx], quota: {P100: 2.5, M40: 8}}
team-b: {quota: {A100: {cards: 4, memory: 160Gi}}}
team-c: {mode: warn, quota: {M40: 8}}
team-d: {mode: audit}
"*":    {quota: {}}
"""


def test_the_extended_yaml_is_read() -> None:
    assert parse_quota(EXTENDED) == Quota(
        {
            "team-a": NamespaceQuota({"P100": Limit(250), "M40": Limit(800)}, ("public", "wx")),
            "team-b": NamespaceQuota({"A100": Limit(400, 160 * GIB)}),
            "team-c": NamespaceQuota({"M40": Limit(800)}, mode=Mode.WARN),
            "team-d": NamespaceQuota({}, mode=Mode.AUDIT),
        },
        default=NamespaceQuota({}),
    )


def test_models_keep_the_order_of_the_document() -> None:
    assert list(limits("Z: 1, A: 1, M: 1")) == ["Z", "A", "M"]


def test_the_system_namespaces_are_passed_on() -> None:
    assert parse_quota('"*": {}', frozenset({"infra"})).for_namespace("infra") is None


CARDS = "0=0 8=800 8.=800 2.5=250 .5=50 0.01=1 0.29=29 2.500=250 +3=300 -0=0 100000=10000000"


@pytest.mark.parametrize(("written", "cores"), [pair.split("=") for pair in CARDS.split()])
def test_cards_become_hundredths_exactly(written: str, cores: str) -> None:
    assert limits(f"M40: {written}") == {"M40": Limit(int(cores))}


@cases(
    "written, mib",
    Gi=("160Gi", 160 * GIB),
    in_quotes=('"160Gi"', 160 * GIB),
    fraction=("1.5Gi", 1536),
    decimal_unit_rounded_down=("80G", 76_293),
    bytes=("1048576", 1),
    bytes_rounded_down=("2097151", 1),
    exponent=("8e9", 7629),
    the_most=("100000Ti", 104_857_600_000),
)
def test_memory_becomes_whole_mib(written: str, mib: int) -> None:
    assert limits(f"M40: {{cards: 1, memory: {written}}}") == {"M40": Limit(100, mib)}


def test_yaml_keys_stay_as_written() -> None:
    """These keys stay texts. YAML 1.1 would convert them to numbers, booleans or null."""
    quota = parse_quota("no: {quota: {4090: 1, 1e3: 1, 0x10: 1, 010: 1}}\n123: {}\non: {}\nnull: {}")
    assert list(quota.namespaces) == ["no", "123", "on", "null"]
    assert list(quota.namespaces["no"].limits) == ["4090", "1e3", "0x10", "010"]


def test_a_json_number_may_have_an_exponent() -> None:
    assert parse_quota('{"a": {"quota": {"M40": 1e1}}}').namespaces["a"].limits == {"M40": Limit(1000)}


def test_json_that_only_yaml_can_read_is_read_as_yaml() -> None:
    assert parse_quota("{team-a: {quota: {M40: 1,},},}").namespaces["team-a"] == NamespaceQuota({"M40": Limit(100)})


def test_anchors_and_merge_keys_may_be_used() -> None:
    """A key that is written in a mapping overrides merged keys. Of several merged mappings, the earlier one wins."""
    quota = parse_quota(
        "a: &a {mode: warn, pool: &pools [public], quota: {M40: 1}}\n"
        "b: &b {mode: audit, quota: {M40: 2}}\n"
        "c: {<<: *a, quota: {P100: 3}}\n"
        "d: {quota: {P100: 4}, <<: [*b, *a]}\n"
        "e: {pool: *pools}\n"
    )
    assert quota.namespaces["c"] == NamespaceQuota({"P100": Limit(300)}, ("public",), Mode.WARN)
    assert quota.namespaces["d"] == NamespaceQuota({"P100": Limit(400)}, ("public",), Mode.AUDIT)
    assert quota.namespaces["e"] == NamespaceQuota({}, ("public",))


# Tests of mistakes in one value

NO_LABEL = (
    "can never be a node label's value; write at most 63 letters, digits, `-`, `_` and `.`, "
    "with a letter or digit at both ends"
)
NO_NAMESPACE = (
    "can never be a namespace; write at most 63 lower-case letters, digits and `-`, "
    "with a letter or digit at both ends, or `*` for every namespace without its own entry"
)


NOT_CARDS = "1:30 1_000 0x10 1e3 ٤ .nan 2020-01-01 yes"
NOT_MEMORY = ("160GB", "160 Gi", "1_6Gi", "٤Gi", "NaN", "Infinity", "Gi")


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ('"8"', '"8" is text; write 8 without quotes'),
        ('" 2.5"', '" 2.5" is text; write 2.5 without quotes'),
        ("010", '"010" is text; write 10 without quotes'),
        *((text, f'"{text}" is not a number of cards; write for example 8 or 2.5') for text in NOT_CARDS.split()),
        ("true", "true is not a number of cards; write for example 8 or 2.5"),
        ("", "an empty value is not a number of cards; write for example 8 or 2.5"),
        ("[8]", "a list is not a number of cards; write for example 8 or 2.5"),
        ("80Gi", '"80Gi" is not a number of cards; write memory separately: {cards: 4, memory: 160Gi}'),
        ("-1", "-1 is not a possible number of cards; write a number from 0 to 100000"),
        ("100000.01", "100000.01 is not a possible number of cards; write a number from 0 to 100000"),
        ("2.555", "2.555 has more than two decimals; write 2.55"),
        ("1." + 40 * "0" + "1", "1." + 40 * "0" + "1 has more than two decimals; write 1"),
        ('"a\\nb\\0"', '"a\\nb\\x00" is not a number of cards; write for example 8 or 2.5'),
        ("x" * 99, f'"{"x" * 62}…" is not a number of cards; write for example 8 or 2.5'),
    ],
)
def test_an_invalid_number_of_cards_is_rejected(written: str, sentence: str) -> None:
    assert faults(f"team-a: {{quota: {{V100: {written} }}}}") == [f"team-a.quota.V100: {sentence}"]
    assert faults(f"team-a: {{quota: {{V100: {{cards: {written} }}}}}}") == [f"team-a.quota.V100.cards: {sentence}"]


@pytest.mark.parametrize("written", ["NaN", "Infinity", "-Infinity", "1e99", "1e99999999999999999999", "9" * 5000])
def test_every_absurd_json_number_is_rejected(written: str) -> None:
    (fault,) = faults(f'{{"team-a": {{"quota": {{"V100": {written}}}}}}}')
    assert fault.startswith("team-a.quota.V100: ")
    assert fault.endswith(" is not a possible number of cards; write a number from 0 to 100000")


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("160", "160 is less than 1 MiB; a number without a unit is bytes: write 160Gi"),
        ('"160"', '"160" is less than 1 MiB; a number without a unit is bytes: write 160Gi'),
        ("1048575", "1048575 is less than 1 MiB; a number without a unit is bytes: write 1048575Gi"),
        ("100Ki", '"100Ki" is less than 1 MiB; write for example 160Gi'),
        ("0", "0 leaves no memory; leave `memory` out for no limit, or write 0 cards to block the model"),
        ("-1Gi", '"-1Gi" is not a possible amount of memory; write at most 102400000Gi'),
        ("100001Ti", '"100001Ti" is not a possible amount of memory; write at most 102400000Gi'),
        *((text, f'"{text}" is not an amount of memory; write for example 160Gi') for text in NOT_MEMORY),
        ("true", "true is not an amount of memory; write for example 160Gi"),
        ("", "an empty value is not an amount of memory; write for example 160Gi"),
    ],
)
def test_an_invalid_amount_of_memory_is_rejected(written: str, sentence: str) -> None:
    assert faults(f"a: {{quota: {{V100: {{cards: 1, memory: {written} }}}}}}") == [f"a.quota.V100.memory: {sentence}"]


def test_an_invalid_amount_of_memory_in_json_is_rejected() -> None:
    fault = "a.quota.V100.memory: NaN is not an amount of memory; write for example 160Gi"
    assert faults('{"a": {"quota": {"V100": {"cards": 1, "memory": NaN}}}}') == [fault]


@pytest.mark.parametrize("name", ["A", "team_a", "-a", "a-", "a.b", "", "é", "a" * 64, "**", "a\\n"])
def test_an_impossible_namespace_is_a_fault(name: str) -> None:
    """An entry for an impossible namespace name would silently never apply. The example of gpu-admission has such
    names.
    """
    (fault,) = faults(f'"{name}": {{}}')
    assert fault.endswith(f": {NO_NAMESPACE}")


@pytest.mark.parametrize("name", ["a b", "-a", "a.", "", "é", "a" * 64, "a/b", "a\\n"])
def test_a_model_or_pool_that_no_label_can_have_is_a_fault(name: str) -> None:
    both = faults(f'a: {{quota: {{"{name}": 1}}, pool: ["{name}"]}}')
    assert [fault.endswith(NO_LABEL) for fault in both] == [True, True]


@pytest.mark.parametrize("name", ["a", "9", "NVIDIA-A100-SXM4-80GB", "A100_80.G", "a" * 63])
def test_a_model_and_pool_that_a_label_can_have_are_accepted(name: str) -> None:
    quota = parse_quota(f'a: {{quota: {{"{name}": 1}}, pool: ["{name}"]}}')
    assert quota.namespaces["a"] == NamespaceQuota({name: Limit(100)}, (name,))


# Tests of mistakes in the shape of the document

WRITE_A_NAMESPACE = "write a mapping such as {quota: {M40: 8}}"
WRITE_MODELS = "write the cards of each model, such as {M40: 8, P100: 2.5}"
NO_LIMIT = "must have `cards`, `memory`, or both, for example {cards: 4, memory: 160Gi}"
NAMESPACE_KEYS = (
    "unknown key; the keys here are `quota`, `pool`, `mode`, `allow`, `order`, `prefer`, `one_model`, "
    "`time_zone`, `grants`; models belong under `quota`"
)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[a]", ["a list is not allowed here; write one entry for each namespace, such as team-a: {quota: {M40: 8}}"]),
        ("text", ['"text" is not allowed here; write one entry for each namespace, such as team-a: {quota: {M40: 8}}']),
        ("a:", [f"a: an empty value is not allowed here; {WRITE_A_NAMESPACE}"]),
        ("a: 3", [f"a: 3 is not allowed here; {WRITE_A_NAMESPACE}"]),
        ("a: {quota: 3}", [f"a.quota: 3 is not allowed here; {WRITE_MODELS}"]),
        ("a: {quota: [M40]}", [f"a.quota: a list is not allowed here; {WRITE_MODELS}"]),
        ("a: {quotas: {}}", ["a.quotas: unknown key; did you mean `quota`?"]),
        ("a: {Pool: []}", ["a.Pool: unknown key; did you mean `pool`?"]),
        ("a: {M40: 8}", [f"a.M40: {NAMESPACE_KEYS}"]),
        ('a: {"<<": {}}', [f"a[<<]: {NAMESPACE_KEYS}"]),
        ('{"a": {"<<": {}}}', [f"a[<<]: {NAMESPACE_KEYS}"]),
        ("a: {quota: {V100: {}}}", [f"a.quota.V100: {NO_LIMIT}"]),
        ("a: {quota: {V100: {cards: 1, mem: 1}}}", ["a.quota.V100.mem: unknown key; did you mean `memory`?"]),
        ("a: {quota: {M: {cards: 1, x: 1}}}", ["a.quota.M.x: unknown key; the keys here are `cards`, `memory`"]),
        ("a: {pool: public}", ['a.pool: "public" is not a list; write for example [public]']),
        ("a: {pool: {}}", ["a.pool: a mapping is not a list; write for example [public]"]),
        ("a: {pool: [7]}", ["a.pool[0]: 7 is not a text; write a name, in quotes"]),
        ("a: {pool: [b, c, b, 7, b]}", [
            "a.pool[2]: is listed twice; remove it here",
            "a.pool[3]: 7 is not a text; write a name, in quotes",
            "a.pool[4]: is listed twice; remove it here",
        ]),
        ("a: {mode: enforced}", ['a.mode: "enforced" is not a mode; did you mean `enforce`?']),
        ("a: {mode: off}", ['a.mode: "off" is not a mode; write enforce, warn or audit']),
        ("a: {mode: true}", ["a.mode: true is not a mode; write enforce, warn or audit"]),
        ("a: {mode: }", ["a.mode: an empty value is not a mode; write enforce, warn or audit"]),
        ("a: {quota: {A100.80G: {cards: -1}}}", [
            "a.quota[A100.80G].cards: -1 is not a possible number of cards; write a number from 0 to 100000"
        ]),
        ("a: {<<: 3}", ["a[<<]: is not a mapping; write an alias: <<: *name"]),
        ("a: {<<: [{}, [{}]]}", ["a[<<]: is not a mapping; write an alias: <<: *name"]),
        ("a: {<<: [3, 4]}", ["a[<<]: is not a mapping; write an alias: <<: *name"]),
        ("a: {<<: {}, <<: {}}", ["a[<<]: is written twice; write one with a list: <<: [*a, *b]"]),
    ],
)  # fmt: skip
def test_a_wrong_shape_is_a_fault_at_its_path(text: str, found: list[str]) -> None:
    assert faults(text) == found


REPEATED = [
    "a: is written twice; keep one of them",
    "b.pool: is written twice; keep one of them",
    "b.quota.M40: is written twice; keep one of them",
    "b.quota.V100.cards: is written twice; keep one of them",
]


@cases(
    "text",
    json='{"a": {}, "a": {}, "b": {"pool": [], "pool": [],'
    '"quota": {"M40": 1, "M40": 1, "V100": {"cards": 1, "cards": 2}}}}',
    yaml="a: {}\na: {}\nb:\n  pool: []\n  pool: []\n  quota: {M40: 1, 'M40': 1, V100: {cards: 1, cards: 2}}",
)
def test_a_repeated_key_is_a_fault_on_every_level(text: str) -> None:
    assert faults(text) == REPEATED


def test_all_faults_are_reported_at_once_in_the_order_of_the_document() -> None:
    text = """
    team-b:
      pools: []
      quota: {V100: "8", V100: 1, bad key: true}
      mode: loud
    Team-A: {quota: {M40: -1, P100: {}}}
    team-c:
    """
    assert faults(text) == [
        "team-b.pools: unknown key; did you mean `pool`?",
        "team-b.quota.V100: is written twice; keep one of them",
        'team-b.quota.V100: "8" is text; write 8 without quotes',
        f'team-b.quota[bad key]: "bad key" {NO_LABEL}',
        "team-b.quota[bad key]: true is not a number of cards; write for example 8 or 2.5",
        'team-b.mode: "loud" is not a mode; write enforce, warn or audit',
        f"Team-A: {NO_NAMESPACE}",
        "Team-A.quota.M40: -1 is not a possible number of cards; write a number from 0 to 100000",
        f"Team-A.quota.P100: {NO_LIMIT}",
        f"team-c: an empty value is not allowed here; {WRITE_A_NAMESPACE}",
    ]


# Tests of invalid characters


@pytest.mark.parametrize("text", ['{"\\ud800": {}}', "\ud800: {}"], ids=["json", "unescaped"])
def test_half_a_character_is_never_repeated_in_a_fault(text: str) -> None:
    """A lone UTF-16 surrogate cannot be encoded in UTF-8, so an answer that quotes it could not be sent."""
    assert faults(text) == [f"[\ufffd]: {NO_NAMESPACE}"]


def test_half_a_character_in_a_value_is_rejected_like_any_other_text() -> None:
    (fault,) = faults('{"a": {"pool": ["\\ud800"]}}')
    assert fault == f'a.pool[0]: "\ufffd" {NO_LABEL}'
