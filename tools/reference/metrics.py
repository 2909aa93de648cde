"""The tables of all metrics in docs/reference.md.

The metrics are read from our programs, which are constructed for this purpose but not started.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from controller.cli import run
from controller.extender.service import Listening
from controller.garbage.node.agent import SweepMetrics
from controller.manager import Leader, RunOptions
from controller.metrics import register_leading
from tools.reference.markdown import code, listed, table
from tools.reference.sources import strings
from vcuda.kube import Kube, end_process
from vcuda.tls import ServingCertificate, serving_files, write_files
from vcuda.x509 import DEVELOPMENT, make_authority, make_leaf
from webhook.cli import serve
from webhook.review.context import ClusterPolicy
from webhook.server.server import ServeOptions, cluster_service, export_load

_NAME = re.compile(r"vcuda_[a-z0-9_]+")
_NOWHERE = """{apiVersion: v1, kind: Config, current-context: none, users: [{name: none, user: {}}],
  clusters: [{name: none, cluster: {server: "http://127.0.0.1:9"}}],
  contexts: [{name: none, context: {cluster: none, user: none}}]}"""


class Family(NamedTuple):
    """A metric. ``name`` is without the suffixes of a histogram's samples, for example without ``_bucket``."""

    name: str
    type: str
    labels: tuple[str, ...]
    help: str


def families() -> dict[str, tuple[Family, ...]]:
    """Return the metrics of each program. Each key has the program's command and the address of its metrics."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        now = datetime.now(UTC)
        authority = make_authority(now)
        write_files(directory, serving_files(authority, make_leaf(authority, DEVELOPMENT, now)))
        certificate = ServingCertificate(directory)
        kubeconfig = directory / "kubeconfig"
        kubeconfig.write_text(_NOWHERE)
        leader = _of(_leader(kubeconfig, None))
        extender = _of(_leader(kubeconfig, Listening(("127.0.0.1", 0), certificate)))
        return {
            "vcuda-webhook serve, at /metrics of its TLS port": _of(_webhook(kubeconfig, certificate)),
            "vcuda-controller run, at /metrics of --status-address": leader,
            "The same with --extender-address": tuple(each for each in extender if each not in leader),
            "vcuda-controller node, at /metrics of --status-address": _of(_node()),
        }


def in_the_source() -> set[str]:
    """Return the names of all metrics in the product's source code."""
    return {text for _, text in strings() if _NAME.fullmatch(text)}


def sections() -> str:
    return "\n\n".join(f"### {part}\n\n{_table(found)}" for part, found in families().items())


def _table(found: tuple[Family, ...]) -> str:
    rows = [(code(each.name), each.type, listed(each.labels), each.help) for each in found]
    return table(("metric", "type", "labels", "what"), rows)


def _webhook(kubeconfig: Path, certificate: ServingCertificate) -> CollectorRegistry:
    options = serve.make_context("serve", ["--kubeconfig", str(kubeconfig)]).params
    with mock.patch.object(ClusterPolicy, "start"):  # Without this mock, the service would start to watch a cluster.
        service = cluster_service(ServeOptions(**options), end_process, certificate)
    export_load(service, mock.Mock(connections=0, shed=0, overdue=0, client_expiry=0))
    return service.metrics.registry


def _leader(kubeconfig: Path, listening: Listening | None) -> CollectorRegistry:
    registry = CollectorRegistry()
    kube = Kube.connect(kubeconfig)
    options = RunOptions(**run.make_context("run", []).params)
    Leader(kube, options, registry, on_fault=lambda: None, listening=listening)
    register_leading(registry, lambda: True)
    return registry


def _node() -> CollectorRegistry:
    registry = CollectorRegistry()
    SweepMetrics(registry)
    return registry


def _of(registry: CollectorRegistry) -> tuple[Family, ...]:
    collectors = dict.fromkeys(
        registry._collector_to_names
    )  # prometheus-client has no public list of a registry's collectors.
    return tuple(sorted(family for collector in collectors for family in _families_of(collector)))


def _families_of(collector: Collector) -> Iterator[Family]:
    """Yield the metrics of a collector. The names of their labels are only in a private attribute."""
    holder: Any
    for metric in collector.collect():
        holder = collector if isinstance(collector, MetricWrapperBase) else metric
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        yield Family(name, metric.type, tuple(holder._labelnames), metric.documentation)
