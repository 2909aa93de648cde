"""The command ``vcuda-controller node``, the agent that removes directories of deleted pods from a GPU node."""

import signal
import sys
import time
from pathlib import Path

import click
import msgspec
import structlog
from prometheus_client import CollectorRegistry

from controller.garbage.node import age, agent, in_use, names
from controller.garbage.node.pods import FixedPods, KubeletPods, PodSource, RecentPodList, WatchedPods, read_pods
from controller.garbage.node.sweep import NodeSweep
from controller.httpd import serve_status
from vcuda import errors, logs
from vcuda.cli import (
    FAILED,
    FiniteRange,
    fail,
    kubeconfig_option,
    listening_for,
    log_level_option,
    option,
    status_address_option,
)
from vcuda.kube import Kube, VersionCheck
from vcuda.kube.metrics import UnreadCollector

# A pod counts as deleted only if two consecutive sweeps miss it, because one list of pods may be older than the pod.
_TWICE = 2

_directory = click.Path(path_type=Path)


class NodeSettings(msgspec.Struct, frozen=True):
    """The values of the flags of ``vcuda-controller node``. ``--help`` describes the flags."""

    scheme: str
    node: str
    root: Path | None
    kubelet_pods: Path | None
    pod_uid: str | None
    host_pid: bool
    grace: float
    trash_retention: float
    disk_pressure: float
    dry_run: bool
    kubeconfig: Path | None
    period: float
    status_address: tuple[str, int]
    log_level: str
    once: bool
    pods: str | None
    complete: bool
    output: str

    @property
    def directory(self) -> Path:
        return self.root or Path(names.VM_DIRECTORIES[self.scheme].root)

    def kubelet(self) -> KubeletPods | None:
        return KubeletPods(self.kubelet_pods, self.pod_uid) if self.kubelet_pods else None

    def sweep(self, source: PodSource, grace: age.AgePolicy, retention: age.AgePolicy) -> NodeSweep:
        return NodeSweep(
            self.directory,
            names.VM_DIRECTORIES[self.scheme],
            source,
            self.kubelet(),
            grace,
            retention,
            self.disk_pressure / 100,
            dry_run=self.dry_run,
            sees_all=self.host_pid,
        )


@click.command(context_settings={"auto_envvar_prefix": "VCUDA"})
@option("--scheme", required=True, type=click.Choice(list(names.VM_DIRECTORIES)), help="Vendor of the directories.")
@option("--node", required=True, metavar="NAME", help="Name of this node.")
@option("--root", type=_directory, help="Directory that contains the pods' directories.  [default: by scheme]")
@option("--kubelet-pods", type=_directory, help="Path of /var/lib/kubelet/pods. Pods with a directory there exist.")
@option("--pod-uid", help="Uid of the agent's own pod. A list of pods without this uid is rejected.")
@option("--host-pid", is_flag=True, help="Keep directories that any process of the host uses. Needs hostPID: true.")
@option("--grace", default=300.0, type=FiniteRange(0), metavar="SECONDS", help="Minimum age of a removed directory.")
@option("--trash-retention", default=3600.0, type=FiniteRange(0), metavar="SECONDS", help="Time to stay in .trash.")
@option(
    "--disk-pressure", default=85.0, type=FiniteRange(0, 100), metavar="PERCENT", help="Disk usage that empties .trash."
)
@option("--dry-run", is_flag=True, help="Print or log the actions, and change nothing.")
@kubeconfig_option
@option("--period", default=60.0, type=FiniteRange(0.1, 86400), metavar="SECONDS", help="Time between sweeps.")
@status_address_option
@log_level_option
@option("--once", is_flag=True, help="Sweep once, print one line per directory, and exit.")
@option(
    "--pods", metavar="FILE|-", help="With --once: output of kubectl get pods -A -o json, to read instead of the API."
)
@option(
    "--complete", is_flag=True, help="With --pods: confirm that the file has all pods, even if none is on this node."
)
@option("-o", "--output", default="table", type=click.Choice(["table", "json"]), help="Output format of --once.")
def node(**flags: object) -> None:
    """Remove the vendors' directories of deleted pods from this node.

    A device plugin makes one directory per pod in --root. The agent removes such a directory if the name has the form
    of the scheme and the pod does not exist. The pod must be missing in the API and in kubelet's directory for --grace
    and in two consecutive sweeps. A directory is kept if a process listens on a socket in it, has a file in it open, or
    has it mounted. The agent moves a directory to .trash in --root and deletes it after --trash-retention. If the API
    server cannot be reached, the agent removes nothing.

    The agent writes only to --root, and reads /var/lib/kubelet/pods. Mount only these two directories of the host, both
    with mountPropagation HostToContainer, and /var/lib/kubelet/pods read-only. The agent sees open files of other
    processes only with hostPID and the capability SYS_PTRACE. With --host-pid, the agent removes nothing unless it can
    inspect all processes.

    With --once there is only one sweep. The age of a directory is then the time from its last change to the
    modification time of the pods file. A copied file seems newer than its pods, so use the output of kubectl directly.

    \b
    Examples:
      vcuda-controller node --scheme gpu-manager --node $NODE --pod-uid $UID --kubelet-pods /var/lib/kubelet/pods
          the command of the DaemonSet
      kubectl get pods -A -o json | vcuda-controller node --once --scheme hami --node gpu-7 --pods - --dry-run
          print which directories would be removed

    Exit status: 0 stopped, or the single sweep is done; 1 the API server or --root cannot be read, or Kubernetes is too
    old; 2 bad input.
    """
    settings = msgspec.convert(flags, NodeSettings)
    try:
        _check(settings)
        sys.exit(_once(settings) if settings.once else _stay(settings))
    except errors.BadInput as error:
        fail(str(error))


def _check(settings: NodeSettings) -> None:
    if settings.host_pid and not in_use.sees_host():
        raise errors.BadInput(
            "--host-pid requires hostPID: true in the agent's pod. Now /proc does not show the host's processes."
        )
    if settings.pods is not None and not settings.once:
        raise errors.BadInput("--pods requires --once. Without --once, the agent reads the pods from the API server.")
    if not settings.once and settings.pod_uid is None and settings.kubelet_pods is None:
        raise errors.BadInput(
            "--pod-uid or --kubelet-pods is required, so that the agent can verify that its list has this node's pods."
        )


def _once(settings: NodeSettings) -> int:
    _check_root(settings.directory)
    source, as_of = _pods_of(settings)
    sweep = settings.sweep(source, age.ModifiedAge(settings.grace, as_of), age.ModifiedAge(settings.trash_retention))
    outcomes: list[agent.DirectoryOutcome] = []
    try:
        blocked = sweep.run(outcomes.append)
    except OSError as error:
        click.echo(f"Error: cannot sweep {settings.directory}: {error.strerror}", err=True)
        return FAILED
    click.echo(agent.as_table(outcomes) if settings.output == "table" else agent.as_json(outcomes))
    if blocked is None:
        return 0
    _warn(f"no directory was removed: {blocked}")
    return FAILED if blocked.reason is names.KeepReason.PODS_UNKNOWN else 0


def _warn(message: str) -> None:
    click.echo(f"Warning: {message}", err=True)


def _check_root(root: Path) -> None:
    try:
        is_directory = root.is_dir()
    except OSError as error:  # The path may be too long, or the user may not enter a parent directory.
        raise errors.BadInput(f"cannot read directory {root}: {error.strerror}.") from error
    if not is_directory:
        raise errors.BadInput(f"{root} must be a directory.")


def _pods_of(settings: NodeSettings) -> tuple[PodSource, float]:
    began = time.time()
    if settings.pods is None:
        kube = Kube.connect(settings.kubeconfig, version_check=VersionCheck(_warn))
        return RecentPodList(kube, settings.node, settings.pod_uid), began
    text, written = _read(settings.pods)
    found = read_pods(text, None if settings.complete else settings.node)
    if found.warning:
        _warn(found.warning)
    return FixedPods(found.uids), min(began, written)


def _read(name: str) -> tuple[bytes, float]:
    if name == "-" and sys.stdin is None:  # Python sets `sys.stdin` to None if standard input is closed.
        raise errors.BadInput("--pods - reads standard input, but standard input is closed.")
    try:
        if name == "-":
            return sys.stdin.buffer.read(), time.time()
        with Path(name).open("rb") as file:
            return file.read(), Path(name).stat().st_mtime
    except OSError as error:
        raise errors.BadInput(f"cannot read the pods file {name}: {error.strerror}.") from error


def _stay(settings: NodeSettings) -> int:
    logs.configure(settings.log_level)
    kube = Kube.connect(settings.kubeconfig, version_check=VersionCheck(structlog.get_logger().warning))
    wakeup = agent.Wakeup()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: wakeup.stop())
    watched = WatchedPods(kube, settings.node, settings.pod_uid, settings.kubelet(), on_gone=wakeup.wake)
    grace, retention = age.ObservedAge(settings.grace, _TWICE), age.ObservedAge(settings.trash_retention, 1)
    sweep = settings.sweep(watched, grace, retention)
    registry = CollectorRegistry()
    registry.register(UnreadCollector(lambda: {"pods": watched.reflector}))
    log = structlog.get_logger()
    sweeping = agent.Agent(sweep.run, agent.SweepReporter(registry), wakeup, settings.period)
    with listening_for("--status-address", settings.status_address):
        server = serve_status(
            settings.status_address,
            registry,
            healthy=lambda: (
                sweeping.unhealthy() or (None if watched.reflector.alive else "the watch of pods has ended")
            ),
            ready=lambda: None if watched.reflector.synced.is_set() else "the first list of pods is not complete",
        )
    log.info("serving status", port=server.port)
    watched.reflector.start()
    sweeping.loop()
    watched.reflector.stop()
    watched.reflector.join(settings.period)
    log.info("stopped")
    return 0
