"""A cluster of values in which rotations run: two Secrets, caBundles, pods that follow the Secret late, and a clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from cryptography import x509

from certs.plan import plan
from certs.state import Authorities, Certificates, Configuration, DialledEndpoint, Hook, Serving, State, trusts
from certs.steps import (
    Decision,
    Forget,
    IssueLeaf,
    MakeAuthority,
    NoteServed,
    NoteTrusted,
    Promote,
    RotationPolicy,
    SeenFor,
    SetBundles,
    Wait,
    Write,
    WriteAuthorities,
    WriteBundles,
    WriteServing,
    after,
    write_of,
)
from vcuda.errors import Conflict, Forbidden
from vcuda.x509 import Signed, make_authority, make_leaf, service_names

START = datetime(2026, 11, 21, 8, tzinfo=UTC)
NAMES = service_names("vcuda-webhook", "vcuda-quota")
POLICY = RotationPolicy(NAMES)
API_SERVER_LAG = timedelta(seconds=5)
"""How long an API server may go by the caBundles of before; about one second in truth."""


class Killed(BaseException):
    """The run ends here, as by SIGKILL: nothing of it may catch this."""


@dataclass
class Pod:
    """An endpoint. What the Secret holds is served ``lag`` later; not ready, it becomes so at ``ready_from``."""

    address: str
    lag: timedelta
    leaf: x509.Certificate | None = None
    ready: bool = True
    coming: list[tuple[datetime, x509.Certificate]] = field(default_factory=list)
    ready_from: datetime | None = None

    def changes(self) -> list[datetime]:
        """When it will be another than it is."""
        return [*(due for due, _ in self.coming), *([self.ready_from] if self.ready_from else [])]

    def live(self, now: datetime) -> None:
        """Serve what has come by now."""
        if self.ready_from and self.ready_from <= now:
            self.ready, self.ready_from = True, None
        for due, leaf in self.coming:
            if due <= now:
                self.leaf = leaf
        self.coming = [(due, leaf) for due, leaf in self.coming if due > now]


@dataclass
class World:
    """Store and clock in one. ``lives_after``: writes that may be made before the run is killed; None: any number.

    ``lost`` collects each time that a leaf, trusted before, was served while a caBundle that is still gone by did not
    trust it any more, or after its end. ``forbidden``: the configurations that may not be written.
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
        """Let time pass, from one change of a pod to the next."""
        end = self.time + timedelta(seconds=seconds)
        while (now := min([end, *(due for pod in self.pods for due in pod.changes())])) < end:
            self.pass_to(now)
        self.pass_to(end)

    def pass_to(self, moment: datetime) -> None:
        """Let it be ``moment``."""
        self.elapsed += max(0.0, (moment - self.time).total_seconds())
        self.time = max(moment, self.time)
        self.look()

    def read(self, now: Callable[[], datetime]) -> State:
        del now
        endpoints = tuple(DialledEndpoint(pod.address, pod.ready, pod.leaf) for pod in self.pods)
        return replace(self.state, endpoints=endpoints)

    def write(self, write: Write) -> None:
        """Make one write under its guard, and die before or after it where that is due."""
        if self.lives_after is not None:
            self.lives_after -= 1
            if self.lives_after == -1:
                raise Killed
        if isinstance(write, WriteBundles) and str(configuration_of(self.state, write)) in self.forbidden:
            raise Forbidden(403, "forbidden by RBAC")
        if version_of(self.state, write) != guard_of(write):
            raise Conflict(409, "written by another")
        self.writes += 1
        self.state = versioned(after(self.state, write), write, str(self.writes))
        if isinstance(write, WriteServing):
            self.roll_out(write.leaf.certificate)
        self.look()
        if self.lives_after == 0:
            raise Killed

    def roll_out(self, leaf: x509.Certificate) -> None:
        """Let every pod serve ``leaf`` when it gets to it."""
        for pod in self.pods:
            pod.coming.append((self.time + pod.lag, leaf))

    def look(self) -> None:
        """Note which caBundles there are, and whether trust was lost."""
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
        """Every view of the caBundle that an API server may still have is to trust what was once trusted.

        Where a webhook works it is to trust every other leaf too, but not one that no caBundle trusted after damage.
        """
        seen = {old[name] for old in recent if name in old}
        trust = [trusts(bundle, leaf, self.time) for bundle in seen]
        worked = any(key[0] == name for key in self.trusted)
        if all(trust):
            self.trusted.add((name, leaf))
        elif (name, leaf) in self.trusted or (worked and leaf not in self.hopeless):
            self.lost.append(f"{self.time}: {name} does not trust what {pod.address} serves")

    def forget_what_worked(self) -> None:
        """After damage done by hand nothing is owed that did not work any more."""
        served = {pod.leaf for pod in self.pods} | {leaf for pod in self.pods for _, leaf in pod.coming}
        self.hopeless = frozenset(leaf for leaf in served if leaf)
        self.trusted.clear()
        self.past.clear()
        self.lost.clear()

    def works(self) -> bool:
        """Whether every webhook trusts every ready pod."""
        return all(
            trusts(hook.bundle, pod.leaf, self.time) for hook in self.state.hooks() for pod in self.pods if pod.ready
        )


def healthy(
    lags: Sequence[timedelta] = (timedelta(0), timedelta(seconds=90)),
    extra: Certificates = (),
    policy: RotationPolicy = POLICY,
) -> World:
    """A world where a rotation has nothing to do; ``extra`` certificates are in its caBundles too."""
    authority = make_authority(START, policy.authority_life)
    leaf = make_leaf(authority, NAMES, START, policy.leaf_life)
    bundle = (*extra, authority.certificate)
    configurations = (
        Configuration("MutatingWebhookConfiguration", "vcuda-quota", "m", (Hook(0, "mutate", bundle),)),
        Configuration(
            "ValidatingWebhookConfiguration",
            "vcuda-quota",
            "v",
            (Hook(0, "validate", bundle), Hook(2, "config", bundle)),
        ),
    )
    state = State(
        Authorities("a", authority),
        Serving("s", leaf, (authority.certificate,), ""),
        configurations,
    )
    pods = [Pod(f"10.0.0.{number}:8443", lag, leaf.certificate) for number, lag in enumerate(lags)]
    world = World(state, pods)
    world.look()
    return world


def with_stragglers(world: World, pods: Sequence[tuple[timedelta, timedelta]]) -> World:
    """The world with pods more, each (so late, not ready before so long), that show the first leaf until then."""
    leaf = world.state.serving.leaf
    for number, (lag, unready) in enumerate(pods):
        address, certificate = f"10.0.1.{number}:8443", leaf.certificate if leaf else None
        world.pods.append(Pod(address, lag, certificate, ready=False, ready_from=START + unready))
    return world


def current_of(world: World) -> Signed:
    """The authority that signs."""
    current = world.state.authorities.current
    assert current is not None
    return current


def guard_of(write: Write) -> str:
    """The version that a write was made for."""
    return write.after.version if isinstance(write, WriteAuthorities) else write.version


def version_of(state: State, write: Write) -> str:
    """The version that there is of what it writes."""
    if isinstance(write, WriteAuthorities):
        return state.authorities.version
    if isinstance(write, WriteServing):
        return state.serving.version
    return configuration_of(state, write).version


def configuration_of(state: State, write: WriteBundles) -> Configuration:
    """The configuration that it writes."""
    [found] = [one for one in state.configurations if (one.kind, one.name) == (write.kind, write.name)]
    return found


def versioned(state: State, write: Write, version: str) -> State:
    """The state with a new version of what was written."""
    if isinstance(write, WriteAuthorities):
        return replace(state, authorities=replace(state.authorities, version=version))
    if isinstance(write, WriteServing):
        return replace(state, serving=replace(state.serving, version=version))
    written = configuration_of(state, write)
    every = tuple(replace(one, version=version) if one is written else one for one in state.configurations)
    return replace(state, configurations=every)


LONG = timedelta(days=1000)
SEEN_LONG = SeenFor(LONG, LONG, LONG)
NEW = replace(POLICY, issued_before=START + timedelta(seconds=30))
"""Every certificate of a healthy world is to be replaced."""


def at(world: World, policy: RotationPolicy = NEW, seen: SeenFor = SEEN_LONG) -> Decision:
    """What is decided as the world is now."""
    return plan(world.read(world.now), world.now(), policy, seen)


def take(world: World, decision: Decision, policy: RotationPolicy = NEW) -> None:
    """Do what was decided; endpoints follow at once."""
    assert isinstance(decision, MakeAuthority | SetBundles | NoteTrusted | Promote | IssueLeaf | NoteServed | Forget)
    world.write(write_of(decision, world.read(world.now), world.now(), policy))


def go_on(world: World, until: type[Decision], policy: RotationPolicy = NEW) -> tuple[list[type[Decision]], Decision]:
    """Take every step and sit every wait out until a decision is one of ``until``; return those taken, and it."""
    taken: list[type[Decision]] = []
    while not isinstance(decision := at(world, policy), until):
        taken.append(type(decision))
        if isinstance(decision, Wait):
            assert decision.until
            world.sleep((decision.until - world.now()).total_seconds())
        else:
            take(world, decision, policy)
    return taken, decision


def rotated(until: type[Decision], policy: RotationPolicy = NEW) -> World:
    """A world in the middle of a rotation: the next step, or wait, is one of ``until``."""
    world = healthy([timedelta(0)] * 2)
    world.sleep(60)
    go_on(world, until, policy)
    return world
