"""Tests of the usage page of a real controller in a browser. It must show changes of a real control plane."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.browser import Tab, browsing, tab
from tests.e2e.cluster import Cluster
from tests.e2e.installation import Installation, controlling, limited_team
from tests.e2e.workloads import workload
from tests.integration.reviews import card_pod, gpu_pod, on_m40
from tests.processes import ControllerProcess

pytestmark = pytest.mark.one_version

ENTRY = {"quota": {"M40": {"cards": 4, "memory": "40Gi"}, "P100": 2.5}}
FLAGS = ("--ui-address", "127.0.0.1:0")
SOON = 20000
"""Milliseconds within which the page must show a change on a busy machine. Usually it takes a second or two."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as running:
        yield running


@pytest.fixture(scope="module")
def leader(own: Installation, account: Cluster) -> Iterator[ControllerProcess]:
    with controlling(own, *FLAGS, kubeconfig=account.kubeconfig) as running:
        yield running


@pytest.fixture
def team(own: Installation, leader: ControllerProcess) -> Iterator[str]:
    assert leader.process.poll() is None
    with limited_team(own, ENTRY) as namespace:
        yield namespace


@pytest.fixture
def opened(browser: Browser, team: str, leader: ControllerProcess) -> Iterator[Tab]:
    with tab(browser) as fresh:
        fresh.open(url_of(leader))
        expect(row_of(fresh.page, team)).to_be_visible(timeout=SOON)
        yield fresh


def url_of(process: ControllerProcess) -> str:
    return f"http://127.0.0.1:{process.await_log('serving the usage page')['port']}/"


def row_of(page: Page, namespace: str) -> Locator:
    return page.locator(f'#rows > tr[data-ns="{namespace}"]')


def test_the_page_shows_the_creation_and_the_end_of_a_pod(cluster: Cluster, opened: Tab, team: str) -> None:
    page = opened.page
    expect(row_of(page, team)).to_contain_text("0 of 4")
    page.evaluate("window.untouched = true")
    share = {"nvidia.com/vcuda-core": "50", "nvidia.com/vcuda-memory": "2048"}
    for pod in (gpu_pod("half", team, share), card_pod("two", team, cards=2)):
        cluster.create(on_m40(pod))
    cell = row_of(page, team).locator('td[data-m="M40"]')
    expect(cell).to_contain_text("2.5 of 4", timeout=SOON)
    expect(cell).not_to_contain_text("pending", timeout=SOON)
    expect(cell).not_to_contain_text("reserved")
    expect(cell).to_contain_text("22 GiB of 40 GiB")
    cluster.delete_pod(team, "two")
    expect(cell).to_contain_text("0.5 of 4", timeout=SOON)
    assert page.evaluate("window.untouched")


@pytest.mark.usefixtures("controller_manager")
def test_the_page_shows_a_rejected_deployment_with_the_reason(cluster: Cluster, opened: Tab, team: str) -> None:
    page = opened.page
    cluster.create(workload("Deployment", team, "greedy", pod=card_pod("", team, cards=5)))
    rejections = page.get_by_role("region", name="Recent rejections").get_by_role("listitem").filter(has_text=team)
    expect(rejections).to_have_count(1, timeout=SOON)
    expect(rejections).to_contain_text("ReplicaSet greedy-")
    expect(rejections).to_contain_text(f"larger than the GPU quota: M40 in namespace {team}, requested: 5 cards")
    rejections.get_by_role("link", name=team).click()
    expect(page.get_by_text("requested: 5 cards")).to_be_visible()
