"""Writes certificates into a directory, laid out and swapped as kubelet does it for a mounted Secret.

The files live in a fresh hidden directory; ``..data`` is a link to it, and ``tls.crt`` is a link to ``..data/tls.crt``.
One rename of ``..data`` swaps them all, so a reader, or a run that is killed, finds the whole old set or the whole new
one. Renaming the files one by one would be shorter, and would leave a key that does not match its certificate when it
is killed between two of them. (kubelet: AtomicWriter in kubernetes/pkg/volume/util/atomic_writer.go.)
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from certs.x509 import Signed

AUTHORITY_CERTIFICATE = "ca.crt"
AUTHORITY_KEY = "ca.key"
LEAF_CERTIFICATE = "tls.crt"
LEAF_KEY = "tls.key"

_DATA = "..data"
_VERSION_PREFIX = "..issued-"
_PUBLIC = 0o644
_SECRET = 0o600


@dataclass(frozen=True, slots=True)
class File:
    """One file to write: its name, what it holds in words, its mode, and its expiry (none for a key)."""

    name: str
    holds: str
    content: bytes = field(repr=False)
    mode: int
    expires: datetime | None


def serving_files(authority: Signed, leaf: Signed) -> tuple[File, ...]:
    """What a server needs, under the names of a kubernetes.io/tls Secret.

    ``tls.crt`` is the leaf alone: whoever trusts ``ca.crt`` has the authority already, and nobody else is helped
    by being sent it.
    """
    return (
        File(
            AUTHORITY_CERTIFICATE,
            "certificate of the CA",
            authority.certificate_pem(),
            _PUBLIC,
            authority.expires,
        ),
        File(LEAF_CERTIFICATE, "serving certificate", leaf.certificate_pem(), _PUBLIC, leaf.expires),
        File(LEAF_KEY, "private key of tls.crt", leaf.key_pem(), _SECRET, None),
    )


def signing_files(authority: Signed) -> tuple[File, ...]:
    """What signing more leaves needs: the key of the authority. Whoever reads it can pose as the webhook."""
    return (File(AUTHORITY_KEY, "private key of ca.crt", authority.key_pem(), _SECRET, None),)


def present_files(directory: Path) -> tuple[str, ...]:
    """Return the names in ``directory`` that a new set would replace; dangling links count."""
    names = (AUTHORITY_CERTIFICATE, AUTHORITY_KEY, LEAF_CERTIFICATE, LEAF_KEY)
    return tuple(name for name in names if os.path.lexists(directory / name))


def write_files(directory: Path, files: Sequence[File]) -> None:
    """Replace the set in ``directory``, which is made where it is missing, with ``files`` in one step.

    Links of an earlier set that this one does not hold are removed, and so is what runs have left that were killed.
    Raises OSError, the old set untouched where it was written by this function.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with _alone(directory):
        _replace(directory, files)


def _replace(directory: Path, files: Sequence[File]) -> None:
    version = Path(tempfile.mkdtemp(prefix=_VERSION_PREFIX, dir=directory))
    try:
        for file in files:
            _create(version / file.name, file)
        version.chmod(0o755)
        _sync(version)
        # Links first: until ..data moves they show the old set, or in a new directory none of it.
        for file in files:
            _link(directory / file.name, f"{_DATA}/{file.name}", version)
        _link(directory / _DATA, version.name, version)
    except BaseException:
        if _target(directory / _DATA) != version.name:  # interrupted right after the swap, it is in use
            shutil.rmtree(version)
        raise
    _sync(directory)
    _remove_old(directory, version.name, {file.name for file in files})


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Let no other run write here meanwhile, on a file system that has locks: one would remove what another makes."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _create(path: Path, file: File) -> None:
    """Write a new file that has its final mode before it has any content."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, file.mode), "wb") as stream:
        stream.write(file.content)
        stream.flush()
        os.fsync(stream.fileno())


def _link(path: Path, target: str, scratch: Path) -> None:
    """Make ``path`` a link to ``target`` in one step, whatever file was there; ``scratch`` is a directory of ours."""
    if _target(path) != target:
        link = scratch / "..link"
        link.symlink_to(target)
        link.replace(path)


def _target(path: Path) -> str | None:
    return str(path.readlink()) if path.is_symlink() else None


def _remove_old(directory: Path, version: str, kept: set[str]) -> None:
    """Remove every version but this one that this module made, and the links to files that no longer exist.

    A run that was killed left its own, or the one before: with the key of a CA in it, perhaps.
    """
    for name in set(present_files(directory)) - kept:
        if _target(directory / name) == f"{_DATA}/{name}":
            (directory / name).unlink()
    for old in directory.glob(f"{_VERSION_PREFIX}*"):
        if old.name != version:
            shutil.rmtree(old, ignore_errors=True)  # gone already, or not ours to remove


def _sync(directory: Path) -> None:
    """Make the names in ``directory`` survive a loss of power."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
