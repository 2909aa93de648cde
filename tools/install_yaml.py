"""``python -m tools.install_yaml``: writes one file with the base and any components, for ``kubectl apply -f``."""

from pathlib import Path

import click
import yaml

from tools.chart.features import COMPONENTS, MANIFESTS, Json, render

OURS = "vcuda-quota:"
"""The beginning of our image's name in the manifests."""


def with_image(value: Json, image: str) -> Json:
    """Return a manifest in which our image is replaced by this image."""
    if isinstance(value, dict):
        return {
            key: image if key == "image" and str(each).startswith(OURS) else with_image(each, image)
            for key, each in value.items()
        }
    return [with_image(each, image) for each in value] if isinstance(value, list) else value


def write(image: str, components: tuple[str, ...], output: Path, manifests: Path = MANIFESTS) -> int:
    """Write the file. Return the number of objects in it."""
    objects = [with_image(found, image) for found in render(*components, manifests=manifests).values()]
    output.write_text(yaml.safe_dump_all(objects, sort_keys=False, width=10**6), encoding="utf-8")
    return len(objects)


@click.command()
@click.option("--image", required=True, metavar="IMAGE", help="The image, for example REGISTRY/vcuda-quota:0.1.0.")
@click.option(
    *("--component", "components"),
    type=click.Choice(sorted(COMPONENTS)),
    multiple=True,
    help="A directory of manifests/components to add. Give it once for each.",
)
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), required=True, help="The file to write.")
def main(image: str, components: tuple[str, ...], output: Path) -> None:
    """Write one file with everything that an installation needs."""
    output.parent.mkdir(parents=True, exist_ok=True)
    number = write(image, components, output)
    click.echo(f"{output}: {number} objects with image {image}")


if __name__ == "__main__":
    main()
