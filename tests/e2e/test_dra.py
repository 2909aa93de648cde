"""Tests of pods that request GPUs by ResourceClaims, with the real scheduler and claim controller.

The allocated devices are charged, and never exceed the quota.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.builders import container, pod
from tests.e2e.cluster import Cluster, Json, is_bound
from tests.e2e.dra import (
    EXTENDED,
    NVIDIA,
    Published,
    card,
    claim,
    claiming,
    claims,
    claims_path,
    consumable_card,
    devices_of,
    dra_cluster,
    has_extended_resources,
    request,
    template,
)
from tests.e2e.installation import PROMPTLY, REPLICA, Installation, installed, limited_team
from tests.e2e.ledgers import await_committed
from tests.e2e.workloads import workload
from tests.processes import ControllerProcess
from vcuda.quota.rejections import OVER_QUOTA

SLICES = (
    Published(NVIDIA, "a100-1", [card(number, "A100") for number in range(12)]),
    Published(NVIDIA, "h100-1", [card(number, "H100") for number in range(8)]),
    Published(NVIDIA, "m40-1", [consumable_card(0, "M40", "4")]),
    Published(NVIDIA, "p100-1", [consumable_card(0, "P100", "memory")]),
    Published(NVIDIA, "v100-1", [consumable_card(0, "V100", "unlimited")]),
)


@pytest.fixture(scope="module")
def cluster(assets: Path | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with dra_cluster(assets, tmp_path_factory.mktemp("dra"), *SLICES) as running:
        yield running


QUOTA = {"A100": 5, "H100": 3}
REPLICAS, THREADS = 3, 16


@pytest.fixture(scope="module")
def installation(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    with installed(cluster, tmp_path_factory.mktemp("installation"), replicas=REPLICAS) as running:
        yield running


@pytest.fixture
def team(installation: Installation, controller: ControllerProcess) -> Iterator[str]:
    assert controller.process.poll() is None
    with limited_team(installation, {"quota": QUOTA}) as name:
        yield name


def asking(number: int, team: str, *, extended: bool) -> list[Json]:
    """Return the objects that user ``number`` creates.

    Users create, in turn, a claim and its pod, a pod with a claim template, and a pod with an extended resource.
    """
    name, labels = f"train-{number}", {REPLICA: str(number % REPLICAS)}
    made = [
        [claim(team, name), claiming(team, name, resourceClaimName=name)],
        [claiming(team, name, resourceClaimTemplateName="gpu")],
        [pod(container({EXTENDED: 1}), metadata={"name": name, "namespace": team})],
    ][number % (3 if extended else 2)]
    return [{**each, "metadata": {**each["metadata"], "labels": labels}} for each in made]


def given(found: list[Json]) -> dict[str, int]:
    nodes = [device.split("/")[1] for each in found for device in devices_of(each)]
    return dict(Counter(node.partition("-")[0].upper() for node in nodes))


def create_until(cluster: Cluster, team: str, users: int, wanted: Callable[[list[Json]], bool]) -> None:
    """Let the users create their objects at the same time, and wait until ``wanted`` is true for the team's claims."""
    extended = has_extended_resources(cluster)

    def create(number: int) -> None:
        for manifest in asking(number, team, extended=extended):
            cluster.try_create(manifest)

    with ThreadPoolExecutor(THREADS) as threads:
        threads.map(create, range(users))
        cluster.await_collection(claims_path(team), wanted)


def test_claims_and_pods_that_race_never_get_more_devices_than_the_quota(
    cluster: Cluster, installation: Installation, team: str
) -> None:
    """200 users create objects through three webhook replicas. A watch checks each state of the claims."""
    cluster.create(template(team, "gpu"))
    most: Counter[str] = Counter()

    def all_given(found: list[Json]) -> bool:
        for model, number in given(found).items():
            most[model] = max(most[model], number)
        return given(found) == QUOTA

    create_until(cluster, team, 200, all_given)
    assert most == QUOTA
    await_committed(installation, team, **{model: 100 * cards for model, cards in QUOTA.items()})


def test_claims_and_pods_of_all_models_never_get_more_devices_than_the_total(
    cluster: Cluster, installation: Installation, controller: ControllerProcess
) -> None:
    assert controller.process.poll() is None
    most, total = 0, 6
    with limited_team(installation, {"quota": QUOTA, "total": total}) as team:
        cluster.create(template(team, "gpu"))

        def all_given(found: list[Json]) -> bool:
            nonlocal most
            number = sum(given(found).values())
            most = max(most, number)
            return number == total

        create_until(cluster, team, 100, all_given)
        rejected = cluster.try_create(claim(team, "more"))
        assert most == total
        assert f"total in namespace {team}, requested: 1 card, used: {total}" in rejected.message


REJECTIONS = 8
"""The number of rejections after which the back-off of Kubernetes' claim controller is longer than ten seconds."""


def tries(told: list[Json]) -> int:
    return sum(each["count"] for each in told if OVER_QUOTA in each["message"])


def test_a_deployment_of_a_template_waits_and_starts_as_soon_as_quota_is_free(
    cluster: Cluster, installation: Installation, controller: ControllerProcess
) -> None:
    """After many rejections, Kubernetes' claim controller waits long before it retries by itself."""
    with limited_team(installation, {"quota": {"A100": 1}}) as team:
        for manifest in (template(team, "gpu"), claiming(team, "holder", resourceClaimTemplateName="gpu")):
            cluster.create(manifest)
        cluster.await_bound(team, "holder")
        await_committed(installation, team, A100=100)
        waiting = claiming(team, "train", resourceClaimTemplateName="gpu")
        cluster.create(workload("Deployment", team, pod=waiting))
        cluster.await_events(team, "reason=FailedResourceClaimCreation", lambda told: tries(told) >= REJECTIONS)
        [held] = claims(cluster, team)
        cluster.delete_pod(team, "holder")
        cluster.await_gone(claims_path(team), held["metadata"]["name"])
        cluster.await_pods(team, lambda pods: any(map(is_bound, pods)), PROMPTLY)
        assert list(map(bool, map(devices_of, claims(cluster, team)))) == [True]
        controller.await_log("claim retry triggered", lambda line: line["namespace"] == team)


@pytest.mark.parametrize(
    ("model", "asked", "parts"),
    [
        ("M40", {}, 4),
        ("M40", {"shares": "2"}, 2),
        ("P100", {"memory": "4Gi"}, 4),
        ("P100", {}, 1),
        ("V100", {}, 1),
    ],
    ids=["one share of four", "two shares of four", "a quarter of the memory", "all memory", "unlimited"],
)
def test_a_card_that_nvidia_s_driver_shares_is_charged_as_the_scheduler_shares_it(
    installation: Installation, controller: ControllerProcess, model: str, asked: Json, parts: int
) -> None:
    """A quota of one card admits as many claims as can share the card. The next claim is rejected."""
    assert controller.process.poll() is None
    cluster, wanted = installation.cluster, request(NVIDIA, capacity={"requests": asked})
    with limited_team(installation, {"quota": {model: 1}}) as team:
        for number in range(parts):
            cluster.create(claim(team, f"part-{number}", wanted))
            cluster.create(claiming(team, f"train-{number}", resourceClaimName=f"part-{number}"))
        rejected = cluster.try_create(claim(team, "more", wanted))
        assert (rejected.status, OVER_QUOTA in rejected.message) == (403, True)
        for number in range(parts):
            cluster.await_bound(team, f"train-{number}")
        given = {device for each in claims(cluster, team) for device in devices_of(each)}
        assert given == {f"{NVIDIA}/{model.lower()}-1/gpu-0"}
        await_committed(installation, team, **{model: 100})
