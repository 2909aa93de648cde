"""The command ``vcuda-controller node``."""

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
from vcuda.cli import FiniteRange, fail, kubeconfig_option, log_level_option, option, status_address_option
from vcuda.kube import Kube, VersionCheck

FAILED = 1

# A list that lacks a pod once may be one that was made just before the pod: two in a row are not.
_TWICE = 2

_directory = click.Path(path_type=Path)


class NodeSettings(msgspec.Struct, frozen=True):
    """The flags, as they are described by ``--help``; times in seconds, ``disk_pressure`` in percent."""

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
        """The root."""
        return self.root or Path(names.VM_DIRECTORIES[self.scheme].root)

    def kubelet(self) -> KubeletPods | None:
        """Return what kubelet keeps; None where nobody said where."""
        return KubeletPods(self.kubelet_pods, self.pod_uid) if self.kubelet_pods else None

    def sweep(self, source: PodSource, grace: age.AgePolicy, retention: age.AgePolicy) -> NodeSweep:
        """Return a sweep by these settings."""
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
@option("--scheme", required=True, type=click.Choice(list(names.VM_DIRECTORIES)), help="Whose directories.")
@option("--node", required=True, metavar="NAME", help="Name of this node.")
@option("--root", type=_directory, help="Directory that holds them.  [default: where the scheme has it]")
@option("--kubelet-pods", type=_directory, help="/var/lib/kubelet/pods: what kubelet keeps stays.")
@option("--pod-uid", help="Uid of the pod that this runs in: a list of pods without it is not this node's.")
@option("--host-pid", is_flag=True, help="The pod has hostPID: what any process holds open stays.")
@option("--grace", default=300.0, type=FiniteRange(0), metavar="SECONDS", help="Nothing younger goes.")
@option("--trash-retention", default=3600.0, type=FiniteRange(0), metavar="SECONDS", help="Stay in .trash.")
@option("--disk-pressure", default=85.0, type=FiniteRange(0, 100), metavar="PERCENT", help="Above, no stay.")
@option("--dry-run", is_flag=True, help="Change nothing; say what would be done.")
@kubeconfig_option
@option("--period", default=60.0, type=FiniteRange(0.1, 86400), metavar="SECONDS", help="Time between sweeps.")
@status_address_option
@log_level_option
@option("--once", is_flag=True, help="Sweep once, print a line for each directory, and end.")
@option("--pods", metavar="FILE|-", help="With --once: the pods, by kubectl get pods -A -o json; no cluster is asked.")
@option("--complete", is_flag=True, help="With --pods: the file holds all pods, though it has none of the node.")
@option("-o", "--output", default="table", type=click.Choice(["table", "json"]), help="With --once.")
def node(**flags: object) -> None:
    """Remove the directories that vendors keep on a node for pods that are gone.

    A directory goes only if its name is of the scheme's form, its pod is neither in the API nor kept by kubelet, in
    two sweeps in a row and for the grace period, and nothing listens in it, holds it open or has it mounted. It is
    moved to .trash beside it, and deleted after its stay there. While the API server is not heard, nothing goes.

    The agent writes to one directory of the host, the root, and reads /var/lib/kubelet/pods. Mount these two and
    nothing else, the second read-only, both with mountPropagation HostToContainer. With hostPID it sees who holds
    files open; to look into every process it needs the capability SYS_PTRACE, and --host-pid to insist on it.

    With --once there is no second sweep: age is told by the directory's time of change alone, as of the time of the
    pods file. A file that was copied, or is piped from one, seems newer than it is: list the pods anew.

    \b
    Examples:
      vcuda-controller node --scheme gpu-manager --node $NODE --pod-uid $UID --kubelet-pods /var/lib/kubelet/pods
          in a DaemonSet
      kubectl get pods -A -o json | vcuda-controller node --once --scheme hami --node gpu-7 --pods - --dry-run
          by hand: what would go?

    Exit status: 0 stopped, or swept once; 1 the API server or the root cannot be read, or Kubernetes is too
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
        raise errors.BadInput("--host-pid is given, but the host's processes are not in /proc: set hostPID: true.")
    if settings.pods is not None and not settings.once:
        raise errors.BadInput("--pods is for --once: an agent that stays watches the API server.")
    if not settings.once and settings.pod_uid is None and settings.kubelet_pods is None:
        raise errors.BadInput(
            "Give --pod-uid or --kubelet-pods: else nothing proves that the pods listed are this node's."
        )


def _once(settings: NodeSettings) -> int:
    _check_root(settings.directory)
    source, as_of = _pods_of(settings)
    sweep = settings.sweep(source, age.ModifiedAge(settings.grace, as_of), age.ModifiedAge(settings.trash_retention))
    outcomes: list[agent.DirectoryOutcome] = []
    try:
        blocked = sweep.run(outcomes.append)
    except OSError as error:
        click.echo(f"Error: {settings.directory}: {error.strerror}", err=True)
        return FAILED
    click.echo(agent.as_table(outcomes) if settings.output == "table" else agent.as_json(outcomes))
    if blocked is None:
        return 0
    _warn(f"nothing was removed: {blocked}")
    return FAILED if blocked.reason is names.KeepReason.PODS_UNKNOWN else 0


def _warn(message: str) -> None:
    click.echo(f"Warning: {message}", err=True)


def _check_root(root: Path) -> None:
    try:
        is_directory = root.is_dir()
    except OSError as error:  # such as of a name that is too long, or below a directory that may not be entered
        raise errors.BadInput(f"{root}: {error.strerror}.") from error
    if not is_directory:
        raise errors.BadInput(f"{root} is no directory.")


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
    if name == "-" and sys.stdin is None:  # as Python has it where the descriptor is closed
        raise errors.BadInput("--pods -: standard input is closed.")
    try:
        if name == "-":
            return sys.stdin.buffer.read(), time.time()
        with Path(name).open("rb") as file:
            return file.read(), Path(name).stat().st_mtime
    except OSError as error:
        raise errors.BadInput(f"{name}: {error.strerror}.") from error


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
    log = structlog.get_logger()
    sweeping = agent.Agent(sweep.run, agent.SweepReporter(registry), wakeup, agent.SweepInterval(settings.period))
    try:
        server = serve_status(
            settings.status_address,
            registry,
            healthy=lambda: sweeping.unhealthy() or (None if watched.reflector.alive else "the watch has ended"),
            ready=lambda: None if watched.reflector.synced.is_set() else "the first list is not complete",
        )
    except OSError as error:
        host, port = settings.status_address
        raise errors.BadInput(f"--status-address: {host}:{port}: {error.strerror or error}.") from error
    log.info("serving status", port=server.port)
    watched.reflector.start()
    sweeping.loop()
    watched.reflector.stop()
    watched.reflector.join(settings.period)
    log.info("stopped")
    return 0
