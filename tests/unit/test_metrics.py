"""Tests of the metrics of the webhook and of the controller: what they count, and the bound on their labels."""

import functools
from http import HTTPStatus
from pathlib import Path

import pytest
import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from controller.discover.metrics import ModelNodesCollector
from tools.reference.metrics import families
from vcuda import __version__
from vcuda.admission_review import AdmissionResponse
from vcuda.kube.metrics import register_build
from vcuda.placement.affinity import NodeLabels
from vcuda.placement.nodes import Nodes
from vcuda.quota.model import Quota
from vcuda.requests.config import parse_config
from webhook import metrics
from webhook.admission import Gate, Service
from webhook.ledger.ledgers import MemoryLedgers
from webhook.metrics import OTHERS, Metrics
from webhook.server.app import Application, Callers

REJECTED = AdmissionResponse("over-quota", False, HTTPStatus.FORBIDDEN)


def rejections(found: Metrics) -> dict[tuple[str, str], float]:
    samples = [each for family in found.registry.collect() for each in family.samples]
    return {
        (each.labels["namespace"], each.labels["reason"]): each.value
        for each in samples
        if each.name == "vcuda_rejections_total"
    }


@pytest.mark.parametrize("protected", [True, False])
def test_rejected_creates_are_counted_by_reason_and_by_namespace_if_not_everybody_reads_the_metrics(
    *, protected: bool
) -> None:
    """Every pod can connect to the webhook's port, but must not learn the names of other namespaces."""
    found = Metrics()
    service = Service(lambda: None, MemoryLedgers(), found, Gate(), structlog.get_logger())
    Application(service, Callers(Path("ca.crt"), None, protected))
    for path, namespace, answer in (
        ("/mutate", "team-a", REJECTED),
        ("/validate", "team-a", REJECTED),
        ("/validate", "team-b", AdmissionResponse("malformed", False, HTTPStatus.UNPROCESSABLE_ENTITY)),
        ("/validate", "team-b", AdmissionResponse("charged")),
        ("/quota", "kube-system", AdmissionResponse("probed", False, HTTPStatus.FORBIDDEN)),
    ):
        found.observe(path, answer, 0.1, namespace)
    a, b = ("team-a", "team-b") if protected else (OTHERS, OTHERS)
    assert rejections(found) == {(a, "over-quota"): 2, (b, "malformed"): 1}


def test_namespaces_with_rejections_are_counted_separately_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MAX_REJECTIONS", 2)
    found = Metrics()
    found.rejections.named = True
    for namespace in ("a", "x" * 64, "b", "c", "a"):
        found.observe("/validate", REJECTED, 0.1, namespace)
    assert rejections(found) == {("a", "over-quota"): 2, (OTHERS, "over-quota"): 3}


def samples(family: Metric) -> dict[str, float]:
    return {each.labels["model"]: each.value for each in family.samples}


def test_the_cards_of_each_model_and_the_models_of_the_quota_without_nodes_are_exported() -> None:
    label = NodeLabels().model
    nodes = Nodes.of({"one": {label: "A100"}, "two": {label: "A100"}, "three": {label: "T4"}}, NodeLabels())
    quota: Quota | None = parse_config({"gpu_quota": "team-a: {quota: {A100: 8, A1O0: 2}}"}, "gpu_quota").quota
    counted = functools.partial(ModelNodesCollector, lambda: ({}, {}), lambda: {"A100": 12, "T4": None}, lambda: nodes)
    _, _, cards, limited = counted(lambda: quota).collect()
    assert samples(cards) == {"A100": 12}
    assert samples(limited) == {"A100": 2, "A1O0": 0}
    *_, limited = counted(lambda: None).collect()
    assert samples(limited) == {}


def test_every_program_exports_its_version() -> None:
    programs = [found for name, found in families().items() if not name.startswith("The same")]
    assert len(programs) == 3
    for found in programs:
        assert "vcuda_build_info" in {family.name for family in found}
    registry = CollectorRegistry()
    register_build(registry)
    assert registry.get_sample_value("vcuda_build_info", {"version": __version__}) == 1
