"""Tests of reading the endpoints of a Service from its EndpointSlices."""

import json

import msgspec
import pytest

from vcuda.kube.endpoints import EndpointSlice, read_addresses

Json = dict[str, object]
HTTPS: Json = {"name": "https", "port": 8443}
METRICS: Json = {"name": "metrics", "port": 9090}


def endpoint(*addresses: str, **conditions: bool | None) -> Json:
    return {"addresses": list(addresses), "conditions": conditions}


def piece(*endpoints: Json, ports: object = (HTTPS,), address_type: str = "IPv4") -> Json:
    return {"addressType": address_type, "endpoints": list(endpoints), "ports": ports}


ONE, TWO = endpoint("10.0.0.1", ready=True), endpoint("10.0.0.2", ready=True)
LEAVING = endpoint("10.0.0.1", ready=False, serving=True, terminating=True)
AT_ONE = [("10.0.0.1:8443", True)]

CASES: dict[str, tuple[list[Json], list[tuple[str, bool]]]] = {
    "no slice": ([], []),
    "no endpoint yet": ([{**piece(), "endpoints": None}], []),
    "several slices": ([piece(ONE), piece(TWO)], [*AT_ONE, ("10.0.0.2:8443", True)]),
    "both families": (
        [piece(ONE), piece(endpoint("fd00::1", ready=True), address_type="IPv6")],
        [*AT_ONE, ("[fd00::1]:8443", True)],
    ),
    "a name, which is not dialled": ([piece(endpoint("a.example.com"), address_type="FQDN")], []),
    "ready is null": ([piece(endpoint("10.0.0.1", ready=None))], AT_ONE),
    "ready is absent": ([piece(endpoint("10.0.0.1"))], AT_ONE),
    "no conditions": ([piece({"addresses": ["10.0.0.1"], "conditions": None})], AT_ONE),
    "not ready": ([piece(endpoint("10.0.0.1", ready=False))], [("10.0.0.1:8443", False)]),
    "terminating": ([piece(LEAVING)], [("10.0.0.1:8443", False)]),
    "terminating, but published as ready": (
        [piece(endpoint("10.0.0.1", ready=True, serving=True, terminating=True))],
        AT_ONE,
    ),
    "in two slices": ([piece(ONE), piece(ONE)], AT_ONE),
    "in two slices, ready in the second": ([piece(endpoint("10.0.0.1", ready=False)), piece(ONE)], AT_ONE),
    "in two slices, ready in the first": ([piece(ONE), piece(endpoint("10.0.0.1", ready=False))], AT_ONE),
    "further addresses": ([piece(endpoint("10.0.0.1", "10.0.0.9"))], AT_ONE),
    "no address": ([piece(endpoint())], []),
    "no ports": ([piece(ONE, ports=None)], []),
    "one port without a name": ([piece(ONE, ports=[{"name": None, "port": 8443}])], AT_ONE),
    "a single port with another name": ([piece(ONE, ports=[{"name": "webhook", "port": 8443}])], AT_ONE),
    "several ports, one with the name": ([piece(ONE, ports=[METRICS, HTTPS])], AT_ONE),
    "several ports, none with the name": ([piece(ONE, ports=[METRICS, {"port": 1}])], []),
    "a port without a number": ([piece(ONE, ports=[{"name": "https", "port": None}])], []),
    "a different port in each slice": (
        [piece(ONE), piece(ONE, ports=[{"name": "https", "port": 8444}])],
        [*AT_ONE, ("10.0.0.1:8444", True)],
    ),
}


@pytest.mark.parametrize(("slices", "expected"), CASES.values(), ids=CASES.keys())
def test_the_endpoints_of_all_slices_are_those_that_the_api_server_may_call(
    slices: list[Json], expected: list[tuple[str, bool]]
) -> None:
    views = msgspec.json.decode(json.dumps(slices), type=list[EndpointSlice])
    assert list(read_addresses(views, "https").items()) == expected
