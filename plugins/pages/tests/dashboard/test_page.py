"""The page in a real browser: live while a run is trained, and with what others may put into a run."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
from selenium.webdriver import Chrome, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.support.select import Select
from tests.lab.browser import browser, complaints, requested, show_as, why_not
from tests.processes import Processes
from tests.runs.made import make_run

from paceline.core.access import create_token
from paceline_pages.dashboard import DashboardServer

pytestmark = [pytest.mark.browser, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]

TASK = Path(__file__).parents[4] / "tests/lab/paced.py"
WAIT_S = 120
HOSTILE = "<script>window.harm = 1</script><img src=x onerror='window.harm = 1'>"


@pytest.fixture
def chrome(tmp_path: Path) -> Iterator[Chrome]:
    with browser(tmp_path / "profile") as chrome:
        yield chrome


@pytest.fixture
def no_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def texts(chrome: Chrome, selector: str) -> list[str]:
    try:
        return [element.text for element in chrome.find_elements(By.CSS_SELECTOR, selector)]
    except StaleElementReferenceException:
        return []  # the page was just drawn again


def allow(pace: Path, step: int) -> None:
    """Let the training go on to a step; it never reads half of the number."""
    new = pace.with_suffix(".new")
    new.write_text(str(step))
    new.replace(pace)


def seen(into: list[str], chrome: Chrome, selector: str) -> list[str]:
    """What is there now, kept: the page may be drawn again at any time."""
    into[:] = texts(chrome, selector)
    return into


def points(chrome: Chrome) -> int:
    """Of the curve of the training loss."""
    try:
        line = chrome.find_element(By.CSS_SELECTOR, "svg[aria-label='Training loss'] polyline")
        return len((line.get_attribute("points") or "").split())
    except (NoSuchElementException, StaleElementReferenceException):
        return 0


def clicked(chrome: Chrome, link: str) -> bool:
    """Click on it, unless it is drawn anew just then."""
    try:
        # Not by the pointer: the header covers the top of a page that scrolls.
        chrome.execute_script("arguments[0].click()", chrome.find_element(By.LINK_TEXT, link))
    except (NoSuchElementException, StaleElementReferenceException):
        return False
    return True


@pytest.mark.timeout(600)
def test_a_run_is_watched_while_it_is_trained(
    run_processes: Processes, tmp_path: Path, chrome: Chrome, wait_until: Callable[..., None], no_jobs: None
) -> None:
    pace = tmp_path / "pace"
    allow(pace, 8)
    (tmp_path / "runs").mkdir()
    paceline = [sys.executable, "-m", "paceline"]
    serving = run_processes.start([*paceline, "dashboard", tmp_path / "runs", "--port", "0", "--json"])
    assert serving.stdout is not None
    told = json.loads(serving.stdout.readline())
    token_file = Path(told["token_file"])
    assert token_file.stat().st_mode & 0o077 == 0
    url = f"{told['url']}?token={token_file.read_text().strip()}"
    options = ["--threads", "1", "--nproc", "2", "--log-every", "1", "--eval-every", "8steps", "--quiet"]
    # A busy machine is no fault; only the kill is.
    options += ["--heartbeat", "10", "--hang-timeout", "never"]
    options += ["--set", f"pace={pace}", "--run-dir", tmp_path / "runs" / "seen"]
    training = run_processes.start([*paceline, "train", f"{TASK}:Paced", *options])

    chrome.get(url)
    wait_until(lambda: "seen" in texts(chrome, ".runs a"), "the run is listed", WAIT_S)
    wait_until(lambda: clicked(chrome, "seen"), "its page", WAIT_S)
    wait_until(lambda: points(chrome) >= 8, "eight steps are drawn", WAIT_S)
    wait_until(lambda: texts(chrome, ".title .pill") == ["running"], "that it is at work", WAIT_S)
    before = points(chrome)
    allow(pace, 16)
    wait_until(lambda: points(chrome) >= before + 8, "the curve grows", WAIT_S)

    ranks: list[str] = []
    wait_until(lambda: len(seen(ranks, chrome, ".ranks tbody tr")) == 2, "both ranks beat", WAIT_S)
    pid = int(ranks[1].split()[2])
    os.kill(pid, signal.SIGKILL)
    allow(pace, 24)
    wait_until(lambda: any("killed" in row for row in texts(chrome, ".recoveries tbody tr")), "the recovery", WAIT_S)
    wait_until(lambda: any("a worker was lost" in text for text in texts(chrome, ".alerts li")), "the alert", WAIT_S)
    allow(pace, 1000)
    wait_until(lambda: texts(chrome, ".title .pill") == ["finished"], "the run's end", WAIT_S)
    wait_until(lambda: points(chrome) == 32, "each step once", WAIT_S)
    assert run_processes.finish(training).returncode == 0
    assert any("latest" in row for row in texts(chrome, ".checkpoints tbody tr"))

    chrome.find_element(By.CSS_SELECTOR, ".chart summary").send_keys(Keys.ENTER)
    rows: list[str] = []
    wait_until(lambda: len(seen(rows, chrome, ".chart tbody tr")) == 32, "the curve's numbers", WAIT_S)
    assert rows[0].split()[:2] == ["32", "loss"]
    chrome.find_element(By.CSS_SELECTOR, ".log summary").send_keys(Keys.ENTER)
    wait_until(lambda: any(texts(chrome, ".log pre")), "the log", WAIT_S)
    assert complaints(chrome) == []
    assert {address for address in requested(chrome) if not address.startswith(told["url"])} == set()

    serving.send_signal(signal.SIGINT)
    ended = run_processes.finish(serving)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_what_others_wrote_is_text(
    tmp_path: Path, chrome: Chrome, wait_until: Callable[..., None], no_jobs: None
) -> None:
    name = HOSTILE.replace("/", "∕")  # a folder's name cannot hold the other one
    failed = {"event": "failed", "error": HOSTILE}
    hostile = make_run(tmp_path / "runs" / name, [failed], steps=3, task=HOSTILE)
    with hostile.metrics.open("a") as file:
        record = {"kind": "eval", "step": 3, "split": HOSTILE, "metrics": {HOSTILE: 0.5}, "epoch": 0}
        file.write(json.dumps(record) + "\n")
    hostile.log_of(0).write_text(HOSTILE)
    for number in range(49):
        make_run(tmp_path / "runs" / f"run-{number}", [{"event": "finished"}], steps=2, age_s=1000.0)
    with DashboardServer([tmp_path / "runs"]) as server:
        chrome.get(server.url)
        wait_until(lambda: len(texts(chrome, ".runs tbody tr")) == 50, "all runs", WAIT_S)
        chrome.find_element(By.CSS_SELECTOR, "input[type=search]").send_keys("script")
        wait_until(lambda: texts(chrome, ".runs a") == [name], "the one that is looked for", WAIT_S)
        chrome.find_element(By.CSS_SELECTOR, ".runs a").click()
        wait_until(lambda: points(chrome) == 3, "its curve", WAIT_S)
        assert texts(chrome, "h1") == [name]
        assert HOSTILE in texts(chrome, ".alerts li")
        chrome.find_element(By.CSS_SELECTOR, ".log summary").send_keys(Keys.ENTER)
        wait_until(lambda: texts(chrome, ".log pre") == [HOSTILE], "its log", WAIT_S)
        assert chrome.execute_script("return [window.harm, document.querySelectorAll('main img').length]") == [
            None,
            0,
        ]
        assert complaints(chrome) == []
        assert {address for address in requested(chrome) if not address.startswith(server.url)} == set()


def test_narrow_and_dark_windows_and_no_runs(
    tmp_path: Path, chrome: Chrome, wait_until: Callable[..., None], no_jobs: None
) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    metrics = {"width": 380, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    with DashboardServer([runs]) as server:
        chrome.get(server.url)
        wait_until(lambda: any("No runs yet" in text for text in texts(chrome, ".empty")), "a hint", WAIT_S)
        make_run(runs / ("long-" * 12), [{"event": "finished"}], steps=20, spikes=(5,))
        wait_until(lambda: texts(chrome, ".runs tbody tr"), "the run appears", WAIT_S)
        too_wide = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert chrome.execute_script(too_wide) == 0
        chrome.find_element(By.CSS_SELECTOR, ".runs a").click()
        wait_until(lambda: points(chrome) == 19, "its curve", WAIT_S)
        assert chrome.execute_script(too_wide) == 0
        assert any("NaN or infinite at step 5" in text for text in texts(chrome, ".alerts li"))

        def shown_at(place: float) -> str:
            """The readout where the pointer is over a part of the training loss."""
            move = "const box = arguments[0].getBoundingClientRect(); arguments[0].dispatchEvent(new PointerEvent("
            move += "'pointermove', {clientX: box.left + arguments[1] * box.width})); "
            move += "return arguments[0].parentElement.querySelector('.readout').textContent"
            plot = chrome.find_element(By.CSS_SELECTOR, "svg[aria-label='Evaluation: loss']")
            return str(chrome.execute_script(move, plot, place))

        # Training goes to step 20, the two splits were evaluated at other steps.
        with (runs / ("long-" * 12) / "metrics.jsonl").open("a") as file:
            for split, step in (("val", 7), ("val", 14), ("test", 20)):
                values = {"loss": 1.0 / step}
                line = {"kind": "eval", "step": step, "epoch": 0, "split": split, "metrics": values}
                file.write(json.dumps(line) + "\n")
        wait_until(lambda: "Evaluation: loss" in texts(chrome, ".chart figcaption > span"), "another curve", WAIT_S)
        assert shown_at(0.13) == "step 7: val 0.1429"
        assert shown_at(0.95) == "step 20: test 0.05"
        before = chrome.find_element(By.CSS_SELECTOR, ".chart polyline").get_attribute("points")
        chrome.execute_script("document.querySelector('.log-axis').click()")
        assert chrome.find_element(By.CSS_SELECTOR, ".chart polyline").get_attribute("points") != before

        other = make_run(runs / "other", [{"event": "finished"}], steps=1, fields={"lr": 0.5})
        (other.path / "report.html").write_text("<h1>The report</h1><script>document.title = 'ran'</script>")
        make_run(runs / "search" / "trials" / "00000", [{"event": "finished"}], steps=1)
        (runs / "search" / "tune.json").write_text("{}")
        options = ".config option"
        wait_until(lambda: texts(chrome, options) == ["no run", "other", "search/00000"], "the other runs", WAIT_S)
        Select(chrome.find_element(By.CSS_SELECTOR, ".config select")).select_by_visible_text("other")
        wait_until(lambda: texts(chrome, ".config .tools + div tbody tr") == ["lr – 0.5"], "what differs", WAIT_S)
        assert chrome.execute_script(too_wide) == 0
        wait_until(lambda: clicked(chrome, "← all runs"), "the way back", WAIT_S)
        wait_until(lambda: clicked(chrome, "search"), "the search", WAIT_S)
        wait_until(lambda: texts(chrome, ".runs a") == ["00000"], "its trial", WAIT_S)
        assert [text for text in texts(chrome, ".runs th") if text] == ["state", "run", "progress", "result"]
        wait_until(lambda: clicked(chrome, "← all runs"), "the way back", WAIT_S)
        wait_until(lambda: clicked(chrome, "other"), "the other run", WAIT_S)
        colours = []
        for scheme in ("light", "dark"):
            show_as(chrome, scheme)
            colours.append(chrome.find_element(By.TAG_NAME, "body").value_of_css_property("background-color"))
        assert colours[0] != colours[1]
        assert complaints(chrome) == []
        wait_until(lambda: clicked(chrome, "Report"), "the report", WAIT_S)
        wait_until(lambda: texts(chrome, "h1") == ["The report"], "what it says", WAIT_S)
        assert chrome.title != "ran"


def test_a_visitor_gives_the_token(
    tmp_path: Path, chrome: Chrome, wait_until: Callable[..., None], no_jobs: None
) -> None:
    make_run(tmp_path / "runs" / "run", [{"event": "finished"}], steps=2)
    token = create_token(tmp_path / "token")
    with DashboardServer([tmp_path / "runs"], token=token) as server:
        chrome.get(server.url)
        chrome.find_element(By.ID, "token").send_keys(token.hex(), Keys.ENTER)
        wait_until(lambda: texts(chrome, ".runs a") == ["run"], "the runs", WAIT_S)
        assert complaints(chrome) == []
