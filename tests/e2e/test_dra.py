"""GPUs by claims, with the real scheduler and claim controller: what is given is charged, and never beyond a quota."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.builders import container, pod
from tests.e2e.cluster import Cluster, Json, administering
from tests.e2e.control_plane import Settings, running_control_plane
from tests.e2e.dra import (
    EXTENDED,
    HAMI,
    NVIDIA,
    VGPU_MANAGER,
    Published,
    card,
    claim,
    claiming,
    claims,
    claims_path,
    devices_of,
    partition,
    published,
    request,
    require_dra,
    shared_card,
    template,
)

SLICES = (
    Published(NVIDIA, "a100-1", [*(card(number, "A100") for number in range(4)), partition(0, "A100", "1g.5gb")]),
    Published(NVIDIA, "h100-1", [card(number, "H100") for number in range(2)]),
    Published(HAMI, "hami-1", [shared_card(0, "A100", "hami-gpu")]),
    Published(VGPU_MANAGER, "vgpu-1", [shared_card(0, "H100", "vgpu")]),
)


@pytest.fixture(scope="module")
def cluster(assets: Path | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A control plane whose scheduler and controllers are the users that they are in a cluster."""
    directory = tmp_path_factory.mktemp("dra") / "control-plane"
    settings = Settings(own_identities=True)
    with running_control_plane(assets, directory, settings) as running, administering(running) as admin:
        require_dra(admin)
        with published(admin, *SLICES):
            yield admin


SHARE: Json = {"capacity": {"requests": {"cores": "30", "memory": "3000Mi"}}}
PLAIN: dict[str, tuple[Callable[[str], list[Json]], str]] = {
    "by a template": (
        lambda team: [template(team, "gpu"), claiming(team, "train", resourceClaimTemplateName="gpu")],
        "gpu.nvidia.com/",
    ),
    "by a claim": (
        lambda team: [claim(team, "gpu"), claiming(team, "train", resourceClaimName="gpu")],
        "gpu.nvidia.com/",
    ),
    "by an extended resource": (
        lambda team: [pod(container({EXTENDED: 1}), metadata={"name": "train", "namespace": team})],
        "gpu.nvidia.com/",
    ),
    "a MIG partition": (
        lambda team: [
            claim(team, "gpu", request("mig.nvidia.com")),
            claiming(team, "train", resourceClaimName="gpu"),
        ],
        "gpu.nvidia.com/a100-1/gpu-0-mig-0",
    ),
    "a share by HAMi": (
        lambda team: [claim(team, "gpu", request(HAMI, **SHARE)), claiming(team, "train", resourceClaimName="gpu")],
        f"{HAMI}/hami-1/gpu-0",
    ),
    "a share by vgpu-manager": (
        lambda team: [
            claim(team, "gpu", request("vgpu-manager", **SHARE)),
            claiming(team, "train", resourceClaimName="gpu"),
        ],
        f"{VGPU_MANAGER}/vgpu-1/gpu-0",
    ),
}
"""What a person creates, and how the device that the pod then has is called, without us."""


@pytest.mark.parametrize(("manifests", "device"), PLAIN.values(), ids=PLAIN.keys())
def test_kubernetes_by_itself_gives_the_devices_that_the_drivers_publish(
    cluster: Cluster, namespace: str, manifests: Callable[[str], list[Json]], device: str
) -> None:
    """The ground that the other tests stand on: the real claim controller and scheduler, and slices written by hand."""
    for manifest in manifests(namespace):
        cluster.create(manifest)
    cluster.await_bound(namespace)
    [given] = [each for found in claims(cluster, namespace) for each in devices_of(found)]
    assert given.startswith(device)
    cluster.delete_pod(namespace, "train")
    cluster.await_collection(claims_path(namespace), lambda found: not any(map(devices_of, found)))
