"""Tests of the EndpointSlice through which a Service routes to the leader of the controller."""

import threading

import pytest

from controller.advertiser import Advertiser
from controller.extender import service
from tests.api_double import ApiDouble, Effect, Script, before, lost_request
from tests.extended import SYSTEM
from vcuda.errors import VcudaError

SLICE = f"/apis/discovery.k8s.io/v1/namespaces/{SYSTEM}/endpointslices/{service.SERVICE}"
LABELS = {
    "kubernetes.io/service-name": service.SERVICE,
    "endpointslice.kubernetes.io/managed-by": "vcuda-quota",
    "app.kubernetes.io/managed-by": "vcuda-quota",
}


def advertiser(api: ApiDouble, ip: str) -> Advertiser:
    return Advertiser(api.kube, SYSTEM, service.SERVICE, (ip, 10443), "https")


def routed_to(api: ApiDouble) -> str:
    """Return the only address in the Service's only EndpointSlice. Assert that the slice is valid."""
    assert [path for path in api.objects if "/endpointslices/" in path] == [SLICE]
    found = api.objects[SLICE]
    assert found["metadata"]["labels"].items() >= LABELS.items()
    assert found["ports"] == [{"name": "https", "port": 10443}]
    [endpoint] = found["endpoints"]
    assert endpoint["conditions"] == {"ready": True}
    [address] = endpoint["addresses"]
    assert found["addressType"] == ("IPv6" if ":" in address else "IPv4")
    return str(address)


@pytest.mark.parametrize(
    ("earlier", "later", "calls"),
    [
        pytest.param("10.0.0.1", "10.0.0.2", ["GET", "PATCH"], id="IPv4"),
        pytest.param("fd00::1", "fd00::2", ["GET", "PATCH"], id="IPv6"),
        pytest.param("10.0.0.1", "fd00::2", ["GET", "DELETE", "POST"], id="another address family (immutable)"),
    ],
)
def test_the_service_routes_to_the_last_writer(api: ApiDouble, earlier: str, later: str, calls: list[str]) -> None:
    """The leader replaces the late write of a former leader. It does not write a correct slice again."""
    first, second = advertiser(api, earlier), advertiser(api, later)
    first.advertise()
    assert routed_to(api) == earlier
    for _ in range(2):
        for wanted in (calls, ["GET"]):
            api.forget_calls()
            second.advertise()
            assert (routed_to(api), api.calls) == (later, wanted)
        first.advertise()


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("text", ["another", None])
def test_a_slice_that_lost_a_label_gets_it_again(api: ApiDouble, label: str, text: str | None) -> None:
    advertiser(api, "10.0.0.1").advertise()
    api.store(SLICE, {**api.objects[SLICE], "metadata": {"labels": {**LABELS, label: text} if text else {}}})
    advertiser(api, "10.0.0.1").advertise()
    assert routed_to(api) == "10.0.0.1"


def test_a_slice_that_another_writer_deletes_first_is_created_again(api: ApiDouble) -> None:
    """The leader's address is now IPv4, so it must delete its IPv6 slice. Another writer has just deleted it."""
    advertiser(api, "fd00::1").advertise()
    api.deliver = before("DELETE", lambda: api.remove(SLICE))
    advertiser(api, "10.0.0.1").advertise()
    assert routed_to(api) == "10.0.0.1"


def test_a_slice_that_cannot_be_read_is_an_error(api: ApiDouble) -> None:
    api.deliver = Script(lost_request, methods=("GET",))
    with pytest.raises(VcudaError):
        advertiser(api, "10.0.0.1").advertise()


def test_the_loop_retries_a_failed_write_until_it_is_stopped(api: ApiDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.advertiser.CHECK_INTERVAL_SECONDS", 0)
    stopping = threading.Event()

    def answered(method: str, _timeout: float, effect: Effect) -> bytes:
        answer = effect()
        if method == "POST":
            stopping.set()
        return answer

    api.deliver = Script(lost_request, lost_request, answered)
    advertiser(api, "10.0.0.1").run(stopping)
    assert routed_to(api) == "10.0.0.1"
