"""Requests the controller's usage page in tests, and parses its HTML."""

from html.parser import HTMLParser
from typing import Any

import msgspec
from flask.testing import FlaskClient

from controller.ui.app import create_app
from examples.usage import Sample


class Markup(HTMLParser):
    """Parses the elements and attributes of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def client_of(sample: Sample, names: tuple[str, ...] = ()) -> FlaskClient:
    """Return an HTTP client of the leader's usage page. ``names``: further host names that requests may use."""
    documents = sample.documents()
    return create_app(lambda: documents, names).test_client()


def standby(reason: str = "This replica of the controller is a standby. The leader is other.") -> FlaskClient:
    return create_app(lambda: reason).test_client()


def json_of(client: FlaskClient, path: str) -> dict[str, Any]:
    answer = client.get(path)
    assert answer.content_type == "application/json"
    return msgspec.json.decode(answer.data, type=dict[str, Any])
