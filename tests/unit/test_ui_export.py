"""Tests of the CSV and JSON files with the figures of the usage page."""

import csv
from dataclasses import replace
from http import HTTPStatus
from urllib.parse import quote

import pytest
from flask.testing import FlaskClient

from controller.ui.document import MAX_HOLDERS, Holder
from controller.ui.export import FIGURES
from examples.usage import Sample, ago, company, crowd, model_use, namespace_use
from tests.usage_page import client_of, json_of


def rows_of(client: FlaskClient, path: str) -> list[dict[str, str]]:
    answer = client.get(f"{path}.csv")
    assert answer.content_type == "text/csv; charset=utf-8"
    assert answer.headers["Content-Disposition"].startswith("attachment; filename=gpu-")
    return list(csv.DictReader(answer.get_data(as_text=True).splitlines()))


def as_text(value: str | float | None) -> str:
    """Return the value as the CSV file has it. Numbers are rounded to two decimals."""
    return value if isinstance(value, str) else "" if value is None else f"{round(value, 2):.10g}"


def test_the_usage_of_every_namespace_and_model_is_in_both_files() -> None:
    client = client_of(company())
    rows, found = rows_of(client, "/usage"), json_of(client, "/usage.json")
    assert found["updated"] == "2026-03-04T12:00:00Z"
    models = [(use, model) for use in found["namespaces"] for model in use["models"]]
    assert [(row["namespace"], row["mode"], row["model"]) for row in rows] == [
        (use["namespace"], use["mode"], model["model"]) for use, model in models
    ]
    for row, (_, model) in zip(rows, models, strict=True):
        assert {name: row[name] for name in FIGURES} == {name: as_text(model[name]) for name in FIGURES}
    [chat] = [row for row in rows if row["namespace"] == "chat-serving"]
    assert (chat["used"], chat["limit"], chat["pending"], chat["memory_used"]) == ("18.5", "24", "0.5", "1228800")


def test_a_namespace_without_a_model_has_a_row_with_empty_figures() -> None:
    client = client_of(Sample({"a": namespace_use("a")}))
    [row] = rows_of(client, "/usage")
    assert {name: text for name, text in row.items() if text} == {"namespace": "a", "mode": "enforce"}


def test_the_total_of_a_namespace_is_in_columns_of_each_row() -> None:
    use = namespace_use("a", model_use("T4", 8, 2), model_use("A100", 8, 3))
    uses = {"a": replace(use, total=model_use("total", 6, 5)), "b": namespace_use("b", model_use("T4", 8))}
    rows = rows_of(client_of(Sample(uses)), "/usage")
    assert [(row["namespace"], row["total_used"], row["total_limit"]) for row in rows] == [
        *[("a", "5", "6")] * 2,
        ("b", "", ""),
    ]


def test_the_rows_that_the_page_leaves_out_are_in_the_files() -> None:
    assert len(rows_of(client_of(crowd(600, models=1)), "/usage")) == 600


def test_the_pods_and_claims_of_a_namespace_are_in_both_files_with_the_most_cards_first() -> None:
    client, path = client_of(company()), "/namespaces/notebooks/pods"
    rows, found = rows_of(client, path), json_of(client, f"{path}.json")
    assert [row["name"] for row in rows] == [each["name"] for each in found["items"]]
    assert rows[0] == {
        "kind": "pod",
        "name": "sweep-4xq2m",
        "model": "T4",
        "cards": "4",
        "memory": "0",
        "node": "gpu-t4-08",
        "created": ago(hours=19),
    }
    assert [row["model"] for row in rows if row["name"] == "lab-7"] == [""]


@pytest.mark.parametrize("kind", ["csv", "json"])
def test_the_files_of_a_namespace_that_is_not_known_are_not_found(kind: str) -> None:
    assert client_of(company()).get(f"/namespaces/nobody/pods.{kind}").status_code == HTTPStatus.NOT_FOUND


def test_a_file_of_pods_is_bounded_and_has_the_number_of_omitted_pods() -> None:
    pods = tuple(Holder("pod", f"p{number}", "T4", number, 0, "", ago(hours=1)) for number in range(MAX_HOLDERS + 2))
    client = client_of(Sample({"a": namespace_use("a", model_use("T4", 9))}, {"a": pods}))
    found = json_of(client, "/namespaces/a/pods.json")
    assert (len(found["items"]), found["left_out"]) == (MAX_HOLDERS, 2)
    assert "p0" not in {each["name"] for each in found["items"]}
    assert len(rows_of(client, "/namespaces/a/pods")) == MAX_HOLDERS


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r", "\n"])
def test_no_cell_begins_as_a_formula(start: str) -> None:
    name = f'{start}HYPERLINK("http:evil.example","here")'
    use = replace(namespace_use(name, model_use(name, 8, 3)), mode=name)
    client = client_of(Sample({name: use}, {name: (Holder(name, name, name, 1, 1, name, name),)}))
    for path in ("/usage.csv", f"/namespaces/{quote(name)}/pods.csv"):
        text = client.get(path).get_data(as_text=True)
        _, row = csv.reader(text.splitlines(keepends=True))
        assert [cell for cell in row if cell.startswith(start)] == []
        assert row.count(f"'{name}") >= 3
