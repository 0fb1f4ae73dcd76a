"""Measure the bundled models on fresh samples and write their cards.

    python training/cards.py                       # all five, 1,000 samples each, on the CPU
    python training/cards.py spatial-phys

The figures come from the trained folder and its log; nothing on a card is typed in by hand but
the sentences.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import yaml

import attnscope
from attnscope import zoo
from evaluate import FRESH, accuracy, fresh
from models import CHECK_EVERY, RECIPES

LOGS = Path(__file__).with_name("logs")
SAMPLES = 1000

DATA = {
    "corpus": "instruction-like text made for the purpose: arithmetic, copying, sorting, Markdown "
    "with headings and lists, questions about a few sentences, indented settings, prose, and maps "
    "as plain text that are described or copied; no action is named or carried out in them",
    "spatial": "single actions of the spatial generator (split `train`), in chat form",
    "math": "word problems of the math generator, levels 1 to 5, worked step by step under a "
    "system prompt, and one document in five of the text that `spatial-base` learned from",
}
WHAT_IT_IS_NOT = (
    "It is not a language model in any useful sense. It knows a few thousand words of made-up "
    "sentences and the tasks above, in prompts of up to a few hundred tokens; beyond what it was "
    "trained on its answers mean nothing. It is not one of the models of its family, and what its "
    "attention does says nothing about theirs. It is here so that every tool in attnscope can be "
    "tried at once, on attention that was learned."
)


def figures(name: str) -> dict[str, Any]:
    """Everything on the card that is a number or a name."""
    recipe = RECIPES[name]
    folder = zoo.folder(name)
    log = [json.loads(line) for line in (LOGS / f"{name}.jsonl").read_text().splitlines()]
    logged = log[0]["recipe"]
    if logged["sizes"] != json.loads(json.dumps(recipe.sizes)):
        raise SystemExit(f"the log of {name} is of a model of other sizes; train it again")
    model, tokenizer = attnscope.load(f"zoo:{name}")
    spatial = name.startswith("spatial")
    shares = {
        "single actions" if level is None else f"level {level}": accuracy(
            name, model, tokenizer, fresh(name, SAMPLES, level)
        )
        for level in ([None] if spatial else range(1, 6))
    }
    return {
        "name": name,
        "architecture": recipe.architecture,
        "layers": model.config.num_hidden_layers,
        "heads": model.config.num_attention_heads,
        "kv_heads": model.config.num_key_value_heads,
        "parameters": sum(p.numel() for p in model.parameters()),
        "bytes": sum(path.stat().st_size for path in folder.glob("*.safetensors")),
        "format": recipe.format,
        "data": recipe.data,
        "documents": logged["documents"],
        "steps": steps_of(log),
        "task": "spatial, single actions" if spatial else "math, worked step by step",
        "fresh_samples": SAMPLES,
        "exact_match": {what: round(share, 4) for what, share in shares.items()},
    }


def steps_of(log: list[dict[str, Any]]) -> int:
    """How many steps were taken: the last that is logged, or that of the check that ended it."""
    checks = sum("exact_match_level_5" in line for line in log)
    return max(CHECK_EVERY * checks, *(line.get("step", 0) for line in log))


def card(facts: dict[str, Any]) -> str:
    """The card as Markdown, with the figures at its head."""
    recipe = RECIPES[facts["name"]]
    head = yaml.safe_dump({"license": "apache-2.0", "attnscope": facts}, sort_keys=False)
    start = f", from `{recipe.start}`" if recipe.start else ", from nothing"
    ended = (
        " Training ended early on purpose, so that an intervention can help or hurt."
        if recipe.until
        else ""
    )
    rows = "\n".join(f"| {what} | {share:.1%} |" for what, share in facts["exact_match"].items())
    return f"""---
{head}---
# {facts["name"]}
A tiny {facts["architecture"]} ({facts["parameters"]:,} parameters, {facts["layers"]} layers, \
{facts["heads"]} query heads, {facts["kv_heads"]} key/value heads), trained for attnscope and \
bundled with it. `attnscope.load("zoo:{facts["name"]}")`

**Trained on** {facts["documents"]:,} documents: {DATA[facts["data"]]}.

**Training**{start}: {facts["steps"]:,} steps of {recipe.rows} rows of {recipe.length} tokens, \
AdamW, on one GPU; weights in bfloat16.{ended} \
The log is `training/logs/{facts["name"]}.jsonl`.

**Exact match** on {facts["fresh_samples"]:,} fresh samples each (seed {FRESH}, greedy; \
`python training/evaluate.py {facts["name"]}`):

| {facts["task"]} | exact match |
| --- | --- |
{rows}

**What it is not.** {WHAT_IT_IS_NOT}
"""


def main() -> None:
    """Write the cards of the models named, or of all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(RECIPES))
    for name in parser.parse_args().names:
        facts = figures(name)
        (zoo.folder(name) / "README.md").write_text(card(facts), encoding="utf-8")
        print(name, facts["exact_match"], flush=True)


if __name__ == "__main__":
    main()
