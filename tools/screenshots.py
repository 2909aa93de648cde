"""Takes the screenshots of the usage page for the documentation, with example data at a fixed time."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

from controller.httpd import Server
from controller.ui.app import create_app
from examples.usage import NOW, company

DOCS = Path(__file__).parents[1] / "docs"
WIDE, NARROW = 1280, 390
"""The widths of the screenshots in pixels."""


def main() -> None:
    """Write docs/usage-page-*.png."""
    sample = company()
    sample.docs, sample.grafana = "https://docs.example.com", "https://grafana.example.com"
    documents = sample.documents()
    server = Server(("127.0.0.1", 0), create_app(lambda: documents), threads=4).in_threads()
    url = f"http://127.0.0.1:{server.port}/"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        take(browser, url, "wide", WIDE, 1240, color_scheme="light")
        take(browser, f"{url}?sort=fullest&order=desc", "wide-dark", WIDE, 1240, color_scheme="dark")
        take(browser, url, "narrow", NARROW, 1180, color_scheme="light")
        take(browser, f"{url}namespaces/notebooks", "narrow-dark", NARROW, 1180, color_scheme="dark")


def take(browser: Browser, url: str, name: str, width: int, height: int, **context: Any) -> None:
    """Write one screenshot of the usage page. ``height``: its height in pixels."""
    own = {"locale": "en-GB", "timezone_id": "UTC", **context}
    page = browser.new_page(viewport={"width": width, "height": height}, **own)
    page.clock.set_fixed_time(NOW)
    page.goto(url)
    page.wait_for_selector("#state[data-state=live]")
    path = DOCS / f"usage-page-{name}.png"
    page.screenshot(path=path)
    page.close()
    print(f"{path.name}: {path.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
