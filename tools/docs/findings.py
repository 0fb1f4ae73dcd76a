"""Judges the claims of all recipes on real and on bundled models, for docs/findings.md.

    python tools/docs/findings.py --seed 31 --model NAME=MODEL:PROMPTS … [--pair A=MODEL,B=MODEL:N]
    python tools/docs/findings.py --write

Every recipe is run on every model (`token-types` on pairs) with prompts of this seed. A run that
exists in `--out` is not measured again, and one that a model cannot do (too few positions, no end
of a completion) is listed with its reason. `--write` puts the tables into the page.
"""

import argparse
import json
import re
import sys
from pathlib import Path

import attnscope
from attnscope.errors import AttnscopeError
from attnscope.experiment.execute import run
from attnscope.recipes import RECIPES
from attnscope.spec.claims import Line
from attnscope.stats.outcome import COUNTS, Result
from attnscope.stats.run_stats import judge_run
from attnscope.stats.sentences import cells_of
from attnscope.stats.verdicts import Verdict

sys.path.insert(0, str(Path(__file__).parent))  # for those who load this file by its path

from pages import put

PAGE = Path(__file__).parents[2] / "docs" / "findings.md"
PAIR = "token-types"
MODELS = ("smollm2", "qwen-0.5b", "math-qwen2", "chat-llama", "chat-gemma3")
"""Labels of `--model`, in the order of the page."""
MANY = 6
"""Notes on more verdicts name their claims only."""
Models = dict[str, str]


def measure(out: Path, recipe: str, models: Models, prompts: int, seed: int) -> None:
    """One recipe on one model or pair, with the claims stored before the run."""
    folder = out / recipe / "-".join(models)
    failed = folder.with_suffix(".failed.json")
    if (folder / "manifest.json").is_file() or failed.is_file():
        return
    declared = RECIPES[recipe]
    keys = {} if recipe == "injection" else {"seed": seed}  # its prompts are those of a file
    try:
        run(declared(models=models, prompts=prompts, **keys), folder, claims=declared.claims)
    except AttnscopeError as why:
        failed.parent.mkdir(parents=True, exist_ok=True)
        failed.write_text(json.dumps({"code": why.code, "text": str(why)}))
    print(recipe, *models, flush=True)


def verdicts(out: Path) -> dict[tuple[str, str], list[Verdict]]:
    """The verdicts by claim and by folder of models; only of the recipe's own claims."""
    found: dict[tuple[str, str], list[Verdict]] = {}
    for name, recipe in RECIPES.items():
        for folder in sorted((out / name).glob("*/")) if recipe.claims else []:
            if not (folder / "manifest.json").is_file():
                continue
            for verdict in judge_run(attnscope.open_run(folder), recipe.claims):
                if verdict.results:
                    found.setdefault((verdict.claim, folder.name), []).append(verdict)
    return found


def numbers(line: Line, result: Result) -> str:
    """The change of a line, or how many heads."""
    cells = cells_of(line, result)
    if result.estimate is None:
        return "–"
    if result.kind in COUNTS:
        return f"{cells['interval'].replace(' … ', ' to ')} of {result.rows}"
    return f"{cells['change']} [{cells['interval'].replace(' … ', ', ')}]"


def overview(found: dict[tuple[str, str], list[Verdict]], columns: list[str]) -> list[str]:
    """Claims × models: the verdict, and of a claim with one line its number."""
    lines = [f"| claim | {' | '.join(columns)} |", "| --- " * (len(columns) + 1) + "|"]
    for claim in dict.fromkeys(claim for claim, where in found if where in columns):
        cells = []
        for where in columns:
            some = found.get((claim, where), [])
            mine = [
                f"**{v.summary.replace(' parts fail', '')}**"
                + (f" {numbers(v.lines[0], v.results[0])}" if len(v.lines) == 1 else "")
                for v in some
            ]
            cells.append("; ".join(mine) or "–")
        lines.append(f"| {claim} | {' | '.join(cells)} |")
    return lines


def notes(found: dict[tuple[str, str], list[Verdict]]) -> list[str]:
    """What limits the verdicts: similar prompts, skewness."""
    texts: dict[str, list[str]] = {}
    for (claim, where), some in found.items():
        for v in some:
            place = f"{claim} ({where}{'' if v.layer is None else f', layer {v.layer}'})"
            for note in (*v.notes, *(result.note for result in v.results if result.note)):
                text = re.sub(r" \(intraclass correlation [\d.]+\)", "", note)
                texts.setdefault(text, []).append(place)
    lines = []
    for note, places in texts.items():
        if len(places) > MANY:
            places = [place.partition(" (")[0] for place in places]
        lines.append(f"- {note}: {', '.join(dict.fromkeys(places))}.")
    return lines


def write(out: Path) -> None:
    """The tables of the page."""
    found = verdicts(out)
    columns = [name for name in MODELS if any(where == name for _, where in found)]
    put("verdicts", overview(found, columns), PAGE)
    put("notes", notes(found), PAGE)


def _parsed(text: str) -> tuple[Models, int]:
    """NAME=MODEL,NAME=MODEL:PROMPTS"""
    models, _, prompts = text.rpartition(":")
    pairs = (one.partition("=") for one in models.split(","))
    return {label: model for label, _, model in pairs}, int(prompts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", nargs="*", default=[], metavar="NAME=MODEL:PROMPTS")
    parser.add_argument("--pair", nargs="*", default=[], metavar="A=MODEL,B=MODEL:PROMPTS")
    parser.add_argument("--only", nargs="*", default=list(RECIPES), metavar="RECIPE")
    parser.add_argument("--out", type=Path, default=Path("runs/findings"))
    parser.add_argument("--write", action="store_true")
    chosen = parser.parse_args()
    if chosen.write:
        write(chosen.out)
        return
    for text in chosen.pair:
        measure(chosen.out, PAIR, *_parsed(text), chosen.seed)
    for text in chosen.model:
        for recipe in chosen.only:
            if recipe != PAIR:
                measure(chosen.out, recipe, *_parsed(text), chosen.seed)


if __name__ == "__main__":
    main()
