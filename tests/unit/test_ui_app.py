"""Tests of the HTTP answers of the usage page.

They cover the content, the escaping of names, and the headers.
"""

import gzip
import json
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from http import HTTPStatus

import pytest
from flask.testing import FlaskClient

from controller.refusals import RefusedWorkload
from controller.ui.app import HEADERS, MAX_ROWS, Standing, create_app
from controller.ui.feed import Feed
from controller.ui.model import HolderRow
from controller.ui.page import Links, Views
from controller.ui.snapshot import Certificate, Finding, ModelCards, RemovedAllocation
from examples.usage import NOW, Sample, ago, company, crowd, model_use, namespace_use
from vcuda.ledger.report import GrantUse, ModelUse

VIEWS = Views(lambda: NOW)
HOSTILE = """<script>alert('x')</script>"><img src=x onerror="alert(1)">'`{{7*7}}&amp;"""
MUST_CLOSE = {"script", "a", "p", "div", "span", "table", "tr", "td", "th", "ul", "li", "svg", "section", "b"}


class Markup(HTMLParser):
    """Parses the elements, attributes and text of a page. A wrongly nested element raises an error."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in MUST_CLOSE:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in MUST_CLOSE:
            assert self._open.pop() == tag, self.getpos()

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """Return the attributes of every element of the page with this tag."""
        return [attributes for name, attributes in self.elements if name == tag]


def client_of(sample: Sample) -> FlaskClient:
    feed = Feed(sample.source(), VIEWS)
    return create_app(lambda: Standing(feed, ""), VIEWS).test_client()


def linked() -> FlaskClient:
    """Return an HTTP client of the leader's usage page. The page has links to other sites."""
    views = Views(lambda: NOW, Links("https://docs.example/gpu", "https://grafana.example/d/vcuda-quota?orgId=1"))
    feed = Feed(company().source(), views)
    return create_app(lambda: Standing(feed, ""), views).test_client()


def standby(reason: str = "This replica of the controller is a standby. The leader is other.") -> FlaskClient:
    return create_app(lambda: Standing(None, reason), VIEWS).test_client()


def html_of(client: FlaskClient, path: str) -> str:
    answer = client.get(path)
    assert answer.status_code == HTTPStatus.OK
    return answer.get_data(as_text=True)


def hostile() -> Sample:
    """Return sample data in which every name and every text contains hostile HTML."""
    use = namespace_use(HOSTILE, model_use(HOSTILE, 8, 3, 1, (5, 9)), mode="warn", unpinned=(HOSTILE,))
    sample = Sample(cluster=(ModelCards(HOSTILE, 9, 3, 8, 1),))
    sample.report(use)
    sample.pods[HOSTILE] = (HolderRow(HOSTILE, HOSTILE, 100, 1, HOSTILE, HOSTILE),)
    sample.refusals = (RefusedWorkload(HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE, 2),)
    sample.removals = (RemovedAllocation(HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE),)
    sample.certificates = (Certificate(HOSTILE, HOSTILE, HOSTILE),)
    sample.findings = (Finding(HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE),)
    return sample


HOSTILE_PATH = "/namespaces/" + "".join(f"%{byte:02x}" for byte in HOSTILE.replace("/", "").encode())

PAGES: dict[str, Callable[[], tuple[FlaskClient, str]]] = {
    "overview": lambda: (client_of(company()), "/"),
    "sorted": lambda: (client_of(company()), "/?sort=model.T4&order=desc&q=a"),
    "empty": lambda: (client_of(Sample()), "/"),
    "not known": lambda: (client_of(Sample(refusals=None)), "/"),
    "namespace": lambda: (client_of(company()), "/namespaces/notebooks"),
    "blocked": lambda: (client_of(company()), "/namespaces/interns"),
    "nothing found": lambda: (client_of(company()), "/?q=nobody"),
    "missing": lambda: (client_of(company()), "/namespaces/nobody"),
    "no such page": lambda: (client_of(company()), "/a/b/c"),
    "standby": lambda: (standby(), "/"),
    "hostile": lambda: (client_of(hostile()), "/"),
    "hostile search": lambda: (client_of(company()), f"/?q={HOSTILE_PATH[12:]}&sort={HOSTILE_PATH[12:]}"),
    "hostile address": lambda: (client_of(company()), HOSTILE_PATH),
    "hostile holder": lambda: (standby(HOSTILE), "/namespaces/x"),
}


@pytest.mark.parametrize("page", PAGES)
def test_no_page_has_inline_script_or_style_or_reaches_elsewhere(page: str) -> None:
    """The Content-Security-Policy forbids inline script and style. A name that is not escaped would break this rule."""
    client, path = PAGES[page]()
    markup = Markup(client.get(path).get_data(as_text=True))
    assert all(set(script) == {"src", "defer"} for script in markup.all("script"))
    assert not markup.all("style")
    icon = f"{'../' * (path.partition('?')[0].count('/') - 1)}static/icon.svg"
    assert {each["src"] for each in markup.all("img")} <= {icon}
    for tag, attributes in markup.elements:
        assert not [name for name in attributes if name.startswith("on") or name == "style"], (tag, attributes)
        for name in ("src", "href"):
            value = attributes.get(name) or ""
            assert not value.startswith(("/", "javascript:", "data:")), (tag, attributes)
            assert "//" not in value, (tag, attributes)


@pytest.mark.parametrize("page", PAGES)
def test_every_answer_carries_the_policy(page: str) -> None:
    client, path = PAGES[page]()
    for answer in (client.get(path), client.head(path), client.get("/static/page.css"), client.get("/nothing")):
        assert HEADERS.items() <= dict(answer.headers).items()
    policy = HEADERS["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; ")
    assert ("frame-ancestors 'none'" in policy, "unsafe" in policy) == (True, False)


def test_hostile_names_are_shown_as_text() -> None:
    markup = Markup(html_of(client_of(hostile()), "/"))
    # The page shows the hostile name at least ten times: twice as the namespace, once as the finding, three times as
    # the model, and otherwise in other texts.
    assert markup.text.count(HOSTILE) >= 10
    assert {"data-ns": HOSTILE, "role": "row"} in markup.all("tr")
    assert sum(cell.get("data-m") == HOSTILE for cell in markup.all("td")) == 2
    assert not [image for image in markup.all("img") if image["src"] == "x"]


def test_hostile_names_are_text_on_a_namespace_s_page() -> None:
    sample = hostile()
    name = HOSTILE.replace("/", "")
    sample.uses = {name: namespace_use(name, model_use(HOSTILE, 8, 3))}
    sample.pods[name] = sample.pods[HOSTILE]
    markup = Markup(html_of(client_of(sample), HOSTILE_PATH))
    assert {"data-ns": HOSTILE, "role": "row"} in markup.all("tr")
    [body] = markup.all("body")
    assert body == {"data-root": "../", "data-version": body["data-version"], "data-namespace": name}
    assert name in markup.text


def test_hostile_names_in_a_change_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The browser inserts the changes that it receives into the page without escaping them."""
    monkeypatch.setattr("controller.ui.feed.MIN_INTERVAL_SECONDS", 0)
    sample = hostile()
    feed = Feed(sample.source(), VIEWS)
    stream = iter(feed.listen(feed.picture().version, ""))
    next(stream)
    sample.report(namespace_use(HOSTILE, model_use(HOSTILE, 8, 4)))
    sample.refusals = (*(sample.refusals or ()), RefusedWorkload("b", HOSTILE, "c", HOSTILE, ago(seconds=1)))
    feed.picture()
    change = json.loads(next(stream).decode().splitlines()[2].removeprefix("data: "))
    for html in (*change["rows"].values(), *change["parts"].values()):
        markup = Markup(html)
        assert {tag for tag, _ in markup.elements}.isdisjoint({"script", "img"})
        assert not [1 for _, attributes in markup.elements for name in attributes if name.startswith("on")]


def test_the_table_is_a_table_with_headers_for_rows_and_columns() -> None:
    markup = Markup(html_of(client_of(company()), "/?sort=model.T4&order=desc"))
    columns = [header for header in markup.all("th") if header["scope"] == "col"]
    assert [header["aria-sort"] for header in columns] == ["none", "none", "none", "none", "descending", "none"]
    assert sum(header["scope"] == "row" for header in markup.all("th")) == 15
    assert len(markup.all("caption")) == 1
    assert markup.all("label")[0]["for"] == markup.all("input")[0]["id"]
    assert markup.all("a")[0] == {"class": "skip", "href": "#main"}
    assert "main" in [each.get("id") for each in markup.all("main")]


def test_a_row_shows_used_pending_and_limit_and_whether_it_is_in_effect() -> None:
    html = html_of(client_of(company()), "/")
    assert 'class="h9" data-m="A100-80G"><b>15</b> of 16<small>1 pending</small>' in html
    assert "<b>18</b> of 16 <em>over</em>" in html
    gone = replace(model_use("M40", 8, 3), terminating=2.0)
    use = replace(namespace_use("a", gone), taking_effect=True)
    assert "2 terminating</small>" in html_of(client_of(Sample({"a": use})), "/")
    for path in ("/", "/namespaces/a"):
        assert ">taking effect</span>" in html_of(client_of(Sample({"a": use})), path)
    assert "taking effect" not in html
    assert "ledger lost" not in html
    lost = replace(namespace_use("a", model_use("M40", 8, 3, reserved=5)), ledger_lost=True)
    for path in ("/", "/namespaces/a"):
        assert ">ledger lost</span>" in html_of(client_of(Sample({"a": lost})), path)
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


def test_both_pages_show_the_end_of_a_part_of_a_limit() -> None:
    grant = GrantUse(2, "2026-12-02T00:00:00+01:00", why=HOSTILE)
    sample = Sample()
    sample.report(namespace_use("team-a", replace(model_use("A100", 8, 3), grants=(grant,))))
    client = client_of(sample)
    assert "2 until 2026-12-02 00:00+01:00" in Markup(html_of(client, "/")).text
    page = Markup(html_of(client, "/namespaces/team-a"))
    assert f"2 of these until 2026-12-02 00:00+01:00: {HOSTILE}" in page.text


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
    for path in ("/", "/namespaces/notebooks", "/nothing"):
        own = f"{grafana}&var-namespace=notebooks" if path.endswith("notebooks") else grafana
        found = links_of(linked().get(path).get_data(as_text=True))
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
        html = html_of(client_of(company()), path)
        assert re.search(
            r'Updated <time id="updated" datetime="2026-03-04T12:00:00Z"[^>]*>2026-03-04 12:00:00 UTC<', html
        )


def test_a_sum_over_different_models_says_so() -> None:
    """The second column shows the limit that is used up most."""
    client = client_of(company())
    assert "141</b> of 360 cards of 4 models are free" in html_of(client, "/")
    assert "<b>21.55</b> of 32 cards of 2 models in use" in html_of(client, "/namespaces/notebooks")
    assert '<td role="cell" class="sum" data-m="Fullest limit"><b>93 %</b> of A100-80G</td>' in html_of(client, "/")
    one = Sample(cluster=(ModelCards("T4", 8, 3, 8),))
    one.report(namespace_use("a", model_use("T4", 8, 3)))
    assert "5</b> of 8 cards are free" in html_of(client_of(one), "/")
    assert "<b>3</b> of 8 cards in use" in html_of(client_of(one), "/namespaces/a")


@pytest.mark.parametrize(
    ("models", "shown"),
    [
        ((model_use("M40", 8, 7.99), model_use("T4", 8, 1)), "<b>99 %</b> of M40"),
        ((model_use("M40", 200, 199.99),), "<b>99 %</b> of M40"),
        ((model_use("M40", 10, 7),), "<b>70 %</b> of M40"),
        ((model_use("M40", 8, 9),), "<b>112 %</b> of M40"),
        ((model_use("M40", 0, 1), model_use("T4", 8, 8)), "<b>over</b> the limit of M40"),
        ((), "none"),
    ],
    ids=["two", "almost full", "exact", "over", "blocked", "none"],
)
def test_the_fullest_limit_is_a_share_that_is_whole_only_if_the_limit_is_reached(
    models: tuple[ModelUse, ...], shown: str
) -> None:
    assert f'data-m="Fullest limit">{shown}</td>' in html_of(client_of(Sample({"a": namespace_use("a", *models)})), "/")


def test_a_namespace_s_page_has_its_pods_with_charge_and_age() -> None:
    html = html_of(client_of(company()), "/namespaces/notebooks")
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
    assert "This namespace has no GPU quota" in html_of(client_of(sample), "/namespaces/free")


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
    assert said in html_of(client_of(sample), "/")


@pytest.mark.parametrize("part", ["Stale allocations removed", "Certificates", "Beyond the quota"])
def test_parts_without_a_source_are_not_shown(part: str) -> None:
    assert part not in html_of(client_of(Sample()), "/")


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


@pytest.mark.parametrize("path", ["/", "/namespaces/notebooks", "/updates", "/static/page.js"])
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_the_page_is_read_only(path: str, method: str) -> None:
    assert client_of(company()).open(path, method=method).status_code == HTTPStatus.METHOD_NOT_ALLOWED


def test_a_head_request_for_updates_uses_no_listeners_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.ui.feed.MAX_LISTENERS", 0)
    feed = Feed(company().source(), VIEWS)
    client = create_app(lambda: Standing(feed, ""), VIEWS).test_client()
    assert client.head("/updates").status_code == HTTPStatus.OK
    refused = client.get("/updates")
    assert (refused.status_code, refused.headers["Retry-After"]) == (HTTPStatus.SERVICE_UNAVAILABLE, "30")


@pytest.mark.parametrize("path", ["/static/../app.py", "/static/%2e%2e/app.py", "/static/", "/templates/base.html"])
def test_only_the_static_files_are_served_as_files(path: str) -> None:
    assert client_of(company()).get(path).status_code == HTTPStatus.NOT_FOUND


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


@pytest.mark.parametrize(
    ("host", "served"),
    [
        *(
            (host, True)
            for host in ("localhost", "localhost:8088", "LOCALHOST.", "127.0.0.1:8088", "[::1]:8088", "10.1.2.3")
        ),
        *((host, True) for host in ("gpu.example.com", "GPU.Example.com:443")),
        *(
            (host, False)
            for host in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example:8088", "", "[::1", "a b")
        ),
    ],
)
@pytest.mark.parametrize("path", ["/", "/updates", "/namespaces/notebooks", "/static/page.js", "/nothing"])
def test_the_page_is_served_only_under_its_own_names(host: str, served: bool, path: str) -> None:
    """With DNS rebinding, another site's name resolves to this address. That site could then read the usage page."""
    feed = Feed(company().source(), VIEWS)
    client = create_app(lambda: Standing(feed, ""), VIEWS, ("GPU.example.com",)).test_client()
    answer = client.head(path, headers={"Host": host})
    assert (answer.status_code != HTTPStatus.MISDIRECTED_REQUEST) is served
    assert HEADERS.items() <= dict(answer.headers).items()
