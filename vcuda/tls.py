"""The serving certificate: one cached TLS context, reloaded when the files change, and never replaced by a bad one.

gunicorn's default builds a context for every connection, which costs each handshake and fails it while the files are
being replaced. Here connections share the context of the last good pair; a new pair serves new connections, and
those that are open stay as they are.
"""

from __future__ import annotations

import hashlib
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path

import structlog
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from vcuda.errors import BadInput

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()
_Content = tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Served:
    """A context, and the end of its leaf in Unix seconds."""

    context: ssl.SSLContext
    expiry: float


class ServingCertificate:
    """The pair ``tls.crt`` and ``tls.key`` of a directory, as a TLS context for a server.

    ``reload_failures`` counts the bad pairs met since the start: one pair counts once, however often it is polled.
    Raises BadInput when there is no good pair to start with; the message names the file and the command that makes one.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._loaded = _fingerprint(directory)
        self._refused: _Content | None = None
        self._served = _load(directory)
        self.reload_failures = 0

    @property
    def expiry(self) -> float:
        """The end of the served leaf, Unix seconds."""
        return self._served.expiry

    def current(self) -> ssl.SSLContext:
        """Return the context for a new connection: the same one until a poll finds a new good pair."""
        return self._served.context

    def poll(self) -> None:
        """Read the files; serve a new good pair, or keep the last good one and log what is wrong, once a content.

        The files are compared by content, not by their times: that is exact, follows the links kubelet swaps, and
        costs two small reads. Files that change while they are read are left to the next poll; a pair that was refused
        is tried again at each, because it may have been no fault of its own. One thread calls this.
        """
        found = _fingerprint(self._directory)
        if found == self._loaded:
            self._refused = None
            return
        try:
            loaded, fault = _load(self._directory), ""
        except BadInput as error:
            loaded, fault = None, str(error)
        if _fingerprint(self._directory) != found:
            return
        if loaded is None:
            self._refuse(found, fault)
            return
        self._loaded, self._refused, self._served = found, None, loaded
        _log.info("serving certificate reloaded", expiry=loaded.expiry)

    def _refuse(self, content: _Content, fault: str) -> None:
        """Count and log a bad pair, unless it is the one that was there before."""
        if content != self._refused:
            self._refused = content
            self.reload_failures += 1
            _log.error("serving certificate not reloaded, the last good one stays", reason=fault)


def watch(serving: ServingCertificate, stop: threading.Event, interval: float = 5.0) -> None:
    """Poll every ``interval`` seconds until ``stop`` is set; run it in a thread of the process that serves."""
    while not stop.wait(interval):
        serving.poll()


def _load(directory: Path) -> _Served:
    """Build a context from the pair; raises BadInput that says which file is wrong and how to make a good one."""
    certificate, key = directory / "tls.crt", directory / "tls.key"
    public_key, expiry = _read_leaf(certificate)
    if _read_public_key(key) != public_key:
        raise _bad(key, "is not the private key of tls.crt")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        # Should the key be swapped for an encrypted one just now, the empty password keeps OpenSSL from asking for it.
        context.load_cert_chain(certificate, key, password="")
    except OSError as error:  # ssl.SSLError is one
        raise _bad(certificate, f"and tls.key are refused by OpenSSL: {error}") from error
    return _Served(context, expiry)


def _read_leaf(path: Path) -> tuple[bytes, float]:
    """Return the public key and the end (Unix seconds) of the first certificate, the one OpenSSL serves.

    Raises BadInput.
    """
    try:
        leaf = x509.load_pem_x509_certificates(path.read_bytes())[0]
        return _der(leaf.public_key()), leaf.not_valid_after_utc.timestamp()
    except OSError as error:
        raise _bad(path, f"cannot be read: {error.strerror}") from error
    except (ValueError, UnsupportedAlgorithm, x509.InvalidVersion) as error:
        raise _bad(path, f"holds no PEM certificate: {error}") from error


def _read_public_key(path: Path) -> bytes:
    """Return the public half of the private key in the file; raises BadInput."""
    try:
        return _der(load_pem_private_key(path.read_bytes(), password=None).public_key())
    except OSError as error:
        raise _bad(path, f"cannot be read: {error.strerror}") from error
    except TypeError as error:
        raise _bad(path, "is encrypted, which a server that starts by itself cannot use") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        # The library's own words are left out: nothing about a private key belongs in a log.
        raise _bad(path, "holds no PEM private key") from error


def _der(key: PublicKeyTypes) -> bytes:
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _bad(path: Path, fault: str) -> BadInput:
    return BadInput(f"{path} {fault}. To make a good pair: vcuda-certs issue --dir {path.parent}")


def _fingerprint(directory: Path) -> _Content:
    """What tells one content of both files from another, without keeping the key."""
    return _digest(directory / "tls.crt"), _digest(directory / "tls.key")


def _digest(path: Path) -> str:
    """The SHA-256 of the file in hex, or why it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        return f"unreadable: {error.strerror}"
