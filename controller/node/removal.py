"""Deletes whole trees: of any depth and width, with two descriptors and little memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import count

from controller.node.refused import Refused
from controller.node.renaming import rename
from controller.node.tree import Place, entries, open_directory
from vcuda.vm_directories import Kind

BATCH = 10_000
"""Entries that every deletion deletes, though the time is up: where the check before it takes a whole period, it would
else never begin."""

_BLOCK = 512  # bytes; the unit of st_blocks, whatever the file system's own (stat(2))


class OutOfTime(Exception):
    """The sweep has to end; what is left is for the next one."""


class Removal:
    """Empties and removes one directory in a place. ``freed`` counts the bytes given back.

    ``stopping`` ends it at once, ``give_up`` after a batch.

    A directory below the first level is not descended into but moved up to the top and emptied there: so nothing
    depends on the depth, and a process that is killed leaves a tree that is only flatter. What cannot be deleted does
    not keep the rest from it. All of it happens by descriptor, and a link is deleted as a link.
    """

    def __init__(self, place: Place, give_up: Callable[[], bool], stopping: Callable[[], bool]) -> None:
        self.freed = 0
        self._place = place
        self._give_up = give_up
        self._stopping = stopping
        self._steps = count()
        self._fresh = count()
        self._failures: list[OSError | Refused] = []

    def remove(self, name: str) -> None:
        """Delete the directory and all that is in it; the first OSError or Refused, where some of it stays."""
        top = open_directory(name, self._place.fd, self._place.mount)
        try:
            while self._empty(top) and not self._failures:
                pass
            blocks = os.fstat(top).st_blocks
        finally:
            os.close(top)
        if self._failures:
            raise self._failures[0]
        os.rmdir(name, dir_fd=self._place.fd)
        self.freed += blocks * _BLOCK

    def _empty(self, top: int) -> bool:
        """Delete what the top holds; return whether there was anything: moved up, it may need another round."""
        found = False
        for entry in entries(top):
            found = True
            if entry.kind is Kind.DIRECTORY:
                self._attempt(self._dissolve, top, entry.name)
            else:
                self._attempt(self._unlink, top, entry.name)
        return found

    def _dissolve(self, top: int, name: str) -> None:
        """Delete a directory of the top: its files at once, its directories after they have moved up."""
        fd = open_directory(name, top, self._place.mount)
        try:
            for entry in entries(fd):
                if entry.kind is Kind.DIRECTORY:
                    self._attempt(self._lift, fd, entry.name, top)
                else:
                    self._attempt(self._unlink, fd, entry.name)
            blocks = os.fstat(fd).st_blocks
        finally:
            os.close(fd)
        os.rmdir(name, dir_fd=top)
        self.freed += blocks * _BLOCK

    def _lift(self, parent: int, name: str, top: int) -> None:
        for number in self._fresh:
            try:
                rename(name, parent, f"~{number}", top)
            except FileExistsError:
                continue
            return

    def _unlink(self, parent: int, name: str) -> None:
        found = os.stat(name, dir_fd=parent, follow_symlinks=False)
        os.unlink(name, dir_fd=parent)
        if found.st_nlink == 1:
            self.freed += found.st_blocks * _BLOCK

    def _attempt(self, step: Callable[..., None], *arguments: object) -> None:
        """Take one step; one that fails is remembered, and the others go on."""
        if self._stopping() or (next(self._steps) >= BATCH and self._give_up()):
            raise OutOfTime
        try:
            step(*arguments)
        except FileNotFoundError:
            return  # somebody else has deleted it
        except (OSError, Refused) as error:
            if not self._failures:
                self._failures.append(error)
