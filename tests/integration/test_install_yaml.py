"""Tests of the single file of manifests. It has the chart's objects with chosen names, and rejects the same input."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.charted import KUSTOMIZED_SCHEDULER, charted, objects, rejection, setting_of, unlike, whole_chart
from tests.rendered import Json, images
from tests.tables import cases
from tools import install_yaml
from tools.chart.features import COMPONENTS, render
from tools.chart.names import Names

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

OTHER_NAMES = Names("gpu-parts", "gpu-books", "gpu-agents", "gpu-limits", "cards")
"""Names of namespaces and of the quota ConfigMap that differ from the names in the manifests."""
NAMED = (
    f"namespaces.system={OTHER_NAMES.system}",
    f"namespaces.ledgers={OTHER_NAMES.ledgers}",
    f"namespaces.nodeAgent={OTHER_NAMES.node_agent}",
    f"quota.namespace={OTHER_NAMES.quota_namespace}",
    f"quota.name={OTHER_NAMES.quota}",
)
OF_OTHERS = re.compile(
    r"^vcuda-quota:|^vcuda-quota(-apiserver| CA)$|=vcuda-quota-apiserver$|\"uid\": \"vcuda-quota\""
    r"|^vcuda-quota(-dashboard|-viewer|-node-critical-pods|-critical-pods)$|\.name\('vcuda-quota'\)"
    r"|the controller of vcuda-quota: |ValidatingWebhookConfiguration vcuda-quota;|kubectl gpuquota"
)
"""Texts that contain ``vcuda-quota`` but name no namespace. They are the same in every installation."""
NAME_KEYS = {"name", "resourceNames", "app.kubernetes.io/part-of"}
"""Keys of mappings under which the text ``vcuda-quota`` names an object that is not a namespace."""


def texts(value: Json | list[Json] | str, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, each in value.items():
            yield from texts(each, name)
    elif isinstance(value, list):
        for each in value:
            yield from texts(each, key)
    elif isinstance(value, str):
        yield key, value


def old_names(found: Sequence[Json]) -> list[tuple[str, str]]:
    others = [each for manifest in found if manifest["kind"] != "Namespace" for each in texts(manifest)]
    named = [
        (key, text) for key, text in others if not (key in NAME_KEYS and text in ("vcuda-quota", "00-vcuda-quota"))
    ]
    spaces = [("Namespace", each["metadata"]["name"]) for each in found if each["kind"] == "Namespace"]
    return [
        (key, text) for key, text in (*named, *spaces) if re.search("vcuda-quota|gpuquota", OF_OTHERS.sub("", text))
    ]


@pytest.mark.parametrize("excluded", ["hami", "scheduler"])
def test_no_manifest_has_an_old_namespace_if_others_are_named(excluded: str, tmp_path: Path) -> None:
    fork = "node-agent-nvidia-vcuda"
    components = [name for name in COMPONENTS if name not in (excluded, fork)]
    install_yaml.write("vcuda-quota:0.1.0", tuple(components), tmp_path / "install.yaml", names=OTHER_NAMES)
    chart = whole_chart(*NAMED, KUSTOMIZED_SCHEDULER, *map(setting_of, components))
    for found in (chart, objects((tmp_path / "install.yaml").read_text())):
        assert old_names([*found.values()]) == []
    assert old_names([*render(*components).values()])


def test_one_file_has_the_same_objects_as_the_chart_if_namespaces_are_named(tmp_path: Path) -> None:
    file = tmp_path / "install.yaml"
    install_yaml.write("vcuda-quota:0.1.0", ("prometheus",), file, names=OTHER_NAMES)
    assert unlike(objects(file.read_text()), charted(*NAMED, "prometheus.enabled=true")) == {}


@cases(
    "settings, arguments",
    two_agents_for_one_directory=(
        ("nodeAgent.gpuManager=true", "nodeAgent.nvidiaVcuda=true"),
        ("--component=node-agent-gpu-manager", "--component=node-agent-nvidia-vcuda"),
    ),
    two_schedulers=(
        ("hami.enabled=true", "scheduler.enabled=true"),
        ("--component=hami", "--component=scheduler"),
    ),
    no_certificates=(("clientCertificates.required=true",), ("--component=require-client-certificate",)),
    one_namespace_for_two_parts=(("namespaces.ledgers=vcuda-quota",), ("--ledger-namespace=vcuda-quota",)),
    the_quota_among_the_ledgers=(
        ("quota.namespace=vcuda-quota-ledgers",),
        ("--quota-configmap=vcuda-quota-ledgers/gpuquota",),
    ),
    a_namespace_of_kubernetes=(("namespaces.system=kube-system",), ("--system-namespace=kube-system",)),
    an_impossible_name=(("namespaces.nodeAgent=Gpu_1",), ("--node-namespace=Gpu_1",)),
    a_name_that_is_a_number=(("namespaces.system=no",), ("--system-namespace=no",)),
    an_impossible_name_of_the_quota=(("quota.name=Gpu_1",), ("--quota-configmap=kube-system/Gpu_1",)),
)
def test_one_file_is_rejected_where_the_chart_rejects_its_values(
    settings: tuple[str, ...], arguments: tuple[str, ...], tmp_path: Path
) -> None:
    assert rejection(*settings)
    file = tmp_path / "install.yaml"
    done = CliRunner().invoke(install_yaml.main, ["--image=vcuda-quota:0.1.0", *arguments, f"--output={file}"])
    assert (done.exit_code, file.exists()) == (2, False), done.output
    assert arguments[-1].partition("=")[0].replace("--component", "the component") in done.output


def test_one_file_has_the_same_objects_with_the_image_that_was_named(tmp_path: Path) -> None:
    image, file = "registry.example/vcuda-quota:1.2.3", tmp_path / "install.yaml"
    arguments = [f"--image={image}", "--component=hami", "--component=prometheus", f"--output={file}"]
    assert CliRunner().invoke(install_yaml.main, arguments).exit_code == 0
    written = objects(file.read_text())
    assert set(images([*written.values()]).values()) == {image}
    plain = objects(file.read_text().replace(image, "vcuda-quota:0.1.0"))
    assert unlike(plain, render("hami", "prometheus")) == {}
    assert next(iter(written)).kind == "Namespace"
