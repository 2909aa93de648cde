"""A port that a test reserves for a server stays its own. Otherwise a server fails to start, by chance."""

import errno
import socket

import pytest

from tools.ports import free_ports


def test_a_server_listens_on_a_reserved_port_again_and_again() -> None:
    [port] = free_ports(1)
    for _ in range(3):
        with (
            socket.create_server(("127.0.0.1", port)) as server,
            socket.create_connection(("127.0.0.1", port)),
        ):
            server.accept()[0].close()


def test_a_reserved_port_is_given_to_nobody_else() -> None:
    ports = free_ports(20)
    assert len({*ports, *free_ports(20)}) == 40
    with socket.socket() as other, pytest.raises(OSError, match="in use") as refused:
        other.bind(("127.0.0.1", ports[0]))
    assert refused.value.errno == errno.EADDRINUSE


def test_a_client_of_a_reserved_port_without_a_server_is_refused() -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", free_ports(1)[0]))
