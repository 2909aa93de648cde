"""Tests that the usage page resists attacks by other sites, HTTP methods and file paths.

The HTML of the page is the same for every namespace, and has no name. `test_ui_browser.py` tests that the script shows
hostile names as text.
"""

from http import HTTPStatus

import pytest

from controller.ui.app import HEADERS
from examples.usage import company
from tests.usage_page import Markup, client_of, standby

HOSTILE = "%3Cscript%3Ealert('x')%3C%2Fscript%3E%22%3E%3Cimg%20src=x%20onerror=%22alert(1)%22%3E"


@pytest.mark.parametrize("path", ["/", "/namespaces/notebooks", f"/namespaces/{HOSTILE}", f"/?q={HOSTILE}"])
def test_no_page_has_inline_script_or_style_or_reaches_elsewhere(path: str) -> None:
    """The Content-Security-Policy forbids inline script and style."""
    for client in (client_of(company()), standby(HOSTILE)):
        html = client.get(path).get_data(as_text=True)
        assert "alert" not in html
        markup = Markup(html)
        assert all(set(script) == {"src", "defer"} for script in markup.all("script"))
        assert not markup.all("style")
        for tag, attributes in markup.elements:
            assert not [name for name in attributes if name.startswith("on") or name == "style"], (tag, attributes)
            for name in ("src", "href"):
                value = attributes.get(name) or ""
                assert not value.startswith(("/", "javascript:", "data:")), (tag, attributes)
                assert "//" not in value, (tag, attributes)


@pytest.mark.parametrize(
    "path",
    ["/", "/usage.json", "/usage.csv", "/namespaces/x", "/namespaces/x/pods.json", "/static/page.css", "/nothing"],
)
def test_every_answer_has_the_security_headers(path: str) -> None:
    for client in (client_of(company()), standby()):
        for answer in (client.get(path), client.head(path), client.post(path)):
            assert HEADERS.items() <= dict(answer.headers).items()
    policy = HEADERS["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; ")
    assert ("frame-ancestors 'none'" in policy, "unsafe" in policy) == (True, False)


def test_a_reason_with_markup_is_sent_as_plain_text() -> None:
    answer = standby("<script>alert(1)</script>").get("/usage.json")
    assert answer.mimetype == "text/plain"
    missing = client_of(company()).get(f"/namespaces/{HOSTILE.replace('%2F', '')}/pods.json")
    assert (missing.status_code, missing.mimetype) == (HTTPStatus.NOT_FOUND, "text/plain")


@pytest.mark.parametrize("path", ["/", "/namespaces/notebooks", "/usage.json", "/static/page.js"])
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_the_page_is_read_only(path: str, method: str) -> None:
    assert client_of(company()).open(path, method=method).status_code == HTTPStatus.METHOD_NOT_ALLOWED


@pytest.mark.parametrize("path", ["/static/../app.py", "/static/%2e%2e/app.py", "/static/", "/static/page.html"])
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
@pytest.mark.parametrize("path", ["/", "/usage.json", "/namespaces/notebooks", "/static/page.js", "/nothing"])
def test_the_page_is_served_only_under_its_own_names(host: str, served: bool, path: str) -> None:
    """By DNS rebinding, the name of another site resolves to the page's address. The site could then read the page."""
    answer = client_of(company(), names=("GPU.example.com",)).head(path, headers={"Host": host})
    assert (answer.status_code != HTTPStatus.MISDIRECTED_REQUEST) is served
    assert HEADERS.items() <= dict(answer.headers).items()
