"""Judges the built-in claims on real and on bundled models and writes docs/findings.md.

    python tools/docs/findings.py [--prompts 200] [--real 200] [--out runs/findings]
                                  [--also NAME=MODEL:PROMPTS …]

`zoo:smollm2` and its fine-tune come first, then the models of `--also` (any that `load` takes),
then the bundled tiny models. Only the first lines of the page are written by hand. Runs that
exist in `--out` are not measured again.
"""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import attnscope
from attnscope.experiment.execute import run
from attnscope.recipes import RECIPES
from attnscope.spec.experiment import Experiment
from attnscope.stats.run_stats import judge_run
from attnscope.stats.verdicts import Verdict

PAGE = Path(__file__).parents[2] / "docs" / "findings.md"
HEAD = """# Findings
Which published claims hold on our models. **Real pretrained models** come first, then \
[zoo](zoo.md) models that are **tiny and were trained for this project**. A verdict is about the \
model and the prompts it names. The thresholds (5 %, 0.9, shares of heads) are ours; the papers \
give none. [statistics.md](statistics.md) has the rules. Command: `python tools/docs/findings.py`. \
Layers and heads count from 0. [causes.md](causes.md) has the effects of interventions.
"""
PAIR, FILLER, ACTIVE = "token-types", "filler-vs-sentence", "filler-activations"
TINY = ("zoo:math-qwen2", "zoo:chat-llama", "zoo:chat-gemma3")


class Judged(NamedTuple):
    """A verdict and the models it is about."""

    where: str
    verdict: Verdict


def experiments(prompts: int, real: int, also: Iterable[str]) -> dict[str, Experiment]:
    """What is measured, by the name of its folder, in the order of the page."""
    chosen = {
        "smollm2-pair": RECIPES[PAIR](models=RECIPES[PAIR].real, prompts=real),
        "smollm2-filler": RECIPES[FILLER](models=RECIPES[FILLER].real, prompts=real),
        "smollm2-activations": RECIPES[ACTIVE](models=RECIPES[ACTIVE].real, prompts=real),
    }
    for one in also:
        name, _, rest = one.partition("=")
        model, _, count = rest.rpartition(":")
        for recipe, suffix in ((FILLER, ""), (ACTIVE, "-activations")):
            made_for = RECIPES[recipe](models={name: model}, prompts=int(count))
            chosen[name.lower() + suffix] = made_for
    return chosen | {
        PAIR: RECIPES[PAIR](prompts=prompts),
        FILLER: RECIPES[FILLER](prompts=prompts),
        ACTIVE: RECIPES[ACTIVE](models=TINY, prompts=prompts),
    }


def overview(rows: list[Judged]) -> str:
    """Claims × models: the verdicts."""
    columns = list(dict.fromkeys(row.where for row in rows))
    lines = [f"| claim | {' | '.join(columns)} |", "| --- " * (len(columns) + 1) + "|"]
    for claim in dict.fromkeys(row.verdict.claim for row in rows):
        words = {row.where: row.verdict.verdict for row in rows if row.verdict.claim == claim}
        lines.append(f"| {claim} | {' | '.join(words.get(each, '') for each in columns)} |")
    return "\n".join(lines) + "\n"


def section(claim: str, rows: list[Judged]) -> str:
    """One claim: its statement, and the numbers of every model."""
    lines = [
        f"## {claim}\n{rows[0].verdict.statement}\n",
        "| where | verdict | numbers |",
        "| --- | --- | --- |",
    ]
    for where, verdict in rows:
        reason = verdict.reason.replace("\n", "; ").replace("|", "\\|")
        lines.append(f"| {where} | **{verdict.verdict}** | {reason} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=200, help="prompts of the tiny models")
    parser.add_argument("--real", type=int, default=200, help="prompts of SmolLM2")
    parser.add_argument("--out", type=Path, default=Path("runs/findings"), help="folder of runs")
    parser.add_argument("--also", nargs="*", default=[], metavar="NAME=MODEL:PROMPTS")
    options = parser.parse_args()
    rows: list[Judged] = []
    for folder, experiment in experiments(options.prompts, options.real, options.also).items():
        run(experiment, options.out / folder)
        opened = attnscope.open_run(options.out / folder)
        pair = " → ".join(opened.experiment.models)
        rows += [
            Judged(verdict.model or f"{pair}, layer {verdict.layer}", verdict)
            for verdict in judge_run(opened)
            if verdict.verdict != "not measured"
        ]
        print(folder, flush=True)
    claims = dict.fromkeys(row.verdict.claim for row in rows)
    pairs = [row for row in rows if row.verdict.model is None]
    single = [row for row in rows if row.verdict.model is not None]
    parts = [HEAD, "## Overview", overview(single), overview(pairs)]
    parts += [section(name, [r for r in rows if r.verdict.claim == name]) for name in claims]
    PAGE.write_text("\n".join(parts), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
