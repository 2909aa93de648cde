"""Reads certificates and keys out of PEM that anybody may have edited. Nothing of a key gets into a message."""

from __future__ import annotations

import re

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from certs.authority import Signed
from certs.state import UNREADABLE_EXTENSIONS, Certificates

_BLOCK = re.compile(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
_BEGIN = b"-----BEGIN CERTIFICATE-----"
_UNREADABLE = (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion)


class Unusable(ValueError):
    """The text is no usable certificate or pair; the message says what is wrong, without any of it."""


def read_certificates(text: bytes) -> tuple[Certificates, bool]:
    """Return the certificates in a bundle, each once, and whether that is all there is in it.

    What is no certificate is passed over, as Go's AppendCertsFromPEM does.
    """
    found: dict[x509.Certificate, None] = {}
    whole = not _BLOCK.sub(b"", text).strip()
    for block in _BLOCK.findall(text):
        try:
            certificate = x509.load_pem_x509_certificate(block)
            certificate.public_key()
        except _UNREADABLE:
            whole = False
        else:
            found[certificate] = None
    return tuple(found), whole


def write_certificates(certificates: Certificates) -> bytes:
    """Return them as one PEM bundle."""
    return b"".join(certificate.public_bytes(Encoding.PEM) for certificate in certificates)


def read_pair(certificate: bytes, key: bytes, name: str) -> Signed:
    """Return the first certificate and its ECDSA key; ``name`` is that of the two files, as in ``tls``.

    Raises Unusable, as well for anything after it that is no certificate: a server that reads the pair refuses it then.
    """
    pair = _read_pair(certificate, key, name)
    if not _readable(certificate):
        raise Unusable(f"{name}.crt holds more than certificates")
    return pair


def read_authority(certificate: bytes, key: bytes, name: str) -> Signed:
    """Return a pair that may sign leaves; raises Unusable. What is after the certificate keeps it from nothing."""
    pair = _read_pair(certificate, key, name)
    if not is_authority(pair.certificate):
        raise Unusable(f"{name}.crt is not the certificate of a CA")
    return pair


def is_authority(certificate: x509.Certificate) -> bool:
    """Whether it says that it may sign others."""
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except UNREADABLE_EXTENSIONS:
        return False


def _read_pair(certificate: bytes, key: bytes, name: str) -> Signed:
    """Return the first certificate and its ECDSA key, whatever is around them; raises Unusable."""
    if not certificate or not key:
        missing = [file for file, text in ((f"{name}.crt", certificate), (f"{name}.key", key)) if not text]
        raise Unusable(f"{' and '.join(missing)} missing")
    found, _ = read_certificates(certificate)
    if not found:
        raise Unusable(f"{name}.crt holds no certificate")
    private = _read_key(key, name)
    if _public(found[0].public_key()) != _public(private.public_key()):
        raise Unusable(f"{name}.key is not the key of {name}.crt")
    return Signed(found[0], private)


def _readable(text: bytes) -> bool:
    """Whether all that begins as a certificate is one; words around them do no harm."""
    try:
        return bool(x509.load_pem_x509_certificates(text)) and _BEGIN not in _BLOCK.sub(b"", text)
    except _UNREADABLE:
        return False


def _read_key(text: bytes, name: str) -> ec.EllipticCurvePrivateKey:
    try:
        key = load_pem_private_key(text, password=None)
    except _UNREADABLE as error:
        # Not from the error: the library's own words are left out of every message about a key.
        raise Unusable(f"{name}.key holds no private key") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise Unusable(f"{name}.key is no ECDSA key")
    return key


def _public(key: object) -> bytes | None:
    """What two halves of one ECDSA pair have in common; None for another kind of key."""
    if not isinstance(key, ec.EllipticCurvePublicKey):
        return None
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
