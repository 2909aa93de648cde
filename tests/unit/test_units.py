"""Tests of `gpu_units`: the values of resources that belong to no vendor's scheme, such as MIG profiles."""

import json
from fractions import Fraction
from pathlib import Path

import pytest
import yaml
from hypothesis import given, strategies as st

from controller.pods import PodInformer
from tests.api_double import ApiDouble
from tests.builders import LABELS, Manifest, container, pod, sidecar, stored_pod, vcuda_pod, view
from tests.quota_map import store_quota
from tests.replicas import POD, Replica
from tests.tables import cases
from vcuda.errors import Fault, QuotaFault
from vcuda.kube import LedgerStore, QuotaInformer, QuotaSource
from vcuda.ledger.ledger import Ledger, Rejected
from vcuda.ledger.recount import ObservedPods, recount
from vcuda.placement.nodes import Nodes
from vcuda.quota.model import Charge
from vcuda.requests.accelerators import VENDORS
from vcuda.requests.config import parse_config
from vcuda.requests.pod_request import read_request, requests_gpus
from vcuda.requests.resources import GpuResources

CLASS = "deviceclass.resource.kubernetes.io/"
OWN = """
nvidia.com/gpu.shared: {cards: 0.25}
nvidia.com/mig-1g.5gb.shared: {cards: 0.07}
acme.com/mebibytes: {cards: 0.000025}
deviceclass/gpu-manager: {cards: 0.25}
acme.com/slice: {cards: 0.25, memory: 10Gi}
acme.com/odd: {cards: 1.5, memory: 1048577}
amd.com/gpu: {cards: 1}
amd.com/nic: {}
deviceclass/half.example.com: {cards: 0.5}
deviceclass/rdma.example.com: {}
"""


def known(units: str = OWN, **data: str) -> GpuResources:
    return parse_config({"gpu_quota": "{}", "gpu_units": units, **data}).resources


@cases(
    "limits, charge",
    MIG=({"nvidia.com/mig-3g.20gb": 2}, Charge(100, 40960)),
    MIG_of_all_slices=({"nvidia.com/mig-7g.80gb": 9}, Charge(900, 737280)),
    MIG_with_media=({"nvidia.com/mig-1g.5gb.me": "1"}, Charge(Fraction(100, 7), 5120)),
    MIG_with_time_slicing=({"nvidia.com/mig-1g.5gb.shared": 2, "nvidia.com/mig-1g.5gb": 7}, Charge(114, 35840, 14)),
    a_unit_of_one_MiB=({"acme.com/mebibytes": 39_999}, Charge(Fraction("99.9975"), 0, Fraction("99.9975"))),
    several_profiles=({"nvidia.com/mig-1g.5gb": 1, "nvidia.com/mig-2g.10gb": 1}, Charge(Fraction(300, 7), 15360)),
    a_class=({f"{CLASS}gpu.nvidia.com": 2}, Charge(200, 0, 200)),
    a_class_with_a_value_for_unlimited_sharing=({f"{CLASS}gpu-manager": 2}, Charge(200, 0, 200)),
    a_class_of_shares=({f"{CLASS}hami-core-gpu.project-hami.io": 1}, Charge(100, 0, 100)),
    ones_own=({"nvidia.com/gpu.shared": 9}, Charge(225, 0, 225)),
    ones_own_with_memory=({"acme.com/slice": 3}, Charge(75, 30720)),
    memory_is_rounded_up=({"acme.com/odd": 1}, Charge(150, 2)),
    ones_own_class=({f"{CLASS}half.example.com": 1}, Charge(50, 0, 50)),
    beside_a_scheme=({"nvidia.com/gpu": 1, "nvidia.com/gpu.shared": 1}, Charge(125, 0, 125)),
    beside_resources_without_value=({"amd.com/gpu": 1, "nvidia.com/hostdev": 1, "amd.com/nic": 1}, Charge(100, 0, 100)),
)
def test_a_unit_is_charged_its_count_times_its_value(limits: dict[str, object], charge: Charge) -> None:
    manifest = vcuda_pod(limits)
    assert requests_gpus(view(manifest), known())
    request = read_request(view(manifest), known())
    assert (request.charge, request.faults, request.by_units) == (charge, (), True)


@pytest.mark.parametrize("name", ["nvidia.com/hostdev", "amd.com/nic", f"{CLASS}rdma.example.com", "cpu", "acme.com/x"])
def test_a_unit_without_a_value_is_no_request(name: str) -> None:
    manifest = vcuda_pod({name: 5})
    assert not requests_gpus(view(manifest), known())
    assert read_request(view(manifest), known()).charge == Charge()


def test_units_are_compared_per_resource_as_by_the_scheduler() -> None:
    """The units of containers are added up. The units of an init container, which runs before them, are not added."""
    mig, shared = {"nvidia.com/mig-7g.40gb": 1}, {"nvidia.com/gpu.shared": 2}
    init = [container(mig), sidecar(shared)]
    request = read_request(view(pod(container(mig), container(shared), init=init)), known())
    assert request.charge == Charge(100 + 100, 40960, 100)


@pytest.mark.parametrize("amount", ["-1", "0.5", "two", 10_000_001])
def test_an_invalid_amount_is_a_fault_with_its_path(amount: object) -> None:
    [fault] = read_request(view(vcuda_pod({"nvidia.com/mig-1g.5gb": amount}))).faults
    assert fault.path == "spec.containers[0].resources.limits[nvidia.com/mig-1g.5gb]"


WORTH = "must be a mapping, for example amd.com/gpu: {cards: 1}"
SPELLING = (
    "must be the name of a resource, for example nvidia.com/gpu.shared, or of a DeviceClass, for example "
    "deviceclass/gpu.example.com"
)
BUILT_IN = "must not be listed, because the charge of this resource is built in"


@pytest.mark.parametrize(
    ("units", "fault"),
    [
        ("nvidia.com/gpu: {}", "[nvidia.com/gpu]: must not be listed, because this resource belongs to scheme hami"),
        ("nvidia.com/mig-1g.5gb: {}", "[nvidia.com/mig-1g.5gb]: must have `cards`, because this resource is a GPU"),
        (
            "deviceclass/gpu.nvidia.com: {}",
            "[deviceclass/gpu.nvidia.com]: must have `cards`, because this resource is a GPU",
        ),
        ("deviceclass/mig-manager: {}", f"[deviceclass/mig-manager]: {BUILT_IN}"),
        (f"{CLASS}a: {{}}", f"[{CLASS}a]: must be written as deviceclass/a, for both claims and pods"),
        ("amd.com/gpu: {}, amd.com/gpu: {}", "[amd.com/gpu]: duplicate key; each key must be written once"),
        (
            "amd.com/gpu: {cards: 0.1234567}",
            "[amd.com/gpu].cards: must have at most six decimals, for example 0.123457; got 0.1234567",
        ),
        ("amd.com/gpu: {cards: 0}", "[amd.com/gpu].cards: must be above 0. For a resource that is not a GPU, write {}"),
        (
            "amd.com/gpu: {cards: -1}",
            "[amd.com/gpu].cards: must be above 0. For a resource that is not a GPU, write {}",
        ),
        (
            "amd.com/gpu: {cards: 0.0000001}",
            "[amd.com/gpu].cards: must have at most six decimals, for example 0.000001; got 1E-7",
        ),
        (
            "amd.com/gpu: {memory: 1Gi}",
            "[amd.com/gpu]: `cards` is required with `memory`, for example {cards: 0.25, memory: 10Gi}",
        ),
        ("amd.com/gpu: {card: 1}", "[amd.com/gpu].card: unknown key; did you mean `cards`?"),
        ("amd.com/gpu: 1", f"[amd.com/gpu]: {WORTH}; got 1"),
        ("gpu: {cards: 1}", f'.gpu: {SPELLING}; got "gpu"'),
    ],
)
def test_a_malformed_unit_is_rejected_with_its_path(units: str, fault: str) -> None:
    assert faults_of("gpu_units", f"{{{units}}}") == [f"gpu_units{fault}"]


@pytest.mark.parametrize(
    ("key", "text", "fault"),
    [
        ("gpu_units", "[1]", f"data.gpu_units: {WORTH}; got a list"),
        (
            "gpu_units",
            "[a",
            "data.gpu_units: line 1, column 3: did not find expected ',' or ']' while parsing a flow sequence",
        ),
    ],
)
def test_a_malformed_key_is_rejected_with_its_path(key: str, text: str, fault: str) -> None:
    assert faults_of(key, text) == [fault]


def faults_of(key: str, text: str) -> list[str]:
    with pytest.raises(QuotaFault) as caught:
        parse_config({"gpu_quota": "team-a: {quot: {}}", key: text})
    first, *others = map(str, caught.value.faults)
    assert first == "team-a.quot: unknown key; did you mean `quota`?"
    return others


@pytest.mark.parametrize("domain", VENDORS)
def test_a_resource_of_a_vendor_that_no_table_has_may_be_a_gpu(domain: str) -> None:
    name = domain.replace("*", "x") if "/" in domain else f"{domain}/x"
    assert GpuResources().is_unknown_gpu(name)
    assert not known(f"{{{name}: {{}}}}").is_unknown_gpu(name)


RESOURCES = yaml.safe_load((Path(__file__).parents[1] / "data" / "gpu-resources.yaml").read_text())


@pytest.mark.parametrize("name", RESOURCES["unknown"])
def test_a_possible_gpu_that_is_in_no_table_is_found(name: str) -> None:
    assert known().is_unknown_gpu(name)


@pytest.mark.parametrize("name", RESOURCES["others"])
def test_a_resource_that_is_known_or_no_gpu_is_no_unknown_gpu(name: str) -> None:
    assert not known().is_unknown_gpu(name)


class World:
    """An API server double with the quota and a pod in team-a that requests two units, each a share of a card."""

    def __init__(self, api: ApiDouble) -> None:
        self.api = api
        self.quota = QuotaInformer(api.kube, QuotaSource(), frozenset())
        self.store = LedgerStore(api.kube, "vcuda-quota", lambda: Nodes(LABELS), self.quota.resources)
        self.pods = PodInformer(api.kube, LABELS, lambda _: None, resources=self.quota.resources)
        shared: Manifest = stored_pod({"nvidia.com/gpu.shared": 2})
        api.store(POD, {**shared, "metadata": {**shared["metadata"], "namespace": "team-a"}})

    def edit(self, units: str) -> None:
        store_quota(self.api, "team-a: {quota: {M40: 4}}", gpu_units=units)
        self.quota.reflector.relist()

    def observed(self) -> ObservedPods:
        return self.pods.observed("team-a", Nodes(LABELS))


def test_an_edit_of_only_the_units_lists_and_charges_the_pods_again(api: ApiDouble) -> None:
    """Pods that were not charged before the edit must be read again too. After it, no count may use the old values."""
    world = World(api)
    world.edit("{}")
    world.pods.reflector.relist()
    before = world.observed()
    assert (before.committed, before.config_version) == ({}, world.quota.resources().version)
    world.edit("{nvidia.com/gpu.shared: {cards: 0.25}}")
    assert world.observed().config_version == before.config_version != world.quota.resources().version
    world.pods.reflector.relist()  # in a cluster, an edit of the quota causes this LIST
    after = world.observed()
    assert (after.committed, after.config_version) == ({"M40": Charge(50, 0, 50)}, world.quota.resources().version)
    # This edit changes the value of no unit. So no LIST is needed, and the count has the new version at once.
    world.edit("{nvidia.com/gpu.shared: {cards: 0.25}}\n")
    assert world.observed().config_version == world.quota.resources().version


def test_a_count_by_older_units_lowers_no_ledger_and_a_newer_one_always_counts() -> None:
    ledger = Ledger({"M40": Charge(50)}, "100", config_version="90")
    by_older = ObservedPods("200", {}, (), config_version="80")
    assert recount(ledger, by_older) is ledger
    same = ObservedPods("100", {"M40": Charge(50)}, (), since="100", config_version="95")
    assert recount(ledger, same).config_version == "95"


def test_a_replica_counts_a_ledger_again_that_was_counted_by_older_units(api: ApiDouble) -> None:
    world, replica = World(api), Replica(api)
    world.edit("{nvidia.com/gpu.shared: {cards: 2}}")
    replica.store.resources = world.quota.resources
    replica.store.write("team-a", Ledger({}, "103", config_version="1"), replica.store.open("team-a"))
    assert isinstance(replica.charge("uid-1"), Rejected)


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
NAMES = st.sampled_from(["amd.com/gpu", "nvidia.com/gpu", "deviceclass/a", "cards", "memory"]) | st.text(max_size=8)
TREES = st.recursive(PLAIN, lambda each: st.lists(each, max_size=3) | st.dictionaries(NAMES, each, max_size=3))


@given(TREES.map(json.dumps) | st.text(max_size=40))
def test_any_text_is_read_or_rejected_with_a_path(text: str) -> None:
    read = GpuResources()
    faults: tuple[Fault, ...] = ()
    try:
        read = parse_config({"gpu_quota": "{}", "gpu_units": text}).resources
    except QuotaFault as rejected:
        faults = rejected.faults
    assert all(fault.path.removeprefix("data.").startswith("gpu_units") and fault.message for fault in faults)
    assert all(value.cores > 0 or value == Charge() for value in read.own_units.values())
