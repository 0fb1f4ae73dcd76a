"""The live page in a real browser; nothing may be written to its console."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import uvicorn
from PIL import Image

import chromium
from attnscope.prompts.shapes import picture_question
from attnscope.web.server import create
from made_runs import made_run, write_run

MODEL = "zoo:math-qwen2"
TEXT = "Tom has 12 apples. <b onclick=alert(1)>He</b> buys 3 bags. How many # apples?"

pytestmark = [pytest.mark.browser, pytest.mark.slow]


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
    with chromium.opened() as browser:
        yield browser


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """A page that writes nothing to its console and requests no other address."""
    context = browser.new_context(viewport={"width": 1200, "height": 900}, accept_downloads=True)
    opened = context.new_page()
    messages: list[str] = []
    opened.on("console", lambda message: messages.append(message.text))
    opened.on("pageerror", lambda error: messages.append(str(error)))
    opened.on("dialog", lambda dialog: messages.append("a script ran"))

    def check_address(request: Any) -> None:
        if not request.url.startswith((address, "blob:", "data:")):
            messages.append(f"requested {request.url}")

    opened.on("request", check_address)
    yield opened
    assert messages == []
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
    assert MODEL in page.inner_text("#playground .tiny")
    page.wait_for_selector("#bars svg")
    page.click("#text span[data-n='6']")
    page.wait_for_selector("html[data-row='6']")
    colour = page.evaluate(
        "document.querySelector('#text span[data-n=\"9\"]').style.backgroundColor"
    )
    assert "0)" in colour.replace(" ", "")  # causal attention
    page.click("#map td[data-layer='3'][data-head='1']")
    page.wait_for_selector('html[data-shaded*=\'"layer":"3","head":"1"\']')
    assert page.input_value("select[aria-label=layer]") == "3"
    page.wait_for_url("**layer=3&head=1**")
    assert page.locator("#next-tokens dt").count() == 8
    assert page.inner_text("#scale").startswith("0")


def test_a_link_opens_the_same_view(page: Any, address: str) -> None:
    measured(page, address, layer="2", head="5", token="4", queries="last")
    page.wait_for_selector("html[data-row='4']")
    assert page.input_value("select[aria-label=layer]") == "2"
    assert page.input_value("select[aria-label=head]") == "5"
    assert page.input_value("select[aria-label=queries]") == "last"
    assert page.locator("#text span.chosen").get_attribute("data-n") == "4"


def shaded(page: Any, **wanted: str) -> None:
    """Wait until the text is shaded so."""
    held = "".join(f'[data-shaded*=\'"{name}":"{value}"\']' for name, value in wanted.items())
    page.wait_for_selector(f"html{held}")


def test_step_through_a_completion_and_use_every_control(page: Any, address: str) -> None:
    go(page, address, model=MODEL)
    page.focus("#tab-playground")
    for tab in ("compare", "pictures", "runs", "playground"):
        page.keyboard.press("ArrowRight")
        assert page.get_attribute(f"#tab-{tab}", "aria-selected") == "true"
    for name in ("chat template", "allow more tokens than the model has positions"):
        page.click(f"label:has-text('{name}')")
    page.fill("#completion", "3")
    page.press("#completion", "Tab")
    for example in ("A map of # and *", "A word problem", "A repetition"):
        before = page.get_attribute("html", "data-ready")
        page.click(f"button:text-is('{example}')")
        page.wait_for_selector(f"html[data-ready]:not([data-ready={before!r}])")
    page.wait_for_url("**chat=1&completion=3&beyond=1**")
    assert page.inner_text("#text").startswith("<|im_start|>user↵\nThe cat sat")
    for control, value in {"layer": "2", "head": "3", "queries": "predicts"}.items():
        page.select_option(f"select[aria-label={control}]", value)
        shaded(page, **{control: value})
    page.select_option("select[aria-label=shade]", "lift")
    shaded(page, of="lift")
    page.click("#map tbody th:text-is('4')")
    shaded(page, layer="4", head="")
    cell = "#map td[data-layer='5'][data-head='0']"
    for state, layer, head in ((".chosen", "5", "0"), (":not(.chosen)", "", "")):
        page.click(cell)  # chosen, and let go again
        page.wait_for_selector(cell + state)
        shaded(page, layer=layer, head=head)
    page.locator("#step").focus()
    page.keyboard.press("ArrowRight")
    assert "2 of 3" in page.inner_text("#steps")
    page.click("button[aria-label='step forward']")
    assert "3 of 3" in page.inner_text("#steps")
    page.click("button[aria-label='step back']")
    assert "was predicted at token" in page.inner_text("#steps")
    last = page.locator("#text span.chosen").get_attribute("data-n")
    page.wait_for_selector(f"html[data-row='{last}']")
    assert page.is_disabled("select[aria-label=shade]")
    page.select_option("select[aria-label=row]", "by")
    page.locator("#text span[data-n='0']").hover()
    page.wait_for_selector("#info:has-text('weight of this token on token')")
    whole, ranges = page.get_attribute("#along", "data-range"), []
    for button in ("+", "▶", "◀", "−", "Without the first"):
        before = page.get_attribute("#along", "data-range")
        page.click(f"#along button:text-is('{button}')")
        page.wait_for_selector(f"#along:not([data-range='{before}'])")
        ranges.append(page.get_attribute("#along", "data-range"))
    assert ranges[0] == ranges[2] != ranges[1]
    assert ranges[3] == whole
    assert ranges[4].startswith("1 ")
    with page.expect_download() as kept:
        page.click("#along button:text-is('CSV')")
    assert kept.value.suggested_filename == "along-the-text.csv"


def test_by_the_keyboard(page: Any, address: str) -> None:
    measured(page, address)
    page.locator("#text span[data-n='0']").focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert "token 3" in page.inner_text("#info")
    page.keyboard.press("Enter")
    page.wait_for_selector("html[data-row='3']")
    page.locator("#map td[tabindex='0']").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_selector('html[data-shaded*=\'"layer":"1"\']')
    page.locator("#text span[data-n='2']").focus()
    for _ in range(2):
        page.keyboard.press("Shift+ArrowRight")
    assert page.locator("#text span.cut").count() == 3


def drag(page: Any, start: Any, end: Any) -> None:
    """From the middle of one element to that of another, by the mouse."""
    boxes = [page.locator(each).bounding_box() for each in (start, end)]
    points = [(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2) for box in boxes]
    page.mouse.move(*points[0])
    page.mouse.down()
    page.mouse.move(*points[1], steps=8)
    page.mouse.up()


def test_knock_a_span_out(page: Any, address: str) -> None:
    measured(page, address)
    drag(page, "#text span[data-n='2']", "#text span[data-n='5']")
    assert page.locator("#text span.cut").count() == 4
    page.click("#knockout")
    page.wait_for_selector("#knocked dl")
    assert "nats" in page.inner_text("#knocked")
    before, after = (page.locator("#knocked dl").nth(n).inner_text() for n in (0, 1))
    assert before != after
    page.click("#clear")
    assert page.locator("#text span.cut").count() == 0
    page.click("#text span[data-n='2']")
    page.wait_for_selector("html[data-row='2']")
    page.click("#text span[data-n='5']", modifiers=["Shift"])
    assert page.locator("#text span.cut").count() == 4


def test_shade_by_all_heads_of_a_type(page: Any, address: str) -> None:
    measured(page, address)
    page.select_option("select[aria-label=map]", "head types")
    page.wait_for_selector("#map[data-map='head types']")
    kind = page.locator("#head-types button[data-type]:enabled").first
    name, many = kind.inner_text().rsplit(" ", 1)
    kind.click()
    page.wait_for_selector('html[data-shaded*=\'"among":"\']:not([data-shaded*=\'"among":""\'])')
    assert page.locator("#map td:not(.aside)").count() == int(many)
    page.locator("#text span[data-n='1']").hover()
    assert f"mean of {many} {name.strip()} heads" in page.inner_text("#info")
    page.wait_for_url("**type=**")
    page.locator("#map td:not(.aside)").first.click()
    page.wait_for_selector('html[data-shaded*=\'"among":""\']')
    assert page.locator("#map td.aside").count() == 0


def test_a_system_prompt(page: Any, address: str) -> None:
    go(page, address, model=MODEL, text=TEXT)
    page.wait_for_selector("html[data-ready]")
    first = page.get_attribute("html", "data-ready")
    page.click("#system-part summary")
    page.fill("#system", "Count with care.")
    page.click("#measure")
    page.wait_for_selector(f"html[data-ready]:not([data-ready={first!r}])")
    assert "Count with care." in page.inner_text("#text")
    page.wait_for_url("**system=Count**")


def test_zooming_refines_the_curves(page: Any, address: str) -> None:
    go(page, address, model=MODEL, text="Tom has 12 apples and 3 pears. " * 75)
    page.wait_for_selector("#along[data-bins]")
    assert int(page.get_attribute("#along", "data-bins")) > 1
    for _ in range(2):
        drawn = page.get_attribute("#along", "data-range")
        page.click("#along button:text-is('+')")
        page.wait_for_selector(f"#along:not([data-range='{drawn}']) svg")
    assert page.get_attribute("#along", "data-bins") == "1"
    low, high = (int(n) for n in page.get_attribute("#along", "data-range").split())
    box = page.locator("#along svg").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 60, steps=6)
    page.mouse.up()
    page.wait_for_selector(f"#along:not([data-range='{low} {high}'])")
    first, last = (int(n) for n in page.get_attribute("#along", "data-range").split())
    assert low < first < last < high
    page.wait_for_url("**from=**")
    page.click("#along button:text-is('All')")
    page.wait_for_selector("#along[data-range^='0 ']")
    # A text of many tokens is cut into pieces, and only those on screen are painted.
    assert page.locator("#text .chunk").count() > 1


def test_compare_with_a_filler(page: Any, address: str) -> None:
    go(page, address, tab="compare", model=MODEL, text=TEXT, count="20")
    page.wait_for_selector("html[data-compared]")
    first = page.get_attribute("html", "data-compared")
    for place in ("#curves", "#whole-a", "#whole-b", "#pair-bars"):
        page.wait_for_selector(f"{place} svg")
    assert page.locator("#pair-numbers dt").count() >= 3
    # By a real mouse: curves follow while the button is still down.
    box = page.locator("#count").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.1, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + box["height"] / 2, steps=5)
    page.wait_for_selector(f"html[data-compared]:not([data-compared={first!r}])")
    page.mouse.up()
    page.wait_for_url("**count=1**")
    page.locator("#count").focus()
    page.keyboard.press("ArrowRight")


@pytest.mark.parametrize(
    ("mode", "more", "sides"),
    [
        ("fillers", {"against": "sentence"}, ["repeated character", "random sentences"]),
        ("models", {"b": "zoo:chat-llama", "count": "0"}, [MODEL, "zoo:chat-llama"]),
        ("prompts", {"other": "Ann has 5 pears. How many?"}, ["first prompt", "second prompt"]),
    ],
)
def test_compare_fillers_models_and_prompts(
    page: Any, address: str, mode: str, more: dict[str, str], sides: list[str]
) -> None:
    go(page, address, tab="compare", mode=mode, model=MODEL, text=TEXT, **({"count": "9"} | more))
    page.wait_for_selector("html[data-compared]")
    for side in sides:
        assert side in page.inner_text("#compare")
    assert "tokens are the same on both sides" in page.inner_text("#compare")


def test_the_published_figures_and_every_control_of_compare(
    page: Any, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnscope.loading.fetch.where", lambda name: None)  # the tiny pair
    go(page, address, tab="compare", model=MODEL, text="One.", count="1")

    def compared(doing: Any, *given: str) -> None:
        before = page.get_attribute("html", "data-compared")
        doing(*given)
        page.wait_for_selector(f"html[data-compared]:not([data-compared={before!r}])")

    page.wait_for_selector("html[data-compared]")
    for title in ("Slashes against no filler", "Slashes against a sentence"):
        compared(page.click, f"button:text-is('{title}')")
        assert "55 of filler" in page.inner_text("#compare")
    compared(page.click, "button:text-is('# and *: a base and its fine-tune')")
    pair = [page.input_value(f"select[aria-label='{n} model']") for n in ("first", "second")]
    assert pair == ["zoo:spatial-base", "zoo:spatial-phys"]
    assert all(f"All tokens, {name}" in page.inner_text("#compare") for name in pair)
    assert "hash" in page.inner_text("#pair-bars")
    # The rest at one go: only what is asked last is waited for.
    page.select_option("select[aria-label='second model']", "zoo:chat-llama")
    page.select_option("select[aria-label='first model']", MODEL)
    page.fill("#prompt-a", "Tom has 12 apples. How many?")
    page.fill("#count", "9")
    page.click("#system-part-b summary")
    page.fill("#system-b", "")
    page.click("button:text-is('Two models')")
    page.click("button:text-is('Filler against filler')")
    chosen = {"filler": "word", "compared with": "lorem", "counted as": "ids", "position": "end"}
    for name, value in chosen.items():
        page.select_option(f"select[aria-label='{name}']", value)
    page.fill("input[aria-label='repeated text']", "so")
    page.wait_for_selector("#compare p:has-text('with repeated word: '):has-text('9 of filler')")
    page.wait_for_url("**kind=word&count=9&unit=so&by=ids&position=end&against=lorem**")
    for name, value in {"layer": "1", "head": "2"}.items():
        page.select_option(f"#compare select[aria-label={name}]", value)
        page.wait_for_url(f"**{name}={value}**")
    page.click("button:text-is('With and without filler')")
    page.click("button:text-is('Two prompts')")
    page.fill("#prompt-b", "Ann has 5 pears. How many?")
    compared(page.click, "#compare-now")
    before = page.get_attribute("#curves", "data-range")
    page.click("#curves button:text-is('+')")
    page.wait_for_selector(f"#curves:not([data-range='{before}'])")


def test_all_downloads(page: Any, address: str, tmp_path: Path) -> None:
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
    for question, column in {
        "Mass of every class": "mass",
        "What was measured": "numbers",
        "Cells": "cell",
    }.items():
        page.click(f"button:text-is('{question}')")
        page.wait_for_selector(f"#rows th:text-is('{column}')")
    page.fill("#sql", "SELECT avg(value) AS third FROM values")
    page.click("#run-query")
    page.wait_for_selector("#rows th:text-is('third')")
    assert len(page.inner_text("#rows td")) <= len("0.000123456")
    page.fill("#sql", "SELECT count(*) AS n FROM cells")
    page.click("#run-query")
    page.wait_for_selector("#rows th:text-is('n')")
    assert int(page.inner_text("#rows td")) > 0
    page.click("#runs tbody button")
    page.wait_for_selector("tr[data-run=one][aria-selected=true]")
    page.wait_for_url("**run=one**")


def test_an_error_is_shown_and_the_page_still_works(browser: Any, address: str) -> None:
    page = browser.new_page()
    go(page, address, model=MODEL)
    page.click("#measure")
    page.wait_for_selector("#status.wrong")
    page.fill("#prompt", TEXT)
    page.keyboard.press("Control+Enter")
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


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_accessibility_rules(browser: Any, address: str, scheme: str) -> None:
    """The rules of axe (WCAG 2.1 A and AA) on every view."""
    from importlib.resources import files

    axe = files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")
    context = browser.new_context(color_scheme=scheme)
    page = context.new_page()

    def wrong() -> list[str]:
        page.evaluate(axe)
        rules = "{runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa']}"
        found = page.evaluate(f"axe.run(document, {rules}).then((r) => r.violations)")
        return [f"{v['id']}: {[n['html'][:120] for n in v['nodes'][:3]]}" for v in found]

    measured(page, address, token="4", layer="1", completion="2")
    page.wait_for_selector("html[data-row='4']")
    assert wrong() == []
    page.click("#tab-compare")
    page.wait_for_selector("html[data-compared]")
    assert wrong() == []
    page.click("#tab-pictures")
    assert wrong() == []
    page.click("#tab-runs")
    page.frame_locator("#runs iframe").locator("#found h2").wait_for()
    assert wrong() == []
    context.close()


def test_two_questions_about_a_picture(page: Any, address: str, tmp_path: Path) -> None:
    asked = picture_question(0, seed=7)
    Image.fromarray(asked.picture).save(tmp_path / "shapes.png")
    go(page, address, tab="pictures", question=asked.question, question2="Describe it.")
    page.click("#measure-picture")
    page.wait_for_selector("#status.wrong")  # no picture yet
    page.set_input_files("#picture-file", tmp_path / "shapes.png")
    page.wait_for_selector("#pictures .drop img:not([hidden])")
    page.click("#measure-picture")
    page.wait_for_selector("#pictures .side > :nth-child(2) iframe")
    frame = page.frame_locator("#pictures .side > :nth-child(1) iframe")
    frame.locator("canvas").first.wait_for()
    word = asked.question.rstrip("?").split()[-1]
    frame.locator(f"span:text-is(' {word}')").hover()
    frame.locator(f'text=Query " {word}"').wait_for()


def test_a_job_can_be_cancelled(page: Any, address: str, monkeypatch: Any) -> None:
    def for_ever(loaded: Any, asked: Any, watcher: Any) -> None:
        while True:
            watcher.check()
            time.sleep(0.01)

    monkeypatch.setattr("attnscope.web.server.measure", for_ever)
    go(page, address, model=MODEL, text=TEXT)
    page.wait_for_selector("#waiting:visible")
    page.click("#cancel")
    page.wait_for_selector("#status:text-is('Cancelled.')")
    assert page.is_visible("#hint")
    assert page.is_hidden("#work")
