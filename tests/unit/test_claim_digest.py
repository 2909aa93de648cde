"""Tests of the digest of a ResourceClaim's spec: a short form with only the fields that decide the charge.

A digest leads to the same charge as the spec. The size of a digest and the time to compute it are bounded.
"""

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from http import HTTPStatus
from typing import Any

import jsonpatch
import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from examples.claims import (
    A100,
    CLASSES,
    HAMI,
    M40,
    NVIDIA,
    SLICES,
    claim,
    claim_policy,
    device,
    entry,
    first_of,
    share,
    slice_of,
    spec,
    template,
    view,
)
from tests.builders import Manifest
from tests.tables import cases
from tests.unit.test_claim_review import QUOTA as QUOTA_OF_TEAM, Server
from vcuda.allocations.stored_claims import ClaimCounter, ClaimReader
from vcuda.claims import digest as digests
from vcuda.claims.cel import read_device_facts
from vcuda.claims.charges import ClaimPolicy
from vcuda.claims.digest import MAX_CLAIM_ENTRIES, MAX_EXPRESSIONS_LENGTH, pack, unpack
from vcuda.claims.objects import ClaimSpec
from vcuda.claims.pin import MAX_PIN_LENGTH, ClaimPin, read_claim_pin, write_pin
from vcuda.claims.request import read_claim
from vcuda.quota.model import Charge, Limit, Mode, NamespaceQuota, Quota
from vcuda.requests.folding import fold

QUOTA = Quota({"team-a": NamespaceQuota({"M40": Limit(800), "A100": Limit(800)})})
POLICY = claim_policy(quota=QUOTA)
MIG = "mig.nvidia.com"
ATTRIBUTE = f'device.attributes["{NVIDIA}"]'
MAX_PACKED = 16 * 1024

# Tests of claims whose spec is so small that all of it is read

PINS = st.builds(
    lambda driver, patterns, profiles: write_pin(ClaimPin(driver, patterns, profiles)),
    st.sampled_from([NVIDIA, HAMI]),
    st.lists(st.sampled_from(["m40", "a100", "tesla-m40-24gb", "nope", "a*"]), min_size=1, max_size=3).map(tuple),
    st.sampled_from([(), ("1g.5gb",), ("1g.5gb", "3g.20gb")]),
)
CONDITIONS = st.sampled_from(
    [
        f'{ATTRIBUTE}.productName == "{M40}"',
        f"{ATTRIBUTE}.productName in ['{M40}', \"{A100}\"]",
        f'{ATTRIBUTE}.profile == "1g.5gb"',
        f'{ATTRIBUTE}.?profile.orValue("") == "3g.20gb"',
        f'device.driver == "{NVIDIA}"',
        "true",
        '"x".matches("\\\\d")',
        "(",
        "|| true",
    ]
)
EXPRESSIONS = PINS | st.lists(CONDITIONS, min_size=1, max_size=3).map(" && ".join)
ENTRIES = st.builds(
    lambda name, expressions, fields: entry(name, *expressions, **fields),
    st.sampled_from([*CLASSES, "nobody-knows", "rdma.example.com"]),
    st.lists(EXPRESSIONS, max_size=4),
    st.fixed_dictionaries(
        {},
        optional={
            "count": st.sampled_from([0, 1, 2, 33, None]),
            "allocationMode": st.sampled_from(["", "ExactCount", "All"]),
            "adminAccess": st.sampled_from([True, False, None]),
            "capacity": st.sampled_from(
                [None, {"requests": {"cores": "30", "memory": 2**30}}, {"requests": {"x": "y"}}]
            ),
        },
    ),
)
REQUESTS = st.lists(ENTRIES | st.lists(ENTRIES, max_size=3).map(lambda each: first_of(*each)), max_size=4)
CONFIGS = st.lists(
    st.sampled_from([{"opaque": {"driver": HAMI}}, {"requests": ["r0", "r1/way-0"], "opaque": {"driver": HAMI}}, {}]),
    max_size=2,
)

_TOKEN = re.compile(r"""\s*(?:("[^"'\n]*"|'[^"'\n]*')|(\w+|&&|\|\||[=!<>]=|[-+*/%<>!?:.,()\[\]{}]))\s*""")
_DEMAND = re.compile(r'device\.attributes\["([^"]*)"\]\.(productName|profile)(?:==("[^"]*")| in \[((?:"[^"]*",?)+)\])')


def conditions(expression: str) -> Iterator[str]:
    """Yield the operands of `&&` in a CEL expression. The algorithm is simple and slow."""
    parts: list[list[str]] = [[]]
    depth, before, at = 0, "", 0
    while at < len(expression):
        found = _TOKEN.match(expression, at)
        if found is None or re.search(r"""\\|'''|\"\"\"|//""", expression):
            return
        part = f'"{found[1][1:-1]}"' if found[1] else {"in": " in "}.get(found[2], found[2])
        depth += (part in "([{") - (part in ")]}")
        if depth == 0 and (part == "||" or (part == "?" and before != ".")):
            return
        if depth == 0 and part == "&&":
            parts.append([])
        else:
            parts[-1].append(part)
        before, at = part, found.end()
    if depth == 0:
        yield from ("".join(part) for part in parts)


def demands(expressions: Iterable[str]) -> Mapping[tuple[str, str], frozenset[str]]:
    """Return the values that each device attribute may have if all these CEL expressions are true."""
    found: dict[tuple[str, str], frozenset[str]] = {}
    for match in (_DEMAND.fullmatch(each) for text in expressions for each in conditions(text)):
        if match:
            texts = frozenset(re.findall(r'"([^"]*)"', match[3] or match[4]))
            found[match[1], match[2]] = texts & found.get((match[1], match[2]), texts)
    return found


def entries_of(manifest: Manifest) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for index, request in enumerate(manifest["devices"]["requests"]):
        path = f"spec.devices.requests[{index}]"
        if "exactly" in request:
            yield f"{path}.exactly", request["exactly"]
        for number, each in enumerate(request.get("firstAvailable", ())):
            yield f"{path}.firstAvailable[{number}]", each


@settings(max_examples=300)
@given(REQUESTS, CONFIGS)
def test_the_digest_of_a_spec_has_the_meaning_of_its_text(requests: list[Manifest], config: list[Manifest]) -> None:
    asked = {"devices": {**spec(*requests)["devices"], "config": config}}
    kept = digests.digest_of(msgspec.convert(asked, ClaimSpec))
    found = read_claim(unpack(pack(kept)), POLICY)
    assert unpack(pack(kept)) == kept
    by_path = dict(entries_of(asked))
    for each in found.entries:
        own = by_path[each.path]
        texts = [each["cel"]["expression"] for each in own.get("selectors") or ()]
        pins = dict.fromkeys(pin for text in texts if (pin := read_claim_pin(text)) and pin.driver == each.found.driver)
        stated = demands(texts)
        profiles = stated.get((each.found.driver or "", "profile"), frozenset())
        assert [*each.pins] == [*pins]
        assert each.products == stated.get((each.found.driver or "", "productName"))
        assert each.profile == (next(iter(profiles)) if len(profiles) == 1 else each.found.profile)
        assert each.capacities.keys() <= ((own.get("capacity") or {}).get("requests") or {}).keys()
        assert each.has_selectors == bool(texts)
        assert each.count == (own.get("count") if own.get("count") in range(1, 33) else 1)
    paths = [fault.path for fault in found.faults]
    assert {path for path in paths if path.endswith("adminAccess")} == {
        f"{each.path}.adminAccess" for each in found.entries if by_path[each.path].get("adminAccess")
    }
    assert {path for path in paths if path.endswith("allocationMode")} == {
        f"{each.path}.allocationMode" for each in found.entries if by_path[each.path].get("allocationMode") == "All"
    }


# Tests of selectors that pin a claim to a model

MANY = tuple(f"NVIDIA A100 of make {number:03}" for number in range(200))
CARD = device(A100)
MADE = (
    {**CARD, "name": f"gpu-{at}", "attributes": {**CARD["attributes"], "productName": {"string": name}}}
    for at, name in enumerate(MANY)
)
LARGE = claim_policy([*SLICES, slice_of(NVIDIA, "new", *MADE, generation=2)], quota=QUOTA)
FOREIGN = st.builds(lambda text, size: (text * size)[:9000], st.text(min_size=1, max_size=20), st.integers(1, 9000))
FORGED = st.lists(st.sampled_from(MANY), min_size=1).map(lambda names: write_pin(ClaimPin(NVIDIA, (*names,))))


@settings(max_examples=60)
@given(
    st.lists(
        st.builds(
            lambda name, texts: entry(name, *texts),
            st.sampled_from([NVIDIA, MIG, "gpu-manager"]),
            st.lists(FOREIGN | FORGED | EXPRESSIONS, max_size=31),
        ),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from([POLICY, LARGE]),
)
def test_a_spec_that_was_pinned_is_always_read_as_pinned(requests: list[Manifest], policy: ClaimPolicy) -> None:
    asked = claim(*requests)
    found = read_claim(view(asked), policy)
    for model in ("M40", "A100"):
        if not found.faults and not found.excludes(model):
            patched = jsonpatch.apply_patch(asked, json.dumps(found.patch(model)))
            assert read_claim(view(patched), policy).model() == model


def test_a_claim_with_too_many_own_pins_is_rejected_with_the_bound() -> None:
    shortest = len(write_pin(ClaimPin(HAMI, ("",))))
    forged = (write_pin(ClaimPin(HAMI, (f"{number}" * (MAX_PIN_LENGTH - 10 - shortest),))) for number in range(3))
    answer = Server(QUOTA_OF_TEAM).mutate(claim(entry(NVIDIA, *forged)))
    assert (answer.outcome, answer.status) == ("not-allowed", HTTPStatus.FORBIDDEN)
    assert "the limit of 6144 characters" in answer.message


def test_no_pin_is_longer_than_the_parser_accepts() -> None:
    written = write_pin(ClaimPin(NVIDIA, tuple(map(fold, MANY)), tuple(f"{number}g.5gb" for number in range(200))))
    assert len(written) <= MAX_PIN_LENGTH
    pin = read_claim_pin(written)
    assert pin
    assert (pin.patterns[0], pin.profiles[0]) == (fold(MANY[0]), "0g.5gb")


# Tests of the bounds for a digest (the short form of a claim's spec)


def requests(number: int, **fields: Any) -> list[Manifest]:
    return [entry(NVIDIA, **fields) for _ in range(number)]


def pin_like(number: int) -> str:
    return f'"productName" in device.attributes["{number:03}{"x" * 400}'


@cases(
    "asked, bound",
    requests_beyond_the_api=(requests(33), "32 requests"),
    ways_beyond_the_api=([first_of(*requests(9))], "8 entries in one firstAvailable"),
    selectors_beyond_the_api=([entry(NVIDIA, *["true"] * 33)], "32 selectors in one entry"),
    more_entries=([first_of(*requests(8))] * 9, f"{MAX_CLAIM_ENTRIES} entries of `exactly`"),
    long_names=(requests(32, allocationMode="x" * 253), "must not have more than 8192 bytes"),
    many_capacities=([share(**{f"c{number}": "1" for number in range(2000)})], "must not have more than 8192 bytes"),
    many_pins=([entry(NVIDIA, *map(pin_like, range(20)))], "must not have more than 6144 characters"),
)
def test_a_claim_spec_that_is_too_large_is_rejected_with_the_bound(asked: list[Manifest], bound: str) -> None:
    for create, path in ((claim, "spec.devices"), (template, "spec.spec.devices")):
        manifest = create(*asked)
        answer = Server().validate(manifest)
        assert (answer.outcome, answer.status) == ("malformed", HTTPStatus.UNPROCESSABLE_ENTITY)
        assert [(fault.path, bound in fault.message) for fault in answer.faults] == [(path, True)]
        warning = Server(NamespaceQuota(QUOTA_OF_TEAM.limits, mode=Mode.WARN)).validate(manifest)
        assert (warning.allowed, bound in "".join(warning.warnings)) == (True, True)
    assert not Server().mutate(claim(*asked)).allowed


def test_a_stored_claim_that_is_too_large_is_charged_by_its_allocated_devices() -> None:
    results = [{"request": "r0", "driver": NVIDIA, "pool": node, "device": "gpu-0"} for node in ("new", "new", "old")]
    status = {"allocation": {"devices": {"results": results}}}
    stored = ClaimReader().read(json.dumps({**claim(*requests(33)), "status": status}).encode())
    taken = ClaimCounter(POLICY)(stored)
    assert taken.charges == {"A100": Charge(200, 0, 200), "M40": Charge(100, 0, 100)}
    assert (taken.certain, "32 requests" in taken.fault) == (False, True)


def test_a_megabyte_of_cel_is_read_within_bounds_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(digests, "read_device_facts", lambda texts: read.extend(texts) or read_device_facts(texts))  # type: ignore[func-returns-value]
    texts = (f'"secret{number:06}" != "{"x" * 1500}"' for number in itertools.count())
    asked = claim(*(entry(NVIDIA, *itertools.islice(texts, 30)) for _ in range(28)))
    assert len(json.dumps(asked)) > 1_270_000
    packed = pack(view(asked))
    assert sum(map(len, read)) <= MAX_EXPRESSIONS_LENGTH
    assert b"secret" not in bytes(packed)
    assert len(packed) < 2000


@given(st.lists(ENTRIES | st.builds(lambda name: entry(name * 30), st.sampled_from("abc")), max_size=40))
def test_no_digest_is_larger_than_its_bound(asked: list[Manifest]) -> None:
    assert len(pack(view(claim(*asked)))) <= MAX_PACKED


PROFILE = f'{ATTRIBUTE}.profile == "1g.5gb"'
PRODUCT = f'{ATTRIBUTE}.productName == "{M40}"'


@cases(
    "text, is_read",
    alone=("", True),
    among_others=("&& x" * 100, True),
    in_a_long_expression=("&& x" * 600, False),
)
def test_an_expression_that_is_too_long_is_ignored_and_only_raises_the_charge(text: str, *, is_read: bool) -> None:
    partition = read_claim(view(claim(entry(MIG, PROFILE + text))), POLICY)
    assert partition.charge("A100").cores == (Fraction(100, 7) if is_read else 50)
    card = read_claim(view(claim(entry(NVIDIA, PRODUCT + text))), POLICY)
    assert (card.excludes("A100") is None) is not is_read


def test_expressions_beyond_the_bound_of_a_claim_are_ignored() -> None:
    before = [f'"{number}" != "{"x" * 1000}"' for number in range(5)]
    assert read_claim(view(claim(entry(NVIDIA, *before, PRODUCT))), POLICY).excludes("A100") is None
    assert read_claim(view(claim(entry(NVIDIA, PRODUCT, *before))), POLICY).excludes("A100")
    assert read_claim(view(claim(*[entry(NVIDIA, *before[:3], PRODUCT)] * 8)), POLICY).excludes("A100"), (
        "equal expressions must count once"
    )


def test_claims_that_differ_only_in_ignored_text_have_equal_digests() -> None:
    first, second = (pack(view(claim(entry(NVIDIA, f'"{text}" != "x"')))) for text in ("one", "another"))
    assert first == second
