"""The sections of docs/reference.md with all commands and their flags, which are read from click's definitions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import click

from certs import cli as certs_cli
from controller import cli as controller_cli
from controller.plugin import cli as plugin
from tools.reference.markdown import code, listed, table
from webhook import cli as webhook_cli

PROGRAMS: dict[str, click.Command] = {
    "vcuda-webhook": webhook_cli.main,
    "vcuda-controller": controller_cli.main,
    "vcuda-certs": certs_cli.main,
    "kubectl gpuquota": plugin.main,
}
HEADING = ("flag", "environment", "default", "what")


class Leaf(NamedTuple):
    """A command of our programs, with its full name, for example ``vcuda-controller run``, and its click context."""

    name: str
    command: click.Command
    context: click.Context


def leaves() -> Iterator[Leaf]:
    """Yield every command of every program. Groups that only contain subcommands are left out."""
    for name, program in PROGRAMS.items():
        yield from _leaves(Leaf(name, program, click.Context(program, info_name=name, **program.context_settings)))


def _leaves(leaf: Leaf) -> Iterator[Leaf]:
    command = leaf.command
    if not isinstance(command, click.Group) or command.invoke_without_command:
        yield leaf
    if isinstance(command, click.Group):
        for name, child in command.commands.items():
            context = click.Context(child, parent=leaf.context, info_name=name, **child.context_settings)
            yield from _leaves(Leaf(f"{leaf.name} {name}", child, context))


def sections() -> str:
    """Return a section for each command: its purpose, and a table of its flags."""
    return "\n\n".join(map(_section, leaves()))


def _section(leaf: Leaf) -> str:
    rows = [_row(leaf.context, parameter) for parameter in leaf.command.get_params(leaf.context)]
    shown = [row for row in rows if row]
    return "\n\n".join([f"### {leaf.name}", _about(leaf.command), table(HEADING, shown)])


def _about(command: click.Command) -> str:
    """Return the first paragraph of the command's help, and its exit statuses."""
    paragraphs = [" ".join(part.split()) for part in (command.help or "").split("\n\n")]
    statuses = [text for text in paragraphs[1:] if text.startswith("Exit status:")]
    return "\n\n".join([paragraphs[0], *statuses])


def _row(context: click.Context, parameter: click.Parameter) -> tuple[str, str, str, str] | None:
    if isinstance(parameter, click.Argument):
        return code(parameter.make_metavar(context)), "", "", "Required." if parameter.required else ""
    if not isinstance(parameter, click.Option) or parameter.is_eager:
        return None  # The flag --help or --version.
    names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    value = "" if parameter.is_flag else f" {_value(context, parameter)}"
    return code(f"{names}{value}"), listed(variables(context, parameter)), _default(parameter), _what(parameter)


def _value(context: click.Context, option: click.Option) -> str:
    """Return the placeholder for the value of an option: NUMBER for a number, otherwise click's placeholder."""
    numbers = isinstance(option.type, click.types.IntParamType | click.types.FloatParamType)
    return "NUMBER" if numbers and option.metavar is None else option.make_metavar(context)


def variables(context: click.Context, option: click.Option) -> list[str]:
    """Return the environment variables by which click can set an option."""
    if option.envvar:
        return [option.envvar] if isinstance(option.envvar, str) else list(option.envvar)
    prefix = context.auto_envvar_prefix
    return [f"{prefix}_{option.name.upper()}"] if prefix and option.name and option.allow_from_autoenv else []


def _default(option: click.Option) -> str:
    """Return the default of an option as text; empty if the option has no default or is a flag."""
    value = option.to_info_dict()["default"]
    if option.required:
        return "required"
    if option.is_flag or option.multiple or not isinstance(value, str | int | float) or value == "":
        return ""
    return code(f"{value:g}" if isinstance(value, float) else str(value))


def _what(option: click.Option) -> str:
    bounds = option.type if isinstance(option.type, click.IntRange | click.FloatRange) else None
    limits = "" if bounds is None or (bounds.min is None and bounds.max is None) else f" {_bounds(bounds)}"
    return f"{option.help or ''}{limits}".strip().replace("[", "(").replace("]", ")")


def _bounds(bounds: click.IntRange | click.FloatRange) -> str:
    low = "" if bounds.min is None else f"from {bounds.min:g}"
    high = "" if bounds.max is None else f"to {bounds.max:g}"
    return f"({' '.join(filter(None, [low, high]))})"
