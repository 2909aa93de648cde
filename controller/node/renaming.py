"""Renames that never replace anything: renameat2(2) with RENAME_NOREPLACE."""

from __future__ import annotations

import ctypes
import errno
import os

_RENAME_NOREPLACE = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
# An old kernel, or a file system that cannot (NFS) say so: renameat2(2).
_NOT_SUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


def rename(name: str, parent: int, new_name: str, new_parent: int) -> None:
    """Rename from one open directory to another. FileExistsError where the new name is taken, else OSError.

    Where the kernel or file system knows no such rename, the name is looked up first: what another process makes under
    it in between is replaced only if it is an empty directory (rename(2)), and then nothing is lost.
    """
    number = _renameat2(name, parent, new_name, new_parent)
    if number in _NOT_SUPPORTED:
        if _exists(new_name, new_parent):
            number = errno.EEXIST
        else:
            os.rename(name, new_name, src_dir_fd=parent, dst_dir_fd=new_parent)
            return
    if number:
        raise OSError(number, os.strerror(number), name)


def _renameat2(name: str, parent: int, new_name: str, new_parent: int) -> int:
    """Return the number of the error, 0 where there was none."""
    call = getattr(_LIBC, "renameat2", None)
    if call is None:
        return errno.ENOSYS
    if call(parent, os.fsencode(name), new_parent, os.fsencode(new_name), _RENAME_NOREPLACE) == 0:
        return 0
    return ctypes.get_errno()


def _exists(name: str, parent: int) -> bool:
    try:
        os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True
