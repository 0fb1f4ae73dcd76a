"""The built-in claims on real models and on the bundled ones, written to docs/findings.md.

    python benchmarks/findings.py [--prompts 200] [--real 200] [--out runs/findings]
                                  [--also NAME=MODEL:PROMPTS …] [--before PAGE]

`zoo:smollm2` and its fine-tune come first, then the models named by `--also` (any that `load`
takes; each under 55 slashes, with as many prompts as fit the time), then the tiny bundled models.
Nothing in the page but its first lines and its headings is typed in by hand: it says whatever
comes out. What is already measured in `--out` is not measured again. Its last parts are
put there by `causes.py`.
"""

import argparse
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import polars as pl

import attnscope
from attnscope.experiment.execute import run
from attnscope.recipes import REAL, RECIPES
from attnscope.run.store import Run
from attnscope.spec.experiment import Experiment
from attnscope.stats.run_stats import compare_run, judge_run
from attnscope.stats.verdicts import Verdict

PAGE = Path(__file__).parents[1] / "docs" / "findings.md"
HEAD = """# Findings
What the papers' claims come to: on **real pretrained models** first, then on the models of \
[the zoo](zoo.md) that are **tiny and were trained for this project**. A verdict is about the \
model it names, on the prompts it names, and about no other. Thresholds are ours: the papers give \
none. [statistics.md](statistics.md) has the rules and how often noise alone would be called \
supported; `src/attnscope/spec/claims.yaml` has the claims. Made by \
`python benchmarks/findings.py`; layers and heads count from 0.
"""
CAUSES = "\n## What filler and ARM do to answers\n"
CHANGED = "## What changed against the page before this one\n"
PAIR = """Mass, mean over heads and queries (all), keys: the maps, classes judged by the share of \
their characters. Layers are those of the published figure, or the same depths in a model with \
fewer.
"""
ACTIVE = """Claims (6) and (7) of the paper: activations after the MLP's non-linearity in layer 0, \
of the question's tokens. Near zero and large are what they are by the base's own thresholds. \
Questions are written with operators; word problems, asked before, have none.
"""
FILLER = """Claims (1) to (5), in the order of the paper; the random sentence has 55 tokens too, \
another for every prompt.
"""

TINY = ("zoo:math-qwen2", "zoo:chat-llama", "zoo:chat-gemma3")


@dataclass(frozen=True)
class Section:
    """One experiment of the page."""

    title: str
    text: str
    folder: str
    experiment: Experiment


def sections(prompts: int, real: int, also: Iterable[str]) -> list[Section]:
    """What is measured, in the order of the page."""
    pair, filler, active = "token-types", "filler-vs-sentence", "filler-activations"
    made = [
        Section(
            "SmolLM2-135M-Instruct and its fine-tune on the spatial task: attention on the maps",
            PAIR,
            "smollm2-pair",
            RECIPES[pair](models=REAL[pair], prompts=real),
        ),
        Section(
            "SmolLM2-135M-Instruct: 55 slashes between system prompt and question",
            FILLER,
            "smollm2-filler",
            RECIPES[filler](models=REAL[filler], prompts=real),
        ),
        Section(
            "SmolLM2-135M-Instruct: activations with and without 55 slashes",
            ACTIVE,
            "smollm2-activations",
            RECIPES[active](models=REAL[active], prompts=real),
        ),
    ]
    for one in also:
        name, _, rest = one.partition("=")
        model, _, count = rest.rpartition(":")
        experiment = RECIPES[filler](models={name: model}, prompts=int(count))
        title = f"{name}: 55 slashes between system prompt and question"
        made.append(Section(title, FILLER, name.lower(), experiment))
        experiment = RECIPES[active](models={name: model}, prompts=int(count))
        title = f"{name}: activations with and without 55 slashes"
        made.append(Section(title, ACTIVE, f"{name.lower()}-activations", experiment))
    return [
        *made,
        Section(
            "Tiny models: a fine-tune against its base, attention on the maps",
            PAIR,
            pair,
            RECIPES[pair](prompts=prompts),
        ),
        Section(
            "Tiny models: 55 slashes between system prompt and question",
            FILLER,
            filler,
            RECIPES[filler](prompts=prompts),
        ),
        Section(
            "Tiny models: activations with and without 55 slashes",
            ACTIVE,
            active,
            RECIPES[active](models=TINY, prompts=prompts),
        ),
    ]


def table(verdicts: list[Verdict]) -> str:
    """Claims with their verdicts and the figures that decide."""
    lines = []
    for name, group in groupby(verdicts, key=lambda v: v.claim):
        lines += [f"\n### {name}\n", "| where | verdict | what decides |", "| --- | --- | --- |"]
        for v in group:
            reason = v.reason.replace("\n", "; ").replace("|", "\\|")
            lines.append(f"| {where(v)} | **{v.verdict}** | {v.statement} {reason} |")
    return "\n".join(lines) + "\n"


def where(verdict: Verdict) -> str:
    return verdict.model or f"layer {verdict.layer}"


def compared(opened: Run) -> str:
    """Fine-tune against base, by class and layer."""
    before, after = opened.experiment.models
    rows = compare_run(opened).sort("layer", "item")
    lines = [
        f"| layer | class | {before} | {after} | difference | 95 % interval | effect | q |",
        "| --- " * 8 + "|",
    ]
    lines += [
        f"| {r['layer']} | {r['item']} | {r['mean_a']:.4f} | {r['mean_b']:.4f} "
        f"| {r['difference']:+.4f} | {interval(r)} | {or_dash(r['effect'], '.2f')} "
        f"| {or_dash(r['q'], '.2g')} |"
        for r in rows.iter_rows(named=True)
    ]
    return "\n".join(lines) + "\n"


def interval(row: dict[str, float | None]) -> str:
    if row["low"] is None or row["high"] is None:
        return "–"
    return f"{row['low']:+.4f} to {row['high']:+.4f}"


def or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def told(opened: Run) -> str:
    """Which models, and on how many prompts."""
    models = ", ".join(
        f"{label} ({facts['architecture']}, {facts['layers']} layers, {facts['heads']} heads, "
        f"revision {facts['revision'][:24]})"
        for label, facts in opened.environment["models"].items()
    )
    return f"{opened.experiment.prompts.count} prompts. Measured: {models}.\n"


def overview(found: list[tuple[str, Verdict]]) -> str:
    """Every verdict of the page, a line each."""
    tally = pl.Series([v.verdict for _, v in found]).value_counts(sort=True)
    counts = ", ".join(f"{n} {verdict}" for verdict, n in tally.iter_rows())
    lines = [f"Verdicts: {counts}.\n", "| claim | where | verdict |", "| --- | --- | --- |"]
    lines += [f"| {v.claim} | {there} | **{v.verdict}** |" for there, v in found]
    return "\n".join(lines) + "\n"


def verdicts_of(page: str) -> dict[tuple[str, str], str]:
    """Claim and place to verdict, from the overview of a page that this script has made."""
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| \*\*([a-z ]+)\*\* \|$", page, re.MULTILINE)
    return {(claim, there): verdict for claim, there, verdict in rows}


def changes(before: dict[tuple[str, str], str], found: list[tuple[str, Verdict]]) -> str:
    """What the page before said otherwise, of the models that are on both."""
    now = {(v.claim, there): v.verdict for there, v in found}
    known = {there for _, there in before}
    lines = ["| claim | where | before | now |", "| --- | --- | --- | --- |"]
    for key in dict.fromkeys([*before, *now]):
        old, new = before.get(key, "no such claim"), now.get(key, "no such claim")
        if old != new and key[1] in known:
            lines.append(f"| {key[0]} | {key[1]} | {old} | {new} |")
    if not before or len(lines) == 2:
        return "Nothing is otherwise than on the page before this one.\n"
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=200, help="of the tiny models")
    parser.add_argument("--real", type=int, default=200, help="prompts of SmolLM2")
    parser.add_argument("--out", type=Path, default=Path("runs/findings"))
    parser.add_argument("--also", nargs="*", default=[], metavar="NAME=MODEL:PROMPTS")
    parser.add_argument("--before", type=Path, default=PAGE, help="the page to compare with")
    chosen = parser.parse_args()
    before = verdicts_of(chosen.before.read_text(encoding="utf-8"))
    found: list[tuple[str, Verdict]] = []
    parts = []
    for section in sections(chosen.prompts, chosen.real, chosen.also):
        run(section.experiment, chosen.out / section.folder)
        opened = attnscope.open_run(chosen.out / section.folder)
        verdicts = [v for v in judge_run(opened) if v.verdict != "not measured"]
        pair = " → ".join(opened.experiment.models)
        found += [(v.model or f"{pair}, {where(v)}", v) for v in verdicts]
        numbers = compared(opened) if "token-types" in opened.experiment.name else ""
        parts += [f"## {section.title}\n", section.text, told(opened), numbers, table(verdicts)]
        print(section.title, flush=True)
    # What `causes.py` has put there stays.
    causes = PAGE.read_text(encoding="utf-8").partition(CAUSES)
    PAGE.write_text(
        "\n".join([HEAD, overview(found), CHANGED, changes(before, found), *parts])
        + "".join(causes[1:]),
        encoding="utf-8",
    )
    print(PAGE)


if __name__ == "__main__":
    main()
