"""The page in a real browser: no errors, no requests, readable in light and in dark."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from plugins.pages.tests.reporting.conftest import HOSTILE
from selenium.common.exceptions import WebDriverException
from selenium.webdriver import Chrome
from selenium.webdriver.support.wait import WebDriverWait
from tests.lab.browser import asked, complaints, show_as, why_not
from tests.lab.browser import browser as a_browser

from paceline_pages.report_command import report

pytestmark = [pytest.mark.browser, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]


@pytest.fixture(scope="module")
def page(reported_runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report on two runs, of which one has a name that would like to be a picture."""
    path = tmp_path_factory.mktemp("browser") / "page.html"
    assert report([reported_runs / "good", reported_runs / HOSTILE], output=path, json=True) == 0
    return path


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Chrome]:
    """Chromium, which ends with the test."""
    with a_browser(tmp_path / "profile") as chrome:
        yield chrome


def shown(browser: Chrome, page: Path, scheme: str, width: int) -> Image.Image:
    """Open the page; return what is on the first screen."""
    show_as(browser, scheme)
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    # The driver's own get() gives up where the browser's first page is still on its way.
    browser.execute_cdp_cmd("Page.navigate", {"url": page.as_uri()})
    # The same page may be there from before: only a new document lacks this mark.
    there = "return document.readyState == 'complete' && location.href == arguments[0] && !window.seen"
    patient = WebDriverWait(browser, 60, ignored_exceptions=(WebDriverException,))
    patient.until(lambda chrome: chrome.execute_script(there, page.as_uri()))
    browser.execute_script("window.seen = true")
    picture = browser.execute_cdp_cmd("Page.captureScreenshot", {})["data"]
    return Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it, of ``rgb(r, g, b)``."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_the_page_asks_for_nothing_and_reads_well(browser: Chrome, page: Path) -> None:
    backgrounds = set()
    for scheme, width in (("light", 1200), ("dark", 1200), ("light", 420)):
        picture = shown(browser, page, scheme, width)
        colours = picture.getcolors(maxcolors=1 << 24)
        assert colours is not None
        assert len(colours) > 50, "text is drawn"
        backgrounds.add(max(colours)[1])
        assert not browser.execute_script("return document.documentElement.scrollWidth > innerWidth")
        # Everything that can be read stands out from what is behind it: 4.5 to 1 (WCAG 2, AA).
        pairs = browser.execute_script(
            "const page = getComputedStyle(document.body).backgroundColor;"
            "return [...document.querySelectorAll('h1, p, th, td:not(.zero), dt, dd, a, summary, svg text')]"
            ".map(e => [getComputedStyle(e)[e.tagName == 'text' ? 'fill' : 'color'], page])"
        )
        assert len(pairs) > 100
        for colour, behind in {tuple(pair) for pair in pairs}:
            brighter, darker = sorted((luminance(colour), luminance(behind)), reverse=True)
            assert (brighter + 0.05) / (darker + 0.05) >= 4.5, (scheme, colour, behind)
        drawn = browser.execute_script(
            "return [...document.querySelectorAll('figure svg')].map(e => e.getBoundingClientRect().height)"
        )
        assert len(drawn) >= 6
        assert min(drawn) > 40
        first = browser.execute_script("return document.querySelector('h1').getBoundingClientRect().bottom")
        assert first < 800, "the verdict is on the first screen"
    assert len(backgrounds) == 2, "light is not dark"
    assert browser.title.startswith("good is better than <img")
    broken = "return [...document.images].filter(image => !image.naturalWidth).length"
    assert browser.execute_script(broken) == 0
    assert browser.execute_script("return document.scripts.length") == 0
    assert complaints(browser) == []
    # And not what the browser's own first page asks for.
    urls = {url for document, url in asked(browser) if document == page.as_uri()}
    assert page.as_uri() in urls
    assert {url for url in urls if not url.startswith("data:image/png")} == {page.as_uri()}
