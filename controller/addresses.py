"""Addresses to listen on, and to be reached at, as flags give them."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

from vcuda.errors import BadInput

_LAST_PORT = 65535


def parse_address(text: str) -> tuple[str, int]:
    """Return the host and the port of HOST:PORT; BadInput where it is none. An IPv6 host is best put in brackets."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        good = ":" in host and _can_be_host(host)
    else:
        good = _can_be_host(host)
    if not (colon and good and port.isascii() and port.isdigit() and int(port) <= _LAST_PORT):
        raise BadInput(f"{text!r} is not HOST:PORT.")
    return host, int(port)


def parse_ip_address(text: str) -> tuple[str, int]:
    """Return the host and the port of IP:PORT; BadInput where it is none, or where the address has a zone."""
    with contextlib.suppress(BadInput, ValueError):
        host, port = parse_address(text)
        address = ipaddress.ip_address(host)
        if "%" not in host:
            return str(address), port
    raise BadInput(f"{text!r} is not IP:PORT.")


def family_of(host: str) -> socket.AddressFamily:
    """Return the family to listen with."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _can_be_host(host: str) -> bool:
    """Return whether this is an IPv6 address, or may be another or a name; an empty one stands for all addresses."""
    with contextlib.suppress(ValueError):  # UnicodeError is one: no name
        if ":" in host:
            ipaddress.IPv6Address(host)
        else:
            host.encode("idna")
        return True
    return False
