"""Runs a real Kubernetes control plane: etcd, kube-apiserver and, if installed, the scheduler and controller manager.

All servers listen on free ports of 127.0.0.1, and store their files in one new directory. There is no kubelet, unless
the caller starts one and sets ``Settings.node_address``.
"""

import json
import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tools.component import Component, Probe
from tools.ports import free_ports

LOCAL = "127.0.0.1"
ADMIN = "admin"
NODE = "system:node:"
"""The prefix of the users of kubelets."""
CLIENTS = SCHEDULER, CONTROLLER_MANAGER = "kube-scheduler", "kube-controller-manager"
SIGNING_KEY, TOKENS, KUBECONFIG = "sa.key", "tokens.csv", "admin.kubeconfig"
"""The names of three files of a control plane: the key that signs ServiceAccount tokens, the users' static tokens, and
the kubeconfig of the admin."""

NO_ASSETS = (
    "The environment variable KUBEBUILDER_ASSETS does not name a directory with etcd and kube-apiserver. Run"
    " `make e2e`, which sets the variable, or run `export KUBEBUILDER_ASSETS=$(tests/e2e/build-control-plane)`, or"
    " `export KUBEBUILDER_ASSETS=$(setup-envtest use -p path)`."
)


class NoControlPlane(Exception):
    """The binaries of the control plane were not found. The message names the environment variable to set."""


@dataclass(frozen=True)
class Settings:
    """Settings of a control plane.

    ``users``: names of users without rights, each with a token in ``ControlPlane.tokens``. ``apiserver_flags``: further
    flags of kube-apiserver. ``feature_gates``: the feature gates that all servers enable. ``startup_timeout``: the
    seconds that each server may take to start. ``own_identities``: True if the scheduler and the controllers act as the
    users that they are in a real cluster; False if they act as admin. ``node_address``: the address of this machine at
    which kubelets and pods reach the API server; empty if there is no kubelet.
    """

    users: tuple[str, ...] = ("tenant",)
    apiserver_flags: tuple[str, ...] = ()
    feature_gates: tuple[str, ...] = ()
    startup_timeout: float = 60
    own_identities: bool = False
    node_address: str = ""


@dataclass(frozen=True)
class ControlPlane:
    """A running control plane. The caller may ``kill``, ``stop`` and ``start`` each component.

    ``scheduler`` and ``controller_manager`` are None if their binaries are not installed. ``tokens`` has the bearer
    tokens of the user ``admin`` (system:masters) and of ``settings.users``. ``minor`` is the minor version of
    Kubernetes, for example 37.
    """

    settings: Settings
    assets: Path
    directory: Path
    server: str
    etcd_url: str
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
        every = (self.etcd, self.apiserver, self.scheduler, self.controller_manager)
        return tuple(component for component in every if component is not None)

    @property
    def missing(self) -> tuple[str, ...]:
        """The names of the optional programs, kube-scheduler and kube-controller-manager, that are not installed."""
        optional = {SCHEDULER: self.scheduler, CONTROLLER_MANAGER: self.controller_manager}
        return tuple(name for name, component in optional.items() if component is None)


@contextmanager
def running_control_plane(
    assets: Path | None, directory: Path, settings: Settings = Settings()
) -> Iterator[ControlPlane]:
    """Return a context in which a control plane runs. ``directory`` must be empty.

    ``assets``: the directory of the binaries, from KUBEBUILDER_ASSETS. At the end of the context, the servers are
    stopped and etcd's data is deleted. The logs remain in ``directory``. Raises NoControlPlane if ``assets`` has no
    etcd or no kube-apiserver, and StartupError if a server does not start.
    """
    control_plane = prepare(lay_out(assets, directory, settings.node_address or LOCAL), settings)
    with ExitStack() as teardown:
        teardown.callback(shutil.rmtree, directory / "etcd", ignore_errors=True)
        for component in control_plane.components:
            teardown.callback(component.stop)
            component.start()
        yield control_plane


@contextmanager
def second_apiserver(first: ControlPlane) -> Iterator[ControlPlane]:
    """Return a context with a second control plane: a second kube-apiserver that shares the etcd of ``first``."""
    [port] = free_ports(1)
    name, server = f"second {first.apiserver.name}", f"https://127.0.0.1:{port}"
    flags = (each for each in first.apiserver.command if not each.startswith("--secure-port="))
    command = (*flags, f"--secure-port={port}")
    ready = Probe(port, "/readyz", first.ca_file, first.tokens[ADMIN])
    log = first.directory / f"kube-apiserver-{port}.log"
    apiserver = Component(name, command, log, ready, first.settings.startup_timeout)
    kubeconfig = first.directory / f"{port}.kubeconfig"
    write_kubeconfig(kubeconfig, server, first.ca_file, first.tokens[ADMIN])
    with ExitStack() as teardown:
        teardown.callback(apiserver.stop)
        apiserver.start()
        yield replace(first, server=server, kubeconfig=kubeconfig, apiserver=apiserver)


def lay_out(assets: Path | None, directory: Path, address: str) -> "Layout":
    """Reserve free ports for a new control plane. Return these ports, and the paths of its binaries and files.

    Raises NoControlPlane if etcd or kube-apiserver is not installed.
    """
    if assets is not None:
        layout = Layout(assets, directory, address, *free_ports(5))
        if layout.has("etcd") and layout.has("kube-apiserver"):
            return layout
    raise NoControlPlane(NO_ASSETS)


def prepare(layout: "Layout", settings: Settings) -> ControlPlane:
    """Write the files that the servers of the control plane read. Return the servers without starting them."""
    servers = CLIENTS if settings.own_identities else ()
    tokens = {name: secrets.token_hex(16) for name in (ADMIN, *settings.users, *map(user_of, servers))}
    layout.certs.mkdir(parents=True)
    write_signing_key(layout.directory / SIGNING_KEY)
    # Each line of the token file has a token, a user, a uid and a group.
    lines = (f"{token},{name},{name}{group_of(name)}\n" for name, token in tokens.items())
    (layout.directory / TOKENS).write_text("".join(lines))
    reached = layout.server, layout.certificate("apiserver")
    write_kubeconfig(layout.directory / KUBECONFIG, *reached, tokens[ADMIN])
    for name in CLIENTS:
        write_kubeconfig(layout.kubeconfig_of(name), *reached, tokens.get(user_of(name), tokens[ADMIN]))
    return ControlPlane(
        settings,
        *(layout.assets, layout.directory, layout.server, layout.etcd_url, reached[1]),
        kubeconfig=layout.directory / KUBECONFIG,
        tokens=tokens,
        minor=minor_version(layout.assets / "kube-apiserver"),
        etcd=etcd(layout, settings),
        apiserver=apiserver(layout, settings, tokens[ADMIN]),
        scheduler=client_of(SCHEDULER, layout, settings, layout.scheduler_port),
        controller_manager=controller_manager(layout, settings),
    )


def etcd(layout: "Layout", settings: Settings) -> Component:
    """Return the component that runs a single etcd. etcd does not call fsync, because its data is temporary."""
    flags = [
        f"--data-dir={layout.directory / 'etcd'}",
        f"--listen-client-urls={layout.etcd_url}",
        f"--advertise-client-urls={layout.etcd_url}",
        f"--listen-peer-urls=http://127.0.0.1:{layout.peer_port}",
        "--unsafe-no-fsync",
    ]
    return component("etcd", layout, settings, flags, Probe(layout.etcd_port, "/health"))


def apiserver(layout: "Layout", settings: Settings, token: str) -> Component:
    """Return the component that runs kube-apiserver with RBAC, static tokens and TokenRequest."""
    issuer = "https://kubernetes.default.svc"
    flags = [
        f"--etcd-servers={layout.etcd_url}",
        f"--cert-dir={layout.certs}",
        f"--secure-port={layout.apiserver_port}",
        f"--bind-address={layout.address}",
        f"--service-account-key-file={layout.directory / SIGNING_KEY}",
        f"--service-account-signing-key-file={layout.directory / SIGNING_KEY}",
        f"--service-account-issuer={issuer}",
        f"--api-audiences={issuer}",
        "--service-cluster-ip-range=10.0.0.0/24",
        f"--token-auth-file={layout.directory / TOKENS}",
        "--allow-privileged=true",
        *(WITH_NODES if settings.node_address else WITHOUT_NODES),
        *gates_of(settings),
        *settings.apiserver_flags,
    ]
    ready = Probe(layout.apiserver_port, "/readyz", layout.certificate("apiserver"), token, layout.address)
    return component("kube-apiserver", layout, settings, flags, ready)


WITHOUT_NODES = (
    "--endpoint-reconciler-type=none",  # Otherwise kube-apiserver 1.37 and later does not start on 127.0.0.1.
    "--authorization-mode=RBAC",
    # No kube-proxy runs here, so the cluster IP of a webhook's Service does not work. With this flag, the API server
    # calls the endpoints of the Service instead.
    "--enable-aggregator-routing=true",
    "--disable-admission-plugins=ServiceAccount",
)
WITH_NODES = (
    "--authorization-mode=Node,RBAC",
    "--enable-admission-plugins=NodeRestriction",
    "--kubelet-preferred-address-types=InternalIP",
)


def controller_manager(layout: "Layout", settings: Settings) -> Component | None:
    """Return the component that runs kube-controller-manager.

    Without kubelets, the controllers that need kubelets do not run.
    """
    flags = (
        f"--controllers=*{'' if settings.node_address else ',-nodelifecycle,-ttl,-nodeipam'}",
        f"--service-account-private-key-file={layout.directory / SIGNING_KEY}",
        f"--root-ca-file={layout.certificate('apiserver')}",
        *(["--use-service-account-credentials"] if settings.own_identities else []),
    )
    return client_of(CONTROLLER_MANAGER, layout, settings, layout.manager_port, *flags)


def client_of(name: str, layout: "Layout", settings: Settings, port: int, *flags: str) -> Component | None:
    """Return the component that runs a client of the API server, such as the scheduler.

    Return None if the client is not installed.
    """
    if not layout.has(name):
        return None
    common = (
        f"--kubeconfig={layout.kubeconfig_of(name)}",
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
        f"--cert-dir={layout.certs}",
        *gates_of(settings),
    )
    return component(name, layout, settings, [*common, *flags], Probe(port, "/healthz", layout.certificate(name)))


def gates_of(settings: Settings) -> list[str]:
    return [f"--feature-gates={gate}=true" for gate in settings.feature_gates]


def component(name: str, layout: "Layout", settings: Settings, arguments: list[str], ready: Probe) -> Component:
    command = (str(layout.assets / name), *arguments)
    return Component(name, command, layout.directory / f"{name}.log", ready, settings.startup_timeout)


def group_of(user: str) -> str:
    """Return the end of the user's line in the token file, which names the user's group; empty if the user has no
    group."""
    return ",system:masters" if user == ADMIN else ",system:nodes" if user.startswith(NODE) else ""


def user_of(program: str) -> str:
    return f"system:{program}"


def minor_version(program: Path) -> int:
    answer = subprocess.run((str(program), "--version"), capture_output=True, text=True, check=True, timeout=30).stdout
    match = re.search(r"v1\.(\d+)", answer)
    if match is None:
        raise NoControlPlane(f"{program} --version must print a version v1.x of Kubernetes; it printed {answer!r}")
    return int(match[1])


def write_signing_key(path: Path) -> None:
    """Write a new RSA key, with which kube-apiserver and kube-controller-manager sign ServiceAccount tokens."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL
    path.write_bytes(key.private_bytes(encoding, form, serialization.NoEncryption()))


@dataclass(frozen=True)
class Layout:
    """The binaries, files and ports of one control plane."""

    assets: Path
    directory: Path
    address: str
    etcd_port: int
    peer_port: int
    apiserver_port: int
    scheduler_port: int
    manager_port: int

    @property
    def certs(self) -> Path:
        """The directory of the self-signed certificates that the servers of the control plane create."""
        return self.directory / "certs"

    @property
    def server(self) -> str:
        return f"https://{self.address}:{self.apiserver_port}"

    @property
    def etcd_url(self) -> str:
        return f"http://127.0.0.1:{self.etcd_port}"

    def kubeconfig_of(self, program: str) -> Path:
        """Return the path of the kubeconfig with which ``program`` calls the API server."""
        return self.directory / f"{program}.kubeconfig"

    def certificate(self, pair: str) -> Path:
        """Return the path of the certificate that a server creates at its first start, with the CA's certificate."""
        return self.certs / f"{pair}.crt"

    def has(self, program: str) -> bool:
        return os.access(self.assets / program, os.X_OK)


def write_kubeconfig(path: Path, server: str, ca_file: Path, token: str) -> None:
    """Write a kubeconfig with ``token`` for ``server``, whose certificate was signed by the CA in ``ca_file``."""
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "local", "cluster": {"server": server, "certificate-authority": str(ca_file)}}],
        "users": [{"name": "bearer", "user": {"token": token}}],
        "contexts": [{"name": "local", "context": {"cluster": "local", "user": "bearer"}}],
        "current-context": "local",
    }
    path.touch(mode=0o600)
    path.write_text(json.dumps(document))
