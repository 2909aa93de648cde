"""Tests that an upgrade of the Helm chart neither deletes a namespace of the release nor lifts the limits.

Each test gives its release another name. The names of the namespaces begin with the name of the release. So all tests
can share one cluster.
"""

import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.e2e.cluster import Cluster
from tests.e2e.manifests.release import empty_cluster
from tests.helm import CHART, NEWEST, helm
from tests.rendered import Json
from tests.tables import cases

pytestmark = pytest.mark.one_version

PARTS = ("system", "ledgers", "nodeAgent")
PROGRAMS = ("helm", "helm3")
HELD: Json = {"finalizers": ["e2e.vcuda.io/held"]}
STAYS, EXAMPLE = "Your quota stays as it is.", "kubectl apply -f manifests/examples/gpuquota.yaml"
MISSING = "ConfigMap gpuquota in namespace {} does not exist"


@pytest.fixture(scope="module")
def cluster(assets: Path | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with empty_cluster(assets, tmp_path_factory.mktemp("upgrade")) as found:
        yield found


class Installed:
    """The objects of a release that its next upgrade looks up. The release uses the quota `gpuquota`.

    ``parts``: the namespaces of the release that exist; the others were lost.
    """

    def __init__(self, cluster: Cluster, name: str, parts: Iterable[str] = PARTS) -> None:
        self.cluster, self.name = cluster, name
        self.quotas = cluster.create_namespace(f"{name}-quotas")
        for part in parts:
            self.create_namespace(part)
        if "system" in parts:
            self._create_webhook()

    def of(self, part: str) -> str:
        return f"{self.name}-{part.lower()}"

    def create_namespace(self, part: str, release: str = "", part_of: str = "vcuda-quota", **metadata: object) -> str:
        labels = {"app.kubernetes.io/part-of": part_of}
        annotations = {"meta.helm.sh/release-name": release or self.name}
        described = {"name": self.of(part), "labels": labels, "annotations": annotations, **metadata}
        self.cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": described})
        return self.of(part)

    def _create_webhook(self) -> None:
        labels = {"app": "webhook"}
        container = {"name": "webhook", "image": "none", "args": [f"--quota-configmap={self.quotas}/gpuquota"]}
        spec = {
            "replicas": 0,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}},
        }
        metadata = {"name": "vcuda-webhook", "namespace": self.of("system")}
        self.cluster.create({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec})

    def create_quota(self, name: str) -> None:
        metadata = {"name": name, "namespace": self.quotas}
        self.cluster.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata})

    def rendered(
        self, *settings: str, program: str = "helm", chart: Path = CHART, upgrade: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Render the chart as an upgrade or an installation of the release, with the lookups of this cluster."""
        own = (f"quota.namespace={self.quotas}", *(f"namespaces.{part}={self.of(part)}" for part in PARTS))
        return helm(
            *("template", self.name, chart, "--namespace=kube-system", f"--kube-version={NEWEST}", "--dry-run=server"),
            *("--disable-openapi-validation", f"--kubeconfig={self.cluster.kubeconfig}"),
            *(["--is-upgrade"] if upgrade else []),
            *(f"--set={each}" for each in (*own, *settings)),
            name=program,
        )


@pytest.mark.parametrize("part", PARTS)
def test_an_upgrade_that_would_delete_a_namespace_of_the_release_is_rejected(cluster: Cluster, part: str) -> None:
    release = Installed(cluster, f"renamed-{part.lower()}")
    for program in PROGRAMS:
        done = release.rendered(f"namespaces.{part}=other", program=program)
        expected = f"release {release.name} has namespace {release.of(part)}, which the upgrade would delete"
        assert expected in done.stderr


@cases(
    "name, lost, settings",
    all_are_there=("whole", (), ()),
    one_is_lost=("one-lost", ("ledgers",), ()),
    all_are_lost=("all-lost", PARTS, ()),
    a_renamed_one_is_lost=("renamed-lost", PARTS, ("namespaces.ledgers=other",)),
)
def test_an_upgrade_that_deletes_no_namespace_of_the_release_is_rendered(
    cluster: Cluster, name: str, lost: Iterable[str], settings: Iterable[str]
) -> None:
    release = Installed(cluster, name, [part for part in PARTS if part not in lost])
    assert (done := release.rendered(*settings)).returncode == 0, done.stderr


def test_a_namespace_of_another_release_or_chart_and_a_terminating_one_do_not_stop_an_upgrade(
    cluster: Cluster,
) -> None:
    release = Installed(cluster, "beside")
    release.create_namespace("foreign", release="foreign")
    release.create_namespace("shop", part_of="shop")
    cluster.delete_namespace(release.create_namespace("older", **HELD))
    assert (done := release.rendered()).returncode == 0, done.stderr


def test_an_upgrade_to_a_missing_quota_is_rejected_while_another_quota_is_in_use(cluster: Cluster) -> None:
    release = Installed(cluster, "in-use")
    release.create_quota("gpuquota")
    for program in PROGRAMS:
        for setting, name, namespace in (
            ("quota.name=other", "other", release.quotas),
            ("quota.namespace=default", "gpuquota", "default"),
        ):
            done = release.rendered(setting, program=program)
            used = f"the quota {release.quotas}/gpuquota is in use"
            assert f"quota: ConfigMap {name} in namespace {namespace} does not exist, and {used}" in done.stderr


@cases(
    "name, lost, quotas, settings",
    the_other_quota_exists=("both", (), ("gpuquota", "other"), ("quota.name=other",)),
    no_quota_exists_yet=("none-yet", (), (), ("quota.name=other",)),
    the_quota_is_lost=("quota-lost", (), (), ()),
    the_webhook_is_lost=("webhook-lost", ("system",), ("gpuquota",), ("quota.name=other",)),
)
def test_an_upgrade_that_lifts_no_limit_is_rendered(
    cluster: Cluster, name: str, lost: Iterable[str], quotas: Iterable[str], settings: Iterable[str]
) -> None:
    release = Installed(cluster, name, [part for part in PARTS if part not in lost])
    for quota in quotas:
        release.create_quota(quota)
    assert (done := release.rendered(*settings)).returncode == 0, done.stderr


@cases(
    "name, exists, upgrade, told",
    an_upgrade_with_a_quota=("up-with", True, True, STAYS),
    an_upgrade_without_a_quota=("up-without", False, True, MISSING),
    an_installation_with_a_quota=("new-with", True, False, STAYS),
    an_installation_without_a_quota=("new-without", False, False, EXAMPLE),
)
def test_the_notes_say_that_the_quota_stays_only_if_it_exists(
    cluster: Cluster, tmp_path: Path, name: str, told: str, *, exists: bool, upgrade: bool
) -> None:
    release = Installed(cluster, name, PARTS if upgrade else ())
    if exists:
        release.create_quota("gpuquota")
    text = notes(tmp_path, release, upgrade=upgrade)
    sentences = (STAYS, MISSING.format(release.quotas), EXAMPLE)
    assert [each for each in sentences if each in text] == [told.format(release.quotas)]
    assert f"kubectl -n {release.of('system')} rollout status deployment/vcuda-webhook" in text


def notes(directory: Path, release: Installed, *, upgrade: bool) -> str:
    """Return the notes of a Helm command. `helm template` prints none, so the test puts them into an object."""
    templates = shutil.copytree(CHART, directory / "chart") / "templates"
    (templates / "_notes.tpl").write_text(
        f'{{{{ define "notes" }}}}{(templates / "NOTES.txt").read_text()}{{{{ end }}}}'
    )
    head = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "notes"}}
    (templates / "notes.yaml").write_text(
        f'{yaml.safe_dump(head)}data: {{text: {{{{ include "notes" . | toJson }}}}}}\n'
    )
    done = release.rendered(chart=templates.parent, upgrade=upgrade)
    assert done.returncode == 0, done.stderr
    objects = [each for each in yaml.safe_load_all(done.stdout) if each]
    [text] = [each["data"]["text"] for each in objects if each["metadata"] == head["metadata"]]
    return str(text)
