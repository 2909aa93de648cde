"""Tests of the quota document: the meaning of valid documents, and the message for each mistake."""

import pytest

from tests.builders import quota_faults
from tests.tables import cases
from vcuda.quota.document import parse_quota
from vcuda.quota.entries import MAX_EXCEPTED
from vcuda.quota.model import Limit, Mode, NamespaceQuota, Quota

GIB = 1024


def faults(text: str) -> list[str]:
    return [str(fault) for fault in quota_faults(text)]


def limits(written: str) -> dict[str, Limit]:
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
    """gpu-admission's tools write tabs, and null for pools. A namespace with pools but no quota may use no model."""
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
    """YAML 1.1 reads these keys as numbers, booleans or null, but here they are names of namespaces and models."""
    quota = parse_quota("no: {quota: {4090: 1, 1e3: 1, 0x10: 1, 010: 1}}\n123: {}\non: {}\nnull: {}")
    assert list(quota.namespaces) == ["no", "123", "on", "null"]
    assert list(quota.namespaces["no"].limits) == ["4090", "1e3", "0x10", "010"]


def test_a_json_number_may_have_an_exponent() -> None:
    assert parse_quota('{"a": {"quota": {"M40": 1e1}}}').namespaces["a"].limits == {"M40": Limit(1000)}


def test_json_that_only_yaml_can_read_is_read_as_yaml() -> None:
    assert parse_quota("{team-a: {quota: {M40: 1,},},}").namespaces["team-a"] == NamespaceQuota({"M40": Limit(100)})


def test_anchors_and_merge_keys_may_be_used() -> None:
    """A mapping's own key overrides merged keys. If several mappings are merged, the first one with a key wins."""
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


# Tests of a document with a mistake in one value

NO_LABEL = (
    "must be a valid value of a node label: at most 63 letters, digits, `-`, `_` and `.`, "
    "with a letter or digit at both ends; got "
)
NO_NAMESPACE = (
    "the name of a namespace must have at most 63 lower-case letters, digits and `-`, and must begin and end with a "
    "letter or digit. The entry `*` applies to every namespace without its own entry"
)
NOT_A_COUNT = "must be a number of cards, for example 8 or 2.5; got "
NO_MEMORY = "must be an amount of memory, for example 160Gi; got "


NOT_CARDS = "1:30 1_000 0x10 1e3 ٤ .nan 2020-01-01 yes"
NOT_MEMORY = ("160GB", "160 Gi", "1_6Gi", "٤Gi", "NaN", "Infinity", "Gi")


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ('"8"', 'must be a number without quotes, for example 8; got "8"'),
        ('" 2.5"', 'must be a number without quotes, for example 2.5; got " 2.5"'),
        ("010", 'must be a number without quotes, for example 10; got "010"'),
        *((text, f'{NOT_A_COUNT}"{text}"') for text in NOT_CARDS.split()),
        ("true", f"{NOT_A_COUNT}true"),
        ("", f"{NOT_A_COUNT}an empty value"),
        ("[8]", f"{NOT_A_COUNT}a list"),
        ("80Gi", 'must be a number of cards, or for example {cards: 4, memory: 160Gi}; got "80Gi"'),
        ("-1", "must be a number of cards between 0 and 100000; got -1"),
        ("100000.01", "must be a number of cards between 0 and 100000; got 100000.01"),
        ("2.555", "must have at most two decimals, for example 2.56; got 2.555"),
        ("1." + 40 * "0" + "1", "must have at most two decimals, for example 1.01; got 1." + 40 * "0" + "1"),
        ('"a\\nb\\0"', f'{NOT_A_COUNT}"a\\nb\\x00"'),
        ("x" * 99, f'{NOT_A_COUNT}"{"x" * 62}…"'),
    ],
)
def test_an_invalid_number_of_cards_is_rejected(written: str, sentence: str) -> None:
    assert faults(f"team-a: {{quota: {{V100: {written} }}}}") == [f"team-a.quota.V100: {sentence}"]
    assert faults(f"team-a: {{quota: {{V100: {{cards: {written} }}}}}}") == [f"team-a.quota.V100.cards: {sentence}"]


@pytest.mark.parametrize("written", ["NaN", "Infinity", "-Infinity", "1e99", "1e99999999999999999999", "9" * 5000])
def test_every_absurd_json_number_is_rejected(written: str) -> None:
    (fault,) = faults(f'{{"team-a": {{"quota": {{"V100": {written}}}}}}}')
    assert fault.startswith("team-a.quota.V100: must be a number of cards between 0 and 100000; got ")


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("160", "must have a unit, for example 160Mi, because a number without a unit is in bytes; got 160"),
        ('"160"', 'must have a unit, for example 160Mi, because a number without a unit is in bytes; got "160"'),
        (
            "1048575",
            "must have a unit, for example 1048575Mi, because a number without a unit is in bytes; got 1048575",
        ),
        ("100Ki", 'must be at least 1Mi, for example 160Gi; got "100Ki"'),
        ("0", "must not be 0. For no limit, omit `memory`. To block the model, write `cards: 0`"),
        ("-1Gi", 'must be an amount of memory between 1Mi and 102400000Gi; got "-1Gi"'),
        ("100001Ti", 'must be an amount of memory between 1Mi and 102400000Gi; got "100001Ti"'),
        *((text, f'{NO_MEMORY}"{text}"') for text in NOT_MEMORY),
        ("true", f"{NO_MEMORY}true"),
        ("", f"{NO_MEMORY}an empty value"),
    ],
)
def test_an_invalid_amount_of_memory_is_rejected(written: str, sentence: str) -> None:
    assert faults(f"a: {{quota: {{V100: {{cards: 1, memory: {written} }}}}}}") == [f"a.quota.V100.memory: {sentence}"]


def test_an_invalid_amount_of_memory_in_json_is_rejected() -> None:
    fault = f"a.quota.V100.memory: {NO_MEMORY}NaN"
    assert faults('{"a": {"quota": {"V100": {"cards": 1, "memory": NaN}}}}') == [fault]


@pytest.mark.parametrize("name", ["A", "team_a", "-a", "a-", "a.b", "", "é", "a" * 64, "**", "a\\n"])
def test_an_impossible_namespace_is_a_fault(name: str) -> None:
    """gpu-admission's example has an impossible name of a namespace. Its quota would silently never apply."""
    (fault,) = faults(f'"{name}": {{}}')
    assert fault.endswith(f": {NO_NAMESPACE}")


@pytest.mark.parametrize("name", ["a b", "-a", "a.", "", "é", "a" * 64, "a/b", "a\\n"])
def test_a_model_or_pool_that_no_label_can_have_is_a_fault(name: str) -> None:
    both = faults(f'a: {{quota: {{"{name}": 1}}, pool: ["{name}"]}}')
    assert [NO_LABEL in fault for fault in both] == [True, True]


@pytest.mark.parametrize("name", ["a", "9", "NVIDIA-A100-SXM4-80GB", "A100_80.G", "a" * 63])
def test_a_model_and_pool_that_a_label_can_have_are_accepted(name: str) -> None:
    quota = parse_quota(f'a: {{quota: {{"{name}": 1}}, pool: ["{name}"]}}')
    assert quota.namespaces["a"] == NamespaceQuota({name: Limit(100)}, (name,))


# Tests of a document with a value of the wrong type, for example a list instead of a mapping

NOT_A_DOCUMENT = "must be a mapping with one entry per namespace, for example team-a: {quota: {A100: 8}}; got "
NOT_AN_ENTRY = "must be a mapping, for example {quota: {A100: 8}}; got "
NOT_A_QUOTA = "must be a mapping from models to cards, for example {A100: 8, T4: 2.5}; got "
NO_EXCEPTED = "must be the name of a namespace, or the beginning of names with `*`, for example longhorn-*; got "
MODES = "supported values: enforce, warn, audit"
NO_LIMIT = "must have `cards`, `memory`, or both, for example {cards: 4, memory: 160Gi}"
NO_TOTAL = "`total` requires models in `quota` or `grants`, because the namespace must not use other models"
GRANT_KEYS = "unknown key; supported keys: `from`, `until`, `weekly`, `daily`, `why` and the names of GPU models"
NAMESPACE_KEYS = (
    "unknown key; supported keys: `quota`, `pool`, `mode`, `allow`, `order`, `one_model`, "
    "`require_nodes`, `total`, `time_zone`, `grants`, `except`. GPU models must be listed in `quota`"
)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[a]", [f"{NOT_A_DOCUMENT}a list"]),
        ("text", [f'{NOT_A_DOCUMENT}"text"']),
        ("a:", [f"a: {NOT_AN_ENTRY}an empty value"]),
        ("a: 3", [f"a: {NOT_AN_ENTRY}3"]),
        ("a: {quota: 3}", [f"a.quota: {NOT_A_QUOTA}3"]),
        ("a: {quota: [M40]}", [f"a.quota: {NOT_A_QUOTA}a list"]),
        ("a: {quotas: {}}", ["a.quotas: unknown key; did you mean `quota`?"]),
        ("a: {Pool: []}", ["a.Pool: unknown key; did you mean `pool`?"]),
        ("a: {M40: 8}", [f"a.M40: {NAMESPACE_KEYS}"]),
        ('a: {"<<": {}}', [f"a[<<]: {NAMESPACE_KEYS}"]),
        ('{"a": {"<<": {}}}', [f"a[<<]: {NAMESPACE_KEYS}"]),
        ("a: {quota: {V100: {}}}", [f"a.quota.V100: {NO_LIMIT}"]),
        ("a: {quota: {V100: {cards: 1, mem: 1}}}", ["a.quota.V100.mem: unknown key; did you mean `memory`?"]),
        ("a: {quota: {M: {cards: 1, x: 1}}}", ["a.quota.M.x: unknown key; supported keys: `cards`, `memory`"]),
        ("a: {pool: public}", ['a.pool: must be a list, for example [public]; got "public"']),
        ("a: {pool: {}}", ["a.pool: must be a list, for example [public]; got a mapping"]),
        ("a: {pool: [7]}", ["a.pool[0]: must be a string, so the name must be in quotes; got 7"]),
        ("a: {pool: [b, c, b, 7, b]}", [
            "a.pool[2]: duplicate name; each name must be listed once",
            "a.pool[3]: must be a string, so the name must be in quotes; got 7",
            "a.pool[4]: duplicate name; each name must be listed once",
        ]),
        ("a: {quota: {A100: 8, total: 20}, grants: [{total: 4, weekly: Sat}]}", [
            "a.quota.total: must be a key of the entry, for example {total: 20, quota: {A100: 8, T4: 16}}",
            f"a.grants[0].total: {GRANT_KEYS}",
        ]),
        ("a: {total: 20}", [f"a: {NO_TOTAL}"]),
        ("a: {total: 20, quota: {}}", [f"a: {NO_TOTAL}"]),
        ("a: {total: all, quota: {T4: 1}}", ['a.total: must be a number of cards, for example 8 or 2.5; got "all"']),
        ("a: {total: -1, quota: {T4: 1}}", ["a.total: must be a number of cards between 0 and 100000; got -1"]),
        ("a: {except: [b]}", ['a.except: must be set only in the entry "*"']),
        ("'*': {exept: [b]}", ["*.exept: unknown key; did you mean `except`?"]),
        ("'*': {except: longhorn-*}", ['*.except: must be a list, for example [longhorn-*]; got "longhorn-*"']),
        ("'*': {except: ['*', a-*, Team, '*-a', a*b, b, b, 7]}", [
            f'*.except[0]: {NO_EXCEPTED}"*"',
            f'*.except[2]: {NO_EXCEPTED}"Team"',
            f'*.except[3]: {NO_EXCEPTED}"*-a"',
            f'*.except[4]: {NO_EXCEPTED}"a*b"',
            "*.except[6]: duplicate name; each name must be listed once",
            f"*.except[7]: {NO_EXCEPTED}7",
        ]),
        (f"'*': {{except: {[f'n{number}' for number in range(MAX_EXCEPTED + 1)]}}}", [
            "*.except: must not have more than 100 names; got 101"
        ]),
        ("a: {mode: enforced}", ['a.mode: unsupported value: "enforced"; did you mean `enforce`?']),
        ("a: {mode: off}", [f'a.mode: unsupported value: "off"; {MODES}']),
        ("a: {mode: true}", [f"a.mode: unsupported value: true; {MODES}"]),
        ("a: {mode: }", [f"a.mode: unsupported value: an empty value; {MODES}"]),
        ("a: {quota: {A100.80G: {cards: -1}}}", [
            "a.quota[A100.80G].cards: must be a number of cards between 0 and 100000; got -1"
        ]),
        ("a: {<<: 3}", ["a[<<]: must be an alias of a mapping, for example <<: *name"]),
        ("a: {<<: [{}, [{}]]}", ["a[<<]: must be an alias of a mapping, for example <<: *name"]),
        ("a: {<<: [3, 4]}", ["a[<<]: must be an alias of a mapping, for example <<: *name"]),
        ("a: {<<: {}, <<: {}}", ["a[<<]: duplicate key; write one key `<<` with a list, for example <<: [*a, *b]"]),
    ],
)  # fmt: skip
def test_a_wrong_shape_is_a_fault_at_its_path(text: str, found: list[str]) -> None:
    assert faults(text) == found


REPEATED = [
    "a: duplicate key; each key must be written once",
    "b.pool: duplicate key; each key must be written once",
    "b.quota.M40: duplicate key; each key must be written once",
    "b.quota.V100.cards: duplicate key; each key must be written once",
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
        "team-b.quota.V100: duplicate key; each key must be written once",
        'team-b.quota.V100: must be a number without quotes, for example 8; got "8"',
        f'team-b.quota[bad key]: {NO_LABEL}"bad key"',
        f"team-b.quota[bad key]: {NOT_A_COUNT}true",
        f'team-b.mode: unsupported value: "loud"; {MODES}',
        f"Team-A: {NO_NAMESPACE}",
        "Team-A.quota.M40: must be a number of cards between 0 and 100000; got -1",
        f"Team-A.quota.P100: {NO_LIMIT}",
        f"team-c: {NOT_AN_ENTRY}an empty value",
    ]


# Tests of invalid characters


@pytest.mark.parametrize("text", ['{"\\ud800": {}}', "\ud800: {}"], ids=["json", "unescaped"])
def test_half_a_character_is_never_repeated_in_a_fault(text: str) -> None:
    """A lone UTF-16 surrogate cannot be encoded in UTF-8, so an answer that quotes it could not be sent."""
    assert faults(text) == [f"[\ufffd]: {NO_NAMESPACE}"]


def test_half_a_character_in_a_value_is_rejected_like_any_other_text() -> None:
    (fault,) = faults('{"a": {"pool": ["\\ud800"]}}')
    assert fault == f'a.pool[0]: {NO_LABEL}"\ufffd"'
