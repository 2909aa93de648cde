"""Drives Debian's headless Chromium by Playwright. Each page records every error that occurs in it."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.waiting import PATIENT

PROGRAM = shutil.which("chromium")

WIDE = (1280, 900)
NARROW = (390, 844)

# The page collects violations of its Content Security Policy, so that a test can read them. Chromium also reports them
# on the console.
REMEMBER_VIOLATIONS = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => window.violations.push(event.violatedDirective));
"""

READABLE = 4.5
"""Minimum contrast between normal text and its background (WCAG 2, success criterion 1.4.3)."""

DISCERNIBLE = 3.0
"""Minimum contrast of visible parts that are not text (WCAG 2.1, success criterion 1.4.11)."""

OF_COLORS = """
  const parse = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => color.slice(0, 3)
    .map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const apart = (...colors) => {
    const [one, other] = colors.map(light).sort((a, b) => b - a);
    return (one + 0.05) / (other + 0.05);
  };
"""
CONTRASTS = (
    f"() => {{{OF_COLORS}"
    """
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = parse(getComputedStyle(at).backgroundColor);
      if (color.length === 3 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  const contrast = (element, style) => {
    const [behind, opacity] = [ground(element), Number(style.opacity)];
    return apart(parse(style.color).slice(0, 3).map((v, i) => v * opacity + behind[i] * (1 - opacity)), behind);
  };
  const found = {};
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility()) continue;
    if (element.closest(".unseen, .skip, noscript")) continue;
    found[`${element.className}: ${element.textContent.trim()}`] = contrast(element, getComputedStyle(element));
  }
  for (const element of document.querySelectorAll("main *, header *")) {
    const before = getComputedStyle(element, "::before");
    if (!/[\\w]/.test(before.content.replace("none", "")) || !element.checkVisibility()) continue;
    found[`before ${element.className}: ${before.content}`] = contrast(element, before);
  }
  return found;
}
"""
)
"""JavaScript that returns the contrast of each visible text to its background, also of text that CSS adds."""

BORDER = (
    f"(element) => {{{OF_COLORS}"
    """
  const { borderTopColor, backgroundColor } = getComputedStyle(element);
  return apart(parse(borderTopColor), parse(backgroundColor));
}
"""
)
"""JavaScript that returns the contrast between a field's border and the field's own background."""


@contextmanager
def browsing() -> Iterator[Browser]:
    if PROGRAM is None:
        pytest.skip("no chromium on PATH: apt-get install chromium")
    # The page requests its figures every few seconds, so a change may need longer than Playwright's 5 s.
    expect.set_options(timeout=PATIENT * 1000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=PROGRAM, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


class Tab:
    """One page in its own browser context. It records every console message, error and requested address."""

    def __init__(self, browser: Browser, size: tuple[int, int] = WIDE, **context: Any) -> None:
        width, height = size
        self.context = browser.new_context(viewport={"width": width, "height": height}, **context)
        self.page: Page = self.context.new_page()
        self.troubles: list[str] = []
        self.asked: list[str] = []
        self.page.add_init_script(REMEMBER_VIOLATIONS)
        self.page.on("console", lambda message: self.troubles.append(f"console {message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.page.on("dialog", lambda dialog: self.troubles.append(f"dialog: {dialog.message}"))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def open(self, url: str) -> Page:
        self.page.goto(url)
        self.page.wait_for_selector("#state[data-state=live]")
        return self.page

    def close(self) -> None:
        violations = self.page.evaluate("window.violations") if self.context.browser else []
        self.context.close()
        if self.troubles or violations:
            raise AssertionError(f"in the browser: {self.troubles}, violations of the policy: {violations}")


@contextmanager
def tab(browser: Browser, size: tuple[int, int] = WIDE, **context: Any) -> Iterator[Tab]:
    """Yield a tab, and fail the test if an error occurs in it. ``context``: Playwright's options for the context."""
    opened = Tab(browser, size, **context)
    try:
        yield opened
    except BaseException:
        print("in the browser:", opened.troubles)
        opened.context.close()
        raise
    opened.close()
