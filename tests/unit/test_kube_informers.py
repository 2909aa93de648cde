"""What the watch of the nodes tells those who follow it: heartbeats, which are most events, are not among it."""

from typing import Any

import pytest

from tests.api_double import ApiDouble
from tests.builders import LABELS, MODEL
from vcuda.kube import NodeInformer

PATH = "/api/v1/nodes/gpu-1"
LOCK = {"hami.io/mutex.lock": "2023-11-14T22:13:20Z"}
PLAIN: dict[str, Any] = {"metadata": {"name": "gpu-1", "labels": {MODEL: "M40"}, "annotations": {"a/b": "c"}}}


def with_metadata(**fields: Any) -> dict[str, Any]:
    return {**PLAIN, "metadata": {**PLAIN["metadata"], **fields}}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        pytest.param({**PLAIN, "status": {"conditions": [{"type": "Ready"}]}}, False, id="a heartbeat"),
        pytest.param(with_metadata(annotations={"a/b": "d"}), False, id="somebody else's annotation"),
        pytest.param(with_metadata(annotations=LOCK), True, id="a lock"),
        pytest.param(with_metadata(labels={MODEL: "P100"}), True, id="a label"),
        pytest.param(None, True, id="gone"),
    ],
)
def test_what_followers_are_told(api: ApiDouble, changed: dict[str, Any] | None, told: bool) -> None:
    watch = NodeInformer(api.kube, LABELS)
    changes: list[tuple[bool, bool]] = []
    watch.follow(lambda old, new: changes.append((old is not None, new is not None)))
    api.store(PATH, PLAIN)
    watch.reflector.relist()
    assert changes == [(False, True)]
    if changed is None:
        api.remove(PATH)
    else:
        api.store(PATH, changed)
    watch.reflector.relist()
    assert changes[1:] == ([(True, changed is not None)] if told else [])


def test_a_nodes_lock_is_kept_and_no_other_annotation(api: ApiDouble) -> None:
    watch = NodeInformer(api.kube, LABELS)
    api.store(PATH, with_metadata(annotations={"a/b": "c", **LOCK}))
    watch.reflector.relist()
    node = watch.reflector.get(("", "gpu-1"))
    assert node
    assert node.annotations == LOCK
