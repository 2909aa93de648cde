"""Tests that a sweep (a pass of the node agent) deletes a directory only if the whole proof shows that it is unused."""

from collections.abc import Callable
from pathlib import Path

import pytest

from controller.garbage.node.agent import Action
from controller.garbage.node.names import VM_DIRECTORIES, Keep, KeepReason, MustStay
from tests.integration.node.disk import GRACE, HOUR, OWN, Agent, Disk, snapshot, uid
from tests.tables import cases
from vcuda.errors import Unavailable, VcudaError
from vcuda.requests.schemes import SCHEMES

STATIC = "4dbbbc6a1bd7a7d1d1e2b6c6a9c1a4f0"


def test_a_directory_is_deleted_when_its_pod_was_deleted_for_the_grace_period(disk: Disk, agent: Agent) -> None:
    disk.make(uid(1))
    disk.pods.uids = {uid(1)}
    assert agent.sweep()[uid(1)].keep == Keep(KeepReason.POD)
    disk.pods.uids = {uid(2)}
    assert agent.sweep()[uid(1)].keep == Keep(KeepReason.SEEN_ONCE)
    assert agent.sweep()[uid(1)].keep == Keep(KeepReason.YOUNG)
    disk.clocks.advance(GRACE)
    outcome = agent.sweep()[uid(1)]
    assert outcome.verdict is Action.DELETED
    assert outcome.freed >= 5000
    assert disk.names() == set()


def test_a_directory_seen_once_is_not_deleted_however_old_it_is(disk: Disk) -> None:
    disk.make(uid(1), age=1000 * HOUR)
    for _ in range(3):
        assert Agent(disk).sweep()[uid(1)].keep == Keep(KeepReason.SEEN_ONCE)
    assert disk.names() == {uid(1)}


def test_a_directory_whose_pod_is_back_in_one_list_is_observed_anew(disk: Disk, agent: Agent) -> None:
    disk.make(uid(1))
    agent.let_grace_pass()
    disk.pods.uids = {uid(1)}
    assert agent.sweep()[uid(1)].keep == Keep(KeepReason.POD)
    disk.pods.uids = set()
    assert agent.sweep()[uid(1)].keep == Keep(KeepReason.SEEN_ONCE)


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
    assert said[ours[1]].verdict is Action.DELETED
    assert disk.names() == {ours[0], *foreign}


def test_a_directory_stays_while_kubelet_keeps_its_deleted_pod(disk: Disk, agent: Agent) -> None:
    """If the pod was deleted by force, its containers may still run."""
    disk.make(uid(1))
    (disk.kubelet / uid(1)).mkdir()
    assert agent.reason(uid(1)) is KeepReason.KUBELET
    (disk.kubelet / uid(1)).rmdir()
    assert agent.reason(uid(1)) is None


@cases(
    "appears, reason",
    in_the_last_list=(lambda disk: disk.pods.live.add(uid(1)), KeepReason.POD),
    in_kubelets_directory=(lambda disk: (disk.kubelet / uid(1)).mkdir(exist_ok=True), KeepReason.KUBELET),
    as_a_static_pod=(lambda disk: (disk.kubelet / STATIC).mkdir(exist_ok=True), KeepReason.STATIC),
)
def test_a_pod_that_appears_just_before_the_deletion_keeps_its_directory(
    disk: Disk, agent: Agent, appears: Callable[[Disk], None], reason: KeepReason
) -> None:
    disk.make(uid(1))
    disk.pods.live = set()
    disk.pods.meanwhile = lambda: appears(disk)
    assert agent.reason(uid(1)) is reason


def missing(disk: Disk) -> None:
    disk.kubelet.rename(disk.base / "away")


def a_file(disk: Disk) -> None:
    missing(disk)
    disk.kubelet.touch()


def of_another_node(disk: Disk) -> None:
    (disk.kubelet / OWN).rename(disk.kubelet / uid(8))


def empty(disk: Disk) -> None:
    (disk.kubelet / OWN).rmdir()


def a_dangling_link(disk: Disk) -> None:
    missing(disk)
    disk.kubelet.symlink_to("nowhere")


every_lost_sight = pytest.mark.parametrize("lose", [missing, a_file, of_another_node, empty, a_dangling_link])


@every_lost_sight
def test_without_sight_of_kubelets_directory_nothing_is_deleted(
    disk: Disk, agent: Agent, lose: Callable[[Disk], None]
) -> None:
    disk.make(uid(1))
    disk.make(STATIC)
    lose(disk)
    assert agent.reason(uid(1)) is KeepReason.KUBELET_UNKNOWN
    assert agent.reason(STATIC) is KeepReason.KUBELET_UNKNOWN
    assert agent.blocked is not None
    assert agent.blocked.reason is KeepReason.KUBELET_UNKNOWN


@every_lost_sight
def test_a_directory_stays_if_sight_of_kubelets_directory_is_lost_before_the_deletion(
    disk: Disk, agent: Agent, lose: Callable[[Disk], None]
) -> None:
    disk.make(uid(1))
    agent.let_grace_pass()
    disk.pods.meanwhile = lambda: lose(disk)
    assert agent.sweep()[uid(1)].keep is not None
    assert disk.names() == {uid(1)}


def test_kubelets_directory_that_cannot_be_read_is_no_sight(
    disk: Disk, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_path: Path) -> list[str]:
        raise PermissionError(13, "Permission denied")

    disk.make(uid(1))
    with monkeypatch.context() as patched:
        patched.setattr("controller.garbage.node.pods.os.listdir", fail)
        outcome = agent.sweep_after_grace()[uid(1)]
    assert outcome.keep == Keep(KeepReason.KUBELET_UNKNOWN, f"{disk.kubelet}: Permission denied")
    assert disk.names() == {uid(1)}


@pytest.mark.parametrize(
    "error",
    [MustStay(KeepReason.PODS_UNKNOWN, "no list"), Unavailable("no route to host")],
    ids=["no list", "no answer"],
)
def test_nothing_is_deleted_while_the_api_server_is_away(disk: Disk, agent: Agent, error: VcudaError) -> None:
    disk.make(uid(1))
    disk.make("foreign")
    agent.let_grace_pass()
    disk.pods.error = error
    disk.clocks.advance(10 * HOUR)
    assert agent.reason(uid(1)) is KeepReason.PODS_UNKNOWN
    assert disk.names() == {uid(1), "foreign"}
    disk.pods.error = None
    assert agent.sweep()[uid(1)].verdict is Action.DELETED


def test_a_list_without_the_agents_own_pod_is_not_used(disk: Disk, agent: Agent) -> None:
    disk.make(uid(1))
    disk.pods.own = uid(3)
    assert agent.reason(uid(1)) is KeepReason.PODS_UNKNOWN


def test_if_the_last_list_fails_nothing_is_deleted_and_the_next_sweep_retries(disk: Disk, agent: Agent) -> None:
    """The LIST just before the deletions may fail, for example because a continue token expires between its pages."""
    disk.make(uid(1))
    disk.make(uid(2))
    disk.pods.live_error = Unavailable("the continue token has expired (HTTP 410)")
    assert agent.reason(uid(1)) is KeepReason.PODS_UNKNOWN
    assert agent.reason(uid(2)) is KeepReason.PODS_UNKNOWN
    disk.pods.live_error = None
    assert agent.sweep()[uid(1)].verdict is Action.DELETED


def test_a_static_pods_own_directory_stays_while_kubelet_has_the_pod(disk: Disk, agent: Agent) -> None:
    """The kubelet names the directory of a static pod by the static pod's uid, even if there is no mirror pod."""
    disk.make(STATIC)
    (disk.kubelet / STATIC).mkdir()
    assert agent.reason(STATIC) is KeepReason.KUBELET
    (disk.kubelet / STATIC).rmdir()
    assert agent.reason(STATIC) is None


@cases(
    "statics, uid_of_static, reason",
    mirror_pod_may_have_cards=({STATIC: True}, STATIC, KeepReason.STATIC),
    mirror_pod_has_no_cards=({STATIC: False}, STATIC, None),
    no_mirror_pod=({}, STATIC, KeepReason.STATIC),
    mirror_pod_of_another_static_pod=({STATIC[::-1]: False}, STATIC, KeepReason.STATIC),
    uid_set_by_the_manifest_and_cards=({uid(5): True}, uid(5), KeepReason.STATIC),
    uid_set_by_the_manifest_and_no_cards=({uid(5): False}, uid(5), None),
    deleted_pod_that_kubelet_still_has=({}, uid(5), None),
)
def test_the_directory_of_a_former_mirror_pod_stays_while_a_static_pod_may_have_cards(
    disk: Disk, agent: Agent, statics: dict[str, bool], uid_of_static: str, reason: KeepReason | None
) -> None:
    """The device plugin named the directory by a mirror pod, which was deleted since. The static pod still runs."""
    disk.make(uid(1))
    (disk.kubelet / uid_of_static).mkdir()
    disk.pods.statics = statics
    assert agent.reason(uid(1)) is reason


def test_a_dry_run_reports_what_would_be_deleted_and_changes_nothing(disk: Disk) -> None:
    disk.make(uid(1))
    disk.make(uid(2))
    disk.pods.uids = {uid(2)}
    before = snapshot(disk.root)
    said = Agent(disk, dry_run=True).sweep_after_grace()
    assert {name: outcome.verdict for name, outcome in said.items()} == {
        uid(1): Action.WOULD_DELETE,
        uid(2): Action.KEPT,
    }
    assert snapshot(disk.root) == before


def test_a_root_that_does_not_exist_yet_is_empty(disk: Disk, agent: Agent) -> None:
    disk.root.rmdir()
    assert agent.sweep() == {}
    assert agent.blocked is None


def test_a_root_that_is_a_link_is_not_swept(disk: Disk, agent: Agent) -> None:
    disk.make(uid(1))
    disk.root.rename(disk.base / "real")
    disk.root.symlink_to("real")
    with pytest.raises(OSError, match="Not a directory"):
        agent.sweep_after_grace()
    assert (disk.base / "real" / uid(1)).exists()


def test_a_sweep_that_is_out_of_time_leaves_the_rest_to_the_next(disk: Disk, agent: Agent) -> None:
    for number in range(3):
        disk.make(uid(number))
    agent.let_grace_pass()
    agent.sweep(give_up=lambda: True)
    assert len(disk.names()) == 2, "even a sweep without time deletes one directory"
    agent.sweep()
    assert disk.names() == set()
