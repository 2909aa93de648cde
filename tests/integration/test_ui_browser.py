"""Tests of the usage page in a browser: mouse, keyboard, screen reader, screen widths, and live updates."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from playwright.sync_api import Browser, Page, expect

from controller.seen_events import ReportedObject
from controller.ui.document import Holder
from examples.usage import Sample, ago, model_use, namespace_use
from tests.browser import BORDER, CONTRASTS, DISCERNIBLE, NARROW, READABLE, WIDE, Tab, tab
from tests.integration.pages import Served, cell
from vcuda.ledger.report import TeamUse

pytestmark = pytest.mark.slow

in_schemes = pytest.mark.parametrize("scheme", ["light", "dark"])
in_sizes = pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
Size = tuple[int, int]


def names(page: Page) -> list[str]:
    found = page.locator("#rows > tr:not([hidden]) > th a, .pods #rows > tr:not([hidden]) > th")
    return [row.strip() for row in found.all_inner_texts()]


@pytest.mark.parametrize("path", ["", "namespaces/notebooks", "?sort=fullest&order=desc&q=s", "namespaces/robotics"])
@in_schemes
@in_sizes
def test_the_page_renders_without_errors_and_every_text_and_field_is_readable(
    browser: Browser, leader: Served, path: str, scheme: str, size: Size
) -> None:
    """The test covers each color of a used share. The page must call no other host, and must not be too wide."""
    with tab(browser, size, color_scheme=scheme) as opened:
        page = opened.open(leader.url + path)
        assert page.evaluate("document.scrollingElement.scrollWidth") <= size[0]
        if not path:
            leader.sample.report(namespace_use("steps", *(model_use(f"S{step:02}", 10, step) for step in range(12))))
            for step in range(12):
                expect(cell(page, "steps", f"S{step:02}")).to_have_class(re.compile(rf"\bh{step}\b"))
            page.wait_for_selector("#state[data-state=live]")
        assert all(url.startswith(leader.url) for url in opened.asked)
        found = page.evaluate(CONTRASTS)
        assert len(found) > 10
        assert page.get_by_role("searchbox").evaluate(BORDER) >= DISCERNIBLE
        assert {text: round(contrast, 2) for text, contrast in found.items() if contrast < READABLE} == {}


def test_a_click_on_a_header_sorts_and_the_address_keeps_it(opened: Tab, leader: Served) -> None:
    page = opened.open(leader.url)
    assert names(page) == sorted(leader.sample.uses)
    header = page.get_by_role("columnheader", name="V100")
    header.get_by_role("link").click()
    expect(header).to_have_attribute("aria-sort", "descending")
    assert names(page)[:3] == ["genomics", "maps-vision", "recsys"]
    assert page.url.endswith("?sort=model.V100&order=desc")
    header.get_by_role("link").click()
    expect(header).to_have_attribute("aria-sort", "ascending")
    assert names(page)[0] == "robotics"
    page.go_back()
    expect(header).to_have_attribute("aria-sort", "descending")
    page.reload()
    assert names(page)[0] == "genomics"


def test_sorting_by_keyboard_keeps_the_focus_and_is_announced(opened: Tab, leader: Served) -> None:
    page = opened.open(leader.url)
    page.locator("#by-1").focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    header = page.get_by_role("columnheader", name="A100-80G")
    expect(header).to_have_attribute("aria-sort", "descending")
    expect(header.get_by_role("link")).to_be_focused()
    expect(page.locator("#said")).to_have_text("Sorted by A100-80G, descending")


def test_typing_searches_at_once_and_the_address_keeps_it(opened: Tab, leader: Served) -> None:
    page = opened.open(leader.url)
    page.get_by_role("searchbox", name="Find a namespace").press_sequentially("se")
    assert names(page) == ["chat-serving", "search-index", "speech-research"]
    expect(page.locator("#count")).to_have_text("3 namespaces of 14")
    expect(page.locator("#said")).to_have_text("3 namespaces of 14")
    expect(page).to_have_url(f"{leader.url}?q=se")
    page.get_by_role("columnheader", name="Fullest limit").get_by_role("link").click()
    expect(page.get_by_role("columnheader", name="Fullest limit")).to_have_attribute("aria-sort", "descending")
    assert names(page) == ["speech-research", "chat-serving", "search-index"]
    page.get_by_role("searchbox").fill("nobody")
    expect(page.get_by_text("No namespace matches")).to_be_visible()
    page.get_by_role("searchbox").fill("")
    expect(page.locator("#count")).to_have_text("14 namespaces")


def test_without_a_script_the_page_names_other_ways_to_read_the_figures(browser: Browser, leader: Served) -> None:
    with tab(browser, java_script_enabled=False) as opened:
        opened.page.goto(leader.url)
        expect(opened.page.get_by_text("download usage.json")).to_be_visible()


def test_a_change_shows_without_a_reload_and_is_announced(opened: Tab, leader: Served) -> None:
    page = opened.open(leader.url)
    page.evaluate("window.untouched = true")
    page.locator('#rows > tr[data-ns="robotics"] > th a').focus()
    leader.sample.report(namespace_use("robotics", model_use("V100", 4, 3, 1), model_use("M40", 4)))
    expect(cell(page, "robotics", "V100")).to_have_text("3 of 41 pending")
    expect(cell(page, "robotics", "V100")).to_have_class("h7")
    expect(page.locator("#said")).to_have_text("Changed: robotics")
    expect(page.locator('#rows > tr[data-ns="robotics"] > th a')).to_be_focused()
    assert page.evaluate("window.untouched")


def test_a_row_that_a_search_hides_stays_hidden_as_it_changes(opened: Tab, leader: Served) -> None:
    page = opened.open(leader.url)
    page.get_by_role("searchbox").fill("recsys")
    leader.sample.report(namespace_use("ci", model_use("T4", 4, 4)), namespace_use("recsys", model_use("V100", 24, 2)))
    expect(cell(page, "recsys", "V100")).to_have_text("2 of 24")
    assert names(page) == ["recsys"]


def test_a_rejection_shows_with_its_reason(opened: Tab, leader: Served) -> None:
    page = opened.open(leader.url)
    reason = "exceeded quota: T4 in namespace ci, requested: 8 cards, used: 0.6 (0 pending), limited: 4"
    rejected = ReportedObject("ci", "Job", "huge", reason, ago(seconds=1))
    leader.sample.rejections = (rejected, *(leader.sample.rejections or ()))
    first = page.get_by_role("region", name="Recent rejections").get_by_role("listitem").first
    expect(first).to_contain_text("Job huge")
    expect(first).to_contain_text(reason)
    expect(page.locator("#said")).to_have_text("Rejected in ci")
    first.get_by_role("link", name="ci").click()
    page.wait_for_url("**/namespaces/ci")
    expect(page.get_by_text(reason)).to_be_visible()


def test_a_new_or_deleted_namespace_shows(opened: Tab, leader: Served) -> None:
    page = opened.open(f"{leader.url}?sort=fullest&order=desc")
    leader.sample.report(namespace_use("brand-new", model_use("T4", 1, 1)))
    expect(page.locator('#rows > tr[data-ns="brand-new"]')).to_be_visible()
    assert names(page).index("brand-new") < names(page).index("robotics")
    leader.sample.uses = {name: use for name, use in leader.sample.uses.items() if name != "brand-new"}
    expect(page.locator('#rows > tr[data-ns="brand-new"]')).to_have_count(0)


def test_a_new_pod_shows_on_the_page_of_its_namespace(opened: Tab, leader: Served) -> None:
    page = opened.open(leader.url)
    page.get_by_role("link", name="robotics").click()
    expect(page.get_by_text("No pod or claim here holds a card.")).to_be_visible()
    page.wait_for_selector("#state[data-state=live]")
    leader.sample.holders["robotics"] = (Holder("pod", "walker-0", "V100", 2.5, 0, "", ago(seconds=3)),)
    leader.sample.report(namespace_use("robotics", model_use("V100", 4, 2.5), model_use("M40", 4)))
    row = page.get_by_role("row", name="walker-0")
    expect(row).to_contain_text("2.5")
    expect(row).to_contain_text("not placed yet")
    leader.sample.holders["robotics"] = (Holder("pod", "walker-0", "V100", 2.5, 0, "gpu-v100-3", ago(seconds=4)),)
    expect(row).to_contain_text("gpu-v100-3")


def test_the_namespaces_of_a_team_are_listed_after_the_limits_of_the_team(
    browser: Browser, served: Callable[[Sample], Served]
) -> None:
    team = TeamUse("vision", (model_use("T4", 8, 6),))
    uses = {
        name: replace(namespace_use(name, model_use("T4", 8, used)), team=team) for name, used in (("a", 5), ("z", 1))
    }
    leader = served(Sample({**uses, "b": namespace_use("b", model_use("T4", 2))}))
    with tab(browser) as opened:
        page = opened.open(leader.url)
        rows = page.locator("#rows > tr > th").all_inner_texts()
        assert [" ".join(row.split()) for row in rows] == ["b", "team vision", "ateam vision", "zteam vision"]
        expect(cell(page, "team vision", "T4")).to_have_text("6 of 8")
        page = opened.open(f"{leader.url}namespaces/a")
        tile = page.get_by_role("listitem").filter(has_text="T4 in team vision")
        expect(tile).to_contain_text("6 of 8")
        expect(tile).to_contain_text("1 card used by other namespaces")


def test_pods_can_be_sorted_and_searched(opened: Tab, leader: Served) -> None:
    page = opened.open(f"{leader.url}namespaces/notebooks")
    assert names(page)[:3] == ["sweep-4xq2m", "sweep-9kd7c", "lab-7"]
    page.get_by_role("columnheader", name="Age").get_by_role("link").click()
    expect(page.get_by_role("columnheader", name="Age")).to_have_attribute("aria-sort", "descending")
    page.get_by_role("searchbox", name="Find a pod").fill("jup")
    assert names(page) == ["jupyter-anna-0", "jupyter-bo-0", "jupyter-chen-0"]
    expect(page.locator("#count")).to_have_text("3 pods of 7")


def test_claims_are_listed_with_pods_and_each_row_shows_its_kind(opened: Tab, leader: Served) -> None:
    pod = Holder("pod", "walker-0", "V100", 1, 0, "gpu-v100-3", ago(hours=1))
    claims = (Holder("claim", name, "V100", 2, 0, "gpu-v100-4", ago(hours=2)) for name in ("gait", "grip"))
    leader.sample.holders["robotics"] = (pod, *claims)
    page = opened.open(f"{leader.url}namespaces/robotics")
    page.get_by_role("columnheader", name="Kind").get_by_role("link").click()
    expect(page.get_by_role("columnheader", name="Kind")).to_have_attribute("aria-sort", "ascending")
    expect(page.locator('#rows td[data-m="Kind"]')).to_have_text(["claim", "claim", "pod"])
    page.get_by_role("searchbox", name="Find a pod or claim").fill("g")
    expect(page.locator("#count")).to_have_text("2 pods and claims of 3")
    page.get_by_role("searchbox", name="Find a pod or claim").fill("grip")
    expect(page.locator("#count")).to_have_text("1 pod or claim of 3")


def test_a_reader_whose_session_at_the_proxy_has_ended_is_led_to_the_login(
    opened: Tab, leader: Served, served: Callable[[Sample], Served]
) -> None:
    page = opened.open(leader.url)
    # The usage page may load nothing from another origin, and the login is at another origin. So the browser must open
    # the login as a page.
    leader.login = f"{served(Sample()).url}?login"
    page.get_by_role("columnheader", name="T4").get_by_role("link").click()
    page.wait_for_url(leader.login)


@pytest.mark.parametrize("path", ["", "namespaces/notebooks"])
def test_the_page_shows_when_its_figures_were_read_also_if_they_do_not_change(
    opened: Tab, leader: Served, path: str
) -> None:
    page = opened.open(leader.url + path)
    updated = page.locator("#updated")
    before = updated.get_attribute("datetime")
    assert before
    expect(updated).not_to_have_attribute("datetime", before)
    shown = page.evaluate("(text) => new Date(text).toLocaleTimeString()", updated.get_attribute("datetime"))
    assert len(shown) >= len("1:00:00")
    expect(updated).to_have_text(re.compile(r"\d:\d\d:\d\d"))


def test_a_page_that_waits_for_a_leader_shows_its_figures_when_it_leads(browser: Browser, leader: Served) -> None:
    leader.stand_by()
    opened = Tab(browser)
    page = opened.page
    page.goto(leader.url)
    expect(page.get_by_text("This replica is a standby.")).to_be_visible()
    leader.lead()
    expect(page.get_by_role("heading", name="GPU usage")).to_be_visible()
    assert all("503" in trouble for trouble in opened.troubles)
    opened.context.close()


def test_a_page_that_lost_its_leader_says_so_and_follows_the_next_one(browser: Browser, leader: Served) -> None:
    opened = Tab(browser)
    page = opened.open(leader.url)
    leader.stand_by()
    expect(page.locator("#state")).to_have_text("Connecting again…")
    expect(page.locator("#said")).to_have_text("Connection lost: the figures may be out of date")
    leader.sample.report(namespace_use("robotics", model_use("V100", 4, 4), model_use("M40", 4)))
    leader.lead()
    expect(cell(page, "robotics", "V100")).to_have_text("4 of 4", timeout=30000)
    expect(page.locator("#state")).to_have_text("Live")
    opened.context.close()


def test_a_hidden_tab_makes_no_requests_and_catches_up_when_it_is_visible(opened: Tab, leader: Served) -> None:
    page = opened.open(leader.url)
    page.clock.install()
    see = "(hidden) => { Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });"
    see += " document.dispatchEvent(new Event('visibilitychange')) }"
    page.evaluate(see, True)
    asked = len(opened.asked)
    leader.sample.report(namespace_use("robotics", model_use("V100", 4, 2), model_use("M40", 4)))
    page.clock.run_for(60_000)
    assert len(opened.asked) == asked
    page.evaluate(see, False)
    expect(cell(page, "robotics", "V100")).to_have_text("2 of 4")


def test_the_first_tab_key_skips_the_header(opened: Tab, leader: Served) -> None:
    page = opened.open(leader.url)
    page.keyboard.press("Tab")
    skip = page.get_by_role("link", name="Skip to the content")
    expect(skip).to_be_focused()
    assert (skip.bounding_box() or {"y": -1})["y"] >= 0
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()


@pytest.mark.parametrize("path", ["", "namespaces/notebooks"])
def test_everything_can_be_reached_by_the_tab_key_and_shows_its_focus(opened: Tab, leader: Served, path: str) -> None:
    page = opened.open(leader.url + path)
    usable = page.locator("a[href], button, input:not([type=hidden]), [tabindex='0']").count()
    reached = []
    for _ in range(usable):
        page.keyboard.press("Tab")
        focus = page.evaluate(
            "() => { const here = document.activeElement, style = getComputedStyle(here);"
            " return [here.outerHTML.slice(0, 80), style.outlineStyle, parseFloat(style.outlineWidth)] }"
        )
        reached.append(focus[0])
        assert focus[1] != "none", focus
        assert focus[2] >= 2, focus
    assert len(reached) == usable
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement === document.body || document.activeElement.className === 'skip'")


@in_sizes
def test_a_screen_reader_finds_a_table_with_headers_at_every_width(
    browser: Browser, leader: Served, size: Size
) -> None:
    with tab(browser, size) as opened:
        page = opened.open(leader.url)
        tree = page.locator("body").aria_snapshot()
        parts = ("- banner:", '- navigation "Sections":', "- main:", "- contentinfo:", '- link "Skip to the content"')
        headings = ('- heading "GPU usage" [level=1]', '- heading "Namespaces" [level=2]', '- columnheader "Namespace')
        table = ('- searchbox "Find a namespace"', '- rowheader "ads-ranking"', "18 of 16 over")
        for wanted in (*parts, *headings, *table):
            assert wanted in tree, f"{wanted} not in\n{tree}"
        assert tree.count("- rowheader ") == 14
        assert tree.count("- row ") == tree.count("- rowheader ") + 1
        expect(page.get_by_role("table")).to_have_accessible_description(re.compile("Cards used of each namespace"))


def test_hostile_names_are_shown_as_text(browser: Browser, served: Callable[[Sample], Served]) -> None:
    hostile = """<img src=x onerror="alert(1)">"'</td></script>"""
    sample = Sample()
    sample.report(namespace_use(hostile, model_use(hostile, 8, 1)))
    leader = served(sample)
    with tab(browser) as opened:
        page = opened.open(leader.url)
        assert names(page) == [hostile]
        sample.report(namespace_use(hostile, model_use(hostile, 8, 2)))
        sample.rejections = (ReportedObject(hostile, hostile, hostile, hostile, ago(seconds=1)),)
        expect(page.locator("#rows > tr > td").last).to_contain_text("2 of 8")
        expect(page.get_by_role("region", name="Recent rejections").get_by_role("listitem")).to_contain_text(hostile)
        assert page.locator("main img").count() == 0
