"""The messages about nodes whose GPU model is doubtful, and about models that no node has."""

from __future__ import annotations

from collections.abc import Iterator

from examples import claims
from examples.discovery import A100, A100_PRODUCT, NAME, T4, features, found_on, hami, labelled, node
from tools.reference.told import Chapter, Told
from vcuda.discovery.names import model_warnings


def chapters() -> tuple[Chapter, ...]:
    """Return every message about nodes and their models."""
    return (
        Chapter("The Event GPUModelInDoubt", "On the node, and by `kubectl gpuquota nodes`.", tuple(_doubts())),
        Chapter("Models without nodes", "By `kubectl gpuquota`, and in the log of the controller.", tuple(_unknown())),
    )


def _doubts() -> Iterator[Told]:
    nameless = claims.slice_of(claims.NVIDIA, NAME, {"name": "gpu-0", "attributes": {"type": {"string": "gpu"}}})
    card = claims.slice_of(claims.NVIDIA, NAME, claims.device(claims.A100))
    register = {"annotations": {"hami.io/node-nvidia-register": "[{"}}
    own = "Correct the source that is wrong. Or set the model label yourself: then it counts."
    for manifest, slices, todo in (
        (node(hami(A100), features("Tesla-T4"), labelled("L40S")), [], own),
        (node(labelled("T4")), [card], own),
        (
            node(hami(A100, A100, T4)),
            [],
            "Give each model nodes of its own. A pod may get a card of another model here.",
        ),
        (node(features(f"{A100_PRODUCT}-MIG-INVALID")), [], "Give all cards of the node the same MIG configuration."),
        (node(register), [], "See the log of the device plugin, which writes the register."),
        (node(), [nameless], "See the log of the DRA driver, or set the model label yourself."),
    ):
        for message in found_on(manifest, slices).doubts.values():
            yield Told(message, todo)
    held = found_on(node(hami(T4), labelled("A100", by="hami")))
    yield Told(held.why_held(in_use=True), "Drain the node, if its cards were replaced.")
    lost = found_on(node(features("Tesla-T4"), labelled("A100", by="hami")))
    yield Told(lost.why_held(in_use=False), "Remove the label, if the source does not come back.")


def _unknown() -> Iterator[Told]:
    todo = "Correct the name in the quota, or add a row to `gpu_models`."
    known = ["NVIDIA-A100-SXM4-40GB", *(f"GPU-{number}" for number in range(8))]
    yield Told(model_warnings(["A100"], known)[0], todo)
    yield Told(model_warnings(["H200"], known)[0], todo)
    yield Told(model_warnings([f"X{number}" for number in range(10)], known)[-1], todo)
    yield Told(model_warnings(["A100"], ())[0], "Run the controller with `--discover`, or label the nodes.")
