"""Tests of the addresses at which our programs listen, and of numeric flags."""

from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from controller.cli import main as controller
from vcuda.cli import FiniteRange, split_address
from vcuda.errors import BadInput
from webhook.cli import main as webhook


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.0.0.0:8080", ("0.0.0.0", 8080)),  # noqa: S104  # nothing listens on this address
        ("[::1]:8080", ("::1", 8080)),
        ("[::]:0", ("::", 0)),
        ("::1:8080", ("::1", 8080)),
        ("gpu-7.example.com:65535", ("gpu-7.example.com", 65535)),
        ("gpu_7:1", ("gpu_7", 1)),
        (":8080", ("", 8080)),
    ],
)
def test_an_address_is_a_host_and_a_port(text: str, expected: tuple[str, int]) -> None:
    assert split_address(text) == expected


PORTS = ["", "http", "99999", "65536", "²", "٣", "-1", " 1"]
HOSTS = ["[::1", "[]", "[here]", "[::g]", "a:b", "[[::1]]", "a..b", "a" * 64]


@pytest.mark.parametrize(
    "text", ["", "here", "8080", "::1", *(f"here:{port}" for port in PORTS), *(f"{host}:1" for host in HOSTS)]
)
def test_an_invalid_address_is_bad_input(text: str) -> None:
    with pytest.raises(BadInput, match="must be HOST:PORT"):
        split_address(text)


NODE = ["node", "--scheme", "gpu-manager", "--node", "gpu-7"]


def options(command: click.Command) -> Iterator[click.Parameter]:
    yield from command.params
    if isinstance(command, click.Group):
        for below in command.commands.values():
            yield from options(below)


@pytest.mark.parametrize("program", [controller, webhook], ids=["vcuda-controller", "vcuda-webhook"])
def test_every_flag_that_is_a_fraction_is_finite(program: click.Command) -> None:
    fractions = [option for option in options(program) if isinstance(option.type, click.types.FloatParamType)]
    assert fractions
    assert [option.name for option in fractions if not isinstance(option.type, FiniteRange)] == []


@pytest.mark.parametrize("number", ["nan", "NaN", "-nan", "inf", "-inf", "1e999"])
def test_an_invalid_number_is_bad_input(number: str) -> None:
    result = CliRunner().invoke(controller, [*NODE, f"--grace={number}"])
    assert (result.exit_code, "Invalid value for '--grace'" in result.stderr) == (2, True), result.output


@pytest.mark.parametrize(("number", "expected"), [("0", 0.0), ("1.5", 1.5), ("10", 10.0)])
def test_a_number_within_its_bounds_is_accepted(number: str, expected: float) -> None:
    assert FiniteRange(0, 10).convert(number, None, None) == expected
