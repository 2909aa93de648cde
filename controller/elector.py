"""Leader election on a Lease: one controller leads, the others are standbys.

The rules are client-go's (``tools/leaderelection``): a lease is taken by compare-and-swap, renewed well before it
ends, and taken from another holder only if that one has not renewed it for its whole duration, by this process' clock.
The official Python client has an elector too. A refused connection ends that elector but not the work, so there would
be two leaders. Here the caller ends its work when the lease is lost, and all its writes are compare-and-swap.
"""

import datetime
import math
import time
from collections.abc import Callable

import msgspec
import structlog

from vcuda import errors, k8s_types
from vcuda.kube import Kube, segment


class LeaseTiming(msgspec.Struct, frozen=True):
    """Seconds, by client-go's names.

    A leader that could not renew for ``renew_deadline`` stops, before others may take over after ``lease_duration``.
    """

    lease_duration: int = 30
    renew_deadline: float = 20.0
    retry_period: float = 2.0

    @classmethod
    def of(cls, lease_seconds: int) -> "LeaseTiming":
        """Return the timing of a lease of so many seconds: two thirds of them to renew it, with at most ten
        attempts."""
        return cls(lease_seconds, lease_seconds * 2 / 3, min(2.0, lease_seconds / 5))


class LeaseSpec(k8s_types.K8sStruct, frozen=True, gc=False):
    """The holder of the Lease and its last renewal. Both times are RFC 3339 with microseconds."""

    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class Lease(k8s_types.K8sObject, frozen=True, gc=False):
    """A coordination.k8s.io/v1 Lease."""

    spec: LeaseSpec = LeaseSpec()


_LEASE = msgspec.json.Decoder(Lease)

FIRST_WARNING_SECONDS, LONGEST_SILENCE_SECONDS = 5.0, 300.0
"""Failed attempts are warned of when they have lasted so long, then at intervals that double up to the second."""

CALL_FAILURES = (errors.VcudaError, *k8s_types.UNDECODABLE)
"""The errors of a call. An answer that cannot be decoded counts as a failure."""


class _Silence:
    """Warns, at growing intervals, while attempts fail."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: float | None = None
        self._next = FIRST_WARNING_SECONDS

    def failed(self, log: structlog.typing.FilteringBoundLogger, error: Exception, started: float) -> None:
        """Note the failure of an attempt that ``started`` at this time of the clock."""
        self._since = started if self._since is None else self._since
        lasted = self._clock() - self._since
        if lasted >= self._next:
            log.warning("the Lease cannot be read or written", seconds=round(lasted), error=str(error))
            self._next = lasted + min(max(lasted, FIRST_WARNING_SECONDS), LONGEST_SILENCE_SECONDS)

    def ended(self, log: structlog.typing.FilteringBoundLogger) -> None:
        """Note an answer."""
        if self._since is not None and self._next > FIRST_WARNING_SECONDS:
            log.info("the Lease can be read and written again", seconds=round(self._clock() - self._since))
        self._since, self._next = None, FIRST_WARNING_SECONDS


class Elector:
    """One candidate for a Lease. ``identity``: its unique name. ``wait``: sleeps, and returns True to stop."""

    def __init__(
        self,
        kube: Kube,
        lease: tuple[str, str],
        identity: str,
        *,
        timing: LeaseTiming,
        wait: Callable[[float], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kube = kube
        self._namespace, self._name = lease
        self._collection = f"/apis/coordination.k8s.io/v1/namespaces/{segment(self._namespace)}/leases"
        self._path = f"{self._collection}/{segment(self._name)}"
        self._identity = identity
        self._timing = timing
        self._wait = wait
        self._clock = clock
        self._log = structlog.get_logger().bind(lease=f"{self._namespace}/{self._name}", identity=identity)
        self._observed: Lease | None = None
        self._observed_at = 0.0
        self._renewed_at = -math.inf
        self._silence = _Silence(clock)
        self._leading = False

    @property
    def is_leading(self) -> bool:
        """Whether this candidate has the lease, as far as it knows."""
        return self._leading

    @property
    def holder(self) -> str:
        """The holder of the lease when it was last read; empty if there was none, or if it was not read yet."""
        return (self._observed and self._observed.spec.holder_identity) or ""

    def acquire(self) -> bool:
        """Block until this candidate has the lease. False if it must stop before that."""
        while not self._attempt():
            if self._wait(self._timing.retry_period):
                return False
        self._leading = True
        self._log.info("leading")
        return True

    def hold(self) -> bool:
        """Renew the lease. Return True when this candidate must stop, and False when the lease is lost."""
        while not self._wait(self._timing.retry_period):
            # The deadline is checked before each attempt, because a late attempt could succeed on a lease taken since.
            if self._in_time() and self._attempt():
                continue
            if not self._in_time() or self.holder not in ("", self._identity):
                self._leading = False
                self._log.error("lease lost")
                return False
        return True

    def release(self) -> None:
        """Release the lease, so that another candidate need not wait until it expires."""
        self._leading = False
        try:
            lease = self._read()  # read again, because the last renewal may have landed although its answer was lost
            if lease is None or lease.spec.holder_identity != self._identity:
                return
            transitions = lease.spec.lease_transitions
            self._write(LeaseSpec(holder_identity="", lease_duration_seconds=1, lease_transitions=transitions), lease)
        except CALL_FAILURES as error:
            self._log.warning("lease not released; another replica can take it when it expires", error=str(error))
        else:
            self._log.info("lease released")

    def _attempt(self) -> bool:
        """Take or renew the lease once. A failure counts as an unsuccessful attempt."""
        started = self._clock()
        try:
            lease = self._read()
            free = lease is None or not self._is_held_by_other(lease)
            if free:
                # This is a compare-and-swap: if another candidate was first, the API server answers 409 and the attempt
                # fails.
                self._remember(self._write(self._next_spec(lease), lease))
        except CALL_FAILURES as error:
            self._silence.failed(self._log, error, started)
            return False
        self._silence.ended(self._log)
        if free:
            self._renewed_at = started
        return free

    def _read(self) -> Lease | None:
        try:
            lease = _LEASE.decode(self._kube.get(self._path, timeout=self._call_timeout))
        except errors.NotFound:
            return None
        if self._observed is None or self._observed.metadata.resource_version != lease.metadata.resource_version:
            self._remember(lease)
        return lease

    def _remember(self, lease: Lease) -> None:
        # Measured by this process' own clock, because the clock of the holder, which the Lease has, may be wrong.
        self._observed, self._observed_at = lease, self._clock()

    def _is_held_by_other(self, lease: Lease) -> bool:
        holder = lease.spec.holder_identity
        if not holder or holder == self._identity:
            return False
        lasts = lease.spec.lease_duration_seconds or self._timing.lease_duration
        return self._clock() < self._observed_at + lasts

    def _in_time(self) -> bool:
        # Counted from before the request, while other candidates count from after they have seen the renewal.
        return self._clock() - self._renewed_at <= self._timing.renew_deadline

    def _next_spec(self, lease: Lease | None) -> LeaseSpec:
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = LeaseSpec(self._identity, self._timing.lease_duration, now, now, 0)
        if lease is None:
            return spec
        transitions = lease.spec.lease_transitions or 0
        if lease.spec.holder_identity == self._identity:
            return msgspec.structs.replace(spec, acquire_time=lease.spec.acquire_time, lease_transitions=transitions)
        return msgspec.structs.replace(spec, lease_transitions=transitions + 1)

    def _write(self, spec: LeaseSpec, lease: Lease | None) -> Lease:
        """Replace the lease that was read, or create it if there was none."""
        metadata = {"name": self._name, "namespace": self._namespace}
        if lease:
            metadata["resourceVersion"] = lease.metadata.resource_version
        manifest = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
        write, path = (self._kube.put, self._path) if lease else (self._kube.post, self._collection)
        return _LEASE.decode(write(path, msgspec.json.encode(manifest), timeout=self._call_timeout))

    @property
    def _call_timeout(self) -> float:
        # An attempt has two calls. One that begins within the renew deadline ends well before the lease expires.
        return self._timing.renew_deadline / 8
