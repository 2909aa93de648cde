"""Locks on nodes: how they are read, and when they are stale."""

from __future__ import annotations

import pytest

from tests.allocated import rfc3339
from vcuda.allocations.stale import ABSURD, Lock, find_stale_lock, read_locks
from vcuda.k8s_types import Node, ObjectMeta

LOCK = "hami.io/mutex.lock"
START = 1_700_000_000.0
TIMEOUT = 300.0
LATE = START + TIMEOUT
NOW = rfc3339(START)


def locks(value: str | None) -> list[Lock]:
    annotations = {"a/b": "c"} if value is None else {"a/b": "c", LOCK: value}
    return list(read_locks(Node(ObjectMeta(name="gpu-1", annotations=annotations))))


def rule(lock: Lock, now: float, *pods: tuple[str, str], seen: float = START) -> str | None:
    removal = find_stale_lock(lock, lock.expires(seen, now, TIMEOUT), now, lambda *holder: holder in pods)
    return removal.rule if removal else None


@pytest.mark.parametrize(
    ("value", "taken", "holder"),
    [
        pytest.param(NOW, START, None, id="before HAMi 2.5: the time alone"),
        pytest.param(f"{NOW},team-a,train-0", START, ("team-a", "train-0"), id="with its pod"),
        pytest.param("2023-11-15T06:13:20+08:00,team-a,train-0", START, ("team-a", "train-0"), id="another zone"),
        pytest.param(f"{NOW},team-a", START, None, id="half a pod"),
        pytest.param(f"{NOW},,", START, None, id="no pod"),
        pytest.param(f"{NOW},team-a,train-0,more", START, None, id="of a form that is not known"),
        pytest.param("soon,team-a,train-0", None, ("team-a", "train-0"), id="no time"),
        pytest.param("2023-11-14T22:13:20", None, None, id="a time without its zone"),
        pytest.param("", None, None, id="empty"),
    ],
)
def test_how_a_lock_is_read(value: str, taken: float | None, holder: tuple[str, str] | None) -> None:
    [lock] = locks(value)
    assert (lock.scheme.name, lock.value, lock.taken, lock.holder) == ("hami", value, taken, holder)


def test_a_node_without_one_is_not_locked() -> None:
    assert locks(None) == []
    assert list(read_locks(Node())) == []


def test_a_lock_is_stale_when_its_time_is_over_whoever_holds_it() -> None:
    [lock] = locks(f"{NOW},team-a,train-0")
    assert rule(lock, LATE - 1, ("team-a", "train-0")) is None
    assert rule(lock, LATE, ("team-a", "train-0")) == "lock-expired"


def test_a_lock_is_stale_as_soon_as_its_pod_is_gone() -> None:
    [lock] = locks(f"{NOW},team-a,train-0")
    assert rule(lock, START, ("team-a", "another")) == "lock-holder-gone"


def test_a_lock_that_names_no_pod_waits_for_its_time() -> None:
    [lock] = locks(NOW)
    assert rule(lock, LATE - 1) is None
    assert rule(lock, LATE) == "lock-expired"


@pytest.mark.parametrize("value", ["soon", rfc3339(START + 2 * ABSURD)], ids=["no time", "more than a day ahead"])
def test_a_lock_whose_time_cannot_be_is_stale_when_it_was_seen_for_long_enough(value: str) -> None:
    [lock] = locks(value)
    assert rule(lock, START + 99 + TIMEOUT, seen=START + 100) is None
    assert rule(lock, START + 100 + TIMEOUT, seen=START + 100) == "lock-expired"


@pytest.mark.parametrize("value", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"])
def test_the_ends_of_time_are_no_fault(value: str) -> None:
    [lock] = locks(value)
    assert rule(lock, START + TIMEOUT) == "lock-expired"


def test_what_is_removed_and_why() -> None:
    [lock] = locks(f"{NOW},team-a,train-0")
    expired = find_stale_lock(lock, LATE, LATE, lambda *_: True)
    gone = find_stale_lock(lock, LATE, START, lambda *_: False)
    assert expired
    assert gone
    assert expired.annotations == gone.annotations == (LOCK,)
    assert expired.why == f"never given back: {NOW},team-a,train-0"
    assert gone.why == "its pod team-a/train-0 does not exist"
