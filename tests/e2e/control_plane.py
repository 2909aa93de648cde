"""A real Kubernetes control plane for tests: etcd, kube-apiserver, and where present scheduler and controller manager.

Everything listens on 127.0.0.1, on free ports, and keeps its files in one fresh directory. There is no kubelet.
"""

from __future__ import annotations

import re
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.e2e import flags
from tests.e2e.component import Component
from tests.e2e.kubeconfig import write_kubeconfig
from tests.e2e.layout import Layout
from tests.e2e.ports import free_ports
from tests.e2e.probe import Probe

ADMIN = "admin"
NO_ASSETS = (
    "KUBEBUILDER_ASSETS names no directory with etcd and kube-apiserver. Run `make e2e`, or set it with "
    "`export KUBEBUILDER_ASSETS=$(tests/e2e/build-control-plane)` or `$(setup-envtest use -p path)`."
)


class NoControlPlane(Exception):
    """There are no binaries to start; the message says what to set."""


@dataclass(frozen=True)
class Settings:
    """What a control plane is started with.

    ``service_account_admission``: give pods their ServiceAccount and its token; a pod then needs a ServiceAccount.
    ``users``: names of users with a token and no rights, see ``ControlPlane.tokens``.
    ``apiserver_flags``: further flags of kube-apiserver. ``startup_timeout``: seconds each server may take to start.
    """

    service_account_admission: bool = False
    users: tuple[str, ...] = ("tenant",)
    apiserver_flags: tuple[str, ...] = ()
    startup_timeout: float = 60


@dataclass(frozen=True)
class ControlPlane:
    """A running control plane. ``kill``, ``stop`` and ``start`` each component as a test needs it.

    ``scheduler`` and ``controller_manager`` are None where the binaries lack them, see ``missing``.
    ``tokens`` maps the user ``admin`` (system:masters) and each of ``settings.users`` to their bearer tokens.
    ``minor`` is the 36 of Kubernetes 1.36.
    """

    settings: Settings
    assets: Path
    directory: Path
    server: str
    ca_file: Path
    kubeconfig: Path
    tokens: dict[str, str]
    minor: int
    etcd: Component
    apiserver: Component
    scheduler: Component | None
    controller_manager: Component | None

    @property
    def components(self) -> tuple[Component, ...]:
        """Those there are, in the order of their start."""
        every = (self.etcd, self.apiserver, self.scheduler, self.controller_manager)
        return tuple(component for component in every if component is not None)

    @property
    def missing(self) -> tuple[str, ...]:
        """Which of kube-scheduler and kube-controller-manager the binaries lack."""
        optional = {"kube-scheduler": self.scheduler, "kube-controller-manager": self.controller_manager}
        return tuple(name for name, component in optional.items() if component is None)


@contextmanager
def running_control_plane(
    assets: Path | None, directory: Path, settings: Settings | None = None
) -> Iterator[ControlPlane]:
    """Start a control plane in ``directory`` (fresh), yield it ready, and stop just what was started.

    ``assets``: the directory of the binaries, from KUBEBUILDER_ASSETS. Logs stay in ``directory``, etcd's data goes.
    Raises NoControlPlane where ``assets`` lacks etcd or kube-apiserver; StartupError where a server does not come up.
    """
    layout = lay_out(assets, directory)
    control_plane = prepare(layout, settings or Settings())
    with ExitStack() as teardown:
        teardown.callback(shutil.rmtree, directory / "etcd", ignore_errors=True)
        for component in control_plane.components:
            teardown.callback(component.stop)
            component.start()
        yield control_plane


def lay_out(assets: Path | None, directory: Path) -> Layout:
    """Choose the ports and check for the two binaries without which nothing works."""
    if assets is not None:
        layout = Layout(assets, directory, *free_ports(5))
        if layout.has("etcd") and layout.has("kube-apiserver"):
            return layout
    raise NoControlPlane(NO_ASSETS)


def prepare(layout: Layout, settings: Settings) -> ControlPlane:
    """Write the files that the servers read, and describe the servers; nothing is started yet."""
    tokens = {name: secrets.token_hex(16) for name in (ADMIN, *settings.users)}
    layout.certs.mkdir(parents=True)
    write_signing_key(layout.signing_key)
    write_tokens(layout.token_file, tokens)
    write_kubeconfig(layout.admin_kubeconfig, layout.server, layout.certificate("apiserver"), tokens[ADMIN])
    return ControlPlane(
        settings=settings,
        assets=layout.assets,
        directory=layout.directory,
        server=layout.server,
        ca_file=layout.certificate("apiserver"),
        kubeconfig=layout.admin_kubeconfig,
        tokens=tokens,
        minor=minor_version(layout.assets / "kube-apiserver"),
        etcd=etcd(layout, settings),
        apiserver=apiserver(layout, settings, tokens[ADMIN]),
        scheduler=scheduler(layout, settings),
        controller_manager=controller_manager(layout, settings),
    )


def etcd(layout: Layout, settings: Settings) -> Component:
    """The store."""
    ready = Probe(layout.etcd_port, "/health")
    return component("etcd", layout, settings, flags.etcd(layout), ready)


def apiserver(layout: Layout, settings: Settings, token: str) -> Component:
    """The API server; ready once its start-up hooks are done."""
    ready = Probe(layout.apiserver_port, "/readyz", layout.certificate("apiserver"), token)
    every = flags.apiserver(layout, service_account_admission=settings.service_account_admission)
    return component("kube-apiserver", layout, settings, [*every, *settings.apiserver_flags], ready)


def scheduler(layout: Layout, settings: Settings) -> Component | None:
    """The scheduler; None where there is no binary."""
    if not layout.has("kube-scheduler"):
        return None
    ready = Probe(layout.scheduler_port, "/healthz", layout.certificate("kube-scheduler"))
    return component("kube-scheduler", layout, settings, flags.scheduler(layout), ready)


def controller_manager(layout: Layout, settings: Settings) -> Component | None:
    """The controller manager; None where there is no binary."""
    if not layout.has("kube-controller-manager"):
        return None
    ready = Probe(layout.manager_port, "/healthz", layout.certificate("kube-controller-manager"))
    return component("kube-controller-manager", layout, settings, flags.controller_manager(layout), ready)


def component(name: str, layout: Layout, settings: Settings, arguments: list[str], ready: Probe) -> Component:
    """The server ``name`` of the binaries, with its log beside its files."""
    command = (str(layout.assets / name), *arguments)
    return Component(name, command, layout.directory / f"{name}.log", ready, settings.startup_timeout)


def minor_version(program: Path) -> int:
    """The 36 of `Kubernetes v1.36.3`, as ``program`` answers to --version."""
    answer = subprocess.run((str(program), "--version"), capture_output=True, text=True, check=True, timeout=30).stdout
    match = re.search(r"v1\.(\d+)", answer)
    if match is None:
        raise NoControlPlane(f"{program} --version says {answer!r}; expected Kubernetes v1.x")
    return int(match[1])


def write_signing_key(path: Path) -> None:
    """A new RSA key: kube-apiserver and the controller manager sign and check ServiceAccount tokens with it."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL
    path.write_bytes(key.private_bytes(encoding, form, serialization.NoEncryption()))


def write_tokens(path: Path, tokens: dict[str, str]) -> None:
    """kube-apiserver's static token file: token, user, uid, group. Only the admin is in a group."""
    groups = {ADMIN: ",system:masters"}
    lines = [f"{token},{name},{name}{groups.get(name, '')}\n" for name, token in tokens.items()]
    path.write_text("".join(lines))
