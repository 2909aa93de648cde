"""Tests that pods of other tenants are admitted while some tenants attack with large objects and many requests.

None of our programs exceeds its memory limit.
"""

import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from tests.e2e import attackers, large_attackers
from tests.e2e.attackers import ALLOWED, Siege, prepare
from tests.e2e.chaos import OVER_QUOTA, STORED, Callers, counted, reason
from tests.e2e.cluster import Cluster, administering
from tests.e2e.confined import MemoryGroup, memory_group, memory_limit
from tests.e2e.dra import claims_path, published, served
from tests.e2e.installation import SERVED_BY, Installation, await_ready, flags_of, policies, registered, running
from tests.e2e.large_attackers import LargeSiege
from tests.e2e.observer import Ghosts, Observer
from tests.e2e.rest import Rest
from tests.e2e.steady import in_threads
from tests.e2e.test_chaos import HALF, MAX_TERMINATING, SECONDS, SLICES, STORABLE, in_cores
from tests.integration.reviews import gpu_pod
from tests.processes import SCRIPTS, ControllerProcess, OwnProcess, WebhookProcess, memory
from tools.control_plane import Settings, running_control_plane

Attack = Callable[[threading.Event], None]

REPLICAS = 2
BESIEGED: Mapping[str, float] = {"M40": 8}
LIMITED: Mapping[str, float] = {"M40": 30, "P100": 30, "V100": 30}
"""The quota of the namespace with the large objects. It admits some of the large claims."""

OTHERS: Sequence[Mapping[str, float]] = ({"M40": 40}, {"P100": 40}, {"M40": 1})
"""The quotas of the other tenants. The last quota is small, so it is used up repeatedly."""

CALM_SECONDS = 8.0
"""Seconds for which the other tenants create pods before the attacks begin."""

CREATE_PAUSE = 0.15


@pytest.fixture(scope="module")
def own_cluster(assets: Path | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A control plane for this test only, which fills it with objects. etcd compacts its history every minute."""
    settings = Settings(apiserver_flags=("--etcd-compaction-interval=1m",))
    with (
        running_control_plane(assets, tmp_path_factory.mktemp("siege") / "control-plane", settings) as plane,
        administering(plane) as admin,
        ExitStack() as stack,
    ):
        if served(admin):
            stack.enter_context(published(admin, *SLICES))
        yield admin


@dataclass
class Creates:
    """The creates of one of the tenants that do not attack."""

    named: str
    counts: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)

    def create(self, rest: Rest, namespace: str, stop: threading.Event) -> None:
        pods = f"/api/v1/namespaces/{namespace}/pods"
        for number in count():
            if stop.wait(CREATE_PAUSE):
                return
            started = time.monotonic()
            answer = rest.send("POST", pods, gpu_pod(f"{self.named}-{number}", namespace, HALF))
            self.seconds.append(time.monotonic() - started)
            self.counts[reason(answer)] += 1
            for done in (number, number - 1) if number % 2 else ():
                rest.send("DELETE", f"{pods}/{self.named}-{done}", {"gracePeriodSeconds": 0})

    def told(self) -> str:
        centiles = statistics.quantiles(self.seconds, n=100)
        return f"{counted(self.counts)}; p50 {centiles[49] * 1000:.0f} ms, p99 {centiles[98] * 1000:.0f} ms"


@dataclass(frozen=True)
class Part:
    """One of our programs, with the cgroup that limits its memory."""

    name: str
    process: OwnProcess
    group: MemoryGroup
    pids: Sequence[int]

    def resident(self) -> int:
        return sum(memory(pid) for pid in self.pids)

    def told(self) -> str:
        peak = self.group.missing or f"{self.group.peak} MiB with page cache, {self.group.kills} killed for memory"
        return f"{self.name}: at most {self.resident()} MiB resident, limit {self.group.limit} MiB; {peak}"


@dataclass(frozen=True)
class Stage:
    """The namespaces of the test, and our programs.

    ``besieged``: the namespace that a `Siege` attacks.
    ``limited``, ``unlimited``: the namespaces that a `LargeSiege` fills with large objects, with and without a quota.
    ``teams``: for each limited namespace, its limits in cores by model.
    """

    own: Installation
    besieged: str
    limited: str
    unlimited: str
    others: Sequence[str]
    teams: Mapping[str, Mapping[str, int]]
    parts: Sequence[Part]


@contextmanager
def staged(cluster: Cluster, directory: Path) -> Iterator[Stage]:
    storable = ("--storable-seconds", str(STORABLE))
    with ExitStack() as stack:
        bare = stack.enter_context(running(cluster, directory / "certs", replicas=0, flags=storable))
        groups = [stack.enter_context(memory_group(memory_limit("webhook.yaml"))) for _ in range(REPLICAS)]
        serve = (SCRIPTS / "vcuda-webhook", "serve")
        replicas = [
            stack.enter_context(WebhookProcess(bare.flags, bare.ca, {}, group.command(*serve))) for group in groups
        ]
        own = replace(bare, replicas=replicas, quota=replace(bare.quota, readers=replicas))
        await_ready(own)
        quotas = (BESIEGED, LIMITED, *OTHERS)
        names = [stack.enter_context(own.team({"quota": quota})) for quota in quotas]
        besieged, limited, *others = names
        unlimited = stack.enter_context(cluster.fresh_namespace({SERVED_BY: own.label}))
        cluster.apply(*policies("allocations.quota.vcuda.io", "claims.quota.vcuda.io"))
        stack.enter_context(registered(own))
        group = stack.enter_context(memory_group(memory_limit("controller.yaml")))
        flags = flags_of(own, *storable, "--max-terminating-seconds", str(MAX_TERMINATING))
        controller = stack.enter_context(ControllerProcess(*flags, program=group.command(SCRIPTS / "vcuda-controller")))
        controller.await_synced()
        prepare(cluster, [besieged, limited, unlimited])
        parts = [
            *(
                Part(f"replica {number}", replica, groups[number], (replica.process.pid, replica.worker()))
                for number, replica in enumerate(replicas)
            ),
            Part("controller", controller, group, (controller.process.pid,)),
        ]
        teams = dict(zip(names, map(in_cores, quotas), strict=True))
        yield Stage(own, besieged, limited, unlimited, others, teams, parts)


@pytest.mark.chaos
@pytest.mark.timeout(SECONDS * 1.2 + 600)
def test_attacks_with_large_objects_affect_no_other_tenant_and_kill_no_program(
    own_cluster: Cluster, tmp_path: Path
) -> None:
    claiming = served(own_cluster)
    plane = own_cluster.control_plane
    with staged(own_cluster, tmp_path) as stage, closing(Cluster(plane, plane.tokens["tenant"])) as tenant:
        ghosts = Ghosts(MAX_TERMINATING)
        besieging = Callers([own_cluster.rest], [[stage.besieged]], REPLICAS, SECONDS, claiming)
        siege = Siege(besieging, own_cluster.rest, tenant.rest, stage.own.replicas, ghosts)
        large = LargeSiege(tenant.rest, stage.limited, stage.unlimited, claiming)
        paths = [path for team in stage.teams for path in paths_of(team, claiming=claiming)]
        observer = Observer({team: {} for team in stage.teams}, ghosts, paths)
        calm, during = [[Creates(named) for _ in stage.others] for named in ("calm", "attacked")]

        with in_threads([partial(observer.follow, own_cluster.rest)]):
            create(own_cluster, stage, calm, [], CALM_SECONDS)
            create(own_cluster, stage, during, [*siege.attackers(), *large.attackers()], SECONDS)
        tell(stage, observer, calm, during)
        for name, counts in (*siege.counts.items(), *large.counts.items()):
            print(f"{name}: {counted(counts)}")

        for team, quota in stage.teams.items():
            assert not {model: cores for model, cores in observer.most[team].items() if cores > quota.get(model, 0)}
        for creates in (*calm, *during):
            assert creates.counts.keys() <= {STORED, OVER_QUOTA}
            assert creates.counts[STORED]
        for part in stage.parts:
            assert part.group.kills == 0, part
            assert part.resident() < part.group.limit, part
            assert part.process.process.poll() is None, part.process.output()
        assert [replica.worker() for replica in stage.own.replicas] == [part.pids[1] for part in stage.parts[:REPLICAS]]
        # Here the quota has no entry `*`. So a namespace that does not exist has no limit, and its pods may be
        # admitted.
        invented = {name: attackers.ATTACKS[name] | {ALLOWED} for name in attackers.ATTACKS if "invented" in name}
        known = {**attackers.ATTACKS, **invented, **large_attackers.ATTACKS}
        if claiming:
            known |= {**attackers.CLAIM_ATTACKS, **large_attackers.CLAIM_ATTACKS}
        answers = {**siege.counts, **large.counts}
        assert [(name, told) for name in answers for told in answers[name].keys() - known[name]] == []
        assert answers.keys() == known.keys()


def paths_of(namespace: str, *, claiming: bool) -> list[str]:
    return [f"/api/v1/namespaces/{namespace}/pods", *([claims_path(namespace)] if claiming else [])]


def create(
    cluster: Cluster,
    stage: Stage,
    creates: Sequence[Creates],
    attacks: Sequence[Attack],
    seconds: float,
) -> None:
    with closing(Cluster(cluster.control_plane)) as admin:
        works = [
            partial(each.create, admin.rest, namespace) for each, namespace in zip(creates, stage.others, strict=True)
        ]
        with in_threads([*works, *attacks]):
            time.sleep(seconds)


def tell(stage: Stage, observer: Observer, calm: Sequence[Creates], during: Sequence[Creates]) -> None:
    print()
    for when, every in (("before the attacks", calm), ("during the attacks", during)):
        for namespace, creates in zip(stage.others, every, strict=True):
            print(f"tenant with {stage.teams[namespace]}, {when}: {creates.told()}")
    for part in stage.parts:
        assert part.process.process.poll() is None, part.process.output()[-4000:]
        print(part.told())
    print(f"{observer.looks} states watched, {observer.lost} failed attempts; the most cores of each namespace:")
    for team, quota in stage.teams.items():
        print(f"  {observer.most[team]} of {quota}")
