"""Serving certificates of one CA, and two ways to replace the files of a certificate."""

import shutil
import ssl
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path

from cryptography.hazmat.primitives.serialization import Encoding

from vcuda.x509 import DEVELOPMENT, Signed, make_authority, make_leaf

NOW = datetime.now(UTC)
AUTHORITY = make_authority(NOW)

VERSIONS = count()


def new_leaf(days: int = 90) -> Signed:
    return make_leaf(AUTHORITY, DEVELOPMENT, NOW, timedelta(days=days))


def write_plainly(directory: Path, leaf: Signed) -> None:
    """Overwrite certificate and key in place, as an editor or the command ``cp`` does."""
    directory.mkdir(exist_ok=True)
    (directory / "tls.crt").write_bytes(leaf.certificate_pem())
    (directory / "tls.key").write_bytes(leaf.key_pem())


def write_as_kubelet(directory: Path, leaf: Signed) -> None:
    """Replace the link ``..data`` in one step, and remove its former target, as the kubelet's AtomicWriter does."""
    version = directory / f"..2026_11_21_08_00_00.{next(VERSIONS)}"
    version.mkdir(parents=True)
    write_plainly(version, leaf)
    data = directory / "..data"
    old = data.resolve() if data.is_symlink() else None
    (directory / "..data_tmp").symlink_to(version.name)
    (directory / "..data_tmp").replace(data)
    if old:
        shutil.rmtree(old)
        return
    for name in ("tls.crt", "tls.key"):
        (directory / name).symlink_to(f"..data/{name}")


def trusting() -> ssl.SSLContext:
    return ssl.create_default_context(cadata=AUTHORITY.certificate_pem().decode())


def der(leaf: Signed) -> bytes:
    return leaf.certificate.public_bytes(Encoding.DER)
