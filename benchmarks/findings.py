"""The built-in claims on the bundled models, over 200 prompts, written to docs/findings.md.

    python benchmarks/findings.py [--prompts 200] [--out runs/findings]

Nothing in the page but its first lines is typed in by hand: it says whatever comes out.
"""

import argparse
from itertools import groupby
from pathlib import Path

import polars as pl

import attnscope
from attnscope.experiment.execute import run
from attnscope.recipes import RECIPES
from attnscope.stats.on_run import compare_run, judge_run
from attnscope.stats.verdicts import Verdict

PAGE = Path(__file__).parents[1] / "docs" / "findings.md"
HEAD = """# Findings on the bundled models
What the papers' claims come to on the models of [the zoo](zoo.md), over {prompts} prompts each. \
These models are **tiny and were trained for this project**: the verdicts are about them, not \
about the \
models in the papers. They show what the tool says, in both directions. \
Thresholds are ours and were set before any of this was measured. One rule was changed after: as \
many heads against a claim as for it had counted as support, and now decide nothing, which turned \
one verdict (`one-factor-fit` on chat-gemma3, 4 heads to 4) from supported to undetermined. \
[statistics.md](statistics.md) has the rules, \
`src/attnscope/question/claims.yaml` the claims. Made by `python benchmarks/findings.py`; layers \
and heads count from 0.
"""


def table(verdicts: list[Verdict]) -> str:
    """Claims with their verdicts and the figures that decide."""
    lines = []
    for name, group in groupby(verdicts, key=lambda v: v.claim):
        some = list(group)
        lines += [f"\n### {name}\n", "| where | verdict | what decides |", "| --- | --- | --- |"]
        for v in some:
            where = v.model or f"layer {v.layer}"
            reason = v.reason.replace("\n", "; ").replace("|", "\\|")
            lines.append(f"| {where} | **{v.verdict}** | {v.statement} {reason} |")
    return "\n".join(lines) + "\n"


def compared(folder: Path) -> str:
    """Fine-tune against base, by class and layer."""
    rows = compare_run(attnscope.open_run(folder)).sort("layer", "item")
    lines = [
        "| layer | class | spatial-base | spatial-phys | difference | 95 % interval | effect | q |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {r['layer']} | {r['item']} | {r['mean_a']:.4f} | {r['mean_b']:.4f} "
        f"| {r['difference']:+.4f} | {r['low']:+.4f} to {r['high']:+.4f} "
        f"| {r['effect']:.2f} | {max(r['q'], 1e-4):.4f} |"
        for r in rows.iter_rows(named=True)
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("runs/findings"))
    chosen = parser.parse_args()
    folders = {name: chosen.out / name for name in ("token-types", "filler-vs-sentence")}
    for name, folder in folders.items():
        run(RECIPES[name](prompts=chosen.prompts), folder)

    maps = attnscope.open_run(folders["token-types"])
    filler = attnscope.open_run(folders["filler-vs-sentence"])
    about = [
        [v for v in judge_run(opened) if v.verdict != "not measured"] for opened in (maps, filler)
    ]
    tally = pl.Series([v.verdict for some in about for v in some]).value_counts(sort=True)
    counts = ", ".join(f"{n} {verdict}" for verdict, n in tally.iter_rows())
    page = [
        HEAD.format(prompts=chosen.prompts),
        f"Verdicts: {counts}.\n",
        "## A fine-tune against its base: attention on the maps\n"
        "Mass, mean over heads and queries (all), keys: the maps, classes judged by the share of "
        "their characters.\n",
        compared(folders["token-types"]),
        table(about[0]),
        "## 55 slashes between system prompt and question\n"
        "Claims (1) to (5), in the order of the paper, for each model; the random sentence of "
        "claim (5) has 55 tokens too, another for every prompt. Some fall is to be expected of any "
        "insertion: later queries see 55 more keys. How much is what λ says.\n",
        table(about[1]),
    ]
    PAGE.write_text("\n".join(page), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
