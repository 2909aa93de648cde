"""The observed state of a rotation: two Secrets, caBundles, and endpoints. Frozen data, without I/O or a clock."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes

from vcuda.x509 import BACKDATE, Names, Signed, is_ours, is_signed_by_ours

Certificates = tuple[x509.Certificate, ...]

UNREADABLE_EXTENSIONS = (x509.ExtensionNotFound, x509.DuplicateExtension, x509.UnsupportedGeneralNameType, ValueError)


@dataclass(frozen=True, slots=True)
class SeenSince:
    """The time since which a condition holds for the authority with this fingerprint."""

    fingerprint: str
    since: datetime


@dataclass(frozen=True, slots=True)
class Authorities:
    """The CA Secret.

    ``version``: its resourceVersion; empty if there is no Secret. ``current``: the authority that signs the leaves.
    ``next_ca``: an authority that is published and signs nothing yet. ``retired``: authorities that sign nothing any
    more, and are trusted until no endpoint serves a leaf of theirs. ``trusted``: since when every caBundle has
    ``next_ca``. ``served``: since when every endpoint has a leaf of ``current``. ``faults``: the unusable parts of the
    Secret.
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
    """The serving Secret.

    ``leaf``: None if there is no usable pair, and ``fault`` then says why. ``authorities``: the certificates in its
    ``ca.crt``.
    """

    version: str = ""
    leaf: Signed | None = None
    authorities: Certificates = ()
    fault: str = "there is no Secret"


@dataclass(frozen=True, slots=True)
class Hook:
    """One webhook of a configuration, at ``index`` of its list, that calls our Service, with the CAs in its caBundle.

    ``faulty``: a part of the caBundle is not a certificate. ``server``: the name that the API server requires in a
    leaf; empty if it is unknown.
    """

    index: int
    name: str
    bundle: Certificates
    faulty: bool = False
    server: str = ""


@dataclass(frozen=True, slots=True)
class Declared:
    """The webhooks that a configuration declares in its annotation.

    ``webhooks``: as the API takes them, with the caBundles that are registered. ``hooks``: the same webhooks, decoded.
    ``difference``: how the registered webhooks differ; empty if they are the same.
    """

    webhooks: tuple[dict[str, Any], ...]
    hooks: tuple[Hook, ...]
    difference: str = ""


@dataclass(frozen=True, slots=True)
class Configuration:
    """A webhook configuration: ``kind`` is Mutating- or ValidatingWebhookConfiguration.

    ``hooks``: its registered webhooks. ``declared``: None if its webhooks are not ours to register.
    ``read_only``: why it must not be written; None if it may be. Its caBundles count in any case.
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
    """An address of the webhook (HOST:PORT), and the leaf that it serves. If it serves none, ``fault`` says why."""

    address: str
    ready: bool
    leaf: x509.Certificate | None
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem that a person must solve, and the command to begin with."""

    text: str
    command: str

    def __str__(self) -> str:
        return f"{self.text}. Run: {self.command}"


@dataclass(frozen=True, slots=True)
class State:
    """The whole state, as read at one time.

    ``left_alone``: sentences on objects that belong to others. ``tool``: the name of another tool that issues the
    certificates; the registrations alone are ours then.
    """

    authorities: Authorities = field(default_factory=Authorities)
    serving: Serving = field(default_factory=Serving)
    configurations: tuple[Configuration, ...] = ()
    endpoints: tuple[DialledEndpoint, ...] = ()
    left_alone: tuple[str, ...] = ()
    tool: str = ""
    problems: tuple[Problem, ...] = ()

    def hooks(self) -> Iterator[Hook]:
        """Every webhook that calls our Service."""
        return (hook for configuration in self.configurations for hook in configuration.hooks)

    def declares(self) -> bool:
        return any(configuration.declared for configuration in self.configurations)

    def read_only(self) -> tuple[Problem, ...]:
        """The problems that a person must solve before all configurations can be written."""
        return tuple(one.read_only for one in self.configurations if one.read_only)

    def ready(self) -> tuple[DialledEndpoint, ...]:
        return tuple(endpoint for endpoint in self.endpoints if endpoint.ready)


def known(state: State) -> Certificates:
    """Return every authority in the CA Secret, oldest first."""
    signing = (state.authorities.current, state.authorities.next_ca)
    return (*state.authorities.retired, *(one.certificate for one in signing if one))


def unknown_cas(state: State) -> Certificates:
    """Return our authorities in caBundles that the CA Secret lacks, because it was restored or partly lost."""
    # They are removed like retired ones, and are put into no other caBundle: a name alone does not make them trusted.
    found = dict.fromkeys(one for hook in state.hooks() for one in hook.bundle if is_ours(one))
    return tuple(one for one in found if one not in known(state))


def fingerprint(certificate: x509.Certificate) -> str:
    return certificate.fingerprint(hashes.SHA256()).hex()


def issued(certificate: x509.Certificate) -> datetime:
    """When a certificate of ours was issued: its start, without the time that it is backdated by."""
    return certificate.not_valid_before_utc + BACKDATE


def is_valid(certificate: x509.Certificate, now: datetime) -> bool:
    """Whether ``now`` is within its time."""
    return certificate.not_valid_before_utc <= now < certificate.not_valid_after_utc


def in_look_ahead(certificate: x509.Certificate, now: datetime) -> bool:
    """Whether less than a third of its life is left, so that a renewal may fail and be retried."""
    # cert-manager uses the same fraction.
    life = certificate.not_valid_after_utc - issued(certificate)
    return certificate.not_valid_after_utc - now < life / 3


def signed_by(leaf: x509.Certificate, authority: x509.Certificate) -> bool:
    """Whether ``authority`` signed ``leaf``, regardless of times and names."""
    try:
        leaf.verify_directly_issued_by(authority)
    except (InvalidSignature, UnsupportedAlgorithm, ValueError, TypeError):
        return False
    return True


def trusts(bundle: Iterable[x509.Certificate], leaf: x509.Certificate | None, now: datetime) -> bool:
    """Whether a client that trusts ``bundle`` accepts the signature and the times of ``leaf``."""
    if leaf is None or not is_valid(leaf, now):
        return False
    return any(is_valid(authority, now) and signed_by(leaf, authority) for authority in bundle)


def may_chain(bundle: Iterable[x509.Certificate], leaf: x509.Certificate, now: datetime) -> bool:
    """Whether a client that trusts ``bundle`` may accept ``leaf`` by an intermediate CA that is served with it."""
    # Only the served leaf is read, so intermediates of other CAs are unknown. Our authorities sign no other authority
    # (path length 0).
    if is_signed_by_ours(leaf) or not is_valid(leaf, now):
        return False
    roots = [authority for authority in bundle if is_valid(authority, now) and not is_ours(authority)]
    try:
        return leaf.issuer != leaf.subject and any(authority.subject != leaf.issuer for authority in roots)
    except ValueError:  # a malformed name
        return False


def is_for(leaf: x509.Certificate, server: str) -> bool:
    """Whether the leaf is for this DNS name or IP address, by itself or by a wildcard in place of its first label."""
    names = {name.lower() for name in names_of(leaf)}
    return not names.isdisjoint({server, f"*.{server.partition('.')[2]}"})


def names_of(subject: Names | x509.Certificate) -> frozenset[str]:
    """The DNS names and IP addresses of the certificate, as text."""
    if isinstance(subject, Names):
        return frozenset([*subject.dns, *map(str, subject.addresses)])
    try:
        names = subject.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except UNREADABLE_EXTENSIONS:
        return frozenset()
    return frozenset([*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))])
