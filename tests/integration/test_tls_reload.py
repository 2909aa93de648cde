"""Tests of the certificate that a TLS server of vcuda quota presents while its files change."""

import os
import ssl
from base64 import b64encode
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa, x25519
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption, PrivateFormat
from hypothesis import given, settings, strategies as st
from structlog.testing import capture_logs
from structlog.typing import EventDict

from tests.integration.pairs import AUTHORITY, NOW, der, new_leaf, trusting, write_as_kubelet, write_plainly
from tests.integration.tls_echo import Echo, echo, echoing
from vcuda.errors import BadInput
from vcuda.tls import ServingCertificate, serving_files, watch, write_files
from vcuda.x509 import Signed


def write_as_issue(directory: Path, leaf: Signed) -> None:
    write_files(directory, serving_files(AUTHORITY, leaf))


def served_by(server: Echo) -> bytes | None:
    with server.connect(trusting()) as connection:
        assert echo(connection, b"ping") == b"ping"
        return connection.getpeercert(binary_form=True)


def logged(serving: ServingCertificate, polls: int = 3) -> list[EventDict]:
    with capture_logs() as lines:
        for _ in range(polls):
            serving.poll()
    return list(lines)


def pem_of(key: PrivateKeyTypes, password: bytes | None = None) -> bytes:
    how = BestAvailableEncryption(password) if password else NoEncryption()
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, how)


def weak_pair() -> tuple[bytes, bytes]:
    """Return a certificate with a matching RSA key of 1024 bits. OpenSSL rejects such short keys by default."""
    key = rsa.generate_private_key(65537, 1024)  # noqa: S505  # the test needs a weak key
    nobody, end = x509.Name([]), NOW + timedelta(days=1)
    weak = x509.CertificateBuilder(nobody, nobody, key.public_key(), 1, NOW, end).sign(key, hashes.SHA256())
    return weak.public_bytes(Encoding.PEM), pem_of(key)


def test_only_tls_1_2_and_1_3_are_supported(directory: Path) -> None:
    write_plainly(directory, new_leaf())
    serving = ServingCertificate(directory)
    assert serving.current().minimum_version == ssl.TLSVersion.TLSv1_2
    client = trusting()
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        client.minimum_version = client.maximum_version = version
        with echoing(serving.current) as server, server.connect(client) as connection:
            assert echo(connection, b"ping") == b"ping"


def test_http_1_1_is_agreed_with_a_client_that_prefers_http_2(directory: Path) -> None:
    """With HTTP/2, all calls of the API server would share one connection, where they would wait for each other."""
    write_plainly(directory, new_leaf())
    client = trusting()
    client.set_alpn_protocols(["h2", "http/1.1"])
    with echoing(ServingCertificate(directory).current) as server, server.connect(client) as connection:
        assert connection.selected_alpn_protocol() == "http/1.1"


def test_connections_share_one_context_until_the_files_change(directory: Path) -> None:
    write_plainly(directory, new_leaf())
    serving = ServingCertificate(directory)
    first = serving.current()
    os.utime(directory / "tls.crt")
    assert logged(serving) == []
    assert serving.current() is first


@pytest.mark.parametrize("write", [write_as_kubelet, write_as_issue, write_plainly])
def test_new_files_serve_new_connections_and_open_ones_continue(
    directory: Path, write: Callable[[Path, Signed], None]
) -> None:
    old, new = new_leaf(days=1), new_leaf()
    write(directory, old)
    serving = ServingCertificate(directory)
    assert serving.expiry == old.expires.timestamp()
    with echoing(serving.current) as server, server.connect(trusting()) as kept:
        write(directory, new)
        assert served_by(server) == der(old)  # new connections get the old certificate until the next poll
        assert [line["log_level"] for line in logged(serving)] == ["info"]
        assert served_by(server) == der(new)
        assert echo(kept, b"still here") == b"still here"
        assert kept.getpeercert(binary_form=True) == der(old)
    assert (serving.expiry, serving.reload_failures) == (new.expires.timestamp(), 0)


GOOD = new_leaf()
CRT, KEY, GARBAGE = GOOD.certificate_pem(), GOOD.key_pem(), bytes(range(256))
TORN = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
NO_CRT, NO_KEY = "tls.crt contains no PEM certificate", "tls.key contains no PEM private key"
OTHER_KEY = "tls.key is not the private key of tls.crt"
BAD_PAIRS = {
    "certificate is missing": (None, KEY, "tls.crt cannot be read: No such file"),
    "key is missing": (CRT, None, "tls.key cannot be read: No such file"),
    "certificate is empty": (b"", KEY, NO_CRT),
    "key is empty": (CRT, b"", NO_KEY),
    "certificate is half written": (CRT[:300], KEY, NO_CRT),
    "key is half written": (CRT, KEY[:100], NO_KEY),
    "certificate is garbage": (GARBAGE, KEY, NO_CRT),
    "key is garbage": (CRT, GARBAGE, NO_KEY),
    "files are exchanged": (KEY, CRT, NO_CRT),
    "key of another leaf": (CRT, new_leaf().key_pem(), OTHER_KEY),
    "key of the CA": (CRT, AUTHORITY.key_pem(), OTHER_KEY),
    "key is encrypted": (CRT, pem_of(GOOD.key, b"secret"), "tls.key must not be encrypted"),
    "key signs nothing": (CRT, pem_of(x25519.X25519PrivateKey.generate()), OTHER_KEY),
    "garbage after the leaf": (CRT + TORN, KEY, NO_CRT),
}
bad_pairs = pytest.mark.parametrize(("certificate", "key", "fault"), BAD_PAIRS.values(), ids=BAD_PAIRS)


def write_raw(directory: Path, certificate: bytes | None, key: bytes | None) -> None:
    directory.mkdir(exist_ok=True)
    for name, content in (("tls.crt", certificate), ("tls.key", key)):
        (directory / name).unlink(missing_ok=True)
        if content is not None:
            (directory / name).write_bytes(content)


SECRETS = [line[:16] for line in GOOD.key_pem().decode().splitlines() if not line.startswith("-")]


@bad_pairs
def test_an_invalid_certificate_keeps_the_last_valid_one_and_is_reported_once_without_the_key(
    directory: Path, certificate: bytes | None, key: bytes | None, fault: str
) -> None:
    old, new = new_leaf(days=1), new_leaf()
    write_plainly(directory, old)
    serving = ServingCertificate(directory)
    with echoing(serving.current) as server:
        write_raw(directory, certificate, key)
        (line,) = logged(serving)
        assert line["log_level"] == "error"
        assert fault in line["reason"]
        assert f"vcuda-certs issue --dir {directory}" in line["reason"]
        assert not [secret for secret in SECRETS if secret in str(line)]
        assert (serving.reload_failures, serving.expiry) == (1, old.expires.timestamp())
        assert served_by(server) == der(old)
        write_plainly(directory, new)
        serving.poll()
        assert served_by(server) == der(new)
    assert serving.reload_failures == 1


@bad_pairs
def test_the_server_does_not_start_without_a_valid_certificate_and_says_how_to_create_one(
    directory: Path, certificate: bytes | None, key: bytes | None, fault: str
) -> None:
    write_raw(directory, certificate, key)
    with pytest.raises(BadInput) as raised:
        ServingCertificate(directory)
    assert fault in str(raised.value)
    assert str(raised.value).endswith(f"vcuda-certs issue --dir {directory}")


def test_a_certificate_that_openssl_finds_too_weak_is_rejected(directory: Path) -> None:
    """The certificate can be parsed and its key matches, but every TLS handshake with it would fail."""
    write_plainly(directory, new_leaf())
    serving = ServingCertificate(directory)
    write_raw(directory, *weak_pair())
    (line,) = logged(serving)
    assert "tls.crt is rejected by OpenSSL together with tls.key" in line["reason"]


def test_files_that_change_while_they_are_read_are_read_at_the_next_poll(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first poll, the file with the key is already replaced, and the file with the certificate is not."""
    first, second = new_leaf(), new_leaf()
    write_plainly(directory, first)
    serving = ServingCertificate(directory)
    start = serving.current()
    (directory / "tls.key").write_bytes(second.key_pem())

    def finish_writing(_content: bytes, password: None) -> PrivateKeyTypes:
        assert password is None
        monkeypatch.undo()
        (directory / "tls.crt").write_bytes(second.certificate_pem())
        return second.key

    monkeypatch.setattr("vcuda.tls.load_pem_private_key", finish_writing)
    assert logged(serving, polls=1) == []
    assert (serving.current() is start, serving.reload_failures) == (True, 0)
    serving.poll()
    with echoing(serving.current) as server:
        assert served_by(server) == der(second)


def test_a_valid_certificate_that_could_not_be_read_is_retried_and_reported_once(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The read fails, for example because the process has too many open files."""
    old, new = new_leaf(days=1), new_leaf()
    write_plainly(directory, old)
    serving = ServingCertificate(directory)
    write_plainly(directory, new)

    def reject(_content: bytes) -> list[x509.Certificate]:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr("vcuda.tls.x509.load_pem_x509_certificates", reject)
        (line,) = logged(serving)
    assert "tls.crt cannot be read: Too many open files" in line["reason"]
    assert [line["log_level"] for line in logged(serving)] == ["info"]
    assert (serving.expiry, serving.reload_failures) == (new.expires.timestamp(), 1)


def test_another_invalid_certificate_and_one_after_a_valid_one_are_reported_again(directory: Path) -> None:
    good = new_leaf()
    write_plainly(directory, good)
    serving = ServingCertificate(directory)
    for failures, bad in enumerate((b"one", b"two", None, b"two"), 1):
        write_raw(directory, bad, None)
        assert (len(logged(serving)), serving.reload_failures) == (1, failures)
        if bad is None:
            write_plainly(directory, good)
            assert logged(serving) == []


# For a certificate with a negative serial number, the package cryptography only gives a warning.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::cryptography.utils.CryptographyDeprecationWarning")
@given(
    position=st.integers(0, len(der(GOOD)) - 1),
    replacement=st.binary(max_size=8),
    key=st.one_of(st.just(GOOD.key_pem()), st.binary(max_size=64)),
)
@settings(max_examples=100)
def test_with_any_file_contents_the_poll_ends_and_a_certificate_is_served(
    position: int, replacement: bytes, key: bytes
) -> None:
    """The server loads the changed certificate, or counts a failure and serves the last valid certificate."""
    content = der(GOOD)[:position] + replacement + der(GOOD)[position + len(replacement) :]
    certificate = b"-----BEGIN CERTIFICATE-----\n" + b64encode(content) + b"\n-----END CERTIFICATE-----\n"
    with TemporaryDirectory() as name:
        directory = Path(name)
        write_plainly(directory, new_leaf())
        serving = ServingCertificate(directory)
        start = serving.current()
        write_raw(directory, certificate, key)
        serving.poll()
    assert (serving.current() is start) == (serving.reload_failures == 1)


def test_the_watch_loads_a_new_certificate_by_itself_and_ends_when_stopped(directory: Path) -> None:
    reloaded, stop = Event(), Event()

    class Announcing(ServingCertificate):
        def poll(self) -> None:
            before = self.current()
            super().poll()
            if self.current() is not before:
                reloaded.set()

    old, new = new_leaf(), new_leaf()
    write_as_kubelet(directory, old)
    serving = Announcing(directory)
    watching = Thread(target=watch, args=(serving, stop), kwargs={"interval": 0.01})
    watching.start()
    try:
        write_as_kubelet(directory, new)
        assert reloaded.wait(timeout=60)
        with echoing(serving.current) as server:
            assert served_by(server) == der(new)
    finally:
        stop.set()
        watching.join()
