"""Mounts FUSE file systems (file systems in user space). Their server has ended, or does not answer."""

import errno
import os
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

import pytest

_INIT, _ACCESS = 26, 34  # opcodes of requests, from <linux/fuse.h>


@contextmanager
def mounted(path: Path, *, dead: bool) -> Iterator[FileIO]:
    """Mount a FUSE file system at ``path``. Yield the file descriptor of its server, which does not answer by itself.

    If ``dead``, the server has ended. The test is skipped if mounts are not permitted.
    """
    try:
        server = FileIO("/dev/fuse", "r+")
    except OSError as error:
        pytest.skip(f"no FUSE here: {error}")
    try:
        options = f"fd={server.fileno()},rootmode=40000,user_id=0,group_id=0"
        command = ("mount", "-i", "-t", "fuse", "-o", options, "none", path)
        done = subprocess.run(command, capture_output=True, text=True, check=False, pass_fds=(server.fileno(),))
        if done.returncode:
            pytest.skip(f"mount needs CAP_SYS_ADMIN: {done.stderr.strip()}")
        if dead:
            server.close()
        yield server
    finally:
        server.close()  # waiting callers get an error
        subprocess.run(("umount", "--lazy", path), capture_output=True, check=False)


def let_in(server: FileIO) -> None:
    """Act as the FUSE server until the working directory of another process is in the file system."""
    opcode = 0
    while opcode != _ACCESS:
        _, opcode, unique = struct.unpack_from("IIQ", os.read(server.fileno(), 2**17))
        if opcode == _INIT:
            about = struct.pack("4I2H2I2H8I", 7, 31, 2**16, 0, 12, 9, 2**16, 1, 0, 0, *[0] * 8)
            server.write(struct.pack("IiQ", 16 + len(about), 0, unique) + about)
        else:
            server.write(struct.pack("IiQ", 16, -errno.ENOSYS, unique))
