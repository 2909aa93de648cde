"""Writes a server's certificate and key into a directory in one step, loads them for a TLS server, and reads the
certificate that a server presents over the network."""

import fcntl
import hashlib
import os
import shutil
import socket
import ssl
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import structlog
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from vcuda.errors import BadInput, Unavailable
from vcuda.x509 import Signed

AUTHORITY_CERTIFICATE = "ca.crt"
AUTHORITY_KEY = "ca.key"
LEAF_CERTIFICATE = "tls.crt"
LEAF_KEY = "tls.key"

WRITTEN_BY, OURS = "quota.vcuda.io/written-by", "vcuda-certs"
"""The label of the objects that vcuda-certs writes, and its value. Helm overwrites ``app.kubernetes.io/managed-by``."""
OTHER_TOOLS = {"cert-manager.io/": "cert-manager", "service.beta.openshift.io/": "OpenShift's service CA"}
"""If an object has an annotation with one of these prefixes, another tool manages the object. vcuda-certs must not
write this object. For example, cert-manager's cainjector would overwrite the caBundles in it."""

DIAL_TIMEOUT_SECONDS = 5.0
"""The timeout in seconds of the TCP connection, and also of the TLS handshake."""
DIALLED_AT_ONCE = 16

_DATA = "..data"
_SET_PREFIX = "..issued-"
_PUBLIC_MODE = 0o644
_SECRET_MODE = 0o600

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()
_Content = tuple[str, ...]


# By default, gunicorn creates a TLS context for every connection. Then handshakes are slow, and they fail while the
# certificate files are being replaced. So all new connections share the context of the last valid certificate and key.
@dataclass(frozen=True, slots=True)
class _Served:
    """A TLS context, and the time when its certificate expires, in Unix seconds."""

    context: ssl.SSLContext
    expiry: float


class ServingCertificate:
    """Loads a certificate and its key from a directory into a TLS context. Raises BadInput if they are invalid.

    ``client_ca``: a file with the CAs of clients. `poll` loads all files again if one of them has changed.
    ``client_required``: True if a client must present a certificate. ``reload_failures``: the number of changes
    after which the files were invalid.
    """

    def __init__(self, directory: Path, client_ca: Path | None = None, *, client_required: bool = False) -> None:
        self._directory = directory
        self._client_ca = client_ca
        # The webhook's server cannot require a client certificate: kubelet's probes have none, and the requested path
        # is not known during the handshake.
        self._verify_mode = ssl.CERT_REQUIRED if client_required else ssl.CERT_OPTIONAL
        self._loaded = self._fingerprint()
        self._rejected: _Content | None = None
        self._served = self._load()
        self.reload_failures = 0

    @property
    def expiry(self) -> float:
        """The time when the served certificate expires, in Unix seconds."""
        return self._served.expiry

    def current(self) -> ssl.SSLContext:
        return self._served.context

    def poll(self) -> None:
        """Load the files again if they have changed. If they are invalid, keep the last valid certificate, and log the
        fault once. Only one thread may call this method."""
        found = self._fingerprint()
        if found == self._loaded:
            self._rejected = None
            return
        try:
            loaded, fault = self._load(), ""
        except BadInput as error:
            loaded, fault = None, str(error)
        if self._fingerprint() != found:
            return
        if loaded:
            self._loaded, self._rejected, self._served = found, None, loaded
            _log.info("serving certificate reloaded", expiry=loaded.expiry)
        elif found != self._rejected:
            self._rejected = found
            self.reload_failures += 1
            _log.error("serving certificate not reloaded, the last valid certificate is kept", reason=fault)

    def _load(self) -> _Served:
        directory = self._directory
        certificate, key = directory / LEAF_CERTIFICATE, directory / LEAF_KEY
        public_key, expiry = _read_leaf(certificate)
        if _read_public_key(key) != public_key:
            raise _bad(directory, f"{key} is not the private key of tls.crt")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            # An empty password is given. Without it, OpenSSL would prompt for the password of an encrypted key.
            context.load_cert_chain(certificate, key, password="")
        except OSError as error:  # ssl.SSLError is a subclass of OSError
            raise _bad(directory, f"{certificate} is rejected by OpenSSL together with tls.key: {error}") from error
        if self._client_ca:
            try:
                context.load_verify_locations(self._client_ca)
            except OSError as error:
                raise BadInput(f"{self._client_ca} cannot be read, or contains no PEM certificate: {error}") from error
            context.verify_mode = self._verify_mode
        return _Served(context, expiry)

    def _fingerprint(self) -> _Content:
        # The files are compared by SHA-256 digests, so that the private key is not kept in memory.
        files = [self._directory / LEAF_CERTIFICATE, self._directory / LEAF_KEY]
        return tuple(map(_digest, [*files, self._client_ca] if self._client_ca else files))


def watch(serving: ServingCertificate, stop: threading.Event, interval: float = 5.0) -> None:
    """Poll every ``interval`` seconds until ``stop`` is set. The serving process must run this in a thread."""
    while not stop.wait(interval):
        serving.poll()


def _read_leaf(path: Path) -> tuple[bytes, float]:
    try:
        leaf = x509.load_pem_x509_certificates(path.read_bytes())[0]
        return _der(leaf.public_key()), leaf.not_valid_after_utc.timestamp()
    except OSError as error:
        raise _bad(path.parent, f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, UnsupportedAlgorithm, x509.InvalidVersion) as error:
        raise _bad(path.parent, f"{path} contains no PEM certificate: {error}") from error


def _read_public_key(path: Path) -> bytes:
    try:
        return _der(load_pem_private_key(path.read_bytes(), password=None).public_key())
    except OSError as error:
        raise _bad(path.parent, f"{path} cannot be read: {error.strerror}") from error
    except TypeError as error:
        raise _bad(path.parent, f"{path} must not be encrypted, because nobody can enter its password") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        # The library's message is not repeated, because a log must not contain anything about a private key.
        raise _bad(path.parent, f"{path} contains no PEM private key") from error


def _der(key: PublicKeyTypes) -> bytes:
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _bad(directory: Path, fault: str) -> BadInput:
    return BadInput(f"{fault}. To create a certificate and key: vcuda-certs issue --dir {directory}")


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        return f"unreadable: {error.strerror}"


def served_leaf(address: str, server_name: str) -> x509.Certificate:
    """Return the certificate that HOST:PORT presents for ``server_name``, without verification. Raises Unavailable."""
    host, _, port = address.rpartition(":")
    # The certificate is not verified, because an invalid certificate must also be returned. No data is sent.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with (
            socket.create_connection((host.strip("[]"), int(port)), DIAL_TIMEOUT_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=server_name) as connection,
        ):
            return x509.load_der_x509_certificate(connection.getpeercert(binary_form=True) or b"")
    except (OSError, ValueError, OverflowError, x509.InvalidVersion) as error:
        raise Unavailable(str(error)) from error


def served_leaves(addresses: Iterable[str], server_name: str) -> list[tuple[x509.Certificate | None, str]]:
    """Return for each HOST:PORT the certificate that it presents for ``server_name``, or None and the reason."""

    def dial(address: str) -> tuple[x509.Certificate | None, str]:
        try:
            return served_leaf(address, server_name), ""
        except Unavailable as error:
            return None, str(error)

    # The servers are dialled in parallel, so that a server without an answer does not delay all others.
    with ThreadPoolExecutor(DIALLED_AT_ONCE) as pool:
        return list(pool.map(dial, addresses))


@dataclass(frozen=True, slots=True)
class File:
    """A certificate or key to write. ``holds`` describes it. ``expires``: when the certificate ends; None for a key."""

    name: str
    holds: str
    content: bytes = field(repr=False)
    mode: int
    expires: datetime | None


def serving_files(authority: Signed, leaf: Signed) -> tuple[File, ...]:
    """Return the files that a TLS server needs, named as in a Secret of type kubernetes.io/tls."""
    root = authority.certificate_pem()
    return (
        File(AUTHORITY_CERTIFICATE, "certificate of the CA", root, _PUBLIC_MODE, authority.expires),
        # tls.crt contains only the leaf certificate, without the CA. A client that trusts the CA has ca.crt already. No
        # other client could use the CA.
        *leaf_files(leaf, "serving certificate"),
    )


def leaf_files(leaf: Signed, holds: str) -> tuple[File, ...]:
    """Return the files of a leaf certificate and its key, named as in a Secret of type kubernetes.io/tls."""
    return (
        File(LEAF_CERTIFICATE, holds, leaf.certificate_pem(), _PUBLIC_MODE, leaf.expires),
        File(LEAF_KEY, "private key of tls.crt", leaf.key_pem(), _SECRET_MODE, None),
    )


def signing_files(authority: Signed) -> tuple[File, ...]:
    """Return the file of the CA's key. A reader of the key can sign certificates, and so impersonate the webhook."""
    return (File(AUTHORITY_KEY, "private key of ca.crt", authority.key_pem(), _SECRET_MODE, None),)


def present_files(directory: Path) -> tuple[str, ...]:
    """Return the names of files in ``directory`` that a new set of files would replace, including dangling links."""
    names = (AUTHORITY_CERTIFICATE, AUTHORITY_KEY, LEAF_CERTIFICATE, LEAF_KEY)
    return tuple(name for name in names if os.path.lexists(directory / name))


# The layout of ``directory`` is that of kubelet's AtomicWriter (pkg/volume/util/atomic_writer.go). The files are in a
# fresh hidden directory, ``..data`` is a link to the hidden directory, and ``tls.crt`` is a link to ``..data/tls.crt``.
# One rename of ``..data`` replaces all files. If each file were renamed, a killed run could leave a certificate and
# a key that do not match.
def write_files(directory: Path, files: Sequence[File]) -> None:
    """Replace the set of files in ``directory`` in one step. If this raises OSError, the old set is unchanged."""
    directory.mkdir(parents=True, exist_ok=True)
    with _opened(directory) as descriptor:
        # Two concurrent runs would delete each other's files. So the second run waits for the lock. If locking fails,
        # the run continues, because some file systems have no locks.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        _swap_in(directory, files)


def _swap_in(directory: Path, files: Sequence[File]) -> None:
    fresh = Path(tempfile.mkdtemp(prefix=_SET_PREFIX, dir=directory))
    try:
        for file in files:
            _create(fresh / file.name, file)
        fresh.chmod(0o755)
        _sync(fresh)
        # The links to the files are created before ``..data`` is replaced. Until then, they lead to the old files.
        for file in files:
            _link(directory / file.name, f"{_DATA}/{file.name}", fresh)
        _link(directory / _DATA, fresh.name, fresh)
    except BaseException:
        # If the process was interrupted after ``..data`` was replaced, the new files are in use and must be kept.
        if _link_target(directory / _DATA) != fresh.name:
            shutil.rmtree(fresh)
        raise
    _sync(directory)
    _remove_old(directory, fresh.name, {file.name for file in files})


@contextmanager
def _opened(directory: Path) -> Iterator[int]:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _create(path: Path, file: File) -> None:
    # The file is created with its final mode. Otherwise every user could read a private key for a moment.
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, file.mode), "wb") as stream:
        stream.write(file.content)
        stream.flush()
        os.fsync(stream.fileno())


def _link(path: Path, target: str, scratch: Path) -> None:
    """Make ``path`` a link to ``target`` in one step. ``scratch``: a directory that only this process uses."""
    if _link_target(path) != target:
        link = scratch / "..link"
        link.symlink_to(target)
        link.replace(path)


def _link_target(path: Path) -> str | None:
    return str(path.readlink()) if path.is_symlink() else None


def _remove_old(directory: Path, current: str, kept: set[str]) -> None:
    for name in set(present_files(directory)) - kept:
        if _link_target(directory / name) == f"{_DATA}/{name}":
            (directory / name).unlink()
    # A killed run may have left unused files, perhaps with the private key of a CA. Such files are deleted.
    for old in directory.glob(f"{_SET_PREFIX}*"):
        if old.name != current:
            shutil.rmtree(old, ignore_errors=True)  # files that this process may not delete are kept


def _sync(directory: Path) -> None:
    # The directory itself is written to disk, so that the names of the files survive a power failure.
    with _opened(directory) as descriptor:
        os.fsync(descriptor)
