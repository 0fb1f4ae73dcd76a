"""Puts what recipes came to into their pages: docs/recipes/NAME.md.

    attnscope reproduce sinks --out RUNS                    and the others
    attnscope reproduce sinks --out FRESH --seed 1          the same on other prompts
    python tools/docs/recipe_pages.py RUNS [FRESH …]
    attnscope heads zoo:smollm2 --out HEADS
    python tools/docs/recipe_pages.py --heads smollm2=HEADS [LABEL=HEADS …]

Every run gives a column of numbers and verdicts; the first folder gives the figures too, into
docs/images. Pages are made of runs alone: no number in them is typed.
"""

import re
import sys
from pathlib import Path

import polars as pl

from attnscope.figures import draw
from attnscope.figures.export import png
from attnscope.figures.head_types import classify_heads, summary
from attnscope.figures.registry import draw_table
from attnscope.recipes import BUNDLED, RECIPES
from attnscope.report.published import published_statistics
from attnscope.run.store import Run, open_run
from attnscope.spec.claims import Line
from attnscope.stats.outcome import COUNTS
from attnscope.stats.run_stats import judge_run
from attnscope.stats.sentences import cells_of

sys.path.insert(0, str(Path(__file__).parent))

from findings import numbers
from pages import put

DOCS = Path(__file__).parents[2] / "docs"
SCALE = 1.0


def column(run: Run, name: str) -> tuple[str, dict[str, str], dict[str, str]]:
    """Of a run: its heading, its numbers and verdicts by name, and the published numbers."""
    prompts = run.experiment.prompts
    seed = getattr(prompts, "seed", 0)
    if prompts.source == "tokens":  # the recipe multiplies the user's seed
        seed //= prompts.count
    label = ", ".join(run.experiment.models)
    found = published_statistics(run)
    cells, published = {}, {}
    for one in found:  # the level by chance depends on the model, so it stands with the number
        what = re.sub(rf"^{re.escape(label)}[:,] ", "", one.what)
        what, chance = re.fullmatch(r"(.*?)( \(by chance [^)]*\))?", what).groups("")
        cells[what], published[what] = one.shown + chance, one.published
    for verdict in judge_run(run, RECIPES[name].claims):
        where = "" if verdict.layer is None else f", layer {verdict.layer}"
        for line, result in zip(verdict.lines, verdict.results, strict=True):
            what, needed = short(line), cells_of(line, result)["needed"]
            if line.scope.kind in COUNTS:  # so many of the heads of this model
                what, needed = f"`{what}`", f", needed {needed}"
            else:
                what, needed = f"`{what}` {needed}", ""
            text = f"{numbers(line, result)}{needed}: **{result.word}**"
            cells[f"{verdict.claim}{where}: {what}"] = text
    n = max([one.n for one in found], default=run.cells["prompt"].n_unique())
    return f"{label}{f', seed {seed}' if seed else ''}, n = {n}", cells, published


def short(line: Line) -> str:
    """The measure of a line, with the option and the scope that distinguish it from the others."""
    left, scope = line.left, line.scope
    region = left.keys if left.keys not in ("all", "question") else ""
    option = "+".join(left.cls) or (region if left.layer is None else f"layer {left.layer}")
    kind = scope.kind[:-1] if scope.least == "every" else scope.kind
    heads = f" in {scope.least} {kind}" if scope.kind in COUNTS else ""
    return f"{line.left.measure}{f'[{option}]' if option else ''}{heads}"


def table(columns: list[tuple[str, dict[str, str], dict[str, str]]]) -> list[str]:
    """A row for each number or part of a claim, a column for each run."""
    known = any(text for *_, published in columns for text in published.values())
    headings = [heading for heading, *_ in columns] + ["published"] * known
    lines = [f"| | {' | '.join(headings)} |", "| --- " * (len(headings) + 1) + "|"]
    for what in dict.fromkeys(what for _, cells, _ in columns for what in cells):
        row = [cells.get(what, "–") for _, cells, _ in columns]
        row += [next((given[what] for *_, given in columns if what in given), "")] * known
        lines.append(f"| {what} | {' | '.join(row)} |")
    return lines


def page(name: str, folders: list[Path]) -> None:
    runs = [open_run(folder / name) for folder in folders if (folder / name).is_dir()]
    if not runs:
        return
    for number, figure in enumerate(RECIPES[name].figures if name not in BUNDLED else []):
        image = DOCS / "images" / f"recipe-{name}{f'-{number + 1}' if number else ''}.png"
        image.write_bytes(png(draw(runs[0], figure), scale=SCALE))
    put("numbers", table([column(run, name) for run in runs]), DOCS / "recipes" / f"{name}.md")


def heads(label: str, folder: Path) -> None:
    """The table and the picture of `attnscope heads --out`."""
    scores = pl.read_csv(folder / "scores.csv")
    of_heads = classify_heads(scores)
    table = summary(of_heads)
    needles = scores.filter(pl.col("score") == "retrieval")
    tried = needles["prompt"].n_unique()
    found = needles.drop_nulls("value")["prompt"].n_unique()
    lines = [
        f"{found} of {tried} needles were found.",
        "",
        "| kind | threshold | mean above | whole interval above | prompts | largest (layer.head) |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in table.iter_rows(named=True):
        above = f"{row['above']} of {row['heads']}"
        lines.append(
            f"| {row['kind']} | {row['threshold']:g} | {above} | {row['certain']} "
            f"| {row['prompts']} | {row['largest']} |"
        )
    put(f"heads {label}", lines, DOCS / "recipes" / "heads.md")
    texts = scores.filter(pl.col("score") == "sink")["prompt"].n_unique()
    drawn = draw_table("heads", of_heads, model=label, prompts=texts)
    (DOCS / "images" / f"heads-{label}.png").write_bytes(png(drawn, scale=SCALE))


if __name__ == "__main__":
    given = sys.argv[1:]
    if given[:1] == ["--heads"]:
        for each in given[1:]:
            heads(each.partition("=")[0], Path(each.partition("=")[2]))
    else:
        for each in RECIPES:
            page(each, [Path(folder) for folder in given])
