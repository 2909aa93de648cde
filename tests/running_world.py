"""Simulates pods and claims on nodes, a ledger that counts them, and leaders whose watches are late.

A pod that is deleted by force vanishes from the API at once, and its claim soon after. Its containers run on for the
grace period, so the ledger must still charge them. The two watches of a leader deliver their events independently.
"""

import bisect
import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from controller.recount.charge_ages import RecountTiming
from tests import builders
from tests.api_double import ApiDouble
from tests.builders import Manifest
from tests.quota_map import store_quota
from tests.watching import unwatched_recounter
from vcuda.allocations.stored_claims import ClaimCharge
from vcuda.errors import VcudaError
from vcuda.kube import LedgerStore, Reflector
from vcuda.kube.reflector import SILENCE
from vcuda.kube.watch import read_event
from vcuda.ledger.ledger import Admitted, Ledger
from vcuda.ledger.recount import recount
from vcuda.placement.nodes import Nodes
from vcuda.quota.model import Charge, Limit, NamespaceQuota
from vcuda.quota.well_known import STORABLE_SECONDS
from webhook.ledger.batches import decide
from webhook.ledger.charging import ChargeRequest

TEAM, MODEL = "team-a", "A100"
ONE = Charge(100, 0, 100)
QUOTA = NamespaceQuota({MODEL: Limit(1000)})
PODS, CLAIMS = f"/api/v1/namespaces/{TEAM}/pods", f"/apis/resource.k8s.io/v1/namespaces/{TEAM}/resourceclaims"
MIN_SECONDS = 2
"""Minimum time that containers run after a forced deletion: kubelet gives each container a second to end."""

MAX_TERMINATING = 600

MAX_LAG = SILENCE
"""Seconds within which a watch delivers an event or is replaced."""


@dataclass
class TruePod:
    """The true state of a pod.

    ``grace``: the grace period in seconds. ``claim``: the uid of the claim that is created for the pod, if it requests
    its GPU by a claim. ``runs_until``: the time when its containers end. It is infinite after the pod is bound, and
    -infinite before.
    """

    uid: str
    grace: int
    claim: str = ""
    admitted_at: float = -math.inf
    stored: bool = False
    runs_until: float = -math.inf

    @property
    def path(self) -> str:
        return f"{PODS}/{self.uid}"


@dataclass
class TrueClaim:
    """The true state of a claim.

    ``users``: the pods that have used its present devices.
    ``reserved``: the pods that the claim's status.reservedFor names now.
    ``former``: for each earlier allocation, the pods that used it.
    ``grouped``: True if the claim is reserved for a PodGroup instead of its pods.
    """

    uid: str
    admitted_at: float = -math.inf
    stored: bool = False
    users: list[TruePod] = field(default_factory=list)
    reserved: list[TruePod] = field(default_factory=list)
    former: list[list[TruePod]] = field(default_factory=list)
    grouped: bool = False

    @property
    def path(self) -> str:
        return f"{CLAIMS}/{self.uid}"


class WatchingLeader:
    """A controller that is the leader or the standby. It knows only the events that its watches have delivered."""

    def __init__(self, world: "RunningWorld") -> None:
        self._world = world
        kube = world.api.kube
        timing = RecountTiming(max_terminating_seconds=MAX_TERMINATING)
        self.recounter, quota, nodes = unwatched_recounter(kube, world.new_store(), timing=timing, clock=world.clock)
        self._reflectors: Mapping[str, Reflector[Any]] = {
            PODS: self.recounter.pods.reflector,
            CLAIMS: self.recounter.claims.reflector,
        }
        self._delivered: dict[str, int] = {}
        for reflector in (quota.reflector, nodes.reflector, self.recounter.ledgers):
            reflector.relist()
        self.miss(PODS)
        self.miss(CLAIMS)

    def miss(self, collection: str) -> None:
        """Restart a watch with a LIST, as after a long interruption, whose events the watch misses."""
        self._reflectors[collection].relist()
        self._reflectors[collection].synced.set()
        self._delivered[collection] = len(self._world.events[collection])

    def hear(self, collection: str, number: int) -> None:
        begin = self._delivered[collection]
        lines = self._world.events[collection][begin : begin + max(number, 0)]
        self._reflectors[collection].follow(read_event(line, "WATCH") for line in lines)
        self._delivered[collection] = begin + len(lines)

    def hear_until(self, moment: float) -> None:
        for collection in (PODS, CLAIMS):
            times = self._world.times[collection]
            self.hear(collection, bisect.bisect_right(times, moment) - self._delivered[collection])

    def hear_all(self) -> None:
        for collection in (PODS, CLAIMS):
            self.hear(collection, len(self._world.events[collection]))

    def recount(self, *, looks: bool) -> None:
        """Recount the ledger. If ``looks`` is true, deliver the newest ledger to the leader before."""
        if looks:
            self.recounter.ledgers.relist()
        with contextlib.suppress(VcudaError):
            self.recounter.recount(TEAM)

    def note(self) -> None:
        """Note the ages of the charges in the newest ledger, as a standby does."""
        self.recounter.ledgers.relist()
        self.recounter.record_ages()


class RunningWorld:
    """The API server, the kubelets, one webhook, the leader, and a standby whose watches run too."""

    def __init__(self) -> None:
        self.now = 10_000.0
        self.api = ApiDouble()
        self.events: dict[str, list[bytes]] = {PODS: [], CLAIMS: []}
        self.times: dict[str, list[float]] = {PODS: [], CLAIMS: []}
        self.pods: dict[str, TruePod] = {}
        self.claims: dict[str, TrueClaim] = {}
        store_quota(self.api, json.dumps({TEAM: {"quota": {MODEL: 10}}}))
        self._store = self.new_store()
        self.leader = WatchingLeader(self)
        self.standby = WatchingLeader(self)

    def clock(self) -> float:
        return self.now

    def new_store(self) -> LedgerStore:
        """Return a client that reads and writes ledgers, for pods or for claims of one card each."""
        return LedgerStore(
            self.api.kube,
            "vcuda-quota",
            lambda: Nodes(builders.LABELS),
            claim_price=lambda: lambda _: ClaimCharge({MODEL: ONE}, MODEL),
            clock=self.clock,
        )

    # Admission

    def admit(self, pod: TruePod) -> bool:
        """Send a pod through /validate. A pod with a claim is charged nothing, but a long grace period is recorded."""
        self.pods[pod.uid] = pod
        grace = pod.grace if pod.grace > STORABLE_SECONDS else 0
        if (pod.claim and not grace) or self._charge(pod.uid, "" if pod.claim else MODEL, grace):
            pod.admitted_at = self.now
        return pod.admitted_at == self.now

    def admit_claim(self, claim: TrueClaim) -> bool:
        self.claims[claim.uid] = claim
        if self._charge(claim.uid, MODEL, 0):
            claim.admitted_at = self.now
        return claim.admitted_at == self.now

    def _charge(self, uid: str, model: str, grace: int) -> bool:
        stored = self._store.open(TEAM)
        charge = ONE if model else Charge()
        request = ChargeRequest(TEAM, uid, model, charge, QUOTA, deadline=math.inf, grace=grace)
        decision = decide(stored.ledger, request)
        if isinstance(decision, Admitted):
            self._store.write(TEAM, decision.ledger, stored)
        return isinstance(decision, Admitted)

    # Actions of the API server, the scheduler, the claim controller and the kubelets

    def store(self, thing: TruePod | TrueClaim) -> None:
        thing.stored = True
        self._write(thing)

    def bind(self, pod: TruePod) -> None:
        """Allocate the pod's claim, if it has one, and bind the pod to a node. Its kubelet may then start it."""
        if pod.claim:
            self.allocate(pod)
        pod.runs_until = math.inf
        self._write(pod)

    def start(self, pod: TruePod) -> None:
        self.admit(pod)
        self.store(pod)
        self.bind(pod)

    def allocate(self, pod: TruePod) -> None:
        claim = self.claims[pod.claim]
        claim.users.append(pod)
        claim.reserved.append(pod)
        self._write(claim)

    def end(self, pod: TruePod) -> None:
        pod.runs_until = self.now
        self._write(pod, ended=True)

    def delete(self, pod: TruePod) -> None:
        """Delete a pod by force. If the pod is bound and has not ended, its containers run on for the grace period."""
        pod.stored = False
        if pod.runs_until == math.inf:
            pod.runs_until = self.now + min(max(pod.grace, MIN_SECONDS), MAX_TERMINATING)
        self._remove(pod)

    def leave(self, claim: TrueClaim, pod: TruePod) -> None:
        """Remove a pod from the claim's status.reservedFor. If no pod is left, the claim loses its devices."""
        claim.reserved.remove(pod)
        if not claim.reserved:
            claim.former.append(claim.users)
            claim.users = []
        self._write(claim)

    def delete_claim(self, claim: TrueClaim) -> None:
        claim.stored = False
        self._remove(claim)

    def _write(self, thing: TruePod | TrueClaim, *, ended: bool = False) -> None:
        collection = PODS if isinstance(thing, TruePod) else CLAIMS
        known = thing.path in self.api.objects
        manifest = _pod(thing, ended=ended) if isinstance(thing, TruePod) else _claim(thing)
        stored = self.api.store(thing.path, manifest)
        self._tell(collection, "MODIFIED" if known else "ADDED", json.loads(stored))

    def _remove(self, thing: TruePod | TrueClaim) -> None:
        last = self.api.objects[thing.path]
        self.api.remove(thing.path)
        metadata = {**last["metadata"], "resourceVersion": self.api.version}
        self._tell(PODS if isinstance(thing, TruePod) else CLAIMS, "DELETED", {**last, "metadata": metadata})

    def _tell(self, collection: str, kind: str, stored: Manifest) -> None:
        self.times[collection].append(self.now)
        self.events[collection].append(json.dumps({"type": kind, "object": stored}, separators=(",", ":")).encode())

    # Invariants

    @property
    def ledger(self) -> Ledger:
        return self._store.read(TEAM).ledger

    def used(self) -> int:
        return int(self.ledger.usage(MODEL).used.cores)

    def check(self) -> None:
        assert self.used() >= self.held(), f"{self.held()} cores may be in use, and {self.used()} are counted"

    def recount(self, *, looks: bool = True) -> None:
        """Let the leader recount by the delivered events, and recount again after it has seen its own write."""
        self.leader.recount(looks=looks)
        self.check()
        self.leader.recount(looks=True)
        self.check()

    def hear_and_recount(self) -> None:
        self.leader.hear_all()
        self.recount()

    def recount_after(self, seconds: float) -> None:
        self.pass_by(seconds)
        self.recount()

    def recount_by_a_new_leader(self) -> None:
        self.change_leader()
        self.recount()

    def change_leader(self) -> None:
        self.leader = WatchingLeader(self)

    def hand_over(self) -> None:
        """Make the standby the leader. The former leader does not know of the change yet, and may still write."""
        self.leader, self.standby = self.standby, self.leader

    def count_by_replica(self) -> None:
        """Let a webhook replica recount by a LIST and write the result, as after an edit of the quota."""
        stored = self._store.open(TEAM)
        observed = self._store.count_pods(TEAM)
        counted = recount(stored.ledger, observed, counted_since=observed.resource_version)
        self._store.write(TEAM, counted, stored)
        self.check()

    def pass_by(self, seconds: float) -> None:
        """Let time pass. Events arrive within `MAX_LAG`, because a watch that is silent for longer is replaced."""
        self.now += seconds
        for each in (self.leader, self.standby):
            each.hear_until(self.now - MAX_LAG)
        self.check()

    def held(self) -> int:
        """Return the cores of all pods and claims that are stored, may soon be stored, or are in use on a node."""
        own = (each for each in self.pods.values() if not each.claim)
        return 100 * (sum(map(self._is_held, own)) + sum(map(self._cards_of, self.claims.values())))

    def _is_held(self, pod: TruePod) -> bool:
        lives = pod.stored and pod.runs_until in (math.inf, -math.inf)
        return lives or self.may_be_stored(pod) or self._runs(pod)

    def _cards_of(self, claim: TrueClaim) -> int:
        """Return the cards of a claim: one for each allocation in use, but at least one until the claim is deleted."""
        former = sum(any(map(self._runs, users)) for users in claim.former)
        if claim.stored or self.may_be_stored(claim):
            return max(1, bool(claim.users) + former)
        return former + any(map(self._runs, claim.users))

    def may_be_stored(self, thing: TruePod | TrueClaim) -> bool:
        began = thing.path in self.api.objects or thing.stored
        never = isinstance(thing, TruePod) and thing.runs_until != -math.inf
        return not began and not never and self.now <= thing.admitted_at + STORABLE_SECONDS and not self._gone(thing)

    def _gone(self, thing: TruePod | TrueClaim) -> bool:
        return any(thing.uid.encode() in line for line in self._deleted(thing))

    def _deleted(self, thing: TruePod | TrueClaim) -> Iterator[bytes]:
        lines = self.events[PODS if isinstance(thing, TruePod) else CLAIMS]
        return (line for line in lines if line.startswith(b'{"type":"DELETED"'))

    def _runs(self, pod: TruePod) -> bool:
        return self.now < pod.runs_until


def _pod(pod: TruePod, *, ended: bool) -> Manifest:
    bound = {"nodeName": "gpu-1"} if pod.runs_until != -math.inf else {}
    spec: Manifest = {"terminationGracePeriodSeconds": pod.grace, **bound}
    if pod.claim:
        manifest = builders.pod(
            {"name": "main"}, **spec, resourceClaims=[{"name": "gpu", "resourceClaimTemplateName": "one"}]
        )
    else:
        manifest = builders.stored_pod({"tencent.com/vcuda-core": 100}, affinity=builders.held_to(MODEL), **spec)
    metadata = {"name": pod.uid, "namespace": TEAM, "uid": pod.uid}
    return {**manifest, "metadata": metadata, "status": {"phase": "Succeeded" if ended else "Running"}}


def _claim(claim: TrueClaim) -> Manifest:
    device = {"request": "r0", "driver": "gpu.nvidia.com", "pool": "gpu-1", "device": "gpu-0"}
    users = [{"resource": "pods", "name": pod.uid, "uid": pod.uid} for pod in claim.reserved]
    if users and claim.grouped:
        users = [{"apiGroup": "scheduling.k8s.io", "resource": "podgroups", "name": "group", "uid": "group-uid"}]
    status = {"allocation": {"devices": {"results": [device]}}, "reservedFor": users} if users else {}
    return {"metadata": {"name": claim.uid, "namespace": TEAM, "uid": claim.uid}, "spec": {}, "status": status}
