"""Tests of the data in the tables of the usage page."""

from typing import Any

import msgspec
import pytest

from controller import refusals
from controller.ui import model
from controller.ui.model import MAX_SEARCH_LENGTH, OVER, HolderRow, ModelNode, ModelRow, TableQuery, row_of
from examples.usage import model_use, namespace_use
from tests.builders import MODEL
from tests.tables import cases
from vcuda.requests.resources import CardModels, ProductRow


def row(used: float, limit: float, memory: tuple[int, int] | None = None) -> ModelRow:
    return row_of(namespace_use("a", model_use("M40", limit, used, memory=memory))).amounts["M40"]


@cases(
    "used, limit, expected",
    unused=(0, 8, 0),
    a_hundredth_of_a_card_is_visible=(0.01, 8, 1),
    under_a_tenth=(0.79, 8, 1),
    a_tenth=(0.8, 8, 1),
    seven_tenths_6_99_in_floats=(5.6, 8, 7),
    three_tenths_3_0_in_floats=(0.3, 1, 3),
    two_tenths_1_99_in_floats=(0.01, 0.05, 2),
    nearly_full=(7.99, 8, 9),
    full=(8, 8, 10),
    over_the_limit=(8.01, 8, OVER),
    a_limit_of_0_in_use=(1, 0, OVER),
    a_limit_of_0_unused=(0, 0, 0),
)
def test_the_step_of_the_heat_follows_the_usage(used: float, limit: float, expected: int) -> None:
    assert row(used, limit).step == expected


@pytest.mark.parametrize(("used", "memory", "expected"), [(1, 900, 9), (8, 100, 10), (1, 1001, OVER)])
def test_the_fuller_of_cores_and_memory_counts(used: float, memory: int, expected: int) -> None:
    assert row(used, 8, (memory, 1000)).step == expected


def test_steps_never_fall_as_more_is_used() -> None:
    steps = [row(hundredths / 100, 1).step for hundredths in range(110)]
    assert steps == sorted(steps)
    assert set(steps) == set(range(12))


def test_only_an_unused_model_with_limit_zero_is_blocked() -> None:
    assert [row(*amount).blocked for amount in ((0, 0), (1, 0), (0, 1))] == [True, False, False]


def test_a_row_sums_its_models_exactly() -> None:
    found = row_of(namespace_use("a", model_use("M40", 1.1, 0.1, 0.05), model_use("P100", 2.2, 0.2), unpinned=("x",)))
    assert (found.total.used, found.total.limit, found.total.pending, found.unpinned) == (0.3, 3.3, 0.05, 1)
    assert list(found.amounts) == ["M40", "P100"]


def test_reserved_cards_are_shown_with_used_ones_and_are_not_available() -> None:
    """A darker cell means more used cards. Reserved cards are not used yet, so they do not count."""
    models = model_use("M40", 8, 4, reserved=1.5), model_use("P100", 2, reserved=0.5)
    found = row_of(namespace_use("a", *models))
    assert (found.total.used, found.total.reserved, found.total.available) == (4, 2, 4)
    assert (found.amounts["M40"].reserved, found.amounts["M40"].available) == (1.5, 2.5)
    assert (found.amounts["M40"].step, found.amounts["P100"].step) == (5, 0)


CARDS = {8: "8", 2.5: "2.5", 0.05: "0.05", 100: "100", 0: "0"}
NOUNS = {1: "1 card", 0.5: "0.5 cards", 2: "2 cards"}
MEBIBYTES = {0: "0 MiB", 1023: "1023 MiB", 1024: "1 GiB", 1536: "1.5 GiB", 81920: "80 GiB"}
SECONDS = {-5: "0 s", 0: "0 s", 59.9: "59 s", 60: "1 min", 3599: "59 min", 3600: "1 h", 90000: "1 d"}


def test_numbers_are_written_as_people_write_them() -> None:
    assert {cards: model.number(cards) for cards in CARDS} == CARDS
    assert {count: model.plural(count, "card", "cards") for count in NOUNS} == NOUNS
    assert {mebibytes: model.memory(mebibytes) for mebibytes in MEBIBYTES} == MEBIBYTES
    assert {seconds: model.span(seconds) for seconds in SECONDS} == SECONDS


@pytest.mark.parametrize("text", ["", "yesterday", "2026-03-04", "2026-03-04T12:00:00", "2026-13-04T12:00:00Z"])
def test_an_invalid_time_is_none(text: str) -> None:
    """A time without a time zone is invalid, because the API server never writes one."""
    assert refusals.moment(text) is None


@pytest.mark.parametrize("text", ["2026-03-04T12:00:00Z", "2026-03-04T12:00:00.000001Z", "2026-03-04T13:00:00+01:00"])
def test_the_times_of_the_api_server_are_read(text: str) -> None:
    at = refusals.moment(text)
    assert at
    assert at.utctimetuple()[:5] == (2026, 3, 4, 12, 0)


SORTS = model.sorts_of(["M40", "fullest"])

ROWS = [
    row_of(namespace_use("delta", model_use("M40", 10, 1))),
    row_of(namespace_use("alpha", model_use("M40", 4, 2), model_use("P100", 100, 1))),
    row_of(namespace_use("charlie", model_use("P100", 1, 1))),
    row_of(namespace_use("bravo", model_use("M40", 8, 4))),
]


@cases(
    "order, expected",
    names=(TableQuery(), ["alpha", "bravo", "charlie", "delta"]),
    names_turned=(TableQuery(descending=True), ["delta", "charlie", "bravo", "alpha"]),
    most_first=(TableQuery(sort="model.M40", descending=True), ["bravo", "alpha", "delta", "charlie"]),
    least_first=(TableQuery(sort="model.M40"), ["delta", "alpha", "bravo", "charlie"]),
    equal=(TableQuery(sort="model.P100", descending=True), ["charlie", "alpha", "bravo", "delta"]),
    fullest_limit=(TableQuery(sort="fullest", descending=True), ["charlie", "bravo", "alpha", "delta"]),
    search=(TableQuery(search="A  L", sort="fullest"), ["delta", "alpha", "charlie"]),
    none=(TableQuery(search="nobody"), []),
)
def test_rows_are_in_the_requested_order(order: TableQuery, expected: list[str]) -> None:
    """If numbers of used cards are equal, the used share of the limit decides. Rows without the model are last."""
    assert [row.namespace for row in model.ordered(ROWS, order)] == expected


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, TableQuery()),
        ({"sort": "model.M40", "order": "desc"}, TableQuery("", "model.M40", descending=True)),
        ({"sort": "fullest"}, TableQuery("", "fullest")),
        ({"sort": "model.fullest"}, TableQuery("", "model.fullest")),
        ({"sort": "model.GONE", "order": "desc", "q": "a"}, TableQuery("a")),
        ({"sort": "M40"}, TableQuery()),
        ({"order": "sideways"}, TableQuery()),
        ({"q": "  team a "}, TableQuery("team a")),
        ({"q": "x" * 1000}, TableQuery("x" * MAX_SEARCH_LENGTH)),
    ],
)
def test_an_unknown_order_is_ignored(query: dict[str, str], expected: TableQuery) -> None:
    assert model.read_table_query(query, SORTS) == expected


@pytest.mark.parametrize(
    ("now", "click", "then"),
    [
        (TableQuery("a"), "name", TableQuery("a", "name", descending=True)),
        (TableQuery("a"), "fullest", TableQuery("a", "fullest", descending=True)),
        (TableQuery("a", "fullest", descending=True), "fullest", TableQuery("a", "fullest")),
        (TableQuery("a", "fullest", descending=True), "name", TableQuery("a")),
        (TableQuery(), "age", TableQuery(sort="age", descending=True)),
        (TableQuery(), "node", TableQuery(sort="node")),
        (TableQuery(), "model", TableQuery(sort="model")),
        (TableQuery(), "model.node", TableQuery(sort="model.node", descending=True)),
    ],
)
def test_a_header_reverses_its_order_and_begins_with_the_largest_figure_or_with_a(
    now: TableQuery, click: str, then: TableQuery
) -> None:
    assert now.toggled(click) == then


def test_an_order_is_read_back_from_its_address_and_marks_one_header() -> None:
    order = TableQuery("a&b=<c>", "model.M40", descending=True)
    assert order.query() == "q=a%26b%3D%3Cc%3E&sort=model.M40&order=desc"
    assert [order.aria(sort) for sort in ("name", "model.M40")] == ["none", "descending"]
    assert (TableQuery().query(), TableQuery().aria("name")) == ("", "ascending")


@pytest.mark.parametrize(
    ("search", "name", "found"),
    [("", "a", True), ("TEAM", "team-a", True), ("a team", "team-a", True), ("b team", "team-a", False)],
)
def test_a_search_matches_every_word_in_any_case(search: str, name: str, found: bool) -> None:
    assert model.matches(search, name) is found


PODS = [
    HolderRow("b", "M40", 100, 5, "", "2026-01-02T00:00:00Z"),
    HolderRow("a", None, 100, 7, "n2", "2026-01-01T00:00:00Z", claim=True),
    HolderRow("c", "A100", 50, 6, "n1", "2026-01-03T00:00:00Z"),
]


def test_pods_are_sorted_by_any_column_and_searched() -> None:
    columns = {
        "name": "abc",
        "model": "acb",
        "cards": "cab",
        "memory": "bca",
        "node": "bca",
        "age": "cba",
        "kind": "abc",
    }
    sorted_by = {sort: model.ordered_holders(PODS, TableQuery(sort=sort)) for sort in model.HOLDER_SORTS}
    assert {sort: "".join(pod.name for pod in pods) for sort, pods in sorted_by.items()} == columns
    assert [pod.name for pod in model.ordered_holders(PODS, TableQuery("c"))] == ["c"]


TWO_DEVICES = "GPU-1,10,32768,100,NVIDIA-V100,0,true:GPU-2,10,32768,100,NVIDIA-V100,0,true:"


@cases(
    "offered, devices, cards",
    gpu_manager=({"tencent.com/vcuda-core": "800"}, None, 8),
    gpu_managers_fork_2_5_cards=({"nvidia.com/vcuda-core": 250}, None, 2.5),
    vgpu_manager=({"nvidia.com/vgpu-cores": "400", "nvidia.com/vgpu-number": "40"}, None, 4),
    NVIDIAs_own_plugin=({"nvidia.com/gpu": "4"}, None, 4),
    HAMi_cards_from_its_register=({"nvidia.com/gpu": "20"}, TWO_DEVICES, 2),
    HAMi_JSON=({"nvidia.com/gpu": "20"}, '[{"id":"GPU-1"},{"id":"GPU-2"}]', 2),
    HAMi_unreadable=({"nvidia.com/gpu": "20"}, "[not JSON", None),
    only_a_number_of_vGPUs=({"nvidia.com/vgpu-number": "40"}, None, None),
    none=({"cpu": "64"}, None, None),
    no_number=({"tencent.com/vcuda-core": "many"}, None, None),
    more_than_a_node_can_have=({"tencent.com/vcuda-core": "99999999"}, None, None),
    one_of_two_plugins_offers_nothing=({"tencent.com/vcuda-core": "0", "nvidia.com/gpu": "1"}, None, 1),
)
def test_the_cards_of_a_node_are_counted_by_its_resources(
    offered: dict[str, Any], devices: str | None, cards: float | None
) -> None:
    assert model.cards_of(offered, devices) == cards


def node(labels: dict[str, str], **rest: Any) -> bytes:
    return msgspec.json.encode({"metadata": {"name": "n", "labels": labels, **rest.pop("metadata", {})}, **rest})


def test_a_node_is_read_by_its_label_and_its_allocatable_resources() -> None:
    status = {"allocatable": {"tencent.com/vcuda-core": "400"}, "capacity": {"tencent.com/vcuda-core": "800"}}
    assert model.read_node(node({MODEL: "M40"}, status=status), MODEL) == ModelNode("M40", 4)
    assert model.read_node(node({MODEL: "M40"}), MODEL) == ModelNode("M40", None)
    assert model.read_node(node({}, status=status), MODEL) is None
    hami = {"annotations": {"hami.io/node-nvidia-register": TWO_DEVICES}}
    assert model.read_node(node({MODEL: "V100"}, metadata=hami), MODEL) == ModelNode("V100", 2)


def test_the_cards_of_a_model_are_unknown_if_one_of_its_nodes_does_not_report_them() -> None:
    """The sum over the other nodes would be too low."""
    nodes = [ModelNode("M40", 8), ModelNode("M40", 4), ModelNode("P100", 2), ModelNode("P100", None)]
    assert model.total_cards(nodes) == {"M40": 12, "P100": None}


def test_devices_that_are_parts_of_cards_are_counted_as_parts() -> None:
    """With NVIDIA's own device plugin, a device may be a part of a card, here a quarter."""
    models = CardModels({"T4-shared": ProductRow(("Tesla-T4-*",), cores=25)})
    plugin = model.read_node(node({MODEL: "Tesla-T4-SHARED"}, status={"allocatable": {"nvidia.com/gpu": "4"}}), MODEL)
    cores = model.read_node(
        node({MODEL: "T4-shared"}, status={"allocatable": {"nvidia.com/gpu": "4", "tencent.com/vcuda-core": "200"}}),
        MODEL,
    )
    assert plugin
    assert cores
    assert model.total_cards([plugin, cores, ModelNode("T4-shared", 1)], models) == {"T4-shared": 1 + 2 + 1}
