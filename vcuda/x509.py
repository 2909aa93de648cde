"""Creates CAs, serving certificates and client certificates (ECDSA P-256). Parses DNS names and IP addresses."""

import ipaddress
import re
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_MAX_NAME_LENGTH = 253  # characters of a DNS name (RFC 1123 section 2.1, RFC 1035 section 2.3.4)


@dataclass(frozen=True, slots=True)
class Names:
    """The DNS names (in lower case) and IP addresses of a certificate, in the given order."""

    dns: tuple[str, ...] = ()
    addresses: tuple[Address, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.dns or self.addresses)

    def __add__(self, other: "Names") -> "Names":
        return Names(tuple(dict.fromkeys(self.dns + other.dns)), tuple(dict.fromkeys(self.addresses + other.addresses)))

    def __str__(self) -> str:
        return ", ".join([*self.dns, *map(str, self.addresses)])


DEVELOPMENT = Names(("localhost",), (ipaddress.IPv4Address("127.0.0.1"), ipaddress.IPv6Address("::1")))


def parse_dns_name(text: str) -> str:
    """Return a DNS name in lower case. A leading ``*.`` is allowed. Raises ValueError, with advice in its message."""
    name = text.lower()
    try:
        ipaddress.ip_address(name)
    except ValueError:
        pass  # the name may be a DNS name, because it is not an IP address
    else:
        raise ValueError(f"{text!r} is an IP address, so it must be given with --ip")
    labels = name.removeprefix("*.").split(".")
    if len(name) > _MAX_NAME_LENGTH or not all(map(_LABEL.fullmatch, labels)):
        raise ValueError(
            f"{text!r} is not a DNS name. A DNS name has at most {_MAX_NAME_LENGTH} characters. It has labels of "
            "letters, digits and '-', joined by '.', without a final '.'. Labels in other alphabets have the form xn--"
        )
    return name


def parse_ip(text: str) -> Address:
    """Return the IP address in a text. Raises ValueError for another text or an address with a zone (``%eth0``)."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError as error:
        raise ValueError(f"must be an IP address, for example 127.0.0.1 or ::1; got {text!r}") from error
    if isinstance(address, ipaddress.IPv6Address) and address.scope_id is not None:
        raise ValueError(f"an IP address must not have a zone, such as %{address.scope_id}; got {text!r}")
    return address


def parse_label(text: str) -> str:
    """Return ``text`` if it is a valid name of a Service or namespace (a DNS label). Raises ValueError if not."""
    if not _LABEL.fullmatch(text):
        raise ValueError(f"must be a name of 1 to 63 lower-case letters, digits and '-'; got {text!r}")
    return text


def service_names(service: str, namespace: str) -> Names:
    """Return every DNS name of a Service, the shortest first. The API server connects to ``name.namespace.svc``."""
    parts = (service, namespace, "svc", "cluster.local")
    return Names(tuple(".".join(parts[:count]) for count in range(1, len(parts) + 1)))


AUTHORITY_LIFE = timedelta(days=730)
LEAF_LIFE = timedelta(days=90)
BACKDATE = timedelta(minutes=5)
"""The validity of a certificate begins this long before its creation, so that clients with slow clocks accept it."""

_KEY_USAGES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
    *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)
_AUTHORITY_NAME = "vcuda quota webhook CA"
_CLIENT_AUTHORITY_NAME = "vcuda quota client CA"
_LEAF_NAME = "vcuda quota webhook"


@dataclass(frozen=True, slots=True)
class Signed:
    """A certificate and its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey = field(repr=False)

    @property
    def expires(self) -> datetime:
        return self.certificate.not_valid_after_utc

    def certificate_pem(self) -> bytes:
        """The certificate in PEM form, without the certificate of its issuer."""
        return self.certificate.public_bytes(Encoding.PEM)

    def key_pem(self) -> bytes:
        """The private key as unencrypted PKCS#8. The key is a secret that must never be logged or printed."""
        return self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def make_authority(now: datetime, life: timedelta = AUTHORITY_LIFE, *, client: bool = False) -> Signed:
    """Create a uniquely named CA for server or client certificates. Raises ValueError if ``life`` is not positive."""
    serial = x509.random_serial_number()
    name = f"{_CLIENT_AUTHORITY_NAME if client else _AUTHORITY_NAME} {serial % 2**32:08x}"
    constraints = (x509.BasicConstraints(ca=True, path_length=0), True)
    return _make(name, serial, now, now + life, None, constraints, (_key_usage("key_cert_sign", "crl_sign"), True))


def make_leaf(authority: Signed, names: Names, now: datetime, life: timedelta = LEAF_LIFE) -> Signed:
    """Create an ECDSA P-256 serving certificate. It expires no later than the CA.

    Raises ValueError if ``names`` is empty, the CA is not valid at ``now``, or ``life`` is not positive."""
    if not names:
        raise ValueError("a serving certificate needs at least one DNS name or IP address")
    alternative = x509.SubjectAlternativeName([*map(x509.DNSName, names.dns), *map(x509.IPAddress, names.addresses)])
    return _make_leaf(_LEAF_NAME, authority, now, life, ExtendedKeyUsageOID.SERVER_AUTH, (alternative, False))


def make_client(authority: Signed, name: str, now: datetime, life: timedelta = LEAF_LIFE) -> Signed:
    """Create an ECDSA P-256 client certificate with the common name ``name``. It expires no later than the CA.

    Raises ValueError if the CA is not valid at ``now``, or ``life`` is not positive.
    """
    return _make_leaf(name, authority, now, life, ExtendedKeyUsageOID.CLIENT_AUTH)


def common_name(certificate: x509.Certificate) -> str:
    """Return the common name in the certificate's subject; empty if the common name is missing or unreadable."""
    try:
        return next((str(one.value) for one in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)), "")
    except ValueError:
        return ""


def _make_leaf(
    common: str,
    authority: Signed,
    now: datetime,
    life: timedelta,
    usage: x509.ObjectIdentifier,
    *more: tuple[x509.ExtensionType, bool],
) -> Signed:
    if not authority.certificate.not_valid_before_utc <= now < authority.expires:
        raise ValueError(f"the CA is not valid at {now:%Y-%m-%d %H:%M:%S}, so it cannot sign a certificate")
    return _make(
        common,
        x509.random_serial_number(),
        now,
        min(now + life, authority.expires),
        authority,
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_key_usage("digital_signature"), True),
        (x509.ExtendedKeyUsage([usage]), False),
        *more,
    )


def renewal_due(start: datetime, end: datetime) -> datetime:
    """Return when a certificate that is valid from ``start`` to ``end`` should be renewed."""
    # A third of the life is enough time for retries if the renewal fails at first. cert-manager renews at a third too.
    return end - (end - start) / 3


def signed_by(leaf: x509.Certificate, authority: x509.Certificate) -> bool:
    """Return True if ``authority`` signed ``leaf`` and is named as its issuer. Validity periods are not checked."""
    try:
        leaf.verify_directly_issued_by(authority)
    except (InvalidSignature, UnsupportedAlgorithm, ValueError, TypeError):
        return False
    return True


def is_ours(certificate: x509.Certificate, named: Literal["subject", "issuer"] = "subject") -> bool:
    """Return whether the certificate's subject or issuer is named like a CA from `make_authority`. Anyone can use such
    a name, so the name proves nothing."""
    try:
        names = [str(one.value) for one in getattr(certificate, named)]
    except ValueError:  # a certificate whose names cannot be read is not ours
        return False
    return any(name.startswith((_AUTHORITY_NAME, _CLIENT_AUTHORITY_NAME)) for name in names)


def _make(
    common: str,
    serial: int,
    now: datetime,
    end: datetime,
    authority: Signed | None,
    *extensions: tuple[x509.ExtensionType, bool],
) -> Signed:
    """Create a certificate. ``extensions``: pairs of an extension and its flag "critical". Without ``authority``, the
    certificate is self-signed."""
    if now.tzinfo is None:
        raise ValueError("the creation time of a certificate must have a time zone")
    if end <= now:
        raise ValueError("the lifetime of a certificate must be positive")
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    # The issuer's key identifier is the subject key identifier of the CA, as RFC 5280 section 4.2.1.1 requires.
    extended = authority and authority.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
    issuer = extended.value if extended else identifier
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(authority.certificate.subject if authority else subject)
        .public_key(key.public_key())
        .serial_number(serial)
        .not_valid_before(now - BACKDATE)  # the builder converts times to UTC, without microseconds
        .not_valid_after(end)
        .add_extension(identifier, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer), critical=False)
    )
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical)
    return Signed(builder.sign(authority.key if authority else key, hashes.SHA256()), key)


def _key_usage(*bits: str) -> x509.KeyUsage:
    # All other key usages are False, because an ECDSA key never enciphers or agrees keys in TLS 1.2 or 1.3.
    return x509.KeyUsage(**{bit: bit in bits for bit in _KEY_USAGES})
