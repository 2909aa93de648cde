"""Tests that programs can read the texts of rejections and forecasts."""

import math
import re

from hypothesis import given, strategies as st

from tests.tables import cases
from vcuda.placement.choice import Choice, Option, Rule, choose
from vcuda.quota import rejections
from vcuda.quota.model import Charge, Limit, NamespaceQuota, Usage, fits
from vcuda.quota.shortage import MissingQuota, Shortage, exceeded, read_shortages

MODELS = st.from_regex(re.compile(r"[A-Za-z0-9](?:[-._A-Za-z0-9]{0,61}[A-Za-z0-9])?", re.ASCII), fullmatch=True)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=40)
CHARGES = st.builds(Charge, st.integers(0, 2000), st.integers(0, 2**20))
LIMITS = st.builds(Limit, st.integers(0, 1000), st.none() | st.integers(0, 2**20)) | st.builds(
    Limit, st.none(), st.integers(0, 2**20)
)


USAGES = st.builds(Usage, CHARGES, CHARGES)
OF_TOTAL = st.builds(Shortage, st.just("total"), CHARGES, USAGES, st.builds(Limit, st.integers(0, 1000)), st.just(True))
SHORTAGES = (st.builds(Shortage, MODELS, CHARGES, USAGES, LIMITS) | OF_TOTAL).filter(
    lambda each: not fits(each.limit, each.usage.used, each.asked)
)


@cases(
    "text, shortage, retried, known",
    over_quota=(rejections.over_quota("M40"), True, True, True),
    never=(rejections.never_fits("M40"), True, True, True),
    unpatched=(rejections.unpatched(["a", "b"]), False, True, False),
    mutate_failed=(rejections.unpatched(["a"], "HTTP 503"), False, True, False),
    no_model=(rejections.no_model_usable("this pod", ": no node"), False, False, False),
    malformed=(rejections.malformed_request("spec: 150"), False, False, True),
    another=("no", False, False, False),
    of_resource_quota=("exceeded quota: compute, requested: cpu=1, used: cpu=2", False, False, False),
    of_resource_quota_about_cards=("exceeded quota: q, requested: nvidia.com/gpu=1, used: …", False, False, False),
)
def test_the_cause_of_a_rejection_is_read_from_its_text(text: str, shortage: bool, retried: bool, known: bool) -> None:
    """``known``: whether the text is recognized as this system's rejection even without the name of the webhook."""
    for message in (text, f'pods "a" is forbidden: {text}; more\nlines'):
        assert rejections.reports_shortage(message) is shortage
        assert rejections.may_pass_later(message) is retried
        assert rejections.lacks_model(message) is (text == rejections.no_model_usable("this pod", ": no node"))
        assert rejections.find_rejection(message) == (message[message.index(text) :] if known else None)
    denied = f'admission webhook "validate.quota.vcuda.io" denied the request: {text}'
    assert rejections.find_rejection(denied) == text


@given(st.lists(SHORTAGES, min_size=1, max_size=3, unique_by=lambda each: each.model), TEXTS)
def test_the_missing_quota_is_read_from_the_text_of_a_rejection(shortages: list[Shortage], after: str) -> None:
    found = list(read_shortages(f"{exceeded('team-a', *shortages)}; {after}"))
    for each, read in zip(shortages, found, strict=True):
        used = each.usage.used + each.asked
        cards = (math.ceil(used.cores) - (each.limit.cores or 0)) / 100
        memory = used.memory_under(each.limit) - (each.limit.memory or 0)
        needed = None if each.can_never_fit else cards if each.in_cores else memory
        assert read == MissingQuota(each.model, needed, not each.in_cores)


def test_a_rejection_with_a_long_text_of_the_pod_is_read_in_linear_time() -> None:
    """A search that began again at each of these phrases would take minutes here."""
    assert [*read_shortages("M40 in namespace team-a, requested: " * 20_000 + "1" * 200_000)] == []


@given(MODELS, TEXTS)
def test_the_model_is_read_from_a_forecast(model: str, reason: str) -> None:
    assert (
        rejections.read_forecast(rejections.would_be_pinned(model))
        == rejections.read_forecast(Choice(model, reason).forecast)
        == model
    )
    assert rejections.read_forecast(f"pinned to {model}: {reason}") == ""


@given(MODELS, st.booleans())
def test_a_model_that_was_passed_over_for_lack_of_a_node_is_read_from_the_reason(model: str, has_room: bool) -> None:
    room, quota = (
        NamespaceQuota({model: Limit(100 if has_room else 0)}),
        NamespaceQuota(dict.fromkeys("xy", Limit(100))),
    )
    options = [Option(model, Charge(100), room, Usage(), ready=False)]
    options += [Option(each, Charge(100), quota, Usage()) for each in "xy"]
    choice = choose(options, Rule.DOCUMENT)
    assert isinstance(choice, Choice)
    assert (choice.model, rejections.NO_QUOTA in choice.reason) == ("x", not has_room)
    assert rejections.lacks_node(model, choice.reason) is has_room
