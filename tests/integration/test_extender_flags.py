"""What `vcuda-controller run` makes of the extender's flags, and what becomes of an extender that cannot begin."""

from __future__ import annotations

import threading
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
from tests.extended import JOURNAL, SYSTEM
from tests.waiting import PATIENT
from vcuda.kube import NodeInformer
from vcuda.tls import ServingCertificate

ADDRESS = ("--extender-address", "127.0.0.1:0")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (ADDRESS, "--extender-address wants --extender-cert-dir too"),
        ((*ADDRESS, "--extender-cert-dir", "nowhere"), "nowhere/tls.crt cannot be read"),
        (("--extender-address", "here", "--extender-cert-dir", "."), "'here' is not HOST:PORT"),
        ((*ADDRESS, "--extender-cert-dir", ".", "--extender-advertise", "me"), "'me' is not IP:PORT"),
        ((*ADDRESS, "--extender-cert-dir", ".", "--extender-advertise", "a.example:1"), "'a.example:1' is not IP:PORT"),
        ((*ADDRESS, "--extender-cert-dir", ".", "--extender-advertise", ":1"), "':1' is not IP:PORT"),
        ((*ADDRESS, "--extender-cert-dir", ".", "--extender-advertise", "[fe80::1%eth0]:1"), "is not IP:PORT"),
    ],
)
def test_flags_that_cannot_be_used_are_told_before_anything_starts(flags: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(main, ["run", *flags])
    assert result.exit_code == 2
    assert message in result.output


class Beginning:
    """An extender that is about to take the journal, and how often it could not go on."""

    def __init__(self, api: ApiDouble, certificates: Path) -> None:
        make_certificates(certificates)
        self.faults = 0
        self.faulty = threading.Event()
        pods, nodes = PodInformer(api.kube, LABELS, lambda _: None), NodeInformer(api.kube, LABELS)
        listening = Listening(("127.0.0.1", 0), ServingCertificate(certificates))
        self.extender = Extender(
            api.kube, SYSTEM, listening, pods, nodes, registry=CollectorRegistry(), on_fault=self._fault
        )

    def _fault(self) -> None:
        self.faults += 1
        self.faulty.set()


@pytest.fixture
def beginning(api: ApiDouble, tmp_path: Path) -> Beginning:
    return Beginning(api, tmp_path)


def test_a_damaged_journal_ends_the_extender_alone(api: ApiDouble, beginning: Beginning) -> None:
    api.store(JOURNAL, {"metadata": {"name": "gpu-placements"}, "data": {"journal": "{"}})
    beginning.extender.take()
    beginning.extender.serve()
    assert (beginning.faults, beginning.extender.serving, beginning.extender.publishes) == (0, True, False)
    beginning.extender.stop()


def test_a_journal_that_cannot_be_taken_is_a_fault_after_three_tries(api: ApiDouble, beginning: Beginning) -> None:
    api.deliver = Script(lost_request, lost_request, lost_request, methods=("GET",))
    beginning.extender.take()
    assert beginning.faults == 1


def test_it_is_ready_once_it_listens(api: ApiDouble, beginning: Beginning) -> None:
    api.deliver = Script(lost_request, lost_request, methods=("GET",))
    beginning.extender.take()
    assert (beginning.faults, beginning.extender.serving) == (0, False)
    beginning.extender.serve()
    assert beginning.extender.serving
    assert beginning.extender.publishes
    beginning.extender.stop()


def test_a_loop_that_ends_by_a_fault_is_one(beginning: Beginning, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would see that what it does is done no more."""

    def broken(*_: object) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr("controller.extender.publish.CardsPublisher.publish", broken)
    beginning.extender.take()
    beginning.extender.serve()
    assert beginning.faulty.wait(PATIENT)
    beginning.extender.stop()
