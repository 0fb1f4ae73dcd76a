"""The live page in a real browser: what a person does on it, without a word on the console."""

import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import uvicorn

from attnscope.web.server import create
from made_runs import made_run, write_run

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
MODEL = "zoo:math-qwen2"
TEXT = "Tom has 12 apples. <b onclick=alert(1)>He</b> buys 3 bags. How many # apples?"

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("runs")
    write_run(made_run(), folder / "one")
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(create(folder), log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """A page that must say nothing on its console and ask nobody else."""
    context = browser.new_context(viewport={"width": 1200, "height": 900}, accept_downloads=True)
    opened = context.new_page()
    said: list[str] = []
    opened.on("console", lambda message: said.append(message.text))
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.on("dialog", lambda dialog: said.append("a script ran"))

    def asked(request: Any) -> None:
        if not request.url.startswith((address, "blob:", "data:")):
            said.append(f"asked {request.url}")

    opened.on("request", asked)
    yield opened
    assert said == []
    context.close()


def go(page: Any, address: str, **state: str) -> None:
    page.goto(f"{address}#{urlencode(state)}")
    page.wait_for_selector("html[data-started]")


def measured(page: Any, address: str, **state: str) -> None:
    go(page, address, model=MODEL, text=TEXT, **state)
    page.wait_for_selector("html[data-ready]")


def test_type_measure_click_switch(page: Any, address: str) -> None:
    go(page, address)
    page.select_option("select[aria-label=model]", MODEL)
    page.fill("#prompt", TEXT)
    page.click("#measure")
    page.wait_for_selector("html[data-ready]")
    assert page.inner_text("#text").strip() == TEXT
    assert "not the published one" in page.inner_text("#playground .note")
    page.wait_for_selector("#bars svg")
    page.click("#text span[data-n='6']")
    page.wait_for_selector("html[data-gaze='6']")
    told = page.evaluate("document.querySelector('#text span[data-n=\"9\"]').style.backgroundColor")
    assert "0)" in told.replace(" ", "")  # a later token is not looked at
    page.click("#map td[data-layer='3'][data-head='1']")
    page.wait_for_selector('html[data-shaded*=\'"layer":"3","head":"1"\']')
    assert page.input_value("select[aria-label=layer]") == "3"
    page.wait_for_url("**layer=3&head=1**")
    assert page.locator("#likely tr").count() == 8


def test_a_link_opens_the_same_view(page: Any, address: str) -> None:
    measured(page, address, layer="2", head="5", token="4", queries="last")
    page.wait_for_selector("html[data-gaze='4']")
    assert page.input_value("select[aria-label=layer]") == "2"
    assert page.input_value("select[aria-label=head]") == "5"
    assert page.input_value("select[aria-label=queries]") == "last"
    assert page.locator("#text span.chosen").get_attribute("data-n") == "4"


def test_step_through_an_answer(page: Any, address: str) -> None:
    measured(page, address, answer="4", chat="1")
    assert page.locator("#text span.answer").count() >= 1
    page.locator("#step").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("html[data-gaze]")
    assert "was written from token" in page.inner_text("#steps")


def test_by_the_keyboard(page: Any, address: str) -> None:
    measured(page, address)
    page.locator("#text span[data-n='0']").focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert "token 3" in page.inner_text("#told")
    page.keyboard.press("Enter")
    page.wait_for_selector("html[data-gaze='3']")
    page.locator("#map td[tabindex='0']").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_selector('html[data-shaded*=\'"layer":"1"\']')


def test_knock_a_span_out(page: Any, address: str) -> None:
    measured(page, address)
    page.click("#text span[data-n='2']")
    page.wait_for_selector("html[data-gaze='2']")
    page.click("#text span[data-n='5']", modifiers=["Shift"])
    assert page.locator("#text span.cut").count() == 4
    page.click("#knockout")
    page.wait_for_selector("#knocked table")
    assert "nats" in page.inner_text("#knocked")


def test_compare_with_a_filler(page: Any, address: str) -> None:
    go(page, address, tab="compare", model=MODEL, text=TEXT, count="20")
    page.wait_for_selector("html[data-compared]")
    first = page.get_attribute("html", "data-compared")
    for place in ("#curves", "#whole", "#pair-bars"):
        page.wait_for_selector(f"{place} svg")
    page.locator("#count").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_selector(f"html[data-compared]:not([data-compared={first!r}])")
    page.wait_for_url("**count=21**")


def test_everything_can_be_kept(page: Any, address: str, tmp_path: Path) -> None:
    measured(page, address)
    page.wait_for_selector("#bars svg")
    wanted = {"PNG": b"\x89PNG", "SVG": b"<svg", "CSV": b"layer,class"}
    for label, start in wanted.items():
        with page.expect_download() as kept:
            page.click(f"#bars button:text-is('{label}')")
        assert Path(kept.value.path()).read_bytes().startswith(start)
    for label in ("numbers (CSV)", "experiment file", "this text as one HTML file"):
        with page.expect_download() as kept:
            page.click(f"#downloads a:text-is('{label}')")
        kept.value.save_as(tmp_path / label[:7].strip())
    alone = page.context.new_page()
    (tmp_path / "kept.html").write_bytes((tmp_path / "this te").read_bytes())
    alone.goto((tmp_path / "kept.html").as_uri())
    assert TEXT.replace(" ", "") in alone.inner_text("body").replace(" ", "")
    before = alone.locator("span[style]").nth(3).get_attribute("style")
    alone.select_option("select >> nth=0", index=3)
    assert alone.locator("span[style]").nth(3).get_attribute("style") != before
    alone.close()


def test_runs_and_their_report(page: Any, address: str) -> None:
    go(page, address, tab="runs")
    report = page.frame_locator("iframe")
    report.locator("#found h2").wait_for()
    page.fill("#sql", "SELECT count(*) AS n FROM cells")
    page.click("#ask")
    page.wait_for_selector("#rows td")
    assert int(page.inner_text("#rows td")) > 0


def test_what_is_wrong_is_said_and_the_page_lives_on(browser: Any, address: str) -> None:
    page = browser.new_page()
    go(page, address, model=MODEL)
    page.click("#measure")
    page.wait_for_selector("#status.wrong")
    assert "empty" in page.inner_text("#status")
    page.fill("#prompt", TEXT)
    page.click("#measure")
    page.wait_for_selector("html[data-ready]")
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_fits_a_phone_in_light_and_dark(browser: Any, address: str, scheme: str) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme=scheme)
    measured(page, address)
    page.wait_for_selector("#bars svg")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    ink, paper = page.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    assert ("236" in ink) == (scheme == "dark")
    assert ink != paper
    page.close()
