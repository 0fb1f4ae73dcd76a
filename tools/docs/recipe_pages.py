"""Puts what recipes came to into their pages: docs/recipes/NAME.md.

    attnscope reproduce sinks --out RUNS                    and the others
    attnscope reproduce sinks --out FRESH --seed 1          the same on other prompts
    python tools/docs/recipe_pages.py RUNS [FRESH …]
    attnscope heads zoo:smollm2 --out HEADS
    python tools/docs/recipe_pages.py --heads smollm2=HEADS [LABEL=HEADS …]

Every folder of runs gives a table of the numbers and the verdicts as the command prints them; the
first one gives the figures too, into docs/images. Pages are made of runs alone: no number in them
is typed.
"""

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
from attnscope.stats.run_stats import judge_run

sys.path.insert(0, str(Path(__file__).parent))

from pages import put

DOCS = Path(__file__).parents[2] / "docs"
SCALE = 1.0


def section(run: Run) -> list[str]:
    """A table of a run's numbers, and what was printed of its claims."""
    prompts = run.experiment.prompts
    seed = getattr(prompts, "seed", 0)
    if prompts.source == "tokens":  # the recipe multiplies the user's seed
        seed //= prompts.count
    other = "" if seed == 0 else f", on other prompts (seed {seed})"
    lines = [f"### {', '.join(run.experiment.models)}{other}", ""]
    found = published_statistics(run)
    if found:
        lines += ["| | ours | prompts | published |", "| --- | --- | --- | --- |"]
    for one in found:
        lines.append(f"| {one.what} | {one.shown} | {one.n} | {one.published} |")
    return [*lines, "", "```text", *map(str, judge_run(run)), "```", ""]


def page(name: str, folders: list[Path]) -> None:
    runs = [open_run(folder / name) for folder in folders if (folder / name).is_dir()]
    if not runs:
        return
    for number, figure in enumerate(RECIPES[name].figures if name not in BUNDLED else []):
        image = DOCS / "images" / f"recipe-{name}{f'-{number + 1}' if number else ''}.png"
        image.write_bytes(png(draw(runs[0], figure), scale=SCALE))
    lines = [line for run in runs for line in section(run)]
    put("numbers", lines, DOCS / "recipes" / f"{name}.md")


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
