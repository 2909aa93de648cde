"""The serving certificate under real TLS connections while its files change."""

from __future__ import annotations

import os
import shutil
import signal
import ssl
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa, x25519
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from structlog.typing import EventDict

from tests.integration.tls_echo import Echo, echo, echoing
from tests.processes import PATIENCE, WebhookProcess, exchange, serving
from vcuda.errors import BadInput
from vcuda.tls import ServingCertificate, serving_files, watch, write_files
from vcuda.x509 import DEVELOPMENT, Signed, make_authority, make_leaf

NOW = datetime.now(UTC)
AUTHORITY = make_authority(NOW)

VERSIONS = count()

Write = Callable[[Path, Signed], None]


def new_leaf(days: int = 90) -> Signed:
    return make_leaf(AUTHORITY, DEVELOPMENT, NOW, timedelta(days=days))


def write_plainly(directory: Path, leaf: Signed) -> None:
    """Overwrite the two files in place, as an editor or ``cp`` does."""
    directory.mkdir(exist_ok=True)
    (directory / "tls.crt").write_bytes(leaf.certificate_pem())
    (directory / "tls.key").write_bytes(leaf.key_pem())


def write_as_issue(directory: Path, leaf: Signed) -> None:
    write_files(directory, serving_files(AUTHORITY, leaf))


def write_as_kubelet(directory: Path, leaf: Signed) -> None:
    """Swap ``..data`` and remove the directory it pointed at before, as kubelet's AtomicWriter does."""
    version = directory / f"..2026_11_21_08_00_00.{next(VERSIONS)}"
    version.mkdir(parents=True)
    write_plainly(version, leaf)
    data, old = directory / "..data", None
    if data.is_symlink():
        old = data.resolve()
    (directory / "..data_tmp").symlink_to(version.name)
    (directory / "..data_tmp").replace(data)
    if old:
        shutil.rmtree(old)
        return
    for name in ("tls.crt", "tls.key"):
        (directory / name).symlink_to(f"..data/{name}")


def trusting() -> ssl.SSLContext:
    return ssl.create_default_context(cadata=AUTHORITY.certificate_pem().decode())


def presented(connection: ssl.SSLSocket) -> bytes | None:
    return connection.getpeercert(binary_form=True)


def der(leaf: Signed) -> bytes:
    return leaf.certificate.public_bytes(Encoding.DER)


def served_by(server: Echo) -> bytes | None:
    """The leaf that a new connection is shown, in DER; the connection works."""
    with server.connect(trusting()) as connection:
        assert echo(connection, b"ping") == b"ping"
        return presented(connection)


def logged(serving: ServingCertificate, polls: int = 3) -> list[EventDict]:
    """What several polls in a row log."""
    with capture_logs() as lines:
        for _ in range(polls):
            serving.poll()
    return list(lines)


def pem_of(key: PrivateKeyTypes, password: bytes | None = None) -> bytes:
    how = BestAvailableEncryption(password) if password else NoEncryption()
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, how)


def weak_pair() -> tuple[bytes, bytes]:
    """A matching pair with a key of 1024 bits of RSA, which OpenSSL's default security level refuses."""
    key = rsa.generate_private_key(65537, 1024)  # noqa: S505 - weak is what it is for
    weak = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(x509.Name([]))
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(NOW)
        .not_valid_after(NOW + timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    return weak.public_bytes(Encoding.PEM), pem_of(key)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "certs"


@pytest.mark.parametrize(
    "version",
    [pytest.param(ssl.TLSVersion.TLSv1_2, id="1.2"), pytest.param(ssl.TLSVersion.TLSv1_3, id="1.3")],
)
def test_tls_1_2_and_1_3_are_spoken(directory: Path, version: ssl.TLSVersion) -> None:
    write_plainly(directory, new_leaf())
    client = trusting()
    client.minimum_version = client.maximum_version = version
    with echoing(ServingCertificate(directory).current) as server, server.connect(client) as connection:
        assert echo(connection, b"ping") == b"ping"


def test_older_versions_are_not(directory: Path) -> None:
    write_plainly(directory, new_leaf())
    assert ServingCertificate(directory).current().minimum_version == ssl.TLSVersion.TLSv1_2


def test_http_1_1_is_agreed_with_a_client_that_prefers_http_2(directory: Path) -> None:
    """The API server offers both; the streams of one HTTP/2 connection would be served one after another."""
    write_plainly(directory, new_leaf())
    client = trusting()
    client.set_alpn_protocols(["h2", "http/1.1"])
    with echoing(ServingCertificate(directory).current) as server, server.connect(client) as connection:
        assert connection.selected_alpn_protocol() == "http/1.1"


def test_connections_share_one_context_until_the_files_change(directory: Path) -> None:
    write_plainly(directory, new_leaf())
    serving = ServingCertificate(directory)
    first = serving.current()
    lines = logged(serving)
    os.utime(directory / "tls.crt")
    serving.poll()
    assert serving.current() is first
    assert lines == []


@pytest.mark.parametrize("write", [write_as_kubelet, write_as_issue, write_plainly])
def test_new_files_serve_new_connections_and_open_ones_go_on(directory: Path, write: Write) -> None:
    old, new = new_leaf(), new_leaf()
    write(directory, old)
    serving = ServingCertificate(directory)
    with echoing(serving.current) as server, server.connect(trusting()) as kept:
        write(directory, new)
        assert served_by(server) == der(old)  # nothing changes before the poll
        assert [line["log_level"] for line in logged(serving)] == ["info"]
        assert served_by(server) == der(new)
        assert echo(kept, b"still here") == b"still here"
        assert presented(kept) == der(old)
    assert serving.reload_failures == 0


def test_no_handshake_fails_while_the_files_are_swapped_all_the_time(directory: Path) -> None:
    write_as_kubelet(directory, new_leaf())
    serving = ServingCertificate(directory)
    leaves = [new_leaf() for _ in range(20)]
    done = Event()

    def rotate() -> None:
        for leaf in leaves:
            write_as_kubelet(directory, leaf)
            serving.poll()
        done.set()

    with echoing(serving.current) as server:
        rotating = Thread(target=rotate)
        rotating.start()
        while not done.is_set():
            served_by(server)
        rotating.join()
        assert served_by(server) == der(leaves[-1])
    assert serving.reload_failures == 0


def test_expiry_is_that_of_the_served_leaf(directory: Path) -> None:
    short, long = new_leaf(days=1), new_leaf(days=30)
    write_plainly(directory, short)
    serving = ServingCertificate(directory)
    assert serving.expiry == short.expires.timestamp()
    write_plainly(directory, long)
    serving.poll()
    assert serving.expiry == long.expires.timestamp()


GOOD = new_leaf()
BAD_PAIRS = {
    "certificate is missing": (None, GOOD.key_pem(), "tls.crt cannot be read: No such file"),
    "key is missing": (GOOD.certificate_pem(), None, "tls.key cannot be read: No such file"),
    "certificate is empty": (b"", GOOD.key_pem(), "tls.crt holds no PEM certificate"),
    "key is empty": (GOOD.certificate_pem(), b"", "tls.key holds no PEM private key"),
    "certificate is half written": (GOOD.certificate_pem()[:300], GOOD.key_pem(), "tls.crt holds no PEM cert"),
    "key is half written": (GOOD.certificate_pem(), GOOD.key_pem()[:100], "tls.key holds no PEM private key"),
    "certificate is garbage": (bytes(range(256)), GOOD.key_pem(), "tls.crt holds no PEM certificate"),
    "key is garbage": (GOOD.certificate_pem(), bytes(range(256)), "tls.key holds no PEM private key"),
    "files are exchanged": (GOOD.key_pem(), GOOD.certificate_pem(), "tls.crt holds no PEM certificate"),
    "key of another leaf": (GOOD.certificate_pem(), new_leaf().key_pem(), "tls.key is not the private key of"),
    "key of the CA": (GOOD.certificate_pem(), AUTHORITY.key_pem(), "tls.key is not the private key of tls.crt"),
    "key is encrypted": (GOOD.certificate_pem(), pem_of(GOOD.key, b"secret"), "tls.key is encrypted"),
    "key signs nothing": (
        GOOD.certificate_pem(),
        pem_of(x25519.X25519PrivateKey.generate()),
        "tls.key is not the private key of",
    ),
    "garbage after the leaf": (
        GOOD.certificate_pem() + b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
        GOOD.key_pem(),
        "tls.crt holds no PEM certificate",
    ),
}
bad_pairs = pytest.mark.parametrize(
    ("certificate", "key", "fault"), [pytest.param(*pair, id=name) for name, pair in BAD_PAIRS.items()]
)


def write_raw(directory: Path, certificate: bytes | None, key: bytes | None) -> None:
    """Replace both files by these contents; None removes the file."""
    directory.mkdir(exist_ok=True)
    for name, content in (("tls.crt", certificate), ("tls.key", key)):
        (directory / name).unlink(missing_ok=True)
        if content is not None:
            (directory / name).write_bytes(content)


@bad_pairs
def test_a_bad_pair_keeps_the_last_good_one_and_is_reported_once(
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
        assert (serving.reload_failures, serving.expiry) == (1, old.expires.timestamp())
        assert served_by(server) == der(old)
        write_plainly(directory, new)
        serving.poll()
        assert served_by(server) == der(new)
    assert serving.reload_failures == 1


@bad_pairs
def test_the_server_does_not_start_without_a_good_pair_and_says_what_makes_one(
    directory: Path, certificate: bytes | None, key: bytes | None, fault: str
) -> None:
    write_raw(directory, certificate, key)
    with pytest.raises(BadInput) as raised:
        ServingCertificate(directory)
    assert fault in str(raised.value)
    assert str(raised.value).endswith(f"vcuda-certs issue --dir {directory}")


def test_every_other_bad_pair_is_reported_again(directory: Path) -> None:
    write_plainly(directory, new_leaf())
    serving = ServingCertificate(directory)
    write_raw(directory, b"one", None)
    first = logged(serving)
    write_raw(directory, b"two", None)
    second = logged(serving)
    assert (len(first), len(second), serving.reload_failures) == (1, 1, 2)


@bad_pairs
def test_no_log_line_holds_any_of_the_key(
    directory: Path, certificate: bytes | None, key: bytes | None, fault: str
) -> None:
    write_plainly(directory, new_leaf())
    serving = ServingCertificate(directory)
    write_raw(directory, certificate, key)
    shown = str(logged(serving))
    assert fault in shown
    secrets = [body for body in GOOD.key_pem().decode().splitlines() if not body.startswith("-")]
    assert [secret for secret in secrets if secret[:16] in shown] == []


def test_a_certificate_that_openssl_finds_too_weak_is_refused(directory: Path) -> None:
    """It parses and the key matches, but no handshake could use it."""
    write_plainly(directory, new_leaf())
    serving = ServingCertificate(directory)
    write_raw(directory, *weak_pair())
    (line,) = logged(serving)
    assert "tls.crt and tls.key are refused by OpenSSL" in line["reason"]


def test_files_that_change_while_they_are_read_are_left_to_the_next_poll(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old certificate with the new key is no fault: it is what a reader sees who looks at the wrong moment."""
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


def test_a_good_pair_that_could_not_be_read_at_first_is_tried_again_and_told_once(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many open files, a disk that failed for a moment: the content alone does not say that it is bad."""
    old, new = new_leaf(days=1), new_leaf()
    write_plainly(directory, old)
    serving = ServingCertificate(directory)
    write_plainly(directory, new)

    def refuse(_content: bytes) -> list[x509.Certificate]:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr("vcuda.tls.x509.load_pem_x509_certificates", refuse)
        (line,) = logged(serving)
    assert "tls.crt cannot be read: Too many open files" in line["reason"]
    assert [line["log_level"] for line in logged(serving)] == ["info"]
    assert (serving.expiry, serving.reload_failures) == (new.expires.timestamp(), 1)


def test_a_bad_pair_that_comes_back_after_the_good_one_is_reported_again(directory: Path) -> None:
    good = new_leaf()
    write_plainly(directory, good)
    serving = ServingCertificate(directory)
    for failures in (1, 2):
        write_raw(directory, b"bad", None)
        assert len(logged(serving)) == 1
        write_plainly(directory, good)
        assert logged(serving) == []
        assert serving.reload_failures == failures


# A serial number that is negative is only warned of, by this version of cryptography.
@pytest.mark.filterwarnings("ignore::cryptography.utils.CryptographyDeprecationWarning")
@given(
    position=st.integers(0, len(der(GOOD)) - 1),
    replacement=st.binary(max_size=8),
    key=st.one_of(st.just(GOOD.key_pem()), st.binary(max_size=64)),
)
@settings(max_examples=100, deadline=None)
def test_whatever_the_files_hold_the_poll_ends_and_something_is_served(
    position: int, replacement: bytes, key: bytes
) -> None:
    """A certificate with bytes overwritten anywhere: loaded, or counted as a failure; no other exception."""
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


def test_the_watch_picks_a_new_pair_up_by_itself_and_ends_when_told(directory: Path) -> None:
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


@pytest.fixture
def server(directory: Path, tmp_path: Path) -> Iterator[WebhookProcess]:
    """The webhook as a process, which reads its first certificate from the directory."""
    write_as_kubelet(directory, new_leaf())
    (directory / "ca.crt").write_bytes(AUTHORITY.certificate_pem())
    quota = tmp_path / "gpuquota.yaml"
    quota.write_text("team-a: {quota: {M40: 8}}")
    with serving("--standalone", "--quota", quota, "--cert-dir", directory, ca=directory / "ca.crt") as running:
        yield running


def presented_by(server: WebhookProcess) -> bytes | None:
    """The leaf that the webhook shows a new connection, in DER; a request on it is answered."""
    with closing(server.connect()) as connection:
        assert exchange(connection, "GET", "/healthz").status == HTTPStatus.OK
        assert connection.sock is not None
        leaf: bytes | None = connection.sock.getpeercert(binary_form=True)
        return leaf


def test_the_webhook_takes_a_new_pair_without_a_lost_request_and_never_half_of_one(
    directory: Path, server: WebhookProcess
) -> None:
    new = new_leaf()
    with closing(server.connect()) as kept:
        exchange(kept, "GET", "/healthz")
        used = kept.sock
        write_as_kubelet(directory, new)
        while presented_by(server) != der(new):
            assert exchange(kept, "GET", "/healthz").status == HTTPStatus.OK
        (directory / "tls.key").write_bytes(new_leaf().key_pem()[:100])
        while not server.metric("vcuda_serving_certificate_reload_failures_total"):
            assert presented_by(server) == der(new)
        assert exchange(kept, "GET", "/healthz").status == HTTPStatus.OK
        assert kept.sock is used


def replace_worker(server: WebhookProcess) -> None:
    """Kill the one worker, and return when gunicorn has forked another."""
    killed = server.worker()
    os.kill(killed, signal.SIGKILL)
    pid, deadline = server.process.pid, time.monotonic() + PATIENCE
    while Path(f"/proc/{pid}/task/{pid}/children").read_text().split() in ([], [str(killed)]):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_worker_in_anothers_place_serves_what_is_in_the_files_from_its_first_connection(
    directory: Path, server: WebhookProcess
) -> None:
    """It is forked from what was read at the start: a leaf that has expired since, or whose CA is trusted no more."""
    authority = make_authority(NOW)
    write_as_kubelet(directory, make_leaf(authority, DEVELOPMENT, NOW))
    replace_worker(server)
    server.tls = ssl.create_default_context(cadata=authority.certificate_pem().decode())
    assert server.get("/healthz").status == HTTPStatus.OK


def test_a_worker_in_anothers_place_that_finds_a_bad_pair_serves_the_first_one(
    directory: Path, server: WebhookProcess
) -> None:
    (directory / "tls.key").write_bytes(b"garbage")
    replace_worker(server)
    assert server.get("/healthz").status == HTTPStatus.OK
    assert server.metric("vcuda_serving_certificate_reload_failures_total") == 1
