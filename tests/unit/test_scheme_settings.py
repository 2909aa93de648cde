"""Tests of a cluster's settings for schemes (the resource names of one vendor).

In some tests, the webhook of HAMi or vgpu-manager changes the pods too. For these tests, tests/data/peers/webhooks.json
has pods' limits, values of ``gpu_schemes``, JSON Patches of the vendor's webhook, and the expected charges (cores, MiB
and hundredths of card memory) and schedulers.
"""

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from tests.both_calls import Webhook, patched
from tests.builders import Manifest, container, held_to, pod, policy_for, vcuda_pod, view
from tests.tables import cases
from vcuda.allocations.stored_pods import read_allocation
from vcuda.errors import QuotaFault
from vcuda.placement.patches import PinSettings
from vcuda.quota.model import Charge, Limit, NamespaceQuota
from vcuda.requests.config import parse_config
from vcuda.requests.pod_request import read_request
from vcuda.requests.resources import GpuResources
from vcuda.requests.schemes import SCHEMES

RECORDED = json.loads((Path(__file__).parent.parent / "data" / "peers" / "webhooks.json").read_text())
QUOTA = NamespaceQuota({"M40": Limit(800)})


def known(schemes: str, **data: str) -> GpuResources:
    return parse_config({"gpu_quota": "{}", "gpu_schemes": schemes, **data}).resources


def webhook(schemes: str, scheduler: str | None = None, **data: str) -> Webhook:
    policy = policy_for(QUOTA)
    return Webhook(
        msgspec.structs.replace(policy, resources=known(schemes, **data), pin_settings=PinSettings(scheduler=scheduler))
    )


@pytest.mark.parametrize("order", ["theirs first", "ours first", "ours alone"])
@pytest.mark.parametrize("row", RECORDED, ids=lambda row: row["name"])
def test_charge_pin_and_scheduler_are_the_same_in_either_order_of_the_webhooks(row: dict[str, Any], order: str) -> None:
    """If another webhook changes a pod after /mutate, the API server calls /mutate again (reinvocationPolicy), which
    must change nothing.
    """
    asked, sent = webhook(row["settings"]), vcuda_pod(row["limits"])
    theirs = row["patch"] if order != "ours alone" else []
    result = patched(sent, theirs) if order == "theirs first" else sent
    result = patched(result, asked.mutate(result).patch)
    if order == "ours first":
        result = patched(result, theirs)
        result = patched(result, asked.mutate(result).patch)
    assert list(asked.mutate(result).patch) == []
    answer = asked.validate(result)
    assert (answer.allowed, answer.model, answer.message) == (True, "M40", "")
    assert asyncio.run(asked.ledgers.usage("team-a"))["M40"].used == Charge(*row["charge"])
    assert result["spec"].get("schedulerName", "") == row["scheduler"]


def test_the_general_scheduler_places_pods_whose_scheme_has_none() -> None:
    asked = webhook("hami: {scheduler: hami-scheduler}", "vcuda-scheduler")
    placed = {}
    for name in ("nvidia.com/gpu", "nvidia.com/vgpu-number"):
        sent = vcuda_pod({name: 1})
        placed[name] = patched(sent, asked.mutate(sent).patch)["spec"]["schedulerName"]
    assert placed == {"nvidia.com/gpu": "hami-scheduler", "nvidia.com/vgpu-number": "vcuda-scheduler"}
    wrong = vcuda_pod({"nvidia.com/gpu": 1}, affinity=held_to("M40"), schedulerName="default-scheduler")
    assert "spec.schedulerName is not the scheduler of vcuda pods" in asked.validate(wrong).message


@pytest.mark.parametrize("call", ["mutate", "validate"])
def test_a_pod_of_two_schedulers_is_rejected(call: str) -> None:
    asked = webhook("{hami: {scheduler: a}, vgpu-manager: {scheduler: b}}")
    both = pod(container({"nvidia.com/gpu": 1}), container({"nvidia.com/vgpu-number": 1}), affinity=held_to("M40"))
    answer = getattr(asked, call)(both)
    assert answer.message == (
        "malformed GPU request: spec.schedulerName: no scheduler can place a pod with resources of hami and "
        "vgpu-manager, because their schedulers differ. Request resources of only one vendor"
    )


SHARE = {"nvidia.com/gpumem": 50, "nvidia.com/gpucores": 10}
NAME_IT = "add this line to `gpu_schemes` in the quota ConfigMap: `hami: {resources: {count: nvidia.com/vgpu}}`"


@cases(
    "units, limits, told",
    unknown=("", {"nvidia.com/vgpu": 4, **SHARE}, NAME_IT),
    with_a_value_of_its_own=("{nvidia.com/vgpu: {cards: 0.1}}", {"nvidia.com/vgpu": 4, **SHARE}, NAME_IT),
    without_a_value=("{nvidia.com/vgpu: {}}", {"nvidia.com/vgpu": 4, "nvidia.com/gpucores": 10}, NAME_IT),
    the_count_is_there=("{nvidia.com/vgpu: {}}", {"nvidia.com/vgpu": 4, "nvidia.com/gpu": 1, **SHARE}, None),
    no_share_beside=("{nvidia.com/vgpu: {cards: 1}}", {"nvidia.com/vgpu": 4}, None),
    another_domain=("{acme.com/nic: {}}", {"acme.com/nic": 4, **SHARE}, None),
    none_of_it=("", {"nvidia.com/vgpu": 0, **SHARE}, None),
)
def test_a_share_with_a_resource_that_may_be_its_count_is_rejected_with_the_setting_to_make(
    units: str, limits: dict[str, int], told: str | None
) -> None:
    answer = webhook("", gpu_units=units).mutate(vcuda_pod(limits))
    assert (answer.allowed, told is None or told in answer.message) == (told is None, True)


NOT_A_NAME = "must be the name of a resource, for example nvidia.com/vgpu"


@cases(
    "text, fault",
    unknown_scheme=("hamis: {scheduler: a}", ".hamis: unknown scheme; did you mean `hami`?"),
    no_scheme=("x: {}", f".x: unknown scheme; supported schemes: {', '.join(scheme.name for scheme in SCHEMES)}"),
    no_mapping=("hami: 1", ".hami: must be a mapping, for example hami: {scheduler: hami-scheduler}; got 1"),
    unknown_key=("hami: {schedulr: a}", ".hami.schedulr: unknown key; did you mean `scheduler`?"),
    unknown_resource=("hami: {resources: {counts: a/b}}", ".hami.resources.counts: unknown key; did you mean `count`?"),
    no_key=(
        "hami: {x: 1}",
        (
            ".hami.x: unknown key; supported keys: `resources`, `memory_mib`, `default_cores`, `scheduler`, "
            "`service_accounts`"
        ),
    ),
    no_domain=("hami: {resources: {count: gpu}}", f'.hami.resources.count: {NOT_A_NAME}; got "gpu"'),
    a_number=("hami: {resources: {count: 1}}", f".hami.resources.count: {NOT_A_NAME}; got 1"),
    a_slice=(
        "hami: {resources: {count: nvidia.com/mig-1g.5gb}}",
        ".hami.resources.count: must be a resource that only this scheme has; the charge of this resource is built in",
    ),
    of_another_scheme=(
        "hami: {resources: {count: nvidia.com/vgpu-number}}",
        ".hami.resources.count: nvidia.com/vgpu-number is already a resource of scheme vgpu-manager",
    ),
    twice=(
        "hami: {resources: {count: nvidia.com/gpumem}}",
        ".hami.resources.count: nvidia.com/gpumem is already a resource of scheme hami",
    ),
    fixed=(
        "gpu-manager: {memory_mib: 1}",
        ".gpu-manager.memory_mib: must not be set, because this setting is fixed in gpu-manager",
    ),
    it_has_none=(
        "vgpu-manager: {resources: {memory_percentage: a.b/c}}",
        ".vgpu-manager.resources.memory_percentage: must not be set, because vgpu-manager has no such resource",
    ),
    no_memory=("hami: {memory_mib: 0}", ".hami.memory_mib: must be a whole number of MiB from 1 to 1048576; got 0"),
    a_part=(
        "hami: {memory_mib: 0.5}",
        ".hami.memory_mib: must be a whole number of MiB from 1 to 1048576; got 0.5",
    ),
    no_scheduler=(
        'hami: {scheduler: ""}',
        '.hami.scheduler: must be the name of a scheduler, for example hami-scheduler; got ""',
    ),
    no_service_account=(
        "hami: {service_accounts: [hami]}",
        '.hami.service_accounts[0]: must be a service account, for example hami-system/hami-scheduler; got "hami"',
    ),
)
def test_a_malformed_setting_is_rejected_with_its_path(text: str, fault: str) -> None:
    with pytest.raises(QuotaFault) as caught:
        known(f"{{{text}}}")
    assert [str(each) for each in caught.value.faults] == [f"gpu_schemes{fault}"]


TEXTS = st.sampled_from(["hami", "a.b/c", "nvidia.com/gpu", ""])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS
KEYS = st.sampled_from(["hami", "vgpu-manager", "gpu-manager", "resources", "count", "memory_mib", "scheduler"])
TREES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner))


@given(TREES | st.dictionaries(KEYS, st.dictionaries(KEYS, TREES)))
def test_any_text_gives_settings_or_faults(tree: object) -> None:
    try:
        schemes = known(json.dumps(tree)).schemes
    except QuotaFault as rejection:
        paths = [fault.path for fault in rejection.faults]
    else:
        paths = [f"gpu_schemes.{name}" for name in {name for scheme in schemes for name in scheme.resources}]
        assert len(paths) == sum(len(scheme.resources) for scheme in schemes)
    assert all(path.startswith(("gpu_schemes", "data.gpu_schemes")) for path in paths)


def test_a_name_in_two_tables_is_rejected_and_a_replaced_name_is_free() -> None:
    renamed = "hami: {resources: {count: nvidia.com/vgpu, cores: nvidia.com/vcores}}"
    with pytest.raises(QuotaFault, match=r"nvidia\.com/vgpu\]: must not be listed, because this resource"):
        known(renamed, gpu_units="nvidia.com/vgpu: {cards: 1}")
    free = known(renamed, gpu_units="nvidia.com/gpucores: {}")
    assert (free.is_unknown_gpu("nvidia.com/gpucores"), free.counts("nvidia.com/vcores")) == (False, True)
    swapped = "hami: {resources: {memory: nvidia.com/gpucores, cores: nvidia.com/gpumem}}"
    assert read_request(view(vcuda_pod(SHARE)), known(swapped)).charge == Charge(50, 10)


def test_records_of_a_renamed_scheme_are_its_own_once() -> None:
    manifest: Manifest = vcuda_pod({"nvidia.com/vgpu": 1}, annotations={"hami.io/vgpu-node": "a"})
    request = read_request(view(manifest), known(RECORDED[2]["settings"]))
    found = read_allocation(view(manifest), request.schemes)
    assert found
    assert [scheme.name for scheme in found.schemes] == ["hami"]


def test_settings_of_every_pair_of_schemes_without_a_common_name_are_valid() -> None:
    for first, second in itertools.permutations(("hami", "vgpu-manager"), 2):
        both = known(f"{{{first}: {{resources: {{count: a.com/x}}}}, {second}: {{resources: {{count: a.com/y}}}}}}")
        assert (both.scheme_of["a.com/x"].name, both.scheme_of["a.com/y"].name) == (first, second)
