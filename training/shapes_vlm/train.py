"""Train a tiny vision-language model on pictures of shapes, in minutes on one GPU.

    python training/shapes_vlm/train.py --out build/shapes-vlm --workers 15

Everything starts from random numbers: vision encoder, projector, decoder and vocabulary. Stage 1
trains encoder and projector alone: linear classifiers, which are not kept, read colour, shape and
place of what is under a patch from the projector's output. Stage 2 trains the whole model on
questions about pictures; the loss counts the answers alone, plus a tenth of the loss of stage 1.
All questions about a picture share its tokens and do not see each other. Each stage ends after its
minutes. Writes a folder for transformers in 16 bits, and a log: the loss, and by task the exact
match on new pictures beside that of the best constant answer. Needs torch, transformers and numpy.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from attnscope.prompts.shapes import (
    COLORS,
    PLACES,
    SHAPES,
    SIDE,
    TASKS,
    Shape,
    ask,
    picture_question,
    render,
    scene,
)
from vocabulary import MARK, SYSTEM, TEMPLATE, make_tokenizer

MEAN, STD = 0.5, 0.5
TRAIN, TEST = 1, 2  # seeds
TURNS = 8
LOG_STEPS = 100
KEEP_STEPS = 500
AHEAD = 4  # batches that each worker prepares
PROPERTIES = (tuple(COLORS), tuple(SHAPES), tuple(place for row in PLACES for place in row))


@dataclass(frozen=True, kw_only=True)
class Size:
    """The sizes of a model."""

    hidden: int
    mlp: int
    layers: int
    heads: int
    vision: int
    """The layers of the encoder, which is as wide as the decoder."""
    patch: int
    """The side of a patch in pixels."""
    weights: tuple[float, ...]
    """How often each task is asked, in the order of TASKS."""

    @property
    def grid(self) -> int:
        """The number of patches in a row and in a column."""
        return SIDE // self.patch


SIZES = {
    "tiny": Size(
        hidden=96, mlp=256, layers=4, heads=6, vision=2, patch=24, weights=(3, 3, 3, 2, 0, 0)
    ),
    "full": Size(
        hidden=192, mlp=512, layers=8, heads=6, vision=5, patch=16, weights=(3, 3, 3, 2, 1, 1.5)
    ),
}
"""`tiny` is for one core of a CPU, `full` for a GPU."""


def build(size: Size) -> tuple[Any, Any]:
    """The untrained model and its tokenizer."""
    tokenizer = make_tokenizer()
    vision = CLIPVisionConfig(
        hidden_size=size.hidden,
        intermediate_size=size.mlp,
        num_hidden_layers=size.vision,
        num_attention_heads=size.hidden // 32,
        image_size=SIDE,
        patch_size=size.patch,
        projection_dim=size.hidden,
    )
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden,
        intermediate_size=size.mlp,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        head_dim=size.hidden // size.heads,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids(MARK),
        image_seq_length=size.grid**2,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        tie_word_embeddings=True,
    )
    return LlavaForConditionalGeneration(config).float(), tokenizer


def pixels(pictures: Tensor) -> Tensor:
    """[B, 3, SIDE, SIDE]: pictures as the model's processor gives them."""
    return (pictures.permute(0, 3, 1, 2) / 255.0 - MEAN) / STD


def patch_labels(shapes: tuple[Shape, ...], grid: int) -> Tensor:
    """[patches, 3]: colour, shape and place of what is under each patch; -100 for the ground."""
    edges = np.arange(grid + 1) / grid
    labels = torch.full((grid, grid, len(PROPERTIES)), -100)
    for shape in shapes:
        left, top, right, bottom = shape.box
        wide = np.minimum(edges[1:], right) - np.maximum(edges[:-1], left)
        high = np.minimum(edges[1:], bottom) - np.maximum(edges[:-1], top)
        share = np.clip(high, 0, None)[:, None] * np.clip(wide, 0, None)[None] * grid**2
        named = (shape.color, shape.name, shape.location)
        numbers = [values.index(v) for values, v in zip(PROPERTIES, named, strict=True)]
        labels[torch.from_numpy(share > 0.3)] = torch.tensor(numbers)
    return labels.flatten(0, 1)


class Chat:
    """Writes pictures and turns as token ids, as the model's chat template does."""

    def __init__(self, tokenizer: Any, size: Size):
        self.tokenizer, self.weights = tokenizer, np.array(size.weights) / sum(size.weights)
        self._ids = cache(self._uncached_ids)
        self.head = self._ids(
            f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{MARK * size.grid**2}\n"
        )

    def _uncached_ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def question(self, text: str) -> list[int]:
        """A question and the beginning of its answer."""
        return self._ids(f"{text}<|im_end|>\n<|im_start|>assistant\n")

    def turns(self, asked: list[tuple[str, str]]) -> dict[str, Tensor]:
        """Token ids, labels, positions, and the number of each token's turn.

        Turn 0 is the picture, which all turns see. Labels are -100 outside the answers.
        """
        ids, labels = list(self.head), [-100] * len(self.head)
        places, turn = list(range(len(ids))), [0] * len(ids)
        for number, (question, answer) in enumerate(asked, 1):
            before, after = self.question(question), self._ids(f"{answer}<|im_end|>")
            ids += before + after
            labels += [-100] * len(before) + after
            length = len(before) + len(after)
            places += range(len(self.head), len(self.head) + length)
            turn += [number] * length
        row = {"ids": ids, "labels": labels, "places": places, "turn": turn}
        return {name: torch.tensor(numbers) for name, numbers in row.items()}


def questions(
    chat: Chat, shapes: tuple[Shape, ...], random: np.random.Generator
) -> dict[str, Tensor]:
    """Different questions about one scene; a description is one of them."""
    asked: dict[str, str] = {}
    for task in random.choice(TASKS, TURNS, p=chat.weights):
        question, answer, _ = ask(shapes, str(task), random)
        asked[question] = answer
    return chat.turns(list(asked.items()))


@cache
def chat_of_worker(size: Size) -> Chat:
    """One for each process."""
    return Chat(make_tokenizer(), size)


def make_batch(size: Size, first: int, count: int, asked: bool) -> dict[str, np.ndarray]:
    """Training pictures `first`, `first` + 1, …, with questions if `asked`.

    Rows of token ids are padded on the right; padding is a turn of its own. The arrays go through a
    pipe, not through shared memory, of which a container often has little.
    """
    rows = []
    for index in range(first, first + count):
        random = np.random.default_rng([TRAIN, index])
        shapes = scene(random)
        picture = torch.from_numpy(render(shapes, random))
        row = {"pictures": picture, "patches": patch_labels(shapes, size.grid)}
        rows.append({**row, **questions(chat_of_worker(size), shapes, random)} if asked else row)
    pad = {"ids": 0, "labels": -100, "places": 0, "turn": -1}
    return {
        name: torch.stack([row[name] for row in rows]).numpy()
        if name not in pad
        else nn.utils.rnn.pad_sequence([row[name] for row in rows], True, pad[name]).numpy()
        for name in rows[0]
    }


def begin_worker() -> None:
    """One thread for each worker."""
    torch.set_num_threads(1)


def batches(
    pool: ProcessPoolExecutor | None, ahead: int, size: Size, first: int, count: int, asked: bool
) -> Iterator[dict[str, np.ndarray]]:
    """Batches without end, in order; `pool` prepares `ahead` of them."""
    if pool is None:
        while True:
            yield make_batch(size, first, count, asked)
            first += count
    waiting: deque[Any] = deque()
    try:
        while True:
            while len(waiting) < ahead:
                waiting.append(pool.submit(make_batch, size, first, count, asked))
                first += count
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def visible(turn: Tensor) -> Tensor:
    """bool [B, 1, T, T]: which keys a token sees: earlier ones of the picture and of its turn."""
    same = (turn[:, :, None] == turn[:, None, :]) | (turn[:, None, :] == 0)
    return (same & torch.ones_like(same[0]).tril())[:, None]


class Losses(nn.Module):
    """The losses of both stages, and the classifiers of stage 1."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model
        width = model.config.text_config.hidden_size
        self.classify = nn.Linear(width, sum(map(len, PROPERTIES)))

    def features(self, batch: dict[str, Tensor]) -> Tensor:
        """[B, patches, size]: the projector's output."""
        llava = self.model.model
        return llava.multi_modal_projector(
            llava.vision_tower(pixels(batch["pictures"])).last_hidden_state[:, 1:]
        )

    def of_patches(self, batch: dict[str, Tensor], features: Tensor) -> Tensor:
        """Mean cross-entropy of colour, shape and place of the patches."""
        scores = self.classify(features).float().split([*map(len, PROPERTIES)], -1)
        losses = [
            F.cross_entropy(score.flatten(0, 1), label.flatten())
            for score, label in zip(scores, batch["patches"].unbind(-1), strict=True)
        ]
        return torch.stack(losses).mean()

    def of_answers(self, batch: dict[str, Tensor], features: Tensor) -> Tensor:
        """Mean cross-entropy of the tokens of the answers."""
        llava = self.model.model
        embeddings = llava.get_input_embeddings()(batch["ids"])
        marked = (batch["ids"] == self.model.config.image_token_id)[..., None]
        embeddings = embeddings.masked_scatter(marked, features.to(embeddings.dtype))
        hidden = llava.language_model(
            inputs_embeds=embeddings,
            position_ids=batch["places"],
            attention_mask=visible(batch["turn"]),
            use_cache=False,
        ).last_hidden_state
        labels = batch["labels"][:, 1:]
        counted = labels != -100
        return F.cross_entropy(self.model.lm_head(hidden[:, :-1][counted]).float(), labels[counted])


def optimise(
    parameters: list[nn.Parameter],
    loss_of: Callable[[dict[str, Tensor]], Tensor],
    data: Iterator[dict[str, Tensor]],
    chosen: Any,
    minutes: float,
    note: Callable[..., None],
) -> int:
    """AdamW with a warm-up and a cosine, until the steps or minutes are used up; returns steps.

    On a CPU the minutes are those of this process, so that other programs change nothing.
    """
    clock = time.perf_counter if chosen.device == "cuda" else time.process_time
    optimizer = torch.optim.AdamW(
        parameters, betas=(0.9, 0.98), weight_decay=0.01, fused=chosen.device == "cuda"
    )
    start, mean = clock(), torch.zeros((), device=chosen.device)
    for step, batch in enumerate(data):
        used = max(step / chosen.steps, (clock() - start) / 60 / minutes)
        if used >= 1:
            break
        rate = chosen.rate * min(1.0, (step + 1) / 100) * (0.5 + 0.5 * math.cos(math.pi * used))
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(chosen.device, torch.bfloat16, enabled=chosen.device == "cuda"):
            loss = loss_of(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean += loss.detach()  # a number is read from the GPU only for the log
        if (step + 1) % LOG_STEPS == 0 or step == 0:
            count = LOG_STEPS if step else 1
            note(step=step + 1, loss=round(float(mean) / count, 4), used=round(used, 3))
            mean.zero_()
    return step


def train(
    model: Any,
    pool: ProcessPoolExecutor | None,
    chosen: Any,
    note: Callable[..., None],
    keep: Callable[[], None],
) -> None:
    """Both stages; `keep` writes the model as it is, every 500 steps."""
    size, losses = SIZES[chosen.size], Losses(model).to(chosen.device)

    def data(first: int, asked: bool) -> Iterator[dict[str, Tensor]]:
        ahead = AHEAD * chosen.workers
        for number, arrays in enumerate(batches(pool, ahead, size, first, chosen.batch, asked), 1):
            tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
            yield {name: t.to(chosen.device, non_blocking=True) for name, t in tensors.items()}
            if number % KEEP_STEPS == 0:
                keep()

    def answer_loss(batch: dict[str, Tensor]) -> Tensor:
        features = losses.features(batch)
        return losses.of_answers(batch, features) + 0.1 * losses.of_patches(batch, features)

    def patch_loss(batch: dict[str, Tensor]) -> Tensor:
        return losses.of_patches(batch, losses.features(batch))

    parts = (model.model.vision_tower, model.model.multi_modal_projector, losses.classify)
    encoder = [p for part in parts for p in part.parameters()]
    everything = list(losses.parameters())
    done = optimise(encoder, patch_loss, data(0, False), chosen, chosen.encoder_minutes, note)
    note(stage=1, steps=done, pictures=done * chosen.batch)
    first = (done + 1) * chosen.batch
    done = optimise(everything, answer_loss, data(first, True), chosen, chosen.minutes, note)
    note(stage=2, steps=done, pictures=done * chosen.batch)


@torch.no_grad()
def exact_match(
    model: Any, tokenizer: Any, size: Size, device: str, fresh: int, batch: int = 100
) -> Any:
    """By task: the shares of new pictures that the model, and one constant answer, get right."""
    model.eval()
    chat, right, constant = Chat(tokenizer, size), {}, {}
    for task in (t for t, weight in zip(TASKS, size.weights, strict=True) if weight):
        hits, answers = 0, Counter()
        for first in range(0, fresh, batch):
            indices = range(first, min(first + batch, fresh))
            asked = [picture_question(index, seed=TEST, task=task) for index in indices]
            rows = [chat.head + chat.question(one.question) for one in asked]
            longest = max(map(len, rows))
            ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
            mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
            out = model.generate(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                pixel_values=pixels(
                    torch.stack([torch.from_numpy(one.picture) for one in asked])
                ).to(device),
                max_new_tokens=48 if task == "describe" else 6,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
            )
            texts = tokenizer.batch_decode(out[:, longest:], skip_special_tokens=True)
            hits += sum(text.strip() == one.answer for text, one in zip(texts, asked, strict=True))
            answers.update(one.answer for one in asked)
        right[task] = round(hits / fresh, 4)
        constant[task] = round(max(answers.values()) / fresh, 4)
    model.train()
    return {"exact_match": right, "constant_answer": constant}


def save(model: Any, tokenizer: Any, size: Size, out: Path) -> None:
    """Write the model in bfloat16, its tokenizer, and the settings of its processor."""
    weights = {name: t.detach().to("cpu", torch.bfloat16) for name, t in model.state_dict().items()}
    weights.pop("lm_head.weight", None)  # tied to the embeddings
    model.save_pretrained(out, state_dict=weights)
    tokenizer.save_pretrained(out)
    processor = {
        "processor_class": "LlavaProcessor",
        "image_processor": {
            "image_processor_type": "CLIPImageProcessor",
            "do_convert_rgb": True,
            "do_resize": True,
            "size": {"height": SIDE, "width": SIDE},
            "resample": 3,
            "do_center_crop": False,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": [MEAN] * 3,
            "image_std": [STD] * 3,
        },
        "image_token": MARK,
        "patch_size": size.patch,
        "num_additional_image_tokens": 1,
        "vision_feature_select_strategy": "default",
    }  # written here, because transformers makes a processor only where pillow is installed
    (out / "processor_config.json").write_text(json.dumps(processor, indent=2) + "\n")
    (out / "chat_template.jinja").write_text(TEMPLATE)


def options() -> argparse.Namespace:
    """The options; the defaults are those of the bundled model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--encoder-minutes", type=float, default=0.75, help="of stage 1")
    parser.add_argument("--minutes", type=float, default=4.0, help="of stage 2")
    parser.add_argument("--steps", type=int, default=10**6, help="at most, in each stage")
    parser.add_argument("--batch", type=int, default=128, help="pictures")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--fresh", type=int, default=200, help="new pictures for each task")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    """Train, save, measure."""
    chosen = options()
    chosen.out.mkdir(parents=True, exist_ok=True)
    start, size = time.perf_counter(), SIZES[chosen.size]
    log = (chosen.out / "training.jsonl").open("w")

    def note(**values: Any) -> None:
        values["seconds"] = round(time.perf_counter() - start, 1)
        print(values, flush=True)
        print(json.dumps(values), file=log, flush=True)

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    pool = None
    if chosen.workers:  # forked before this process starts threads
        pool = ProcessPoolExecutor(chosen.workers, initializer=begin_worker)
        for future in [pool.submit(make_batch, size, 0, 1, True) for _ in range(chosen.workers)]:
            future.result()
    torch.manual_seed(TRAIN)
    model, tokenizer = build(size)
    model.to(chosen.device).train()
    described = {name: value for name, value in vars(chosen).items() if name != "out"}
    note(
        parameters=sum(p.numel() for p in model.parameters()),
        torch=torch.__version__,
        options=described,
    )
    save(model, tokenizer, size, chosen.out)  # what cannot be written is found before the training
    train(model, pool, chosen, note, lambda: save(model, tokenizer, size, chosen.out))
    if pool:
        pool.shutdown(wait=False, cancel_futures=True)
    with torch.no_grad():
        for parameter in model.parameters():  # measured with the rounded numbers
            parameter.copy_(parameter.to(torch.bfloat16))
    save(model, tokenizer, size, chosen.out)
    note(**exact_match(model, tokenizer, size, chosen.device, chosen.fresh))


if __name__ == "__main__":
    main()
