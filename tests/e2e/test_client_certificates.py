"""Tests that the API server presents the client certificate of `vcuda-certs client` to webhooks.

The webhook rejects no call while the certificate is replaced.
"""

import base64
import http.client
import re
import shutil
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from http import HTTPStatus
from pathlib import Path

import pytest
from cryptography import x509

from certs.client import ADMISSION_CONFIGURATION, KUBECONFIG, admission_configuration, kubeconfig
from certs.parsing import read_authority, read_certificates
from certs.state import Certificates
from tests.e2e.cluster import Cluster, administering, webhook
from tests.e2e.installation import MANIFESTS, SYSTEM_NAMESPACE, account_of, make_certificates
from tests.e2e.manifests.operations import commands
from tests.e2e.stage import utc_now
from tests.e2e.steady import plain
from tests.processes import SCRIPTS, WebhookProcess, eventually, exchange, serving
from tools.control_plane import Settings, running_control_plane
from tools.ports import free_ports
from vcuda.x509 import make_client

pytestmark = pytest.mark.slow

COMPONENT = "../components/client-certificates"
CLIENT_CAS = f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/configmaps/vcuda-client-ca"
EXPIRED = re.compile("TLS handshake with .* failed: .* certificate has expired")
REREAD_SECONDS = 400
"""Maximum seconds until the API server reads its client certificate again. It does so every five minutes."""


class Presenting:
    """A cluster whose API server presents the client certificate in ``directory`` to the webhooks at ``address``.

    ``client_ca``: the file of the CAs that the webhook trusts.
    """

    def __init__(self, cluster: Cluster, account: Cluster, directory: Path, address: str) -> None:
        self.cluster = cluster
        self.account = account
        self.directory = directory
        self.address = address
        self.certificates = directory.with_name("webhook")
        self.client_ca = directory.with_name("client-ca.crt")
        self.namespace = cluster.create_namespace(labels={"test": "client"})
        self.created = 0

    def rotate(self, *arguments: str) -> str:
        """Rotate the client certificate, and write the new CAs to ``client_ca``, as the kubelet does."""
        told = certs(self.account, "rotate", "--overlap", "1s", "--retention", "1s", "--timeout", "30s", *arguments)
        new = self.client_ca.with_suffix(".new")
        new.write_text(self.cluster.rest.get(CLIENT_CAS)["data"]["ca.crt"])
        new.replace(self.client_ca)
        return told

    def install(self) -> None:
        """Copy the client certificate to the directory from which the API server reads it."""
        certs(self.cluster, "files", "--dir", str(self.directory), "--server", self.address, "--write")

    def install_expired(self) -> None:
        """Install an expired client certificate of the present CA, for the API server to present."""
        secret = self.cluster.rest.get(f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/secrets/vcuda-client-ca")["data"]
        certificate, key = (base64.b64decode(secret[key]) for key in ("ca.crt", "ca.key"))
        authority = read_authority(certificate, key, "the CA")
        then = authority.certificate.not_valid_before_utc
        expired = make_client(authority, "vcuda-quota-apiserver", then, timedelta(seconds=1))
        (self.directory / "tls.crt").write_bytes(expired.certificate_pem())
        (self.directory / "tls.key").write_bytes(expired.key_pem())

    @contextmanager
    def connected(self, pair: Path) -> Iterator[http.client.HTTPSConnection]:
        context = ssl.create_default_context(cafile=self.certificates / "ca.crt")
        context.load_cert_chain(pair / "tls.crt", pair / "tls.key")
        with closing(http.client.HTTPSConnection(self.address, context=context, timeout=20)) as connection:
            yield connection

    def is_trusted(self, pair: Path) -> bool:
        """Return whether the webhook accepts a connection with this client certificate."""
        with self.connected(pair) as connection:
            try:
                return exchange(connection, "GET", "/healthz").status == HTTPStatus.OK
            except (ssl.SSLError, ConnectionError):
                return False

    def authorities(self) -> Certificates:
        return read_certificates(self.client_ca.read_bytes())[0]

    def restart(self) -> None:
        self.cluster.control_plane.apiserver.stop()
        self.cluster.control_plane.apiserver.start()

    def rejection(self) -> str:
        self.created += 1
        return self.cluster.try_create(plain(self.created, self.namespace)).message

    def installed(self) -> float:
        """Return when the installed client certificate expires, in Unix seconds."""
        certificate = x509.load_pem_x509_certificate((self.directory / "tls.crt").read_bytes())
        return certificate.not_valid_after_utc.timestamp()


def certs(cluster: Cluster, name: str, *arguments: str) -> str:
    command = (str(SCRIPTS / "vcuda-certs"), "client", name, "--kubeconfig", str(cluster.kubeconfig), *arguments)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def presenting(assets: Path | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Presenting]:
    """A cluster whose API server presents a client certificate, installed as in docs/operations.md.

    The account that rotates the certificate has only the rights in the manifests.
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
        found = Presenting(cluster, account, directory, f"127.0.0.1:{port}")
        assert "IssueLeaf" in found.rotate()
        found.install()
        found.restart()
        yield found


@contextmanager
def guarding(presenting: Presenting, address: str) -> Iterator[WebhookProcess]:
    """Run our webhook at an address, and register it for pods. It only accepts callers with a client certificate."""
    ours = ("--cert-dir", presenting.certificates, "--kubeconfig", presenting.cluster.kubeconfig)
    theirs = ("--client-ca", presenting.client_ca, "--client-name", "vcuda-quota-apiserver")
    flags = (*ours, *theirs, "--bind", address, "--system-namespace", SYSTEM_NAMESPACE)
    ca = base64.b64encode((presenting.certificates / "ca.crt").read_bytes()).decode()
    selected = {"namespaceSelector": {"matchLabels": {"test": "client"}}}
    hook = webhook("guarded.e2e.vcuda.io", f"https://{address}/validate", ca, **selected)
    with (
        serving(*flags, ca=presenting.certificates / "ca.crt") as process,
        presenting.cluster.register_webhooks(validating=[hook]),
    ):
        process.await_ready()
        yield process


@pytest.fixture
def guarded(presenting: Presenting) -> Iterator[WebhookProcess]:
    """Our webhook, at the address to which the API server presents its client certificate."""
    with guarding(presenting, presenting.address) as process:
        yield process


def presented(presenting: Presenting, guarded: WebhookProcess) -> float:
    """Create a pod, which must be admitted. Return when the client certificate of the newest connection expires."""
    assert presenting.rejection() == ""
    return guarded.metric("vcuda_client_certificate_expiry_seconds")


def rotated(presenting: Presenting, guarded: WebhookProcess, *arguments: str) -> str:
    """Rotate the client certificate, and return the output when the webhook has loaded the new CAs."""
    loaded = len(guarded.logs("serving certificate reloaded"))
    told = presenting.rotate(*arguments)
    eventually(lambda: len(guarded.logs("serving certificate reloaded")) > loaded, guarded.output)
    return told


def test_no_call_is_rejected_while_the_client_certificate_and_its_ca_are_replaced(
    presenting: Presenting, guarded: WebhookProcess
) -> None:
    """`vcuda-certs client rotate --installed` removes the old CA, so the webhook then rejects the old certificate."""
    old, [ca] = presented(presenting, guarded), presenting.authorities()
    assert old == presenting.installed()
    time.sleep(1.1)  # certificates have times in whole seconds, so wait for a later second
    assert "that lacks the new certificate may" in rotated(presenting, guarded, "--issued-before", utc_now())
    assert (presented(presenting, guarded), presenting.authorities()[0]) == (old, ca)
    kept = Path(shutil.copytree(presenting.directory, presenting.directory.with_name("kept")))
    presenting.install()
    presenting.restart()
    assert presented(presenting, guarded) == presenting.installed() != old
    assert presenting.is_trusted(kept)
    assert "Done" in rotated(presenting, guarded, "--installed")
    assert ca not in presenting.authorities()
    presenting.restart()
    assert presented(presenting, guarded) == presenting.installed()
    assert not presenting.is_trusted(kept)
    assert "TIME LEFT" in certs(presenting.cluster, "status")


@pytest.mark.reread
@pytest.mark.timeout(2 * REREAD_SECONDS)
def test_the_api_server_reads_a_new_client_certificate_by_itself(
    presenting: Presenting, guarded: WebhookProcess
) -> None:
    """When the API server reads its new certificate, it closes connections with an older one.

    Only a call in progress may fail. The API server also reads the files for each new connection, so this test uses one
    connection until it is closed.
    """
    old = presented(presenting, guarded)
    time.sleep(1.1)  # the new certificate must be issued in a later second than the old one
    rotated(presenting, guarded, "--issued-before", utc_now())
    presenting.install()

    def is_new() -> bool:
        # The test waits one second between two calls. After a pause of 90 s, the API server would close the connection.
        time.sleep(1)
        rejection = presenting.rejection()
        assert rejection == "" or "use of closed network connection" in rejection
        return guarded.metric("vcuda_client_certificate_expiry_seconds") == presenting.installed()

    assert presented(presenting, guarded) == old
    eventually(is_new, timeout=REREAD_SECONDS)


def test_an_api_server_without_a_client_certificate_says_so_when_it_rejects_a_pod(presenting: Presenting) -> None:
    """The API server presents its certificate only to one address. At another address it is like one without."""
    [port] = free_ports(1)
    with guarding(presenting, f"127.0.0.1:{port}"):
        assert presenting.rejection() == (
            'Internal error occurred: failed calling webhook "guarded.e2e.vcuda.io": failed to call webhook: '
            "the server has asked for the client to provide credentials"
        )


def test_an_expired_client_certificate_on_an_api_servers_machine_is_replaced_as_operations_says(
    presenting: Presenting, guarded: WebhookProcess
) -> None:
    """The certificate in the Secret is valid, but nobody has copied it to the API server's machine."""
    presenting.install_expired()
    presenting.restart()
    assert "failed calling webhook" in presenting.rejection()
    eventually(lambda: EXPIRED.search(guarded.output()), guarded.output)
    began = time.monotonic()
    command = commands("The certificate has expired")[2].split()
    # The documented command has paths of an API server's machine. The test replaces them by its own paths.
    here = {"/etc/kubernetes/admin.conf": presenting.cluster.kubeconfig, "/etc/kubernetes/vcuda": presenting.directory}
    typed = [str(here.get(word, word)) for word in command]
    subprocess.run((SCRIPTS / typed[0], *typed[1:], "--server", presenting.address), check=True, timeout=60)
    presenting.restart()
    assert presenting.rejection() == ""
    print(f"bad night: client certificate written, API server restarted: {time.monotonic() - began:.1f} s")
    assert presented(presenting, guarded) == presenting.installed()
