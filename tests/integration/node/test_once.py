"""The command ``vcuda-controller node --once``, run as root and as another user who owns the directories."""

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from controller.garbage.node.names import TRASH
from tests.integration.node.disk import HOUR, Disk, need_root, snapshot, uid
from tests.processes import SCRIPTS
from tests.rendered import MANIFESTS

PROGRAM = SCRIPTS / "vcuda-controller"
NODE = "gpu-7"
PLAIN = 65534
STATIC = "4dbbbc6a1bd7a7d1d1e2b6c6a9c1a4f0"
MILLION = 1_000_000
BOUNDED = 48 * 1024  # KiB

Json = dict[str, Any]


def pod(number: int, node: str = NODE, namespace: str = "team-a", **metadata: object) -> Json:
    about = {"name": f"train-{number}", "namespace": namespace, "uid": uid(number), **metadata}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": {"nodeName": node}}


def listed(*pods: Json, **fields: object) -> str:
    every = [pod(90, namespace="kube-system"), *pods]
    return json.dumps(
        {"apiVersion": "v1", "kind": "List", "metadata": {"resourceVersion": ""}, "items": every, **fields}
    )


class Once:
    """Runs ``vcuda-controller node --once`` on a disk as a given user."""

    def __init__(self, disk: Disk, user: int) -> None:
        self.disk = disk
        self.user = user

    def __call__(
        self, pods: str, *flags: str | Path, status: int = 0, stdin: bool = False
    ) -> subprocess.CompletedProcess[str]:
        file = self.disk.base / "pods.json"
        file.write_text(pods)
        for path in (self.disk.root, *self.disk.root.rglob("*"), *self.disk.base.iterdir(), self.disk.base):
            if path != self.disk.guarded:
                os.chown(path, self.user, self.user, follow_symlinks=False)
        ids = (f"--reuid={self.user}", f"--regid={self.user}", "--clear-groups")
        where = ("--root", self.disk.root, "--node", NODE, "--pods", "-" if stdin else file)
        command = ("setpriv", *ids, "--", PROGRAM, "node", "--once", "--scheme", self.disk.scheme, *where, *flags)
        done = subprocess.run(command, input=pods, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == status, done
        return done

    def verdicts(self, pods: str, *flags: str | Path) -> Mapping[str, tuple[str, str | None]]:
        rows = json.loads(self(pods, *flags, "-o", "json").stdout)
        return {row["directory"]: (row["verdict"], row["reason"]) for row in rows}


def as_plain_user(disk: Disk) -> Once:
    need_root()
    disk.base.chmod(0o755)
    return Once(disk, PLAIN)


@pytest.fixture(params=[0, PLAIN], ids=["as root", "as a plain user"])
def once(disk: Disk, request: pytest.FixtureRequest) -> Once:
    need_root()
    return as_plain_user(disk) if request.param else Once(disk, 0)


def test_the_verdict_on_each_directory_and_why(disk: Disk, once: Once) -> None:
    for number in (1, 2, 3, 4):
        disk.make(uid(number))
    disk.make(uid(5), age=0)
    disk.make("config")
    disk.make(STATIC)
    (disk.root / uid(6)).symlink_to(disk.guarded)
    (disk.base / "kubelet" / uid(3)).mkdir(parents=True)
    terminating = pod(2, deletionTimestamp="2026-01-01T00:00:00Z")
    mirror = pod(91, annotations={"kubernetes.io/config.mirror": STATIC})
    flags = ("--kubelet-pods", disk.base / "kubelet")
    assert once.verdicts(listed(pod(1), terminating, mirror), *flags) == {
        uid(1): ("kept", "pod"),
        uid(2): ("kept", "pod"),
        uid(3): ("kept", "kubelet"),
        uid(4): ("moved", None),
        uid(5): ("kept", "young"),
        uid(6): ("kept", "link"),
        "config": ("kept", "foreign-name"),
        STATIC: ("kept", "pod"),
        f"{TRASH}/{next(iter(disk.trash()))}": ("kept", "retained"),
    }
    assert disk.names() == {uid(1), uid(2), uid(3), uid(5), uid(6), "config", STATIC}


def test_the_table_gives_each_directory_its_verdict_and_the_reason(disk: Disk, once: Once) -> None:
    disk.make(uid(1))
    disk.make("\x1b[2J")
    done = once(listed(pod(1)))
    assert done.stdout.splitlines() == [
        "DIRECTORY                             VERDICT  WHY",
        f"{uid(1)}  kept     the pod exists",
        r"\x1b[2J                               kept     the name is not that of a directory of this scheme",
    ]
    assert done.stderr == ""


def test_a_dry_run_changes_nothing(disk: Disk, once: Once) -> None:
    disk.make(uid(1))
    before = snapshot(disk.root / uid(1))
    assert once.verdicts(listed(), "--dry-run") == {uid(1): ("would move", None)}
    inodes = [{name: facts[0] for name, facts in each.items()} for each in (before, snapshot(disk.root / uid(1)))]
    assert inodes[0] == inodes[1]
    assert not (disk.root / TRASH).exists()


def test_a_directory_is_deleted_from_the_trash_after_its_retention(disk: Disk, once: Once) -> None:
    disk.make(uid(1))
    once(listed())
    assert len(disk.trash()) == 1
    verdicts = once.verdicts(listed(), "--trash-retention", "0")
    assert [verdict for verdict, _ in verdicts.values()] == ["deleted"]
    assert disk.trash() == set()


def test_a_directory_newer_than_the_pods_file_stays(disk: Disk, once: Once) -> None:
    """The pod of the directory may have been created after the file was written."""
    disk.make(uid(1), age=2 * HOUR)
    disk.make(uid(2), age=HOUR)
    flags = ("--grace", "60", "--pods", disk.base / "old.json")
    (disk.base / "old.json").write_text(listed())
    os.utime(disk.base / "old.json", (time.time() - 1.5 * HOUR,) * 2)
    verdicts = once.verdicts(listed(), *flags)
    assert (verdicts[uid(1)], verdicts[uid(2)]) == (("moved", None), ("kept", "young"))


def test_the_pods_are_read_from_standard_input(disk: Disk, once: Once) -> None:
    disk.make(uid(1))
    disk.make(uid(2))
    once(listed(pod(2)), stdin=True)
    assert disk.names() == {uid(2)}


@pytest.fixture
def as_root(disk: Disk) -> Once:
    need_root()
    return Once(disk, 0)


def test_a_file_without_a_pod_of_the_node_is_accepted_only_with_the_flag(disk: Disk, as_root: Once) -> None:
    disk.make(uid(1))
    empty = json.dumps({"kind": "PodList", "items": []})
    assert "is on node" in as_root(empty, status=2).stderr
    assert disk.names() == {uid(1)}
    as_root(empty, "--complete")
    assert disk.names() == set()


OF_ONE_NAMESPACE = json.dumps({"kind": "List", "items": [pod(1)]})


@pytest.mark.parametrize(
    ("pods", "flags", "status", "says"),
    [
        pytest.param(listed(), ["--root", "none"], 2, "must be a directory", id="no root"),
        pytest.param(listed(), ["--root", "{base}/link"], 1, "Not a directory", id="a root that is a link"),
        pytest.param(listed(), ["--pods", "none"], 2, "No such file", id="no pods file"),
        pytest.param(listed()[:-20], [], 2, "must be a complete list of pods", id="a list that may lack pods"),
        pytest.param(OF_ONE_NAMESPACE, [], 0, "namespace 'team-a'", id="pods of one namespace"),
        pytest.param(listed(), ["--kubelet-pods", "none"], 0, "no directory was removed", id="kubelet cannot be asked"),
        pytest.param(listed(), ["--scheme", "cuda"], 2, "--scheme", id="an unknown scheme"),
        pytest.param(listed(), ["--grace", "-1"], 2, "--grace", id="a negative time"),
    ],
)
def test_a_likely_mistake_is_reported_and_no_directory_is_removed(
    disk: Disk, as_root: Once, *, pods: str, flags: list[str], status: int, says: str
) -> None:
    disk.make(uid(1))
    (disk.base / "link").symlink_to(disk.root)
    done = as_root(pods, *(flag.format(base=disk.base) for flag in flags), status=status)
    assert (says in done.stderr, done.stdout == "") == (True, status != 0)
    assert disk.names() == {uid(1)}


@pytest.mark.parametrize("root", ["closed/vm", "n" * 300])
def test_a_root_that_cannot_be_read_is_bad_input(disk: Disk, root: str) -> None:
    once = as_plain_user(disk)
    (disk.base / "closed").mkdir()
    (disk.base / "closed").chmod(0)
    done = once(listed(), "--root", disk.base / root, status=2)
    assert done.stderr.startswith(f"Error: cannot read directory {disk.base / root}: ")
    assert (done.stderr.count("\n"), done.stdout) == (1, "")


@pytest.mark.parametrize(
    ("redirection", "says"),
    [("<&-", "standard input is closed"), ("0>/dev/null", "-: Bad file descriptor")],
    ids=["closed", "not to be read"],
)
def test_an_unusable_standard_input_is_bad_input(disk: Disk, redirection: str, says: str) -> None:
    where = ("--root", disk.root, "--node", NODE, "--scheme", disk.scheme)
    command = ("sh", "-c", f'exec "$0" "$@" {redirection}', PROGRAM, "node", "--once", "--pods", "-", *where)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, says in done.stderr, done.stderr.count("\n")) == (2, True, 1), done


def test_files_that_the_user_must_not_touch_stay_and_the_rest_is_removed(disk: Disk) -> None:
    once = as_plain_user(disk)
    for number in (1, 2):
        disk.make(uid(number))
    once(listed(pod(1), pod(2)))
    (disk.root / uid(1)).chmod(0)
    verdicts = once.verdicts(listed())
    assert (verdicts[uid(1)], verdicts[uid(2)]) == (("kept", "error"), ("moved", None))


@pytest.fixture
def roomy() -> Iterator[Disk]:
    """A disk in memory, if the machine has /dev/shm, because a test creates a million files on it."""
    memory = Path("/dev/shm")  # noqa: S108  # the test makes its own directory there
    base = Path(tempfile.mkdtemp(prefix="vm-directories-", dir=memory if memory.is_dir() else None))
    disk = Disk(base)
    disk.furnish()
    yield disk
    shutil.rmtree(base)


def peak(disk: Disk, *flags: str) -> int:
    file = disk.base / "pods.json"
    file.write_text(listed())
    where = ("--root", disk.root, "--node", NODE, "--pods", file, "--scheme", disk.scheme)
    process = subprocess.Popen((PROGRAM, "node", "--once", *where, *flags), stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return used.ru_maxrss


def test_a_million_files_are_checked_and_deleted_in_little_memory(roomy: Disk) -> None:
    few = peak(roomy)
    path = roomy.make(uid(1))
    directory = os.open(path / "main", os.O_RDONLY)
    for number in range(MILLION):
        os.link("vcuda.config", str(number), src_dir_fd=directory, dst_dir_fd=directory)
    os.close(directory)
    roomy.age(path, HOUR)
    many = peak(roomy, "--trash-retention", "0")
    print(f"{few} KiB for none, {many} KiB for {MILLION:,} files")
    assert (roomy.names(), roomy.trash()) == (set(), set())
    assert many - few < BOUNDED


# With only the capabilities of its manifest, the agent removes files that containers left behind as any user


CONTAINER_USER = 1000


def capabilities() -> list[str]:
    spec = yaml.safe_load((MANIFESTS / "node-agent/common/daemon-set.yaml").read_text())["spec"]["template"]["spec"]
    [container] = spec["containers"]
    assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
    return [f"+{name.lower()}" for name in container["securityContext"]["capabilities"]["add"]]


def given_to_containers(path: Path, mode: int) -> None:
    inner = path / "main" / "tmp"
    inner.mkdir()
    (inner / "file").touch()
    inner.chmod(mode)
    for each in (path, *path.rglob("*")):
        os.chown(each, CONTAINER_USER, CONTAINER_USER)


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(0o700, id="for its owner alone"),
        pytest.param(0o500, id="not to be written"),
        pytest.param(0o1777, id="sticky: only an owner deletes there"),
    ],
)
def test_files_of_a_containers_own_user_are_removed(disk: Disk, mode: int) -> None:
    need_root()
    given_to_containers(disk.make(uid(1)), mode)
    disk.age(disk.root / uid(1), 7200)
    file = disk.base / "pods.json"
    file.write_text(listed(pod(80)))
    bounded = f"--bounding-set={','.join(('-all', *capabilities()))}"
    where = ("--scheme", disk.scheme, "--root", disk.root, "--node", NODE, "--pods", file)
    command = ("setpriv", bounded, "--", PROGRAM, "node", "--once", "--trash-retention", "0", *where)
    for _ in range(2):
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert (disk.names(), disk.trash()) == (set(), set())
