"""Dials endpoints and reads the leaf that they show, without trusting it and without sending them anything."""

from __future__ import annotations

import base64
import socket
import ssl
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from urllib.parse import quote

from cryptography import x509

from certs.api import JSON_PATCH, MERGE_PATCH, Api, Reply
from certs.changes import Write, WriteAuthorities, WriteBundles, WriteServing
from certs.parsing import (
    MANAGED_BY,
    OURS,
    SERVED,
    SERVICE_NAME,
    TLS_TYPE,
    TRUSTED,
    Place,
    is_labelled,
    mark_text,
    other_tool,
    read_addresses,
    read_authorities,
    read_configuration,
    read_serving,
    secret_problem,
    write_certificates,
)
from certs.state import Authorities, Certificates, Configuration, Endpoint, Problem, Serving, State
from certs.version import VersionCheck
from certs.x509 import BACKDATE, Signed, service_names

TIMEOUT = 5.0
"""Seconds for the connection, and again for the handshake."""

AT_ONCE = 16


def dial_all(addresses: Iterable[tuple[str, bool]], server_name: str, timeout: float = TIMEOUT) -> tuple[Endpoint, ...]:
    """Dial every (HOST:PORT, ready), in parallel; the answers are in their order."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return tuple(pool.map(lambda one: dial(one[0], server_name, ready=one[1], timeout=timeout), addresses))


def dial(address: str, server_name: str, *, ready: bool = True, timeout: float = TIMEOUT) -> Endpoint:
    """Return what HOST:PORT shows a client that asks for ``server_name``, or why it shows nothing."""
    host, _, port = address.rpartition(":")
    try:
        with (
            socket.create_connection((host.strip("[]"), int(port)), timeout) as plain,
            _asking().wrap_socket(plain, server_hostname=server_name) as connection,
        ):
            shown = connection.getpeercert(binary_form=True) or b""
        return Endpoint(address, ready, x509.load_der_x509_certificate(shown))
    except (OSError, ValueError, OverflowError, x509.InvalidVersion) as error:
        return Endpoint(address, ready, None, f"cannot be asked: {error}")


def _asking() -> ssl.SSLContext:
    """A client that wants to see the certificate, whatever it is; nothing is sent to who shows it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


ADMISSION = "/apis/admissionregistration.k8s.io/v1"
CORE = "/api/v1"
DISCOVERY = "/apis/discovery.k8s.io/v1"
KINDS = {
    "MutatingWebhookConfiguration": "mutatingwebhookconfigurations",
    "ValidatingWebhookConfiguration": "validatingwebhookconfigurations",
}
_LABELS = {"app.kubernetes.io/part-of": "vcuda-quota", MANAGED_BY: OURS}


@dataclass(frozen=True, slots=True)
class Cluster:
    """``labels``: those of our webhook configurations. ``addresses`` replaces the Service's endpoints where given.

    With ``version_check`` the API server's version is checked before anything else is read.
    """

    api: Api
    place: Place
    labels: Mapping[str, str]
    port_name: str = "https"
    addresses: tuple[str, ...] = ()
    version_check: VersionCheck | None = None

    def read(self, now: Callable[[], datetime]) -> State:
        """Return everything as it is now, each endpoint dialled. Raises ApiFault.

        The serving Secret is read first: a leaf is only written over the one that was there before the authority was
        read that signs it. The CA Secret is read after the caBundles: an authority in these that it does not know is
        none that another run has just made.
        """
        if self.version_check:
            self.version_check.make(self.api)
        serving = self.api.get(self._secret(self.place.serving_secret))
        listed = {kind: self._list(resource) for kind, resource in KINDS.items()}
        authorities = self.api.get(self._secret(self.place.authority_secret))
        tool = other_tool(serving.body) if serving else ""
        ours, left, mixed = self._configurations(listed, tool)
        clock = _clock_problem(listed["MutatingWebhookConfiguration"], now())
        if tool:
            left = (f"the certificates are {tool}'s: Secret {self.place.serving_secret} says so", *left)
            return State(configurations=ours, endpoints=self.dial(), left_alone=left, tool=tool, problems=mixed)
        return State(
            authorities=read_authorities(authorities.body) if authorities else Authorities(),
            serving=read_serving(serving.body) if serving else Serving(),
            configurations=ours,
            endpoints=self.dial(),
            left_alone=left,
            problems=(*self._secret_problems(serving, authorities), *clock, *mixed),
        )

    def dial(self) -> tuple[Endpoint, ...]:
        """Dial every endpoint of the Service, or the addresses given."""
        server_name = service_names(self.place.service, self.place.namespace).dns[2]
        return dial_all(self._addresses(), server_name)

    def write(self, write: Write) -> None:
        """Make one write, if what it goes by has not changed since it was read. Raises ApiFault."""
        match write:
            case WriteAuthorities():
                self._write_authorities(write.after)
            case WriteServing():
                self._write_serving(write)
            case WriteBundles():
                self._write_bundles(write)

    def _configurations(
        self, listed: dict[str, Reply], tool: str
    ) -> tuple[tuple[Configuration, ...], tuple[str, ...], tuple[Problem, ...]]:
        """Return those that are ours, what is left alone, and those that another tool looks after than the Secret.

        All are listed, whatever their labels: one that has lost ours would be cut off when the CA changes.
        """
        ours: list[Configuration] = []
        left: list[str] = []
        mixed: list[Problem] = []
        for kind, reply in listed.items():
            for item in reply.body.get("items") or ():
                configuration, elsewhere = read_configuration(item, kind, self.place)
                other = other_tool(item)
                if not is_labelled(item, self.labels):
                    ours += [self._unlabelled(configuration)] if configuration.hooks and not other and not tool else []
                    continue
                if other in ("", tool):
                    ours.append(configuration)
                left += [f"the caBundles of {configuration} are {other}'s"] if other else elsewhere
                mixed += [_mixed(configuration, other, tool)] if configuration.hooks and other != tool else []
        return tuple(ours), tuple(left), tuple(mixed)

    def _unlabelled(self, configuration: Configuration) -> Configuration:
        """One that calls the Service and is not known to be ours: it is never written."""
        kind, name = configuration.kind.lower(), configuration.name
        label = " ".join(f"{key}={value}" for key, value in self.labels.items())
        text = f"{configuration} calls the Service and is without our label, so its caBundles are not looked after"
        return replace(configuration, locked=Problem(text, f"kubectl label {kind} {name} {label} --overwrite"))

    def _secret_problems(self, serving: Reply | None, authorities: Reply | None) -> tuple[Problem, ...]:
        kinds = ((serving, TLS_TYPE), (authorities, None))
        found = (secret_problem(reply.body, self.place, wanted) for reply, wanted in kinds if reply)
        return tuple(filter(None, found))

    def _addresses(self) -> Iterable[tuple[str, bool]]:
        if self.addresses:
            return [(address, True) for address in self.addresses]
        path = self._path("endpointslices", group=DISCOVERY)
        slices = self.api.list(path, labelSelector=f"{SERVICE_NAME}={self.place.service}")
        return read_addresses(slices, self.port_name).items()

    def _list(self, resource: str) -> Reply:
        return self.api.get(f"{ADMISSION}/{resource}") or Reply({}, None)

    def _write_authorities(self, after: Authorities) -> None:
        data = {
            **_pair("ca", after.current),
            **_pair("next", after.following),
            "retired.crt": write_certificates(after.retired) or None,
        }
        annotations = {TRUSTED: mark_text(after.trusted), SERVED: mark_text(after.served)}
        self._write_secret(self.place.authority_secret, after.version, "Opaque", data, annotations)

    def _write_serving(self, write: WriteServing) -> None:
        data = {**_pair("tls", write.leaf), "ca.crt": write_certificates(write.authorities)}
        self._write_secret(self.place.serving_secret, write.version, TLS_TYPE, data, {})

    def _write_secret(
        self,
        name: str,
        version: str,
        secret_type: str,
        data: dict[str, bytes | None],
        annotations: dict[str, str | None],
    ) -> None:
        """Create the Secret, or change these fields of it; None removes one."""
        encoded = {key: value and base64.b64encode(value).decode() for key, value in data.items()}
        metadata: dict[str, Any]
        if version:
            metadata = {"resourceVersion": version, "labels": _LABELS, "annotations": annotations}
            self.api.patch(self._secret(name), {"metadata": metadata, "data": encoded}, MERGE_PATCH)
            return
        metadata = {"name": name, "labels": _LABELS, "annotations": _present(annotations)}
        secret = {"apiVersion": "v1", "kind": "Secret", "type": secret_type, "metadata": metadata}
        self.api.create(self._path("secrets"), {**secret, "data": _present(encoded)})

    def _write_bundles(self, write: WriteBundles) -> None:
        """Set the caBundles and nothing else. Naming the version that was read makes a later one a conflict."""
        guard = {"op": "replace", "path": "/metadata/resourceVersion", "value": write.version}
        bundles = [
            {"op": "add", "path": f"/webhooks/{index}/clientConfig/caBundle", "value": _encoded(bundle)}
            for index, bundle in zip(write.indices, write.bundles, strict=True)
        ]
        path = f"{ADMISSION}/{KINDS[write.kind]}/{quote(write.name)}"
        self.api.patch(path, [guard, *bundles], JSON_PATCH)

    def _secret(self, name: str) -> str:
        return self._path("secrets", name)

    def _path(self, *parts: str, group: str = CORE) -> str:
        return "/".join([group, "namespaces", *map(quote, (self.place.namespace, *parts))])


def _clock_problem(reply: Reply, now: datetime) -> tuple[Problem, ...]:
    """A clock that went wrong would find good certificates expired, and make some that nobody accepts yet."""
    if reply.date is None or abs(reply.date - now) < BACKDATE:
        return ()
    text = f"the clock here says {now:%Y-%m-%d %H:%M:%S} UTC and the API server's {reply.date:%Y-%m-%d %H:%M:%S} UTC"
    return (Problem(f"{text}: set the one that is wrong, then go on", "timedatectl set-ntp true"),)


def _mixed(configuration: Configuration, tool: str, secrets_tool: str) -> Problem:
    text = (
        f"the caBundles of {configuration} are looked after by {tool or OURS}, and the serving Secret by"
        f" {secrets_tool or OURS}: give both to one of them"
    )
    return Problem(text, f"kubectl get {configuration} -o yaml")


def _pair(name: str, pair: Signed | None) -> dict[str, bytes | None]:
    certificate, key = (pair.certificate_pem(), pair.key_pem()) if pair else (None, None)
    return {f"{name}.crt": certificate, f"{name}.key": key}


def _encoded(bundle: Certificates) -> str:
    return base64.b64encode(write_certificates(bundle)).decode()


def _present(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
