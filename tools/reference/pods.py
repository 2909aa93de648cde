"""The rejections and warnings of pods in docs/reference.md. The code produces these messages from example pods."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from tools.reference.examples import Manifest, container, pod, policy_for, review
from tools.reference.pod_answers import BIG, CARD, DATED, NODES, SMALL, TEAM, charge, mutated
from tools.reference.pod_rejections import rejected
from tools.reference.told import Chapter, Told
from tools.reference.undecided import registered, undecided
from tools.reviews import mutate
from vcuda.placement.choice import Choice, Option, Rule, choose
from vcuda.placement.nodes import CORDON, NOT_READY, NodeStates, Taint
from vcuda.placement.placement import Candidates
from vcuda.quota.model import Charge, Limit, Mode, NamespaceQuota, Team, Usage
from vcuda.quota.well_known import MODELS_ANNOTATION
from vcuda.requests.config import parse_config
from webhook.ledger.ledgers import MemoryLedgers
from webhook.review.decisions import Creation

WARNS = NamespaceQuota({"M40": Limit(100)}, mode=Mode.WARN)

DENIED = '`admission webhook "validate.quota.vcuda.io" denied the request:` (or `mutate`)'
LIMITED = (
    f"If the quota rejects a pod, kubectl prints one of these messages after {DENIED}. If a workload such as a"
    " ReplicaSet or Job creates the pod, the Events of the workload have the same text (`kubectl describe`)."
)
INVALID = (
    "If a pod's GPU request is malformed, kubectl prints `The request is invalid:`, and then the part of the message"
    " after `malformed GPU request:`. This part has one line for each fault, with the path of the field and the"
    " correction. The Events of a workload and `kubectl gpuquota explain` show the whole message,"
    f" after {DENIED}. The API server itself rejects some malformed quantities before it calls the webhook, so only the"
    " offline check (`vcuda-webhook check`) prints messages about these quantities."
)


def chapters() -> tuple[Chapter, ...]:
    return (
        Chapter("Rejected by quota: 403", LIMITED, tuple(rejected())),
        Chapter(
            "Malformed requests: 422",
            INVALID,
            tuple(_malformed()),
        ),
        Chapter(
            "Not decided: 429, 500 and 503",
            "If the webhook cannot decide about a pod, it never admits the pod. Kubernetes'"
            " controllers retry by themselves. After a 429, kubectl retries too. A message that begins with"
            " `exceeded quota` has the status 403.",
            tuple(undecided()),
        ),
        Chapter(
            "Warnings",
            "kubectl prints these warnings about a pod after `Warning:`. The pod is admitted.",
            tuple(_warnings()),
        ),
        Chapter(
            "A wrong registration",
            (
                "The webhook answers 400 to a review that a correct webhook configuration does not send."
                " Correct the webhook configuration of vcuda quota."
            ),
            tuple(registered()),
        ),
    )


def _malformed() -> list[Told]:
    share = {"tencent.com/vcuda-core": 30, "tencent.com/vcuda-memory": 8}
    whole = {"tencent.com/vcuda-core": 200}
    limit = "tencent.com/vcuda-core-limit"
    faulty: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"tencent.com/vcuda-core": 150}, {}),
        ({"tencent.com/vcuda-core": 30}, {}),
        ({"nvidia.com/vcuda-core": 30}, {}),
        ({"tencent.com/vcuda-memory": 8}, {}),
        ({"nvidia.com/gpu": 1, "nvidia.com/gpucores": 150}, {}),
        ({"nvidia.com/gpu": 1, "nvidia.com/gpumem-percentage": 120}, {}),
        ({"tencent.com/vcuda-core": "-1"}, {}),
        ({"tencent.com/vcuda-core": "1.5"}, {}),
        ({"tencent.com/vcuda-core": "many"}, {}),
        ({"tencent.com/vcuda-core": "1E20"}, {}),
        ({**share, "nvidia.com/gpu": 1}, {}),
        (share, {"annotations": {limit: "20"}}),
        *((share, {"annotations": {MODELS_ANNOTATION: text}}) for text in ("P10O", "T4", "M40,,P100", "M40," * 600)),
        (whole, {"annotations": {limit: "50"}}),
        (CARD, {"terminationGracePeriodSeconds": 3600}),
    ]
    told = [Told(mutated(limits, TEAM, **fields).message) for limits, fields in faulty]
    return told + [Told(_beside(manifest)) for manifest in _BESIDE]


def _beside(manifest: Manifest) -> str:
    """Return the message about a pod that could use GPUs without requesting any."""
    schedulers = "{hami: {scheduler: hami-scheduler}, vgpu-manager: {scheduler: vgpu-scheduler}}"
    resources = parse_config({"gpu_quota": "{}", "gpu_schemes": schedulers}).resources
    policy = msgspec.structs.replace(policy_for(TEAM), resources=resources)
    return asyncio.run(mutate(Creation(review(manifest), policy, MemoryLedgers()))).message


_SHARE = {"nvidia.com/vcuda-core": 20, "nvidia.com/vcuda-memory": 100}
_HAMI_SHARE = {"nvidia.com/gpu": 1, "nvidia.com/gpucores": 20, "nvidia.com/gpumem": 1000}
_BESIDE = [
    pod(container({"nvidia.com/gpu.shared": 1})),
    pod(container({"deviceclass.resource.kubernetes.io/mig.nvidia.com": 1})),
    pod(container({"nvidia.com/mig-9g.5gb": 1})),
    pod(container({}), resourceClaims=[{"name": "gpu"}], runtimeClassName="nvidia"),
    pod(container({"nvidia.com/gpu": 1}), metadata={"finalizers": ["orphan"]}),
    pod(container({}, securityContext={"privileged": True})),
    pod(container({}, securityContext={"windowsOptions": {"hostProcess": True}})),
    pod(container({}, env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}])),
    pod(container({}, env=[{"name": "NVIDIA_MIG_CONFIG_DEVICES", "value": "all"}])),
    pod(container({}, env=[{"name": "CUDA_VERSION", "value": "12.4"}])),
    pod(container({}), runtimeClassName="nvidia"),
    pod(container(_SHARE, env=[{"name": "CUDA_DISABLE_CONTROL", "value": "true"}])),
    pod(container(_SHARE, env=[{"name": "GPU_CORE_UTILIZATION_POLICY", "value": "disable"}])),
    pod(container(_HAMI_SHARE, env=[{"name": "CUDA_DEVICE_MEMORY_LIMIT_0", "value": "80g"}])),
    pod(container(_HAMI_SHARE, env=[{"name": "CUDA_DEVICE_SM_LIMIT", "value": "100"}])),
    pod(container(_HAMI_SHARE, env=[{"name": "CUDA_DEVICE_MEMORY_SHARED_CACHE", "value": "/own"}])),
    pod(container(_HAMI_SHARE, volumeMounts=[{"name": "own", "mountPath": "/etc/ld.so.preload"}])),
    pod(container(_SHARE), annotations={"nvidia.com/vgpu-compute-policy": "none"}),
    pod(container({}), annotations={"gpu-fraction": "0.5"}),
    pod(container({}), annotations={"nvidia.cdi.k8s.io/container.main": "nvidia.com/gpu=all"}),
    pod(container({"nvidia.com/vgpu": 1, "nvidia.com/gpumem": 100})),
    pod(container({"nvidia.com/gpu": 1}), container({"nvidia.com/vgpu-number": 1})),
]


def _warnings() -> list[Told]:
    ledgers = MemoryLedgers()
    warned = charge({"tencent.com/vcuda-core": 200}, WARNS, ledgers).warnings
    bent = charge({"tencent.com/vcuda-core": 150}, WARNS).warnings
    nearly = charge(CARD, SMALL).warnings
    ending = charge(CARD, DATED).warnings
    told = [
        Told(
            warned[0],
            "Reduce the usage of the namespace before its mode becomes `enforce`, because pods over the"
            " limit are then rejected.",
        ),
        Told(
            bent[0],
            "Correct the pod before the mode of its namespace becomes `enforce`, because the pod is then rejected.",
        ),
        Told(nearly[0], "This warning appears when 90 % of a limit are used. The next pod may be rejected."),
        Told(
            ending[0],
            "Finish the work before the grant ends, or ask for a longer grant. With"
            " `--evict-violations`, the controller evicts pods that do not fit after that.",
        ),
    ]
    return [
        *told,
        *(
            Told(
                forecast,
                "You need not do anything. A dry run gets this warning, for example by `kubectl gpuquota explain`.",
            )
            for forecast in _forecasts()
        ),
        Told(
            Choice("L4", "the only possible model, 4 cards of 4 cards free; the pod must wait", by_nodes=True).notice,
            "The pod is admitted. This warning appears if the pod must wait for a node, or if another model was passed"
            " over because of its nodes. A dry run gets the same reasons in a warning that begins with `would be"
            " pinned`.",
        ),
    ]


def _forecasts() -> list[str]:
    """Return the warnings that dry runs get, about the GPU model that the pod would get."""
    two = NamespaceQuota({"M40": Limit(800), "P100": Limit(100)})
    absent = NamespaceQuota({"A100": Limit(800), "P100": Limit(100)})
    warns = NamespaceQuota({"M40": Limit(100), "P100": Limit(100)}, mode=Mode.WARN)
    asked = [(CARD, SMALL), (BIG, two), (CARD, two), (CARD, absent), (BIG, warns)]
    told = [_dry_run(limits, quota) for limits, quota in asked]
    free = Candidates(("M40", "P100"), frozenset(), {})
    every = [(free.options(two, lambda _model: Charge(100), {}), rule) for rule in Rule]
    card = Charge(100)
    small = NamespaceQuota(dict.fromkeys(("H100", "A100", "L40S", "A10"), Limit(100)))
    large = NamespaceQuota(dict.fromkeys(("T4", "V100", "L4"), Limit(800)))
    full = [Option(model, card, small, Usage(card)) for model in small.limits]
    empty = [Option(model, card, large, Usage()) for model in ("T4", "V100")]
    away = msgspec.structs.replace(empty[0], model="L4", ready=False, waits=lambda: "its 2 nodes are cordoned")
    states = NodeStates({CORDON: 1, Taint(NOT_READY): 2, Taint("dedicated"): 4}, {"nvidia.com/gpu": {8: 7}}, unknown=0)
    obstacles = [states.obstacle(nodes, {"nvidia.com/gpu": 8}) for nodes in (0b11111, 0b1000)]
    waiting = [msgspec.structs.replace(away, waits=lambda each=each: each) for each in obstacles]
    every += [([*full, *empty], Rule.ORDER), ([away, *empty], Rule.ANNOTATION)]
    every += [([each], Rule.DOCUMENT) for each in waiting]
    in_team = NamespaceQuota({"A100": Limit(400)}, team=Team("vision", {"A100": Limit(800)}))
    of_team = Option("A100", card, in_team, Usage(card, others=card))
    every += [([of_team], Rule.DOCUMENT)]
    choices = [choose(options, rule) for options, rule in every]
    return [*told, *(choice.forecast for choice in choices if isinstance(choice, Choice))]


def _dry_run(limits: Mapping[str, Any], quota: NamespaceQuota) -> str:
    request = review(pod(container(limits)), dry_run=True)
    return str(asyncio.run(mutate(Creation(request, policy_for(quota, NODES), MemoryLedgers()))).warnings[-1])
