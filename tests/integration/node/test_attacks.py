"""A tenant cannot make the node agent delete directories in use, or files outside its root.

The root is the directory with one directory per pod. The fixture `disk` compares a tree outside the root before and
after each test.
"""

import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from controller.garbage.node import fs
from controller.garbage.node.agent import Action
from controller.garbage.node.fs import opened_root
from controller.garbage.node.in_use import InUse, scan
from controller.garbage.node.names import TRASH, Keep, KeepReason
from tests.integration.node.disk import RETENTION, Agent, Disk, snapshot, uid

DEEP = 3000
LONG = 250


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        pytest.param(lambda path: path.symlink_to("../guarded/etc"), KeepReason.LINK, id="a link"),
        pytest.param(lambda path: path.symlink_to("nowhere"), KeepReason.LINK, id="a dangling link"),
        pytest.param(os.mkfifo, KeepReason.NOT_A_DIRECTORY, id="a FIFO"),
        pytest.param(Path.touch, KeepReason.NOT_A_DIRECTORY, id="a file"),
    ],
)
def test_a_file_or_link_with_the_name_of_a_pod_stays(
    disk: Disk, agent: Agent, make: Callable[[Path], None], reason: KeepReason
) -> None:
    make(disk.root / uid(1))
    before = snapshot(disk.root)
    assert agent.reason(uid(1)) is reason
    del (after := snapshot(disk.root))[TRASH]
    assert {**after, ".": None} == {**before, ".": None}


@pytest.mark.parametrize(
    "name", [f"{uid(1)}..", f"..{uid(1)}", "...", f"{uid(1)} ", "\udcff\udcfe", "\x1b[2J", "a" * 255, f".trash{uid(1)}"]
)
def test_directories_with_other_names_stay(disk: Disk, agent: Agent, name: str) -> None:
    path = disk.make(name)
    before = snapshot(path)
    assert agent.reason(name) is KeepReason.FOREIGN
    assert snapshot(path) == before


def links(path: Path) -> None:
    (path / "etc").symlink_to(path.parents[1] / "guarded" / "etc")
    (path / "main" / "up").symlink_to("../../../guarded")
    (path / "itself").symlink_to(".")


def a_fifo_and_a_socket_without_a_listener(path: Path) -> None:
    os.mkfifo(path / "fifo")
    with ExitStack() as stack:
        bound(path / "vcuda.sock", stack)


def names_of_every_kind_of_byte(path: Path) -> None:
    for name in ("\udcff\udcfe", "new\nline", "\x1b[2J", "-rf", "~0", " ", "a" * 255):
        (path / name / "~0").mkdir(parents=True)
        (path / name / "~1").touch()


def a_path_of_many_thousand_bytes(path: Path) -> None:
    """Create a file whose path is longer than PATH_MAX, 4,096 bytes, so that it cannot be opened by its path."""
    at = os.open(path, os.O_RDONLY)
    for level in range(DEEP):
        name = f"{level:0{LONG}}"
        os.mkdir(name, dir_fd=at)
        below = os.open(name, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(os.open("bottom", os.O_CREAT, dir_fd=at))
    os.close(at)


@pytest.mark.parametrize(
    "fill", [links, a_fifo_and_a_socket_without_a_listener, names_of_every_kind_of_byte, a_path_of_many_thousand_bytes]
)
def test_everything_in_a_directory_is_deleted_and_no_link_is_followed(
    disk: Disk, agent: Agent, fill: Callable[[Path], None]
) -> None:
    fill(disk.make(uid(1)))
    agent.sweep_to_the_end()
    assert (disk.names(), disk.trash()) == (set(), set())


def test_a_file_with_a_hard_link_outside_keeps_its_other_name(disk: Disk, agent: Agent) -> None:
    outside = disk.base / "outside"
    outside.write_bytes(bytes(1_000_000))
    os.link(outside, disk.make(uid(1)) / "inside")
    agent.sweep_after_grace()
    [trashed] = disk.trash()
    disk.clocks.advance(RETENTION)
    freed = agent.sweep()[f"{TRASH}/{trashed}"].freed
    assert (disk.trash(), outside.stat().st_size) == (set(), 1_000_000)
    assert freed < 1_000_000, "a file with a second hard link frees no space"


def bound(path: Path, stack: ExitStack, kind: int = socket.SOCK_STREAM) -> socket.socket:
    server = stack.enter_context(closing(socket.socket(socket.AF_UNIX, kind)))
    server.bind(str(path))
    return server


def listening_two_levels_below_like_gpu_manager(path: Path, stack: ExitStack) -> None:
    below = path / "main" / "sub"
    below.mkdir(parents=True)
    bound(below / "vcuda.sock", stack).listen()


def listening_with_a_full_queue(path: Path, stack: ExitStack) -> None:
    bound(path / "app.sock", stack).listen(0)
    for _ in range(2):
        client = stack.enter_context(closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)))
        client.connect_ex(str(path / "app.sock"))


@pytest.mark.parametrize(
    "serve",
    [
        pytest.param(lambda path, stack: bound(path / "app.sock", stack).listen(), id="listening"),
        listening_with_a_full_queue,
        listening_two_levels_below_like_gpu_manager,
        pytest.param(lambda path, stack: bound(path / "log.sock", stack, socket.SOCK_DGRAM), id="receiving datagrams"),
    ],
)
def test_a_directory_with_a_listening_socket_stays_until_the_socket_closes(
    disk: Disk, agent: Agent, serve: Callable[[Path, ExitStack], None]
) -> None:
    path = disk.make(uid(1))
    with ExitStack() as stack:
        serve(path, stack)
        disk.age(path, 3600)
        assert agent.reason(uid(1)) is KeepReason.LISTENING
        disk.clocks.advance(59)
        assert agent.sweep()[uid(1)].keep is not None
    disk.clocks.advance(3600)
    assert agent.sweep()[uid(1)].verdict is Action.MOVED


def test_gpu_managers_own_listener_keeps_no_directory_of_a_deleted_pod(disk: Disk, agent: Agent) -> None:
    """gpu-manager listens on vcuda.sock until the directory is removed, even if the pod was deleted."""
    path = disk.make(uid(1))
    with ExitStack() as stack:
        for directory in (path, path / "main"):
            directory.mkdir(exist_ok=True)
            bound(directory / "vcuda.sock", stack).listen()
        agent.sweep_after_grace()
        assert len(disk.trash()) == 1
        disk.clocks.advance(RETENTION)
        agent.sweep()
        assert disk.trash() == set()


HOLD = """
import ctypes, mmap, os, platform, sys, threading, time
path, how = sys.argv[1:]
def outlive():
    while open("/proc/self/stat").read().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    print(flush=True)
    sys.stdin.read()
    os._exit(0)
os.chdir(path if how == "cwd" else "/")
held = os.open(path if how == "directory" else path + "/main/vcuda.config", os.O_RDONLY)
if how == "map":  # not by the module mmap, which keeps a descriptor of its own
    libc = ctypes.CDLL(None)
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mmap(None, 4096, mmap.PROT_READ, mmap.MAP_SHARED, held, 0)
if how in ("map", "cwd"):
    os.close(held)
if how == "thread":
    threading.Thread(target=outlive).start()
    ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)  # exit: of this thread alone
print(flush=True)
sys.stdin.read()
"""


@contextmanager
def held(path: Path, how: str) -> Iterator[None]:
    command = (sys.executable, "-c", HOLD, path, how)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield
        process.communicate()


@pytest.mark.parametrize("how", ["file", "map", "directory", "cwd", "thread"])
def test_a_directory_stays_while_another_process_has_a_file_open_or_mapped(disk: Disk, agent: Agent, how: str) -> None:
    path = disk.make(uid(1))
    disk.make(uid(2))
    with held(path, how):
        assert agent.reason(uid(1)) is KeepReason.OPEN
        assert disk.names() == {uid(1)}
    disk.clocks.advance(3600)
    assert agent.sweep()[uid(1)].verdict is Action.MOVED


def test_a_directory_that_is_used_again_in_the_trash_is_not_deleted(disk: Disk, agent: Agent) -> None:
    """A container that still has the directory mounted can open a file in it, even after the move into the trash."""
    disk.make(uid(1))
    agent.sweep_after_grace()
    [trashed] = disk.trash()
    disk.clocks.advance(RETENTION)
    with held(disk.root / TRASH / trashed, "map"):
        agent.sweep()
        disk.clocks.advance(RETENTION)
        outcome = agent.sweep()[f"{TRASH}/{trashed}"]
        assert outcome.keep == Keep(KeepReason.OPEN, "vcuda.config")
    disk.clocks.advance(3600)
    agent.sweep()
    assert disk.trash() == set()


@pytest.mark.parametrize(("sees_all", "reason"), [(True, KeepReason.UNSEEN), (False, None)])
def test_with_host_pid_an_unreadable_process_keeps_the_directories_it_may_use(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, reason: KeepReason | None, *, sees_all: bool
) -> None:
    disk.make(uid(1))
    monkeypatch.setattr("controller.garbage.node.in_use.scan", lambda *_, **__: InUse(unseen=["7"]))
    assert Agent(disk, sees_all=sees_all).reason(uid(1)) is reason


def around_the_move(
    monkeypatch: pytest.MonkeyPatch, before: Callable[[], None], after: Callable[[], None] = lambda: None
) -> None:
    plain = fs.rename

    def rename(name: str, parent: int, new_name: str, new_parent: int) -> None:
        monkeypatch.setattr(fs, "rename", plain)
        before()
        plain(name, parent, new_name, new_parent)
        after()

    monkeypatch.setattr(fs, "rename", rename)


@pytest.mark.parametrize("with_what", ["a link", "another directory"])
def test_a_directory_replaced_between_check_and_rename_is_moved_back(
    disk: Disk, agent: Agent, monkeypatch: pytest.MonkeyPatch, with_what: str
) -> None:
    path = disk.make(uid(1))

    def exchange() -> None:
        path.rename(disk.base / "checked")
        if with_what == "a link":
            path.symlink_to(disk.guarded / "etc")
        else:
            disk.make(uid(1), age=0)

    agent.let_grace_pass()
    around_the_move(monkeypatch, exchange)
    assert agent.sweep()[uid(1)].keep == Keep(KeepReason.CHANGED)
    assert (path.is_symlink(), disk.trash()) == (with_what == "a link", set())
    assert (disk.base / "checked" / "main" / "vcuda.config").exists()


def test_a_directory_replaced_after_it_was_listed_stays(disk: Disk, agent: Agent) -> None:
    path = disk.make(uid(1))

    def exchange() -> None:
        path.rename(disk.base / "listed")
        disk.make(uid(1), age=0)

    agent.let_grace_pass()
    disk.pods.meanwhile = exchange
    assert agent.sweep()[uid(1)].keep == Keep(KeepReason.CHANGED)


def test_a_directory_that_cannot_be_moved_back_at_once_is_moved_back_later(
    disk: Disk, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a directory is never deleted. It is moved back when its old name is free."""
    path = disk.make(uid(1))

    def exchange() -> None:
        path.rename(disk.base / "checked")
        path.mkdir()
        (path / "theirs").touch()

    agent.let_grace_pass()
    around_the_move(monkeypatch, exchange, path.mkdir)
    reasons = {outcome.keep and outcome.keep.reason for outcome in agent.sweep().values()}
    assert reasons == {KeepReason.ERROR, KeepReason.INTERRUPTED}
    [moving] = disk.trash()
    disk.pods.uids = {uid(1)}
    disk.clocks.advance(10 * RETENTION)
    agent.sweep()
    assert [each.name for each in (disk.root / TRASH / moving).iterdir()] == ["theirs"]
    path.rmdir()
    agent.sweep()
    assert [each.name for each in path.iterdir()] == ["theirs"]


def test_a_directory_of_the_trash_that_is_a_link_is_not_used(disk: Disk, agent: Agent) -> None:
    disk.make(uid(1))
    (disk.root / TRASH).symlink_to(disk.guarded)
    assert agent.reason(uid(1)) is KeepReason.ERROR
    assert agent.blocked is not None


@pytest.mark.parametrize("name", ["link", "file", "fifo", f"{uid(1)}.1700000000", f"{uid(1)}"])
def test_other_files_in_the_trash_stay(disk: Disk, name: str) -> None:
    (disk.root / TRASH).mkdir()
    (disk.root / TRASH / name).symlink_to(disk.guarded)
    agent = Agent(disk, disk_pressure=0.0)
    assert agent.sweep_after_grace()[f"{TRASH}/{name}"].keep == Keep(KeepReason.FOREIGN)
    assert disk.trash() == {name}


def test_an_open_file_at_the_bottom_of_a_deep_tree_is_found(disk: Disk, agent: Agent) -> None:
    path = disk.make(uid(1))
    deep = path.joinpath(*["d"] * 200)
    deep.mkdir(parents=True)
    (deep / "main").mkdir()
    (deep / "main" / "vcuda.config").write_bytes(b"x")
    for number in range(5):
        (deep.parent / f"beside-{number}").mkdir()
    with held(deep, "map"):
        assert agent.reason(uid(1)) is KeepReason.OPEN


def test_a_zombie_process_keeps_no_directory(disk: Disk) -> None:
    child = os.posix_spawn("/bin/true", ["true"], {})
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    try:
        with opened_root(disk.root) as root:
            assert str(child) not in scan(root.mount).unseen
    finally:
        os.waitpid(child, 0)


def test_open_files_of_the_agent_itself_keep_no_directory(disk: Disk, agent: Agent) -> None:
    with (disk.make(uid(1)) / "pids.config").open("rb") as ours, mmap.mmap(ours.fileno(), 0, prot=mmap.PROT_READ):
        assert agent.reason(uid(1)) is None
