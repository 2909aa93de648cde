"""Tests of the node agent's loop: the times of its sweeps, its log, and its health."""

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
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
    Wakeup,
)
from controller.garbage.node.fs import OutOfTime
from controller.garbage.node.names import Keep, KeepReason, MustStay
from controller.garbage.node.pods import validate_listing
from tests.tables import cases
from vcuda.cli import printable

UNKNOWN = Keep(KeepReason.PODS_UNKNOWN, "no list")
RESULTS = ("complete", "blocked", "unfinished", "failed")

Script = list[tuple[list[DirectoryOutcome], Keep | BaseException | None]]


@dataclass
class Sweeps:
    """Replaces the function that sweeps. Each call plays the next entry of ``script``, and the last one is repeated."""

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
    """Replace the monotonic clock of the node agent's loop. Return a list whose only element is the time in seconds."""
    now = [1000.0]
    monkeypatch.setattr("controller.garbage.node.agent.time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    return now


def agent_of(registry: CollectorRegistry, sweeps: Run, wakeup: Wakeup | None = None) -> Agent:
    return Agent(sweeps, SweepReporter(registry), wakeup or Wakeup())


def kept(path: str, reason: KeepReason, detail: str = "") -> DirectoryOutcome:
    return DirectoryOutcome(path, Action.KEPT, Keep(reason, detail))


def test_a_sweep_sets_the_metrics(registry: CollectorRegistry) -> None:
    said = [
        kept("a", KeepReason.POD),
        kept("b", KeepReason.POD),
        kept("c", KeepReason.FOREIGN),
        kept("d", KeepReason.LINK),
        kept(".trash/e", KeepReason.RETAINED),
        DirectoryOutcome("f", Action.MOVED),
        DirectoryOutcome(".trash/g", Action.DELETED, freed=4096),
        DirectoryOutcome(".trash/h", Action.KEPT, Keep(KeepReason.ERROR), 512),
    ]
    agent_of(registry, Sweeps([(said, None)])).sweep()
    value = registry.get_sample_value
    assert value("vcuda_vm_directories_present") == 2
    assert value("vcuda_vm_directories_kept", {"reason": "pod"}) == 2
    assert value("vcuda_vm_directories_kept", {"reason": "link"}) == 1
    assert value("vcuda_vm_directories_kept", {"reason": "young"}) == 0
    assert value("vcuda_vm_trash_directories") == 2
    assert value("vcuda_vm_directories_removed_total") == 1
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


def test_a_directory_that_cannot_be_removed_is_logged_once_while_it_stays(
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


def test_every_removal_is_logged(registry: CollectorRegistry, logs: list[Any]) -> None:
    agent = agent_of(registry, Sweeps([([DirectoryOutcome("a\x1b", Action.MOVED)], None)]))
    agent.sweep()
    agent.sweep()
    assert [(line["event"], line["directory"]) for line in logs] == [("moved", r"a\x1b")] * 2


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
    assert [line["event"] for line in logs] == ["no directory can be removed", "directories can be removed again"]


def test_an_internal_error_ends_the_agent(registry: CollectorRegistry) -> None:
    with pytest.raises(ZeroDivisionError):
        agent_of(registry, Sweeps([([], ZeroDivisionError())])).loop()


def test_a_sweep_is_signalled_when_the_agent_stops_and_when_its_period_is_over(
    registry: CollectorRegistry, clock: list[float]
) -> None:
    wakeup = Wakeup()
    seen = []

    def sweep(_report: Report, give_up: Callable[[], bool], stopping: Callable[[], bool]) -> None:
        seen.append((give_up(), stopping()))
        clock[0] += 61
        seen.append((give_up(), stopping()))
        wakeup.stop()
        seen.append((give_up(), stopping()))

    agent_of(registry, sweep, wakeup).loop()
    assert seen == [(False, False), (True, False), (True, True)]


def waited(wakeup: Wakeup, period: float, spacing: float) -> float:
    began = time.monotonic()
    wakeup.wait(period, spacing)
    return time.monotonic() - began


def test_the_agent_sweeps_every_period() -> None:
    assert waited(Wakeup(), 0.2, 5) >= 0.2


def test_many_ended_pods_trigger_one_sweep_after_the_spacing() -> None:
    wakeup = Wakeup()
    for _ in range(1000):
        wakeup.wake()
    assert waited(wakeup, 60, 0.2) >= 0.2
    assert waited(wakeup, 0.3, 0.1) >= 0.3, "no wake-up may be left over"


def test_stopping_ends_any_wait(registry: CollectorRegistry) -> None:
    wakeup = Wakeup()

    def stopped(*_: object) -> None:
        wakeup.wake()
        wakeup.stop()

    agent_of(registry, stopped, wakeup).loop()


@pytest.mark.parametrize(
    ("own_uid", "uids", "believed"),
    [("own", "own other", True), ("own", "other", False), ("own", "", False), (None, "other", True), (None, "", False)],
)
def test_a_list_of_pods_is_used_only_if_it_contains_the_agents_own_pod(
    own_uid: str | None, uids: str, *, believed: bool
) -> None:
    with nullcontext() if believed else pytest.raises(MustStay):
        assert validate_listing(frozenset(uids.split()), own_uid) == set(uids.split())


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a-name_0", "a-name_0"), ("\x1b[2J", r"\x1b[2J"), ("a\nb", r"a\nb"), ("\udcff", r"\udcff"), ("日本", "日本")],
)
def test_names_are_shown_as_plain_text(text: str, expected: str) -> None:
    assert printable(text) == expected
