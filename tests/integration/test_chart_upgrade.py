"""Tests that an upgrade of the Helm chart looks up the objects of the cluster, and neither deletes a namespace of the
system nor lifts the limits."""

import functools
import json
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from tests.charted import whole_chart
from tests.helm import CHART, NEWEST, helm
from tests.rendered import Json
from tests.tables import cases

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROGRAMS = ("helm", "helm3")
PARTS = ("vcuda-quota", "vcuda-quota-ledgers", "vcuda-quota-node")


@functools.cache
def kinds() -> frozenset[tuple[str, str, bool]]:
    """Return the apiVersion and kind of each object of the chart, and of each lookup. True if it has a namespace."""
    found = {(each["apiVersion"], each["kind"], "namespace" in each["metadata"]) for each in whole_chart().values()}
    return frozenset({*found, ("v1", "ConfigMap", True)})


def base(version: str) -> str:
    return f"/apis/{version}" if "/" in version else f"/api/{version}"


def plural(kind: str) -> str:
    return re.sub("y$", "ie", kind.lower()) + "s"


def namespace(name: str, release: str = "vcuda-quota", part_of: str = "vcuda-quota", **metadata: object) -> Json:
    labels, annotations = {"app.kubernetes.io/part-of": part_of}, {"meta.helm.sh/release-name": release}
    metadata = {"name": name, "labels": labels, "annotations": annotations, **metadata}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}


def quota(name: str, namespace: str = "kube-system") -> Json:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": namespace}}


KUBE_SYSTEM = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "kube-system"}}
INSTALLED = (
    KUBE_SYSTEM,
    *map(namespace, PARTS),
    {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "vcuda-webhook", "namespace": "vcuda-quota"},
        "spec": {
            "template": {
                "spec": {"containers": [{"args": ["vcuda-webhook", "serve", "--quota-configmap=kube-system/gpuquota"]}]}
            }
        },
    },
)
"""A release with the default names, and no quota yet."""


def answers(found: Iterable[Json]) -> dict[str, object]:
    """Return an API server's answer for each path: the kinds that it serves, the objects, and all namespaces."""
    objects: dict[str, object] = {}
    for each in found:
        metadata = each["metadata"]
        place = f"/namespaces/{metadata['namespace']}" if "namespace" in metadata else ""
        objects[f"{base(each['apiVersion'])}{place}/{plural(each['kind'])}/{metadata['name']}"] = each
    listed = [each for each in found if each["kind"] == "Namespace"]
    served: dict[str, list[Json]] = {}
    for version, kind, namespaced in kinds():
        resource = {"name": plural(kind), "kind": kind, "namespaced": namespaced, "verbs": ["get", "list"]}
        served.setdefault(version, []).append(resource)
    groups = [
        {
            "name": version.partition("/")[0],
            "versions": [{"groupVersion": version, "version": version.partition("/")[2]}],
        }
        for version in served
        if "/" in version
    ]
    return {
        **objects,
        "/api/v1/namespaces": {"apiVersion": "v1", "kind": "NamespaceList", "items": listed},
        **{
            base(version): {"kind": "APIResourceList", "groupVersion": version, "resources": resources}
            for version, resources in served.items()
        },
        "/version": {"major": "1", "minor": "37", "gitVersion": f"v{NEWEST}"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "groups": groups},
    }


@contextmanager
def serving(stored: Mapping[str, object]) -> Iterator[str]:
    """Serve the answers, and yield the URL. kmock cannot serve a list of namespaces."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = stored.get(self.path.partition("?")[0])
            body = json.dumps(found or {"kind": "Status", "status": "Failure", "reason": "NotFound"}).encode()
            self.send_response(HTTPStatus.OK if found else HTTPStatus.NOT_FOUND)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log nothing, because no test reads this server's log."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server, ThreadPoolExecutor(1) as pool:
        pool.submit(server.serve_forever)
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def rendered(
    found: Iterable[Json], *settings: str, chart: Path = CHART, name: str = "helm", upgrade: bool = True
) -> subprocess.CompletedProcess[str]:
    """Render the chart as an upgrade or an installation in a cluster that has the objects ``found``."""
    options = ["--is-upgrade"] if upgrade else []
    with serving(answers([*found])) as url:
        return helm(
            "template",
            "vcuda-quota",
            chart,
            "--namespace=kube-system",
            f"--kube-version={NEWEST}",
            "--dry-run=server",
            "--disable-openapi-validation",
            f"--kube-apiserver={url}",
            *options,
            *(f"--set={each}" for each in settings),
            name=name,
        )


@cases(
    "key, name",
    system=("system", "vcuda-quota"),
    ledgers=("ledgers", "vcuda-quota-ledgers"),
    node_agents=("nodeAgent", "vcuda-quota-node"),
)
def test_an_upgrade_that_would_delete_a_namespace_of_the_release_is_rejected(key: str, name: str) -> None:
    for program in PROGRAMS:
        done = rendered(INSTALLED, f"namespaces.{key}=other", name=program)
        assert f"release vcuda-quota has namespace {name}, which the upgrade would delete" in done.stderr


@cases(
    "found, settings",
    all_are_there=(INSTALLED, ()),
    one_is_lost=([each for each in INSTALLED if each["metadata"]["name"] != "vcuda-quota-ledgers"], ()),
    all_are_lost=([KUBE_SYSTEM], ()),
    a_renamed_one_is_lost=([KUBE_SYSTEM], ("namespaces.ledgers=other",)),
    one_of_an_uninstalled_release_is_terminating=(
        [*INSTALLED, namespace("older", deletionTimestamp="2026-01-01T00:00:00Z")],
        (),
    ),
    one_belongs_to_another_release=([*INSTALLED, namespace("older", release="other")], ()),
    one_belongs_to_another_chart=([*INSTALLED, namespace("older", part_of="shop")], ()),
)
def test_an_upgrade_that_deletes_no_namespace_of_the_release_is_rendered(
    found: Iterable[Json], settings: Iterable[str]
) -> None:
    assert (done := rendered(found, *settings)).returncode == 0, done.stderr


def test_an_upgrade_to_a_missing_quota_is_rejected_while_another_quota_is_in_use() -> None:
    for setting, place in (
        ("quota.name=other", "other in namespace kube-system"),
        ("quota.namespace=default", "gpuquota in namespace default"),
    ):
        default = {**KUBE_SYSTEM, "metadata": {"name": "default"}}
        for program in PROGRAMS:
            done = rendered([*INSTALLED, default, quota("gpuquota")], setting, name=program)
            assert f"quota: ConfigMap {place} does not exist, and the quota kube-system/gpuquota is in use" in (
                done.stderr
            )


@cases(
    "found, settings",
    the_other_quota_exists=([*INSTALLED, quota("gpuquota"), quota("other")], ("quota.name=other",)),
    no_quota_exists_yet=(INSTALLED, ("quota.name=other",)),
    the_quota_is_lost=(INSTALLED, ()),
    the_webhook_is_lost=([KUBE_SYSTEM, *map(namespace, PARTS), quota("gpuquota")], ("quota.name=other",)),
)
def test_an_upgrade_that_lifts_no_limit_is_rendered(found: Iterable[Json], settings: Iterable[str]) -> None:
    assert (done := rendered(found, *settings)).returncode == 0, done.stderr


def test_an_upgrade_is_rendered_without_a_cluster() -> None:
    done = helm("template", "vcuda-quota", CHART, "--namespace=kube-system", "--is-upgrade", "--set=quota.name=other")
    assert done.returncode == 0, done.stderr


def notes(directory: Path, found: Iterable[Json], *, upgrade: bool) -> str:
    """Return the notes of a command that finds these objects. `helm template` prints none, so an object has them."""
    templates = shutil.copytree(CHART, directory / "chart") / "templates"
    (templates / "_notes.tpl").write_text(
        f'{{{{ define "notes" }}}}{(templates / "NOTES.txt").read_text()}{{{{ end }}}}'
    )
    head = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "notes"}}
    (templates / "notes.yaml").write_text(
        f'{yaml.safe_dump(head)}data: {{text: {{{{ include "notes" . | toJson }}}}}}\n'
    )
    done = rendered(found, chart=templates.parent, upgrade=upgrade)
    assert done.returncode == 0, done.stderr
    objects: Iterable[Mapping[str, Json] | None] = yaml.safe_load_all(done.stdout)
    [text] = [each["data"]["text"] for each in objects if each and each["metadata"] == head["metadata"]]
    return str(text)


STAYS, MISSING = "Your quota stays as it is.", "ConfigMap gpuquota in namespace kube-system does not exist"
EXAMPLE = "kubectl apply -f manifests/examples/gpuquota.yaml"


@cases(
    "found, upgrade, told",
    an_upgrade_with_a_quota=([*INSTALLED, quota("gpuquota")], True, {STAYS}),
    an_upgrade_without_a_quota=(INSTALLED, True, {MISSING}),
    an_upgrade_without_a_cluster=([], True, set()),
    an_installation_with_a_quota=([KUBE_SYSTEM, quota("gpuquota")], False, {STAYS}),
    an_installation_without_a_quota=([KUBE_SYSTEM], False, {EXAMPLE}),
)
def test_the_notes_say_that_the_quota_stays_only_if_it_exists(
    tmp_path: Path, found: Iterable[Json], told: set[str], *, upgrade: bool
) -> None:
    text = notes(tmp_path, found, upgrade=upgrade)
    assert {each for each in (STAYS, MISSING, EXAMPLE) if each in text} == told
    assert "kubectl -n vcuda-quota rollout status deployment/vcuda-webhook" in text
