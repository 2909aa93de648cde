"""Fixtures for tests against servers with scripted answers, and for fuzz tests of the webhook."""

import resource
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from examples.usage import Sample, company
from tests.api_double import ApiDouble
from tests.browser import Tab, browsing, tab
from tests.integration.fuzzing import Target, under_fire
from tests.integration.pages import Served, serve_page
from tests.integration.scripted import Script, serving, write_kubeconfig
from tests.rendered import BASE, Json, rendered
from vcuda.kube import Kube


@pytest.fixture
def api() -> ApiDouble:
    return ApiDouble()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A running webhook to which tests send arbitrary input.

    Some tests open thousands of connections, so the limit of open files of the test process is raised.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with under_fire(tmp_path_factory.mktemp("fuzz")) as running:
        yield running
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def server(script: Script) -> Iterator[str]:
    with serving(script) as url:
        yield url


@pytest.fixture
def kubeconfig(server: str, tmp_path: Path) -> Path:
    write_kubeconfig(tmp_path / "kubeconfig", server, {"token": "letmein"})
    return tmp_path / "kubeconfig"


@pytest.fixture
def kube(kubeconfig: Path) -> Iterator[Kube]:
    kube = Kube.connect(kubeconfig)
    yield kube
    kube.close()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory for certificates, which does not exist yet."""
    return tmp_path / "certs"


@pytest.fixture
def base() -> list[Json]:
    return rendered(BASE)


# Fixtures for tests that open the usage page in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as running:
        yield running


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Sample], Served]]:
    monkeypatch.setattr("controller.ui.document.MIN_INTERVAL_SECONDS", 0.0)
    with ExitStack() as teardown:
        yield lambda sample: serve_page(sample, teardown)


@pytest.fixture
def leader(served: Callable[[Sample], Served]) -> Served:
    return served(company())


@pytest.fixture
def opened(browser: Browser, leader: Served) -> Iterator[Tab]:
    """A browser tab with a wide window. After the test, the tab is closed before the server of the page."""
    assert leader.url
    with tab(browser) as fresh:
        yield fresh
