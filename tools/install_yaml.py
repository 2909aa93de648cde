"""``python -m tools.install_yaml``: writes one file for ``kubectl apply -f``, with the base and any components."""

import json
import re
from pathlib import Path

import click
import yaml

from tools.chart.features import CHART, COMPONENTS, MANIFESTS, Json, fault_of, render
from tools.chart.names import Names, rename
from vcuda import cli

_OF_KUBERNETES = ("default", "kube-system", "kube-public", "kube-node-lease")

OURS = "vcuda-quota:"
"""In the manifests, the name of this project's own image begins with this text. No other image has such a name."""


def with_image(value: Json, image: str) -> Json:
    """Return a manifest in which ``image`` replaces the image of this project."""
    if isinstance(value, dict):
        return {
            key: image if key == "image" and str(each).startswith(OURS) else with_image(each, image)
            for key, each in value.items()
        }
    return [with_image(each, image) for each in value] if isinstance(value, list) else value


def write(
    image: str, components: tuple[str, ...], output: Path, manifests: Path = MANIFESTS, names: Names | None = None
) -> int:
    """Write all manifests into the file ``output``. Return the number of objects in this file."""
    rendered = render(*components, manifests=manifests).values()
    objects = [with_image(rename(found, names or Names()), image) for found in rendered]
    output.write_text(yaml.safe_dump_all(objects, sort_keys=False, width=10**6), encoding="utf-8")
    return len(objects)


def _fault_of_names(names: Names) -> str:
    """Return why an installation cannot have these names, or an empty text. The chart has the same rules."""
    own = {
        "--system-namespace": names.system,
        "--ledger-namespace": names.ledgers,
        "--node-namespace": names.node_agent,
    }
    if len({*own.values()}) < len(own):
        return "--system-namespace, --ledger-namespace and --node-namespace must differ"
    if names.quota_namespace == names.ledgers:
        return "--quota-configmap must not be in the namespace of the ledgers, which must contain only ledgers"
    for option, name in own.items():
        if name in _OF_KUBERNETES:
            return f"{option} must not be a namespace of Kubernetes; got {name}"
    schemas = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))["$defs"]
    for option, name in {**own, "--quota-configmap": names.quota_namespace}.items():
        if fault := _fault_of_name(name, schemas["namespace"]):
            return f"{option}: {fault}"
    return f"--quota-configmap: {fault}" if (fault := _fault_of_name(names.quota, schemas["configMap"])) else ""


def _fault_of_name(name: str, schema: Json) -> str:
    if re.search(schema["pattern"], name) and name not in schema["not"]["enum"]:
        return ""
    return f"must be a name that YAML reads as text and that matches {schema['pattern']}; got {name}"


@click.command()
@click.option("--image", required=True, metavar="IMAGE", help="The image, for example REGISTRY/vcuda-quota:0.1.0.")
@click.option(
    *("--component", "components"),
    type=click.Choice(sorted(COMPONENTS)),
    multiple=True,
    help="A component (directory of manifests/components) to add; repeatable.",
)
@click.option("--system-namespace", default=Names().system, help="Namespace of the webhook and the controller.")
@cli.ledger_namespace_option
@cli.node_namespace_option
@cli.quota_configmap_option
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), required=True, help="The file to write.")
def main(
    *,
    image: str,
    components: tuple[str, ...],
    system_namespace: str,
    ledger_namespace: str,
    node_namespace: str,
    quota_configmap: tuple[str, str],
    output: Path,
) -> None:
    """Write one file with all manifests of an installation."""
    names = Names(system_namespace, ledger_namespace, node_namespace, *quota_configmap)
    if fault := fault_of(components) or _fault_of_names(names):
        raise click.UsageError(fault)
    output.parent.mkdir(parents=True, exist_ok=True)
    number = write(image, components, output, names=names)
    click.echo(f"{output}: {number} objects with image {image}")


if __name__ == "__main__":
    main()
