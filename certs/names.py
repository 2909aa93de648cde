"""The names a serving certificate is valid for: DNS names and IP addresses, checked before anything is signed."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address

Address = IPv4Address | IPv6Address

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_LONGEST_NAME = 253  # characters, RFC 1123 section 2.1 and RFC 1035 section 2.3.4


@dataclass(frozen=True, slots=True)
class Names:
    """DNS names in lower case and IP addresses, in the order given; at least one is needed to make a leaf."""

    dns: tuple[str, ...] = ()
    addresses: tuple[Address, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.dns or self.addresses)

    def __add__(self, other: Names) -> Names:
        """Both, each name once, where it came first."""
        return Names(
            tuple(dict.fromkeys(self.dns + other.dns)),
            tuple(dict.fromkeys(self.addresses + other.addresses)),
        )

    def __str__(self) -> str:
        return ", ".join([*self.dns, *map(str, self.addresses)])


DEVELOPMENT = Names(("localhost",), (IPv4Address("127.0.0.1"), IPv6Address("::1")))


def parse_dns_name(text: str) -> str:
    """Return the DNS name in lower case; one leading ``*.`` is allowed.

    Raises ValueError with a sentence that says what to write instead.
    """
    name = text.lower()
    if _is_address(name):
        raise ValueError(f"{text!r} is an IP address: give it with --ip")
    labels = name.removeprefix("*.").split(".")
    if len(name) > _LONGEST_NAME or not all(map(_LABEL.fullmatch, labels)):
        raise ValueError(
            f"{text!r} is not a DNS name: write labels of letters, digits and '-' joined by '.', without a dot at"
            f" the end, at most {_LONGEST_NAME} characters, other alphabets in their xn-- form"
        )
    return name


def parse_address(text: str) -> Address:
    """Return the IPv4 or IPv6 address; raises ValueError for anything else, a zone (``%eth0``) included."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not an IP address: write one such as 127.0.0.1 or ::1") from error
    if isinstance(address, IPv6Address) and address.scope_id is not None:
        raise ValueError(f"{text!r}: a certificate cannot hold a zone, write the address without %{address.scope_id}")
    return address


def parse_label(text: str) -> str:
    """Return the name of a Service or a namespace, which is one DNS label; raises ValueError otherwise."""
    if not _LABEL.fullmatch(text):
        raise ValueError(f"{text!r} is not a name of 1 to 63 lower-case letters, digits and '-'")
    return text


def service_names(service: str, namespace: str) -> Names:
    """Every DNS name under which a cluster reaches a Service, the shortest first.

    The API server dials a webhook's Service as ``name.namespace.svc``.
    """
    parts = (service, namespace, "svc", "cluster.local")
    return Names(tuple(".".join(parts[:count]) for count in range(1, len(parts) + 1)))


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
