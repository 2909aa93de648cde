"""NodeInformer against a scripted API server."""

import threading
from collections.abc import Mapping

import pytest

from tests.integration.scripted import Script, event, item, page, stream
from vcuda.kube import Kube, NodeInformer
from vcuda.placement.affinity import NodeLabels

LABELS = NodeLabels()
M40, P100 = {LABELS.model: "M40"}, {LABELS.model: "P100"}
PATIENCE = 20.0

Labels = Mapping[str, str] | None


def node(name: str, version: int, labels: Mapping[str, str]) -> dict[str, object]:
    """A node as the API server sends it."""
    manifest = item(name, version)
    return {"metadata": {**manifest["metadata"], "namespace": "", "labels": labels}}  # type: ignore[dict-item]  # a dict


def change(before: Labels, after: Labels) -> bytes:
    """What a watch tells of a node that had the first labels and now has the others; None: it is not there."""
    kind = "ADDED" if before is None else "DELETED" if after is None else "MODIFIED"
    return event(kind, node("one", 20, (before if after is None else after) or {}))


@pytest.mark.parametrize(
    ("before", "after", "heard"),
    [
        pytest.param({}, M40, True, id="it gets a model"),
        pytest.param(M40, {}, True, id="it loses its model"),
        pytest.param(M40, P100, True, id="its model changes"),
        pytest.param(None, M40, True, id="it comes"),
        pytest.param(M40, None, True, id="it goes"),
        pytest.param(M40, M40, False, id="a heartbeat"),
        pytest.param(M40, {**M40, LABELS.pool: "public"}, False, id="another label"),
        pytest.param(None, {}, False, id="one without a GPU comes"),
        pytest.param({}, None, False, id="one without a GPU goes"),
    ],
)
def test_a_change_of_a_nodes_model_is_told(
    kube: Kube, script: Script, before: Labels, after: Labels, heard: bool
) -> None:
    """Another node, which gets a model at the end, tells that everything was read."""
    listed = [] if before is None else [node("one", 10, before)]
    script.answers.append(page(10, *listed, node("last", 9, {})))
    script.watches.append(stream(change(before, after), event("MODIFIED", node("last", 30, P100))))
    told: list[str | None] = []
    ended = threading.Event()

    def on_model_change() -> None:
        told.append(watch.current().model_of("one"))
        if watch.current().model_of("last"):
            ended.set()

    watch = NodeInformer(kube, LABELS, on_model_change)
    watch.reflector.start()
    assert ended.wait(PATIENCE)
    watch.reflector.stop()
    watch.reflector.join(PATIENCE)
    now = (after or {}).get(LABELS.model)
    first = [before[LABELS.model]] if before and LABELS.model in before else []
    assert told == [*first, *([now] if heard else []), now]
