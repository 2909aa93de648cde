"""Follows the containers and the charge of a pod over time."""

import time
from collections.abc import Callable

from tests.e2e.cluster import Cluster, Json
from tests.processes import eventually
from tests.real.pods import run
from tests.real.release import Release, processes

LIFE = "team-life"
"""The namespace of the pods. Only one pod at a time may have a charge in this namespace."""


class Lives:
    """How long the containers of a pod existed, and how long its charge, in seconds after ``began``."""

    def __init__(self, release: Release, uid: str) -> None:
        self._release, self._uid = release, uid
        self.container = self.charge = 0.0

    def follow(self, act: Callable[[], object], patience: float = 120) -> None:
        """Call ``act``. Return when the pod's container and charge have ended. The charge must not end first."""
        began = time.monotonic()
        act()
        while True:
            # The charge is read first. So a container that is then seen without a charge did exist without one.
            charged, lives = self._release.charged(LIFE) > 0, bool(processes(self._uid))
            elapsed = time.monotonic() - began
            assert charged or not lives, f"the charge ended before the container, after {elapsed:.1f} s"
            if lives:
                self.container = elapsed
            if charged:
                self.charge = elapsed
            if not charged and not lives:
                break
            assert elapsed < patience, "the charge did not end"
            time.sleep(0.1)
        print(f"\nthe container ended after {self.container:.1f} s, and the charge after {self.charge:.1f} s")


def started(cluster: Cluster, release: Release, manifest: Json) -> Lives:
    uid = run(cluster, manifest)["metadata"]["uid"]
    release.await_charged(LIFE, 1)
    eventually(lambda: processes(uid))
    return Lives(release, uid)
