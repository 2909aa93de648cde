"""CustomResourceDefinitions of other projects, read from the Go modules of these projects."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import yaml

from tests.e2e.cluster import Cluster, Json

KARPENTER = "sigs.k8s.io/karpenter@v1.14.0"
KUBERAY = "github.com/ray-project/kuberay/ray-operator@v1.6.0"
TRAINING_OPERATOR = "github.com/kubeflow/training-operator@v1.9.3"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


def definitions_in(directories: Mapping[str, str], wanted: Callable[[Json], bool] = bool) -> list[Json]:
    """Return the ``wanted`` definitions in a directory of each Go module. Without Go, skip the test."""
    program = shutil.which("go")
    if program is None:
        pytest.skip("no go on PATH, which downloads the schemas")
    found = []
    for module, directory in directories.items():
        done = subprocess.run(
            (program, "mod", "download", "-json", module),
            env={**os.environ, "GOFLAGS": "-mod=mod"},
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        for file in sorted((Path(json.loads(done.stdout)["Dir"]) / directory).glob("*.yaml")):
            documents = yaml.safe_load_all(file.read_text())
            found += [
                each for each in documents if each and each["kind"] == "CustomResourceDefinition" and wanted(each)
            ]
    return found


@contextmanager
def serving(cluster: Cluster, definitions: Sequence[Json]) -> Iterator[set[str]]:
    with ExitStack() as stack:
        for each in definitions:
            cluster.rest.send("POST", DEFINITIONS, each).ok()
            stack.callback(cluster.delete, f"{DEFINITIONS}/{each['metadata']['name']}")
        for each in definitions:
            cluster.kubectl("wait", "--for=condition=Established", f"crd/{each['metadata']['name']}", "--timeout=30s")
        yield {each["spec"]["names"]["kind"] for each in definitions}
