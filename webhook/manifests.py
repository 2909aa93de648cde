"""Reads the files that the command line names: a quota document, nodes, manifests."""

from __future__ import annotations

from pathlib import Path

import click
import yaml

from vcuda.errors import BadInput
from vcuda.k8s_types import Node
from vcuda.placement.affinity import NodeLabels
from vcuda.placement.placement import Nodes
from vcuda.quota.document import parse_quota
from vcuda.quota.model import Quota
from vcuda.workloads import NOT_YAML, Workload, convert, objects_in, workloads_in


def read_quota(path: Path) -> Quota:
    """Return the quota in a file: the document itself, or the ConfigMap that holds it under ``gpu_quota``.

    Raises:
        BadInput: the file cannot be read, or has faults (QuotaFault, with all of them).

    """
    text = _read(path)
    try:
        documents = list(yaml.safe_load_all(text))
    except NOT_YAML:
        documents = []  # the parser below says what is wrong, and where
    if len(documents) == 1 and isinstance(documents[0], dict) and documents[0].get("kind") == "ConfigMap":
        data = documents[0].get("data") or {}
        if "gpu_quota" not in data:
            raise BadInput(f"{path}: the ConfigMap has no key gpu_quota")
        text = str(data["gpu_quota"])
    return parse_quota(text)


def read_nodes(path: Path, labels: NodeLabels) -> Nodes:
    """Return the nodes in a file, as ``kubectl get nodes -o yaml`` prints them.

    Raises:
        BadInput: the file cannot be read or holds something else.

    """
    found = {}
    for where, manifest in objects_in(str(path), _read(path)):
        if manifest.get("kind") != "Node":
            raise BadInput(f"{where}: expected a Node, not {manifest.get('kind')}")
        node = convert(where, manifest, Node)
        found[node.metadata.name] = node.labels
    return Nodes.of(found, labels)


def read_workloads(paths: list[Path], namespace: str) -> list[Workload]:
    """Return every object that makes pods, in order; ``namespace`` is for those that name none.

    Raises:
        BadInput: a file cannot be read, or an object in it makes no pods or a malformed one.

    """
    return [workload for path in paths for workload in workloads_in(str(path), _read(path), namespace)]


def _read(path: Path) -> str:
    try:
        with click.open_file(str(path), encoding="utf-8") as file:
            return str(file.read())
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read: {error}") from error
