"""Addresses to listen on: of either family; what is none is refused."""

from __future__ import annotations

import pytest

from vcuda.cli import parse_address
from vcuda.errors import BadInput


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.0.0.0:8080", ("0.0.0.0", 8080)),  # noqa: S104  # nothing listens
        ("[::1]:8080", ("::1", 8080)),
        ("[::]:0", ("::", 0)),
        ("::1:8080", ("::1", 8080)),
        ("gpu-7.example.com:65535", ("gpu-7.example.com", 65535)),
        ("gpu_7:1", ("gpu_7", 1)),
        (":8080", ("", 8080)),
    ],
)
def test_addresses(text: str, expected: tuple[str, int]) -> None:
    assert parse_address(text) == expected


PORTS = ["", "http", "99999", "65536", "²", "٣", "-1", " 1"]
HOSTS = ["[::1", "[]", "[here]", "[::g]", "a:b", "[[::1]]", "a..b", "a" * 64]


@pytest.mark.parametrize(
    "text", ["", "here", "8080", "::1", *(f"here:{port}" for port in PORTS), *(f"{host}:1" for host in HOSTS)]
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(BadInput, match="is not HOST:PORT"):
        parse_address(text)
