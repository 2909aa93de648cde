"""Tests that the usage page resists attacks by hostile names, other sites, HTTP methods and file paths."""

import json
from collections.abc import Callable
from dataclasses import replace
from http import HTTPStatus

import pytest
from flask.testing import FlaskClient

from controller.refusals import ReportedObject
from controller.ui.app import HEADERS
from controller.ui.feed import Feed
from controller.ui.model import HolderRow
from controller.ui.snapshot import Certificate, ModelCards
from examples.usage import Sample, ago, company, model_use, namespace_use
from tests.usage_page import VIEWS, Markup, client_of, html_of, page_of, standby
from vcuda.ledger.report import GrantUse

HOSTILE = """<script>alert('x')</script>"><img src=x onerror="alert(1)">'`{{7*7}}&amp;"""


def hostile() -> Sample:
    use = namespace_use(HOSTILE, model_use(HOSTILE, 8, 3, 1, (5, 9)), mode="warn", unpinned=(HOSTILE,))
    sample = Sample(cluster=(ModelCards(HOSTILE, 9, 3, 8, 1),))
    sample.report(use)
    sample.pods[HOSTILE] = (HolderRow(HOSTILE, HOSTILE, 100, 1, HOSTILE, HOSTILE),)
    sample.refusals = (ReportedObject(HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE, 2),)
    sample.removals = (ReportedObject(HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE),)
    sample.certificates = (Certificate(HOSTILE, HOSTILE, HOSTILE),)
    sample.findings = (ReportedObject(HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE),)
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
    markup = Markup(page_of(hostile(), "/"))
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
    markup = Markup(page_of(sample, HOSTILE_PATH))
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
    sample.refusals = (*(sample.refusals or ()), ReportedObject("b", HOSTILE, "c", HOSTILE, ago(seconds=1)))
    feed.picture()
    change = json.loads(next(stream).decode().splitlines()[2].removeprefix("data: "))
    for html in (*change["rows"].values(), *change["parts"].values()):
        markup = Markup(html)
        assert {tag for tag, _ in markup.elements}.isdisjoint({"script", "img"})
        assert not [1 for _, attributes in markup.elements for name in attributes if name.startswith("on")]


def test_both_pages_show_the_end_of_a_part_of_a_limit() -> None:
    grant = GrantUse(2, "2026-12-02T00:00:00+01:00", why=HOSTILE)
    sample = Sample()
    sample.report(namespace_use("team-a", replace(model_use("A100", 8, 3), grants=(grant,))))
    client = client_of(sample)
    assert "2 until 2026-12-02 00:00+01:00" in Markup(html_of(client, "/")).text
    page = Markup(html_of(client, "/namespaces/team-a"))
    assert f"2 of these until 2026-12-02 00:00+01:00: {HOSTILE}" in page.text


@pytest.mark.parametrize("path", ["/", "/namespaces/notebooks", "/updates", "/static/page.js"])
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_the_page_is_read_only(path: str, method: str) -> None:
    assert client_of(company()).open(path, method=method).status_code == HTTPStatus.METHOD_NOT_ALLOWED


@pytest.mark.parametrize("path", ["/static/../app.py", "/static/%2e%2e/app.py", "/static/", "/templates/base.html"])
def test_only_the_static_files_are_served_as_files(path: str) -> None:
    assert client_of(company()).get(path).status_code == HTTPStatus.NOT_FOUND


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
    """With DNS rebinding, another site's name resolves to the page's address. That site could then read the page."""
    answer = client_of(company(), names=("GPU.example.com",)).head(path, headers={"Host": host})
    assert (answer.status_code != HTTPStatus.MISDIRECTED_REQUEST) is served
    assert HEADERS.items() <= dict(answer.headers).items()
