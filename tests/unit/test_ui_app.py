"""Tests of the HTTP answers of the usage page. `test_ui_hostile.py` tests hostile names and requests."""

import gzip
import re
from dataclasses import replace
from http import HTTPStatus

import pytest

from controller.ui.app import MAX_ROWS, create_app
from controller.ui.feed import Feed
from controller.ui.model import HolderRow
from controller.ui.page import Links, Views
from controller.ui.snapshot import ModelCards
from examples.usage import NOW, Sample, ago, company, crowd, model_use, namespace_use
from tests.tables import cases
from tests.usage_page import VIEWS, Markup, client_of, html_of, page_of, standby
from vcuda.ledger.report import ModelUse


def test_the_table_is_a_table_with_headers_for_rows_and_columns() -> None:
    markup = Markup(page_of(company(), "/?sort=model.T4&order=desc"))
    columns = [header for header in markup.all("th") if header["scope"] == "col"]
    assert [header["aria-sort"] for header in columns] == ["none", "none", "none", "none", "descending", "none"]
    assert sum(header["scope"] == "row" for header in markup.all("th")) == 15
    assert len(markup.all("caption")) == 1
    assert markup.all("label")[0]["for"] == markup.all("input")[0]["id"]
    assert markup.all("a")[0] == {"class": "skip", "href": "#main"}
    assert "main" in [each.get("id") for each in markup.all("main")]


def test_a_row_shows_used_pending_and_limit_and_whether_it_is_in_effect() -> None:
    html = page_of(company(), "/")
    assert 'class="h9" data-m="A100-80G"><b>15</b> of 16<small>1 pending</small>' in html
    assert "<b>18</b> of 16 <em>over</em>" in html
    gone = replace(model_use("M40", 8, 3), terminating=2.0)
    use = replace(namespace_use("a", gone), taking_effect=True)
    assert "2 terminating</small>" in page_of(Sample({"a": use}), "/")
    for path in ("/", "/namespaces/a"):
        assert ">taking effect</span>" in page_of(Sample({"a": use}), path)
    missing = "ValidatingWebhookConfiguration vcuda-quota does not exist"
    absent = replace(use, unregistered=missing)
    for path in ("/", "/namespaces/a"):
        shown = page_of(Sample({"a": absent}), path)
        assert ">not in effect</span>" in shown
        assert "taking effect" not in shown
        assert missing in shown
    assert f"</span> {missing}</p>" in page_of(Sample({"a": absent}), "/")
    assert "not in effect" not in html
    assert "taking effect" not in html
    assert "ledger lost" not in html
    lost = replace(namespace_use("a", model_use("M40", 8, 3, reserved=5)), ledger_lost=True)
    for path in ("/", "/namespaces/a"):
        assert ">ledger lost</span>" in page_of(Sample({"a": lost}), path)
    assert "<small>1200 GiB of 1920 GiB</small>" in html
    assert 'data-m="A100-80G">blocked' in html
    assert "<b>14.5</b> of 64" in html


def test_reserved_cards_are_shown_on_both_pages_while_there_are_some() -> None:
    client = client_of(Sample({"a": namespace_use("a", model_use("M40", 8, 4, reserved=1.5))}))
    assert "<b>4</b> of 8<small title=" in html_of(client, "/")
    assert ">1.5 reserved</small>" in html_of(client, "/")
    own = html_of(client, "/namespaces/a")
    assert "<b>4</b> of 8 cards in use, 1.5 reserved." in own
    assert "2.5 available, <span title=" in own
    assert '<rect class="part-reserved" x="50.00%" width="18.75%" height="8"/>' in own
    at_rest = client_of(Sample({"a": namespace_use("a", model_use("M40", 8, 4, 1))}))
    assert all("reserved" not in html_of(at_rest, path) for path in ("/", "/namespaces/a"))


def test_the_rows_are_in_the_order_of_the_address() -> None:
    client = client_of(company())

    def rows(query: str) -> list[str | None]:
        return [row["data-ns"] for row in Markup(html_of(client, f"/{query}")).all("tr") if "data-ns" in row]

    assert rows("?q=s&sort=fullest&order=desc")[:2] == ["maps-vision", "asr-batch"]
    assert rows("?sort=model.V100&order=desc")[:2] == ["genomics", "maps-vision"]
    assert rows("?q=speech") == ["speech-research"]
    assert rows("?sort=nothing&order=desc") == sorted(company().uses)


def links_of(html: str) -> list[str | None]:
    return [each.get("href") for each in Markup(html).all("a")]


def test_every_page_links_to_the_documentation_and_to_grafana_if_it_has_their_addresses() -> None:
    docs, grafana = "https://docs.example/gpu", "https://grafana.example/d/vcuda-quota?orgId=1"
    linked = client_of(company(), Views(lambda: NOW, Links(docs, grafana)))
    for path in ("/", "/namespaces/notebooks", "/nothing"):
        own = f"{grafana}&var-namespace=notebooks" if path.endswith("notebooks") else grafana
        found = links_of(linked.get(path).get_data(as_text=True))
        assert {docs, own} <= {*found}
        elsewhere = client_of(company()).get(path).get_data(as_text=True)
        assert not [each for each in links_of(elsewhere) if each and "//" in each]
        assert "Grafana" not in elsewhere


def test_both_pages_link_to_their_files() -> None:
    client = client_of(company())
    for path, files in (("/", "usage"), ("/namespaces/notebooks", "../namespaces/notebooks/pods")):
        assert {f"{files}.csv", f"{files}.json"} <= {*links_of(html_of(client, path))}


def test_both_pages_say_when_their_figures_were_read() -> None:
    for path in ("/", "/namespaces/notebooks"):
        html = page_of(company(), path)
        assert re.search(
            r'Updated <time id="updated" datetime="2026-03-04T12:00:00Z"[^>]*>2026-03-04 12:00:00 UTC<', html
        )


def test_a_sum_over_different_models_says_so() -> None:
    """Column "Fullest limit" shows the limit of which the largest part is used."""
    client = client_of(company())
    assert "141</b> of 360 cards of 4 models are free" in html_of(client, "/")
    assert "<b>21.55</b> of 32 cards of 2 models in use" in html_of(client, "/namespaces/notebooks")
    assert '<td role="cell" class="sum" data-m="Fullest limit"><b>93 %</b> of A100-80G</td>' in html_of(client, "/")
    one = Sample(cluster=(ModelCards("T4", 8, 3, 8),))
    one.report(namespace_use("a", model_use("T4", 8, 3)))
    assert "5</b> of 8 cards are free" in page_of(one, "/")
    assert "<b>3</b> of 8 cards in use" in page_of(one, "/namespaces/a")


@cases(
    "models, shown",
    two=((model_use("M40", 8, 7.99), model_use("T4", 8, 1)), "<b>99 %</b> of M40"),
    almost_full=((model_use("M40", 200, 199.99),), "<b>99 %</b> of M40"),
    exact=((model_use("M40", 10, 7),), "<b>70 %</b> of M40"),
    over=((model_use("M40", 8, 9),), "<b>112 %</b> of M40"),
    blocked=((model_use("M40", 0, 1), model_use("T4", 8, 8)), "<b>over</b> the limit of M40"),
    none=((), "none"),
)
def test_the_fullest_limit_is_a_share_that_is_whole_only_if_the_limit_is_reached(
    models: tuple[ModelUse, ...], shown: str
) -> None:
    assert f'data-m="Fullest limit">{shown}</td>' in page_of(Sample({"a": namespace_use("a", *models)}), "/")


def test_a_namespace_s_page_has_its_pods_with_charge_and_age() -> None:
    html = page_of(company(), "/namespaces/notebooks")
    markup = Markup(html)
    assert [row.get("data-ns") for row in markup.all("tr") if "data-ns" in row][:2] == ["sweep-4xq2m", "sweep-9kd7c"]
    assert f'<time datetime="{ago(hours=19)}"' in html
    assert ">19 h</time>" in html
    assert ">0.25</td>" in html
    assert ">8 GiB</td>" in html
    assert "not placed yet" in html


def test_a_row_shows_whether_a_pod_or_a_claim_uses_the_cards() -> None:
    sample = company()
    sample.report(sample.uses["robotics"])
    pod, claim = (HolderRow(name, "M40", 100, 0, "n", ago(hours=1), name == "gpu") for name in ("train", "gpu"))
    client = client_of(sample)
    for holders, kinds, count in (
        ((pod, claim), [("gpu", "claim"), ("train", "pod")], "2 pods and claims</p>"),
        ((pod,), [("train", "pod")], "1 pod</p>"),
    ):
        sample.pods["robotics"] = holders
        html = html_of(client, "/namespaces/robotics?sort=kind")
        rows = re.findall(r'<tr role="row" data-ns="([^"]*)".*?data-m="Kind">(\w+)</td>', html)
        assert (rows, count in html) == (kinds, True)


def test_a_namespace_without_a_quota_that_has_pods_has_a_page() -> None:
    sample = Sample(pods={"free": (HolderRow("p", "M40", 100, 0, "n", ago(hours=1)),)})
    assert "This namespace has no GPU quota" in page_of(sample, "/namespaces/free")


def test_a_namespace_that_is_not_known_is_not_found() -> None:
    answer = client_of(company()).get("/namespaces/nobody")
    assert answer.status_code == HTTPStatus.NOT_FOUND
    assert "Namespace nobody does not exist" in answer.get_data(as_text=True)


def test_the_rejections_of_a_namespace_are_only_on_its_page() -> None:
    client = client_of(company())
    assert "whisper-eval" in html_of(client, "/namespaces/speech-research")
    assert "whisper-eval" not in html_of(client, "/namespaces/notebooks")


NOTHING_YET = ("No namespace has a GPU quota yet", "No node has a GPU model yet", "No recent refusals")


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        *((Sample(), said) for said in (*NOTHING_YET, "only that user sees the refusal")),
        (Sample(refusals=None), "Refusals are not known yet"),
        (Sample(removals=()), "No stale allocation was removed"),
        (Sample(certificates=()), "No certificate was found"),
        (Sample(findings=()), "Every pod and claim is within its quota"),
        (Sample(cluster=(ModelCards("M40", None, 3, 4),)), "the nodes do not report the number of cards"),
    ],
)
def test_empty_tables_say_so(sample: Sample, said: str) -> None:
    assert said in page_of(sample, "/")


@pytest.mark.parametrize("part", ["Stale allocations removed", "Certificates", "Beyond the quota"])
def test_parts_without_a_source_are_not_shown(part: str) -> None:
    assert part not in page_of(Sample(), "/")


@pytest.mark.parametrize("path", ["/", "/namespaces/x", "/updates", "/leading"])
def test_a_standby_names_the_leader_and_says_when_to_retry(path: str) -> None:
    answer = standby("This replica of the controller is a standby. The leader is pod-7.").get(path)
    assert answer.status_code == HTTPStatus.SERVICE_UNAVAILABLE
    assert answer.headers["Retry-After"] == "2"
    assert "Refresh" not in answer.headers, (
        "a refresh would move the focus, and screen readers would read the page again"
    )
    assert "The leader is pod-7" in answer.get_data(as_text=True)


def test_a_standby_serves_the_styles_of_the_leaders_page() -> None:
    """Behind a Service, the browser's next connection may reach another replica than the one that served the page."""
    assert standby().get("/static/page.css").status_code == HTTPStatus.OK
    assert client_of(Sample()).get("/leading").status_code == HTTPStatus.OK


def test_a_head_request_for_updates_uses_no_listeners_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.ui.feed.MAX_LISTENERS", 0)
    feed = Feed(company().source(), VIEWS)
    client = create_app(lambda: feed, VIEWS).test_client()
    assert client.head("/updates").status_code == HTTPStatus.OK
    refused = client.get("/updates")
    assert (refused.status_code, refused.headers["Retry-After"]) == (HTTPStatus.SERVICE_UNAVAILABLE, "30")


def test_answers_are_compressed_if_the_client_accepts_it() -> None:
    client = client_of(company())
    plain, zipped = client.get("/"), client.get("/", headers={"Accept-Encoding": "gzip"})
    assert zipped.headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(zipped.data) == plain.data
    assert "Content-Encoding" not in client.get("/", headers={"Accept-Encoding": "gzip;q=0"}).headers
    assert plain.headers["Vary"] == "Accept-Encoding"


def test_an_unchanged_style_is_not_sent_again() -> None:
    client = client_of(company())
    first = client.get("/static/page.css", headers={"Accept-Encoding": "gzip"})
    again = client.get("/static/page.css", headers={"If-None-Match": first.headers["ETag"]})
    assert (again.status_code, first.headers["Cache-Control"]) == (HTTPStatus.NOT_MODIFIED, "no-cache")
    assert client.get("/").headers["Cache-Control"] == "no-store"


def test_a_long_list_is_cut_and_the_page_says_so() -> None:
    client = client_of(crowd(MAX_ROWS + 20, models=1))
    html = html_of(client, "/")
    assert html.count('role="row" data-ns=') == MAX_ROWS
    assert f"{MAX_ROWS} of {MAX_ROWS + 20} namespaces" in html
    assert 'data-complete="no"' in html
    assert html_of(client, "/?q=0519").count('role="row" data-ns=') == 1


def test_five_hundred_namespaces_of_eight_models_are_a_page_of_a_sane_size() -> None:
    answer = client_of(crowd()).get("/?sort=model.MODEL-3&order=desc", headers={"Accept-Encoding": "gzip"})
    assert len(gzip.decompress(answer.data)) < 700 * 1024
    assert len(answer.data) < 70 * 1024
