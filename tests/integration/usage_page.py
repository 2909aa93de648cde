"""A server of the usage page. A test decides whether it acts as the leader or as a standby."""

from contextlib import ExitStack
from dataclasses import dataclass, field

import flask
from werkzeug import Response

from controller.ui.app import create_app
from controller.ui.feed import Feed
from controller.ui.leading import serve
from controller.ui.page import Views
from examples.usage import Sample


@dataclass
class Served:
    """A running server of the usage page, and the data of the page.

    ``feed``: the live updates. If it is None, the server acts as a standby.
    """

    sample: Sample
    views: Views = field(default_factory=Views)
    feed: Feed | None = None
    url: str = ""
    login: str = ""
    """The login address to which a proxy redirects each request. Empty while the reader's session is valid."""

    def lead(self) -> None:
        self.feed = Feed(self.sample.source(), self.views)
        self.feed.start()

    def stand_by(self) -> None:
        if self.feed:
            self.feed.close()
        self.feed = None


def serving(sample: Sample, teardown: ExitStack) -> Served:
    served = Served(sample)
    served.lead()
    standing = lambda: served.feed or "This replica is a standby."  # noqa: E731  # a line
    app = create_app(standing, served.views)
    app.before_request(lambda: redirection(served))
    server = serve(("127.0.0.1", 0), app)
    teardown.callback(server.stop)
    teardown.callback(served.stand_by)
    served.url = f"http://127.0.0.1:{server.port}/"
    return served


def redirection(served: Served) -> Response | None:
    # The static files need no login, because the browser may have cached them.
    ended = served.login and flask.request.endpoint != "static"
    return flask.redirect(served.login) if ended else None
