"""Reserves free ports of this machine for servers that this process starts."""

import socket

_RESERVED: list[socket.socket] = []


def free_ports(count: int) -> list[int]:
    """Reserve ``count`` ports for servers of this process. The ports stay reserved until this process ends.

    This process binds each port but does not listen on it. So the kernel does not use the port for outgoing connections
    or for servers that bind port 0, even while one of our servers restarts. SO_REUSEADDR is set only after the bind. So
    a server can bind the port by its number, but a second call of this function cannot return this port again.
    """
    reserved = [socket.socket() for _ in range(count)]
    for one in reserved:
        one.bind(("", 0))
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _RESERVED.extend(reserved)
    return [one.getsockname()[1] for one in reserved]
