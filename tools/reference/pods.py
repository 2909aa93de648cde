"""The rejections and warnings of pods in docs/reference.md. The code produces these messages from example pods."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from typing import Any

import msgspec

from tools.reference.examples import (
    LABELS,
    MODEL,
    POOL,
    Manifest,
    container,
    pod,
    policy_for,
    requires,
    review,
)
from tools.reference.pod_answers import BIG, CARD, NO_HINTS, NODES, SMALL, Answering, charge
from tools.reference.told import Chapter, Told
from tools.reference.undecided import registered, undecided
from vcuda.admission_review import AdmissionResponse, ReviewDeadline
from vcuda.errors import Unavailable
from vcuda.placement.choice import Choice, Option, Rule, choose
from vcuda.placement.nodes import CORDON, NOT_READY, Nodes, NodeStates, Taint
from vcuda.placement.patches import Hints
from vcuda.placement.placement import HOSTNAME, MAX_CHOICE, Candidates
from vcuda.placement.registers import Card
from vcuda.quota.document import parse_quota
from vcuda.quota.model import Charge, Limit, Mode, NamespaceQuota, Usage
from vcuda.quota.shortage import Shortage, exceeded
from vcuda.quota.terms import MODELS_ANNOTATION
from vcuda.requests.config import parse_config
from vcuda.requests.resources import CLASS_RESOURCE, CardModels, ProductRow
from webhook.ledger.charging import PutOff
from webhook.ledger.ledgers import MemoryLedgers
from webhook.review.answers import DELETED_RELEASED, mutate
from webhook.review.decisions import SKIPPED_SECONDS, Creation, RecentChoices, SkippedMutate

TEAM = NamespaceQuota({"M40": Limit(800), "P100": Limit(250)}, pools=("public",))
DATED = parse_quota(
    "team-a: {quota: {M40: {cards: 0.5, memory: 8Gi}}, time_zone: Europe/Berlin, grants: ["
    "{M40: {cards: 1, memory: 16Gi}, until: 2026-12-01}, {M40: {cards: 4, memory: 64Gi}, weekly: Sat-Sun}]}"
).namespaces["team-a"]
WARNS = NamespaceQuota({"M40": Limit(100)}, mode=Mode.WARN)
FORGED = {"tencent.com/gpu-assigned": "true"}
SHARE = {"nvidia.com/gpu": 1, "nvidia.com/gpucores": 10, "nvidia.com/gpumem": 1000}
IN_MIG_MODE = (Card("GPU-0", "M40", mig=True),)
SLICED = Nodes.of({"one": {MODEL: "M40"}}, LABELS, {"one": {"hami": IN_MIG_MODE}})
DISCOVERED = Nodes.of({"one": {MODEL: "M40", POOL: "public"}, "three": {MODEL: "A100"}}, LABELS)
WITH_HAMI = {"one": {"hami": (Card("GPU-0", "NVIDIA A100"),)}}
PLAIN = Nodes.of({"one": {MODEL: "A100"}, "two": {MODEL: "M40"}}, LABELS, WITH_HAMI)
HALF = Nodes.of({"one": {MODEL: "M40", HOSTNAME: "one"}, "two": {MODEL: "M40"}}, LABELS, WITH_HAMI)
ONLY_HAMI = Nodes.of({"one": {MODEL: "M40"}}, LABELS, WITH_HAMI)
TO_HAMI = Hints(of_schemes={"hami": "hami-scheduler"})
ELSEWHERE = Nodes.of({"one": {MODEL: "A100"}}, LABELS)
SIZED = Nodes.of({}, LABELS, named=CardModels({"M40": ProductRow(memory=40960)}))
TWO_TYPES = (Card("GPU-0", "Tesla M40 24GB", mig=True), Card("GPU-1", "Tesla P40"))
MIXED = Nodes.of({"one": {MODEL: "M40"}}, LABELS, {"one": {"hami": TWO_TYPES}})

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
        Chapter("Rejected by quota: 403", LIMITED, tuple(_rejected())),
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


def _answer(
    limits: Mapping[str, Any],
    quota: NamespaceQuota,
    nodes: Nodes = NODES,
    *,
    hints: Hints = NO_HINTS,
    **fields: Any,
) -> AdmissionResponse:
    """Return the answer of the webhook's path /mutate for an example pod."""
    policy = msgspec.structs.replace(policy_for(quota, nodes), hints=hints)
    return asyncio.run(
        mutate(
            Creation(
                review(pod(container(limits), **fields)), policy, MemoryLedgers(), RecentChoices(), ReviewDeadline()
            )
        )
    )


def _put_off(shortage: Shortage, *, counted: bool = True) -> str:
    """Return the webhook's message about a pod that has no room in the ledger now, but may fit when it is retried."""
    return charge(CARD, SMALL, Answering(PutOff((shortage,), counted=counted))).message


def _rejected() -> list[Told]:
    short = Shortage("M40", Charge(200, 0, 200), Usage(Charge(700, 0, 700)), Limit(800))
    for_now = Shortage("M40", Charge(200, 0, 200), Usage(Charge(700), Charge(100)), Limit(800))
    reserved = Shortage("M40", Charge(100), Usage(Charge(800), Charge(100), reserved=Charge(200)), Limit(800))
    running = Shortage("M40", Charge(100, 0, 100), Usage(Charge(800), terminating=Charge(200)), Limit(800))
    in_total = Shortage("M40", Charge(100, 0, 100), Usage(Charge(2000)), Limit(2000), of_total=True)
    memory = Shortage("M40", Charge(30, 4096), Usage(Charge(30, 6144)), Limit(800, 8192))
    model = {"nvidia.com/gpu": 1}
    return [
        Told(
            exceeded("team-a", short),
            "Wait until a pod of the namespace ends. The controller then makes rejected workloads"
            " retry at once. Or request less, or ask for more quota. If the pod may use several"
            " models, the message has one part of this form for each model.",
        ),
        Told(
            exceeded("team-a", in_total),
            "All GPU models together use up [`total`](quotas.md#the-total-of-all-models) of the quota entry. Wait until"
            " any GPU pod of the namespace ends, request less, or ask for a higher `total`. If both limits bind, the"
            " message names the model.",
        ),
        Told(
            _put_off(for_now),
            "The pod would fit without the pending charges, the charges of objects"
            " that were admitted and are not seen stored yet. A pending charge becomes used when its"
            " object is stored, usually at once. If another webhook rejected the object after it was"
            " charged, the charge is released after `--storable-seconds`.",
        ),
        Told(
            _put_off(reserved),
            "`reserved` is quota that webhook replicas hold in advance while many pods are created. The replicas now"
            " release that quota, because a pod needs it.",
        ),
        Told(
            _put_off(short),
            "The ledger still has the charges of deleted pods. Within seconds, the"
            " controller recounts"
            " the ledger and makes workloads retry. If this lasts, no controller runs: see [a busy"
            " ledger](troubleshooting.md#a-busy-ledger). Without a controller, a webhook replica recounts the ledger"
            " after 32 s.",
        ),
        Told(
            _put_off(short, counted=False),
            "The API server took too long to list the namespace's pods, or this"
            " replica of the webhook has not read the last edit of the quota. The pod's controller"
            " retries by itself.",
        ),
        Told(
            f"{exceeded('team-a', running)}; {DELETED_RELEASED}",
            "Wait. `terminating` is the charge of pods that were deleted by force while they ran. The"
            " containers of these pods may run until the end of their grace period, and the pods stay"
            " charged until then.",
        ),
        Told(
            exceeded("team-a", memory),
            "As for cards: wait until a pod of the namespace ends, request less memory, or ask for"
            " more quota. `kubectl gpuquota` shows the usage. `pending` is the charge of objects that"
            " were admitted recently. If an object is never stored, its charge is released after 75"
            " seconds.",
        ),
        Told(
            _answer({"tencent.com/vcuda-core": 900}, TEAM).message,
            ("Request less: the pod's request alone exceeds the limit."),
        ),
        Told(
            charge({"tencent.com/vcuda-core": 400}, DATED).message,
            "Wait until the grant (quota for a limited time) begins. The controller then makes the workload retry.",
        ),
        Told(
            _answer(CARD, NamespaceQuota({})).message,
            "Ask your administrator for quota: the namespace's quota has no GPU model.",
        ),
        Told(
            _answer(model, TEAM, annotations={"nvidia.com/use-gputype": "A100"}).message,
            "Correct the annotation that the message names, or ask for quota of the excluded model.",
        ),
        Told(
            _answer(model, TEAM, annotations={"nvidia.com/use-gputype": "A100," * MAX_CHOICE}).message,
            "Name fewer types of cards in the annotation.",
        ),
        Told(
            _answer(CARD, TEAM, DISCOVERED, annotations={MODELS_ANNOTATION: "A100"}).message,
            "Name GPU models of the namespace's quota in the annotation, or ask for quota of the named model.",
        ),
        Told(
            _answer(CARD, msgspec.structs.replace(TEAM, one_model=True)).message,
            "Name one GPU model by the annotation, in the pod template if a workload creates the pod."
            " The namespace's quota requires this by `one_model: true`.",
        ),
        Told(
            _answer(CARD, TEAM, nodeSelector={MODEL: "A100"}).message,
            "Correct the pod's node selector or node affinity, or ask for quota of the model that they select.",
        ),
        Told(
            _answer(CARD, TEAM, nodeName="two").message,
            "The node that the pod names is in a pool that the namespace must not use. Remove"
            " `nodeName`, or ask your administrator for the pool.",
        ),
        Told(
            _answer(SHARE, SMALL, SLICED).message,
            "Request another model. On a card in MIG mode, HAMi gives the pod a whole MIG slice, which may be"
            " larger than"
            " the requested share. If only some cards of a model are in MIG mode, `/mutate` restricts shares to the"
            " other cards.",
        ),
        Told(
            _answer(SHARE, SMALL, SLICED, annotations={"nvidia.com/vgpu-mode": "mig"}).message,
            "Remove `mig` from the annotation, and use a model with cards that are not in MIG mode.",
        ),
        Told(
            _answer({"nvidia.com/mig-1g.5gb": 1}, NamespaceQuota({"A30": Limit(400)})).message,
            "Request a profile that the cards of the model have, or another model. If the cards have the profile, ask"
            " your administrator to state their MIG slices.",
        ),
        Told(
            charge(CARD, TEAM, affinity=requires("M40", "P100")).message,
            "Check that a replica of the webhook is ready, and that no other webhook reverts the"
            " changes of `/mutate`. Then create the pod again. Or pin the pod to one model yourself,"
            " by node affinity.",
        ),
        Told(
            charge(CARD, SMALL, affinity=None, skipped=SkippedMutate()).message,
            "Clients retry by themselves. If the message stays, check that a replica of the webhook is ready.",
        ),
        Told(
            charge(CARD, SMALL, affinity=None, skipped=_failed()).message,
            "The webhook was called, and could not choose a model. Clients retry by themselves. If the reason contains"
            " `is forbidden`, see [a role is missing](troubleshooting.md#a-role-is-missing).",
        ),
        Told(
            charge(CARD, SMALL, affinity=None, skipped=_long_skipped()).message,
            "Check that `/mutate` is registered, and that a replica of the webhook answers it.",
        ),
        Told(
            charge(CARD, TEAM).message,
            "Do as for a pod that is not pinned to a model. This pod is not restricted to the pool of its namespace.",
        ),
        Told(
            charge(CARD, SMALL, hints=Hints(scheduler="gpu-scheduler"), nodeName="one", annotations=FORGED).message,
            "Do as for a pod that is not pinned to a model. If your manifest has allocation"
            " annotations, remove them, because only schedulers and device plugins may write them. To"
            " choose a node, require its name by node affinity.",
        ),
        Told(
            charge(SHARE, SMALL, nodes=MIXED).message,
            "Do as for a pod that is not pinned to a model. HAMi and vgpu-manager choose a card of"
            " the node by annotations of the pod. `/mutate` sets these annotations, so that no card"
            " of another model is chosen.",
        ),
        Told(
            _answer({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 50000}, SMALL, SIZED).message,
            "Request less memory of each card, or use a model with larger cards. `gpu_models` has the size of"
            " the cards.",
        ),
        Told(
            _answer(SHARE, SMALL, PLAIN).message,
            "No node of the model runs the vendor's device plugin. Request whole cards, or another model.",
        ),
        Told(
            _answer({"nvidia.com/gpu": 1}, SMALL, ONLY_HAMI, hints=TO_HAMI, schedulerName="volcano").message,
            "Leave `schedulerName` out, so that HAMi's scheduler places the pod, or request a model that has nodes"
            " without HAMi.",
        ),
        Told(
            _answer(
                {"nvidia.com/gpu": 1}, SMALL, HALF, schedulerName="volcano", nodeSelector={HOSTNAME: "one"}
            ).message,
            "Leave `schedulerName` out, or select nodes without HAMi.",
        ),
        *(
            Told(
                _answer({resource: 1}, msgspec.structs.replace(SMALL, require_nodes=True), ELSEWHERE).message,
                "The quota has `require_nodes: true`, and no node of the model offers what the pod requests. Wait"
                " until a node offers it, or request another model or resource.",
            )
            for resource in ("nvidia.com/gpu", f"{CLASS_RESOURCE}gpu.nvidia.com")
        ),
        Told(
            charge({"nvidia.com/gpu": 1}, SMALL, nodes=HALF, schedulerName="volcano").message,
            "Check that a replica of the webhook is ready, and that no other webhook reverts the"
            " changes of `/mutate`. The pod names its own scheduler. So `/mutate` excludes nodes with"
            " HAMi, where only HAMi's scheduler may place pods.",
        ),
        Told(
            charge(CARD, SMALL, hints=Hints(scheduler="gpu-scheduler"), schedulerName="volcano").message,
            "Remove `schedulerName`. Another scheduler than the one in `--scheduler-name` could allocate cards"
            " that other"
            " pods already use.",
        ),
    ]


def _failed() -> SkippedMutate:
    skipped = SkippedMutate()
    skipped.add_failure("team-a", Unavailable("the API server did not answer"))
    return skipped


def _long_skipped() -> SkippedMutate:
    """Return a record of skipped pods that is older than the time in which such pods are retried."""
    skipped = SkippedMutate(itertools.count(0, SKIPPED_SECONDS / 4).__next__)
    while skipped.may_pass("team-a"):
        pass
    return skipped


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
    told = [Told(_answer(limits, TEAM, **fields).message) for limits, fields in faulty]
    return told + [Told(_beside(manifest)) for manifest in _BESIDE]


def _beside(manifest: Manifest) -> str:
    """Return the message about a pod that could use GPUs which it does not request."""
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
            " over because of its nodes. The reasons are those of the rows above.",
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
    full = [Option(model, card, Limit(100), Usage(card)) for model in ("H100", "A100", "L40S", "A10")]
    empty = [Option(model, card, Limit(800), Usage()) for model in ("T4", "V100")]
    away = msgspec.structs.replace(empty[0], model="L4", ready=False, waits=lambda: "its 2 nodes are cordoned")
    states = NodeStates({CORDON: 1, Taint(NOT_READY): 2, Taint("dedicated"): 4}, {"nvidia.com/gpu": {8: 7}}, unknown=0)
    obstacles = [states.obstacle(nodes, {"nvidia.com/gpu": 8}) for nodes in (0b11111, 0b1000)]
    waiting = [msgspec.structs.replace(away, waits=lambda each=each: each) for each in obstacles]
    every += [([*full, *empty], Rule.ORDER), ([away, *empty], Rule.ANNOTATION)]
    every += [([each], Rule.DOCUMENT) for each in waiting]
    choices = [choose(options, rule) for options, rule in every]
    return [*told, *(choice.forecast for choice in choices if isinstance(choice, Choice))]


def _dry_run(limits: Mapping[str, Any], quota: NamespaceQuota) -> str:
    request = review(pod(container(limits)), dry_run=True)
    return str(asyncio.run(mutate(Creation(request, policy_for(quota, NODES), MemoryLedgers()))).warnings[-1])
