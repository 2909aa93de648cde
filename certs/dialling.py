"""Dials endpoints and reads the leaf that they show, without trusting it and without sending them anything."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from cryptography import x509

from certs.state import Endpoint

TIMEOUT = 5.0
"""Seconds for the connection, and again for the handshake."""

AT_ONCE = 16


def dial_all(addresses: Iterable[tuple[str, bool]], server_name: str, timeout: float = TIMEOUT) -> tuple[Endpoint, ...]:
    """Dial every (HOST:PORT, ready), in parallel; the answers are in their order."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return tuple(pool.map(lambda one: dial(one[0], server_name, ready=one[1], timeout=timeout), addresses))


def dial(address: str, server_name: str, *, ready: bool = True, timeout: float = TIMEOUT) -> Endpoint:
    """Return what HOST:PORT shows a client that asks for ``server_name``, or why it shows nothing."""
    host, _, port = address.rpartition(":")
    try:
        with (
            socket.create_connection((host.strip("[]"), int(port)), timeout) as plain,
            _asking().wrap_socket(plain, server_hostname=server_name) as connection,
        ):
            shown = connection.getpeercert(binary_form=True) or b""
        return Endpoint(address, ready, x509.load_der_x509_certificate(shown))
    except (OSError, ValueError, OverflowError, x509.InvalidVersion) as error:
        return Endpoint(address, ready, None, f"cannot be asked: {error}")


def _asking() -> ssl.SSLContext:
    """A client that wants to see the certificate, whatever it is; nothing is sent to who shows it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
