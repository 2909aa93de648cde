"""Tests that the table of schemes (the resource names of each vendor) agrees with the code and policies that use it."""

import re
from collections.abc import Iterable, Set
from pathlib import Path

import pytest
import yaml

from tests.guarded import GUARDED_ANNOTATIONS
from vcuda.requests.bypasses import COMPUTE_POLICY, KAI
from vcuda.requests.resources import BUILT_IN, GpuResources
from vcuda.requests.runtime_devices import DEVICE_ANNOTATIONS
from vcuda.requests.schemes import SCHEMES, Scheme, is_listed_key

POLICIES = Path(__file__).parents[2] / "manifests" / "base" / "policies.yaml"

EACH = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)


@EACH
def test_another_resource_of_a_vendors_domain_is_rejected(scheme: Scheme) -> None:
    """The pattern of a scheme (a vendor's resource names) must also match resources that the scheme does not list."""
    without = GpuResources(schemes=())
    assert all(without.is_unknown_gpu(name) or without.unit_of(name) is not None for name in scheme.resources)
    domain, _, part = scheme.vendor_domain.partition("/")
    assert BUILT_IN.is_unknown_gpu(f"{domain}/{part.removesuffix('*')}missing")


@EACH
def test_the_extender_can_write_the_allocation_of_a_scheme_with_cards_by_number(scheme: Scheme) -> None:
    if scheme.card_index:
        assert scheme.predicate_node
        assert scheme.predicate_times
        assert scheme.phase
        assert scheme.phase.placed


@EACH
def test_a_scheme_with_wanted_models_has_unwanted_ones(scheme: Scheme) -> None:
    assert bool(scheme.wanted_models) is bool(scheme.unwanted_models)


@EACH
def test_a_users_annotation_is_never_an_allocation_record(scheme: Scheme) -> None:
    """/mutate removes the allocation records of schedulers from every pod, but must keep annotations of the user."""
    written = {*scheme.resources, *filter(None, (scheme.core_limit, scheme.wanted_models, scheme.unwanted_models))}
    for other in SCHEMES:
        for key in written:
            assert not is_listed_key(key, other.allocation_annotations)
            assert not is_listed_key(key, other.allocation_labels)


@EACH
def test_only_annotations_and_labels_that_tenants_cannot_change_name_the_node(scheme: Scheme) -> None:
    read = {
        scheme.predicate_node,
        *scheme.predicate_times,
        scheme.allocated,
        scheme.phase.key if scheme.phase else None,
    }
    assert read - {None} <= {*scheme.allocation_annotations, *scheme.allocation_labels}


KEYS = {"a/exact", "a/idx-", "a/idx-0", "a/idx-12"}


@pytest.mark.parametrize("key", [*sorted(KEYS), "a/exact-", "a/exac", "a/exact0", "A/EXACT", "a/idx", "b/a/idx-0", ""])
def test_a_key_of_a_scheme_is_complete_or_a_prefix(key: str) -> None:
    assert is_listed_key(key, ("a/exact", "a/idx-")) is (key in KEYS)
    assert not is_listed_key(key, ())


def test_the_policy_guards_exactly_the_annotations_and_labels_of_the_schemes() -> None:
    """If this fails, policies.yaml lacks keys of a new scheme, or has keys that no scheme uses."""
    documents = yaml.safe_load_all(POLICIES.read_text())
    [policy] = [
        each["spec"]
        for each in documents
        if (each["kind"], each["metadata"]["name"]) == ("ValidatingAdmissionPolicy", "allocations.quota.vcuda.io")
    ]
    variables = {each["name"]: each["expression"] for each in policy["variables"]}
    [listed] = re.findall(r"^\[(.*?)\]", variables["annotationChanged"])
    guarded = re.findall('"(.*?)"', listed)
    for found in (variables["foundAdded"], variables["foundRemoved"]):
        [prefixes, endings] = [re.findall(rf'key\.{method}\("(.*?)"\)', found) for method in ("startsWith", "endsWith")]
        assert _missing_and_left_over([*guarded, *prefixes], GUARDED_ANNOTATIONS) == (set(), set())
        assert endings == [COMPUTE_POLICY]
        [pattern] = re.findall(r'key\.matches\("(.*?)"\)', found)
        assert all(re.match(pattern, key) and re.match(pattern, key.title()) for key in KAI)
    devices = re.findall(r'key\.startsWith\("(.*?)"\)', variables["devicesAdded"])
    assert _missing_and_left_over(devices, {*DEVICE_ANNOTATIONS}) == (set(), set())
    [labels] = re.findall(r"^\[(.*?)\]", variables["labelChanged"])
    written = {name for scheme in SCHEMES for name in scheme.allocation_labels}
    assert _missing_and_left_over(re.findall('"(.*?)"', labels), written) == (set(), set())


def _missing_and_left_over(listed: Iterable[str], written: Set[str]) -> tuple[set[str], set[str]]:
    """Return two sets: the keys that the list in policies.yaml lacks, and the keys that it must not have."""
    return {*written} - {*listed}, {*listed} - {*written}
