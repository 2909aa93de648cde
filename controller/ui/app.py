"""The routes of the usage page, and the HTTP headers of every response.

Every replica of the controller serves the page, but only the leader has the data for it. A standby answers 503 with the
reason, and the page repeats its request, because the next connection through a Service may reach the leader. A redirect
would not work, because browsers outside the cluster cannot reach the leader's address. For load balancers,
``/leading`` answers 200 on the leader and 503 on standbys.

The page has no authentication. By DNS rebinding, a hostile web site could read the page through a user's browser: the
site would resolve its own name to the address of this page. So the page answers only requests with a known host name.
"""

import functools
import gzip
import ipaddress
from collections.abc import Callable, Collection, Mapping
from http import HTTPStatus
from importlib import resources
from urllib.parse import urlsplit

import flask
from werkzeug.exceptions import HTTPException

from controller.ui import export
from controller.ui.document import Body, Documents, Holders

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

TYPES = {"css": "text/css", "html": "text/html", "js": "text/javascript", "svg": "image/svg+xml"}
"""The content type of each static file, by the end of its name."""

Standing = Documents | str
"""The usage data if this replica is the leader and ready; otherwise the reason why it has no data."""


def create_app(standing: Callable[[], Standing], hosts: Collection[str] = ()) -> flask.Flask:
    """Return the usage page as a WSGI app. ``standing``: returns its data. ``hosts``: the allowed host names."""
    app = flask.Flask(__name__, static_folder=None, template_folder=None)
    files = [*resources.files("controller.ui").joinpath("static").iterdir()]
    assets = {file.name: file.read_bytes() for file in files if file.name.rpartition(".")[2] in TYPES}
    shell = assets.pop("page.html")
    app.config["PROVIDE_AUTOMATIC_OPTIONS"] = False  # Flask's own answers to OPTIONS would lack security headers.

    def led(view: Callable[..., flask.Response]) -> Callable[..., flask.Response]:
        def answer(**values: str) -> flask.Response:
            now = standing()
            return _standby(now) if isinstance(now, str) else view(now, **values)

        return answer

    def page(name: str = "") -> flask.Response:  # noqa: ARG001  # The script reads the namespace from the URL.
        # The path to the overview is relative, so that links also work behind a proxy that adds a path prefix.
        root = "../" * (flask.request.path.count("/") - 1)
        status = HTTPStatus.SERVICE_UNAVAILABLE if isinstance(standing(), str) else HTTPStatus.OK
        return _answer(shell.replace(b"ROOT/", root.encode() or b"./"), "text/html", status)

    app.before_request(lambda: None if is_own(flask.request.headers.get("Host"), hosts) else _misdirected())
    app.add_url_rule("/", "overview", page)
    app.add_url_rule("/namespaces/<name>", "namespace", page)
    app.add_url_rule("/usage.<any(csv,json):kind>", "usage", led(_usage))
    app.add_url_rule("/namespaces/<name>/pods.<any(csv,json):kind>", "pods", led(_pods))
    app.add_url_rule("/leading", "leading", led(lambda _: _answer("leading\n")))
    app.add_url_rule("/static/<name>", "static", lambda name: _asset(assets, name))
    app.register_error_handler(HTTPException, _error)
    app.after_request(_finish)
    return app


def _usage(documents: Documents, kind: str) -> flask.Response:
    document, body = documents.current()
    return _json(body) if kind == "json" else _file("gpu-usage.csv", export.usage_csv(document.namespaces))


def _pods(documents: Documents, name: str, kind: str) -> flask.Response:
    document, _ = documents.current()
    holders = Holders.of(documents.holders(name))
    if not holders.items and all(use.namespace != name for use in document.namespaces):
        missing = f"Namespace {name} does not exist, or has neither a GPU quota nor pods or claims that hold GPUs."
        flask.abort(HTTPStatus.NOT_FOUND, missing)
    if kind == "json":
        return _json(Body.of(holders, documents.now()))
    return _file("gpu-pods.csv", export.holders_csv(holders.items))


def _json(body: Body) -> flask.Response:
    response = _answer(body.text, "application/json")
    response.set_etag(body.tag, weak=True)  # The time in the body does not change the ETag, so the ETag is weak.
    response.make_conditional(flask.request)
    return response


def _file(name: str, text: str) -> flask.Response:
    return _answer(text, "text/csv", headers={"Content-Disposition": f"attachment; filename={name}"})


def _asset(assets: Mapping[str, bytes], name: str) -> flask.Response:
    if name not in assets:
        flask.abort(HTTPStatus.NOT_FOUND)
    response = _answer(assets[name], TYPES[name.rpartition(".")[2]])
    response.add_etag(weak=True)  # A weak ETag may be the same for compressed and plain bodies.
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


def _misdirected() -> flask.Response:
    message = "This page is not served under this host name. To allow the name, start the controller with --ui-host.\n"
    return _answer(message, status=HTTPStatus.MISDIRECTED_REQUEST)


def _standby(reason: str) -> flask.Response:
    return _answer(f"{reason}\n", status=HTTPStatus.SERVICE_UNAVAILABLE, headers={"Retry-After": "2"})


def _error(error: HTTPException) -> flask.Response:
    status = HTTPStatus(error.code or HTTPStatus.INTERNAL_SERVER_ERROR)
    # A 404 for a known URL has a description that names the missing namespace. For an unknown URL, Flask itself writes
    # the description, which only suggests a typing error.
    message = error.description if status == HTTPStatus.NOT_FOUND and flask.request.url_rule else None
    allowed = {"Allow": "GET, HEAD"} if status == HTTPStatus.METHOD_NOT_ALLOWED else None
    return _answer(f"{message or status.phrase}\n", status=status, headers=allowed)


def _answer(
    text: str | bytes,
    kind: str = "text/plain",
    status: HTTPStatus = HTTPStatus.OK,
    headers: Mapping[str, str] | None = None,
) -> flask.Response:
    return flask.Response(text, status.value, headers, mimetype=kind)


def _finish(response: flask.Response) -> flask.Response:
    response.headers.update(HEADERS)
    response.headers["Cache-Control"] = "no-cache" if flask.request.endpoint == "static" else "no-store"
    if response.status_code == HTTPStatus.OK and flask.request.method == "GET":
        response.vary.add("Accept-Encoding")
        if flask.request.accept_encodings.quality("gzip") > 0:
            response.set_data(_zip(response.get_data()))
            response.headers["Content-Encoding"] = "gzip"
    return response


@functools.lru_cache(maxsize=4)  # Many browsers request the same document.
def _zip(body: bytes) -> bytes:
    return gzip.compress(body, compresslevel=5, mtime=0)
