"""A real browser without a window, that says what a page did wrong and whom it asked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

PROGRAM, DRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


def why_not() -> str | None:
    """What is missing for it; None: nothing."""
    missing = [str(path) for path in (PROGRAM, DRIVER) if not path.exists()]
    return f"there is no {' and no '.join(missing)} (Debian: chromium, chromium-driver)" if missing else None


@contextmanager
def browser(profile: Path, width: int = 1280, height: int = 900) -> Iterator[Chrome]:
    """Chromium with an empty profile; it has ended when the context is left."""
    options = ChromeOptions()
    options.binary_location = str(PROGRAM)
    for flag in (*_FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chrome = Chrome(options=options, service=Service(str(DRIVER)))
    chrome.set_page_load_timeout(120)
    try:
        yield chrome
    finally:
        chrome.quit()


def show_as(chrome: Chrome, scheme: str) -> None:
    """Prefer a "light" or "dark" page, as a user's system would."""
    feature = {"name": "prefers-color-scheme", "value": scheme}
    chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def complaints(chrome: Chrome) -> list[str]:
    """What scripts, styles and the security policy complained about since the last call."""
    return [entry["message"] for entry in chrome.get_log("browser")]


def asked(chrome: Chrome) -> list[tuple[str, str]]:
    """Of each request since the last call: the page that it was for, and the address."""
    messages = [json.loads(entry["message"])["message"] for entry in chrome.get_log("performance")]
    sent = [message["params"] for message in messages if message["method"] == "Network.requestWillBeSent"]
    return [(request["documentURL"], request["request"]["url"]) for request in sent]


def requested(chrome: Chrome) -> set[str]:
    """The addresses that were asked for since the last call."""
    return {url for _, url in asked(chrome) if not url.startswith(("chrome", "data:"))}
