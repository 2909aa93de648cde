"""Renders the usage page as HTML. Every value is escaped, because tenants choose names and messages."""

import datetime
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import jinja2
import msgspec
from markupsafe import Markup

from controller import refusals
from controller.ui import model

Clock = Callable[[], datetime.datetime]
"""A function that returns the current time with its time zone."""


class Links(msgspec.Struct, frozen=True):
    """The URLs to which the usage page links. If a URL is empty, the page has no such link."""

    docs: str = ""
    grafana: str = ""

    def grafana_of(self, namespace: str) -> str:
        """Return the URL of the Grafana dashboard, with the dashboard's variable ``namespace`` set to one namespace."""
        return f"{self.grafana}{'&' if '?' in self.grafana else '?'}var-namespace={quote(namespace, safe='')}"


class Views:
    """Renders the templates of the usage page. ``links``: the links at the top of every page."""

    def __init__(self, clock: Clock = lambda: datetime.datetime.now(datetime.UTC), links: Links | None = None) -> None:
        self._clock = clock
        self._templates = jinja2.Environment(
            loader=jinja2.PackageLoader("controller.ui"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,  # A template that uses a missing value raises an error.
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,  # Template files do not change while the program runs, so jinja2 need not check them.
        )
        self._templates.filters |= {
            "number": model.number,
            "local": model.local,
            "memory": model.memory,
            "path": lambda name: quote(name, safe=""),  # An unquoted slash in a name would change the path of a URL.
            "time": self.time,
            "plural": model.plural,
            "until": self.until,
        }
        self._templates.globals["links"] = links or Links()
        self._row = self._templates.get_template("_row.html")

    def render(self, template: str, **values: Any) -> str:
        return self._templates.get_template(template).render(values)

    def row(self, row: model.NamespaceRow, columns: tuple[str, ...]) -> str:
        return self._row.render(row=row, columns=columns)

    def now(self) -> str:
        return f"{self._clock().astimezone(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}"

    def time(self, text: str) -> Markup:
        """Return an HTML element that shows how long ago ``text`` (RFC 3339) was. Its attributes contain ``text``."""
        at = refusals.moment(text)
        if at is None:
            return Markup("<span>{}</span>").format(text or "unknown")
        return Markup('<time datetime="{}" title="{}">{}</time>').format(
            text, text, model.span((self._clock() - at).total_seconds())
        )

    def until(self, text: str) -> tuple[str, str]:
        """Return a pair: the time left until ``text`` (RFC 3339), and ``ended``, ``soon``, ``later`` or ``unknown``."""
        at = refusals.moment(text)
        if at is None:
            return "the end is not known", "unknown"
        left = (at - self._clock()).total_seconds()
        if left <= 0:
            return f"ended {model.span(-left)} ago", "ended"
        return f"{model.span(left)} left", "soon" if left < SOON else "later"


SOON = 14 * 86400
"""A certificate that expires within this many seconds is highlighted, so that people can repair its renewal in time."""
