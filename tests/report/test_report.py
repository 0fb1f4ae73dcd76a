"""The report: self-contained, escaped, and drawn by a browser without any network request."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from typer.testing import CliRunner

import chromium
from attnscope.cli import app
from attnscope.errors import InputError
from attnscope.figures import FIGURES
from attnscope.figures.blocks import Items, Section, as_markdown
from attnscope.figures.caption import unfinished_note
from attnscope.figures.page import script_json, templates
from attnscope.recipes import built_in_claims
from attnscope.report import build, write_report
from attnscope.run.store import open_run
from attnscope.run.tables import IDENTITY
from attnscope.spec.claims import make_claims
from made_runs import MadeRun, made_run, write_run

DRAWN = len(
    FIGURES.keys()
    - {"lambda-length", "steps", "order", "needle-map", "by-query"}
    - {"activations", "near-zero", "variance", "class-difference", "detectors"}
    - {"image-map", "modality-depth"}
    - {"massive", "top-share", "over-steps"}
)
"""All figures but those for which the run has no numbers."""
EVIL = "<script>window.evil = 1</script>"
QUOTED = "\"double\" and 'single' 😀 &amp; </pre></script><!--"
NAME = "model<img src=x onerror=alert(1)>"


def evil_run(**options: Any) -> MadeRun:
    given: dict[str, Any] = {
        "models": (NAME, "second"),
        "prompts": 7,
        "layers": (0, 1),
        "heads": 2,
        "conditions": {"base": 0, "slashes": 9, "sentence": 9},
        "measures": ("mass", "flow", "entropy", "first_token", "lambda", "uniformity"),
        "profile_heads": (0,),
        "length": 24,
        "texts": (EVIL, " ", QUOTED, "\n", " plain"),
    }
    return made_run(**(given | options))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    side = "mass[class=hash+star, model={}]"
    line = f"{side.format('b')} >= 1.05 * {side.format('a')} in each layer"
    run = replace(evil_run(), claims=make_claims({"characters": line}, "test"))
    folder = write_run(run, tmp_path_factory.mktemp("run") / "run")
    return write_report(open_run(folder), folder / "report.html")


def test_it_has_every_part(report: Path) -> None:
    text = report.read_text()
    parts = ("found", "figures", "measured", "tables", "repeat")
    places = [text.index(f'<section id="{part}">') for part in parts]
    assert places == sorted(places)
    for part in ("Models", "Prompts", "Environment", "Comparison"):
        assert f"<h3>{part}</h3>" in text
    assert "tiny" in text
    assert "attnscope run experiment.yaml --out RUN" in text
    assert "torch" in text
    assert text.count('class="chart scroll"') == DRAWN
    assert "lambda-length" in text  # not drawn, with the reason


def test_the_table_of_robustness_has_a_row_per_claim(report: Path) -> None:
    text = report.read_text()
    claims = text[text.index('<section id="tables">') : text.index("<h3>Comparison</h3>")]
    # 4 normalisations × 3 conditions × 3 numbers, in 2 layers.
    line = re.search(r"<tr><td>characters</td>.*?</tr>", claims)
    assert line is not None
    assert '<td class="number">36</td>' in line[0]
    assert re.search(r"<td>\d+ of 72</td><td>\d of 2</td>", line[0])


def test_a_run_without_choices_has_no_table_of_robustness() -> None:
    text = build(evil_run(prompts=2, measures=("entropy",), profile_heads=()))
    tables = text[text.index('<section id="tables">') :].split("<section")[1]
    assert re.findall("<h3>(.*?)</h3>", tables) == ["Comparison"]


def test_text_from_prompts_and_models_is_escaped_everywhere(report: Path) -> None:
    text = report.read_text()
    assert "<script>window.evil" not in text
    assert "<img src=x" not in text
    assert "&lt;script&gt;window.evil = 1&lt;/script&gt;" in text
    assert "&#34;double&#34; and &#39;single&#39; 😀 &amp;amp; &lt;/pre&gt;" in text
    # The page's own scripts and no others.
    assert len(re.findall(r"<script", text)) == 4
    assert len(re.findall(r"</script>", text)) == 4


def test_it_requests_no_address(report: Path) -> None:
    page = re.sub(r"<script>.*?</script>", "", report.read_text(), flags=re.S)
    page = re.sub(r'<script type="application/json".*?</script>', "", page, flags=re.S)
    assert not re.findall(r"""(?:src|href)=["'](?!#|data:)""", page)
    assert "default-src 'none'" in page


def test_json_cannot_leave_its_script() -> None:
    assert "<" not in script_json({"a": "</script><!--", "b": "\u2028&"})
    with pytest.raises(ValueError):  # noqa: PT011  (raised by the json module)
        script_json(float("nan"))


def test_blocks_become_markdown_and_escaped_html() -> None:
    frame = pl.DataFrame({"a": ["|\n"], "b": [1.0]})
    sections = [
        Section("A_b", ["<b>&lt;", "q < 1", Items(["x <i> *"], "see:")]),
        Section("T", [frame]),
    ]
    blocks: Any = templates().get_template("blocks.html").module
    html = re.sub(r"\s*\n\s*", "", blocks.description(sections))
    assert html == (
        "<h4>A_b</h4><p>&lt;b&gt;&amp;lt;</p><p>q &lt; 1</p><p>see:</p>"
        "<ul><li>x &lt;i&gt; *</li></ul><h4>T</h4>"
        '<div class="scroll"><table><thead><tr><th>a</th>'
        '<th class="number">b</th></tr></thead><tbody>'
        '<tr><td>|⏎</td><td class="number">1</td></tr></tbody></table></div>'
    )
    assert as_markdown(sections) == (
        "### A\\_b\n&lt;b&gt;&amp;lt;\nq < 1\n\nsee:\n\n- x &lt;i&gt; \\*\n\n"
        "### T\n\n| a | b |\n| --- | ---: |\n| \\|⏎ | 1 |"
    )


def test_a_run_without_figures_still_has_a_report() -> None:
    text = build(evil_run(measures=(), profile_heads=()))
    assert 'class="chart scroll"' not in text
    assert "<h3>Prompts</h3>" in text


@pytest.mark.slow
def test_a_comparison_that_is_too_long_names_the_measures_it_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = evil_run(prompts=2, profile_heads=(), measures=("mass", "flow", "entropy"))

    def rows_of(measure: str, text: str) -> int:
        table = text[text.index('<section id="tables">') :].split("</section>")[0]
        return table.count(f"<td>{measure}</td>")

    whole = build(run)
    assert rows_of("flow", whole) == 25 * 2 * 3  # classes × classes, layers, conditions
    assert "--json" not in whole
    monkeypatch.setattr(sys.modules["attnscope.report.build"], "ROWS", 100)
    cut = build(run)
    assert re.search("<p>[^<]*flow[^<]*<code>[^<]*--json</code>", cut)
    assert rows_of("flow", cut) == 0
    assert rows_of("mass", cut) == rows_of("mass", whole) > 0


@pytest.mark.slow
def test_every_figure_of_an_unfinished_run_is_marked(tmp_path: Path) -> None:
    folder = write_run(evil_run(prompts=2), tmp_path / "run")
    (folder / "manifest.json").unlink()
    run = open_run(folder)
    note = unfinished_note(run)
    assert "12 cells" in note
    text = build(run)
    assert f"<p><strong>{note}.</strong></p>" in text
    assert text.count(f"{note}.</p></figcaption>") == text.count('class="chart scroll"') > 0
    drawn = CliRunner().invoke(app, ["figure", str(folder), "depth", "--formats", "md"])
    assert drawn.exit_code == 0
    assert note in (folder / "figures" / "depth.md").read_text()


def test_a_run_without_cells_has_a_report(tmp_path: Path) -> None:
    folder = write_run(evil_run(prompts=1), tmp_path / "run")
    shutil.rmtree(folder / "cells")
    (folder / "manifest.json").unlink()
    text = build(open_run(folder))
    assert 'class="chart scroll"' not in text
    assert '<pre class="prompt">' not in text
    assert "0 cells" in text


def test_it_begins_with_the_figure_of_a_decided_claim(report: Path) -> None:
    text = report.read_text()
    first = text[text.index('<section id="found">') : text.index('<section id="figures">')]
    assert re.search(
        "<td>(holds|opposite|open|cannot tell|smaller than claimed|does not hold)</td>", first
    )
    (name,) = re.findall('<figure id="figure-(.*?)">', first)
    assert 'id="chart-0"' in first
    assert name == "token-types"  # of mass, which the claim is about


def test_every_claim_is_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import attnscope.figures.verdict_cache as judged

    verdicts: list[str] = []
    choices: list[str] = []
    once, again = judged.judge_run, judged.sensitivity_of_run

    def judge(run: Any, claims: Any) -> Any:
        verdicts.extend(claim.name for claim in claims)
        return once(run, claims)

    def under(run: Any, claim: Any) -> Any:
        choices.append(claim.name)
        return again(run, claim)

    monkeypatch.setattr(judged, "judge_run", judge)
    monkeypatch.setattr(judged, "sensitivity_of_run", under)
    build(evil_run(prompts=2, profile_heads=(), measures=("mass", "lambda", "uniformity")))
    names = [claim.name for claim in built_in_claims()]
    assert sorted(verdicts) == sorted(names)
    assert sorted(choices) == sorted(names)


def test_the_report_gives_the_reason_if_claims_cannot_be_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import attnscope.figures.verdict_cache as judged

    def refuse(run: Any, claims: Any) -> Any:
        raise InputError("the reason")

    monkeypatch.setattr(judged, "judge_run", refuse)
    text = build(evil_run(prompts=2, profile_heads=(), measures=("mass",)))
    assert "the reason" in text


def test_no_two_rows_of_the_comparison_have_the_same_labels(tmp_path: Path) -> None:
    run = evil_run(prompts=2, profile_heads=(), measures=("mass",))
    more = [
        run.values.with_columns(pl.lit(queries).alias("queries"), pl.lit(keys).alias("keys"))
        for queries in ("all", "last")
        for keys in ("all", "not-first")
    ]
    text = build(replace(run, values=pl.concat(more)))
    table = text[text.index("<h3>Comparison</h3>") :].split("</table>")[0]
    heads = re.findall(r"<th(?: [^>]*)?>(.*?)</th>", table)
    rows = [
        dict(zip(heads, re.findall(r"<td.*?>(.*?)</td>", row), strict=True))
        for row in re.findall(r"<tr>(<td.*?)</tr>", table)
    ]
    labels = [name for name in heads if name in (*IDENTITY, "a", "b", "normalise", "combine")]
    assert {"queries", "keys", "condition", "item", "layer"} <= set(labels)
    assert len({tuple(row[name] for name in labels) for row in rows}) == len(rows) > 100
    assert "; classes: default; measure: mass; normalise: mass; combine: mean" in text


@pytest.mark.slow
def test_one_model_and_one_prompt() -> None:
    text = build(evil_run(models=("alone",), prompts=1))
    captions = re.findall("<figcaption>(.*?)</figcaption>", text)
    assert captions
    assert not [caption for caption in captions if "95 %" in caption]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium.opened() as browser:
        yield browser


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_draws_it_without_messages_or_requests(
    report: Path, browser: Any, scheme: str
) -> None:
    page = browser.new_page(color_scheme=scheme)
    messages: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(report.as_uri())
    page.wait_for_function("document.documentElement.dataset.drawn")
    assert messages == []
    assert requests == [report.as_uri()]
    assert page.evaluate("document.documentElement.dataset.drawn") == scheme
    assert page.evaluate("document.querySelectorAll('.chart svg').length") == DRAWN
    assert page.evaluate("typeof window.evil") == "undefined"
    prompts = page.evaluate("[...document.querySelectorAll('pre.prompt')].map(p => p.innerText)")
    assert EVIL in prompts[0]
    assert QUOTED in prompts[0]
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (back == "rgb(255, 255, 255)") == (scheme == "light")
    page.close()


@pytest.mark.browser
def test_tables_can_be_sorted_and_filtered(report: Path, browser: Any) -> None:
    page = browser.new_page()
    page.goto(report.as_uri())
    table = "[...document.querySelectorAll('#tables table.sortable')].at(-1)"
    rows, heads = f"{table}.tBodies[0].rows", f"{table}.tHead.rows[0].cells"
    names = page.evaluate(f"[...{heads}].map(h => h.textContent)")
    at = names.index("difference")
    read = f"[...{rows}].filter(r => !r.hidden).map(r => r.cells[{at}].textContent)"
    page.evaluate(f"{heads}[{at}].click()")
    up = [float(v) for v in page.evaluate(read) if v != "—"]
    assert up == sorted(up)
    page.evaluate(f"{heads}[{at}].click()")
    assert [float(v) for v in page.evaluate(read) if v != "—"] == up[::-1]
    page.locator("#tables .filter").last.fill("entropy slashes")
    left = page.evaluate(f"[...{rows}].filter(r => !r.hidden).map(r => r.textContent)")
    assert 0 < len(left) < len(up)
    assert all("entropy" in text and "slashes" in text for text in left)
    page.close()


@pytest.mark.browser
@pytest.mark.slow
def test_a_phone_shows_every_verdict(report: Path, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 100})
    page.goto(report.as_uri())
    hidden = "[...document.querySelectorAll('.verdicts .scroll')]"
    hidden += ".filter(part => part.scrollHeight > part.clientHeight).length"
    assert page.evaluate(hidden) == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.slow
@pytest.mark.browser
def test_the_wheel_zooms(report: Path, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(report.as_uri())
    page.wait_for_function("document.documentElement.dataset.drawn")
    chart = page.locator("#figure-filler-profile svg")
    before = chart.inner_html()
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    page.mouse.move(box["x"] + 160, box["y"] + box["height"] / 3)
    page.mouse.wheel(0, -300)
    page.wait_for_timeout(300)
    assert chart.inner_html() != before
    assert errors == []
    page.close()


@pytest.mark.slow
def test_the_commands(tmp_path: Path) -> None:
    folder = write_run(evil_run(prompts=2), tmp_path / "run")
    run = CliRunner().invoke
    drawn = run(app, ["figure", str(folder), "token-types", "--formats", "csv,md"])
    assert drawn.exit_code == 0, drawn.output
    assert {p.name for p in (folder / "figures").iterdir()} == {"token-types.csv", "token-types.md"}
    described = run(
        app,
        ["describe", str(folder), "filler-profile", "--heads", f"{NAME}=0", "--set", "mean=true"],
    )
    assert described.exit_code == 0, described.output
    assert "### Every value" in described.output
    assert "n = 2 prompts" in described.output
    written = run(app, ["report", str(folder), "--out", str(tmp_path / "r.html")])
    assert written.exit_code == 0, written.output
    assert (tmp_path / "r.html").stat().st_size > 500_000
    for wrong in (
        ["figure", str(folder), "pie"],
        ["figure", str(folder), "depth", "--heads", "x"],
        ["figure", str(folder), "depth", "--set", "x"],
        ["report", str(tmp_path / "nowhere")],
    ):
        refused = run(app, wrong)
        assert refused.exit_code != 0
        assert isinstance(refused.exception, InputError)


def test_every_figure_of_a_run_by_default(tmp_path: Path) -> None:
    folder = write_run(
        evil_run(prompts=2, measures=("entropy",), profile_heads=()), tmp_path / "run"
    )
    drawn = CliRunner().invoke(app, ["figure", str(folder), "--formats", "csv"])
    assert drawn.exit_code == 0, drawn.output
    names = {p.name for p in (folder / "figures").iterdir()}
    assert {"effect-heads.csv", "depth.csv"} <= names
    assert "token-types.csv" not in names
    assert "token-types" in drawn.stderr


def test_the_methods_state_what_a_condition_changes() -> None:
    text = build(evil_run(prompts=2, measures=("entropy",), profile_heads=()))
    row = re.search(r"<tr><th>conditions</th><td>(.*?)</td></tr>", text)
    assert row is not None
    assert row[1].startswith("base: unchanged, slashes: insert: kind: repeat")
    assert "—" not in row[1]


@pytest.mark.slow
def test_the_methods_have_the_rules_of_the_classes_and_count_the_records() -> None:
    run = made_run()
    mine = [{"name": "negation", "words": ["no", "never"]}, {"name": "other", "every": "token"}]
    experiment = run.experiment.with_keys(prompts=["First text.", "No."], classes={"mine": mine})
    methods = _section(build(replace(run, experiment=experiment)), "measured")
    assert "<td>mine: negation, other</td>" in methods
    assert "<td>words: no, never</td>" in methods
    assert "<td>source: inline, records: 2</td>" in methods


def _section(page: str, name: str) -> str:
    return page.split(f'<section id="{name}">')[1].split("</section>")[0]


def test_a_model_in_a_folder_has_its_name_and_not_the_path() -> None:
    run = made_run(models=("mine",), measures=("entropy",))
    about = {"mine": run.environment["models"]["mine"] | {"name": "/srv/models/tuned"}}
    page = build(
        replace(
            run,
            experiment=run.experiment.with_keys(models={"mine": "/srv/models/tuned"}),
            environment={**run.environment, "models": about},
        )
    )
    assert "/srv/models" not in page
    assert "<td>tuned</td>" in page
    assert "mine: tuned" in page
