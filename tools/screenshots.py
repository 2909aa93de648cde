"""Takes the pictures of the usage page that the documents show: of a made-up company, at a time that stands still."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from playwright.sync_api import Browser

from controller.ui.app import Standing, create_app
from controller.ui.feed import Feed
from controller.ui.leading import serve
from controller.ui.page import Views
from tests.browser import NARROW, WIDE, browsing, tab
from tests.usage_samples import NOW, company

DOCS = Path(__file__).parents[1] / "docs"


def main() -> None:
    """Write docs/usage-page-*.png."""
    views = Views(lambda: NOW)
    feed = Feed(company().source(), views)
    feed.start()
    server = serve(("127.0.0.1", 0), create_app(lambda: Standing(feed, ""), views))
    url = f"http://127.0.0.1:{server.port}/"
    with browsing() as browser:
        take(browser, url, "wide", WIDE, 1240, color_scheme="light")
        take(browser, f"{url}?sort=total&order=desc", "wide-dark", WIDE, 1240, color_scheme="dark")
        take(browser, url, "narrow", NARROW, 1180, color_scheme="light")
        take(browser, f"{url}namespaces/notebooks", "narrow-dark", NARROW, 1180, color_scheme="dark")


def take(browser: Browser, url: str, name: str, size: tuple[int, int], height: int, **context: Any) -> None:
    """Write one picture, so many pixels high."""
    with tab(browser, (size[0], height), **context) as opened:
        opened.page.clock.set_fixed_time(NOW)
        opened.open(url)
        path = DOCS / f"usage-page-{name}.png"
        opened.page.screenshot(path=path)
        print(f"{path.name}: {path.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
