"""Serves the usage page for tests that open it in a browser."""

from contextlib import ExitStack
from dataclasses import dataclass

import flask
from playwright.sync_api import Locator, Page
from werkzeug import Response

from controller.httpd import Server
from controller.ui.app import create_app
from controller.ui.document import Documents
from examples.usage import Sample


@dataclass
class Served:
    """A running server of the usage page. It acts as the leader, or as a standby if it has no ``documents``."""

    sample: Sample
    documents: Documents | None = None
    url: str = ""
    login: str = ""
    """The login address to which a proxy redirects each request. Empty while the reader's session is valid."""

    def lead(self) -> None:
        self.documents = self.sample.documents()

    def stand_by(self) -> None:
        self.documents = None


def serve_page(sample: Sample, teardown: ExitStack) -> Served:
    served = Served(sample)
    served.lead()
    app = create_app(lambda: served.documents or "This replica is a standby.")
    app.before_request(lambda: redirection(served))
    server = Server(("127.0.0.1", 0), app, threads=8).in_threads()
    teardown.callback(server.stop)
    served.url = f"http://127.0.0.1:{server.port}/"
    return served


def redirection(served: Served) -> Response | None:
    # The static files need no login, because a browser may keep them in its cache.
    ended = served.login and flask.request.endpoint != "static"
    return flask.redirect(served.login) if ended else None


def cell(page: Page, namespace: str, model: str) -> Locator:
    return page.locator(f'#rows > tr[data-ns="{namespace}"] > td[data-m="{model}"]')
