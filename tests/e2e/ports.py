"""Free TCP ports of 127.0.0.1."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack

# Below Linux's ephemeral ports (32768-60999): while a server is down for a restart, no outgoing connection can be given
# its port, nor can a client that polls the port connect to itself.
CANDIDATES = range(20000, 32768)


def free_ports(count: int) -> list[int]:
    """``count`` different ports on which nothing listens just now."""
    ports: list[int] = []
    with ExitStack() as held:
        for port in random.SystemRandom().sample(CANDIDATES, len(CANDIDATES)):
            if len(ports) == count:
                break
            listener = held.enter_context(socket.socket())
            if binds(listener, port):
                ports.append(port)
    return ports


def binds(listener: socket.socket, port: int) -> bool:
    """Whether ``listener`` could be bound to ``port``."""
    try:
        listener.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True
