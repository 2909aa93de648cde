"""Whoever waits too long goes, and where there are too many, whoever is missed least."""

from __future__ import annotations

from dataclasses import dataclass

from webhook.waiting import KEEP_ALIVE, PATIENCE, Room, Stage

API_SERVER_KEEPS = 90
"""Seconds; http.Transport's IdleConnTimeout in client-go."""


@dataclass(eq=False)
class Client:
    """A connection that waits."""

    stage: Stage
    deadline: float = 0.0


def room_of(*clients: Client) -> Room[Client]:
    room: Room[Client] = Room()
    for client in clients:
        room.enter(client)
    return room


def test_an_idle_connection_outlasts_the_api_servers_own_patience_with_it() -> None:
    """It must be the API server that closes: a call on a connection that is being closed would fail."""
    assert min(PATIENCE[Stage.FIRST], PATIENCE[Stage.NEXT], KEEP_ALIVE) > API_SERVER_KEEPS


def test_those_whose_time_is_over_are_found_in_every_stage() -> None:
    late = [Client(stage, 1.0) for stage in PATIENCE]
    room = room_of(*late, *(Client(stage, 3.0) for stage in PATIENCE))
    found = []
    for client in room.expired(2.0):
        room.leave(client)
        found.append(client)
    assert set(found) == set(late)


def test_where_there_are_too_many_the_oldest_of_the_greatest_crowd_goes() -> None:
    """A flood of one kind closes itself: whoever floods cannot choose to have others closed."""
    used, flood = Client(Stage.NEXT), [Client(Stage.HELLO) for _ in range(3)]
    assert room_of(used, *flood).most_spare() is flood[0]


def test_among_connections_that_are_used_the_one_not_used_for_longest_goes() -> None:
    first, second = Client(Stage.NEXT), Client(Stage.NEXT)
    room = room_of(first, second)
    room.leave(first)
    room.enter(first)
    assert room.most_spare() is second


def test_an_empty_room_has_nobody_to_spare() -> None:
    assert room_of().most_spare() is None
    assert room_of().oldest(Stage.REQUEST) is None


def test_who_has_left_is_not_there_whatever_its_stage() -> None:
    client = Client(Stage.NEXT)
    room = room_of(client)
    assert client in room
    room.leave(client)
    client.stage = Stage.REQUEST
    assert client not in room
