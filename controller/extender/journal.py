"""The placements that may be on their way to the API server, written down before they are sent.

Two leaders must never give one share to two pods. The patch of a placement is guarded by the pod's own version, which
says nothing of other pods; and a lease is only as good as two clocks: a process that was stopped between its look at
the lease and its patch would send it all the same. So before each patch the placement is written to this one
ConfigMap, by compare-and-swap, and whoever takes the lease takes the ConfigMap too before it lists the pods:

* A patch of an earlier leader that was sent had been written down before the ConfigMap was taken, so either it is in
  the list of pods that follows, or it stands in what was taken and is counted until the pod's version has moved on.
* One that had not been written down is never sent: its compare-and-swap fails now, and its process ends.

Hence every leader decides with all that any other has given or may still give; no clock has a part in it.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress

import msgspec

from controller.extender.cache import AssumedPlacement
from vcuda import errors, k8s_types
from vcuda.kube import NOT_TRACKED, Kube, segment

NAME = "gpu-placements"
KEY = "journal"
TIMEOUT = 3.0
"""Seconds for one call to the API server."""

MAX_ATTEMPTS = 5

DEADLINE_SECONDS = 12.0
"""For one answer, whatever fails: fewer than the scheduler's httpTimeout, 15, by more than one call takes."""

MIN_CALL_SECONDS = 0.2
"""With fewer a call is not begun: it would only be left without an answer."""


class Deadline:
    """When an answer is due, ``DEADLINE_SECONDS`` from now. ``clock`` only runs forward, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at = clock() + DEADLINE_SECONDS

    def timeout(self) -> float:
        """Return the seconds that the next call may take; raises NotPlaced where too few are left."""
        left = self._at - self._clock()
        if left < MIN_CALL_SECONDS:
            raise errors.NotPlaced("there was no time left to place the pod")
        return min(TIMEOUT, left)


class JournalData(msgspec.Struct, frozen=True):
    """What is written: by whom, and which placements may be on their way. ``format`` tells later releases."""

    holder: str
    placements: tuple[AssumedPlacement, ...] = ()
    format: int = 1


_CONFIG_MAP = msgspec.json.Decoder(k8s_types.ConfigMap)
_DATA = msgspec.json.Decoder(JournalData)


class Journal:
    """The one ConfigMap, in the system's own namespace. ``holder`` names this process and must be its own."""

    def __init__(self, kube: Kube, namespace: str, holder: str) -> None:
        self._kube = kube
        self._namespace = namespace
        self._holder = holder
        self._collection = f"/api/v1/namespaces/{segment(namespace)}/configmaps"
        self._path = f"{self._collection}/{NAME}"
        # None where it is not known what the last write came to: then the ConfigMap is read again first.
        self._version: str | None = None

    def take(self) -> tuple[AssumedPlacement, ...]:
        """Become its only writer; return what those before may have sent.

        Raises UnreadableJournal where it is damaged, Unavailable where others took it again and again.
        """
        for _ in range(MAX_ATTEMPTS):
            try:
                version, written = self._read()
                self._version = self._put(JournalData(self._holder, written.placements), version)
            except errors.NotFound:
                body = self._manifest(JournalData(self._holder), None)
                with suppress(errors.Conflict):  # another process did so first
                    self._version = _version_of(self._kube.post(self._collection, body, timeout=TIMEOUT))
                    return ()
            except errors.Conflict:
                continue
            else:
                return written.placements
        raise errors.Unavailable(f"{self._namespace}/{NAME}: others write it again and again")

    def write(self, placements: Iterable[AssumedPlacement], deadline: Deadline) -> None:
        """Write down what may be sent from now on; after an error nothing may be sent.

        Raises Deposed where another process has taken the journal, NotPlaced where there was no time left.
        """
        wanted = JournalData(self._holder, tuple(placements))
        for _ in range(MAX_ATTEMPTS):
            version, self._version = self._version or self._reread(deadline), None
            try:
                self._version = self._put(wanted, version, deadline.timeout())
            except (errors.Conflict, errors.NotFound):
                continue  # our own last write may have landed unheard; reading again tells
            else:
                return
        raise errors.Unavailable(f"{self._namespace}/{NAME}: others write it again and again")

    def _reread(self, deadline: Deadline) -> str:
        """Return its version, if it is still ours."""
        try:
            version, written = self._read(deadline.timeout())
        except errors.NotFound as error:
            raise errors.Deposed("the journal of placements was deleted") from error
        if written.holder != self._holder:
            raise errors.Deposed(f"{written.holder} has taken the journal of placements")
        return version

    def _read(self, timeout: float = TIMEOUT) -> tuple[str, JournalData]:
        config_map = _CONFIG_MAP.decode(self._kube.get(self._path, timeout=timeout))
        try:
            return config_map.metadata.resource_version, _DATA.decode((config_map.data or {})[KEY])
        except (KeyError, *k8s_types.UNDECODABLE) as error:
            advice = "delete it, and restart the controllers"
            raise errors.UnreadableJournal(
                f"ConfigMap {self._namespace}/{NAME} cannot be read ({error}); {advice}"
            ) from error

    def _put(self, data: JournalData, version: str, timeout: float = TIMEOUT) -> str:
        return _version_of(self._kube.put(self._path, self._manifest(data, version), timeout=timeout))

    def _manifest(self, data: JournalData, version: str | None) -> bytes:
        labels = {"app.kubernetes.io/managed-by": "vcuda-quota"}
        # What makes a PUT a compare-and-swap: without it the API server takes any.
        guard = {"resourceVersion": version} if version is not None else {}
        about = {"namespace": self._namespace, "labels": labels, "managedFields": NOT_TRACKED}
        metadata = {"name": NAME, **about, **guard}
        text = {KEY: msgspec.json.encode(data).decode()}
        return msgspec.json.encode({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": text})


def _version_of(answer: bytes) -> str:
    return _CONFIG_MAP.decode(answer).metadata.resource_version
