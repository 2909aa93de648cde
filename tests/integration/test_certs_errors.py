"""Tests of `vcuda-certs rotate` and `status` when requests to the API server fail."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from certs.cli import main
from certs.cluster import ClusterStore
from certs.parsing import ObjectRefs
from certs.plan import plan
from certs.rotation import MAX_ATTEMPTS, MAX_STEPS, Rotation
from certs.state import State
from certs.steps import Done, End, MakeAuthority, RotationPolicy, SeenFor, StepRejected, Write
from tests.integration.scripted import Answer, Script, status, write_kubeconfig
from tests.rotation_world import NEW, POLICY, World, healthy
from tools.ports import free_ports
from vcuda.errors import Conflict, Forbidden, Unavailable
from vcuda.kube import Kube

NOW = datetime.now(UTC)
"""The time at which pytest imports this module. The API server's time in a test may be minutes later."""
REFS = ObjectRefs("vcuda-quota", "vcuda-webhook", "vcuda-webhook-ca", "vcuda-webhook-tls")
LABELS = {"app.kubernetes.io/part-of": "vcuda-quota"}
VERSION = Answer({"gitVersion": "v1.37.2"})
MISSING = Answer({"message": "not found"}, status=404)
NONE = Answer({"items": []})
NO_SLICES = Answer({"metadata": {"resourceVersion": "1"}, "items": []})


def run(kubeconfig: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, [arguments[0], "--kubeconfig", str(kubeconfig), *arguments[1:]])


@pytest.fixture
def store(kubeconfig: Path) -> ClusterStore:
    return ClusterStore(Kube.connect(kubeconfig), REFS, LABELS)


@pytest.mark.parametrize("command", ["rotate", "status"])
def test_a_forbidden_request_ends_the_command_with_the_api_servers_message(
    script: Script, kubeconfig: Path, command: str
) -> None:
    script.answers += [VERSION, status(403, 'secrets "vcuda-webhook-tls" is forbidden')]
    ended = run(kubeconfig, command)
    assert ended.exit_code == 1
    assert 'secrets "vcuda-webhook-tls" is forbidden (HTTP 403)' in ended.output


@pytest.mark.usefixtures("fast")
def test_an_unreachable_api_server_is_retried_and_then_reported(tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    write_kubeconfig(path, f"https://127.0.0.1:{free_ports(1)[0]}", {"token": "letmein"})
    ended = run(path, "rotate")
    assert ended.exit_code == 1
    assert "Connection refused" in ended.output


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("certs.rotation.Clock.sleep", lambda *_: None)


@pytest.mark.parametrize("command", ["rotate", "status"])
def test_the_ca_and_the_serving_certificate_must_be_in_two_secrets(kubeconfig: Path, command: str) -> None:
    """The webhook mounts the serving certificate's Secret. If it had the CA, the webhook could read the CA's key."""
    ended = run(kubeconfig, command, "--ca-secret", "vcuda-webhook-tls")
    assert ended.exit_code == 2
    assert "--ca-secret and --serving-secret must be different" in ended.output


@pytest.mark.parametrize("off", [timedelta(minutes=6), -timedelta(days=3650)])
def test_a_clock_that_differs_from_the_api_servers_stops_everything(
    script: Script, store: ClusterStore, off: timedelta
) -> None:
    """By a wrong clock, valid certificates would seem expired, and new certificates would not be valid yet."""
    date = {"Date": format_datetime(NOW, usegmt=True)}
    missing = Answer({"message": "not found"}, status=404, headers=date)
    script.answers += [missing, *[Answer({"items": []}, headers=date)] * 2, missing, NO_SLICES]
    [problem] = store.read(lambda: NOW + off).problems
    assert "this machine's clock shows" in problem.text


def test_the_endpoints_are_those_of_all_pages_of_the_services_slices(script: Script, store: ClusterStore) -> None:
    """If the rotation missed an endpoint, the endpoint could serve a certificate that is no longer trusted."""
    ports = [{"name": "https", "port": port} for port in free_ports(2)]
    slices = [{"addressType": "IPv4", "endpoints": [{"addresses": ["127.0.0.1"]}], "ports": [port]} for port in ports]
    script.answers += [
        Answer({"metadata": {"resourceVersion": "1", "continue": "more"}, "items": slices[:1]}),
        Answer({"metadata": {"resourceVersion": "1"}, "items": slices[1:]}),
    ]
    found = store.dial()
    assert [one.address for one in found] == [f"127.0.0.1:{port['port']}" for port in ports]
    assert [request.params["labelSelector"] for request in script.seen] == [
        "kubernetes.io/service-name=vcuda-webhook"
    ] * 2
    assert [request.params.get("continue") for request in script.seen] == [None, "more"]


def job(name: str, **status: int) -> dict[str, object]:
    return {"metadata": {"name": name}, "status": status}


@pytest.mark.parametrize(
    ("jobs", "running"),
    [
        (Answer({"items": [job("vcuda-certs-first", active=1), job("vcuda-client-certs-first", active=1)]}), True),
        (Answer({"items": [job("vcuda-client-certs-first", succeeded=1)]}), False),
        (NONE, False),
        (status(403, "jobs are forbidden"), False),
    ],
    ids=["the first Job runs", "the Job has ended", "no Job", "Jobs cannot be listed"],
)
def test_while_the_first_job_runs_a_missing_client_certificate_needs_no_person(
    script: Script, kubeconfig: Path, jobs: Answer, *, running: bool
) -> None:
    script.answers += [VERSION, MISSING, MISSING, MISSING, VERSION, jobs]
    ended = CliRunner().invoke(main, ["client", "status", "--kubeconfig", str(kubeconfig)])
    note = "Job vcuda-client-certs-first runs, and takes the next steps. If it still runs after some minutes: "
    assert (f"{note}kubectl -n vcuda-quota describe job/vcuda-client-certs-first" in ended.output) is running
    assert ("Needs a person" in ended.output) is not running
    assert ended.exit_code == (not running)


CALLS = {"service": {"namespace": REFS.namespace, "name": REFS.service}}
INJECTED = {"cert-manager.io/inject-ca-from": "vcuda-quota/webhook"}


def configuration(
    name: str, labels: dict[str, str], annotations: dict[str, str] | None = None, **client: object
) -> dict[str, object]:
    metadata = {"name": name, "labels": labels, "annotations": annotations, "resourceVersion": "1"}
    return {"metadata": metadata, "webhooks": [{"name": "validate", "clientConfig": client or CALLS}]}


def test_a_configuration_without_our_label_is_never_written_and_is_reported_with_the_command(
    script: Script, store: ClusterStore
) -> None:
    """When the CA changes, this configuration keeps its old caBundle, so calls of its webhooks fail."""
    items = [
        configuration("vcuda-quota", LABELS),
        configuration("lost", {"app.kubernetes.io/part-of": "another"}),
        configuration("injected", {}, INJECTED),
        configuration("elsewhere", {}, url="https://example.com/x"),
    ]
    script.answers += [MISSING, NONE, Answer({"items": items}), MISSING, NO_SLICES]
    state = store.read(lambda: datetime.now(UTC))
    assert [(one.name, bool(one.read_only)) for one in state.configurations] == [("vcuda-quota", False), ("lost", True)]
    [problem] = state.read_only()
    assert problem.command == (
        "kubectl label validatingwebhookconfiguration lost app.kubernetes.io/part-of=vcuda-quota --overwrite"
    )
    assert (state.left_alone, state.problems) == ((), ())


def test_a_configuration_that_another_tool_manages_is_still_read(script: Script, store: ClusterStore) -> None:
    """`status` must report whether the configuration's caBundles trust the served certificates."""
    theirs = {"metadata": {"name": "s", "annotations": {"cert-manager.io/certificate-name": "webhook"}}}
    items = [configuration("vcuda-quota", LABELS, INJECTED), configuration("lost", {})]
    script.answers += [Answer(theirs), NONE, Answer({"items": items}), NO_SLICES]
    state = store.read(lambda: datetime.now(UTC))
    assert (state.tool, [one.name for one in state.configurations]) == ("cert-manager", ["vcuda-quota"])
    assert state.problems == ()
    assert plan(state, NOW, POLICY, SeenFor()) == Done(None, "no webhook is declared")


class Failing(World):
    """A test double of the cluster's Secrets and webhook configurations. Its next writes raise ``faults``."""

    faults: list[Exception]

    def write(self, write: Write) -> None:
        if self.faults:
            raise self.faults.pop()
        super().write(write)


def failing(*faults: Exception) -> Failing:
    world = Failing(**{name: getattr(healthy(), name) for name in ("state", "pods")})
    world.faults = list(faults)
    world.time += timedelta(days=61)
    return world


def rotate(world: World, policy: RotationPolicy = POLICY, note: Callable[[object], None] = lambda _: None) -> End:
    return Rotation(world, policy, timedelta(minutes=5), world, note).run()


@pytest.mark.parametrize("fault", [Conflict(409, "another was first"), Unavailable("no answer")])
def test_after_a_failed_write_the_next_step_is_decided_from_the_stored_state(fault: Exception) -> None:
    world = failing(*[fault] * (MAX_ATTEMPTS - 1))
    assert isinstance(rotate(world), Done)


def test_after_many_failures_in_a_row_the_run_ends_with_the_error() -> None:
    world = failing(*[Unavailable("no answer")] * MAX_ATTEMPTS)
    with pytest.raises(Unavailable):
        rotate(world)


@pytest.mark.parametrize("policy", [POLICY, NEW])
def test_a_configuration_that_must_not_be_written_blocks_no_renewal_and_is_reported(policy: RotationPolicy) -> None:
    world = healthy(timedelta())
    world.put_hooks(0, bundle=())
    empty = world.state.configurations[0]
    world.time += timedelta(days=61)
    world.forbidden = frozenset({str(empty)})
    ended = rotate(world, policy)
    assert isinstance(ended, StepRejected)
    [problem] = ended.problems
    assert problem.text == f"{empty} may not be written: forbidden by RBAC (HTTP 403)"
    assert problem.command == "kubectl edit clusterrole vcuda-certs"
    assert (world.leaf.expires - world.time).days in (89, 90)


def test_a_secret_that_must_not_be_written_ends_the_run() -> None:
    world = failing(Forbidden(403, "forbidden by RBAC"))
    with pytest.raises(Forbidden):
        rotate(world)


def test_a_run_whose_steps_are_always_reverted_ends() -> None:
    class Undone(World):
        def write(self, write: Write) -> None:
            """Ignore the write, as if another client had reverted it at once."""

    world = Undone(State())
    steps: list[object] = []
    ended = rotate(world, note=steps.append)
    assert isinstance(ended, StepRejected)
    assert [type(step) for step in steps] == [MakeAuthority] * MAX_STEPS
