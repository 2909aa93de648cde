"""Leader election on a Lease: one controller leads, and the others are standbys.

The rules are client-go's (``tools/leaderelection``). A candidate takes the Lease by compare-and-swap and renews it well
before it expires. A candidate takes the Lease of another holder only if the holder has not renewed for the whole lease
duration, by the candidate's clock. The elector of the official Python client is not used: a refused connection would
end that elector but not the leader's work, and two replicas could work as leaders. With this elector, the caller must
stop its work when the Lease is lost, and must write only by compare-and-swap.
"""

import math
import time
from collections.abc import Callable

import msgspec
import structlog

from vcuda import errors, k8s_types
from vcuda.k8s_types import Decoder
from vcuda.kube import Kube, segment


class LeaseTiming(msgspec.Struct, frozen=True):
    """The times of the leader election in seconds, with client-go's names.

    A leader that could not renew the Lease for ``renew_deadline`` stops. After ``lease_duration``, others may take it.
    """

    lease_duration: int = 15
    renew_deadline: float = 10.0
    retry_period: float = 1.0

    @classmethod
    def of(cls, lease_seconds: int) -> "LeaseTiming":
        return cls(lease_seconds, lease_seconds * 2 / 3, min(1.0, lease_seconds / 5))


class LeaseSpec(k8s_types.K8sStruct, frozen=True, gc=False):
    """The spec of a Lease: the holder, and when the holder renewed it. Times are RFC 3339 with microseconds."""

    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class Lease(k8s_types.K8sObject, frozen=True, gc=False):
    """A coordination.k8s.io/v1 Lease."""

    spec: LeaseSpec = LeaseSpec()


_LEASE = Decoder(Lease)

FIRST_WARNING_SECONDS, MAX_SILENCE_SECONDS = 5.0, 300.0
"""Seconds from the first failed request for the Lease to the first warning, and most seconds between two warnings."""

CALL_FAILURES = (errors.VcudaError, *k8s_types.UNDECODABLE)
"""The errors of a failed attempt to take or renew the Lease, also of an attempt whose answer cannot be decoded."""


class _Silence:
    """Logs a warning, at growing intervals, while the attempts to take or renew the Lease fail."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: float | None = None
        self._next = FIRST_WARNING_SECONDS

    def failed(self, log: structlog.typing.FilteringBoundLogger, error: Exception, started: float) -> None:
        """Record a failed attempt to get the Lease. Log a warning if it is due. ``started``: when the attempt began."""
        self._since = started if self._since is None else self._since
        lasted = self._clock() - self._since
        if lasted >= self._next:
            log.warning("the Lease cannot be read or written", seconds=round(lasted), error=str(error))
            self._next = lasted + min(max(lasted, FIRST_WARNING_SECONDS), MAX_SILENCE_SECONDS)

    def ended(self, log: structlog.typing.FilteringBoundLogger) -> None:
        if self._since is not None and self._next > FIRST_WARNING_SECONDS:
            log.info("the Lease can be read and written again", seconds=round(self._clock() - self._since))
        self._since, self._next = None, FIRST_WARNING_SECONDS


class Elector:
    """A candidate for a Lease.

    ``lease``: the namespace and the name of the Lease.
    ``identity``: the unique name of this candidate.
    ``wait``: sleeps for a number of seconds. It returns True if the candidate must stop.
    """

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
        """True if this candidate has taken the Lease, and has not released it or noticed its loss."""
        return self._leading

    @property
    def holder(self) -> str:
        """The holder when the Lease was last read. It is empty if the Lease had no holder, or has not been read yet."""
        return (self._observed and self._observed.spec.holder_identity) or ""

    @property
    def silence(self) -> float:
        """The seconds since this candidate last saw another leader renew the Lease; 0.0 if no other leader holds it."""
        if self._leading or self.holder in ("", self._identity):
            return 0.0
        return self._clock() - self._observed_at

    def acquire(self) -> bool:
        """Block until this candidate holds the Lease, then return True. Return False if the candidate must stop."""
        while not self._attempt():
            if self._wait(self._timing.retry_period):
                return False
        self._leading = True
        self._log.info("this replica leads now")
        return True

    def hold(self) -> bool:
        """Renew the Lease until this candidate must stop (return True) or has lost the Lease (return False)."""
        while not self._wait(self._timing.retry_period):
            # Make no attempt after the renew deadline, because another candidate may have led in the meantime.
            if self._in_time() and self._attempt():
                continue
            if not self._in_time() or self.holder not in ("", self._identity):
                self._leading = False
                self._log.error("the Lease was lost")
                return False
        return True

    def release(self) -> None:
        """Release the Lease, so that another candidate need not wait until the Lease expires."""
        self._leading = False
        try:
            # Read the Lease first. The last renewal may have changed the Lease's version, even if no answer arrived.
            lease = self._read()
            if lease is None or lease.spec.holder_identity != self._identity:
                return
            transitions = lease.spec.lease_transitions
            self._write(LeaseSpec(holder_identity="", lease_duration_seconds=1, lease_transitions=transitions), lease)
        except CALL_FAILURES as error:
            self._log.warning(
                "the Lease was not released. Another replica must wait until it expires", error=str(error)
            )
        else:
            self._log.info("the Lease was released")

    def _attempt(self) -> bool:
        """Try once to take or renew the Lease. Return True if this candidate now holds the Lease."""
        started = self._clock()
        try:
            lease = self._read()
            free = lease is None or not self._is_held_by_other(lease)
            if free:
                # The write contains the resourceVersion of the Lease. If another candidate has written the Lease in the
                # meantime, the API server answers 409.
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
        # The expiry is computed by this candidate's clock. The times in the Lease come from the clock of its holder,
        # which may be wrong.
        self._observed, self._observed_at = lease, self._clock()

    def _is_held_by_other(self, lease: Lease) -> bool:
        holder = lease.spec.holder_identity
        if not holder or holder == self._identity:
            return False
        lasts = lease.spec.lease_duration_seconds or self._timing.lease_duration
        return self._clock() < self._observed_at + lasts

    def _in_time(self) -> bool:
        # The leader counts the seconds from the start of its last renewal. The other candidates count from the moment
        # when they see this renewal. So the leader stops before another candidate can take the Lease.
        return self._clock() - self._renewed_at <= self._timing.renew_deadline

    def _next_spec(self, lease: Lease | None) -> LeaseSpec:
        now = k8s_types.micro_time_now()
        spec = LeaseSpec(self._identity, self._timing.lease_duration, now, now, 0)
        if lease is None:
            return spec
        transitions = lease.spec.lease_transitions or 0
        if lease.spec.holder_identity == self._identity:
            return msgspec.structs.replace(spec, acquire_time=lease.spec.acquire_time, lease_transitions=transitions)
        return msgspec.structs.replace(spec, lease_transitions=transitions + 1)

    def _write(self, spec: LeaseSpec, lease: Lease | None) -> Lease:
        """Write ``spec``: replace ``lease``, or create the Lease if ``lease`` is None. Raises Conflict."""
        metadata = {"name": self._name, "namespace": self._namespace}
        if lease:
            metadata["resourceVersion"] = lease.metadata.resource_version
        manifest = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
        write, path = (self._kube.put, self._path) if lease else (self._kube.post, self._collection)
        return _LEASE.decode(write(path, msgspec.json.encode(manifest), timeout=self._call_timeout))

    @property
    def _call_timeout(self) -> float:
        # An attempt to renew the Lease makes two calls. With this timeout of a call, an attempt that begins before the
        # renew deadline ends before the Lease expires.
        return self._timing.renew_deadline / 5
