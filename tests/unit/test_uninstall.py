"""Tests of `vcuda-controller uninstall`: the objects that it deletes or changes, their order, and its timeout."""

import pytest

from controller.uninstall import Uninstall
from tests.api_double import ApiDouble, Effect, before, rejected
from tests.replicas import Clock
from vcuda.errors import Forbidden, Unavailable

ADMISSION = "/apis/admissionregistration.k8s.io/v1"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
LEDGERS = "/api/v1/namespaces/vcuda-quota-ledgers"
LEDGER = f"{LEDGERS}/configmaps/gpu-ledger-team-a"
REPORT = "/api/v1/namespaces/team-a/configmaps/gpu-quota-usage"
PART = {"app.kubernetes.io/part-of": "vcuda-quota"}

REJECTING = (
    f"{ADMISSION}/validatingwebhookconfigurations/vcuda-quota",
    f"{ADMISSION}/mutatingwebhookconfigurations/00-vcuda-quota",
    f"{ADMISSION}/validatingadmissionpolicybindings/ledgers.quota.vcuda.io",
)
WRITING = tuple(
    f"{scope}/{name}"
    for scope in (f"{RBAC}/clusterrolebindings", f"{RBAC}/namespaces/vcuda-quota-ledgers/rolebindings")
    for name in ("vcuda-webhook", "vcuda-controller")
)
OTHERS = (f"{ADMISSION}/validatingwebhookconfigurations/another", f"{RBAC}/clusterrolebindings/another")


@pytest.fixture
def installed(api: ApiDouble) -> ApiDouble:
    for path in (*REJECTING, *WRITING, *OTHERS):
        name = path.rpartition("/")[2]
        api.store(path, {"metadata": {"name": name, "labels": {} if name == "another" else PART}})
    ledger = {"name": "gpu-ledger-team-a", "labels": {"quota.vcuda.io/ledger-of": "team-a"}}
    api.store(LEDGER, {"metadata": {**ledger, "finalizers": ["quota.vcuda.io/ledger"]}})
    api.store(REPORT, {"metadata": {"name": "gpu-quota-usage"}})
    for name, labels in (("team-a", {}), ("default", {"quota.vcuda.io/enforced": "false", "team": "none"})):
        api.store(f"/api/v1/namespaces/{name}", {"metadata": {"name": name, "labels": labels}})
    return api


def uninstall(api: ApiDouble, clock: Clock) -> list[str]:
    """Uninstall with a timeout of ten seconds. Return the paths of the deleted and changed objects, in order."""
    lines: list[str] = []
    Uninstall(api.kube, "vcuda-quota-ledgers", lines.append, clock.pass_by, clock.monotonic).run(10)
    return [line.partition(" ")[0] for line in lines]


def test_webhooks_are_deleted_first_then_write_permissions_then_stored_data(
    installed: ApiDouble,
) -> None:
    removed = uninstall(installed, Clock())
    assert removed[:3] == list(REJECTING)
    assert set(removed[3:7]) == set(WRITING)
    assert removed[7:] == [LEDGER, "/api/v1/namespaces/default", REPORT]
    assert not {*REJECTING, *WRITING, REPORT} & installed.objects.keys()
    assert "finalizers" not in installed.objects[LEDGER]["metadata"]
    assert installed.objects["/api/v1/namespaces/default"]["metadata"]["labels"] == {"team": "none"}


def test_a_second_run_finds_nothing(installed: ApiDouble) -> None:
    uninstall(installed, Clock())
    assert uninstall(installed, Clock()) == []


def test_a_policy_that_is_in_effect_after_its_deletion_is_waited_for(installed: ApiDouble) -> None:
    clock = Clock()

    def deliver(method: str, _timeout: float, effect: Effect) -> bytes:
        if method == "PATCH" and clock.now < 1005:
            raise Forbidden(403, "ValidatingAdmissionPolicy 'ledgers.quota.vcuda.io' denied request")
        return effect()

    installed.deliver = deliver
    assert LEDGER in uninstall(installed, clock)
    assert 1005 < clock.now < 1010


def test_a_rejection_that_lasts_is_an_error(installed: ApiDouble) -> None:
    installed.deliver = rejected(Forbidden(403, "this account may not patch configmaps"), "PATCH")
    with pytest.raises(Forbidden, match="may not patch"):
        uninstall(installed, Clock())


def test_a_ledger_that_is_written_again_and_again_is_an_error(installed: ApiDouble) -> None:
    written = dict(installed.objects[LEDGER])
    installed.deliver = before("LIST", lambda: installed.store(LEDGER, written), times=100)
    with pytest.raises(Unavailable, match="were written again after their removal"):
        uninstall(installed, Clock())
