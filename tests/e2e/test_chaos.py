"""The quota is exact whatever dies: replicas, the leading controller, the API server and etcd, under full load."""

import gc
import logging
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from http import HTTPStatus
from pathlib import Path

import pytest

from tests.e2e.attackers import ATTACKS, CLAIM_ATTACKS, INVENTED, Siege, prepare
from tests.e2e.chaos import (
    CLAIM_REQUESTS,
    LEDGER_LOST,
    REASONS,
    STORED,
    Callers,
    Controllers,
    Memory,
    Victim,
    controllers,
    policy,
    reason,
    replicas,
    templates,
)
from tests.e2e.cluster import Cluster, administering
from tests.e2e.control_plane import ControlPlane, Settings, running_control_plane
from tests.e2e.dra import HAMI, NVIDIA, Published, card, claim, claims, claims_path, published, served, shared_card
from tests.e2e.installation import LEDGER_NAMESPACE, Installation, await_ready, policies, registered, running
from tests.e2e.observer import CLAIMS, PODS, Ghosts, Observer, held
from tests.e2e.rest import Answer
from tests.e2e.steady import in_threads
from tests.integration.reviews import gpu_pod
from tests.processes import WebhookProcess, eventually

LEDGERS = f"/api/v1/namespaces/{LEDGER_NAMESPACE}/configmaps"
SECONDS = float(os.environ.get("CHAOS_SECONDS", "60"))
TICK = 2.0
CALLERS = 64
REPLICAS = 3
CONTROLLERS = 2

REQUEST_TIMEOUT = 12
WEBHOOK_TIMEOUT = 5
STORABLE = 40
"""Seconds. The API server ends a request after REQUEST_TIMEOUT, both webhooks included, and etcd its own part of it
after some 7 s more; so a pod that was charged STORABLE seconds ago, and is not found, is never stored any more."""

DEFAULT_STORABLE = 75
"""That of the replicas: for so many seconds nothing is admitted where a ledger was lost."""

MAX_TERMINATING = 5
"""Seconds for which the charge of a bound pod that was torn away is held, whoever leads."""

TICKS = int(SECONDS / TICK)
APISERVER_DIES, ETCD_DIES = range(5, TICKS, 13), range(11, TICKS, 13)
"""At which ticks."""

BY_PLAN = {"replica": TICKS, "kube-apiserver": len(APISERVER_DIES), "etcd": len(ETCD_DIES)}

QUOTAS: Sequence[Mapping[str, float]] = ({"M40": 6, "P100": 3}, {"V100": 2.5}, {"M40": 8})
"""In cards, one namespace each; the last one is besieged by its own tenants."""

MOST_MEMORY = 200
"""MiB of a replica of the webhook, all its processes together."""

GROUPS = max(int(SECONDS / 10), 1)
"""So often the callers go on to fresh namespaces with the same quotas.

A new leader cannot know of a pod that came and went between two leaders. Its charge is held until it is too old for a
pod that is still to be stored, and no leader here lives that long: what a namespace can use shrinks with each of them.
"""


CARDS = 8
SLICES = [
    each
    for model in ("M40", "P100", "V100")
    for each in (
        Published(NVIDIA, f"dra-{model.lower()}", [card(number, model) for number in range(CARDS)]),
        Published(HAMI, f"dra-{model.lower()}", [shared_card(number, model, "hami-gpu") for number in range(CARDS)]),
    )
]
"""What claims are made for, where the API server has them."""


@pytest.fixture(scope="module")
def own_plane(assets: Path | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane to kill, impatient with requests."""
    settings = Settings(apiserver_flags=(f"--request-timeout={REQUEST_TIMEOUT}s",))
    with running_control_plane(assets, tmp_path_factory.mktemp("chaos"), settings) as running_plane:
        yield running_plane


@pytest.fixture
def own_cluster(own_plane: ControlPlane) -> Iterator[Cluster]:
    with administering(own_plane) as admin:
        yield admin


@pytest.mark.chaos
# urllib3 leaves the socket of a TLS handshake open that the dying API server cuts off.
@pytest.mark.filterwarnings("ignore:unclosed <ssl.SSLSocket:ResourceWarning")
@pytest.mark.timeout(SECONDS * 1.2 + 600)
def test_no_death_of_any_part_and_no_tenant_beside_it_admits_more_than_the_quota_or_loses_any_of_it(
    own_plane: ControlPlane, own_cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """64 callers, 14 attackers, a SIGKILL every 2 s; then all is released, and exactly the quota can be filled.

    They create pods, and where there are ResourceClaims, those and pods with a template of one.
    """
    claiming = served(own_cluster)
    caplog.set_level(logging.ERROR, "urllib3")  # its warnings about lost connections are what the counts are about
    with ExitStack() as stack:
        if claiming:
            stack.enter_context(published(own_cluster, *SLICES))
        own = stack.enter_context(running(own_cluster, tmp_path, replicas=REPLICAS, patience=WEBHOOK_TIMEOUT))
        await_ready(own)
        groups = [{stack.enter_context(own.team({"quota": q})): q for q in QUOTAS} for _ in range(GROUPS)]
        teams = {namespace: in_cores(quota) for group in groups for namespace, quota in group.items()}
        own_cluster.apply(*policies("allocations.quota.vcuda.io", "claims.quota.vcuda.io"))
        for manifest in [each for team in teams for each in (templates(team, REPLICAS) if claiming else ())]:
            own_cluster.create(manifest)
        own.quota.limit(**{"*": {"quota": {"M40": 1}}})  # what is invented has a limit, too
        stack.enter_context(registered(own))
        other = stack.enter_context(policy(tmp_path, WEBHOOK_TIMEOUT))
        stack.enter_context(own_cluster.register_webhooks(validating=[other]))
        victims = stack.enter_context(replicas(own))
        flags = ("--storable-seconds", str(STORABLE), "--max-terminating-seconds", str(MAX_TERMINATING))
        managers = stack.enter_context(controllers(own, CONTROLLERS, *flags))
        besieged = [[*group][-1] for group in groups]
        prepare(own_cluster, besieged)
        tenant = stack.enter_context(closing(Cluster(own_cluster.control_plane, own_plane.tokens["tenant"])))
        callers = Callers(own_cluster.rest, [list(group) for group in groups], REPLICAS, SECONDS / GROUPS, claiming)
        ghosts, memory = Ghosts(MAX_TERMINATING), Memory()
        siege = Siege(callers, own_cluster.rest, tenant.rest, own.replicas, ghosts)
        paths = (PODS, CLAIMS) if claiming else (PODS,)
        listing, watching = (Observer({team: {} for team in teams}, ghosts, paths) for _ in range(2))
        observers = listing, watching

        with observed(own_cluster, observers):
            many = [partial(callers.call, number) for number in range(CALLERS)]
            with in_threads([partial(memory.sample, victims), *siege.attackers(), *many]):
                killed = havoc(own_cluster.control_plane, victims, managers)
            await_settled(own, managers, teams)
            filled = {namespace: fill(own_cluster, namespace, quota) for namespace, quota in teams.items()}
        gc.collect()  # here, where those warnings are expected
        report(callers, killed, observers, teams)
        tell_attacks(siege, memory)
        known = {**ATTACKS, **(CLAIM_ATTACKS if claiming else {})}

        for observer in observers:
            assert list(exceeded(observer, teams)) == []
        assert filled == teams
        assert callers.counts.keys() | callers.claim_counts.keys() <= REASONS
        assert callers.counts[STORED] + callers.claim_counts[STORED] > CALLERS // 2
        assert bool(callers.claim_counts[STORED] and listing.claims and watching.claims) is claiming
        assert killed == {**BY_PLAN, "leader": managers.kills}
        assert managers.kills > 1
        assert [(name, told) for name, counts in siege.counts.items() for told in counts.keys() - known[name]] == []
        assert siege.counts.keys() == known.keys()
        assert INVENTED not in str(own_cluster.rest.get(LEDGERS))
        assert 0 < memory.worker < MOST_MEMORY
        assert memory.replica < MOST_MEMORY


def in_cores(quota: Mapping[str, float]) -> dict[str, int]:
    return {model: round(cards * 100) for model, cards in quota.items()}


@contextmanager
def observed(cluster: Cluster, observers: tuple[Observer, Observer]) -> Iterator[None]:
    """`with` this, the first observer LISTs and the second one watches, on connections of their own."""
    listing, watching = observers
    with (
        closing(Cluster(cluster.control_plane)) as admin,
        in_threads([partial(listing.list, admin.rest), partial(watching.follow, admin.rest)]),
    ):
        yield


def exceeded(observer: Observer, teams: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    for namespace, quota in teams.items():
        for model, cores in observer.most[namespace].items():
            if cores > quota.get(model, 0):
                yield f"{cores} cores of {model} in {namespace}, limited to {quota}"


def havoc(
    control_plane: ControlPlane, victims: Sequence[Victim[WebhookProcess]], managers: Controllers
) -> Counter[str]:
    """Kill a replica and the leading controller at every tick, API server and etcd at theirs; count the dead."""
    killed: Counter[str] = Counter()
    started = time.monotonic()
    for tick in range(int(SECONDS / TICK)):
        time.sleep(max(started + tick * TICK - time.monotonic(), 0))
        victims[tick % len(victims)].kill()
        managers.kill_seasoned_leader()
        mend(managers)
        for component, ticks in ((control_plane.apiserver, APISERVER_DIES), (control_plane.etcd, ETCD_DIES)):
            if tick in ticks:
                component.kill()
                killed[component.name] += 1
                component.launch()
    for component in (control_plane.etcd, control_plane.apiserver):
        component.await_ready()
    return killed + Counter(replica=sum(victim.kills for victim in victims), leader=managers.kills)


def await_settled(own: Installation, managers: Controllers, teams: dict[str, dict[str, int]]) -> None:
    """Delete what is left, and return once no ledger holds a charge any more."""

    def all_released() -> bool:
        mend(managers)
        return all(released(own, namespace) for namespace in teams)

    def told() -> str:
        ledgers = {namespace: own.ledger(namespace) for namespace in teams}
        return "\n\n".join([f"{ledgers}", *(candidate.current().output() for candidate in managers.candidates)])

    eventually(all_released, told, STORABLE + 60)


def mend(managers: Controllers) -> None:
    for candidate in managers.candidates:
        candidate.mend()


def released(own: Installation, namespace: str) -> bool:
    own.cluster.rest.send("DELETE", f"/api/v1/namespaces/{namespace}/pods", {"gracePeriodSeconds": 0}).ok()
    if served(own.cluster):
        own.cluster.rest.send("DELETE", claims_path(namespace)).ok()
    ledger = own.ledger(namespace)
    return not ledger.usages()


def fill(cluster: Cluster, namespace: str, quota: dict[str, int]) -> Counter[str]:
    """Create pods of half a card, and claims in their turn, until nothing fits, which is said; the cores then held."""
    half = {"tencent.com/vcuda-core": 50, "tencent.com/vcuda-memory": 16}
    claiming = served(cluster)

    def create(number: int) -> Answer | None:
        """A replica that dies while it makes a ledger leaves one that counts as lost, for a while."""
        name = f"fill-{number}"
        by_claim = claiming and number % 2
        answer = cluster.try_create(
            claim(namespace, name, CLAIM_REQUESTS[-1]) if by_claim else gpu_pod(name, namespace, half)
        )
        return None if reason(answer) == LEDGER_LOST else answer

    for number in range(sum(quota.values()) // 50 + 3):
        answer = eventually(partial(create, number), timeout=2 * DEFAULT_STORABLE)
        assert answer
        if answer.status != HTTPStatus.CREATED:
            assert "exceeded GPU quota" in answer.message, answer
    return held([*cluster.pods(namespace), *(claims(cluster, namespace) if claiming else ())])


def report(
    callers: Callers, killed: Counter[str], observers: tuple[Observer, Observer], teams: Mapping[str, dict[str, int]]
) -> None:
    """Print the counts, for whoever reads the run (`pytest -s`, or the report of a failure)."""
    print(f"\n{sum(callers.counts.values())} creations by {CALLERS} callers in {SECONDS:g} s:")
    for name, count in callers.counts.most_common():
        print(f"  {count:6d} {name}")
    for name, count in callers.claim_counts.most_common():
        print(f"  {count:6d} {name} (claims)")
    print("killed:", ", ".join(f"{name} {count} times" for name, count in killed.most_common()))
    for how, observer in zip(("listed", "watched"), observers, strict=True):
        seen_in = f"{observer.looks} states {how}, {observer.lost} times in vain, {observer.claims} claims at most"
        print(f"{seen_in}; the most cores of each namespace:")
        seen = Counter(f"{most} of {quota}" for most, quota in zip(observer.most.values(), teams.values(), strict=True))
        for told, count in seen.items():
            print(f"  {count:6d} namespaces {told}")


def tell_attacks(siege: Siege, memory: Memory) -> None:
    """Print what the tenants were answered, and the memory of the webhook all the while."""
    for name, counts in siege.counts.items():
        print(f"{name}: {', '.join(f'{count} {told}' for told, count in counts.most_common())}")
    print(f"webhook, {memory.samples} samples: worker at most {memory.worker} MiB, a replica {memory.replica} MiB")
