"""Tests of invalid flags of the controller's commands, and of errors when the scheduler extender starts."""

import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from prometheus_client import CollectorRegistry

from controller.cli import main
from controller.extender.service import Extender, Listening
from controller.pods import PodInformer
from tests.api_double import ApiDouble, Script, lost_request
from tests.builders import LABELS
from tests.e2e.installation import make_certificates
from tests.extended import SYSTEM
from tests.integration.scripted import write_kubeconfig
from tests.processes import SCRIPTS
from tests.waiting import PATIENT
from vcuda.kube import NodeInformer
from vcuda.tls import ServingCertificate

pytestmark = pytest.mark.slow

PROGRAM = SCRIPTS / "vcuda-controller"
BAD_INPUT = 2
RUN, NODE = ("run",), ("node", "--scheme", "gpu-manager", "--node", "gpu-7", "--pod-uid", "u")
EXTENDER = ("--extender-address", "127.0.0.1:0")
CLIENT_CA = ("--extender-client-ca", "nowhere/ca.crt")
ADVERTISE = (*EXTENDER, "--extender-cert-dir", ".", "--extender-advertise")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        *(
            (("--ui-address", text), "Invalid value for --ui-address: must be HOST:PORT")
            for text in ("nonsense", "127.0.0.1", "127.0.0.1:", ":x")
        ),
        (("--ui-advertise", "10.1.2.3:8088"), "--ui-address is required with --ui-advertise."),
        (("--ui-advertise", "me:8088"), "must be IP:PORT, for example 10.0.0.7:8080; got 'me:8088'"),
        *(
            ((flag, text), f"Invalid value for {flag}: {text!r} must start with https:// or http://.")
            for flag in ("--ui-docs-url", "--ui-grafana-url")
            for text in ("javascript:alert(1)", "docs.example")
        ),
        (EXTENDER, "--extender-cert-dir is required with --extender-address"),
        ((*EXTENDER, "--extender-cert-dir", "."), "--extender-client-ca is required with --extender-address"),
        ((*EXTENDER, "--extender-cert-dir", "nowhere", *CLIENT_CA), "nowhere/tls.crt cannot be read"),
        (("--extender-address", "here", "--extender-cert-dir", "."), "must be HOST:PORT"),
        *(((*ADVERTISE, text), f"got {text!r}") for text in ("me", "a.example:1", ":1", "[fe80::1%eth0]:1")),
        # The controller may forget the age of a pending charge after one resync period. So a charge must expire within
        # it.
        (
            ("--storable-seconds", "301"),
            "--resync-seconds: must be at least twice --storable-seconds (301); got 600.",
        ),
        (
            ("--resync-seconds", "149"),
            "--resync-seconds: must be at least twice --storable-seconds (75); got 149.",
        ),
        (("--resync-seconds", "240", *EXTENDER), "--extender-cert-dir is required with --extender-address"),
        *((("--quota-configmap", text), f"--quota-configmap: {text!r} is not NAMESPACE/NAME.") for text in ("/", "x")),
    ],
)
def test_bad_flags_are_reported_before_anything_starts(tmp_path: Path, flags: tuple[str, ...], message: str) -> None:
    write_kubeconfig(tmp_path / "kubeconfig", "http://127.0.0.1:1", {"token": "letmein"})
    result = CliRunner().invoke(main, ["run", "--kubeconfig", str(tmp_path / "kubeconfig"), *flags])
    assert (result.exit_code, result.stdout) == (BAD_INPUT, "")
    assert message in result.stderr


@pytest.mark.parametrize(
    ("command", "flag", "address", "says"),
    [
        *(
            (command, "--status-address", address, says)
            for command in (RUN, NODE)
            for address, says in (
                ("127.0.0.1:99999", "got '127.0.0.1:99999'."),
                ("127.0.0.1:²", "got '127.0.0.1:²'."),
                ("nowhere.invalid:8080", "nowhere.invalid:8080: "),
                ("192.0.2.1:8080", "192.0.2.1:8080: Cannot assign requested address."),
            )
        ),
        ((*RUN, "--status-address", "127.0.0.1:0"), "--ui-address", "taken", ": Address already in use."),
    ],
)
def test_an_address_that_cannot_be_bound_is_bad_input(
    tmp_path: Path, command: tuple[str, ...], flag: str, address: str, says: str
) -> None:
    """The command fails before it calls an API server, so the test needs no API server."""
    write_kubeconfig(tmp_path / "kubeconfig", "http://127.0.0.1:1", {"token": "letmein"})
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = "{}:{}".format(*taken.getsockname()) if address == "taken" else address
        arguments: list[str | Path] = [PROGRAM, *command, "--kubeconfig", tmp_path / "kubeconfig", flag, address]
        done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=60)
    last = done.stderr.splitlines()[-1]
    assert (done.returncode, "Traceback" in done.stderr) == (BAD_INPUT, False)
    assert last.startswith("Error: ")
    assert f"{flag}: " in last
    assert says in last


@pytest.fixture
def faults() -> threading.Semaphore:
    return threading.Semaphore(0)


@pytest.fixture
def beginning(api: ApiDouble, tmp_path: Path, faults: threading.Semaphore) -> Iterator[Extender]:
    make_certificates(tmp_path)
    pods, nodes = PodInformer(api.kube, LABELS, lambda _: None), NodeInformer(api.kube, LABELS)
    listening, registry = Listening(("127.0.0.1", 0), ServingCertificate(tmp_path)), CollectorRegistry()
    extender = Extender(
        api.kube,
        SYSTEM,
        listening,
        pods,
        nodes,
        unbound_seconds=300,
        max_terminating_seconds=600,
        registry=registry,
        on_fault=faults.release,
    )
    yield extender
    extender.stop()


@pytest.mark.parametrize("lost", [2, 3])
def test_journals_that_cannot_be_read_are_a_fault_after_three_tries_and_it_is_ready_once_it_listens(
    api: ApiDouble, beginning: Extender, faults: threading.Semaphore, lost: int
) -> None:
    api.deliver = Script(*[lost_request] * lost, methods=("LIST",))
    assert not beginning.serving
    beginning.serve()
    assert (faults.acquire(blocking=False), beginning.serving) == (lost == 3, lost == 2)


def test_the_end_of_a_loop_is_reported_as_a_fault(
    beginning: Extender, faults: threading.Semaphore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the end were not reported, nobody would notice that the loop no longer works."""

    def broken(*_: object) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr("vcuda.tls.watch", broken)
    beginning.serve()
    assert faults.acquire(timeout=PATIENT)
