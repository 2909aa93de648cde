"""Simulates a cluster for certificate rotations: Secrets, caBundles, a clock, and pods that follow a Secret late."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from cryptography import x509

from certs import steps
from certs.plan import plan
from certs.rotation import Clock
from certs.state import Authorities, Certificates, Configuration, DialledEndpoint, Hook, Problem, Serving, State, trusts
from vcuda.errors import Conflict, Forbidden
from vcuda.x509 import Signed, make_authority, make_leaf, service_names

START = datetime(2026, 11, 21, 8, tzinfo=UTC)
NAMES = service_names("vcuda-webhook", "vcuda-quota")
POLICY = steps.RotationPolicy(NAMES)
NEW = replace(POLICY, issued_before=START + timedelta(seconds=30))
"""A policy by which every certificate that `healthy` made is replaced."""
LONG = timedelta(days=1000)
SEEN_LONG = steps.SeenFor(LONG, LONG, LONG)
LOCK = Problem("validatingwebhookconfiguration/vcuda-quota may not be written", "kubectl edit")
API_SERVER_LAG = timedelta(seconds=5)
"""The time for which an API server may still use an old caBundle. In practice it is about one second."""


class Killed(BaseException):
    """Ends a run like SIGKILL. It is a BaseException, so that the code under test does not catch it."""


@dataclass
class Pod:
    """A webhook pod. It serves a new certificate ``lag`` seconds after the Secret has it.

    ``ready_from``: the time from which the pod is ready; None if it is ready.
    """

    address: str
    lag: timedelta
    leaf: x509.Certificate | None = None
    ready: bool = True
    coming: list[tuple[datetime, x509.Certificate]] = field(default_factory=list)
    ready_from: datetime | None = None

    def changes(self) -> list[datetime]:
        return [*(due for due, _ in self.coming), *([self.ready_from] if self.ready_from else [])]

    def live(self, now: datetime) -> None:
        if self.ready_from and self.ready_from <= now:
            self.ready, self.ready_from = True, None
        for due, leaf in self.coming:
            if due <= now:
                self.leaf = leaf
        self.coming = [(due, leaf) for due, leaf in self.coming if due > now]


@dataclass
class World(Clock):
    """The stored objects, the pods, and the clock.

    ``lives_after``: the number of writes before the run is killed, or None for no limit. ``lost``: a text for each
    failure: a pod served a serving certificate that a caBundle in use did not trust, although it had to. ``hopeless``:
    the serving certificates that need not be trusted, because they were in use when somebody damaged objects by hand.
    ``forbidden``: the webhook configurations that the run has no right to write.
    """

    state: State = field(default_factory=State)
    pods: list[Pod] = field(default_factory=list)
    time: datetime = START
    elapsed: float = 0.0
    lives_after: int | None = None
    lost: list[str] = field(default_factory=list)
    past: list[tuple[datetime, dict[str, Certificates]]] = field(default_factory=list)
    trusted: set[tuple[str, x509.Certificate]] = field(default_factory=set)
    hopeless: frozenset[x509.Certificate] = frozenset()
    forbidden: frozenset[str] = frozenset()
    writes: int = 0

    def now(self) -> datetime:
        return self.time

    def monotonic(self) -> float:
        return self.elapsed

    def sleep(self, seconds: float) -> None:
        """Let time pass. At each change of a pod, check the trust."""
        end = self.time + timedelta(seconds=seconds)
        while (now := min([end, *(due for pod in self.pods for due in pod.changes())])) < end:
            self.pass_to(now)
        self.pass_to(end)

    def pass_to(self, moment: datetime) -> None:
        self.elapsed += max(0.0, (moment - self.time).total_seconds())
        self.time = max(moment, self.time)
        self.look()

    def read(self, now: Callable[[], datetime]) -> State:
        del now
        endpoints = tuple(DialledEndpoint(pod.address, pod.ready, pod.leaf) for pod in self.pods)
        return replace(self.state, endpoints=endpoints)

    def write(self, write: steps.Write) -> None:
        """Make one write if the object's version is current. ``lives_after`` may kill the run before or after it."""
        if self.lives_after is not None:
            self.lives_after -= 1
            if self.lives_after == -1:
                raise Killed
        target = target_of(self.state, write)
        if str(target) in self.forbidden:
            raise Forbidden(403, "forbidden by RBAC")
        if target.version != version_before(write):
            raise Conflict(409, "written by another")
        self.writes += 1
        self.state = versioned(steps.after(self.state, write), write, str(self.writes))
        if isinstance(write, steps.WriteServing):
            for pod in self.pods:
                pod.coming.append((self.time + pod.lag, write.leaf.certificate))
        self.look()
        if self.lives_after == 0:
            raise Killed

    def look(self) -> None:
        """Record the present caBundles, and any loss of trust."""
        for pod in self.pods:
            pod.live(self.time)
        bundles = {hook.name: hook.bundle for hook in self.state.hooks()}
        self.past.append((self.time, bundles))
        recent = [old for moment, old in self.past if self.time - moment <= API_SERVER_LAG]
        for pod in self.pods:
            for name in bundles:
                if pod.ready and pod.leaf is not None:
                    self._look_at(name, pod, pod.leaf, recent)

    def _look_at(self, name: str, pod: Pod, leaf: x509.Certificate, recent: Sequence[dict[str, Certificates]]) -> None:
        """Record a failure if a caBundle in use does not trust the certificate that this pod serves, although it must.

        It must trust it if this webhook trusted it before, or trusted another one and this certificate is not
        ``hopeless``.
        """
        seen = {old[name] for old in recent if name in old}
        trust = [trusts(bundle, leaf, self.time) for bundle in seen]
        worked = any(key[0] == name for key in self.trusted)
        if all(trust):
            self.trusted.add((name, leaf))
        elif (name, leaf) in self.trusted or (worked and leaf not in self.hopeless):
            self.lost.append(f"{self.time}: {name} does not trust what {pod.address} serves")

    def forget_what_worked(self) -> None:
        """Start the checks again after damage by hand. Certificates that pods serve now or soon need not be trusted."""
        served = {pod.leaf for pod in self.pods} | {leaf for pod in self.pods for _, leaf in pod.coming}
        self.hopeless = frozenset(leaf for leaf in served if leaf)
        self.trusted.clear()
        self.past.clear()
        self.lost.clear()

    def works(self) -> bool:
        return all(
            trusts(hook.bundle, pod.leaf, self.time) for hook in self.state.hooks() for pod in self.pods if pod.ready
        )

    @property
    def current(self) -> Signed:
        assert self.state.authorities.current
        return self.state.authorities.current

    @property
    def leaf(self) -> Signed:
        assert self.state.serving.leaf
        return self.state.serving.leaf

    def put(self, **parts: Any) -> None:
        self.state = replace(self.state, **parts)

    def put_hooks(self, *places: int, **fields: Any) -> None:
        """Replace these fields of every webhook, or only of the webhooks in the configurations at ``places``."""
        changed = [*self.state.configurations]
        for place in places or range(len(changed)):
            hooks = tuple(replace(hook, **fields) for hook in changed[place].hooks)
            changed[place] = replace(changed[place], hooks=hooks)
        self.put(configurations=tuple(changed))

    def serve(self, leaf: x509.Certificate | None) -> None:
        for pod in self.pods:
            pod.leaf = leaf

    def lock(self, problem: Problem = LOCK) -> None:
        *rest, last = self.state.configurations
        self.put(configurations=(*rest, replace(last, read_only=problem)))

    def decide(self, policy: steps.RotationPolicy = NEW, seen: steps.SeenFor = SEEN_LONG) -> steps.Decision:
        return plan(self.read(self.now), self.time, policy, seen)

    def take(self, policy: steps.RotationPolicy = NEW, seen: steps.SeenFor = SEEN_LONG) -> steps.Decision:
        """Make the write of the rotation's due step, and return the step. Pods get the new Secret later."""
        decision = self.decide(policy, seen)
        assert not isinstance(decision, steps.Wait | steps.StepRejected | steps.Done)
        self.write(steps.write_of(decision, self.read(self.now), self.time, policy))
        return decision

    def go_on(
        self, until: type[steps.Decision], policy: steps.RotationPolicy = NEW, seen: steps.SeenFor = SEEN_LONG
    ) -> tuple[list[type[steps.Decision]], steps.Decision]:
        """Take due steps until the decision has the type ``until``. Return the types of the steps, and the decision."""
        taken: list[type[steps.Decision]] = []
        while not isinstance(decision := self.decide(policy, seen), until):
            taken.append(type(decision))
            if isinstance(decision, steps.Wait):
                assert decision.until
                self.sleep((decision.until - self.time).total_seconds())
            else:
                self.take(policy, seen)
        return taken, decision


def target_of(state: State, write: steps.Write) -> Authorities | Serving | Configuration:
    match write:
        case steps.WriteAuthorities():
            return state.authorities
        case steps.WriteServing():
            return state.serving
        case _:
            return next(one for one in state.configurations if str(one) == write.configuration)


def version_before(write: steps.Write) -> str:
    """Return the version that the written object must have."""
    match write:
        case steps.WriteAuthorities():
            return write.after.version
        case steps.WriteServing():
            return write.version
        case _:
            return write.target.version


def versioned(state: State, write: steps.Write, version: str) -> State:
    target = target_of(state, write)
    written: Any = replace(target, version=version)
    match target:
        case Authorities():
            return replace(state, authorities=written)
        case Serving():
            return replace(state, serving=written)
        case _:
            every = tuple(written if one is target else one for one in state.configurations)
            return replace(state, configurations=every)


def healthy(
    *lags: timedelta, extra: Certificates = (), policy: steps.RotationPolicy = POLICY, since: timedelta = timedelta()
) -> World:
    """Return a world ``since`` after its start, with no step due, and with a pod for each lag. ``extra``: more CAs."""
    authority = make_authority(START, policy.ca_life)
    leaf = make_leaf(authority, NAMES, START, policy.leaf_life)
    bundle = (*extra, authority.certificate)
    mutating = Configuration("MutatingWebhookConfiguration", "vcuda-quota", "m", (Hook(0, "mutate", bundle),))
    hooks = (Hook(0, "validate", bundle), Hook(2, "config", bundle))
    validating = Configuration("ValidatingWebhookConfiguration", "vcuda-quota", "v", hooks)
    serving = Serving("s", leaf, (authority.certificate,), "")
    pods = [
        Pod(f"10.0.0.{number}:8443", lag, leaf.certificate)
        for number, lag in enumerate(lags or (timedelta(), timedelta(seconds=90)))
    ]
    world = World(State(Authorities("a", authority), serving, (mutating, validating)), pods)
    world.look()
    world.sleep(since.total_seconds())
    return world


def with_stragglers(world: World, pods: Sequence[tuple[timedelta, timedelta]]) -> World:
    """Add unready pods, each with a lag and the time until it is ready. They serve the present certificate at first."""
    for number, (lag, unready) in enumerate(pods):
        address, leaf = f"10.0.1.{number}:8443", world.leaf.certificate
        world.pods.append(Pod(address, lag, leaf, ready=False, ready_from=START + unready))
    return world


def rotated(until: type[steps.Decision], policy: steps.RotationPolicy = NEW) -> World:
    """Return a world in the middle of a rotation, whose next decision has the type ``until``."""
    world = healthy(*[timedelta()] * 2, since=timedelta(minutes=1))
    world.go_on(until, policy)
    return world
