"""The page at ``/`` in a real browser: draw, open a picture, send JSON, give the token."""

from __future__ import annotations

import json
import re
import shlex
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from plugins.serving.tests.conftest import Server, start_server
from plugins.serving.tests.page_models import VISIT_SUM, Clothes, put_clothes, put_colours, put_points, put_visits
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver import ActionChains, Chrome, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from tests.lab.browser import browser, complaints, requested, show_as, why_not
from tests.processes import Processes, share

needs_browser = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
WAIT_S = 60
TOKEN = "0123456789abcdef"


@pytest.fixture(scope="module")
def clothes(tmp_path_factory: pytest.TempPathFactory) -> Clothes:
    return put_clothes(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def served(clothes: Clothes, module_processes: Processes) -> Server:
    """Models for grey pictures, for coloured ones, for two numbers, and for a row with an input of every kind."""
    put_colours(clothes.registry)
    put_points(clothes.registry)
    put_visits(clothes.registry)
    env = {"PACELINE_REGISTRY": str(clothes.registry), "XDG_CONFIG_HOME": str(clothes.registry / "config")}
    token = clothes.registry / "token"
    token.touch(0o600)
    token.write_text(TOKEN)
    names = ("clothes@prod", "colours@prod", "points@prod", "visits@prod")
    return start_server(module_processes, env, *names, "--token-file", token, shared=True)


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    with browser(tmp_path_factory.mktemp("browser") / "profile") as chrome:
        share(chrome.service.process.pid)
        yield chrome


@pytest.fixture
def page(chrome: Chrome, served: Server, wait_until: Callable[..., None]) -> Iterator[Chrome]:
    """The page of the first model; the token was given. Whatever a test does, nothing may go wrong in it."""
    complaints(chrome), requested(chrome)
    chrome.get(f"{served.url}/")
    wait_until(lambda: texts(chrome, "form label"), "the question for the token", WAIT_S)
    chrome.find_element(By.ID, "token").send_keys(TOKEN, Keys.ENTER)
    wait_until(lambda: texts(chrome, "h1") == ["clothes"], "the first model", WAIT_S)
    yield chrome
    # The browser tells of the request that had no token yet, too.
    assert [text for text in complaints(chrome) if "401 (Unauthorized)" not in text] == []
    assert {address for address in requested(chrome) if not address.startswith((served.url, "blob:"))} == set()


def texts(chrome: Chrome, selector: str) -> list[str]:
    try:
        return [element.text for element in chrome.find_elements(By.CSS_SELECTOR, selector)]
    except StaleElementReferenceException:
        return []  # the page was just drawn again


def choose(chrome: Chrome, model: str, wait_until: Callable[..., None]) -> None:
    chrome.find_element(By.CSS_SELECTOR, f"#model option[value={model}]").click()
    wait_until(lambda: texts(chrome, "h1") == [model], "the chosen model", WAIT_S)


def pad(chrome: Chrome) -> WebElement:
    return chrome.find_element(By.CSS_SELECTOR, ".canvas")


def sent(chrome: Chrome) -> dict[str, Any]:
    """The only input of the request that the page says it sends, taken as a shell would."""
    words = shlex.split(chrome.find_element(By.ID, "curl").text)
    (tensor,) = json.loads(words[words.index("--data-raw") + 1])["inputs"]
    return dict(tensor)


def shares(chrome: Chrome) -> dict[str, str]:
    names, numbers = texts(chrome, ".bars .name"), texts(chrome, ".bars .number")
    return dict(zip(names, numbers, strict=True))


@pytest.mark.browser
@needs_browser
def test_a_picture_of_the_test_set_gets_its_label(
    page: Chrome, clothes: Clothes, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    # The page begins with the package's own example, which is this picture.
    assert sent(page)["data"] == clothes.picture.ravel().tolist()
    page.find_element(By.CLASS_NAME, "clear").click()
    assert not any(sent(page)["data"])
    picture = tmp_path / "picture.png"
    Image.fromarray(clothes.picture).save(picture)
    page.find_element(By.ID, "picture-image").send_keys(str(picture))
    wait_until(lambda: len(texts(page, ".bars li")) == 10, "ten labels", WAIT_S)
    assert texts(page, ".best strong") == [clothes.label]
    # The model got the picture's own bytes, so the probabilities are those that it has in this process.
    assert sent(page)["data"] == clothes.picture.ravel().tolist()
    assert shares(page) == {label: f"{100 * p:.1f} %" for label, p in clothes.probabilities.items()}
    # Dark on light, the same picture is another one; swapped twice it is itself.
    switch = page.find_element(By.CLASS_NAME, "invert")
    switch.send_keys(Keys.SPACE)
    wait_until(lambda: sent(page)["data"] == (255 - clothes.picture).ravel().tolist(), "the negative", WAIT_S)
    switch.send_keys(Keys.SPACE)
    wait_until(lambda: sent(page)["data"] == clothes.picture.ravel().tolist(), "the picture again", WAIT_S)
    wait_until(lambda: texts(page, ".best strong") == [clothes.label], "the label again", WAIT_S)


@pytest.mark.browser
@needs_browser
def test_what_is_sent_can_be_sent_again_by_curl(
    page: Chrome, served: Server, run_processes: Processes, wait_until: Callable[..., None]
) -> None:
    pad(page).send_keys(Keys.SPACE, Keys.ARROW_RIGHT * 5, Keys.SPACE)
    wait_until(lambda: len(texts(page, ".bars li")) == 10, "an answer", WAIT_S)
    command = page.find_element(By.ID, "curl").text
    assert TOKEN not in command
    done = run_processes.run(["sh", "-c", f"{command} --silent"], env={"TOKEN": TOKEN})
    answer = json.loads(done.stdout)
    best = max(answer["outputs"][0]["data"])
    assert next(iter(shares(page).values())) == f"{100 * best:.1f} %"


@pytest.mark.browser
@needs_browser
def test_drawing_with_mouse_finger_and_keyboard(page: Chrome, wait_until: Callable[..., None]) -> None:
    page.find_element(By.CLASS_NAME, "clear").click()
    box = pad(page).rect
    stroke = ActionChains(page).move_to_element_with_offset(pad(page), -100, -50).click_and_hold()
    stroke.move_by_offset(200, 0).release().perform()
    wait_until(lambda: texts(page, ".bars li"), "an answer to the drawing", WAIT_S)
    drawn = np.reshape(sent(page)["data"], (28, 28))
    row = round((box["height"] / 2 - 50) / box["height"] * 28)
    assert (drawn[row, 5:23] > 200).all()  # the pen's edge may cut a pixel
    assert (drawn[:, :2] == 0).all()
    assert (drawn[row + 5 :] == 0).all()

    page.find_element(By.CLASS_NAME, "clear").click()
    assert not any(sent(page)["data"])
    assert texts(page, ".bars li") == []

    at = {"x": box["x"] + 140, "y": box["y"] + 140 - page.execute_script("return scrollY")}
    for kind, points in (("touchStart", [at]), ("touchMove", [{**at, "x": at["x"] + 80}]), ("touchEnd", [])):
        page.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    wait_until(lambda: texts(page, ".bars li"), "an answer to the finger", WAIT_S)
    drawn = np.reshape(sent(page)["data"], (28, 28))
    assert (drawn[14, 14:21] > 200).all()
    assert (drawn[14, :10] == 0).all()

    page.find_element(By.CLASS_NAME, "clear").send_keys(Keys.ENTER)
    pad(page).send_keys(Keys.ARROW_UP * 4, Keys.SPACE, Keys.ARROW_LEFT * 6, Keys.SPACE)
    wait_until(lambda: texts(page, ".bars li"), "an answer to the keys", WAIT_S)
    assert np.count_nonzero(sent(page)["data"]) > 12


@pytest.mark.browser
@needs_browser
def test_a_coloured_picture_keeps_its_channels(page: Chrome, tmp_path: Path, wait_until: Callable[..., None]) -> None:
    choose(page, "colours", wait_until)
    picture = tmp_path / "picture.png"
    Image.new("RGB", (16, 16), (255, 102, 0)).save(picture)
    page.find_element(By.ID, "picture-image").send_keys(str(picture))
    wait_until(lambda: texts(page, "#result td"), "the means of the channels", WAIT_S)
    assert texts(page, "#result td") == ["mean", "FP32 [1, 3]", "1, 0.4, 0"]
    page.find_element(By.CSS_SELECTOR, ".range option:nth-child(2)").click()
    wait_until(lambda: texts(page, "#result td")[-1:] == ["1, -0.2, -1"], "the other range", WAIT_S)

    (tmp_path / "text.png").write_text("no picture")
    page.find_element(By.ID, "picture-image").send_keys(str(tmp_path / "text.png"))
    wait_until(lambda: any("text.png is no picture" in t for t in texts(page, ".problem")), "that", WAIT_S)


@pytest.mark.browser
@needs_browser
def test_a_model_that_takes_no_picture_is_sent_json(page: Chrome, wait_until: Callable[..., None]) -> None:
    choose(page, "points", wait_until)
    page.find_element(By.ID, "json").click()
    editor = page.find_element(By.ID, "request")
    editor.send_keys(Keys.CONTROL, Keys.ENTER)  # the example fits
    wait_until(lambda: texts(page, ".best"), "an answer", WAIT_S)
    assert texts(page, ".best") == ["norm 0"]
    assert texts(page, "#result td") == [], "nothing is said twice"
    document = {"inputs": [{"name": "point", "datatype": "FP32", "shape": [2, 2], "data": [3, 4, 6, 8]}]}
    text = json.dumps({**document, "parameters": {"mine": 2**53 + 1}})
    editor.clear()
    editor.send_keys(text)
    assert shlex.split(page.find_element(By.ID, "curl").text)[-1] == text
    page.find_element(By.ID, "predict").click()
    wait_until(lambda: texts(page, "#result td")[-1:] == ["5, 10"], "both lengths", WAIT_S)

    editor.clear()
    editor.send_keys("{it's")
    page.find_element(By.ID, "predict").click()
    wait_until(lambda: any("400 the body is not JSON" in t for t in texts(page, ".refused")), "why", WAIT_S)
    assert shlex.split(page.find_element(By.ID, "curl").text)[-1] == "{it's"
    # The browser notes each error of the server's; nothing else went wrong.
    assert [text for text in complaints(page) if not re.search(r"\b40[01] \(", text)] == []


@pytest.mark.browser
@needs_browser
def test_a_form_has_a_field_for_every_kind_of_input(page: Chrome, wait_until: Callable[..., None]) -> None:
    choose(page, "visits", wait_until)
    labels = ["age years", "income kCHF", "city", "mood", "note", "since", "member", "hours FP32 [any]"]
    assert texts(page, ".field > label:not(.button)") == labels
    assert texts(page, ".heading") == ["plan"]
    assert {"may be empty", "calm, tired or any other"} <= set(texts(page, ".field small"))
    shown = {
        "age": "39.5",
        "income": "",
        "city": "Genf",
        "mood": "calm",
        "note": "good, not bad",
        "since": "2026-01-31",
        "hours": "[1.5,2,0.25]",
    }
    fields = {name: page.find_element(By.NAME, name) for name in shown}
    assert {name: field.get_property("value") for name, field in fields.items()} == shown
    page.find_element(By.ID, "predict").click()
    wait_until(lambda: texts(page, ".best"), "an answer to the example", WAIT_S)
    assert texts(page, ".best") == [f"sum {VISIT_SUM:,.0f} points"]
    assert {"age (years)", "sum (points)"} <= set(texts(page, "td"))

    fields["income"].send_keys("20")
    fields["mood"].clear()
    fields["mood"].send_keys("elated")
    fields["city"].send_keys("(m")
    fields["note"].clear()
    fields["hours"].clear()
    fields["hours"].send_keys("[1")
    page.find_element(By.NAME, "member").click()
    page.find_element(By.ID, "predict").click()
    assert fields["hours"].get_property("validationMessage") == "This is not a list in JSON."
    assert texts(page, ".best") == [f"sum {VISIT_SUM:,.0f} points"]
    fields["hours"].send_keys("]", Keys.TAB)
    page.find_element(By.NAME, "age").send_keys(Keys.ENTER)
    wait_until(lambda: texts(page, ".best") == ["sum 4,171 points"], "the answer to the changes", WAIT_S)

    page.find_element(By.ID, "example").click()
    assert fields["mood"].get_property("value") == "calm"


@pytest.mark.browser
@needs_browser
def test_the_token_is_nowhere_but_in_the_page(page: Chrome, wait_until: Callable[..., None]) -> None:
    kept = page.execute_script(
        "return [location.href, document.cookie, localStorage.length, sessionStorage.length, "
        "document.documentElement.outerHTML]"
    )
    assert TOKEN not in "".join(map(str, kept))
    assert kept[1:4] == ["", 0, 0]
    page.refresh()
    wait_until(lambda: texts(page, "form label"), "the question again", WAIT_S)
    page.find_element(By.ID, "token").send_keys("wrong", Keys.ENTER)
    wait_until(lambda: any("does not know" in t for t in texts(page, ".refused")), "that it is wrong", WAIT_S)


@pytest.mark.browser
@needs_browser
def test_narrow_and_dark(page: Chrome) -> None:
    narrow = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": False}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", narrow)
    too_wide = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.execute_script(too_wide) == 0
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    colours = []
    for scheme in ("light", "dark"):
        show_as(page, scheme)
        colours.append(page.find_element(By.TAG_NAME, "body").value_of_css_property("background-color"))
    assert colours[0] != colours[1]


@contextmanager
def proxy(target: str, prefix: str) -> Iterator[str]:
    """A reverse proxy that has the server under a sub-path, and nothing else."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self.path.startswith(prefix):
                self.send_error(404)
                return
            kept = {name: self.headers[name] for name in ("Authorization", "Content-Type") if self.headers[name]}
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            answer = httpx.request(
                self.command, target + self.path[len(prefix) - 1 :], headers=kept, content=body, timeout=60
            )
            self.send_response(answer.status_code)
            self.send_header("Content-Type", answer.headers["content-type"])
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        do_POST = do_GET

        def log_message(self, *words: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}{prefix}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.browser
@needs_browser
def test_the_page_works_under_a_sub_path(page: Chrome, served: Server, wait_until: Callable[..., None]) -> None:
    with proxy(served.url, "/deep/er/") as url:
        page.get(url)
        wait_until(lambda: texts(page, "form label"), "the question for the token", WAIT_S)
        page.find_element(By.ID, "token").send_keys(TOKEN, Keys.ENTER)
        wait_until(lambda: texts(page, "h1") == ["clothes"], "the first model", WAIT_S)
        page.find_element(By.ID, "predict").click()
        wait_until(lambda: len(texts(page, ".bars li")) == 10, "an answer", WAIT_S)
        assert page.find_element(By.ID, "curl").text.startswith(f"curl '{url}v2/models/clothes/infer'")
        assert {address for address in requested(page) if not address.startswith((url, served.url))} == set()
        page.get("about:blank")


def test_the_page_is_cached_by_tag_and_open_to_get_alone(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        whole = client.get("/")
        assert whole.headers["content-type"] == "text/html; charset=utf-8"
        assert "script-src 'self'" in whole.headers["content-security-policy"]
        head = client.head("/")
        assert (head.status_code, head.content) == (200, b"")
        assert int(head.headers["content-length"]) == len(whole.content)
        for tag in (whole.headers["etag"], f'"other", W/{whole.headers["etag"]}'):
            again = client.get("/", headers={"If-None-Match": tag})
            assert (again.status_code, again.content) == (304, b"")
            assert "content-length" not in again.headers
        for name in ("app.js", "dom.js", "page.css", "theme.css", "icon.svg"):
            assert client.get(f"/page/{name}").status_code == 200, name
        for address in ("/page", "/page/", "/page/__init__.py", "/page/..%2fapp.py", "/page/nothing.js"):
            assert client.get(address).status_code == 404, address
        assert client.post("/").status_code == 405
        # Nothing inline, nothing from elsewhere, and nothing that a proxy's sub-path would break.
        assert "style=" not in whole.text
        assert 'src="/' not in whole.text
        assert 'href="/' not in whole.text
        assert "//" not in whole.text.replace("<!--", "")
