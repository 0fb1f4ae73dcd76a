"""Measure shapes-vlm on new pictures and write its card.

    python training/shapes_vlm/card.py            # 1,000 pictures for each task, on the CPU

The numbers come from the trained folder and its log; only the sentences are typed in.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import yaml

import attnscope
from attnscope import zoo
from train import SIZES, TEST, TURNS, exact_match

NAME = "shapes-vlm"
LOG = Path(__file__).parents[1] / "logs" / f"{NAME}.jsonl"
SAMPLES = 1000
QUESTIONS = {
    "color": "What color is the star?",
    "shape": "What shape is red?",
    "place": "Where is the star? (one of nine places)",
    "exists": "Is there a red star?",
    "count": "How many shapes are there?",
    "describe": "Describe the picture. (every shape with color and place, in order)",
}


def facts(samples: int) -> dict[str, Any]:
    """Everything on the card that is a number or a name."""
    log = [json.loads(line) for line in LOG.read_text(encoding="utf-8").splitlines()]
    model, processor = attnscope.load(f"zoo:{NAME}", device="cpu")
    config = model.config.text_config
    stages = [line for line in log if "stage" in line]
    size = SIZES[log[0]["options"]["size"]]
    measured = exact_match(model, processor.tokenizer, size, "cpu", samples)
    return {
        "name": NAME,
        "architecture": type(model).__name__,
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "parameters": sum(p.numel() for p in model.parameters()),
        "bytes": sum(path.stat().st_size for path in zoo.folder(NAME).glob("*.safetensors")),
        "format": "chatml",
        "data": "shapes",
        "documents": sum(stage["pictures"] for stage in stages),
        "steps": sum(stage["steps"] for stage in stages),
        "task": "questions about pictures of shapes",
        "fresh_samples": samples,
        **measured,
    }


def card(known: dict[str, Any]) -> str:
    """The card as Markdown, with the numbers at its head."""
    log = [json.loads(line) for line in LOG.read_text(encoding="utf-8").splitlines()]
    first, second = (line for line in log if "stage" in line)
    minutes = log[-1]["seconds"] / 60
    size = SIZES[log[0]["options"]["size"]]
    head = yaml.safe_dump({"license": "apache-2.0", "attnscope": known}, sort_keys=False)
    rows = "\n".join(
        f"| {task} | {QUESTIONS[task]} | {share:.1%} | {known['constant_answer'][task]:.1%} |"
        for task, share in known["exact_match"].items()
    )
    return f"""---
{head}---
# {NAME}
A tiny {known["architecture"]} ({known["parameters"]:,} parameters): a vision encoder of \
{size.vision} layers, which makes {size.grid} × {size.grid} image tokens of a picture of 192 × 192 \
pixels, and a decoder of {known["layers"]} layers with {known["heads"]} heads. It was trained for \
attnscope and is bundled with it. `model, processor = attnscope.load("zoo:{NAME}")`

**Trained on** {known["documents"]:,} pictures, each seen once: two to five coloured shapes that \
do not touch, with up to {TURNS} questions each (`attnscope.prompts.shapes`).

**Training**, from nothing, on one GPU, {minutes:.1f} minutes: {first["steps"]:,} steps of the \
encoder alone (linear classifiers read colour, shape and place of each patch; they are not kept), \
then {second["steps"]:,} steps of the whole model on the answers, with a tenth of the encoder's \
loss; {log[0]["options"]["batch"]} pictures a step, AdamW; weights in bfloat16. The log is \
`training/logs/{NAME}.jsonl`.

**Exact match** on {known["fresh_samples"]:,} new pictures for each task (seed {TEST}, greedy; \
`python training/shapes_vlm/card.py`), beside the best constant answer:

| task | question | exact match | constant answer |
| --- | --- | --- | --- |
{rows}

**Its encoder learned places from labels.** The extra loss asks each patch for the place of its \
shape in the picture. So that its attention finds shapes says less than it would of a model that \
had only questions and answers.

**What it is not.** It knows pictures of flat shapes and the six questions above, and nothing \
else. It is not LLaVA: it shares the architecture, not the size, the data or a pretrained part. \
What its attention does says nothing about other vision-language models. It is here so that every \
tool in attnscope for pictures can be tried at once, on attention that was learned.
"""


def main() -> None:
    """Write the card."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=SAMPLES)
    known = facts(parser.parse_args().samples)
    (zoo.folder(NAME) / "README.md").write_text(card(known), encoding="utf-8")
    print(known["exact_match"], known["constant_answer"], flush=True)


if __name__ == "__main__":
    main()
