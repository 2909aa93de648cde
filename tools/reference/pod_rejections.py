"""The rejections of pods by quota in docs/reference.md. The code produces these messages from example pods."""

from __future__ import annotations

import itertools

import msgspec

from tools.reference.examples import LABELS, MODEL, POOL, requires
from tools.reference.pod_answers import CARD, DATED, SMALL, TEAM, Answering, charge, mutated
from tools.reference.told import Told
from vcuda.errors import Unavailable
from vcuda.placement.nodes import Nodes
from vcuda.placement.patches import PinSettings
from vcuda.placement.placement import HOSTNAME, MAX_CHOICE
from vcuda.placement.registers import Card
from vcuda.quota.model import Charge, Limit, NamespaceQuota, Usage
from vcuda.quota.shortage import Shortage, exceeded
from vcuda.quota.well_known import MODELS_ANNOTATION
from vcuda.requests.resources import CLASS_RESOURCE, CardModels, ProductRow
from webhook.caches import SKIPPED_SECONDS, SkippedMutate
from webhook.ledger.charging import PutOff
from webhook.review.answers import DELETED_RELEASED

FORGED = {"tencent.com/gpu-assigned": "true"}
SHARE = {"nvidia.com/gpu": 1, "nvidia.com/gpucores": 10, "nvidia.com/gpumem": 1000}
IN_MIG_MODE = (Card("GPU-0", "M40", mig=True),)
SLICED = Nodes.of({"one": {MODEL: "M40"}}, LABELS, {"one": {"hami": IN_MIG_MODE}})
DISCOVERED = Nodes.of({"one": {MODEL: "M40", POOL: "public"}, "three": {MODEL: "A100"}}, LABELS)
WITH_HAMI = {"one": {"hami": (Card("GPU-0", "NVIDIA A100"),)}}
PLAIN = Nodes.of({"one": {MODEL: "A100"}, "two": {MODEL: "M40"}}, LABELS, WITH_HAMI)
HALF = Nodes.of({"one": {MODEL: "M40", HOSTNAME: "one"}, "two": {MODEL: "M40"}}, LABELS, WITH_HAMI)
ONLY_HAMI = Nodes.of({"one": {MODEL: "M40"}}, LABELS, WITH_HAMI)
TO_HAMI = PinSettings(of_schemes={"hami": "hami-scheduler"})
ELSEWHERE = Nodes.of({"one": {MODEL: "A100"}}, LABELS)
SIZED = Nodes.of({}, LABELS, named=CardModels({"M40": ProductRow(memory=40960)}))
TWO_TYPES = (Card("GPU-0", "Tesla M40 24GB", mig=True), Card("GPU-1", "Tesla P40"))
MIXED = Nodes.of({"one": {MODEL: "M40"}}, LABELS, {"one": {"hami": TWO_TYPES}})


def _put_off(shortage: Shortage, *, counted: bool = True) -> str:
    """Return the webhook's message about a pod that has no room in the ledger now, but may fit when it is retried."""
    return charge(CARD, SMALL, Answering(PutOff((shortage,), counted=counted))).message


def rejected() -> list[Told]:
    short = Shortage("M40", Charge(200, 0, 200), Usage(Charge(700, 0, 700)), Limit(800))
    for_now = Shortage("M40", Charge(200, 0, 200), Usage(Charge(700), Charge(100)), Limit(800))
    reserved = Shortage("M40", Charge(100), Usage(Charge(800), Charge(100), reserved=Charge(200)), Limit(800))
    running = Shortage("M40", Charge(100, 0, 100), Usage(Charge(800), terminating=Charge(200)), Limit(800))
    in_total = Shortage("M40", Charge(100, 0, 100), Usage(Charge(2000)), Limit(2000), of_total=True)
    in_team = Shortage("M40", Charge(100), Usage(Charge(500), others=Charge(300)), Limit(800), team="vision")
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
            " any GPU pod of the namespace ends, request less, or ask for a higher `total`. If the limit of the"
            " model has no room either, the message names the model instead of `total`.",
        ),
        Told(
            exceeded("team-a", in_team),
            "All namespaces of the [team](quotas.md#teams) together use up its limit. Wait until a GPU pod of any of"
            " these namespaces ends, request less, or ask for more quota for the team. `others` is what the other"
            " namespaces of the team use.",
        ),
        Told(
            _put_off(for_now),
            "The pod would fit without the pending charges. These are charges of objects that were admitted, and"
            " that the controller has not seen stored yet. Usually an object is stored at once. If another webhook"
            " rejects the object after the charge, the charge is released after `--storable-seconds`.",
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
            _put_off(in_team),
            "The other namespaces of the [team](quotas.md#teams) may use more of its quota than their pods use. Within"
            " seconds, the controller takes back the unused quota and makes workloads retry. If this lasts, no"
            " controller runs.",
        ),
        Told(
            _put_off(short, counted=False),
            "The API server took too long to list the namespace's pods, or this"
            " replica of the webhook has not read the last edit of the quota. The pod's controller"
            " retries by itself.",
        ),
        Told(
            f"{exceeded('team-a', running)}; {DELETED_RELEASED}",
            "Wait until these charges end. `terminating` is the charge of pods that were deleted by force while they"
            " ran. The"
            " containers of these pods may run until the end of their grace period, and the pods stay"
            " charged until then.",
        ),
        Told(
            exceeded("team-a", memory),
            "The memory of the model is used up. Wait until a pod of the namespace ends, request less memory, or ask"
            " for"
            " more quota. `kubectl gpuquota` shows the usage. `pending` is the charge of objects that"
            " were admitted recently. If an object is never stored, its charge is released after 75"
            " seconds.",
        ),
        Told(
            mutated({"tencent.com/vcuda-core": 900}, TEAM).message,
            ("Request less: the pod's request alone exceeds the limit."),
        ),
        Told(
            charge({"tencent.com/vcuda-core": 400}, DATED).message,
            "Wait until the grant (quota for a limited time) begins. The controller then makes the workload retry.",
        ),
        Told(
            mutated(CARD, NamespaceQuota({})).message,
            "Ask your administrator for quota: the namespace's quota has no GPU model.",
        ),
        Told(
            mutated(model, TEAM, annotations={"nvidia.com/use-gputype": "A100"}).message,
            "Correct the annotation that the message names, or ask for quota of the excluded model.",
        ),
        Told(
            mutated(model, TEAM, annotations={"nvidia.com/use-gputype": "A100," * MAX_CHOICE}).message,
            "Name fewer types of cards in the annotation.",
        ),
        Told(
            mutated(CARD, TEAM, DISCOVERED, annotations={MODELS_ANNOTATION: "A100"}).message,
            "Name GPU models of the namespace's quota in the annotation, or ask for quota of the named model.",
        ),
        Told(
            mutated(CARD, msgspec.structs.replace(TEAM, one_model=True)).message,
            "Name one GPU model by the annotation, in the pod template if a workload creates the pod."
            " The namespace's quota requires this by `one_model: true`.",
        ),
        Told(
            mutated(CARD, TEAM, nodeSelector={MODEL: "A100"}).message,
            "Correct the pod's node selector or node affinity, or ask for quota of the model that they select.",
        ),
        Told(
            mutated(CARD, TEAM, nodeName="two").message,
            "The node that the pod names is in a pool that the namespace must not use. Remove"
            " `nodeName`, or ask your administrator for the pool.",
        ),
        Told(
            mutated(SHARE, SMALL, SLICED).message,
            "Request another model. On a card in MIG mode, HAMi gives the pod a whole MIG slice, which may be"
            " larger than"
            " the requested share. If only some cards of a model are in MIG mode, `/mutate` restricts shares to the"
            " other cards.",
        ),
        Told(
            mutated(SHARE, SMALL, SLICED, annotations={"nvidia.com/vgpu-mode": "mig"}).message,
            "Remove `mig` from the annotation, and use a model with cards that are not in MIG mode.",
        ),
        Told(
            mutated({"nvidia.com/mig-1g.5gb": 1}, NamespaceQuota({"A30": Limit(400)})).message,
            "Request a profile that the cards of the model have, or another model. If the cards have the profile, ask"
            " your administrator to state the MIG slices of these cards in `gpu_models`.",
        ),
        Told(
            charge(CARD, TEAM, affinity=requires("M40", "P100")).message,
            "Check that a replica of the webhook is ready, and that no other webhook reverts the"
            " changes of `/mutate`. Then create the pod again. Or pin the pod to one model yourself,"
            " by node affinity.",
        ),
        Told(
            charge(CARD, SMALL, affinity=None, skipped=SkippedMutate()).message,
            "Clients retry by themselves. If the message does not end within a minute, check that a replica of the"
            " webhook is ready.",
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
            "Check that a replica of the webhook is ready, and that no other webhook reverts the changes of"
            " `/mutate`. Then create the pod again. Normally `/mutate` restricts the pod to the pools of its"
            " namespace.",
        ),
        Told(
            charge(
                CARD, SMALL, pin_settings=PinSettings(scheduler="gpu-scheduler"), nodeName="one", annotations=FORGED
            ).message,
            "Check that a replica of the webhook is ready, and that no other webhook reverts the changes of"
            " `/mutate`. Then create the pod again. If your manifest has allocation"
            " annotations, remove them, because only schedulers and device plugins may write them. To"
            " choose a node, require its name by node affinity.",
        ),
        Told(
            charge(SHARE, SMALL, nodes=MIXED).message,
            "Check that a replica of the webhook is ready, and that no other webhook reverts the changes of"
            " `/mutate`. Then create the pod again. HAMi and vgpu-manager choose a card of"
            " the node by annotations of the pod. `/mutate` sets these annotations, so that no card"
            " of another model is chosen.",
        ),
        Told(
            mutated({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 50000}, SMALL, SIZED).message,
            "Request less memory of each card, or use a model with larger cards. `gpu_models` has the size of"
            " the cards.",
        ),
        Told(
            mutated(SHARE, SMALL, PLAIN).message,
            "No node of the model runs the vendor's device plugin. Request whole cards, or another model.",
        ),
        Told(
            mutated({"nvidia.com/gpu": 1}, SMALL, ONLY_HAMI, pin_settings=TO_HAMI, schedulerName="volcano").message,
            "Leave `schedulerName` out, so that HAMi's scheduler places the pod, or request a model that has nodes"
            " without HAMi.",
        ),
        Told(
            mutated(
                {"nvidia.com/gpu": 1}, SMALL, HALF, schedulerName="volcano", nodeSelector={HOSTNAME: "one"}
            ).message,
            "Leave `schedulerName` out, or select nodes without HAMi.",
        ),
        *(
            Told(
                mutated({resource: 1}, msgspec.structs.replace(SMALL, require_nodes=True), ELSEWHERE).message,
                "The quota has `require_nodes: true`, and no node of the model offers what the pod requests. Wait"
                " until such a node exists, or request another model or resource.",
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
            charge(CARD, SMALL, pin_settings=PinSettings(scheduler="gpu-scheduler"), schedulerName="volcano").message,
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
