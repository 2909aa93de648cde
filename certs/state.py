"""The state of a certificate rotation as vcuda-certs observes it: two Secrets, the caBundles and the endpoints."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes

from vcuda.x509 import BACKDATE, Names, Signed, is_ours, renewal_due, signed_by

Certificates = tuple[x509.Certificate, ...]

UNREADABLE_EXTENSIONS = (x509.ExtensionNotFound, x509.DuplicateExtension, x509.UnsupportedGeneralNameType, ValueError)


@dataclass(frozen=True, slots=True)
class SeenSince:
    """A record of the time since which a condition is true for one CA. ``fingerprint``: the CA's SHA-256 in hex."""

    fingerprint: str
    since: datetime


@dataclass(frozen=True, slots=True)
class Authorities:
    """The content of the CA Secret. An authority is a CA. A leaf is a certificate that an authority signed.

    ``version``: the Secret's resourceVersion; empty if the Secret does not exist.
    ``current``: the authority that signs new leaves; None if it is missing or unusable.
    ``next_ca``: the authority that will replace ``current``. The caBundles get this authority first.
    ``retired``: former authorities. They sign no new leaf, but endpoints may still serve their leaves.
    ``trusted``: the time since which every writable caBundle contains ``next_ca``; None if no time is recorded.
    ``served``: the time since which every endpoint serves a leaf of ``current``; None if no time is recorded.
    ``faults``: a message for each unusable part of the Secret.
    """

    version: str = ""
    current: Signed | None = None
    next_ca: Signed | None = None
    retired: Certificates = ()
    trusted: SeenSince | None = None
    served: SeenSince | None = None
    faults: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Serving:
    """The content of the serving Secret, from which the webhook reads its certificate and key.

    ``version``: the Secret's resourceVersion; empty if the Secret does not exist.
    ``leaf``: the certificate with its key; None if they are missing or unusable. ``fault`` then says why.
    ``authorities``: the CA certificates in the Secret's ``ca.crt``.
    """

    version: str = ""
    leaf: Signed | None = None
    authorities: Certificates = ()
    fault: str = "the serving Secret does not exist"


@dataclass(frozen=True, slots=True)
class Hook:
    """One webhook in the list of a webhook configuration. The webhook calls our Service.

    ``index``: the webhook's position in the configuration's list.
    ``bundle``: the certificates in the webhook's caBundle.
    ``faulty``: True if a part of the caBundle is not a certificate.
    ``server``: the DNS name or IP address that the served certificate must have; empty if unknown.
    """

    index: int
    name: str
    bundle: Certificates
    faulty: bool = False
    server: str = ""


@dataclass(frozen=True, slots=True)
class Declared:
    """The webhooks that a configuration declares in its annotation.

    ``webhooks``: the declared webhooks as JSON objects, with the caBundles of the registered webhooks.
    ``difference``: how the registered webhooks differ from the declared ones; empty if they are equal.
    """

    webhooks: tuple[dict[str, Any], ...]
    hooks: tuple[Hook, ...]
    difference: str = ""


@dataclass(frozen=True, slots=True)
class Configuration:
    """A webhook configuration; in a rotation of client certificates, the ConfigMap with the CAs of these certificates.

    ``kind``: MutatingWebhookConfiguration, ValidatingWebhookConfiguration or ConfigMap.
    ``version``: the resourceVersion.
    ``hooks``: the registered webhooks that call our Service.
    ``read_only``: why vcuda-certs must not write this configuration; None if it may write. No step of the
    plan makes calls by a read-only configuration fail.
    ``declared``: the webhooks that vcuda-certs must register; None if vcuda-certs must register none.
    """

    kind: str
    name: str
    version: str
    hooks: tuple[Hook, ...]
    read_only: "Problem | None" = None
    declared: Declared | None = None

    def __str__(self) -> str:
        return f"{self.kind.lower()}/{self.name}"

    def bundles(self) -> tuple[Certificates, ...]:
        return tuple(hook.bundle for hook in self.hooks)


@dataclass(frozen=True, slots=True)
class DialledEndpoint:
    """An endpoint of the webhook, with the certificate that the endpoint served when it was dialled.

    ``leaf``: the served certificate; None if dialling failed. ``fault`` then says why.
    """

    address: str
    ready: bool
    leaf: x509.Certificate | None
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem that a person must solve. ``command``: the command to run first."""

    text: str
    command: str

    def __str__(self) -> str:
        return f"{self.text}. Run: {self.command}"


@dataclass(frozen=True, slots=True)
class State:
    """The state of all objects of a rotation, from one read.

    ``left_alone``: a message for each object that vcuda-certs does not change because another owner manages it.
    ``tool``: the other tool that issues the certificates, for example cert-manager. If set, vcuda-certs only registers
    webhooks. Empty if vcuda-certs issues the certificates.
    """

    authorities: Authorities = field(default_factory=Authorities)
    serving: Serving = field(default_factory=Serving)
    configurations: tuple[Configuration, ...] = ()
    endpoints: tuple[DialledEndpoint, ...] = ()
    left_alone: tuple[str, ...] = ()
    tool: str = ""
    problems: tuple[Problem, ...] = ()

    def hooks(self) -> Iterator[Hook]:
        return (hook for configuration in self.configurations for hook in configuration.hooks)

    def declares(self) -> bool:
        return any(configuration.declared for configuration in self.configurations)

    def read_only(self) -> tuple[Problem, ...]:
        return tuple(one.read_only for one in self.configurations if one.read_only)

    def ready(self) -> tuple[DialledEndpoint, ...]:
        return tuple(endpoint for endpoint in self.endpoints if endpoint.ready)


def certificates_of(pair: Signed | None) -> Certificates:
    return (pair.certificate,) if pair else ()


def known(state: State) -> Certificates:
    """Return the certificate of every CA in the CA Secret, oldest first."""
    there = state.authorities
    return (*there.retired, *certificates_of(there.current), *certificates_of(there.next_ca))


def unknown_cas(state: State) -> Certificates:
    """Return the CAs with our name in caBundles that are not in the CA Secret, which may be restored from a backup."""
    # An unknown CA is removed like a retired CA. It is never added to a caBundle, because anyone can make a CA with our
    # name.
    found = dict.fromkeys(one for hook in state.hooks() for one in hook.bundle if is_ours(one))
    return tuple(one for one in found if one not in known(state))


def fingerprint(certificate: x509.Certificate) -> str:
    return certificate.fingerprint(hashes.SHA256()).hex()


def issued(certificate: x509.Certificate) -> datetime:
    """Return when vcuda-certs issued a certificate. The certificate's notBefore is earlier by BACKDATE."""
    return certificate.not_valid_before_utc + BACKDATE


def is_valid(certificate: x509.Certificate, now: datetime) -> bool:
    return certificate.not_valid_before_utc <= now < certificate.not_valid_after_utc


def in_look_ahead(certificate: x509.Certificate, now: datetime) -> bool:
    """Return True if the certificate is due for renewal."""
    return now > renewal_due(issued(certificate), certificate.not_valid_after_utc)


def trusts(bundle: Iterable[x509.Certificate], leaf: x509.Certificate | None, now: datetime) -> bool:
    """Return True if a client that trusts ``bundle`` accepts the signature and the validity period of ``leaf``."""
    if leaf is None or not is_valid(leaf, now):
        return False
    return any(is_valid(authority, now) and signed_by(leaf, authority) for authority in bundle)


def may_chain(bundle: Iterable[x509.Certificate], leaf: x509.Certificate, now: datetime) -> bool:
    """Return True if a client that trusts ``bundle`` may accept ``leaf`` through an intermediate CA."""
    # An endpoint may serve its leaf together with intermediate CAs, but this program reads only the leaf. A CA of
    # vcuda-certs has no intermediate CAs (path length 0).
    if is_ours(leaf, "issuer") or not is_valid(leaf, now):
        return False
    roots = [authority for authority in bundle if is_valid(authority, now) and not is_ours(authority)]
    try:
        return leaf.issuer != leaf.subject and any(authority.subject != leaf.issuer for authority in roots)
    except ValueError:  # raised for a malformed name in a certificate
        return False


def is_for(leaf: x509.Certificate, server: str) -> bool:
    """Return True if ``server`` is a name in the certificate, or matches a wildcard in it such as ``*.example.com``."""
    names = {name.lower() for name in names_of(leaf)}
    return not names.isdisjoint({server, f"*.{server.partition('.')[2]}"})


def names_of(subject: Names | x509.Certificate) -> frozenset[str]:
    if isinstance(subject, Names):
        return frozenset([*subject.dns, *map(str, subject.addresses)])
    try:
        names = subject.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except UNREADABLE_EXTENSIONS:
        return frozenset()
    return frozenset([*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))])
