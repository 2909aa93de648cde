"""Tests that the quota stays exact under load, while programs crash or pause, calls are lost, and tenants attack."""

import gc
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from pathlib import Path

import pytest

from tests.e2e import held_clock
from tests.e2e.attackers import ATTACKS, CLAIM_ATTACKS, INVENTED, Siege, prepare
from tests.e2e.chaos import (
    CLAIM_REQUESTS,
    INTERNAL,
    LEADING,
    NOT_ANSWERED,
    OVER_QUOTA,
    REAPED,
    REASONS,
    STORED,
    Callers,
    Controllers,
    Figures,
    Make,
    Victim,
    controllers,
    counted,
    policy,
    reason,
    replicas,
    templates,
)
from tests.e2e.cluster import Cluster, Json, administering
from tests.e2e.dra import HAMI, NVIDIA, Published, card, claim, claims, claims_path, published, served, shared_card
from tests.e2e.faults import CYCLE, TICK, Havoc
from tests.e2e.held_clock import HELD_AT, HeldClock
from tests.e2e.installation import (
    LEDGERS,
    Flag,
    Installation,
    await_ready,
    flags_of,
    ledger_path,
    policies,
    registered,
    running,
)
from tests.e2e.lossy_proxy import RandomLosses, lossy_proxy
from tests.e2e.observer import CLAIMS, PODS, TOTAL, Ghosts, Observer, held
from tests.e2e.quota_config import TEAMS
from tests.e2e.rest import Answer, Rest
from tests.e2e.steady import in_threads
from tests.integration.reviews import gpu_pod
from tests.processes import ControllerProcess, WebhookProcess, eventually
from tools.control_plane import ControlPlane, Settings, running_control_plane, second_apiserver
from vcuda.quota.rejections import reports_shortage

SECONDS = float(os.environ.get("CHAOS_SECONDS") or CYCLE * TICK)
CREATES = int(os.environ.get("CHAOS_CREATES") or 0)
"""The minimum number of creates in the test. The test ends when SECONDS have passed and CREATES creates were sent."""

MIN_RATE = 20
"""The minimum expected number of creates per second. The timeout of the test is computed from it."""

CALLERS = 64
REPLICAS, KILLED = 5, 3
"""The number of webhook replicas, and the number of those that the test kills. It suspends and resumes the others."""

FILLERS = 4

REQUEST_TIMEOUT = 12
WEBHOOK_TIMEOUT = 5
STORABLE = 20
"""The flag --storable-seconds: an admitted pod is stored within this many seconds, or never.

The API server ends a request and its calls of webhooks after REQUEST_TIMEOUT. A request to etcd may last 7 s longer.
"""

MAX_TERMINATING = 5
"""The flag --max-terminating-seconds: a bound pod that was deleted by force stays charged for this many seconds."""

ROOMY: Mapping[str, float] = {"P100": 1200}
"""The limit in cards of the roomy namespace, whose large quota lets replicas hold reservations.

The callers (threads that create and delete pods) do not use it up during most of a cycle. No node has the model. So no
pod is bound, and the charge of a deleted pod is released at once.
"""

QUOTAS: Sequence[Mapping[str, float]] = ({"M40": 6, "P100": 3}, {"M40": 4, "V100": 2.5}, {"M40": 8})
"""The limits in cards of a group's further namespaces. The test attacks the last one. The others are a team."""

TEAM: Mapping[str, float] = {"M40": 7, "P100": 3, "V100": 2.5}
TEAM_TOTAL = 9
"""The limits in cards of the team in each group. Its namespaces can use up its limit of M40, and its total."""

MAX_MEMORY = 200
"""Maximum memory of all processes of one webhook replica together, in MiB."""

STAYS = 6
STAY = CYCLE * TICK / STAYS
"""Seconds until the callers change to the next group of namespaces. Every group contains the roomy namespace.

If a pod is created and deleted while no controller leads, the next leader cannot know of it. Its charge is released
when no such pod can be stored any more, but few leaders of this test run that long. So the usable quota of a namespace
shrinks with each such pod, and the callers need new namespaces.
"""

CYCLES = min(max(round(SECONDS / (CYCLE * TICK)), 1), 8)
"""The number of cycles that use new namespaces. Later cycles use these namespaces again."""

SPENT_PART = 0.1
"""The minimum fraction of the stored objects that replicas must have admitted from reservations."""

HALF = {"tencent.com/vcuda-core": 50, "tencent.com/vcuda-memory": 16}
"""The limits of a container that requests half a card."""

CARDS = 8
SLICES = [
    each
    for model in ("M40", "P100", "V100")
    for each in (
        Published(NVIDIA, f"dra-{model.lower()}", [card(number, model) for number in range(CARDS)]),
        Published(HAMI, f"dra-{model.lower()}", [shared_card(number, model, "hami-gpu") for number in range(CARDS)]),
    )
]
"""The devices that DRA drivers publish in the test if the API server serves ResourceClaims."""


@pytest.fixture(scope="module")
def own_plane(assets: Path | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    flags = (f"--request-timeout={REQUEST_TIMEOUT}s",)
    settings = Settings(apiserver_flags=flags, startup_timeout=240)
    with running_control_plane(assets, tmp_path_factory.mktemp("chaos"), settings) as running_plane:
        yield running_plane


@pytest.fixture
def own_cluster(own_plane: ControlPlane) -> Iterator[Cluster]:
    with administering(own_plane) as admin:
        yield admin


@pytest.mark.chaos
# This warning is expected: urllib3 leaves a socket open if the API server is killed during a TLS handshake.
@pytest.mark.filterwarnings("ignore:unclosed <ssl.SSLSocket:ResourceWarning")
@pytest.mark.timeout(SECONDS * 1.2 + CREATES / MIN_RATE + 600)
def test_the_quota_is_exact_despite_faults_and_attacks(
    own_plane: ControlPlane, own_cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """64 callers and 14 attackers act at once, and a fault occurs about every second. No quota is ever exceeded.

    At the end the test deletes all objects, and new pods can use exactly the quota. In the roomy namespace the replicas
    admit pods from reservations. In the other namespaces they write each charge.
    """
    claiming = served(own_cluster)
    caplog.set_level(logging.ERROR, "urllib3")  # the test counts lost connections, so urllib3 must not log each of them
    with staged(own_plane, own_cluster, tmp_path) as stage, closing(stage.tenant()) as tenant:
        own, limits, victims = stage.own, stage.limits, stage.victims
        namespaces = [name for name in limits if name not in stage.teams.values()]
        callers = Callers(stage.rests, stage.groups, REPLICAS, STAY, claiming)
        ghosts, figures = Ghosts(MAX_TERMINATING), Figures()
        siege = Siege(callers, own_cluster.rest, tenant.rest, own.replicas, ghosts)
        paths = (PODS, CLAIMS) if claiming else (PODS,)
        listing, watching = (Observer({name: {} for name in limits}, ghosts, paths, stage.teams) for _ in range(2))
        observers = listing, watching
        havoc = Havoc(stage.planes, victims[:KILLED], victims[KILLED:], stage.clock, stage.managers, callers, own.quota)

        with observed(own_cluster, observers):
            samples = [partial(figures.sample, victim) for victim in victims]
            many = [partial(callers.call, number) for number in range(CALLERS)]
            with in_threads([*samples, *siege.attackers(), *many]):
                havoc.wreak(lambda seconds: seconds >= SECONDS and callers.creates >= CREATES)
            # Faults have edited the quota. Store the original quota again, and wait until each running replica uses it.
            replace(own.quota, readers=[victim.current() for victim in victims]).limit_anew(**havoc.entries)
            await_recounted(own, stage.managers, namespaces)
            with ThreadPoolExecutor(FILLERS) as threads:
                filled = dict(threads.map(lambda name: (name, fill(own_cluster, name, limits[name])), namespaces))
        gc.collect()  # here the test ignores the warnings of unclosed sockets
        reaped = stage.managers.history(REAPED)
        unanswered, faults = (
            [line for each in victims for line in each.history(event)] for event in (NOT_ANSWERED, INTERNAL)
        )
        failed = Counter(line["reason"] for line in unanswered if line["level"] == "error")
        report(callers, havoc, observers, siege)
        print(f"{len(stage.managers.history(LEADING))} leaders released {len(reaped)} reservations of ended replicas")
        print(f"{sum(figures.spent.values()):g} charges admitted from reservations; reviews that failed:", failed)
        print(figures, f"{len(stage.losses.lost)} replies dropped, {stage.losses.late} requests or replies delayed")
        known = {**ATTACKS, **(CLAIM_ATTACKS if claiming else {})}

        assert faults == []
        assert not any(victim.crashes or victim.has_ended for victim in victims)
        for observer in observers:
            assert list(exceeded(observer, limits)) == []
        assert list(unused(filled, limits, stage.teams)) == []
        assert callers.counts.keys() | callers.claim_counts.keys() <= REASONS
        stored = callers.counts[STORED] + callers.claim_counts[STORED]
        assert stored > 2 * CALLERS
        assert sum(figures.spent.values()) > SPENT_PART * stored
        assert bool(callers.claim_counts[STORED] and listing.claims and watching.claims) is claiming
        assert {name for name, count in havoc.done.items() if count and name} == havoc.faults
        # With only one cycle, a fault may delete the ledger before the leader removes the reservation of an ended
        # replica.
        assert reaped or CYCLES == 1
        assert stage.losses.lost
        assert stage.losses.late
        assert [(name, told) for name, counts in siege.counts.items() for told in counts.keys() - known[name]] == []
        assert siege.counts.keys() == known.keys()
        assert INVENTED not in str(own_cluster.rest.get(LEDGERS))
        assert 0 < figures.worker < MAX_MEMORY
        assert figures.replica < MAX_MEMORY


@dataclass(frozen=True)
class Stage:
    """The running system of the chaos test.

    ``own``: the installation with the replicas that were started first. ``victims``: the replicas to kill or suspend.
    One uses a proxy with ``losses``, and the last one uses ``clock``. ``groups``: the groups of namespaces, each of
    which begins with a roomy one (with a large quota). ``limits``: the limits in cores by model, for each namespace and
    each team. ``teams``: the team of each namespace that has one.
    """

    planes: tuple[ControlPlane, ControlPlane]
    rests: Sequence[Rest]
    own: Installation
    victims: Sequence[Victim[WebhookProcess]]
    managers: Controllers
    groups: Sequence[Sequence[str]]
    limits: Mapping[str, dict[str, int]]
    teams: Mapping[str, str]
    clock: HeldClock
    losses: RandomLosses

    def tenant(self) -> Cluster:
        return Cluster(self.planes[0], self.planes[0].tokens["tenant"])


@contextmanager
def staged(plane: ControlPlane, cluster: Cluster, directory: Path) -> Iterator[Stage]:
    claiming = served(cluster)
    with ExitStack() as stack:
        if claiming:
            stack.enter_context(published(cluster, *SLICES))
        other_plane = stack.enter_context(second_apiserver(plane))
        other = stack.enter_context(closing(Cluster(other_plane)))
        losses, certificates = RandomLosses(), directory / "certs"
        lossy = stack.enter_context(lossy_proxy(cluster, directory / "proxy", losses))
        storable = ("--storable-seconds", str(STORABLE))
        bare = stack.enter_context(running(cluster, certificates, replicas=0, patience=WEBHOOK_TIMEOUT, flags=storable))
        ways = cluster.kubeconfig, other.kubeconfig, lossy, other.kubeconfig
        makes: list[Make] = [*(maker(bare, way) for way in ways), partial(suspended, bare, directory / "held")]
        victims = stack.enter_context(replicas(makes))
        first = [victim.current() for victim in victims]
        further: dict[str, str] = {}
        own = replace(bare, replicas=first, quota=replace(bare.quota, readers=first, further=further))
        await_ready(own)
        groups = [group for _ in range(CYCLES) for group in grouped(own, stack)]
        limits = {
            name: in_cores(quota) for group in groups for name, quota in zip(group, (ROOMY, *QUOTAS), strict=True)
        }
        namespaces = [*limits]
        teams = {name: f"team-{group[1]}" for group in groups for name in group[1:-1]}
        limits |= {team: {**in_cores(TEAM), TOTAL: 100 * TEAM_TOTAL} for team in teams.values()}
        further[TEAMS] = json.dumps({f"team-{group[1]}": team_entry(group[1:-1]) for group in groups})
        cluster.apply(*policies("allocations.quota.vcuda.io", "claims.quota.vcuda.io"))
        for manifest in [each for name in namespaces for each in (templates(name, REPLICAS) if claiming else ())]:
            cluster.create(manifest)
        own.quota.limit(**{"*": {"quota": {"M40": 1}}})  # namespaces that do not exist have a limit too
        stack.enter_context(registered(own))
        slow = stack.enter_context(policy(certificates, WEBHOOK_TIMEOUT))
        # The other API server gets webhook configurations by a watch, in the order of their creation. When it calls the
        # slow webhook, whose configuration is last, it also calls our webhooks.
        stack.enter_context(other.register_webhooks(validating=[slow]))
        leading = (*storable, "--max-terminating-seconds", str(MAX_TERMINATING), "--lease-seconds", "8")
        both = (cluster.kubeconfig, other.kubeconfig)
        managing = [partial(ControllerProcess, *flags_of(own, *leading, kubeconfig=way)) for way in both]
        managers = stack.enter_context(controllers(managing))
        prepare(cluster, [group[-1] for group in groups])
        # A first pod in each roomy namespace creates the ledger before the faults begin. If a replica were killed at
        # the creation, the ledger would count as lost for a while.
        for roomy in dict.fromkeys(group[0] for group in groups):
            cluster.create(gpu_pod("first", roomy, HALF))
        planes, rests = (plane, other_plane), (cluster.rest, other.rest)
        clock = HeldClock(directory / "held")
        yield Stage(planes, rests, own, victims, managers, groups, limits, teams, clock, losses)


def grouped(own: Installation, stack: ExitStack) -> Iterator[list[str]]:
    """Create the namespaces of one cycle, and yield them in groups. Each group begins with a roomy namespace."""
    roomy = stack.enter_context(own.team({"quota": ROOMY}))
    for _ in range(STAYS):
        yield [roomy, *(stack.enter_context(own.team({"quota": quota})) for quota in QUOTAS)]


def maker(installation: Installation, kubeconfig: Path) -> Make:
    flags = (*installation.flags, "--kubeconfig", kubeconfig)
    return lambda *more: WebhookProcess((*flags, *more), installation.ca, {})


def suspended(installation: Installation, file: Path, *more: Flag) -> WebhookProcess:
    return WebhookProcess((*installation.flags, *more), installation.ca, {HELD_AT: str(file)}, held_clock.COMMAND)


def in_cores(quota: Mapping[str, float]) -> dict[str, int]:
    return {model: round(cards * 100) for model, cards in quota.items()}


@contextmanager
def observed(cluster: Cluster, observers: tuple[Observer, Observer]) -> Iterator[None]:
    """Run both observers during the ``with`` statement. One uses LISTs, and the other one uses watches."""
    listing, watching = observers
    with (
        closing(Cluster(cluster.control_plane)) as admin,
        in_threads([partial(listing.list, admin.rest), partial(watching.follow, admin.rest)]),
    ):
        yield


def team_entry(namespaces: Sequence[str]) -> Json:
    return {"namespaces": namespaces, "quota": TEAM, TOTAL: TEAM_TOTAL}


def exceeded(observer: Observer, limits: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    for name, quota in limits.items():
        for model, cores in observer.most[name].items():
            if cores > quota.get(model, 0):
                yield f"{cores} cores of {model} in {name}, limited to {quota}"


def unused(
    filled: Mapping[str, Counter[str]], limits: Mapping[str, Mapping[str, int]], teams: Mapping[str, str]
) -> Iterator[str]:
    """Yield each namespace or team whose quota is not used up. The total of a team is used up before other limits."""
    for name, cores in filled.items():
        if name not in teams and cores != limits[name]:
            yield f"{name} uses {cores} of {limits[name]}"
    for team in set(teams.values()):
        cores = sum((filled[name] for name in teams if teams[name] == team), Counter())
        if cores.total() != limits[team][TOTAL]:
            yield f"{team} uses {cores} of {limits[team]}"


def await_recounted(own: Installation, managers: Controllers, namespaces: Sequence[str]) -> None:
    def all_released() -> bool:
        managers.mend()
        with ThreadPoolExecutor(8) as threads:
            return all(list(threads.map(partial(released, own), namespaces)))

    def told() -> str:
        ledgers = {namespace: own.ledger(namespace) for namespace in namespaces}
        return "\n\n".join([f"{ledgers}", *(candidate.current().output() for candidate in managers.candidates)])

    eventually(all_released, told, 3 * STORABLE + 120)


def released(own: Installation, namespace: str) -> bool:
    """Delete all objects in the namespace, and return whether its ledger is then empty.

    If the ledger is missing, create a pod so that a replica recreates the ledger, and return False.
    """
    rest = own.cluster.rest
    if rest.send("GET", ledger_path(namespace)).status == HTTPStatus.NOT_FOUND:
        own.cluster.try_create(
            gpu_pod("anew", namespace, {"tencent.com/vcuda-core": 50, "tencent.com/vcuda-memory": 1})
        )
        return False
    rest.send("DELETE", f"/api/v1/namespaces/{namespace}/pods", {"gracePeriodSeconds": 0}).ok()
    if served(own.cluster):
        rest.send("DELETE", claims_path(namespace)).ok()
    return own.ledger(namespace).is_empty


def fill(cluster: Cluster, namespace: str, quota: Mapping[str, int]) -> Counter[str]:
    """Create pods and small claims, large ones first, until the quota is used up. Return the used cores by model."""
    claiming = served(cluster)
    for cores in (800, 100, 50):
        limits = {"tencent.com/vcuda-core": cores} if cores >= 100 else HALF
        for number in range(sum(quota.values()) // cores + 3):
            name = f"fill-{cores}-{number}"
            by_claim = claiming and number % 2 and cores == 50
            made = claim(namespace, name, CLAIM_REQUESTS[-1]) if by_claim else gpu_pod(name, namespace, limits)
            answer = eventually(partial(decided, cluster, made))
            assert answer
            if answer.status != HTTPStatus.CREATED:
                assert reports_shortage(answer.message), answer
                break
    return held([*cluster.pods(namespace), *(claims(cluster, namespace) if claiming else ())])


def decided(cluster: Cluster, made: Json) -> Answer | None:
    """Create the object, and return the answer if it is final: stored, or rejected because of the quota.

    Otherwise return None, for example if other replicas hold reservations.
    """
    answer = cluster.try_create(made)
    return answer if reason(answer) in (STORED, OVER_QUOTA) and not answer.may_pass_soon else None


def report(callers: Callers, havoc: Havoc, observers: tuple[Observer, Observer], siege: Siege) -> None:
    """Print the counts of the test. pytest shows them with the flag `-s`, or in the report of a failure."""
    print(f"\n{callers.creates} creations by {CALLERS} callers: {counted(callers.counts)}")
    print(f"of claims: {counted(callers.claim_counts)}")
    print(f"faults: {counted(havoc.done)}")
    for how, observer in zip(("listed", "watched"), observers, strict=True):
        print(
            f"{observer.looks} states {how}, {observer.lost} failed attempts, at most {observer.claims} claims; cores:"
        )
        print("  ", counted(Counter(map(str, observer.most.values()))))
    for name, counts in siege.counts.items():
        print(f"{name}: {counted(counts)}")
