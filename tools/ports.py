"""Free ports of this machine, reserved for the servers of this process."""

import socket

_RESERVED: list[socket.socket] = []


def free_ports(count: int) -> list[int]:
    """Reserve ``count`` ports until this process ends, for its servers only.

    This process binds each port and never listens on it. So the kernel gives the port to no outgoing connection and to
    no server that asks for any port, even while one of these servers restarts. SO_REUSEADDR is set after the bind: a
    server that names the port can bind it, but a second call of this function cannot.
    """
    reserved = [socket.socket() for _ in range(count)]
    for one in reserved:
        one.bind(("", 0))
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _RESERVED.extend(reserved)
    return [one.getsockname()[1] for one in reserved]
