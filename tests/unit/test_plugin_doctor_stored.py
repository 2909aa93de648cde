"""Tests that `kubectl gpuquota doctor` finds faults of stored certificates and ledgers, and says what to do."""

import base64
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import yaml

from controller.plugin.issued import SECRETS
from tests.faults import JOB, expect_fault, findings, removed
from tests.installed import CRON_JOB, CRON_JOBS, LEDGERS, NOW, OF_VALIDATING, SECRET, SYSTEM, Installed, pod
from tests.rendered import MANIFESTS
from tests.tables import cases
from vcuda.ledger.ledger import Ledger, Reservation
from vcuda.ledger.team import TeamLedger
from vcuda.x509 import Names, Signed, make_authority, make_leaf

JOB_OF = "kubectl -n vcuda-quota create job --from=cronjob/"
OTHER_CA = base64.b64encode(make_authority(NOW).certificate_pem()).decode()
OF_CERT_MANAGER = {"cert-manager.io/inject-ca-from": "vcuda-quota/ca"}
LOST = Ledger(reserved={"lost": Reservation({}, 7)})


@pytest.fixture
def api(installed: Installed) -> Installed:
    return installed


def without_data(api: Installed, part: str) -> None:
    """Install a part whose Job has not written the Secret yet."""
    api.install_part(part)
    del api.objects[f"{SYSTEM}/secrets/vcuda-{part}-tls"]["data"]


@cases(
    "damage, check, text, action",
    expired_today=(
        lambda api: api.issue(NOW - timedelta(days=90, hours=3, minutes=5)),
        *("certificates", "tls.crt expired 3 hours ago, at ", JOB),
    ),
    late=(lambda api: api.issue(NOW - timedelta(days=70)), "certificates", "was not renewed in time", JOB),
    no_certificate=(removed(SECRET), "certificates", "Secret vcuda-quota/vcuda-webhook-tls does not exist", JOB),
    cert_manager=(
        lambda api: (api.remove(SECRET), api.objects[OF_VALIDATING]["metadata"]["annotations"].update(OF_CERT_MANAGER)),
        *("certificates", "Secret vcuda-quota/vcuda-webhook-tls does not exist", "describe certificates"),
    ),
    no_cron_job=(removed(CRON_JOB), "certificates", "CronJob vcuda-quota/vcuda-certs does not exist", "helm upgrade"),
    suspended_cron_job=(
        lambda api: api.objects[CRON_JOB]["spec"].update(suspend=True),
        *("certificates", "vcuda-certs is suspended", """patch cronjob vcuda-certs -p '{"spec":{"suspend":false}}'"""),
    ),
    failed_jobs=(
        lambda api: api.objects[CRON_JOB].update(status={"lastScheduleTime": f"{NOW:%FT%TZ}"}),
        *("certificates", "no Job of CronJob vcuda-quota/vcuda-certs has succeeded since ", "logs -l"),
    ),
    crash_looping_job=(
        lambda api: (
            api.install_part("client"),
            api.store_pod("vcuda-client-certs", "vcuda-client-certs-x", pod(containerStatuses=[{"restartCount": 3}])),
        ),
        *("certificates", "certs-x has failed 3 times to renew certificates", "logs vcuda-client-certs-x --previous"),
    ),
    no_key=(
        lambda api: api.objects[SECRET]["data"].update({"tls.key": ""}),
        *("certificates", "Secret vcuda-quota/vcuda-webhook-tls has no tls.key", JOB),
    ),
    no_pem=(
        lambda api: api.objects[SECRET]["data"].update({"tls.crt": "QQ=="}),
        *("certificates", "tls.crt in Secret vcuda-quota/vcuda-webhook-tls is not a certificate", JOB),
    ),
    unlabelled_secret=(
        lambda api: api.objects[SECRET]["metadata"].update(labels={"app.kubernetes.io/managed-by": "vcuda-certs"}),
        *("certificates", "vcuda-webhook-tls lacks the label quota.vcuda.io/written-by, so vcuda-certs does not renew"),
        "kubectl -n vcuda-quota label secret vcuda-webhook-tls quota.vcuda.io/written-by=vcuda-certs",
    ),
    other_ca=(
        lambda api: api.objects[SECRET]["data"].update({"ca.crt": OTHER_CA}),
        *("certificates", "no CA in Secret vcuda-quota/vcuda-webhook-tls has signed the certificate in", JOB),
    ),
    client_late=(
        lambda api: api.install_part("client", NOW - timedelta(days=70)),
        *(
            "certificates",
            "vcuda-client-tls: tls.crt expires in 19 days",
            f"{JOB_OF}vcuda-client-certs client-certs-now. Then copy it to each API server",
        ),
    ),
    client_without_certificate=(
        lambda api: without_data(api, "client"),
        *("certificates", "Secret vcuda-quota/vcuda-client-tls has no tls.crt and no tls.key", JOB_OF),
    ),
    client_ca_lost=(
        lambda api: (api.install_part("client"), api.remove(f"{SYSTEM}/configmaps/vcuda-client-ca")),
        *(
            "certificates",
            "no CA in ConfigMap vcuda-quota/vcuda-client-ca has signed the certificate in Secret",
            JOB_OF,
        ),
    ),
    extender_expired=(
        lambda api: api.install_part("extender", NOW - timedelta(days=91)),
        *("certificates", "vcuda-extender-tls: tls.crt expired 1 day ago", f"{JOB_OF}vcuda-extender-certs "),
    ),
    extender_cron_job_deleted=(
        lambda api: (api.install_part("extender"), api.remove(f"{CRON_JOBS}/vcuda-extender-certs")),
        *("certificates", "CronJob vcuda-quota/vcuda-extender-certs does not exist, so it renews no certificate"),
        "helm upgrade",
    ),
    scheduler_secret_deleted=(
        lambda api: (api.install_part("scheduler"), api.remove(f"{SYSTEM}/secrets/vcuda-scheduler-tls")),
        *("certificates", "Secret vcuda-quota/vcuda-scheduler-tls does not exist", "helm upgrade. Then: Renew the"),
    ),
    scheduler_cron_job_suspended=(
        lambda api: (
            api.install_part("scheduler"),
            api.objects[f"{CRON_JOBS}/vcuda-scheduler-certs"]["spec"].update(suspend=True),
        ),
        *("certificates", "vcuda-scheduler-certs is suspended, so it renews no certificate", "patch cronjob"),
    ),
    other_certificate=(
        lambda api: api.serve(1, vcuda_serving_certificate_expiry_seconds=5),
        *("certificates", "pod vcuda-webhook-1 serves another certificate", "rollout restart"),
    ),
    lost=(lambda api: api.store_ledger("team-a", LOST), "ledgers", "of namespace team-a is closed", "Wait 90 s"),
    damaged=(
        lambda api: api.store_ledger("team-a", "{"),
        *("ledgers", "of namespace team-a cannot be read", "delete configmaps gpu-ledger-team-a"),
    ),
    older_format=(
        lambda api: (
            api.store_ledger("team-a", '{"format": 1}'),
            api.store_team_ledger("vision", '{"format": 1}'),
        ),
        *(
            "ledgers",
            "another release wrote these ledgers, and this release reads only format 2: namespace team-a, team",
        ),
        "kubectl -n vcuda-quota-ledgers delete configmaps gpu-ledger-team-a gpu-ledger-team.vision",
    ),
    many_of_an_older_format=(
        lambda api: [api.store_ledger(f"vision-{number}", '{"format": 1}') for number in range(6)],
        *("ledgers", "vision-4 and 1 more", "vcuda-quota-ledgers delete configmaps -l quota.vcuda.io/ledger-of"),
    ),
    team_closed=(
        lambda api: api.store_team_ledger("vision", TeamLedger(closed="x")),
        *("ledgers", "the ledger of team vision is closed", "Wait 90 s"),
    ),
    team_damaged=(
        lambda api: api.store_team_ledger("vision", "{"),
        *("ledgers", "the ledger of team vision cannot be read", "delete configmaps gpu-ledger-team.vision"),
    ),
    ledger_deleted=(
        lambda api: (
            api.remove(f"{LEDGERS}/gpu-ledger-team-a"),
            api.store(f"{LEDGERS}/m", {"metadata": {"name": "gpu-ledger-opened.team-a"}}),
        ),
        *("ledgers", "the ledger of namespace team-a was deleted", "Wait 90 s"),
    ),
)
def test_a_fault_of_a_stored_object_has_one_line_that_says_what_to_do(
    api: Installed, damage: Callable[[Installed], Any], check: str, text: str, action: str
) -> None:
    damage(api)
    expect_fault(check, text, action)


def test_the_optional_parts_are_checked_only_if_they_are_installed(api: Installed) -> None:
    api.install_part("scheduler")
    api.remove(f"{CRON_JOBS}/vcuda-scheduler-certs")
    api.remove(f"{SYSTEM}/serviceaccounts/vcuda-scheduler-certs")
    assert "vcuda-scheduler-tls" not in str(findings(0))
    for part in ("client", "extender", "scheduler"):
        api.install_part(part)
    [found] = [each for each in findings(0) if each["check"] == "certificates"]
    for part in ("webhook", "client", "extender", "scheduler"):
        assert f"vcuda-{part}-tls: tls.crt expires in 89 days" in found["text"]


def test_each_rotation_of_the_manifests_writes_the_secret_that_is_checked() -> None:
    rotations = [each for path in MANIFESTS.glob("**/*certs.yaml") for each in yaml.safe_load_all(path.read_text())]
    found = {}
    for each in rotations:
        if each["kind"] == "CronJob":
            [container] = each["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
            flags = dict(part.partition("=")[::2] for part in container["args"])
            found[each["metadata"]["name"]] = flags.get("--secret", flags.get("--serving-secret", "vcuda-webhook-tls"))
    assert found == SECRETS


def test_a_certificate_of_an_intermediate_ca_is_accepted(api: Installed) -> None:
    root = make_authority(NOW)
    intermediate = make_leaf(root, Names(("intermediate",)), NOW)
    leaf = make_leaf(Signed(intermediate.certificate, intermediate.key), Names(("localhost",)), NOW)
    chain = leaf.certificate_pem() + intermediate.certificate_pem()
    data = {"tls.crt": chain, "ca.crt": root.certificate_pem()}
    api.objects[SECRET]["data"] |= {key: base64.b64encode(text).decode() for key, text in data.items()}
    api.serve(0, vcuda_serving_certificate_expiry_seconds=leaf.expires.timestamp())
    api.serve(1, vcuda_serving_certificate_expiry_seconds=leaf.expires.timestamp())
    findings(0)


def test_ledgers_of_another_format_are_not_deleted_while_an_upgrade_is_not_complete(api: Installed) -> None:
    api.store_ledger("team-a", '{"format": 1}')
    api.store_pod("vcuda-webhook", "vcuda-webhook-1", pod("vcuda-quota:2"))
    [found] = [each for each in findings(1) if each["check"] == "ledgers"]
    assert "Update all parts to one release" in found["action"]


def test_a_damaged_ledger_that_keeps_the_ledger_of_its_team_closed_is_named(api: Installed) -> None:
    api.store_ledger("vision-a", "{", team="vision")
    api.store_ledger("vision-b", Ledger(), team="vision")
    api.store_ledger("speech-a", "{", team="speech")
    api.store_team_ledger("vision", TeamLedger(closed="x"))
    found = [each for each in findings(1) if each["check"] == "ledgers"]
    [closed] = [each for each in found if "team vision is closed" in each["text"]]
    assert closed["text"].endswith("the ledgers of these namespaces cannot be read: vision-a")
    [damaged] = [each for each in found if "of namespace vision-a cannot be read" in each["text"]]
    assert damaged["action"] == "kubectl -n vcuda-quota-ledgers delete configmaps gpu-ledger-vision-a"


def test_namespaces_of_the_quota_that_do_not_exist_are_named_and_are_no_fault(api: Installed) -> None:
    api.quota("{team-a: {quota: {A100: 1}}, taem-b: {}}", "vision: {namespaces: [vision-x, 'v-*'], quota: {A100: 1}}")
    [found] = [each for each in findings(0) if "do not exist" in each["text"]]
    assert (found["check"], found["state"]) == ("namespaces", "ok")
    assert found["text"] == "these namespaces of the quota do not exist: taem-b, vision-x"
    api.quota(json.dumps({f"team-{number}": {} for number in range(9)}))
    assert any(each["text"].endswith("team-4 and 4 more") for each in findings(1))
