"""Tests of the parsing of registers: the annotations in which HAMi and vgpu-manager list the cards of a node."""

import json
from typing import Any

import pytest
import structlog
from hypothesis import example, given, strategies as st

from tests.api_double import ApiDouble
from tests.builders import LABELS, MODEL
from tests.tables import cases
from vcuda.kube import NodeInformer
from vcuda.placement.registers import MAX_CARD_MEMORY, MAX_CARDS, MAX_REGISTER, MAX_TEXT, Card, read_register

HAMI = "hami.io/node-nvidia-register"
PARTS = {"devcore": 100}
OURS = [
    Card("GPU-0055", "NVIDIA A100-SXM4-40GB", memory=40960, count=10),
    Card("GPU-0fc3", "NVIDIA-Tesla V100-PCIE-32GB", mig=True, memory=32768, count=7),
]


def as_hami(cards: list[Card]) -> str:
    """Return the register as HAMi writes it since version 2.8: without fields that are zero or false."""
    modes: dict[bool, dict[str, Any]] = {
        True: {"mode": "mig", "migProfiles": [{"name": "1g.5gb"}]},
        False: {"mode": "hami-core"},
    }
    figures = [{"devmem": card.memory, "count": card.count} for card in cards]
    written = ({key: figure for key, figure in each.items() if figure} for each in figures)
    entries = zip(cards, written, strict=True)
    return json.dumps(
        [{"id": card.uuid, **PARTS, **more, "type": card.type, **modes[card.mig]} for card, more in entries]
    )


def as_hami_text(cards: list[Card]) -> str:
    """Return the register as HAMi 2.5 to 2.7 writes it. Earlier versions leave out the fields index and mode."""
    modes = {True: ",0,mig", False: ""}
    return "".join(f"{card.uuid},{card.count},{card.memory},100,{card.type},0,true{modes[card.mig]}:" for card in cards)


def as_vgpu_manager(cards: list[Card]) -> str:
    entries = enumerate(cards)
    return json.dumps(
        [{"id": i, "type": card.type, "uuid": card.uuid, "mig": card.mig, "memory": card.memory} for i, card in entries]
    )


FORMS = cases("written", hami=as_hami, hami_up_to_2_7=as_hami_text, vgpu_manager=as_vgpu_manager)


@FORMS
@given(data=st.data())
def test_any_registered_cards_are_read_back(written: Any, data: st.DataObject) -> None:
    name = st.text(st.characters(codec="ascii", exclude_characters=",:"), min_size=1, max_size=MAX_TEXT)
    named = name.map(str.strip).filter(lambda text: text and text.isprintable())
    uuids, figures = named.filter(lambda uuid: uuid[0] != "["), st.integers(0, MAX_CARD_MEMORY)
    counts = st.just(0) if written is as_vgpu_manager else figures
    cards = data.draw(st.lists(st.builds(Card, uuids, named, st.booleans(), figures, count=counts), max_size=16))
    assert read_register(written(cards)) == tuple(cards)


@cases(
    "text",
    no_json="[{",
    an_object='[{"id": 1}]',
    not_a_list='{"id": "GPU-0", "type": "T4"}',
    numbers="[1, 2]",
    no_uuid='[{"id": 0, "type": "T4"}]',
    no_type='[{"id": "GPU-0", "type": ""}]',
    a_type_that_cannot_be_listed='[{"id": "GPU-0", "type": "T4,A100"}]',
    a_type_that_cannot_be_shown='[{"id": "GPU-0", "type": "T4\\n"}]'.replace("\\n", "\\u0007"),
    too_long=json.dumps([{"id": "GPU-0", "type": "T" * (MAX_TEXT + 1)}]),
    nested=f'[{{"id": "GPU-0", "type": "T4", "more": {"[" * 100_000}',
    too_many=as_hami([Card(f"GPU-{n}", "T4") for n in range(MAX_CARDS + 1)]),
    too_many_types=as_hami([Card(f"GPU-{n}", f"T{n}") for n in range(17)]),
    a_type_that_is_not_ascii='[{"id": "GPU-0", "type": "Te\u017fla"}]',
    too_few_fields="GPU-0,10,32768,100,T4,0:",
    cut_off=as_hami(OURS)[:-20],
    a_mebibyte=as_hami(OURS) + " " * 2**20,
    longer_than_all_annotations_together="GPU-0,10,32768,100,T4,0,true:" * (MAX_REGISTER // 29 + 1),
    text="none",
    blank_fields=",,,,,,:",
)
def test_a_malformed_register_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_register(text)


SCALARS = st.none() | st.integers() | st.text()
TREES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)).map(json.dumps)


@given(st.text() | TREES)
@example("[" * 100_000)
@example("," * 262_144)
def test_any_text_is_a_register_or_an_error(text: str) -> None:
    try:
        found = read_register(text)
    except ValueError:
        return
    assert len(found) <= MAX_CARDS


def test_a_malformed_register_is_reported_once_and_ignored_until_it_is_corrected(api: ApiDouble) -> None:
    """A Node object changes every few seconds. Its register is parsed again only if the register's text has changed."""
    watch, path = NodeInformer(api.kube, LABELS), "/api/v1/nodes/gpu-1"

    def heard(text: str, beat: str) -> list[Any]:
        labels, annotations = {MODEL: "A100"}, {HAMI: text, "beat": beat}
        api.store(path, {"metadata": {"name": "gpu-1", "labels": labels, "annotations": annotations}})
        with structlog.testing.capture_logs() as logs:
            watch.reflector.relist()
        return [(line["event"], line["node"], line["annotation"]) for line in logs if "annotation" in line]

    told = [("malformed register of cards ignored", "gpu-1", HAMI)]
    assert [heard("[{", "1"), heard("[{", "2"), heard("[[", "3")] == [told, [], told]
    assert watch.current().types.on("hami", "A100").own == ()
    assert heard(as_hami(OURS), "4") == []
    assert watch.current().types.on("hami", "A100").own == (OURS[0].type,)
    assert watch.current().registers["gpu-1"]["hami"] == tuple(OURS)
    before = watch.current()
    assert (heard(as_hami(OURS), "5"), watch.current() is before) == ([], True), "a heartbeat must change nothing"
    api.remove(path)
    watch.reflector.relist()
    assert not watch.current().registers
