"""Flags that are numbers: what is none is refused, wherever it is given."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from controller.cli import main as controller
from vcuda.cli import FiniteRange
from webhook.cli import main as webhook

NODE = ["node", "--scheme", "gpu-manager", "--node", "gpu-7"]


def options(command: click.Command) -> Iterator[click.Parameter]:
    """Every option of a command, and of those below it."""
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
@pytest.mark.parametrize("flag", ["--grace", "--trash-retention", "--disk-pressure", "--period"])
def test_a_number_that_is_none_is_bad_input(flag: str, number: str) -> None:
    result = CliRunner().invoke(controller, [*NODE, f"{flag}={number}"])
    assert (result.exit_code, f"Invalid value for '{flag}'" in result.stderr) == (2, True), result.output


def test_in_a_variable_too() -> None:
    result = CliRunner().invoke(controller, NODE, env={"VCUDA_GRACE": "nan"})
    assert (result.exit_code, "nan is no finite number." in result.stderr) == (2, True), result.output


@pytest.mark.parametrize(("number", "expected"), [("0", 0.0), ("1.5", 1.5), ("10", 10.0)])
def test_a_number_within_bounds(number: str, expected: float) -> None:
    assert FiniteRange(0, 10).convert(number, None, None) == expected
