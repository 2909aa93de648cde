"""A sweep (a pass of the node agent) removes some directories of pods and keeps the others."""

import pytest

from controller.garbage.node.agent import Action
from controller.garbage.node.names import TRASH, VM_DIRECTORIES, Keep, KeepReason, MustStay
from controller.garbage.node.pods import KubeletPods
from tests.integration.node.disk import GRACE, RETENTION, Agent, Disk, snapshot, uid
from vcuda.errors import Unavailable
from vcuda.requests.schemes import SCHEMES

STATIC = "4dbbbc6a1bd7a7d1d1e2b6c6a9c1a4f0"


@pytest.fixture
def kubelet(disk: Disk) -> KubeletPods:
    path = disk.base / "pods"
    (path / uid(99)).mkdir(parents=True)
    return KubeletPods(path)


def test_a_directory_is_removed_when_its_pod_was_deleted_for_the_grace_period(disk: Disk, agent: Agent) -> None:
    disk.make(uid(1))
    disk.pods.uids = {uid(1)}
    assert agent.sweep()[uid(1)].keep == Keep(KeepReason.POD)
    disk.pods.uids = {uid(2)}
    assert agent.sweep()[uid(1)].keep == Keep(KeepReason.SEEN_ONCE)
    assert agent.sweep()[uid(1)].keep == Keep(KeepReason.YOUNG)
    disk.clocks.advance(GRACE)
    assert agent.sweep()[uid(1)].verdict is Action.MOVED
    assert disk.names() == set()
    assert disk.trash() == {f"{uid(1)}.{int(disk.clocks.wall)}"}


@pytest.mark.parametrize("scheme", VM_DIRECTORIES)
def test_only_names_of_the_schemes_form_are_its_directories(disk: Disk, scheme: str) -> None:
    disk.scheme = scheme
    [template] = [each.pod_directory.name for each in SCHEMES if each.name == scheme and each.pod_directory]
    ours, foreign = ([text.format(uid=uid(n), container="main") for n in (1, 2)] for text in (template, "{uid}@main"))
    for name in (*ours, *foreign):
        disk.make(name)
    disk.pods.uids = {uid(1)}
    said = Agent(disk).sweep_after_grace()
    assert said[ours[0]].keep == Keep(KeepReason.POD)
    assert said[ours[1]].verdict is Action.MOVED
    assert disk.names() == {ours[0], *foreign}


def test_a_directory_is_unchanged_in_the_trash_and_deleted_after_its_retention(disk: Disk, agent: Agent) -> None:
    before = snapshot(disk.make(uid(1)))
    agent.sweep_after_grace()
    [trashed] = disk.trash()
    assert snapshot(disk.root / TRASH / trashed) == before
    disk.clocks.advance(RETENTION - 1)
    assert agent.sweep()[f"{TRASH}/{trashed}"].keep == Keep(KeepReason.RETAINED)
    disk.clocks.advance(1)
    outcome = agent.sweep()[f"{TRASH}/{trashed}"]
    assert outcome.verdict is Action.DELETED
    assert outcome.freed >= 5000
    assert disk.trash() == set()


def test_on_a_full_disk_a_moved_directory_is_deleted_at_once(disk: Disk) -> None:
    disk.make(uid(1))
    Agent(disk, disk_pressure=0.0).sweep_after_grace()
    assert (disk.names(), disk.trash()) == (set(), set())


def test_a_directory_stays_while_kubelet_keeps_its_deleted_pod(disk: Disk, kubelet: KubeletPods) -> None:
    disk.make(uid(1))
    (kubelet.path / uid(1)).mkdir()
    agent = Agent(disk, kubelet)
    assert agent.reason(uid(1)) is KeepReason.KUBELET
    (kubelet.path / uid(1)).rmdir()
    assert agent.reason(uid(1)) is None


def test_kubelet_and_the_api_server_are_checked_again_before_the_move(disk: Disk, kubelet: KubeletPods) -> None:
    disk.make(uid(1))
    disk.pods.meanwhile = lambda: (kubelet.path / uid(1)).mkdir(exist_ok=True)
    assert Agent(disk, kubelet).reason(uid(1)) is KeepReason.KUBELET
    disk.pods.live = {uid(1)}
    assert Agent(disk).reason(uid(1)) is KeepReason.POD


@pytest.mark.parametrize("name", ["missing", "guarded/etc/passwd", "pods"], ids=["missing", "a file", "another node's"])
def test_nothing_is_removed_while_kubelets_directory_cannot_be_read(
    disk: Disk, kubelet: KubeletPods, name: str
) -> None:
    assert kubelet.uids() == {uid(99)}
    disk.make(uid(1))
    agent = Agent(disk, KubeletPods(disk.base / name, own_uid=uid(7)))
    assert agent.reason(uid(1)) is KeepReason.KUBELET_UNKNOWN
    assert agent.blocked is not None


def test_no_directory_is_moved_if_kubelets_directory_becomes_unreadable(disk: Disk, kubelet: KubeletPods) -> None:
    disk.make(uid(1))
    disk.pods.meanwhile = lambda: kubelet.path.rename(disk.base / "gone") if kubelet.path.exists() else None
    assert Agent(disk, kubelet).reason(uid(1)) is KeepReason.KUBELET_UNKNOWN


def test_a_static_pods_directory_stays_for_its_mirror_pod_and_for_kubelet(disk: Disk, kubelet: KubeletPods) -> None:
    disk.make(STATIC)
    assert Agent(disk).reason(STATIC) is KeepReason.STATIC
    disk.pods.uids = {STATIC}
    assert Agent(disk, kubelet).reason(STATIC) is KeepReason.POD
    disk.pods.uids = set()
    (kubelet.path / STATIC).mkdir()
    assert Agent(disk, kubelet).reason(STATIC) is KeepReason.KUBELET
    (kubelet.path / STATIC).rmdir()
    assert Agent(disk, kubelet).reason(STATIC) is None


@pytest.mark.parametrize(
    "error",
    [MustStay(KeepReason.PODS_UNKNOWN, "the first list is not complete"), Unavailable("no route to host")],
    ids=["an empty cache", "no answer"],
)
def test_without_a_list_of_pods_nothing_is_removed_not_even_from_the_trash(
    disk: Disk, agent: Agent, error: Unavailable
) -> None:
    disk.make(uid(1))
    agent.sweep_after_grace()
    disk.make(uid(2))
    disk.make("foreign")
    disk.pods.error = error
    disk.clocks.advance(10 * RETENTION)
    assert agent.reason(uid(2)) is KeepReason.PODS_UNKNOWN
    assert disk.names() == {uid(2), "foreign"}
    assert len(disk.trash()) == 1


def test_if_the_last_list_fails_nothing_is_removed_and_the_next_sweep_retries(disk: Disk, agent: Agent) -> None:
    """The LIST just before the moves may fail, for example because a continue token expires between two pages."""
    disk.make(uid(1))
    disk.make(uid(2))
    disk.pods.live_error = Unavailable("the continue token has expired (HTTP 410)")
    assert agent.reason(uid(1)) is KeepReason.PODS_UNKNOWN
    assert agent.reason(uid(2)) is KeepReason.PODS_UNKNOWN
    disk.pods.live_error = None
    assert agent.sweep()[uid(1)].verdict is Action.MOVED


def test_a_pod_that_reappears_gets_its_directory_back_from_the_trash(disk: Disk, agent: Agent) -> None:
    """The API server may lack a pod for some time, for example while etcd is restored from a backup."""
    before = snapshot(disk.make(uid(1)))
    agent.sweep_after_grace()
    disk.pods.uids = {uid(1)}
    [outcome] = agent.sweep().values()
    assert outcome.verdict is Action.RESTORED
    assert snapshot(disk.root / uid(1)) == before


def test_a_directory_from_the_trash_does_not_overwrite_an_existing_name(disk: Disk, agent: Agent) -> None:
    disk.make(uid(1))
    agent.sweep_after_grace()
    (disk.root / uid(1)).mkdir()
    disk.pods.uids = {uid(1)}
    said = agent.sweep()
    assert {outcome.keep for outcome in said.values()} == {Keep(KeepReason.POD)}
    assert list((disk.root / uid(1)).iterdir()) == []


def test_a_dry_run_reports_what_would_be_removed_and_changes_nothing(disk: Disk) -> None:
    disk.make(uid(1))
    Agent(disk).sweep_after_grace()
    disk.make(uid(2))
    disk.clocks.advance(RETENTION)
    before = snapshot(disk.root)
    agent = Agent(disk, dry_run=True, disk_pressure=0.0)
    verdicts = {outcome.verdict for outcome in agent.sweep_after_grace().values()}
    assert verdicts == {Action.WOULD_MOVE, Action.WOULD_DELETE}
    assert snapshot(disk.root) == before


def test_a_root_that_does_not_exist_yet_is_empty(disk: Disk, agent: Agent) -> None:
    disk.root.rmdir()
    assert agent.sweep() == {}
    assert agent.blocked is None


def test_a_sweep_that_is_out_of_time_leaves_the_rest_to_the_next(disk: Disk, agent: Agent) -> None:
    for number in range(3):
        disk.make(uid(number))
    agent.let_grace_pass()
    agent.sweep(give_up=lambda: len(disk.trash()) == 1)
    assert len(disk.names()) == 2
    agent.sweep()
    assert disk.names() == set()
