"""Which pods kubelet keeps: it removes a pod's directory once its containers have ended and its volumes are gone."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from controller.node.refused import Refused
from vcuda.vm_directories import Reason


class Kubelet(Protocol):
    """Both methods raise Refused where it is not known what kubelet keeps."""

    def uids(self) -> frozenset[str] | None:
        """Return the uids that it keeps; None where nobody said where to look."""

    def check_gone(self, uid: str) -> None:
        """Look for one pod anew; Refused where kubelet keeps it."""


@dataclass(frozen=True, slots=True)
class KubeletPods:
    """kubelet's directory of pods, /var/lib/kubelet/pods by default; ``own_uid`` is of the pod that looks into it.

    A directory without the latter is not this node's: a mount that leads somewhere else would tell that all are gone.
    """

    path: Path
    own_uid: str | None = None

    def uids(self) -> frozenset[str] | None:
        """Return the names in the directory."""
        try:
            found = frozenset(os.listdir(self.path))  # noqa: PTH208  # names are wanted, not paths
        except OSError as error:
            raise _unknown(self.path, error) from error
        if self.own_uid is not None and self.own_uid not in found:
            raise Refused(Reason.KUBELET_UNKNOWN, f"{self.path} lacks the pod that looks into it")
        return found

    def check_gone(self, uid: str) -> None:
        """Look for one pod anew."""
        try:
            (self.path / uid).lstat()
        except FileNotFoundError as error:
            if self.path.is_dir():
                return
            raise _unknown(self.path, error) from error
        except OSError as error:
            raise _unknown(self.path, error) from error
        raise Refused(Reason.KUBELET)


def _unknown(path: Path, error: OSError) -> Refused:
    return Refused(Reason.KUBELET_UNKNOWN, f"{path}: {error.strerror}")


@dataclass(frozen=True, slots=True)
class NoKubelet:
    """Nobody said where kubelet keeps its pods."""

    def uids(self) -> None:
        """Know nothing."""

    def check_gone(self, uid: str) -> None:
        """Know nothing."""
