"""Tests of the figures and texts that the usage page shows in a browser."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from playwright.sync_api import Browser, expect

from controller.certificates import ServedCertificate
from controller.ui.document import Holder, ModelCards
from examples.usage import Sample, ago, crowd, model_use, namespace_use
from tests.browser import Tab
from tests.integration.pages import Served, cell
from vcuda.ledger.report import GrantUse, ModelUse

pytestmark = pytest.mark.slow

STEPS = {
    "unused": (0, 8, 0),
    "a hundredth of a card is visible": (0.01, 8, 1),
    "under a tenth": (0.79, 8, 1),
    "a tenth": (0.8, 8, 1),
    "seven tenths are 6.99 in floats": (5.6, 8, 7),
    "three tenths are 3.0 in floats": (0.3, 1, 3),
    "two tenths are 1.99 in floats": (0.01, 0.05, 2),
    "nearly full": (7.99, 8, 9),
    "full": (8, 8, 10),
    "over the limit": (8.01, 8, 11),
    "a limit of 0 in use": (1, 0, 11),
    "a limit of 0 that is not used": (0, 0, 0),
}


def test_the_color_of_a_cell_follows_the_used_share(opened: Tab, leader: Served) -> None:
    page = opened.open(leader.url)
    use = "([used, limit, memory_used = null, memory_limit = null]) => step({ used, limit, memory_used, memory_limit })"
    assert {name: page.evaluate(use, each[:2]) for name, each in STEPS.items()} == {
        name: each[2] for name, each in STEPS.items()
    }
    # If memory is limited too, the page shows the larger of both shares.
    fuller = [(1, 8, 900, 1000), (8, 8, 100, 1000), (1, 8, 1001, 1000), (50, None, 500, 1000)]
    assert [page.evaluate(use, each) for each in fuller] == [9, 10, 11, 5]


def test_texts_are_as_people_write_them(opened: Tab, leader: Served) -> None:
    page = opened.open(leader.url)
    written: dict[str, dict[float, str]] = {
        "number": {8: "8", 2.5: "2.5", 0.05: "0.05", 100: "100", 0: "0"},
        "memory": {0: "0 MiB", 1023: "1023 MiB", 1024: "1 GiB", 1536: "1.5 GiB", 81920: "80 GiB"},
        "span": {-5: "0 s", 0: "0 s", 59.9: "59 s", 60: "1 min", 3599: "59 min", 3600: "1 h", 90000: "1 d"},
    }
    for function, texts in written.items():
        assert {value: page.evaluate(f"(value) => {function}(value)", value) for value in texts} == texts


@pytest.mark.parametrize(
    ("uses", "shown"),
    [
        ([model_use("M40", 8, 7.99), model_use("T4", 8, 1)], "99 % of M40"),
        ([model_use("M40", 10, 7)], "70 % of M40"),
        ([model_use("M40", 8, 9)], "112 % of M40"),
        ([model_use("M40", 0, 1), model_use("T4", 8, 8)], "over the limit of M40"),
        ([model_use("M40", 0), model_use("T4", 8, 1)], "12 % of T4"),
        ([model_use("M40", 0)], "blocked"),
        ([], "none"),
    ],
)
def test_the_fullest_limit_is_a_share_and_a_limit_of_0_that_is_not_used_is_not_over(
    opened: Tab, leader: Served, uses: list[ModelUse], shown: str
) -> None:
    leader.sample.report(namespace_use("a", *uses))
    page = opened.open(leader.url)
    expect(cell(page, "a", "Fullest limit")).to_have_text(shown)
    if uses and uses[0] == model_use("M40", 0):
        expect(cell(page, "a", "M40")).to_have_text("blocked")


def test_a_row_shows_what_is_pending_reserved_and_terminating_and_why_it_is_not_in_effect(
    opened: Tab, leader: Served
) -> None:
    missing = "ValidatingWebhookConfiguration vcuda-quota does not exist"
    grant = GrantUse(2, "2026-12-02T00:00:00+01:00", why="a paper")
    use = replace(model_use("M40", 8, 4, 1, reserved=1.5), terminating=2.0, grants=(grant,))
    leader.sample.report(
        replace(namespace_use("a", use, unpinned=("x",)), taking_effect=True),
        replace(namespace_use("b", use, mode="audit"), taking_effect=True, unregistered=missing),
        replace(namespace_use("c", use, mode="warn"), ledger_lost=True),
    )
    page = opened.open(leader.url)
    figures = "4 of 81 pending2 terminating1.5 reserved2 until 2026-12-02T00:00:00+01:00"
    expect(cell(page, "a", "M40")).to_have_text(figures)
    for name, notes in (("a", "taking effect1 unpinned"), ("b", "auditnot in effect"), ("c", "warnledger lost")):
        expect(page.locator(f'#rows > tr[data-ns="{name}"] > th')).to_have_text(f"{name}{notes}")
    expect(page.locator("#part-lead")).to_contain_text(f"not in effect {missing}")
    page.goto(f"{leader.url}namespaces/a")
    expect(page.locator("#part-lead")).to_contain_text("4 of 8 cards in use, 1 of them pending, 1.5 reserved.")
    expect(page.locator("#part-models")).to_contain_text("2.5 available, 1 pending, 1.5 reserved")
    expect(page.locator("#part-models")).to_contain_text("2 of these until 2026-12-02T00:00:00+01:00: a paper")
    reserved = page.locator("#part-models .part-reserved")
    assert (reserved.get_attribute("x"), reserved.get_attribute("width")) == ("50.00%", "18.75%")


def test_a_sum_over_different_models_says_so(opened: Tab, leader: Served) -> None:
    page = opened.open(leader.url)
    expect(page.locator("#part-lead")).to_contain_text("141 of 360 cards of 4 models are free, 14 namespaces have")
    leader.sample.models = (ModelCards("T4", 8, 9, 8), ModelCards("M40", None, 2, 4))
    page.reload()
    expect(page.locator("#part-lead")).to_contain_text("0 of 8 cards are free")
    expect(page.locator("#part-models")).to_contain_text("the number of cards is not known")
    page.goto(f"{leader.url}namespaces/notebooks")
    expect(page.locator("#part-lead")).to_contain_text("21.55 of 32 cards of 2 models in use")


def test_the_cards_of_all_models_together_are_shown_if_the_quota_limits_them(opened: Tab, leader: Served) -> None:
    models, total = (model_use("M40", 8, 5), model_use("T4", 16, 4)), model_use("total", 10, 9, reserved=0.5)
    leader.sample.report(replace(namespace_use("a", *models), total=total), namespace_use("b", *models))
    page = opened.open(leader.url)
    expect(cell(page, "a", "Fullest limit")).to_have_text("90 % of total")
    expect(cell(page, "a", "total")).to_have_text("9 of 100.5 reserved")
    expect(cell(page, "b", "Fullest limit")).to_have_text("62 % of M40")
    page.goto(f"{leader.url}namespaces/a")
    expect(page.locator("#part-lead")).to_contain_text("9 of 10 cards of 2 models in use.")
    tile = page.locator("#part-models li").last
    expect(tile).to_have_text("total9 of 100.5 available, 0.5 reserved")


def test_memory_alone_is_shown_if_only_memory_is_limited(opened: Tab, leader: Served) -> None:
    use = ModelUse("A100", None, 50, 0, None, 163840, 81920, card_memory=81920)
    leader.sample.report(namespace_use("a", use))
    page = opened.open(leader.url)
    expect(cell(page, "a", "A100")).to_have_text("5080 GiB of 160 GiB")
    page.goto(f"{leader.url}namespaces/a")
    expect(page.locator("#part-models")).to_contain_text("80 GiB of 160 GiB")
    expect(page.locator("#part-models")).to_contain_text("50 cards charged; a whole card takes 80 GiB")


NOTHING = ("No namespace has a GPU quota yet", "No node has a GPU model yet", "No recent rejections")


def test_empty_tables_say_so(opened: Tab, served: Callable[[Sample], Served]) -> None:
    leader = served(Sample(removals=(), certificates=()))
    page = opened.open(leader.url)
    for text in (*NOTHING, "No stale allocation was removed", "No certificate was found", "Every pod and claim is"):
        expect(page.get_by_text(text)).to_be_visible()


def test_lists_that_are_not_known_yet_are_not_shown_until_they_are(
    opened: Tab, served: Callable[[Sample], Served]
) -> None:
    """A new leader has not read the certificates yet."""
    leader = served(Sample(rejections=None))
    page = opened.open(leader.url)
    expect(page.get_by_text("Rejections are not known yet")).to_be_visible()
    certificates = page.get_by_role("region", name="Certificates")
    expect(certificates).to_have_count(0)
    now = datetime.now(UTC)
    leader.sample.certificates = [
        ServedCertificate("10.0.0.7:8443", end=now + timedelta(days=85, hours=1)),
        ServedCertificate("10.0.0.8:8443", end=now - timedelta(hours=3, minutes=1)),
        ServedCertificate("10.0.0.9:8443", fault="timed out"),
    ]
    expect(certificates.get_by_role("listitem").first).to_contain_text("webhook at 10.0.0.7:844385 d left")
    texts = certificates.get_by_role("listitem").all_inner_texts()
    assert "ended 3 h ago" in texts[1]
    assert "the end is not known" in texts[2]
    assert "timed out" in texts[2]


def test_a_long_list_is_cut_and_the_page_says_so(opened: Tab, served: Callable[[Sample], Served]) -> None:
    leader = served(crowd(520, models=1))
    page = opened.open(leader.url)
    expect(page.locator("#rows > tr")).to_have_count(500)
    expect(page.locator("#count")).to_have_text("500 of 520 namespaces; search to find the others")
    page.get_by_role("searchbox").fill("0519")
    expect(page.locator("#rows > tr")).to_have_count(1)


def test_the_page_of_an_unknown_namespace_says_so(browser: Browser, leader: Served) -> None:
    opened = Tab(browser)
    opened.page.goto(f"{leader.url}namespaces/nobody")
    expect(opened.page.get_by_text("Namespace nobody does not exist")).to_be_visible()
    opened.context.close()


def test_both_pages_link_to_their_files_and_to_other_sites(opened: Tab, leader: Served) -> None:
    docs, grafana = "https://docs.example/gpu", "https://grafana.example/d/vcuda-quota?orgId=1"
    leader.sample.docs, leader.sample.grafana = docs, grafana
    for path, files, own in (("", "usage", ""), ("namespaces/ci", "namespaces/ci/pods", "&var-namespace=ci")):
        page = opened.open(leader.url + path)
        leader.sample.holders["ci"] = (Holder("pod", "p", "T4", 1, 0, "n", ago(hours=1)),)
        page.reload()
        expect(page.get_by_role("link", name="CSV")).to_be_visible()
        links = page.evaluate("[...document.links].map((each) => each.href)")
        assert {docs, grafana + own, f"{leader.url}{files}.csv", f"{leader.url}{files}.json"} <= {*links}
