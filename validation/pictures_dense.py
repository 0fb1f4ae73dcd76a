"""Maps over pictures of a trained vision-language model against its dense eager attention.

    python validation/pictures_dense.py [MODEL] [--prompts 24]

Pictures and questions are those of experiments, so no training has seen them. Three comparisons,
each with the matrices that transformers' eager attention returns: a batch of questions of several
lengths with padding on either side; generation, with the map of every query that predicts a token;
and every row of the recipe image-grounding. Printed are the largest absolute deviations.
"""

import argparse
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

import attnscope
from attnscope.experiment.execute import run
from attnscope.experiment.plan import make_plan
from attnscope.prompts.shapes import TASKS, shape_records
from attnscope.recipes import RECIPES
from attnscope.vision.pictures import decode

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
from dense_boxes import expected

SYSTEM = "Answer questions about the picture."
SIDE = 12
"""Rows and columns of the image tokens."""


def prompts_of(processor: Any, count: int) -> tuple[list[str], list[Any]]:
    """Texts of all tasks in the chat format, and their pictures."""
    records = list(islice(shape_records(0, TASKS), count))
    texts = []
    for record in records:
        parts = [{"type": "image"}, {"type": "text", "text": record["question"]}]
        turns = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": parts}]
        texts.append(processor.apply_chat_template(turns, add_generation_prompt=True))
    return texts, [decode(record["image"], "bmp") for record in records]


def dense(model: Any, **inputs: Any) -> list[torch.Tensor]:
    """[B, H, Q, K] of each layer."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(**inputs, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    return list(weights)


class Deviations(dict[str, float]):
    """The largest deviation by name."""

    def add(self, name: str, found: Any, expected: Any) -> None:
        off = np.abs(np.asarray(found, np.float64) - np.asarray(expected, np.float64)).max()
        self[name] = max(self.get(name, 0.0), float(off))


def padded(model: Any, processor: Any, count: int, side: str, off: Deviations) -> None:
    """Every map of a padded batch: the mean over queries, and the last query."""
    texts, images = prompts_of(processor, count)
    sides: Any = {"padding": True, "padding_side": side, "return_tensors": "pt"}
    inputs = processor(text=texts, images=images, **sides)
    mask = inputs["attention_mask"].bool()
    assert not mask.all()
    with attnscope.watch(model, keep=True) as scope, torch.no_grad():
        model(**inputs)
    placed = scope.place_images(processor, inputs, images)
    last = [int(row.nonzero()[-1]) for row in mask]
    for layer, weights in enumerate(dense(model, **inputs)):
        for n, picture in enumerate(placed):
            at = weights[n][..., picture.positions].reshape(*weights.shape[1:3], SIDE, SIDE)
            mean = scope.image_map(layer, n)
            off.add(f"padding {side}: cell of the mean map", mean, at[:, mask[n]].mean(1))
            off.add(
                f"padding {side}: sum of a map",
                mean.sum((1, 2)),
                at[:, mask[n]].mean(1).sum((1, 2)),
            )
            of_last = scope.image_map(layer, n, query=last[n])
            off.add(f"padding {side}: cell of the last query's map", of_last, at[:, last[n]])


def generated(model: Any, processor: Any, count: int, off: Deviations) -> None:
    """The map of every query that predicts a generated token."""
    texts, images = prompts_of(processor, count)
    for text, image in zip(texts, images, strict=True):
        inputs = processor(text=[text], images=[image], return_tensors="pt")
        with attnscope.watch(model, queries="predicts", keep=True) as scope, torch.no_grad():
            ids = model.generate(**inputs, max_new_tokens=24, do_sample=False)
        scope.place_images(processor, inputs, [image])
        fed = {"input_ids": ids[:, :-1], "pixel_values": inputs["pixel_values"]}
        start = inputs["input_ids"].shape[1] - 1
        at = ids[0, :-1] == processor.image_token_id
        for layer, weights in enumerate(dense(model, **fed)):
            for query in range(start, ids.shape[1] - 1):
                found = scope.image_map(layer, query=query)
                wanted = weights[0, :, query, at].reshape(-1, SIDE, SIDE)
                off.add("generation: cell of a query's map", found, wanted)
                off.add("generation: sum of a map", found.sum((1, 2)), wanted.sum((1, 2)))


def recipe(name: str, model: Any, processor: Any, count: int, off: Deviations) -> None:
    """Every row of pointing and box_ratio of the recipe."""
    asked = RECIPES["image-grounding"]({"m": name}, prompts=count, dtype="float32")
    with tempfile.TemporaryDirectory() as out:
        run(asked, Path(out) / "run")
        rows = attnscope.open_run(Path(out) / "run").values.collect()
    plan = make_plan(asked)
    for cell in plan.models[0].cells():
        ids = torch.tensor(cell.tokens.ids)[None]
        pixels = processor.image_processor(
            plan.pictures.images(cell.prompt, cell.condition), return_tensors="pt"
        )
        at = ids[0] == processor.image_token_id
        for layer, weights in enumerate(dense(model, input_ids=ids, **pixels)):
            for queries in asked.queries:
                last = torch.arange(ids.shape[1]) == ids.shape[1] - 1
                named = torch.from_numpy(cell.tokens.mask("target"))
                of = weights[0][:, last if queries == "last" else named][..., at]
                box = plan.metadata[cell.prompt]["box"]
                wanted = expected(of.double().mean(1).numpy(), box, SIDE)
                mine = rows.filter(prompt=cell.prompt, layer=layer, queries=queries).sort("head")
                for measure, numbers in zip(("pointing", "box_ratio"), wanted, strict=True):
                    off.add(measure, mine.filter(measure=measure)["value"].to_numpy(), numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default="zoo:shapes-vlm")
    parser.add_argument("--prompts", type=int, default=24)
    given = parser.parse_args()
    model, processor = attnscope.load(given.model, device="cpu", dtype="float32")
    off = Deviations()
    for side in ("left", "right"):
        padded(model, processor, given.prompts, side, off)
    generated(model, processor, given.prompts, off)
    recipe(given.model, model, processor, given.prompts, off)
    for name, most in off.items():
        print(f"{name}: off by {most:.1e} at most")


if __name__ == "__main__":
    main()
