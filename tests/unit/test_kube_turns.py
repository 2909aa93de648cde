"""Tests that a tenant with large objects cannot delay LISTs of other tenants' namespaces."""

import asyncio
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.api_double import ApiDouble, Effect
from tests.builders import ONE_CARD, stored_pod
from tests.replicas import POD, Clock, Gate, Replica
from tests.waiting import PATIENT
from vcuda.errors import ListOverdue, Unavailable
from vcuda.kube import turns
from vcuda.kube.turns import QUICK_SECONDS as QUICK, REST_PER_SECOND, SLOW_FOR_SECONDS, SLOW_SECONDS as SLOW, ListTurns
from vcuda.ledger.ledger import Admitted
from webhook.ledger.charging import PutOff, RetryLater


@pytest.fixture(autouse=True)
def few_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "MAX_QUICK", 2)
    monkeypatch.setattr(turns, "MAX_SLOW", 1)


class Lists:
    """Makes LISTs that take some seconds on the test's clock. The tested `ListTurns` decides when each LIST begins."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.turns = ListTurns(self.clock.monotonic)
        self.made: list[tuple[str, float]] = []

    def make(self, namespace: str, takes: float) -> str:
        def listed(seconds: float) -> str:
            self.made.append((namespace, seconds))
            self.clock.pass_by(min(takes, seconds))
            if takes > seconds:
                raise ListOverdue(f"LIST of {namespace}")
            return f"{namespace} in {takes:g} s"

        return self.turns.run(namespace, listed, patience=0.0)


@pytest.fixture
def lists() -> Lists:
    return Lists()


def test_a_slow_list_is_repeated_with_more_time_which_the_next_one_has_from_the_start(lists: Lists) -> None:
    assert lists.make("large", 5) == lists.make("large", 5) == "large in 5 s"
    assert lists.make("small", 1) == "small in 1 s"
    assert lists.made == [("large", QUICK), ("large", SLOW), ("large", SLOW), ("small", QUICK)]


def test_a_namespace_counts_as_slow_until_a_quick_list_or_for_ten_minutes(lists: Lists) -> None:
    lists.make("large", 5)
    lists.make("large", 0.5)
    lists.make("large", 1.5)
    lists.make("other", 5)
    lists.clock.pass_by(SLOW_FOR_SECONDS)
    lists.make("other", 1)
    assert [each for each in lists.made if each[1] == QUICK] == [
        ("large", QUICK),
        ("large", QUICK),
        ("other", QUICK),
        ("other", QUICK),
    ]


def test_a_namespace_that_cannot_be_listed_in_time_rests_and_the_error_says_why(lists: Lists) -> None:
    why = r"namespace huge are too many or too large.*next attempt is made in 32 s"
    with pytest.raises(ListOverdue, match=why):
        lists.make("huge", 100)
    began = len(lists.made)
    with pytest.raises(ListOverdue, match=why):
        lists.make("huge", 100)
    assert len(lists.made) == began
    lists.clock.pass_by(SLOW * REST_PER_SECOND)
    assert lists.make("huge", 7) == "huge in 7 s"


def test_any_other_error_is_raised_and_frees_the_turn(lists: Lists) -> None:
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            lists.turns.run("team-a", lambda _: 1 / 0, patience=0.0)
    assert lists.make("team-a", 1)


def test_slow_namespaces_are_remembered_within_a_bound(lists: Lists, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "MAX_REMEMBERED", 3)
    for number in range(5):
        lists.make(f"large-{number}", 5)
    lists.made.clear()
    lists.make("large-4", 5)
    assert lists.made == [("large-4", SLOW)]


class Held:
    """LISTs of namespaces that run in threads until the test ends them."""

    def __init__(self, made: ListTurns) -> None:
        self.turns = made
        self.end = threading.Event()
        self.begun = threading.Semaphore(0)
        self.at_once = self.most = 0
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(16)

    def begin(self, namespace: str, patience: float = PATIENT) -> Future[None]:
        return self._threads.submit(self.turns.run, namespace, self._list, patience)

    def _list(self, _seconds: float) -> None:
        with self._lock:
            self.at_once += 1
            self.most = max(self.most, self.at_once)
        self.begun.release()
        assert self.end.wait(PATIENT)
        with self._lock:
            self.at_once -= 1


def test_slow_namespaces_delay_only_each_other() -> None:
    lists = Lists()
    made, held = lists.turns, Held(lists.turns)
    large = [f"large-{number}" for number in range(8)]
    for namespace in large:
        lists.make(namespace, takes=5)
    listing = [held.begin(namespace) for namespace in large]
    assert held.begun.acquire(timeout=PATIENT)
    assert made.run("small", lambda seconds: seconds, patience=0.0) == QUICK
    with pytest.raises(ListOverdue, match="too many other LISTs are running"):
        held.begin("large-0", patience=0.0).result(PATIENT)
    held.end.set()
    for each in listing:
        each.result(PATIENT)
    assert held.most == 1


def test_no_more_lists_are_made_at_once_than_there_are_turns() -> None:
    held = Held(ListTurns())
    listing = [held.begin(f"team-{number}") for number in range(6)]
    for _ in range(2):
        assert held.begun.acquire(timeout=PATIENT)
    held.end.set()
    for each in listing:
        each.result(PATIENT)
    assert held.most == 2


# Tests of a webhook replica when the LISTs of some namespaces take too long


class Uncountable:
    """An API server whose LISTs of pods time out in every namespace whose name begins with large."""

    def __init__(self, api: ApiDouble) -> None:
        self.lists: list[str] = []
        self._listed = api.list_pages
        api.list_pages = self._list  # type: ignore[method-assign, assignment]

    def _list(self, path: str, *args: object, **fields: object) -> object:
        self.lists.append(path)
        if "/large" in path:
            raise ListOverdue(f"LIST {path} took longer than 8 s")
        return self._listed(path, *args, **fields)  # type: ignore[arg-type]


@pytest.fixture
def uncountable(api: ApiDouble) -> Uncountable:
    return Uncountable(api)


def test_a_pod_of_a_namespace_that_cannot_be_counted_gets_the_reason_and_delays_no_other(
    replica: Replica, uncountable: Uncountable
) -> None:
    decision = replica.charge("a", namespace="large")
    assert isinstance(decision, RetryLater)
    again = replica.charge("b", namespace="large")
    assert isinstance(again, RetryLater)
    for reason in (decision.reason, again.reason):
        assert "too large to be listed within 8 s" in reason
    assert len(uncountable.lists) == 2, "expected the quick and the slow LIST, and none while the namespace rests"
    assert isinstance(replica.charge("a"), Admitted)


def test_the_usage_of_a_namespace_that_cannot_be_counted_is_the_last_known_one(
    replica: Replica, uncountable: Uncountable
) -> None:
    assert replica.usage("large") == {}
    assert uncountable.lists


def test_a_pod_over_quota_may_be_retried_while_its_namespace_cannot_be_counted(api: ApiDouble, clock: Clock) -> None:
    replica = Replica(api, clock)
    for number in range(4):
        assert isinstance(replica.charge(f"a{number}"), Admitted)
    api.list_pages = _overdue  # type: ignore[method-assign, assignment]
    decision = replica.charge("one-more", deadline=clock.now + PATIENT)
    assert isinstance(decision, PutOff)
    assert not decision.counted


def _overdue(*_: object, **__: object) -> object:
    raise ListOverdue


def test_a_read_of_a_usage_ends_in_the_time_of_its_caller(api: ApiDouble, replica: Replica) -> None:
    gate = Gate(api)
    with pytest.raises(Unavailable, match="could not be read within 0 s"):
        asyncio.run(overtaken(replica, gate))
    assert replica.usage() == {}


async def overtaken(replica: Replica, gate: Gate) -> None:
    try:
        await replica.ledgers.usage("team-a", None, 0)
    finally:
        gate.opened.set()


def test_many_readers_of_one_namespaces_usage_share_its_reads(api: ApiDouble, replica: Replica) -> None:
    """Without a usable ledger, each read needs a LIST. Unless reads were shared, dry runs could use up the threads."""
    api.store(POD, stored_pod(ONE_CARD))
    reading, opened = threading.Event(), threading.Event()

    def hold(_method: str, _timeout: float, effect: Effect) -> bytes:
        reading.set()
        assert opened.wait(PATIENT)
        return effect()

    async def many() -> list[object]:
        api.deliver = hold
        callers = [asyncio.create_task(replica.ledgers.usage("team-a")) for _ in range(50)]
        assert await asyncio.to_thread(reading.wait, PATIENT)
        opened.set()
        return list(await asyncio.gather(*callers))

    usages = asyncio.run(many())
    assert len({str(usage) for usage in usages}) == 1
    assert api.calls.count("LIST") <= 4, "expected two reads, each with a LIST of pods and a LIST of claims"
