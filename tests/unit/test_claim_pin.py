"""Tests of the CEL selector that restricts a claim to one GPU model.

/mutate writes the selector. /validate parses it, and checks that it still matches only that model.
"""

import re
import string
from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from examples.claims import A100, HAMI, M40, NVIDIA, claim, claim_policy, entry, first_of, share, view
from tests.builders import Manifest, nodes
from tests.tables import cases
from vcuda.claims.cel import Facts, read_device_facts
from vcuda.claims.charges import ClaimPolicy, ClaimRequest
from vcuda.claims.pin import ClaimPin, read_claim_pin, write_pin
from vcuda.claims.request import read_claim
from vcuda.quota.model import Limit, NamespaceQuota, Quota
from vcuda.requests.folding import fold

QUOTA = Quota({"team-a": NamespaceQuota({"M40": Limit(800), "A100": Limit(800)})})
ROWS = {"A100": ("NVIDIA-A100-*",)}
POLICY = claim_policy(quota=QUOTA, rows=ROWS)

HOSTILE = st.text(st.sampled_from("""ab-Z "'\\()[]{}^$|.*?+/,:é\u212a"""), max_size=12)
NAMES = st.text(string.ascii_letters + string.digits + " -_.", min_size=1, max_size=20)
PINS = st.builds(
    ClaimPin,
    st.sampled_from([NVIDIA, HAMI]) | HOSTILE,
    st.lists((HOSTILE | NAMES).map(fold), min_size=1, max_size=4).map(tuple),
    st.lists(HOSTILE | st.just("1g.5gb"), max_size=3).map(tuple),
)


def held(*requests: Manifest, policy: ClaimPolicy = POLICY) -> ClaimRequest:
    return read_claim(view(claim(*requests)), policy)


def pinned(*patterns: str, driver: str = NVIDIA) -> str:
    return write_pin(ClaimPin(driver, patterns))


@given(PINS)
def test_a_pin_is_parsed_as_it_was_written(pin: ClaimPin) -> None:
    assert read_claim_pin(write_pin(pin)) == pin


@given(PINS, st.integers(0, 400), HOSTILE.filter(bool))
def test_a_changed_pin_is_never_parsed_as_the_original(pin: ClaimPin, at: int, put: str) -> None:
    written = write_pin(pin)
    changed = written[: at % len(written)] + put + written[at % len(written) :]
    assert read_claim_pin(changed) != pin


def test_a_product_with_quotes_and_backslashes_stays_one_literal() -> None:
    pin = ClaimPin(NVIDIA, (fold('a"] || true || ["\\'), "b(1).c"), ('1g"',))
    literal = re.compile(r'"(?:[^"\\]|\\.)*"')
    attributes = "device.attributes[_]"
    assert literal.sub("_", write_pin(pin)) == (
        f"_ in {attributes} && {attributes}.productName.matches(_) && {attributes}.?profile.orValue(_) in [_]"
    )
    assert read_claim_pin(write_pin(pin)) == pin


def test_a_pin_has_the_model_its_patterns_and_the_known_products() -> None:
    [operation] = held(entry()).patch("M40")
    assert operation == {
        "op": "add",
        "path": "/spec/devices/requests/0/exactly/selectors",
        "value": [
            {
                "cel": {
                    "expression": f'"productName" in device.attributes["{NVIDIA}"]'
                    f' && device.attributes["{NVIDIA}"].productName.matches('
                    '"(?i)^(?:nvidia[ -])*(?:m40|tesla[ -]m40[ -]24gb)$")'
                }
            }
        ],
    }
    [operation] = held(entry()).patch("A100")
    assert "(?:nvidia[ -])*(?:a100|a100[ -].*)" in operation["value"][0]["cel"]["expression"]


def test_every_alternative_of_every_gpu_request_is_pinned() -> None:
    asked = held(
        first_of(entry(NVIDIA, "true"), share(cores="5")), entry("compute-domain-default-channel.nvidia.com"), entry()
    )
    paths = [operation["path"] for operation in asked.patch("M40")]
    assert paths == [
        "/spec/devices/requests/0/firstAvailable/0/selectors/-",
        "/spec/devices/requests/0/firstAvailable/1/selectors",
        "/spec/devices/requests/2/exactly/selectors",
    ]


def test_a_pin_of_undecided_partitions_names_the_profiles_that_are_charged() -> None:
    asked = held(entry("mig.nvidia.com"))
    [operation] = asked.patch("A100")
    written = operation["value"][0]["cel"]["expression"]
    assert written.endswith('.?profile.orValue("") in ["1g.5gb", "3g.20gb"]')
    narrowed = write_pin(ClaimPin(NVIDIA, ("a100",), ("1g.5gb",)))
    assert held(entry("mig.nvidia.com", narrowed)).charge("A100").cores == Fraction(100, 7)
    # Without a list of MIG profiles, a partition of any profile fits the claim, even of a profile that does not exist
    # yet. So the claim is charged a whole card.
    assert held(entry("mig.nvidia.com", pinned("a100"))).charge("A100").cores == 100


@cases(
    "requests, model",
    by_the_models_own_name=([entry(NVIDIA, pinned("m40"))], "M40"),
    in_addition_to_other_selectors=([entry(NVIDIA, "true", pinned("m40", fold(M40)))], "M40"),
    by_a_pattern_of_the_table=([entry(NVIDIA, pinned("a100-*", fold(A100)))], "A100"),
    every_alternative=([first_of(entry(NVIDIA, pinned("m40")), entry(NVIDIA, pinned("m40")))], "M40"),
    no_selector=([entry()], None),
    one_of_two_requests=([entry(NVIDIA, pinned("m40")), entry()], None),
    one_of_two_alternatives=([first_of(entry(NVIDIA, pinned("m40")), entry())], None),
    two_models=([entry(NVIDIA, pinned("m40")), entry(NVIDIA, pinned("a100"))], None),
    products_of_two_models_in_one_selector=([entry(NVIDIA, pinned("m40", "a100-*"))], None),
    a_pattern_that_is_in_no_table=([entry(NVIDIA, pinned("m40", "m*"))], None),
    an_unknown_product=([entry(NVIDIA, pinned("m40", "h100"))], None),
    an_attribute_of_another_driver=([entry(NVIDIA, pinned("m40", driver=HAMI))], None),
    the_pin_or_something_else=([entry(NVIDIA, f"{pinned('m40')} || true")], None),
    another_form=([entry(NVIDIA, pinned("m40").replace("^", ""))], None),
)
def test_the_model_of_a_claim_follows_from_its_selectors(requests: list[Manifest], model: str | None) -> None:
    assert held(*requests).model() == model


def test_a_stored_claim_keeps_its_model_when_its_nodes_are_removed() -> None:
    selector = held(entry()).patch("M40")[0]["value"][0]["cel"]["expression"]
    away = claim_policy((), quota=QUOTA, nodes=nodes())
    stored = held(entry(NVIDIA, selector), policy=away)
    assert stored.model(lenient=True) == "M40"
    assert held(entry(NVIDIA, pinned("m40", "a100-*"))).model(lenient=True) is None


@pytest.mark.parametrize(
    ("rows", "product"),
    [({"A100": ("*A100*",), "A100-40": (A100,)}, "a100-40"), ({"A100": ("M*",)}, "m40"), (ROWS, None)],
)
def test_patterns_that_match_products_of_another_model_are_reported(
    rows: dict[str, tuple[str, ...]], product: str | None
) -> None:
    assert claim_policy(quota=QUOTA, rows=rows).products.of_model("A100").foreign == product


DRIVER = f'device.driver == "{NVIDIA}"'
TYPE = f"device.attributes['{NVIDIA}'].type"


@pytest.mark.parametrize(
    ("expression", "facts"),
    [
        pytest.param(DRIVER, Facts(NVIDIA), id="a driver"),
        pytest.param(
            f"{DRIVER} &&\n {TYPE}\t== 'gpu'", Facts(NVIDIA, {(NVIDIA, "type"): frozenset({"gpu"})}), id="both"
        ),
        pytest.param(f"{TYPE} in ['a', \"b\"]", Facts(None, {(NVIDIA, "type"): frozenset("ab")}), id="a list"),
        pytest.param(f"device.x.exists(d, d == 1 || true) && {DRIVER}", Facts(NVIDIA), id="within parentheses"),
        pytest.param(f"device.attributes['d'].?x.orValue('') == 'y' && {DRIVER}", Facts(NVIDIA), id="a safe access"),
        *(
            pytest.param(text, Facts(), id=text)
            for text in (
                f"{DRIVER} || true",
                f"true ? {DRIVER} : true",
                f"!({DRIVER})",
                f"!{DRIVER}",
                f'r{DRIVER}"" + ""',
                f'device.driver == r"{NVIDIA}"',
                f'device.driver == "{NVIDIA}" + "x"',
                f'"""a" && {DRIVER} && "b"""',
                f"true // && {DRIVER}",
                f'"\\" && {DRIVER} && "',
                f"({DRIVER}",
                "",
                "§",
            )
        ),
    ],
)
def test_only_conditions_that_certainly_hold_are_read_from_cel(expression: str, facts: Facts) -> None:
    assert read_device_facts([expression]) == facts


@given(st.text(st.sampled_from("""device.rv&|?!()[]"'=\\/ \n""" + NVIDIA), max_size=60))
def test_any_expression_can_be_read(expression: str) -> None:
    assert read_claim_pin(expression) is None
    read_device_facts([expression])
