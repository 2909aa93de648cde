"""Tests of how `vcuda-certs` and the controller read serving certificates by TLS, even from an unknown issuer."""

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from certs.cluster import dial_all
from controller.certificates import INTERVAL, REASON, CertificateWatch, ServedCertificate, is_late
from tests.api_double import ApiDouble, Delivery, Effect, delivered, lost_request
from tests.integration.pairs import NOW, new_leaf
from tests.integration.tls_echo import Echo, echoing
from tools.ports import free_ports
from vcuda.tls import served_leaves
from vcuda.x509 import Signed

LEAF = new_leaf()
CORE = "/api/v1/namespaces/vcuda-quota"
SLICES = "/apis/discovery.k8s.io/v1/namespaces/vcuda-quota/endpointslices"
DAY = timedelta(days=1)


@contextmanager
def serving(directory: Path, certificate: bytes = LEAF.certificate_pem()) -> Iterator[Echo]:
    (directory / "tls.crt").write_bytes(certificate)
    (directory / "tls.key").write_bytes(LEAF.key_pem())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "tls.crt", directory / "tls.key")
    with echoing(lambda: context) as server:
        yield server


def test_the_leaf_of_any_issuer_is_read(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        [found] = dial_all({server.address: True}, "anything.at.all")
    assert (found.leaf, found.ready, found.fault) == (LEAF.certificate, True, "")


@pytest.mark.parametrize(
    "address", ["127.0.0.1:{port}", "256.256.256.256:1", "127.0.0.1:99999", "nonsense", "[::1]:{port}"]
)
def test_the_error_of_an_unreachable_endpoint_is_reported(address: str) -> None:
    [found] = dial_all({address.format(port=free_ports(1)[0]): False}, "x")
    assert (found.leaf, found.ready) == (None, False)
    assert found.fault.startswith("the endpoint cannot be dialled: ")


def test_a_server_without_tls_or_an_answer_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The certificate of the other endpoint is still read."""
    monkeypatch.setattr("vcuda.tls.DIAL_TIMEOUT_SECONDS", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as listener, serving(tmp_path) as server:
        silent = f"127.0.0.1:{listener.getsockname()[1]}"
        found = dial_all({silent: True, server.address: True}, "x")
    assert [(one.address, one.leaf) for one in found] == [(silent, None), (server.address, LEAF.certificate)]


def of_version_6(leaf: Signed) -> bytes:
    """Return a PEM certificate whose X.509 version number does not exist. OpenSSL nevertheless serves it."""
    content = leaf.certificate.public_bytes(Encoding.DER)
    version_3, version_6 = bytes.fromhex("a003020102"), bytes.fromhex("a003020105")
    assert content.count(version_3) == 1
    return ssl.DER_cert_to_PEM_cert(content.replace(version_3, version_6)).encode()


def test_an_unreadable_certificate_is_handled_as_an_unreachable_endpoint(tmp_path: Path) -> None:
    """An unreadable certificate must not stop `vcuda-certs` or the leader of the controllers."""
    with serving(tmp_path, of_version_6(LEAF)) as server:
        [(leaf, fault)] = served_leaves([server.address], "x")
    assert leaf is None
    assert "not a valid X509 version" in fault


def watched(api: ApiDouble, *addresses: str) -> CertificateWatch:
    for number, address in enumerate(addresses):
        store_slice(api, f"vcuda-webhook-{number}", "vcuda-webhook", address)
    store_slice(api, "another", "vcuda-extender", "192.0.2.1:1")
    api.store(f"{CORE}/services/vcuda-webhook", {"metadata": {"uid": "u1"}})
    return CertificateWatch(api.kube, "vcuda-quota", "vcuda-webhook")


def store_slice(api: ApiDouble, name: str, service: str, address: str) -> None:
    """Store an EndpointSlice with this address, and with an unready address, which must not be read."""
    host, _, port = address.rpartition(":")
    found = {
        "metadata": {"labels": {"kubernetes.io/service-name": service}},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [host]}, {"addresses": ["192.0.2.2"], "conditions": {"ready": False}}],
        "ports": [{"name": "https", "port": int(port)}, {"name": "metrics", "port": 1}],
    }
    api.store(f"{SLICES}/{name}", found)


def events(api: ApiDouble) -> list[dict[str, object]]:
    return [found for path, found in api.objects.items() if "/events/" in path]


def test_the_controller_exports_when_each_endpoints_certificate_ends(tmp_path: Path) -> None:
    api, registry = ApiDouble(), CollectorRegistry()
    with serving(tmp_path) as server:
        watch = watched(api, server.address, f"127.0.0.1:{free_ports(1)[0]}")
        registry.register(watch)
        watch.check(NOW)
    name, labels = "vcuda_webhook_certificate_expiry_seconds", {"endpoint": server.address}
    assert registry.get_sample_value(name, labels) == LEAF.expires.timestamp()
    assert [bool(one.fault) for one in watch.shown() or ()] == [False, True]
    assert events(api) == []


def test_the_controller_shows_new_endpoints_at_once_and_forgets_those_that_are_gone(tmp_path: Path) -> None:
    """The endpoints are listed every few seconds. The certificate of a known endpoint is read every few minutes."""
    api = ApiDouble()
    with serving(tmp_path) as first, serving(tmp_path) as second:
        watch = watched(api, first.address)
        watch.check(NOW)
        store_slice(api, "vcuda-webhook-0", "vcuda-webhook", second.address)
        watch.check(NOW + timedelta(seconds=5))
        assert [one.address for one in watch.shown() or ()] == [second.address]
    watch.check(NOW + timedelta(minutes=5))
    assert [bool(one.fault) for one in watch.shown() or ()] == [False], "it was not read again"
    watch.check(NOW + timedelta(seconds=5) + INTERVAL)
    assert [bool(one.fault) for one in watch.shown() or ()] == [True]


@pytest.mark.parametrize(
    ("days", "told"),
    [(91, "was not renewed and expired at"), (62, "was not renewed and expires at")],
    ids=["expired", "the last third has begun, and a daily rotation has run since"],
)
def test_a_leaf_that_was_not_renewed_is_reported_once_a_day_on_the_service(
    tmp_path: Path, days: int, told: str
) -> None:
    api = ApiDouble()
    with serving(tmp_path) as server:
        watch = watched(api, server.address, server.address)
        for _ in range(2):
            watch.check(NOW + days * DAY)
        [event] = events(api)
        watch.check(NOW + (days + 1) * DAY)
    assert len(events(api)) == 2
    assert event["reason"] == REASON
    service = {"apiVersion": "v1", "kind": "Service", "name": "vcuda-webhook", "namespace": "vcuda-quota"}
    assert event["involvedObject"] == {**service, "uid": "u1"}
    assert told in str(event["message"])
    assert "create job --from=cronjob/vcuda-certs" in str(event["message"])


def test_the_watch_continues_after_a_failed_check_and_logs_each_fault_once(monkeypatch: pytest.MonkeyPatch) -> None:
    api, stop = ApiDouble(), threading.Event()
    monkeypatch.setattr("controller.certificates.LOOK_SECONDS", 0.0)
    watch = CertificateWatch(api.kube, "vcuda-quota", "vcuda-webhook")
    looks: list[Delivery] = [*[lost_request] * 2, *[lambda *_: b'[{"endpoints": 3}]'] * 2, *[delivered] * 2]

    def counted(method: str, timeout: float, effect: Effect) -> bytes:
        look = looks.pop(0)
        if not looks:
            stop.set()
        return look(method, timeout, effect)

    api.deliver = counted
    with capture_logs() as lines:
        watch.run(stop)
    assert [line["reason"] for line in lines] == [
        "timed out",
        "an object without a name cannot be decoded; it may have to be deleted",
        "no endpoint of the Service is ready",
    ]
    assert (looks, watch.shown()) == ([], ())


@pytest.mark.parametrize(
    ("days", "late"),
    [
        pytest.param(31, False, id="not in its last third"),
        pytest.param(29, False, id="the last third has begun, and no daily rotation has run since"),
        pytest.param(28, True, id="the last third began more than a day ago"),
        pytest.param(-1, True, id="expired"),
    ],
)
def test_a_leaf_is_overdue_when_a_daily_rotation_should_have_renewed_it(days: int, late: bool) -> None:
    assert is_late(ServedCertificate("x", "f", NOW + (days - 90) * DAY, NOW + days * DAY), NOW) is late
    assert not is_late(ServedCertificate("x", fault="refused"), NOW), "an endpoint without a certificate is not late"
