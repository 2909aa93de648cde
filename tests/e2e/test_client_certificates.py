"""The API server presents to webhooks the client certificate that `vcuda-certs client` issues.

The webhook rejects no call while the certificate is replaced.
"""

import base64
import json
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from certs.client import ADMISSION_CONFIGURATION, KUBECONFIG, admission_configuration, kubeconfig
from certs.parsing import read_authority, read_certificates
from certs.state import Certificates
from tests.e2e.cluster import Cluster, administering, webhook
from tests.e2e.installation import MANIFESTS, SYSTEM_NAMESPACE, account_of, make_certificates
from tests.e2e.json_server import Server, reviewed, tls
from tests.e2e.manifests.operations import commands
from tests.e2e.stage import utc_now
from tests.e2e.steady import in_threads, plain
from tests.integration.reviews import card_pod, review_of
from tests.processes import SCRIPTS, WebhookProcess, eventually, serving
from tools.control_plane import Settings, running_control_plane
from tools.ports import free_ports
from vcuda.x509 import common_name, make_client

pytestmark = pytest.mark.slow

COMPONENT = "../components/client-certificates"
CLIENT_CAS = f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/configmaps/vcuda-client-ca"
REFUSED = (ssl.SSLError, ConnectionResetError)
EXPIRED = re.compile("TLS handshake with .* failed: .* certificate has expired")
REREAD_SECONDS = 400
"""Maximum seconds until the API server reads its client certificate again. It does so every five minutes."""


class Requiring(Server):
    """A webhook that allows every review, but only from a client with a certificate of a CA in the ConfigMap.

    It reads the ConfigMap `CLIENT_CAS` for each connection.

    ``presented``: the client certificate of each call.
    ``connections``: the client certificate of each connection, by the client's address.
    ``hung_up``: set when a connection has ended.
    """

    def __init__(self, cluster: Cluster, certificates: Path, port: int) -> None:
        self.cluster = cluster
        self.certificates = certificates
        self.presented: list[x509.Certificate] = []
        self.connections: dict[object, x509.Certificate] = {}
        self.hung_up = threading.Event()
        super().__init__(("127.0.0.1", port), Allowing)

    def get_request(self) -> Any:
        connection, address = super().get_request()
        context = tls(self.certificates)
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=published(self.cluster))
        return context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False), address


class Allowing(BaseHTTPRequestHandler):
    """A request handler that allows each review, and records the client certificate of its connection."""

    server: Requiring

    def do_POST(self) -> None:
        review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        shown = x509.load_der_x509_certificate(self.connection.getpeercert(binary_form=True))
        self.server.presented.append(shown)
        self.server.connections.setdefault(self.client_address, shown)
        body = json.dumps(reviewed(review)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing, because the tests only check the recorded certificates."""


class Keeping(Allowing):
    """A request handler like `Allowing` that keeps each connection open for the next call, as our webhook does."""

    protocol_version = "HTTP/1.1"

    def finish(self) -> None:
        self.server.hung_up.set()
        super().finish()


def published(cluster: Cluster) -> str:
    text: str = cluster.rest.get(CLIENT_CAS)["data"]["ca.crt"]
    return text


class Presenting:
    """A cluster whose API server presents the client certificate in ``directory`` to webhooks at ``port``."""

    def __init__(self, cluster: Cluster, account: Cluster, directory: Path, port: int) -> None:
        self.cluster = cluster
        self.account = account
        self.directory = directory
        self.port = port
        self.address = f"127.0.0.1:{port}"
        self.certificates = directory.with_name("webhook")
        self.server: Requiring
        self.namespace = cluster.create_namespace(labels={"test": "client"})
        self.created = 0

    def rotate(self, *arguments: str) -> str:
        return certs(self.account, "rotate", "--overlap", "1s", "--retention", "1s", "--timeout", "30s", *arguments)

    def install(self) -> None:
        """Copy the client certificate to the directory from which the API server reads it."""
        certs(self.cluster, "files", "--dir", str(self.directory), "--server", self.address, "--write")

    def install_expired(self) -> None:
        """Install an expired client certificate of the present CA as the certificate that the API server presents."""
        secret = self.cluster.rest.get(f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/secrets/vcuda-client-ca")["data"]
        certificate, key = (base64.b64decode(secret[key]) for key in ("ca.crt", "ca.key"))
        authority = read_authority(certificate, key, "the CA")
        then = authority.certificate.not_valid_before_utc
        expired = make_client(authority, "vcuda-quota-apiserver", then, timedelta(seconds=1))
        (self.directory / "tls.crt").write_bytes(expired.certificate_pem())
        (self.directory / "tls.key").write_bytes(expired.key_pem())

    @contextmanager
    def asking(self, path: str) -> Iterator[None]:
        ca = base64.b64encode((self.certificates / "ca.crt").read_bytes()).decode()
        selected = {"namespaceSelector": {"matchLabels": {"test": "client"}}}
        hook = webhook("requiring.e2e.vcuda.io", f"https://{self.address}{path}", ca, **selected)
        with self.cluster.register_webhooks(validating=[hook]):
            yield

    def copy(self, name: str) -> Path:
        return Path(shutil.copytree(self.directory, self.directory.with_name(name)))

    def shake(self, pair: Path | None) -> None:
        """Call the webhook with this client certificate, or without one if ``pair`` is None.

        Raises OSError if the webhook rejects the connection.
        """
        context = ssl.create_default_context(cafile=self.certificates / "ca.crt")
        if pair:
            context.load_cert_chain(pair / "tls.crt", pair / "tls.key")
        with (
            socket.create_connection(("127.0.0.1", self.port)) as plain_socket,
            context.wrap_socket(plain_socket, server_hostname="127.0.0.1") as connection,
        ):
            # In TLS 1.3, a client learns only by a read that the server has rejected its certificate.
            connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
            if not connection.recv(1):
                raise ConnectionResetError("reset")

    def authorities(self) -> Certificates:
        return read_certificates(published(self.cluster).encode())[0]

    def restart(self) -> None:
        self.cluster.control_plane.apiserver.stop()
        self.cluster.control_plane.apiserver.start()

    def refusal(self) -> str:
        self.created += 1
        return self.cluster.try_create(plain(self.created, self.namespace)).message

    def presented(self) -> x509.Certificate:
        """Create a pod, which must be admitted. Return the client certificate that the API server presented for it."""
        assert self.refusal() == ""
        return self.server.presented[-1]

    def installed(self) -> x509.Certificate:
        return x509.load_pem_x509_certificate((self.directory / "tls.crt").read_bytes())


def certs(cluster: Cluster, name: str, *arguments: str) -> str:
    command = (str(SCRIPTS / "vcuda-certs"), "client", name, "--kubeconfig", str(cluster.kubeconfig), *arguments)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def presenting(assets: Path | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Presenting]:
    """A cluster whose API server presents a client certificate, installed as in docs/operations.md.

    The account that rotates the client certificate has only the rights of the manifests.
    """
    base, [port] = tmp_path_factory.mktemp("client"), free_ports(1)
    directory = base / "files"
    directory.mkdir()
    (directory / ADMISSION_CONFIGURATION).write_text(admission_configuration(directory))
    (directory / KUBECONFIG).write_text(kubeconfig(directory, f"127.0.0.1:{port}"))
    make_certificates(base / "webhook")
    flag = f"--admission-control-config-file={directory / ADMISSION_CONFIGURATION}"
    with (
        running_control_plane(assets, base / "plane", Settings(apiserver_flags=(flag,))) as plane,
        administering(plane) as cluster,
        account_of(cluster, f"{COMPONENT}/rbac.yaml", "vcuda-client-certs") as account,
    ):
        cluster.kubectl("apply", "-f", str(MANIFESTS / COMPONENT / "objects.yaml"))
        found = Presenting(cluster, account, directory, port)
        assert "IssueLeaf" in found.rotate()
        found.install()
        found.restart()
        yield found


@pytest.fixture
def required(presenting: Presenting) -> Iterator[Presenting]:
    """Run a webhook that requires the client certificate of the API server, and register it for pods."""
    with (
        Requiring(presenting.cluster, presenting.certificates, presenting.port) as server,
        in_threads([lambda _stop: server.serve_forever()]),
    ):
        presenting.server = server
        with presenting.asking("/"):
            yield presenting
        server.shutdown()


def test_a_client_without_a_certificate_of_the_ca_is_rejected(required: Presenting, tmp_path: Path) -> None:
    assert common_name(required.presented()) == "vcuda-quota-apiserver"
    assert required.server.presented[-1] == required.installed()
    make_certificates(tmp_path)
    for pair in (None, tmp_path):
        with pytest.raises(REFUSED):
            required.shake(pair)
    required.shake(required.directory)


def test_no_call_is_rejected_while_the_client_certificate_and_its_ca_are_replaced(required: Presenting) -> None:
    """`vcuda-certs client rotate --installed` removes the old CA, so that the webhook rejects the old certificate."""
    old, [ca] = required.presented(), required.authorities()
    time.sleep(1.1)  # certificates have times in whole seconds, so wait for a later second
    assert "that lacks the new certificate may" in required.rotate("--issued-before", utc_now())
    assert (required.presented(), required.authorities()[0]) == (old, ca)
    kept = required.copy("kept")
    required.install()
    required.restart()
    assert required.presented() == required.installed() != old
    required.shake(kept)
    assert "Done" in required.rotate("--installed")
    assert ca not in required.authorities()
    assert required.presented() == required.installed()
    with pytest.raises(REFUSED):
        required.shake(kept)


@pytest.mark.reread
@pytest.mark.timeout(2 * REREAD_SECONDS)
def test_the_api_server_reads_a_new_client_certificate_by_itself(required: Presenting) -> None:
    """When the API server reads its new certificate, it closes the connections that use an older one. Only a call in
    progress may fail. The API server also reads the files for each new connection. So this test uses one connection
    until the API server closes it.
    """
    server = required.server
    server.RequestHandlerClass = Keeping
    server.connections.clear()
    old = required.presented()
    time.sleep(1.1)  # the new certificate must be issued in a later second than the old one
    required.rotate("--issued-before", utc_now())
    required.install()

    def is_hung_up() -> bool:
        refusal = required.refusal()
        assert refusal == "" or "use of closed network connection" in refusal
        # Between two calls the test waits one second. A pause of 90 s would make the API server close the connection.
        return server.hung_up.wait(1)

    assert required.presented() == old
    eventually(is_hung_up, timeout=REREAD_SECONDS)
    assert required.presented() == required.installed()
    assert [*server.connections.values()] == [old, required.installed()]


@pytest.fixture
def guarded(presenting: Presenting, tmp_path: Path) -> Iterator[WebhookProcess]:
    """Run our webhook, and register it for pods. It only accepts callers with the API server's client certificate."""
    (tmp_path / "ca.crt").write_text(published(presenting.cluster))
    ours = ("--cert-dir", presenting.certificates, "--kubeconfig", presenting.cluster.kubeconfig)
    theirs = ("--client-ca", tmp_path / "ca.crt", "--client-name", "vcuda-quota-apiserver")
    flags = (*ours, *theirs, "--bind", presenting.address, "--system-namespace", SYSTEM_NAMESPACE)
    with serving(*flags, ca=presenting.certificates / "ca.crt") as process, presenting.asking("/validate"):
        process.await_ready()
        yield process


def test_our_webhook_answers_only_clients_with_the_api_servers_certificate(
    presenting: Presenting, guarded: WebhookProcess
) -> None:
    assert presenting.refusal() == ""
    assert guarded.metric("vcuda_client_certificate_expiry_seconds") == ends(presenting.installed())
    assert guarded.send("POST", "/validate", json.dumps(review_of(card_pod("train", "team-a")))).status == 401


def test_an_expired_client_certificate_on_an_api_servers_machine_is_replaced_as_operations_says(
    presenting: Presenting, guarded: WebhookProcess
) -> None:
    """The certificate in the Secret is valid, but nobody copied it to the machine of the API server."""
    presenting.install_expired()
    presenting.restart()
    assert "failed calling webhook" in presenting.refusal()
    eventually(lambda: EXPIRED.search(guarded.output()), guarded.output)
    began = time.monotonic()
    command = commands("The certificate has expired")[2].split()
    # The documented command has paths of an API server's machine. The test replaces them by its own paths.
    here = {"/etc/kubernetes/admin.conf": presenting.cluster.kubeconfig, "/etc/kubernetes/vcuda": presenting.directory}
    typed = [str(here.get(word, word)) for word in command]
    subprocess.run((SCRIPTS / typed[0], *typed[1:], "--server", presenting.address), check=True, timeout=60)
    presenting.restart()
    assert presenting.refusal() == ""
    print(f"bad night: client certificate written, API server restarted: {time.monotonic() - began:.1f} s")
    assert guarded.metric("vcuda_client_certificate_expiry_seconds") == ends(presenting.installed())


def ends(certificate: x509.Certificate) -> float:
    return certificate.not_valid_after_utc.timestamp()
