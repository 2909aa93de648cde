"""Tests of the webhook's cache of existing namespaces. Its size is bounded, and each namespace expires."""

import asyncio
from unittest import mock

import pytest

from tests.api_double import ApiDouble
from tests.replicas import Clock, Replica, asked
from vcuda.errors import BadReview, NotFound, Unavailable
from vcuda.ledger.ledger import Admitted
from vcuda.quota.model import Charge, Limit, NamespaceQuota
from webhook.caches import IDLE_SECONDS, MAX_KNOWN_NAMESPACES, NamespaceCache, RecentChoices
from webhook.ledger.charging import TOO_MANY_NAMESPACES, ChargeRequest
from webhook.ledger.ledgers import ClusterLedgers, MemoryLedgers
from webhook.review import namespaces
from webhook.review.namespaces import FOUND_SECONDS, MISSING_SECONDS, ExistingNamespaces


def of_cards(namespace: str) -> ChargeRequest:
    return ChargeRequest(namespace, "uid", "M40", Charge(100), NamespaceQuota({"M40": Limit(800)}), 5.0)


@pytest.fixture
def cluster() -> mock.Mock:
    """A client of a cluster in which only namespace team-a exists."""

    def get(path: str, timeout: float) -> bytes:
        assert timeout
        if path != "/api/v1/namespaces/team-a":
            raise NotFound(404, f"namespaces not found: {path}")
        return b"{}"

    return mock.Mock(get=mock.Mock(side_effect=get))


@pytest.fixture
def ledgers(api: ApiDouble, cluster: mock.Mock) -> ClusterLedgers:
    found = Replica(api).ledgers
    found.check_namespace = ExistingNamespaces(cluster).check
    return found


def ask(existing: ExistingNamespaces, namespace: str) -> None:
    asyncio.run(existing.check(namespace))


def test_a_namespace_that_does_not_exist_is_rejected_and_gets_no_ledger(
    ledgers: ClusterLedgers, api: ApiDouble
) -> None:
    for call in (ledgers.charge(asked("uid", namespace="invented")), ledgers.cached_usage("invented")):
        with pytest.raises(BadReview, match="namespace invented does not exist"):
            asyncio.run(call)
    assert api.calls == []
    assert asyncio.run(ledgers.cached_usage("team-a")) == {}
    assert isinstance(asyncio.run(ledgers.charge(asked("uid"))), Admitted)


def test_an_edit_may_add_a_quota_before_the_namespace_exists(ledgers: ClusterLedgers) -> None:
    assert asyncio.run(ledgers.usage("to-come")) == {}


def test_a_namespace_is_looked_up_once_a_minute_and_sooner_if_it_may_be_new(cluster: mock.Mock, clock: Clock) -> None:
    existing = ExistingNamespaces(cluster, clock.monotonic)
    for _ in range(3):
        ask(existing, "team-a")
    assert cluster.get.call_count == 1
    clock.now += FOUND_SECONDS
    ask(existing, "team-a")
    assert cluster.get.call_count == 2
    cluster.get.side_effect = NotFound(404, "gone")
    for seconds, calls in ((FOUND_SECONDS, 3), (0.0, 3), (MISSING_SECONDS, 4)):
        clock.now += seconds
        with pytest.raises(BadReview):
            ask(existing, "team-a")
        assert cluster.get.call_count == calls


def test_without_the_api_server_nothing_is_admitted(cluster: mock.Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.get.side_effect = Unavailable("no answer")
    with pytest.raises(Unavailable):
        ask(ExistingNamespaces(cluster), "team-a")
    monkeypatch.setattr(namespaces, "LOOK_UP_TIMEOUT_SECONDS", 0.0)
    with pytest.raises(Unavailable, match="too many namespaces are being looked up"):
        ask(ExistingNamespaces(mock.Mock()), "team-a")


def test_the_least_recently_used_namespace_is_forgotten_at_the_bound_and_all_when_idle(clock: Clock) -> None:
    kept = NamespaceCache(lambda namespace: [namespace], clock.monotonic)
    first, second = kept["0"], kept["1"]
    for number in range(2, MAX_KNOWN_NAMESPACES):
        assert kept[str(number)]
    assert kept["0"] is first
    assert kept["one more"]
    assert (len(kept.values()), kept["0"] is first, kept["1"] is second) == (MAX_KNOWN_NAMESPACES, True, False)
    clock.now += IDLE_SECONDS + 1
    assert kept["0"] is not first
    assert len(kept.values()) == 1


def test_the_number_of_namespaces_with_choices_is_bounded() -> None:
    choices = RecentChoices(clock=lambda: 0.0)
    for number in range(MAX_KNOWN_NAMESPACES + 1):
        choices.add(f"team-{number}", "M40", Charge(100))
    assert choices.on_top_of({}, "team-0") == {}, "a forgotten choice may only influence later choices"
    assert choices.on_top_of({}, "team-9")


def test_the_number_of_ledgers_in_memory_is_bounded_and_none_is_evicted() -> None:
    ledgers = MemoryLedgers()

    async def charge() -> None:
        for number in range(MAX_KNOWN_NAMESPACES):
            await ledgers.charge(of_cards(f"team-{number}"))
        assert await ledgers.charge(of_cards("one-more")) is TOO_MANY_NAMESPACES
        assert await ledgers.usage("team-0")

    asyncio.run(charge())


def test_a_burst_in_one_namespace_looks_it_up_once(cluster: mock.Mock) -> None:
    async def burst() -> None:
        existing = ExistingNamespaces(cluster)
        await asyncio.gather(*(existing.check("team-a") for _ in range(20)))

    asyncio.run(burst())
    assert cluster.get.call_count == 1
