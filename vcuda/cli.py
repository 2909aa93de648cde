"""What all commands share: types of flags that click has none for, HOST:PORT addresses, tables for a terminal."""

from __future__ import annotations

import contextlib
import ipaddress
import math
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import click

from vcuda.errors import BadInput


class FiniteRange(click.FloatRange):
    """A number within bounds. Not nan, which click takes to lie within any, and not infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number; click.BadParameter where it is none."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number.", param, ctx)
        return number


def aligned(cells: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yield lines with the columns aligned; the last one runs free."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


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
