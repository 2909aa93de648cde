"""How long the node agent waits for a look at processes, and what becomes of one that it did not wait for."""

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
    """Looks that end when they may, and move when they are told to; each says which it was. It keeps their clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.may_end = threading.Event()
        self._begun = 0
        self._began = threading.Event()

    def __call__(self, _root: int, _mount: Mount, moved: Callable[[], None]) -> InUse:
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
        """Let this look and all later ones end, and this one have ended."""
        self.may_end.set()
        for thread in threading.enumerate():
            if thread.name == "scan":
                thread.join(PATIENT)

    def after(self, seconds: float, *, moves: bool) -> Ask:
        """Return a question that takes so long, in which the look moves or not, and that is answered with no."""

        def ask() -> bool:
            self.now += seconds
            if moves:
                self.move()
            return False

        return ask


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Looks]:
    """In place of the looks and of the clock."""
    looks = Looks()
    monkeypatch.setattr("controller.garbage.node.in_use.scan", looks)
    monkeypatch.setattr("controller.garbage.node.in_use.time", SimpleNamespace(monotonic=lambda: looks.now))
    monkeypatch.setattr("controller.garbage.node.in_use.STEP_SECONDS", 0.01)
    yield looks
    looks.end()


def never() -> bool:
    return False


def always() -> bool:
    return True


def look(scanner: ProcessScanner, root: OpenDirectory = ROOT, give_up: Ask = never, stopping: Ask = never) -> int:
    """The number of the look whose answer it was."""
    return int(scanner.scan(root, give_up, stopping).unseen[0])


def take_no_time_for(scanner: ProcessScanner, looks: Looks) -> None:
    """A look that moves, and that a sweep has no time for."""
    with pytest.raises(OutOfTime):
        look(scanner, give_up=always, stopping=looks.after(SCAN_TIMEOUT_SECONDS + 1, moves=True))


def test_one_that_moves_is_waited_for_however_long_it_takes(looks: Looks) -> None:
    began, ask = looks.now, looks.after(SCAN_TIMEOUT_SECONDS - 1, moves=True)

    def stopping() -> bool:
        if looks.now - began > 10 * SCAN_TIMEOUT_SECONDS:
            looks.may_end.set()
        return ask()

    assert look(ProcessScanner(), stopping=stopping) == 1
    assert looks.now - began > 10 * SCAN_TIMEOUT_SECONDS


def test_one_that_hangs_is_refused_and_what_it_says_later_is_not_taken(looks: Looks) -> None:
    scanner = ProcessScanner()
    with pytest.raises(MustStay, match="the scan of processes made no progress for 120 s"):
        look(scanner, stopping=looks.after(SCAN_TIMEOUT_SECONDS + 1, moves=False))
    looks.move()
    with pytest.raises(MustStay, match="an earlier scan has not ended"):
        look(scanner)
    looks.end()
    assert look(scanner) == 2


def test_one_that_moves_at_first_and_then_hangs_is_refused(looks: Looks) -> None:
    scanner = ProcessScanner()
    take_no_time_for(scanner, looks)
    with pytest.raises(MustStay, match="the scan of processes made no progress for 120 s"):
        look(scanner, stopping=looks.after(SCAN_TIMEOUT_SECONDS + 1, moves=False))


def test_a_stop_ends_the_wait_at_once(looks: Looks) -> None:
    began = looks.now
    with pytest.raises(OutOfTime):
        look(ProcessScanner(), stopping=always)
    assert looks.now == began


def test_a_sweep_whose_time_is_up_waits_for_the_patience_all_the_same(looks: Looks) -> None:
    """So one that takes as long as usual is never put off."""
    began, ask = looks.now, looks.after(SCAN_TIMEOUT_SECONDS / 2, moves=True)

    def stopping() -> bool:
        if looks.now > began:
            looks.may_end.set()
            return False
        return ask()

    assert look(ProcessScanner(), give_up=always, stopping=stopping) == 1


@pytest.mark.parametrize(
    ("lain", "root", "number"),
    [
        pytest.param(SCAN_TIMEOUT_SECONDS, ROOT, 1, id="taken up"),
        pytest.param(3 * SCAN_TIMEOUT_SECONDS, ROOT, 2, id="too old"),
        pytest.param(0, OTHER_ROOT, 2, id="of another mount"),
    ],
)
def test_one_that_a_sweep_had_no_time_for_is_taken_up_by_the_next(
    looks: Looks, lain: float, root: OpenDirectory, number: int
) -> None:
    scanner = ProcessScanner()
    take_no_time_for(scanner, looks)
    with pytest.raises(OutOfTime):
        look(scanner, give_up=always)
    looks.end()
    looks.now += lain
    assert look(scanner, root) == number


def test_no_two_go_on_at_a_time(looks: Looks) -> None:
    scanner = ProcessScanner()
    take_no_time_for(scanner, looks)
    with pytest.raises(MustStay, match="an earlier scan has not ended"):
        look(scanner, OTHER_ROOT)
