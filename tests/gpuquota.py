"""The kubectl plugin as people run it, and a cluster that answers it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner, Result

from controller.plugin import main
from controller.publisher import LABELS
from tests.api_double import ApiDouble
from tests.builders import Manifest
from vcuda.errors import VcudaError
from vcuda.kube import Heard


class Cluster(ApiDouble):
    """A cluster with published reports, that would admit every pod unless ``refusal`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.refusal: VcudaError | None = None
        self.pinned_to: str | None = "M40"
        self.warnings: tuple[str, ...] = ()
        self.asked: list[tuple[str, object, Manifest]] = []

    def publish(self, namespace: str, *models: Mapping[str, Any], mode: str = "enforce", text: str = "") -> None:
        use = {"namespace": namespace, "mode": mode, "models": models}
        metadata = {"name": "gpu-quota-usage", "namespace": namespace, "labels": LABELS}
        path = f"/api/v1/namespaces/{namespace}/configmaps/gpu-quota-usage"
        self.store(path, {"metadata": metadata, "data": {"usage.json": text or json.dumps(use)}})

    def post_heard(self, path: str, body: bytes, params: object = None, timeout: float = 10) -> Heard:
        """Answer a dry run."""
        pod = json.loads(body)
        self.asked.append((path, params, pod))
        if self.refusal:
            raise self.refusal
        if self.pinned_to:
            pod["metadata"]["annotations"] = {"quota.vcuda.io/model": self.pinned_to}
        return Heard(self.deliver("POST", timeout, lambda: json.dumps(pod).encode()), self.warnings)


def run(*arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(main, arguments, **options)


def explain(manifest: Path, *documents: Manifest, output: str = "json") -> Result:
    manifest.write_text(yaml.safe_dump_all(documents))
    return run("-n", "team-a", "explain", "-f", str(manifest), "-o", output)
