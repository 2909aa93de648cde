"""Runs commands of the kubectl plugin with a test double of the cluster."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner, Result

from controller.plugin.cli import main
from controller.plugin.explain import PROBE
from tests.api_double import ApiDouble
from tests.builders import Manifest
from vcuda.errors import ApiError, Conflict, VcudaError
from vcuda.kube import Heard
from vcuda.quota.well_known import USAGE_LABELS


class Cluster(ApiDouble):
    """A test double of a cluster with published usage reports. It admits every dry run unless ``rejection`` is set.

    ``rejections``: the rejections of dry runs, by the path of the collection. ``asked``: the dry runs with the real
    name of an object. ``probes``: the dry runs with an invalid name. ``webhook``: the webhook's rejection of probes.
    The API server checks a name only after the webhooks have answered.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rejection: VcudaError | None = None
        self.rejections: Mapping[str, VcudaError] = {}
        self.pinned_to: str | None = "M40"
        self.warnings: tuple[str, ...] = ()
        self.asked: list[tuple[str, object, Manifest]] = []
        self.probes: list[tuple[str, object, Manifest]] = []
        self.webhook: VcudaError | None = None
        self.home = "team-a"

    def namespace(self) -> str:
        return self.home

    def publish(self, namespace: str, *models: Mapping[str, Any], mode: str = "enforce", text: str = "") -> None:
        use = {"namespace": namespace, "mode": mode, "models": models}
        metadata = {"name": "gpu-quota-usage", "namespace": namespace, "labels": USAGE_LABELS}
        path = f"/api/v1/namespaces/{namespace}/configmaps/gpu-quota-usage"
        self.store(path, {"metadata": metadata, "data": {"usage.json": text or json.dumps(use)}})

    def list_objects(self, path: str, params: Mapping[str, str] | None = None) -> Iterator[Manifest]:
        for page in self.list_pages(path, params):
            yield from map(json.loads, map(bytes, page.items))

    def post_heard(self, path: str, body: bytes, params: object = None, timeout: float = 10) -> Heard:
        created = json.loads(body)
        is_probe = created["metadata"].get("name", "").startswith("_")
        (self.probes if is_probe else self.asked).append((path, params, created))
        if rejection := self.rejections.get(path) or self.rejection or (self.webhook if is_probe else None):
            raise rejection
        if is_probe:
            raise ApiError(
                422, f'Pod "{PROBE}" is invalid: metadata.name: Invalid value: "{PROBE}": a lowercase RFC 1123'
            )
        name = created["metadata"].get("name")
        if f"{path}/{name}" in self.objects:
            raise Conflict(409, f'"{name}" already exists')
        if self.pinned_to and created["kind"] == "Pod":
            created["metadata"]["annotations"] = {"quota.vcuda.io/model": self.pinned_to}
        return Heard(self.deliver("POST", timeout, lambda: json.dumps(created).encode()), self.warnings)


def run(*arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(main, arguments, **options)


def explain(manifest: Path, *documents: Manifest, output: str = "json") -> Result:
    manifest.write_text(yaml.safe_dump_all(documents))
    return run("-n", "team-a", "explain", "-f", str(manifest), "-o", output)
