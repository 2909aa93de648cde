"""The routes of the usage page, and the HTTP headers of every response.

Every replica of the controller serves the page, but only the leader has the data for it. A standby answers 503 with a
page that names the leader. This standby page reloads itself, because the next connection through a Service may reach
the leader. A redirect would not work, because browsers outside the cluster cannot reach the leader's address. For load
balancers, ``/leading`` answers 200 on the leader and 503 on standbys.

The page has no authentication. By DNS rebinding, a hostile web site could read the page through a user's browser: the
site would resolve its own name to the address of this page. So the page is served only under known host names.
"""

import gzip
import hashlib
import ipaddress
from collections.abc import Callable, Collection, Mapping, Sequence
from http import HTTPStatus
from importlib import resources
from urllib.parse import urlsplit

import flask
import msgspec
from werkzeug.exceptions import HTTPException

from controller.ui import export, model, snapshot
from controller.ui.feed import Feed, TooManyListeners
from controller.ui.page import Views

HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}

MAX_ROWS = 500
"""The most table rows on one page. Users find the other rows by the search field."""

MIN_ZIPPED_BYTES = 1024

ZIPPED = ("text/html", "text/css", "text/javascript", "image/svg+xml", "text/csv", "application/json")

MOST_CARDS_FIRST = model.TableQuery(sort="cards", descending=True)
"""The default order of the table of pods and claims: the largest number of cards first."""


Standing = Feed | str
"""The usage data if this replica is the leader and ready; otherwise the reason why it has no data."""


def create_app(standing: Callable[[], Standing], views: Views, hosts: Collection[str] = ()) -> flask.Flask:
    """Return the usage page as a WSGI app. ``standing``: returns its data. ``hosts``: the allowed host names."""
    app = flask.Flask(__name__, static_folder=None, template_folder=None)
    assets = read_assets()
    app.config["PROVIDE_AUTOMATIC_OPTIONS"] = False  # Flask's own answers to OPTIONS would lack security headers.

    def led(view: Callable[..., flask.Response]) -> Callable[..., flask.Response]:
        def answer(**values: str) -> flask.Response:
            now = standing()
            return _standby(views, now) if isinstance(now, str) else view(now, views, **values)

        return answer

    app.before_request(lambda: None if is_own(flask.request.headers.get("Host"), hosts) else _misdirected(views))
    app.add_url_rule("/", "overview", led(_overview))
    app.add_url_rule("/usage.<any(csv,json):kind>", "usage", led(_usage))
    app.add_url_rule("/namespaces/<name>", "namespace", led(_namespace))
    app.add_url_rule("/namespaces/<name>/pods.<any(csv,json):kind>", "pods", led(_pods))
    app.add_url_rule("/updates", "updates", led(_updates))
    app.add_url_rule("/leading", "leading", led(lambda *_: _answer("leading\n", kind="plain")))
    app.add_url_rule("/static/<name>", "static", lambda name: _asset(assets, name))
    app.register_error_handler(HTTPException, lambda error: _error(views, error))
    app.after_request(_finish)
    return app


def _overview(feed: Feed, views: Views) -> flask.Response:
    picture = feed.picture()
    order = model.read_table_query(flask.request.args, model.sorts_of(picture.columns))
    rows = model.ordered((line.row for line in picture.lines.values()), order)
    parts = {part: snapshot.render_part(part, picture, views, root="") for part in snapshot.PARTS}
    shown = [picture.lines[row.namespace].html for row in rows[:MAX_ROWS]]
    given = {"picture": picture, "parts": parts, "order": order, "rows": shown, "found": len(rows), "most": MAX_ROWS}
    return _answer(views.render("overview.html", **given, root=""))


def _usage(feed: Feed, views: Views, kind: str) -> flask.Response:  # noqa: ARG001  # All views have these parameters.
    picture = feed.picture()
    return _file(kind, export.UsageRecord, [*export.usage_records(picture.uses.values())], picture.updated)


def _pods(feed: Feed, views: Views, name: str, kind: str) -> flask.Response:  # noqa: ARG001  # shared signature
    picture = feed.picture()
    pods = model.ordered_holders(_holders(feed, picture, name), MOST_CARDS_FIRST)
    shown = [export.holder_record(pod) for pod in pods[: export.MAX_HOLDERS]]
    return _file(kind, export.HolderRecord, shown, picture.updated, len(pods) - len(shown))


def _file(
    kind: str,
    record: type[export.UsageRecord] | type[export.HolderRecord],
    records: export.Records,
    updated: str,
    left_out: int = 0,
) -> flask.Response:
    if kind == "json":
        return flask.Response(export.as_json(records, updated, left_out), content_type="application/json")
    name = "gpu-usage.csv" if record is export.UsageRecord else "gpu-pods.csv"
    headers = {"Content-Disposition": f"attachment; filename={name}"}
    return _answer(export.as_csv(record, records), headers=headers, kind="csv")


def _holders(feed: Feed, picture: snapshot.Picture, name: str) -> Sequence[model.HolderRow]:
    """Return the pods and claims of a namespace. Answer 404 if the namespace has no pods, no claims and no quota."""
    pods = tuple(feed.source.pods(name))
    if name not in picture.uses and not pods:
        flask.abort(
            HTTPStatus.NOT_FOUND,
            f"Namespace {name} does not exist, or has neither a GPU quota nor pods or claims that hold GPUs.",
        )
    return pods


def _namespace(feed: Feed, views: Views, name: str) -> flask.Response:
    picture = feed.picture()
    use, pods = picture.uses.get(name), _holders(feed, picture, name)
    order = model.read_table_query(flask.request.args, model.HOLDER_SORTS)
    if "sort" not in flask.request.args:
        order = msgspec.structs.replace(MOST_CARDS_FIRST, search=order.search)
    found = model.ordered_holders(pods, order)
    has_claims = any(pod.claim for pod in pods)
    html = views.render(
        "namespace.html",
        picture=picture,
        name=name,
        use=use,
        line=picture.lines.get(name),
        order=order,
        free={each.model: each.free for each in picture.cluster},
        pods=found[:MAX_ROWS],
        found=len(found),
        all_pods=len(pods),
        exported=export.MAX_HOLDERS,
        nouns=("pod or claim", "pods and claims") if has_claims else ("pod", "pods"),
        refusals_known=picture.refusals is not None,
        refused_here=[each for each in picture.refusals or () if each.namespace == name][: snapshot.MAX_LISTED],
        root="../",
    )
    return _answer(html)


def _updates(feed: Feed, views: Views) -> flask.Response:  # noqa: ARG001  # All views have these parameters.

    # The header X-Accel-Buffering keeps nginx from buffering the stream of events.
    headers = {"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}
    if flask.request.method == "HEAD":  # A HEAD request must not open a stream of events, which never ends.
        return flask.Response(headers=headers)
    since = flask.request.headers.get("Last-Event-ID") or flask.request.args.get("since", "")
    try:
        listener = feed.listen(since, flask.request.args.get("namespace", ""))
    except TooManyListeners:
        busy = HTTPStatus.SERVICE_UNAVAILABLE
        return _answer("too many browsers show this page. Retry in 30 seconds\n", busy, {"Retry-After": "30"}, "plain")
    return flask.Response(listener, headers=headers)


def _asset(assets: "Mapping[str, Asset]", name: str) -> flask.Response:
    asset = assets.get(name)
    if asset is None:
        flask.abort(HTTPStatus.NOT_FOUND)
    response = flask.Response(asset.body, content_type=asset.content_type)
    response.set_etag(asset.tag, weak=True)  # A weak ETag may be the same for compressed and plain bodies.
    response.make_conditional(flask.request)
    return response


def is_own(host: str | None, names: Collection[str]) -> bool:
    """Return True if the Host header is an IP address, localhost or one of ``names``.

    Another host name could be that of a hostile web site, which uses DNS rebinding to read this page.
    """
    if host is None:  # Every browser sends a Host header. Only probes with HTTP/1.0 send none.
        return True
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return name.removesuffix(".") in {"localhost", *map(str.lower, names)}


def _misdirected(views: Views) -> flask.Response:
    message = "This page is not served under this host name. To allow the name, start the controller with --ui-host."
    html = views.render("error.html", status=HTTPStatus.MISDIRECTED_REQUEST, message=message, root=_root())
    return _answer(html, HTTPStatus.MISDIRECTED_REQUEST)


def _standby(views: Views, reason: str) -> flask.Response:
    page = views.render("standby.html", reason=reason, root=_root())
    return _answer(page, HTTPStatus.SERVICE_UNAVAILABLE, {"Retry-After": "2"})


def _error(views: Views, error: HTTPException) -> flask.Response:
    status = HTTPStatus(error.code or HTTPStatus.INTERNAL_SERVER_ERROR)
    # A 404 for a known URL has a description that names the missing namespace. For an unknown URL, Flask itself writes
    # the description, which only suggests a typing error.
    message = error.description if status == HTTPStatus.NOT_FOUND and flask.request.url_rule else None
    message = message or f"{status.description or status.phrase}."
    allowed = {"Allow": "GET, HEAD"} if status == HTTPStatus.METHOD_NOT_ALLOWED else None
    return _answer(views.render("error.html", status=status, message=message, root=_root()), status, allowed)


def _root() -> str:
    # The path to the overview is relative, so that links also work behind a proxy that adds a path prefix.
    return "../" * (flask.request.path.count("/") - 1)


def _answer(
    text: str, status: HTTPStatus = HTTPStatus.OK, headers: Mapping[str, str] | None = None, kind: str = "html"
) -> flask.Response:
    return flask.Response(text, status.value, headers, content_type=f"text/{kind}; charset=utf-8")


def _finish(response: flask.Response) -> flask.Response:
    # Content types in `ZIPPED` are compressed. The stream of events is not, because compression would delay events.
    response.headers.update(HEADERS)
    is_static = flask.request.endpoint == "static"
    response.headers["Cache-Control"] = "no-cache" if is_static else "no-store"
    if response.mimetype in ZIPPED and response.status_code == HTTPStatus.OK and flask.request.method == "GET":
        response.vary.add("Accept-Encoding")
        body = response.get_data()
        if len(body) >= MIN_ZIPPED_BYTES and flask.request.accept_encodings.quality("gzip") > 0:
            response.set_data(gzip.compress(body, compresslevel=5, mtime=0))
            response.headers["Content-Encoding"] = "gzip"
    return response


TYPES = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}


class Asset(msgspec.Struct, frozen=True):
    """A static file of the page. ``tag``: its ETag, which is a hash of the content."""

    body: bytes
    content_type: str
    tag: str


def read_assets() -> Mapping[str, Asset]:
    found = {}
    for file in resources.files("controller.ui").joinpath("static").iterdir():
        body, kind = file.read_bytes(), file.name.rpartition(".")[2]
        if kind in TYPES:
            found[file.name] = Asset(body, TYPES[kind], hashlib.sha256(body).hexdigest()[:16])
    return found
