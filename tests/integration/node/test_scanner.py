"""The time that the node agent waits for a scan of all processes, and scans that have not ended by then."""

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from controller.garbage.node.fs import Mount, OpenDirectory, OutOfTime
from controller.garbage.node.in_use import SCAN_TIMEOUT_SECONDS, InUse, ProcessScanner
from controller.garbage.node.names import MustStay
from tests.waiting import PATIENT

Ask = Callable[[], bool]
ROOT, OTHER_ROOT = OpenDirectory(3, Mount(1, 1)), OpenDirectory(3, Mount(1, 2))


class Looks:
    """Replaces the scan of processes and its clock. A scan makes progress, and ends, only when a test says so.

    The result of a scan is its number: 1 for the first scan.
    """

    def __init__(self) -> None:
        self.now = 1000.0
        self.may_end = threading.Event()
        self._begun = 0
        self._began = threading.Event()

    def __call__(self, _mount: Mount, moved: Callable[[], None]) -> InUse:
        self._begun += 1
        self._moved = moved
        self._began.set()
        answer = InUse(unseen=[str(self._begun)])
        assert self.may_end.wait(PATIENT)
        return answer

    def move(self) -> None:
        assert self._began.wait(PATIENT)
        self._moved()

    def end(self) -> None:
        """Permit all scans to end, and wait until the running scan has ended."""
        self.may_end.set()
        for thread in threading.enumerate():
            if thread.name == "scan":
                thread.join(PATIENT)

    def after(self, seconds: float, *, moves: bool) -> Ask:
        """Return a callback that lets ``seconds`` pass and returns False. If ``moves``, the scan reports progress."""

        def ask() -> bool:
            self.now += seconds
            if moves:
                self.move()
            return False

        return ask


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Looks]:
    looks = Looks()
    monkeypatch.setattr("controller.garbage.node.in_use.scan", looks)
    monkeypatch.setattr("controller.garbage.node.in_use.time", SimpleNamespace(monotonic=lambda: looks.now))
    monkeypatch.setattr("controller.garbage.node.in_use.STEP_SECONDS", 0.01)
    yield looks
    looks.end()


def look(
    scanner: ProcessScanner, root: OpenDirectory = ROOT, stopping: Ask = lambda: False, *, give_up: bool = False
) -> int:
    """Scan the processes as the agent does. Return the number of the scan whose result was used."""
    return int(scanner.scan(root.mount, lambda: give_up, stopping).unseen[0])


def take_no_time_for(scanner: ProcessScanner, looks: Looks) -> None:
    """Start a scan that makes progress, but does not end in the time of the sweep."""
    with pytest.raises(OutOfTime):
        look(scanner, give_up=True, stopping=looks.after(SCAN_TIMEOUT_SECONDS + 1, moves=True))


def test_a_scan_that_makes_progress_is_waited_for(looks: Looks) -> None:
    began, ask = looks.now, looks.after(SCAN_TIMEOUT_SECONDS - 1, moves=True)

    def stopping() -> bool:
        if looks.now - began > 10 * SCAN_TIMEOUT_SECONDS:
            looks.may_end.set()
        return ask()

    assert look(ProcessScanner(), stopping=stopping) == 1
    assert looks.now - began > 10 * SCAN_TIMEOUT_SECONDS


def test_a_scan_without_progress_is_refused_and_its_late_answer_is_not_used(looks: Looks) -> None:
    scanner = ProcessScanner()
    with pytest.raises(MustStay, match="the scan of processes made no progress for 120 s"):
        look(scanner, stopping=looks.after(SCAN_TIMEOUT_SECONDS + 1, moves=False))
    looks.move()
    with pytest.raises(MustStay, match="an earlier scan of the processes has not ended"):
        look(scanner)
    looks.end()
    assert look(scanner) == 2


def test_a_scan_that_stops_making_progress_is_refused(looks: Looks) -> None:
    scanner = ProcessScanner()
    take_no_time_for(scanner, looks)
    with pytest.raises(MustStay, match="the scan of processes made no progress for 120 s"):
        look(scanner, stopping=looks.after(SCAN_TIMEOUT_SECONDS + 1, moves=False))


def test_a_stop_ends_the_wait_at_once(looks: Looks) -> None:
    began = looks.now
    with pytest.raises(OutOfTime):
        look(ProcessScanner(), stopping=lambda: True)
    assert looks.now == began


def test_a_sweep_whose_time_is_up_still_waits_for_the_scan_timeout(looks: Looks) -> None:
    """A scan that makes progress can end, even if the time of the sweep was over when the scan began."""
    began, ask = looks.now, looks.after(SCAN_TIMEOUT_SECONDS / 2, moves=True)

    def stopping() -> bool:
        if looks.now > began:
            looks.may_end.set()
            return False
        return ask()

    assert look(ProcessScanner(), give_up=True, stopping=stopping) == 1


@pytest.mark.parametrize(
    ("lain", "root", "number"),
    [
        pytest.param(SCAN_TIMEOUT_SECONDS, ROOT, 1, id="taken up"),
        pytest.param(3 * SCAN_TIMEOUT_SECONDS, ROOT, 2, id="too old"),
        pytest.param(0, OTHER_ROOT, 2, id="of another mount"),
    ],
)
def test_the_next_sweep_uses_a_scan_for_which_the_last_one_had_no_time(
    looks: Looks, lain: float, root: OpenDirectory, number: int
) -> None:
    scanner = ProcessScanner()
    take_no_time_for(scanner, looks)
    with pytest.raises(OutOfTime):
        look(scanner, give_up=True)
    looks.end()
    looks.now += lain
    assert look(scanner, root) == number


def test_only_one_scan_runs_at_a_time(looks: Looks) -> None:
    scanner = ProcessScanner()
    take_no_time_for(scanner, looks)
    with pytest.raises(MustStay, match="an earlier scan of the processes has not ended"):
        look(scanner, OTHER_ROOT)
