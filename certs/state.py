"""What a rotation goes by: the two Secrets, the caBundles, and what the endpoints serve. Frozen, no I/O, no clock."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes

from vcuda.x509 import BACKDATE, Names, Signed, is_ours, is_signed_by_ours

Certificates = tuple[x509.Certificate, ...]

UNREADABLE_EXTENSIONS = (x509.ExtensionNotFound, x509.DuplicateExtension, x509.UnsupportedGeneralNameType, ValueError)


@dataclass(frozen=True, slots=True)
class SeenSince:
    """Since when something has been seen to hold for the authority with this fingerprint."""

    fingerprint: str
    since: datetime


@dataclass(frozen=True, slots=True)
class Authorities:
    """The CA Secret. ``version`` is its resourceVersion, empty where there is no Secret.

    ``current`` signs the leaves. ``next_ca`` is made and published, and signs nothing yet. ``retired`` ones sign
    nothing any more, and are trusted until nobody serves a leaf of theirs. ``trusted``: every caBundle had
    ``next_ca`` since then; ``served``: every endpoint had a leaf of ``current``. ``faults`` say what in the Secret
    could not be used.
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
    """The serving Secret. ``leaf`` is None where there is no usable pair, and ``fault`` says why.

    ``authorities`` are the certificates in its ``ca.crt``.
    """

    version: str = ""
    leaf: Signed | None = None
    authorities: Certificates = ()
    fault: str = "there is no Secret"


@dataclass(frozen=True, slots=True)
class Hook:
    """One webhook of a configuration, at ``index`` of its list, that calls our Service; and the CAs in its caBundle.

    ``faulty``: something in the caBundle is no certificate. ``server``: the name that the API server asks a leaf for;
    empty where that is not known.
    """

    index: int
    name: str
    bundle: Certificates
    faulty: bool = False
    server: str = ""


@dataclass(frozen=True, slots=True)
class Configuration:
    """A webhook configuration: ``kind`` is Mutating- or ValidatingWebhookConfiguration.

    ``read_only`` says why it is not to be written, where it is not; what its caBundles trust counts all the same.
    """

    kind: str
    name: str
    version: str
    hooks: tuple[Hook, ...]
    read_only: "Problem | None" = None

    def __str__(self) -> str:
        return f"{self.kind.lower()}/{self.name}"

    def bundles(self) -> tuple[Certificates, ...]:
        """The caBundles of its hooks, in their order."""
        return tuple(hook.bundle for hook in self.hooks)


@dataclass(frozen=True, slots=True)
class DialledEndpoint:
    """Where the webhook is served (HOST:PORT), and the leaf that it shows; where it shows none ``fault`` says why."""

    address: str
    ready: bool
    leaf: x509.Certificate | None
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that a person has to decide or to mend, and the command to begin with."""

    text: str
    command: str

    def __str__(self) -> str:
        return f"{self.text}. Run: {self.command}"


@dataclass(frozen=True, slots=True)
class State:
    """All of it, as read at one time. ``left_alone`` says what was seen and is not ours to touch.

    ``tool`` is the name of another tool that looks after all of it; nothing is ours then.
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

    def read_only(self) -> tuple[Problem, ...]:
        """What a person has to do before all configurations can be written."""
        return tuple(one.read_only for one in self.configurations if one.read_only)

    def ready(self) -> tuple[DialledEndpoint, ...]:
        """The endpoints that are called."""
        return tuple(endpoint for endpoint in self.endpoints if endpoint.ready)


def known(state: State) -> Certificates:
    """Return every authority in the CA Secret, in the order of their making."""
    signing = (state.authorities.current, state.authorities.next_ca)
    return (*state.authorities.retired, *(one.certificate for one in signing if one))


def unknown_cas(state: State) -> Certificates:
    """Return authorities of ours in caBundles that the CA Secret does not know: it was restored, or partly lost."""
    # They go as retired ones do, and are put into no other caBundle: their name alone does not make them trusted.
    found = dict.fromkeys(one for hook in state.hooks() for one in hook.bundle if is_ours(one))
    return tuple(one for one in found if one not in known(state))


def fingerprint(certificate: x509.Certificate) -> str:
    """SHA-256 of the certificate, in hex."""
    return certificate.fingerprint(hashes.SHA256()).hex()


def issued(certificate: x509.Certificate) -> datetime:
    """When a certificate of ours was made: its start, without the time that it is back-dated by."""
    return certificate.not_valid_before_utc + BACKDATE


def is_valid(certificate: x509.Certificate, now: datetime) -> bool:
    """Whether ``now`` is within its time."""
    return certificate.not_valid_before_utc <= now < certificate.not_valid_after_utc


def in_look_ahead(certificate: x509.Certificate, now: datetime) -> bool:
    """Whether less than a third of its life is left: renewed while there is time to fail."""
    # As cert-manager counts, so that whoever knows the one expects the other.
    life = certificate.not_valid_after_utc - issued(certificate)
    return certificate.not_valid_after_utc - now < life / 3


def signed_by(leaf: x509.Certificate, authority: x509.Certificate) -> bool:
    """Whether ``authority`` signed ``leaf``; nothing about times and names."""
    try:
        leaf.verify_directly_issued_by(authority)
    except (InvalidSignature, UnsupportedAlgorithm, ValueError, TypeError):
        return False
    return True


def trusts(bundle: Iterable[x509.Certificate], leaf: x509.Certificate | None, now: datetime) -> bool:
    """Whether a client that goes by ``bundle`` accepts ``leaf``, as far as signature and times go."""
    if leaf is None or not is_valid(leaf, now):
        return False
    return any(is_valid(authority, now) and signed_by(leaf, authority) for authority in bundle)


def may_chain(bundle: Iterable[x509.Certificate], leaf: x509.Certificate, now: datetime) -> bool:
    """Whether a client that goes by ``bundle`` may accept ``leaf`` by an intermediate CA that is served with it."""
    # Of what is served only the leaf is read here, so that can be told of nobody else's. Authorities of ours sign no
    # others (path length 0).
    if is_signed_by_ours(leaf) or not is_valid(leaf, now):
        return False
    roots = [authority for authority in bundle if is_valid(authority, now) and not is_ours(authority)]
    try:
        return leaf.issuer != leaf.subject and any(authority.subject != leaf.issuer for authority in roots)
    except ValueError:  # a name that cannot be read
        return False


def is_for(leaf: x509.Certificate, server: str) -> bool:
    """Whether the leaf is for this DNS name or IP address, by itself or by a wildcard in place of its first label."""
    names = {name.lower() for name in names_of(leaf)}
    return not names.isdisjoint({server, f"*.{server.partition('.')[2]}"})


def names_of(subject: Names | x509.Certificate) -> frozenset[str]:
    """The DNS names and IP addresses that it is for, as text."""
    if isinstance(subject, Names):
        return frozenset([*subject.dns, *map(str, subject.addresses)])
    try:
        names = subject.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except UNREADABLE_EXTENSIONS:
        return frozenset()
    return frozenset([*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))])
