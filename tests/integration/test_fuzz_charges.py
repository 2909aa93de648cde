"""Tests of pods that another webhook changes after /mutate: /validate rejects them, or charges
all GPUs that the changed pods request."""

import asyncio
import copy
import os
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, seed, settings, strategies as st

from tests import strategies
from tests.both_calls import EVERY_NODE, Webhook, patched
from tests.builders import MODEL, POOL, Manifest, container, requirement, sidecar, term
from tests.charging import NOTHING, UNITS, UNKNOWN, VENDOR_RESOURCES, asked_by, gives_more
from tests.integration.fuzzing import for_a_while
from tests.node_selection import may_run_on
from vcuda.placement.nodes import Nodes
from vcuda.quota.model import Limit, NamespaceQuota, Quota
from vcuda.requests.resources import CardModels, GpuResources, ProductRow
from webhook.review.context import PolicySnapshot

pytestmark = pytest.mark.slow

SHARE = 0.1
VARIANTS = 20
SEED = int(os.environ.get("FUZZ_SEED") or random.SystemRandom().randrange(2**32))

ROOM = Limit(10**12, 10**12)
QUOTAS = [NamespaceQuota({"M40": ROOM, "P100": ROOM}, pools) for pools in ((), ("public",), ("public", "lab"))]

RESOURCES = ["cpu", "example.com/nic", *VENDOR_RESOURCES, *UNITS, *UNKNOWN]
PLAIN = [0, "0", "1", 2, "20", "50", "100", "200"]
QUANTITIES = [*PLAIN, *PLAIN, "99", "150", "1e2", "100.0", "0.1k", "+50", "1Ki", "1500m", "-1", "0.5", "1e-2", "", None]
SOUND: list[dict[str, Any]] = [{}]
SOUND += [{"tencent.com/vcuda-core": "20", "tencent.com/vcuda-memory": "1"}, {"nvidia.com/vcuda-core": 200}]
SOUND += [{"nvidia.com/gpu": 2}, {"nvidia.com/gpu": "1", "nvidia.com/gpumem-percentage": "50"}]
MODELS = ["M40", "P100", "A100", "V100"]
DEVICE = 25
WITH_ROWS = GpuResources(models=CardModels({"P100": ProductRow(("v1??",), cores=DEVICE)}))
"""A row in `gpu_models` that makes V100 a model P100, of which one device is a quarter of a card."""
FORGED = ["quota.vcuda.io/model", "nvidia.com/use-gputype", "tencent.com/vcuda-core-limit", *strategies.ALLOCATIONS]
OPEN = [{}, {"matchExpressions": []}, term(requirement("zone", "Exists")), term(requirement(MODEL, "NotIn", "V100"))]

Change = Callable[[Manifest, random.Random], object]


def containers(pod: Manifest) -> list[Manifest]:
    return [*(pod["spec"].get("containers") or []), *(pod["spec"].get("initContainers") or [])]


def limits(pod: Manifest, chance: random.Random) -> dict[str, Any]:
    asking = chance.choice(containers(pod))
    asking["resources"] = resources = asking.get("resources") or {}
    kind = chance.choice(["limits", "limits", "requests"])
    resources[kind] = resources.get(kind) or {}
    found: dict[str, Any] = resources[kind]
    return found


def terms(pod: Manifest) -> list[Manifest]:
    """Return the terms of the pod's required node affinity. If it has none, return one empty term."""
    affinity = (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}
    return (affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}).get("nodeSelectorTerms") or [{}]


def asks_more(pod: Manifest, chance: random.Random) -> None:
    limits(pod, chance)[chance.choice(RESOURCES)] = chance.choice(QUANTITIES)


def asks_elsewhere(pod: Manifest, chance: random.Random) -> None:
    resources = chance.choice(containers(pod)).get("resources") or {}
    resources["limits"], resources["requests"] = resources.get("requests"), resources.get("limits")


def one_more_container(pod: Manifest, chance: random.Random) -> None:
    asking = chance.choice([*SOUND, {chance.choice(RESOURCES): chance.choice(QUANTITIES)}])
    made = chance.choice([container, sidecar])(asking, name=f"c{chance.randrange(10**6)}")
    kind = chance.choice(["containers", "initContainers"])
    of_kind = pod["spec"].get(kind) or []
    of_kind.insert(chance.randint(0, len(of_kind)), made)
    pod["spec"][kind] = of_kind


def another_start(pod: Manifest, chance: random.Random) -> None:
    chance.choice(containers(pod))["restartPolicy"] = chance.choice(["Always", "OnFailure", "always", None])


def opened(pod: Manifest, chance: random.Random) -> None:
    terms(pod).append(copy.deepcopy(chance.choice(OPEN)))


def held_otherwise(pod: Manifest, chance: random.Random) -> None:
    lines = chance.choice(terms(pod)).get("matchExpressions") or [{}]
    line = chance.choice(lines)
    change = chance.choice(["drop", "operator", "values", "key"])
    if change == "drop":
        lines.remove(line)
    else:
        other = {"operator": chance.choice(["NotIn", "Exists", "In"]), "key": chance.choice([MODEL, POOL, "zone"])}
        line[change] = other.get(change, chance.sample(MODELS, chance.randint(0, 2)))


def selected_otherwise(pod: Manifest, chance: random.Random) -> None:
    selectors = [None, {}, {MODEL: chance.choice(MODELS)}, {POOL: "public"}]
    others = [{"nodeSelector": each} for each in selectors] + [{"nodeName": name} for name in ("node-a", "", None)]
    pod["spec"].update(chance.choice(others))


def reaches_beyond(pod: Manifest, chance: random.Random) -> None:
    """Change the pod: add a field that gives access to an uncharged GPU, or a similar field that does not."""
    each = chance.choice(containers(pod))
    value = chance.choice(["all", "0", "none", "void", "", None])
    more: list[tuple[Manifest, str, Any]] = [
        (each, "env", [{"name": "A", "value": "b"}, {"name": "NVIDIA_VISIBLE_DEVICES", "value": value}]),
        (each, "securityContext", {"privileged": chance.choice([True, False, None])}),
        (pod["spec"], "runtimeClassName", chance.choice(["nvidia", "kata", None])),
        (pod["spec"], "resourceClaims", chance.choice([[], None, [{"name": "gpu"}]])),
    ]
    part, key, given = chance.choice(more)
    part[key] = given


def forged(pod: Manifest, chance: random.Random) -> None:
    notes = pod["metadata"].get("annotations") or {}
    pod["metadata"]["annotations"] = {**notes, chance.choice(FORGED): chance.choice(["P100", "0", "true", "50"])}


def emptied(pod: Manifest, chance: random.Random) -> None:
    part = chance.choice([pod["spec"], *containers(pod), *terms(pod)])
    key = chance.choice([*part, "none"])
    if chance.random() < 0.5:
        part.pop(key, None)
    else:
        part[key] = None


CHANGES: list[Change] = [asks_more, asks_more, asks_elsewhere, one_more_container, another_start]
CHANGES += [reaches_beyond, opened, held_otherwise, selected_otherwise, forged, emptied]


@pytest.mark.timeout(900)
def test_an_admitted_pod_is_charged_its_request_on_the_only_model_where_it_can_run() -> None:
    print(f"FUZZ_SEED={SEED}")
    told: Counter[str] = Counter()
    rounds = iter(range(2**32))

    def fuzz() -> None:
        @seed(SEED + next(rounds))
        @settings(max_examples=50, database=None, suppress_health_check=list(HealthCheck))
        @given(
            strategies.storable_pods(),
            st.sampled_from(QUOTAS),
            st.sampled_from([GpuResources(), WITH_ROWS]),
            st.integers(0, 2**64),
        )
        def change(pod: Manifest, quota: NamespaceQuota, known: GpuResources, number: int) -> None:
            policy = PolicySnapshot(Quota({"team-a": quota}), Nodes().named_by(known.models), resources=known)
            answer = Webhook(policy).mutate(pod)
            assume(answer.outcome == "pinned")
            accepted, chance = patched(pod, answer.patch), random.Random(number)  # noqa: S311  # a fixed seed makes the test repeatable
            for _ in range(VARIANTS):
                stored = copy.deepcopy(accepted)
                for _ in range(chance.randint(0, 4)):
                    if containers(stored):
                        chance.choice(CHANGES)(stored, chance)
                told[check(Webhook(policy), quota, stored)] += 1

        change()

    times = for_a_while(SHARE, fuzz)
    print(f"pods that were changed, in {times} rounds: {dict(told)}")
    assert told["charged"] > told["rejected"] / 20 > 0


def check(webhook: Webhook, quota: NamespaceQuota, stored: Manifest) -> str:
    verdict = webhook.validate(stored)
    usage = asyncio.run(webhook.ledgers.usage("team-a"))
    charged = {model: used.used for model, used in usage.items() if used.used.cores or used.used.memory}
    if not verdict.allowed:
        assert charged == {}
        return "rejected"
    assert not gives_more(stored)
    if asked_by(stored) == NOTHING:
        assert charged == {}
        return "not asking"
    with_rows = webhook.policy.resources is WITH_ROWS
    [(model, charge)] = charged.items()
    asked = asked_by(stored, DEVICE if with_rows and model == "P100" else 100, has_mig=model != "P100")
    assert (charge.cores, charge.memory, charge.card_memory) == asked
    for name, labels in EVERY_NODE:
        if may_run_on(stored, name, labels):
            label = labels.get(MODEL)
            assert ("P100" if with_rows and label == "V100" else label) == model
            assert not quota.pools or labels.get(POOL) in quota.pools
    return "charged"
