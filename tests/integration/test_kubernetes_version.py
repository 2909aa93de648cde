"""Tests that every program ends with one error if the Kubernetes version is too old, and makes no other request."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import kmock
import pytest

from tests.e2e.installation import make_certificates
from tests.integration.scripted import Answer, Script, serving, status, write_kubeconfig
from tests.processes import SCRIPTS, OwnProcess

pytestmark = pytest.mark.slow

OLD = Answer({"major": "1", "minor": "29+", "gitVersion": "v1.29.4-gke.7"})

PASSWORD, TOKEN = "hunter2", "a-token-nobody-may-see"

CERTS = ("vcuda-certs rotate", "vcuda-certs rotate --dry-run", "vcuda-certs status")
LASTING = (
    "vcuda-controller run --status-address 127.0.0.1:0 --lease-seconds 5",
    "vcuda-controller node --scheme hami --node n1 --pod-uid u1 --status-address 127.0.0.1:0 --period 0.1",
    "vcuda-webhook serve --cert-dir {directory}/certs --bind 127.0.0.1:0 --drain-seconds 0",
)
EVERY = (*CERTS, *LASTING)


class Versioned(Script):
    """Answers requests for /version with these answers, and then repeats the last one. Other requests get a 503."""

    def __init__(self, *versions: Answer) -> None:
        super().__init__()
        self.versions = list(versions)

    def __call__(self, request: kmock.Request) -> kmock.Payload:
        self.seen.append(request)
        if request.url.path != "/version":
            return status(503, "no other request is served").render()
        return (self.versions.pop(0) if len(self.versions) > 1 else self.versions[0]).render()

    def requests(self) -> set[str]:
        return {f"{request.method.value} {request.url.path}" for request in self.seen}


@contextmanager
def started(directory: Path, command: str, url: str) -> Iterator[OwnProcess]:
    make_certificates(directory / "certs")
    write_kubeconfig(directory / "kubeconfig", url.replace("//", f"//us:{PASSWORD}@"), {"token": TOKEN})
    program, *flags = command.format(directory=directory).split()
    process = OwnProcess((SCRIPTS / program, *flags, "--kubeconfig", directory / "kubeconfig"), {})
    try:
        yield process
    finally:
        process.kill()


@pytest.mark.parametrize("command", EVERY)
def test_an_old_kubernetes_is_one_error_and_status_1_without_any_other_request(tmp_path: Path, command: str) -> None:
    script = Versioned(OLD)
    with serving(script) as url, started(tmp_path, command, url) as process:
        assert process.wait() == 1
        told = [line for line in process.output().splitlines() if not line.startswith("{")]
    oldest = "v1.30, the oldest supported version"
    assert told == [f"Error: Kubernetes v1.29.4-gke.7 at {url} is older than {oldest}. Upgrade the cluster first."]
    assert script.requests() == {"GET /version"}
    assert not [secret for secret in (PASSWORD, TOKEN) if secret in process.output()]


@pytest.mark.parametrize("command", LASTING)
def test_an_api_server_that_does_not_answer_is_waited_for_and_asked_its_version_first(
    tmp_path: Path, command: str
) -> None:
    script = Versioned(*[status(503, "starting")] * 3, OLD)
    with serving(script) as url, started(tmp_path, command, url) as process:
        assert process.wait() == 1
    assert script.requests() == {"GET /version"}
    assert len(script.seen) > 3
