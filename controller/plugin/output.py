"""The common flags of the commands of ``kubectl gpuquota``, and the output in each format."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import yaml

from controller.plugin.kubectl import Kubectl
from vcuda import cli
from vcuda.quota.well_known import NAMESPACE_RULE, is_namespace_name

WIDE = "wide"
OUTPUTS = click.Choice(["table", WIDE, "json", "yaml"])
output_option = click.option(
    "-o", "--output", type=OUTPUTS, help="Output format. Also allowed before the command.  [default: table]"
)


@dataclass(frozen=True, slots=True)
class Target:
    """The flags before the subcommand of ``kubectl gpuquota``. ``named``: the value of --namespace, or None."""

    kubeconfig: Path | None
    context: str | None
    named: str | None
    output: str

    def namespace(self, named: str | None = None) -> str:
        """Return the namespace that the command is about. If the name is invalid, exit with status 2.

        The name is ``named`` if given, else the flag --namespace, else the namespace in the kubeconfig's context.
        """
        namespace = named or self.named or self.connect().namespace()
        if not is_namespace_name(namespace):
            cli.fail(f"{namespace!r} is not a valid namespace: {NAMESPACE_RULE}")
        return namespace

    def connect(self) -> Kubectl:
        """Return an API client that runs kubectl. Raises BadInput if kubectl is not installed."""
        return Kubectl.find(self.kubeconfig, self.context)


def warn(text: str) -> None:
    click.echo(f"Warning: {cli.escaped(text)}", err=True)


def show(values: Any, output: str, *table: tuple[str, ...]) -> None:
    plain = [*map(asdict, values)] if isinstance(values, list | tuple) else asdict(values)
    if output == "json":
        click.echo(json.dumps(plain, indent=2))
    elif output == "yaml":
        click.echo(yaml.safe_dump(plain, sort_keys=False), nl=False)
    else:
        click.echo("\n".join(cli.aligned([tuple(map(cli.escaped, row)) for row in table])))
