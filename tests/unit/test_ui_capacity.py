"""How many cards a node has, and how many the cluster."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from controller.ui.model import HAMI_DEVICES, ModelNode, cards_of, read_node, total_cards
from tests.builders import MODEL

TWO_DEVICES = "GPU-1,10,32768,100,NVIDIA-V100,0,true:GPU-2,10,32768,100,NVIDIA-V100,0,true:"


@pytest.mark.parametrize(
    ("offered", "devices", "cards"),
    [
        pytest.param({"tencent.com/vcuda-core": "800"}, None, 8, id="gpu-manager"),
        pytest.param({"nvidia.com/vcuda-core": 250}, None, 2.5, id="its fork, a card half broken"),
        pytest.param({"nvidia.com/vgpu-cores": "400", "nvidia.com/vgpu-number": "40"}, None, 4, id="vgpu-manager"),
        pytest.param({"nvidia.com/gpu": "4"}, None, 4, id="NVIDIA's own plugin"),
        pytest.param({"nvidia.com/gpu": "20"}, TWO_DEVICES, 2, id="HAMi: parts of cards, so its list counts"),
        pytest.param({"nvidia.com/gpu": "20"}, '[{"id":"GPU-1"},{"id":"GPU-2"}]', 2, id="HAMi, JSON"),
        pytest.param({"nvidia.com/gpu": "20"}, "[not JSON", None, id="HAMi, unreadable"),
        pytest.param({"nvidia.com/vgpu-number": "40"}, None, None, id="vGPUs alone do not tell"),
        pytest.param({"cpu": "64"}, None, None, id="none"),
        pytest.param({"tencent.com/vcuda-core": "many"}, None, None, id="no number"),
        pytest.param({"tencent.com/vcuda-core": "99999999"}, None, None, id="more than a node can have"),
        pytest.param({"tencent.com/vcuda-core": "0", "nvidia.com/gpu": "1"}, None, 1, id="one of two plugins is off"),
    ],
)
def test_cards_of_a_node(offered: dict[str, Any], devices: str | None, cards: float | None) -> None:
    assert cards_of(offered, devices) == cards


def node(labels: dict[str, str], **rest: Any) -> bytes:
    return msgspec.json.encode({"metadata": {"name": "n", "labels": labels, **rest.pop("metadata", {})}, **rest})


def test_a_node_is_read_by_its_label_and_what_it_can_give_out() -> None:
    status = {"allocatable": {"tencent.com/vcuda-core": "400"}, "capacity": {"tencent.com/vcuda-core": "800"}}
    assert read_node(node({MODEL: "M40"}, status=status), MODEL) == ModelNode("M40", 4)
    assert read_node(node({MODEL: "M40"}), MODEL) == ModelNode("M40", None)
    assert read_node(node({}, status=status), MODEL) is None
    hami = {"annotations": {HAMI_DEVICES: TWO_DEVICES}}
    assert read_node(node({MODEL: "V100"}, metadata=hami), MODEL) == ModelNode("V100", 2)


def test_a_model_of_which_one_node_does_not_tell_is_not_known() -> None:
    """A sum without it would be a wrong number."""
    nodes = [ModelNode("M40", 8), ModelNode("M40", 4), ModelNode("P100", 2), ModelNode("P100", None)]
    assert total_cards(nodes) == {"M40": 12, "P100": None}
