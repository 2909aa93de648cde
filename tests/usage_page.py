"""Requests the controller's usage page in tests, and parses its HTML."""

from html.parser import HTMLParser
from http import HTTPStatus

from flask.testing import FlaskClient

from controller.ui.app import create_app
from controller.ui.feed import Feed
from controller.ui.page import Views
from examples.usage import NOW, Sample

VIEWS = Views(lambda: NOW)
MUST_CLOSE = {"script", "a", "p", "div", "span", "table", "tr", "td", "th", "ul", "li", "svg", "section", "b"}


class Markup(HTMLParser):
    """Parses the elements, attributes and text of a page. Raises an error if an element is not nested correctly."""

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
        return [attributes for name, attributes in self.elements if name == tag]


def client_of(sample: Sample, views: Views = VIEWS, names: tuple[str, ...] = ()) -> FlaskClient:
    """Return an HTTP client of the leader's usage page. ``names``: further host names that requests may use."""
    feed = Feed(sample.source(), views)
    return create_app(lambda: feed, views, names).test_client()


def standby(reason: str = "This replica of the controller is a standby. The leader is other.") -> FlaskClient:
    return create_app(lambda: reason, VIEWS).test_client()


def html_of(client: FlaskClient, path: str) -> str:
    answer = client.get(path)
    assert answer.status_code == HTTPStatus.OK
    return answer.get_data(as_text=True)


def page_of(sample: Sample, path: str = "/") -> str:
    return html_of(client_of(sample), path)
