"""The messages in docs/reference.md about nodes whose GPU model is not certain, and about models that no node has."""

from __future__ import annotations

from collections.abc import Iterator

from controller.plugin.nodes import GpuNode, PromisedCards, oversubscribed, uncounted, without_scheduler
from controller.plugin.usage_table import total_warnings
from examples import claims
from examples.discovery import A100, A100_PRODUCT, DELETED, NAME, T4, features, found_on, hami, labelled, node
from tools.reference.told import Chapter, Told
from vcuda.ledger.report import FULL_WARNING, ModelUse, NamespaceUse
from vcuda.placement.missing_models import model_warnings
from vcuda.placement.nodes import CORDON, NOT_READY, NodeAvailability, Taint


def chapters() -> tuple[Chapter, ...]:
    return (
        Chapter(
            "The Event GPUModelInDoubt",
            ("The Event `GPUModelInDoubt` is on the node. `kubectl gpuquota nodes` also prints its message."),
            tuple(_doubts()),
        ),
        Chapter(
            "Models without nodes",
            ("`kubectl gpuquota` prints these warnings about models that no node has, and the controller logs them."),
            tuple(_unknown()),
        ),
        Chapter(
            "Promised and present cards",
            ("`kubectl gpuquota nodes` and `kubectl gpuquota -A` print these warnings."),
            tuple(_promised()),
        ),
        Chapter(
            "A namespace that counts as full",
            ("`kubectl gpuquota` prints this warning. It shows all free cards of the namespace as reserved."),
            (Told(FULL_WARNING, "Wait for at most `--max-terminating-seconds`. Delete pods without `--force`."),),
        ),
        Chapter(
            "Nodes that take no pods",
            ("The column `TAKES PODS` of `kubectl gpuquota nodes` has these texts, or `yes`."),
            (
                Told(
                    NodeAvailability(frozenset({CORDON, Taint(NOT_READY)})).takes_pods,
                    "See the conditions of the node by `kubectl describe node`.",
                ),
                Told(
                    NodeAvailability(frozenset({Taint("dedicated", "ml")})).takes_pods,
                    "Pods that tolerate these taints can run on the node.",
                ),
            ),
        ),
    )


def _doubts() -> Iterator[Told]:
    nameless = claims.slice_of(claims.NVIDIA, NAME, {"name": "gpu-0", "attributes": {"type": {"string": "gpu"}}})
    card = claims.slice_of(claims.NVIDIA, NAME, claims.device(claims.A100))
    register = {"annotations": {"hami.io/node-nvidia-register": "[{"}}
    own = "Correct the source of the wrong model, or set the model label yourself, which then overrides all sources."
    for manifest, slices, todo in (
        (node(features("Tesla-T4"), hami(A100), labelled("L40S")), [], own),
        (node(labelled("T4")), [card], own),
        (
            node(hami(A100, A100, T4)),
            [],
            "Use separate nodes for each model. On this node, a pod may get a card of another model.",
        ),
        (node(features(f"{A100_PRODUCT}-MIG-INVALID")), [], "Give all cards of the node the same MIG configuration."),
        (
            node(register),
            [],
            "See the log of the vendor's device plugin, which writes the list of the node's cards (the register).",
        ),
        (node(), [nameless], "See the log of the DRA driver, or set the model label yourself."),
        (
            node(hami(A100, handshake=DELETED), labelled("A100")),
            [],
            (
                "The node counts as a node of HAMi. If HAMi runs on the node, HAMi's scheduler has kept the old value"
                " of hami.io/node-handshake after a restart."
            ),
        ),
        (
            node(hami(A100, A100, offered="2"), labelled("A100")),
            [],
            (
                "The node counts as a node of HAMi, but another device plugin offers its cards. Run only one of the two"
                " plugins."
            ),
        ),
        (
            node({"allocatable": {"nvidia.com/gpu": "8"}}),
            [],
            "No pod with a GPU limit gets this node. Label the node, or install GPU feature discovery.",
        ),
    ):
        for message in found_on(manifest, slices).doubts.values():
            yield Told(message, todo)
    held = found_on(node(hami(T4), labelled("A100", by="hami")))
    yield Told(
        held.why_held(in_use=True),
        "If the cards of the node were replaced by cards of the other model, drain the node.",
    )
    cloud = {"labels": {"karpenter.k8s.aws/instance-gpu-name": "l4"}}
    moved = found_on(node(cloud, labelled("A100", by="cloud-label")))
    yield Told(moved.why_held(in_use=True), "If the label of the cloud names the right model, drain the node.")
    lost = found_on(node(features("Tesla-T4"), labelled("A100", by="hami")))
    yield Told(lost.why_held(in_use=False), "If the lost source will not come back, remove the label from the node.")


def _promised() -> Iterator[Told]:
    [promised] = oversubscribed([PromisedCards("A100", 12, 8, 8, 3, 5)])
    yield Told(promised, "Lower the limits if all namespaces must be able to use their whole quota at the same time.")
    [unknown] = uncounted([GpuNode("gpu-1", ("A100",), None, None, "label", "", None)])
    yield Told(unknown, "Install GPU feature discovery, or a device plugin.")
    yield Told(
        without_scheduler("hami"),
        "Install with the overlay `hami` or `hami.enabled=true`, or write the scheduler into `gpu_schemes`.",
    )
    by_memory = ModelUse("A100", None, 1, 0, None, memory_limit=81920)
    uses = [NamespaceUse("team-a", "enforce", (by_memory,)), NamespaceUse("team-b", "enforce", (by_memory,))]
    yield Told(next(total_warnings(uses)), "Limit the model in cards, if you need the total.")


def _unknown() -> Iterator[Told]:
    todo = "Correct the name in the quota, or add a row to `gpu_models`."
    known = ["NVIDIA-A100-SXM4-40GB", *(f"GPU-{number}" for number in range(8))]
    yield Told(model_warnings(["A100"], known)[0], todo)
    yield Told(model_warnings(["H200"], known)[0], todo)
    yield Told(model_warnings([f"X{number}" for number in range(10)], known)[-1], todo)
    yield Told(model_warnings(["A100"], ())[0], "Run the controller with `--discover`, or label the nodes.")
