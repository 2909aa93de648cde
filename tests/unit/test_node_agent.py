"""Tests of the node agent's loop: the times of its sweeps, its log, and its health."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from prometheus_client import CollectorRegistry

from controller.garbage.node.agent import (
    MAX_LOGGED,
    MAX_MISSED_PERIODS,
    Action,
    Agent,
    DirectoryOutcome,
    Report,
    Run,
    SweepReporter,
)
from controller.garbage.node.fs import OutOfTime
from controller.garbage.node.names import Keep, KeepReason
from tests.tables import cases
from vcuda.cli import escaped

UNKNOWN = Keep(KeepReason.PODS_UNKNOWN, "no list")
RESULTS = ("complete", "blocked", "unfinished", "failed")

Script = list[tuple[list[DirectoryOutcome], Keep | BaseException | None]]


@dataclass
class Sweeps:
    """Replaces the sweep over all directories. Each call plays the next entry of ``script``; the last one repeats."""

    script: Script

    def __call__(self, report: Report, _give_up: Callable[[], bool], _stopping: Callable[[], bool]) -> Keep | None:
        said, result = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        for outcome in said:
            report(outcome)
        if isinstance(result, BaseException):
            raise result
        return result


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def logs() -> Iterator[list[Any]]:
    with structlog.testing.capture_logs() as lines:
        yield lines


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the monotonic clock of the node agent. Return a list with one element, the time in seconds."""
    now = [1000.0]
    monkeypatch.setattr("controller.garbage.node.agent.time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    return now


Stop = queue.SimpleQueue[None]


def agent_of(registry: CollectorRegistry, sweeps: Run, stop: Stop | None = None, period: float = 60) -> Agent:
    return Agent(sweeps, SweepReporter(registry), stop or queue.SimpleQueue(), period)


def kept(path: str, reason: KeepReason, detail: str = "") -> DirectoryOutcome:
    return DirectoryOutcome(path, Action.KEPT, Keep(reason, detail))


def test_a_sweep_sets_the_metrics(registry: CollectorRegistry) -> None:
    said = [
        kept("a", KeepReason.POD),
        kept("b", KeepReason.POD),
        kept("c", KeepReason.FOREIGN),
        kept("d", KeepReason.LINK),
        DirectoryOutcome("e", Action.WOULD_DELETE),
        DirectoryOutcome("f", Action.DELETED, freed=4096),
        DirectoryOutcome("g", Action.KEPT, Keep(KeepReason.ERROR), 512),
    ]
    agent_of(registry, Sweeps([(said, None)])).sweep()
    value = registry.get_sample_value
    assert value("vcuda_vm_directories_present") == 4
    assert value("vcuda_vm_directories_kept", {"reason": "pod"}) == 2
    assert value("vcuda_vm_directories_kept", {"reason": "link"}) == 1
    assert value("vcuda_vm_directories_kept", {"reason": "young"}) == 0
    assert value("vcuda_vm_directories_deleted_total") == 1
    assert value("vcuda_vm_freed_bytes_total") == 4608
    assert time.time() - (value("vcuda_vm_last_complete_sweep_timestamp_seconds") or 0) < 60


@cases(
    "result, name, healthy",
    complete=(None, "complete", True),
    blocked_so_a_restart_would_not_help=(UNKNOWN, "blocked", True),
    unfinished=(OutOfTime(), "unfinished", True),
    failed=(PermissionError(13, "Permission denied"), "failed", False),
)
def test_the_ends_of_sweeps_are_counted_and_five_periods_without_success_are_unhealthy(
    registry: CollectorRegistry, clock: list[float], result: Keep | BaseException | None, name: str, *, healthy: bool
) -> None:
    agent = agent_of(registry, Sweeps([([kept("a", KeepReason.POD)], result)]))
    clock[0] += MAX_MISSED_PERIODS * 60
    assert agent.unhealthy() is None
    clock[0] += 1
    assert agent.unhealthy() is not None
    agent.sweep()
    assert (agent.unhealthy() is None) == healthy
    value = registry.get_sample_value
    counts = {each: value("vcuda_vm_sweeps_total", {"result": each}) for each in RESULTS}
    assert counts == {**dict.fromkeys(RESULTS, 0.0), name: 1.0}
    assert value("vcuda_vm_directories_present") == (1 if name in ("complete", "blocked") else 0)
    assert (value("vcuda_vm_last_complete_sweep_timestamp_seconds") == 0) == (name != "complete")


def test_a_directory_that_cannot_be_deleted_is_logged_once_while_it_stays(
    registry: CollectorRegistry, logs: list[Any]
) -> None:
    link, busy = kept("a", KeepReason.LINK), kept("a", KeepReason.ERROR, "Device or resource busy")
    first = [link, kept("b", KeepReason.POD), kept("c", KeepReason.YOUNG)]
    script: Script = [(first, None), ([link], None), ([], UNKNOWN)]
    script += [(each, None) for each in ([link], [busy], [], [link])]
    agent = agent_of(registry, Sweeps([*script]))
    told = []
    for _ in script:
        logs.clear()
        agent.sweep()
        told.append([line["reason"] for line in logs if line["event"] == "kept"])
    assert told == [["link"], [], [], [], ["error"], [], ["link"]]


def test_every_deletion_is_logged(registry: CollectorRegistry, logs: list[Any]) -> None:
    agent = agent_of(registry, Sweeps([([DirectoryOutcome("a\x1b", Action.DELETED)], None)]))
    agent.sweep()
    agent.sweep()
    assert [(line["event"], line["directory"]) for line in logs] == [("deleted", r"a\x1b")] * 2


def test_only_some_of_countless_foreign_names_are_logged(registry: CollectorRegistry, logs: list[Any]) -> None:
    agent = agent_of(registry, Sweeps([([kept(str(number), KeepReason.FOREIGN) for number in range(3000)], None)]))
    agent.sweep()
    agent.sweep()
    assert len(logs) == MAX_LOGGED
    assert registry.get_sample_value("vcuda_vm_directories_kept", {"reason": "foreign-name"}) == 3000


def test_the_begin_and_the_end_of_a_standstill_are_logged(registry: CollectorRegistry, logs: list[Any]) -> None:
    agent = agent_of(registry, Sweeps([([], UNKNOWN), ([], UNKNOWN), ([], None), ([], None)]))
    for _ in range(4):
        agent.sweep()
    assert [line["event"] for line in logs] == ["no directory can be deleted", "directories can be deleted again"]


def test_an_internal_error_ends_the_agent(registry: CollectorRegistry) -> None:
    with pytest.raises(ZeroDivisionError):
        agent_of(registry, Sweeps([([], ZeroDivisionError())])).loop()


def test_a_sweep_is_signalled_when_the_agent_stops_and_when_its_period_is_over(
    registry: CollectorRegistry, clock: list[float]
) -> None:
    stop: Stop = queue.SimpleQueue()
    seen = []

    def sweep(_report: Report, give_up: Callable[[], bool], stopping: Callable[[], bool]) -> None:
        seen.append((give_up(), stopping()))
        clock[0] += 61
        seen.append((give_up(), stopping()))
        stop.put(None)
        seen.append((give_up(), stopping()))

    agent_of(registry, sweep, stop).loop()
    assert seen == [(False, False), (True, False), (True, True)]


def test_stopping_ends_the_wait_for_the_next_sweep(registry: CollectorRegistry) -> None:
    stop: Stop = queue.SimpleQueue()
    timer = threading.Timer(0.1, stop.put, [None])
    timer.start()
    agent_of(registry, Sweeps([([], None)]), stop, period=3600).loop()
    timer.join()


@cases(
    "result, ready",
    complete=(None, True),
    out_of_time_after_it_has_read_the_pods=(OutOfTime(), True),
    without_a_list_of_pods=(UNKNOWN, False),
    failed=(PermissionError(13, "Permission denied"), False),
)
def test_the_agent_is_ready_after_a_sweep_that_has_read_the_pods(
    registry: CollectorRegistry, result: Keep | BaseException | None, *, ready: bool
) -> None:
    agent = agent_of(registry, Sweeps([([], result), ([], UNKNOWN)]))
    agent.sweep()
    assert agent.ready == ready
    agent.sweep()
    assert agent.ready == ready, "the agent stays ready while the API server is away"


@cases("result, seconds", blocked=(UNKNOWN, 5.0), complete=(None, 60.0))
def test_a_sweep_that_could_delete_nothing_is_soon_repeated(
    registry: CollectorRegistry, result: Keep | None, seconds: float
) -> None:
    waits: list[float] = []

    class Queue:
        def empty(self) -> bool:
            return not waits

        def get(self, timeout: float) -> None:
            waits.append(timeout)

    stop: Any = Queue()
    agent_of(registry, Sweeps([([], result)]), stop).loop()
    assert waits == [seconds]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a-name_0", "a-name_0"), ("\x1b[2J", r"\x1b[2J"), ("a\nb", r"a\nb"), ("\udcff", r"\udcff"), ("日本", "日本")],
)
def test_names_are_shown_as_plain_text(text: str, expected: str) -> None:
    assert escaped(text) == expected
