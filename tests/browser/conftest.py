"""A headless Chromium and a server with a key, for all tests of the dashboard's page."""

import contextlib
import uuid
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest
from scripts.chromium import Chromium, Page, find

from dashboard_site import KEY, Site
from serving import PYTHONPATH, write_model


@pytest.fixture(scope="session")
def browser() -> Iterator[Chromium]:
    path = find()
    if path is None:
        pytest.skip("no Chromium is installed (Debian: apt-get install chromium)")
    with Chromium(path, 1280, 900) as running:
        yield running


@pytest.fixture(scope="session")
def site(browser: Chromium, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = write_model(tmp_path_factory.mktemp("models") / "scripted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PYTHONPATH)  # the engine process finds the tests' executor
        running = Site(folder)
        yield running
        running.stop()


def open_dashboard(page: Page, site: Site, key: str) -> None:
    if key:
        source = f"sessionStorage.setItem('octavo-key', '{key}')"
        page.call("Page.addScriptToEvaluateOnNewDocument", source=source)
    page.open(f"{site.server.url}/dashboard")
    page.run("import('/dashboard/app.js').then((module) => { window.page = module.page })")


def check(page: Page, site: Site, allowed: tuple[str, ...]) -> None:
    """All that it asked for was this server, and its console has no errors but those allowed."""
    assert {urlsplit(url).netloc for url in page.requests} <= {urlsplit(site.server.url).netloc}
    assert [error for error in page.errors if not any(text in error for text in allowed)] == []


@pytest.fixture
def open_page(browser: Chromium, site: Site) -> Iterator[Callable[..., Page]]:
    """Opens the dashboard in a fresh tab."""
    with contextlib.ExitStack() as stack:

        def make(key: str = KEY, allowed: tuple[str, ...] = ()) -> Page:
            page = stack.enter_context(browser.page())
            stack.callback(check, page, site, allowed)
            open_dashboard(page, site, key)
            return page

        yield make


@pytest.fixture(scope="session")
def tab(browser: Chromium, site: Site) -> Iterator[Page]:
    with browser.page() as page:
        open_dashboard(page, site, KEY)
        yield page
        assert page.requests


# As it was opened: what a test has done to the page is undone.
RESET = """(() => {
    document.querySelector('#pause[aria-pressed=true]')?.click();
    if (page.feed.paused) page.feed.resume();
    page.follow(null);
    page.maps.pool.fit();
    for (const details of document.querySelectorAll('details')) details.open = false;
    const theme = document.querySelector('#theme');
    theme.value = 'auto';
    theme.dispatchEvent(new Event('change'));
    document.querySelector('#play-form').reset();
    document.activeElement.blur();
    scrollTo(0, 0);
})()"""


@pytest.fixture
def shown(tab: Page, site: Site) -> Iterator[Page]:
    """The dashboard of the server, with a snapshot on the screen."""
    tab.run(RESET)
    tab.emulate(prefers_color_scheme="light")
    tab.resize(1280, 900)
    tab.wait("page.view?.pool && document.querySelector('#connection').innerText === 'Live'")
    tab.wait("page.view.requests.every((request) => request.state === 'finished')")
    tab.errors.clear()
    yield tab
    check(tab, site, ())


@pytest.fixture
def load(site: Site) -> Iterator[Callable[..., list[str]]]:
    """Starts slow requests, which end with the test at the latest; their names."""
    with contextlib.ExitStack() as stack:

        def start(number: int, max_tokens: int = 300) -> list[str]:
            call = uuid.uuid4().hex[:6]
            for i in range(number):
                body = {
                    "prompt": f"{i}: !slow " + "x" * 40 * (i + 1),
                    "max_tokens": max_tokens,
                    "stream": True,
                    "request_id": f"{call}-{i}",
                }
                reply = stack.enter_context(
                    site.server.http.stream("POST", "/v1/completions", json=body)
                )
                assert reply.status_code == 200
            return [f"cmpl-{call}-{i}" for i in range(number)]

        yield start
