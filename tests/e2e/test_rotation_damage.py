"""Tests that `vcuda-certs rotate` repairs any damage to certificates, or prints the command for a person to run."""

import base64
import json
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest

from certs.parsing import read_certificates
from certs.state import fingerprint
from tests.e2e.cluster import Cluster, Json
from tests.e2e.installation import SYSTEM_NAMESPACE
from tests.e2e.stage import CA_SECRET, PATHS, SERVER_NAME, SERVING_SECRET, Stage, staged, utc_now
from tests.e2e.steady import shake

pytestmark = [pytest.mark.slow, pytest.mark.one_version]

SHORT = ("--overlap", "1s", "--retention", "1s", "--timeout", "60s")
Damage = Callable[[Stage], None]


@pytest.fixture(scope="module")
def served(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stage, str]]:
    directory = tmp_path_factory.mktemp("damage")
    with (
        staged(cluster, directory, [lambda: 0.0], cluster.kubeconfig, *SHORT) as (stage, quota),
        stage.team(quota) as namespace,
    ):
        yield stage, namespace


@pytest.fixture
def stage(served: tuple[Stage, str]) -> Stage:
    assert "Done" in served[0].rotate()
    return served[0]


@pytest.fixture
def namespace(served: tuple[Stage, str]) -> str:
    return served[1]


def set_bundles(stage: Stage, text: str) -> None:
    patch = [{"op": "add", "path": "/webhooks/1/clientConfig/caBundle", "value": text}]
    for path in PATHS.values():
        stage.cluster.rest.json_patch(path, patch)


def both_secrets_deleted(stage: Stage) -> None:
    stage.cluster.delete(CA_SECRET)
    stage.cluster.delete(SERVING_SECRET)


def recreated(stage: Stage) -> None:
    stage.unregister()
    stage.register()


DAMAGES: dict[str, Damage] = {
    "both Secrets deleted": both_secrets_deleted,
    "configurations recreated": recreated,
}
"""Objects that are deleted and created again. tests/unit/test_certs_rotation.py has all damages, in any combination."""


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_one_run_repairs_the_damage(stage: Stage, namespace: str, damage: Damage) -> None:
    damage(stage)
    assert "Done" in stage.rotate()
    assert_at_rest(stage, namespace)


NOT_OURS = {"metadata": {"labels": {"quota.vcuda.io/written-by": None}}}


@pytest.mark.parametrize(
    ("change", "told"),
    [(NOT_OURS, "kubectl label"), ({"immutable": True}, "kubectl delete")],
    ids=["not ours", "immutable"],
)
def test_a_secret_that_must_not_be_written_is_unchanged(stage: Stage, change: Json, told: str) -> None:
    stage.cluster.rest.merge_patch(SERVING_SECRET, change)
    before = versions(stage)
    rejected = stage.run("rotate", "--issued-before", utc_now())
    assert (rejected.returncode, versions(stage)) == (1, before)
    assert f"Run: {told} -n {SYSTEM_NAMESPACE} secret vcuda-webhook-tls" in rejected.stdout
    do_as_told(stage, rejected)
    assert "Done" in stage.rotate()


def test_a_configuration_that_lost_its_label_is_reported_and_keeps_working(stage: Stage, namespace: str) -> None:
    """vcuda-certs changes the CA only after a person has restored the label by the reported command."""
    path = PATHS["ValidatingWebhookConfiguration"]
    stage.cluster.rest.merge_patch(path, {"metadata": {"labels": None}})
    before = stage.cluster.rest.get(path)
    since = utc_now()
    rejected = stage.run("rotate", "--issued-before", since)
    assert rejected.returncode == 1
    assert stage.run("status").returncode == 1
    assert stage.cluster.rest.get(path) == before
    stage.await_answered(namespace)
    do_as_told(stage, rejected)
    assert "Done" in stage.rotate("--issued-before", since)
    assert_at_rest(stage, namespace)


def test_a_dry_run_reports_every_step_and_changes_nothing(stage: Stage) -> None:
    before = versions(stage)
    told = stage.rotate("--dry-run", "-o", "json", "--issued-before", later())
    steps = [step["step"] for step in json.loads(told)["steps"] if step["step"] != "Wait"]
    bundles = ["SetBundles"] * len(PATHS)
    made = ["MakeAuthority", *bundles, "NoteTrusted", "Promote", "IssueLeaf"]
    assert steps == [*made, "NoteServed", *bundles, "Forget"]
    assert versions(stage) == before


def test_status_shows_every_certificate_and_which_webhooks_trust_it(stage: Stage) -> None:
    report = json.loads(checked(stage.run("status", "-o", "json")))
    own = {*stage.addresses(), *(f"secret/vcuda-webhook-{kind}" for kind in ("ca", "tls"))}
    theirs = {f"{kind}webhookconfiguration/vcuda-quota" for kind in ("mutating", "validating")}
    assert {row["where"] for row in report["certificates"]} == own | theirs
    assert [call["trusted"] for call in report["calls"]] == [True, True]
    assert "TIME LEFT" in checked(stage.run("status"))
    set_bundles(stage, "")
    bad = stage.run("status", "-o", "json")
    assert bad.returncode == 1
    assert [call["trusted"] for call in json.loads(bad.stdout)["calls"]] == [False, False]
    assert "kubectl" in json.loads(bad.stdout)["problems"][0]["command"]


def checked(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def later() -> str:
    """Wait for a second, and return the time. It is later than the start of every present certificate."""
    time.sleep(1.1)
    return utc_now()


def do_as_told(stage: Stage, rejected: subprocess.CompletedProcess[str]) -> None:
    stage.cluster.kubectl(*rejected.stdout.partition("Run: ")[2].strip().removeprefix("kubectl ").split())


def assert_at_rest(stage: Stage, namespace: str) -> None:
    """Assert that pods are reviewed, and that all caBundles have the same single CA, which issued all served leaves.

    `vcuda-certs status` must find no fault.
    """
    stage.await_answered(namespace)
    assert len(set(stage.bundles())) == 1
    assert len(authorities_in(stage)) == 1
    for address in stage.addresses():
        shake(address, base64.b64decode(stage.bundles()[0]), SERVER_NAME)
    checked(stage.run("status"))


def authorities_in(stage: Stage) -> set[str]:
    texts = [base64.b64decode(bundle) for bundle in stage.bundles()]
    return {fingerprint(one) for text in texts for one in read_certificates(text)[0]}


def versions(stage: Stage) -> list[str]:
    paths = (CA_SECRET, SERVING_SECRET, *PATHS.values())
    return [stage.cluster.rest.get(path)["metadata"]["resourceVersion"] for path in paths]
