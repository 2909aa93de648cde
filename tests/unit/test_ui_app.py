"""Tests of the HTTP answers of the usage page. `test_ui_hostile.py` tests hostile names and requests."""

import gzip
from dataclasses import replace
from http import HTTPStatus

import pytest

from controller.ui.app import create_app
from controller.ui.document import MIN_INTERVAL_SECONDS, Documents
from examples.usage import NOW, Sample, company, crowd, model_use, namespace_use
from tests.usage_page import Markup, client_of, json_of, standby
from vcuda.ledger.report import PodUse


def test_the_document_has_the_usage_of_every_namespace_without_its_pods() -> None:
    use = namespace_use("a", replace(model_use("M40", 8, 3), pods=(PodUse("p", 300, 0),)), unpinned=("lab-7",))
    found = json_of(client_of(Sample({"a": use})), "/usage.json")
    assert found["updated"] == "2026-03-04T12:00:00Z"
    [shown] = found["namespaces"]
    assert (shown["namespace"], shown["unpinned"], shown["more_unpinned"]) == ("a", [], 1)
    assert (shown["models"][0]["used"], shown["models"][0]["pods"]) == (3, [])


def test_the_document_is_made_at_most_once_a_second() -> None:
    now, made = [0.0], []
    sample = company()

    def read() -> object:
        made.append(now[0])
        return sample.document()

    documents = Documents(read, lambda _: (), clock=lambda: now[0])  # type: ignore[arg-type]  # the type of `read`
    for at in (0.0, MIN_INTERVAL_SECONDS - 0.01, MIN_INTERVAL_SECONDS, MIN_INTERVAL_SECONDS + 0.5):
        now[0] = at
        documents.current()
    assert made == [0.0, MIN_INTERVAL_SECONDS]


@pytest.mark.parametrize("path", ["/usage.json", "/namespaces/notebooks/pods.json"])
def test_unchanged_figures_are_not_sent_again(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of reading is not a part of the ETag."""
    monkeypatch.setattr("controller.ui.document.MIN_INTERVAL_SECONDS", 0.0)
    sample, now = company(), [NOW]
    documents = Documents(sample.document, lambda name: sample.holders.get(name, ()), now=lambda: now[0])
    client = create_app(lambda: documents).test_client()
    first = client.get(path, headers={"Accept-Encoding": "gzip"})
    now[0] = NOW.replace(second=5)
    known = {"If-None-Match": first.headers["ETag"]}
    assert client.get(path, headers=known).status_code == HTTPStatus.NOT_MODIFIED
    sample.report(namespace_use("notebooks", model_use("T4", 20, 14)))
    sample.holders["notebooks"] = sample.holders["notebooks"][1:]
    assert client.get(path, headers=known).status_code == HTTPStatus.OK


def test_the_documents_of_two_leaders_have_one_tag_if_their_figures_are_equal() -> None:
    tags = {client_of(company()).get("/usage.json").headers["ETag"] for _ in range(2)}
    assert len(tags) == 1


def test_every_page_is_the_same_shell_with_relative_links() -> None:
    """Relative links also work behind a proxy that serves the page below a path prefix."""
    client = client_of(company())
    for path, root in (("/", "./"), ("/namespaces/notebooks", "../")):
        markup = Markup(client.get(path).get_data(as_text=True))
        assert markup.all("script") == [{"src": f"{root}static/page.js", "defer": None}]
        assert markup.all("body") == [{"data-root": root}]
        assert markup.all("label")[0]["for"] == markup.all("input")[0]["id"]


def test_the_pods_of_a_namespace_that_is_not_known_are_not_found() -> None:
    answer = client_of(company()).get("/namespaces/nobody/pods.json")
    assert answer.status_code == HTTPStatus.NOT_FOUND
    assert "Namespace nobody does not exist" in answer.get_data(as_text=True)


@pytest.mark.parametrize("path", ["/usage.json", "/usage.csv", "/namespaces/x/pods.json", "/leading"])
def test_a_standby_names_the_leader_and_says_when_to_retry(path: str) -> None:
    answer = standby("This replica of the controller is a standby. The leader is pod-7.").get(path)
    assert answer.status_code == HTTPStatus.SERVICE_UNAVAILABLE
    assert answer.headers["Retry-After"] == "2"
    assert "The leader is pod-7" in answer.get_data(as_text=True)


def test_a_standby_serves_the_page_which_waits_for_the_leader() -> None:
    """Behind a Service, the browser's next connection may reach another replica than the one that sent the page."""
    answer = standby().get("/")
    assert answer.status_code == HTTPStatus.SERVICE_UNAVAILABLE
    assert Markup(answer.get_data(as_text=True)).all("script")
    assert standby().get("/static/page.css").status_code == HTTPStatus.OK
    assert client_of(Sample()).get("/leading").status_code == HTTPStatus.OK


@pytest.mark.parametrize("path", ["/", "/usage.json", "/usage.csv", "/static/page.js"])
def test_answers_are_compressed_if_the_client_accepts_it(path: str) -> None:
    client = client_of(company())
    plain, zipped = client.get(path), client.get(path, headers={"Accept-Encoding": "gzip"})
    assert zipped.headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(zipped.data) == plain.data
    assert "Content-Encoding" not in client.get(path, headers={"Accept-Encoding": "gzip;q=0"}).headers
    assert plain.headers["Vary"] == "Accept-Encoding"


def test_an_unchanged_style_is_not_sent_again() -> None:
    client = client_of(company())
    first = client.get("/static/page.css", headers={"Accept-Encoding": "gzip"})
    again = client.get("/static/page.css", headers={"If-None-Match": first.headers["ETag"]})
    assert (again.status_code, first.headers["Cache-Control"]) == (HTTPStatus.NOT_MODIFIED, "no-cache")
    assert client.get("/").headers["Cache-Control"] == "no-store"


def test_five_hundred_namespaces_of_eight_models_are_a_document_of_a_sane_size() -> None:
    answer = client_of(crowd()).get("/usage.json", headers={"Accept-Encoding": "gzip"})
    assert len(gzip.decompress(answer.data)) < 1400 * 1024
    assert len(answer.data) < 70 * 1024
