"""Tests of the reports of a namespace's usage: a ConfigMap, metrics, and `kubectl gpuquota` with a real kubectl."""

import json
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path

import pytest
import yaml

from controller.plugin.explain import MAKES_A_CLAIM
from tests.e2e import dra
from tests.e2e.cluster import Cluster, Json, webhook
from tests.e2e.installation import MANIFESTS, USAGE, Installation, tenant_of
from tests.e2e.json_server import answering, ca_bundle, reviewed
from tests.e2e.ledgers import await_published
from tests.e2e.steady import creating, share
from tests.e2e.workloads import workload
from tests.integration.reviews import card_pod, gpu_pod, on_m40
from tests.processes import SCRIPTS, ControllerProcess, eventually
from vcuda.quota.well_known import USAGE_LABELS

pytestmark = pytest.mark.one_version


ENTRY = {"quota": {"M40": {"cards": 4, "memory": "40Gi"}, "P100": 2.5}}


@pytest.fixture
def team(led_team: Callable[[Json], str]) -> str:
    return led_team(ENTRY)


Plugin = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def gpuquota(cluster: Cluster, tmp_path: Path) -> Plugin:
    """A function that runs `kubectl gpuquota …`. The plugin is on PATH, and the context names no namespace."""
    assert shutil.which("kubectl-gpuquota", path=sysconfig.get_path("scripts"))
    environment = {
        "PATH": f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}",
        "KUBECONFIG": str(cluster.kubeconfig),
        "HOME": str(tmp_path),
    }

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = (cluster.kubectl_program, "gpuquota", *arguments)
        options: Json = {"env": environment, "capture_output": True, "text": True, "timeout": 60}
        return subprocess.run(command, check=False, **options)

    return run


def used(report: Json) -> dict[str, float]:
    return {model["model"]: model["used"] for model in report["models"]}


def test_reserved_cards_are_distinct_from_used_and_free_ones_and_are_released(
    cluster: Cluster, controller: ControllerProcess, led_team: Callable[[Json], str], gpuquota: Plugin
) -> None:
    crowded, seen = led_team({"quota": {"M40": 400}}), list[Json]()

    def is_reserved(report: Json) -> bool:
        seen.append(report["models"][0])
        return bool(seen[-1]["reserved"])

    with creating(cluster, crowded, share) as creates:
        await_published(cluster, crowded, is_reserved)
        controller.await_metric("vcuda_quota_reserved_cards", 0.01, namespace=crowded)
    assert [each for each in creates.failures if not each.startswith("429") and "being released" not in each] == []
    await_published(cluster, crowded, lambda report: not is_reserved(report))
    assert {round(each["used"] + each["reserved"] + each["available"], 2) for each in seen} == {400}
    assert max(each["reserved"] for each in seen) <= 40, "at most a tenth of the free cards may be reserved"
    assert "RESERVED" not in gpuquota("-n", crowded).stdout


@pytest.fixture
def guarded(cluster: Cluster, namespace: str) -> Iterator[str]:
    manifest = str(MANIFESTS / "usage-policy.yaml")
    cluster.kubectl("apply", "-f", manifest)
    probe = report_of(namespace, "")
    with tenant_of(cluster, namespace) as tenant:
        eventually(lambda: tenant.try_create(probe, dryRun="All").status == HTTPStatus.FORBIDDEN)
    yield namespace
    cluster.kubectl("delete", "-f", manifest)


def report_of(namespace: str, told: str) -> Json:
    """Return a usage report that a tenant has forged, with the labels of the controller's reports."""
    metadata = {"namespace": namespace, "name": USAGE, "labels": USAGE_LABELS}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"usage.json": told}}


def test_no_tenant_can_write_a_report_and_the_controller_restores_it(
    cluster: Cluster, account: Cluster, guarded: str, team: str
) -> None:
    report = await_published(cluster, team)
    forged = json.dumps({"namespace": team, "mode": "audit", "models": []})
    with tenant_of(cluster, team) as tenant:
        path = f"/api/v1/namespaces/{team}/configmaps/{USAGE}"
        patched = tenant.rest.try_merge_patch(path, {"data": {"usage.json": forged}})
        answers = [patched, tenant.rest.send("PUT", path, report_of(team, forged))]
        answers.append(tenant.rest.try_merge_patch(path, {"metadata": {"labels": None}}))
        assert [answer.status for answer in answers] == [HTTPStatus.FORBIDDEN] * 3
        assert "is written by the controller of vcuda quota" in patched.message
        tenant.delete(path)
        assert await_published(cluster, team) == report
        tenant.create({**report_of(team, forged), "metadata": {"namespace": team, "name": "mine"}})
    assert account.try_create(report_of(guarded, forged), dryRun="All").status == HTTPStatus.CREATED


def test_a_real_kubectl_runs_the_plugin(cluster: Cluster, team: str, tmp_path: Path) -> None:
    """The plugin calls the kubectl that found it on PATH."""
    await_published(cluster, team)
    kubectl = Path(cluster.kubectl_program)
    places = (str(SCRIPTS), str(kubectl.parent), "/usr/bin", "/bin")
    env = {"PATH": os.pathsep.join(places), "KUBECONFIG": str(cluster.kubeconfig), "HOME": str(tmp_path)}
    options: Json = {"env": env, "capture_output": True, "text": True, "timeout": 60}
    shown = subprocess.run((kubectl, "gpuquota", "-A"), check=False, **options)
    assert shown.returncode == 0, shown.stderr
    rows = [line.split() for line in shown.stdout.splitlines()]
    assert [team, "M40", "0", "4", "4"] in [row[:5] for row in rows]
    completed = subprocess.run((kubectl, "__complete", "gpuquota", "wh"), check=True, **options)
    assert completed.stdout.splitlines()[0].startswith("why\t")


@pytest.mark.usefixtures("controller_manager")
def test_why_shows_what_a_rejected_deployment_waits_for(cluster: Cluster, team: str, gpuquota: Plugin) -> None:
    cluster.create(on_m40(card_pod("holder", team, cards=3)))
    await_published(cluster, team, lambda use: used(use)["M40"] == 3)
    cluster.create(workload("Deployment", team, "greedy", pod=on_m40(card_pod("", team, cards=2))))
    cluster.await_events(team, "reason=FailedCreate", bool)
    told = gpuquota("why", "deploy/greedy", "-n", team, "-o", "json")
    assert told.returncode == 1, told.stderr
    found = json.loads(told.stdout)
    [rejected], [now], [missing] = found["rejected"], found["now"], found["missing"]
    words = f"exceeded quota: M40 in namespace {team}, requested: 2 cards"
    assert words in rejected["message"]
    assert (words in now["reason"], now["decision"]) == (True, "rejected")
    assert (missing["model"], missing["needed"]) == ("M40", 1)
    assert [pod["name"] for pod in missing["held_by"]] == ["holder"]
    cluster.delete_pod(team, "holder")
    eventually(lambda: gpuquota("why", "deployment/greedy", "-n", team).returncode == 0)


def test_explain_shows_the_decision_and_reason_for_each_pod_and_creates_nothing(
    cluster: Cluster, team: str, gpuquota: Plugin, tmp_path: Path
) -> None:
    file = tmp_path / "pods.yaml"
    plain = gpu_pod("plain", team, {"cpu": "1"})
    file.write_text(yaml.safe_dump_all([card_pod("fits", team), card_pod("over", team, cards=5), plain]))
    told = gpuquota("-n", team, "explain", "-f", str(file), "-o", "json")
    assert told.returncode == 1, told.stderr
    fits, over, free = json.loads(told.stdout)
    admitted = {"object": "Pod/fits", "namespace": team, "decision": "admitted", "model": "M40", "warnings": []}
    assert fits == {
        **admitted,
        "reason": "would be pinned to M40: the first in the namespace's quota, 4 cards of 4 cards free",
    }
    assert (over["object"], over["decision"], over["model"]) == ("Pod/over", "rejected", "")
    assert f"larger than the GPU quota: M40 in namespace {team}, requested: 5 cards" in over["reason"]
    assert (free["object"], free["decision"], free["reason"]) == ("Pod/plain", "admitted", "no GPU quota applies")
    assert cluster.pods(team) == []


def test_explain_does_not_send_a_pod_for_which_another_webhook_would_create_a_claim(
    cluster: Cluster, installation: Installation, team: str, gpuquota: Plugin, tmp_path: Path
) -> None:
    """HAMi-DRA's webhook creates a claim even in a dry run. So the command must not send the pod."""
    dra.require_dra(cluster)

    def make_claim(_path: str, review: Json) -> Json:
        pod = review["request"]["object"]
        name = f"{team}-{pod['metadata']['name']}-{pod['spec']['containers'][0]['name']}"
        made = cluster.try_create(dra.claim(team, name))
        text = f"failed to create ResourceClaim {team}/{name}: {made.message}"
        created = made.status == HTTPStatus.CREATED
        return reviewed(review, allowed=created, **({} if created else {"status": {"code": 500, "message": text}}))

    certificates, file = installation.ca.parent, tmp_path / "pod.yaml"
    file.write_text(yaml.safe_dump(card_pod("train", team)))
    of_team = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": team}}, "sideEffects": "None"}
    with answering(make_claim, certificates) as url:
        theirs = webhook("mutate.hami.io", url, ca_bundle(certificates), **of_team)
        with cluster.register_webhooks(mutating=[theirs]):
            told = gpuquota("-n", team, "explain", "-f", str(file), "-o", "json")
            [row] = json.loads(told.stdout)
            assert (row["decision"], row["reason"], told.returncode) == ("not asked", MAKES_A_CLAIM, 1)
            assert dra.claims(cluster, team) == []
            assert cluster.try_create(card_pod("train", team), dryRun="All").status == HTTPStatus.CREATED
            assert dra.claims(cluster, team), "a dry run leaves a claim behind"
