"""Train a small vision-language model on pictures of shapes, on a CPU or one GPU.

    python training/shapes_vlm/train.py build/base --out build/shapes-vlm

The language model is frozen, with low-rank matrices (LoRA) beside the projections of its attention;
vision encoder and projector start from random weights. Stage 1 trains encoder and projector alone:
the output for a patch becomes the mean of the embeddings of the words for colour, shape and place
of what is under it. Stage 2 trains encoder, projector and LoRA on questions about pictures; the
loss counts the answers alone. All questions about a picture share its tokens and do not see each
other. Writes the new weights in 16 bits, and a log: the loss, and exact match on new pictures by
task. Needs torch, transformers and numpy.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from base import read_base
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoTokenizer,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from attnscope.prompts.shapes import SIDE, TASKS, Shape, ask, picture_question, render, scene

PATCH = 16
GRID = SIDE // PATCH
MEAN, STD = 0.5, 0.5
SYSTEM = "Answer questions about the picture."
MARK = "<gh_stars>"
"""The unused token of the base that stands for a patch; the processor calls it <image>."""
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj")
TRAIN, TEST = 1, 2  # seeds
TURNS = 8
LOG_STEPS = 50
WEIGHTS = (3, 3, 3, 2, 1, 1.5)  # of the tasks, in the order of TASKS


class Lora(nn.Module):
    """A frozen linear layer plus a trainable product of two narrow matrices."""

    def __init__(self, linear: nn.Linear, rank: int):
        super().__init__()
        self.linear = linear
        self.a = nn.Parameter(torch.randn(rank, linear.in_features) / math.sqrt(linear.in_features))
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output with the low-rank part, scaled by 2."""
        return self.linear(x) + 2.0 * F.linear(F.linear(x, self.a), self.b)


def build(folder: Path, mark: str) -> tuple[Any, Any]:
    """The untrained model around the base, and the base's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    vision = CLIPVisionConfig(
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=3,
        image_size=SIDE,
        patch_size=PATCH,
        projection_dim=192,
        initializer_factor=1.0,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=AutoConfig.from_pretrained(folder),
        image_token_index=tokenizer.convert_tokens_to_ids(mark),
        image_seq_length=GRID**2,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        tie_word_embeddings=True,
    )
    model = LlavaForConditionalGeneration(config).float()
    model.model.language_model.load_state_dict(read_base(folder))
    model.tie_weights()
    return model, tokenizer


def add_lora(model: Any, rank: int) -> list[nn.Parameter]:
    """Put LoRA beside the projections of every attention layer; the rest stays frozen."""
    language = model.model.language_model
    language.requires_grad_(False)
    model.lm_head.requires_grad_(False)
    for layer in language.layers:
        for name in LINEAR:
            linear = getattr(layer.self_attn, name)
            setattr(layer.self_attn, name, Lora(linear, rank))
    return [p for m in model.modules() if isinstance(m, Lora) for p in (m.a, m.b)]


def pixels(picture: np.ndarray) -> Tensor:
    """[3, SIDE, SIDE]: a picture as the model's processor gives it."""
    return (torch.from_numpy(picture).permute(2, 0, 1) / 255.0 - MEAN) / STD


def patch_targets(shapes: tuple[Shape, ...], words: Callable[[str], Tensor]) -> Tensor:
    """[patches, size]: what the projector should give for each patch; 0 for the ground."""
    edges = np.arange(GRID + 1) / GRID
    targets = torch.zeros(GRID, GRID, words("red").shape[-1])
    for shape in shapes:
        left, top, right, bottom = shape.box
        wide = np.minimum(edges[1:], right) - np.maximum(edges[:-1], left)
        high = np.minimum(edges[1:], bottom) - np.maximum(edges[:-1], top)
        share = np.clip(high, 0, None)[:, None] * np.clip(wide, 0, None)[None] * GRID**2
        named = [shape.color, shape.name, shape.location]
        targets[torch.from_numpy(share > 0.3)] = torch.stack([words(w) for w in named]).mean(0)
    return targets.flatten(0, 1)


@dataclass
class Chat:
    """Writes pictures and turns in the form of ChatML, as token ids."""

    tokenizer: Any
    mark: str

    def __post_init__(self) -> None:
        image = self.mark * GRID**2
        self.head = self._ids(
            f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{image}\n"
        )
        self.next = self._ids("<|im_start|>user\n")
        self.end = self._ids("<|im_end|>\n")

    def _ids(self, text: str) -> list[int]:
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


class Scenes(torch.utils.data.Dataset[dict[str, Any]]):
    """Training pictures by number, with the targets of stage 1 or the questions of stage 2."""

    def __init__(self, first: int, count: int, make: Callable[..., dict[str, Tensor]]):
        self.first, self.count, self.make = first, count, make

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        random = np.random.default_rng([TRAIN, self.first + index])
        shapes = scene(random)
        return {"pixels": pixels(render(shapes, random)), **self.make(shapes, random)}


def questions(chat: Chat, shapes: tuple[Shape, ...], random: np.random.Generator) -> Any:
    """Different questions about one scene; a description is one of them."""
    weights = np.array(WEIGHTS) / sum(WEIGHTS)
    asked: dict[str, str] = {}
    for task in random.choice(TASKS, TURNS, p=weights):
        question, answer, _ = ask(shapes, str(task), random)
        asked[question] = answer
    return chat.turns(list(asked.items()))


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """A batch, padded on the right; padding is a turn of its own."""
    pad = {"ids": 0, "labels": -100, "places": 0, "turn": -1}
    return {
        name: torch.stack([row[name] for row in rows])
        if name not in pad
        else nn.utils.rnn.pad_sequence([row[name] for row in rows], True, pad[name])
        for name in rows[0]
    }


def visible(turn: Tensor) -> Tensor:
    """bool [B, 1, T, T]: which keys a token sees: earlier ones of the picture and of its turn."""
    same = (turn[:, :, None] == turn[:, None, :]) | (turn[:, None, :] == 0)
    return (same & torch.ones_like(same[0]).tril())[:, None]


def optimise(
    groups: list[tuple[list[nn.Parameter], float]],
    loss_of: Callable[[dict[str, Tensor]], Tensor],
    batches: Iterator[dict[str, Tensor]],
    steps: int,
    seconds: float,
    note: Callable[..., None],
    save: Callable[[], None],
) -> None:
    """AdamW with a warm-up and a cosine; ends after `steps`, or when the time is used up."""
    optimizer = torch.optim.AdamW(
        [{"params": [*params], "lr": rate, "rate": rate} for params, rate in groups],
        betas=(0.9, 0.98),
        weight_decay=0.0,
    )
    parameters = [p for params, _ in groups for p in params]
    start, mean = time.perf_counter(), 0.0
    for step, batch in enumerate(batches):
        used = max(step / steps, (time.perf_counter() - start) / seconds)
        if used >= 1:
            break
        for group in optimizer.param_groups:
            fall = 0.5 + 0.5 * math.cos(math.pi * used)
            group["lr"] = group["rate"] * min(1.0, (step + 1) / 50) * fall
        loss = loss_of(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean += float(loss.detach())
        if (step + 1) % LOG_STEPS == 0:
            save()
            note(step=step + 1, loss=round(mean / LOG_STEPS, 4), used=round(used, 3))
            mean = 0.0


def train(model: Any, tokenizer: Any, chosen: Any, note: Callable[..., None], save: Any) -> None:
    """Both stages."""
    device, half = chosen.device, torch.bfloat16
    llava, chat = model.model, Chat(tokenizer, chosen.mark)
    table = llava.get_input_embeddings().weight.detach().float().cpu()

    def words(text: str) -> Tensor:
        return table[tokenizer(f" {text}", add_special_tokens=False)["input_ids"]].mean(0)

    def batches(first: int, steps: int, size: int, make: Any) -> Iterator[dict[str, Tensor]]:
        data = torch.utils.data.DataLoader(
            Scenes(first, steps * size, make),
            size,
            num_workers=chosen.workers,
            collate_fn=collate,
            pin_memory=device == "cuda",
            prefetch_factor=8 if chosen.workers else None,
        )
        for part in data:
            yield {name: tensor.to(device, non_blocking=True) for name, tensor in part.items()}

    def image(batch: dict[str, Tensor]) -> Tensor:
        hidden = llava.vision_tower(batch["pixels"]).last_hidden_state[:, 1:]
        return llava.multi_modal_projector(hidden)

    def patch_loss(batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast(device, half):
            got = image(batch)
        target = batch["targets"]
        return F.mse_loss(got.float(), target) / table.square().mean()

    def answer_loss(batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast(device, half):
            embeddings = llava.get_input_embeddings()(batch["ids"])
            marked = (batch["ids"] == model.config.image_token_id)[..., None]
            features = image(batch).to(embeddings.dtype)
            mask = visible(batch["turn"])
            hidden = llava.language_model(
                inputs_embeds=embeddings.masked_scatter(marked, features),
                position_ids=batch["places"],
                attention_mask=torch.zeros(mask.shape, dtype=half, device=device).masked_fill_(
                    ~mask, torch.finfo(half).min
                ),
                use_cache=False,
            ).last_hidden_state
            labels = batch["labels"][:, 1:]
            counted = labels != -100
            scores = model.lm_head(hidden[:, :-1][counted])
        return F.cross_entropy(scores.float(), labels[counted])

    encoder, projector = llava.vision_tower.parameters, llava.multi_modal_projector.parameters
    lora = [p for m in model.modules() if isinstance(m, Lora) for p in (m.a, m.b)]
    rate, steps, size = chosen.rate, chosen.encoder_steps, chosen.encoder_batch
    first = batches(0, steps, size, lambda shapes, _: {"targets": patch_targets(shapes, words)})
    optimise(
        [([*encoder(), *projector()], rate)],
        patch_loss,
        first,
        steps,
        chosen.encoder_minutes * 60,
        note,
        save,
    )
    second = batches(
        steps * size,
        chosen.steps,
        chosen.batch,
        lambda shapes, random: questions(chat, shapes, random),
    )
    optimise(
        [([*projector(), *lora], rate), ([*encoder()], 0.3 * rate)],
        answer_loss,
        second,
        chosen.steps,
        chosen.minutes * 60,
        note,
        save,
    )


@torch.no_grad()
def exact_match(model: Any, tokenizer: Any, chosen: Any) -> dict[str, float]:
    """By task: the share of new pictures that the model answers correctly."""
    model.eval()
    chat, right = Chat(tokenizer, chosen.mark), {}
    for task in TASKS:
        hits = 0
        for first in range(0, chosen.fresh, chosen.fresh_batch):
            indices = range(first, min(first + chosen.fresh_batch, chosen.fresh))
            asked = [picture_question(index, seed=TEST, task=task) for index in indices]
            rows = [chat.head + chat.question(one.question) for one in asked]
            longest = max(map(len, rows))
            ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
            mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
            images = torch.stack([pixels(one.picture) for one in asked])
            with torch.autocast(chosen.device, torch.bfloat16):
                out = model.generate(
                    input_ids=ids.to(chosen.device),
                    attention_mask=mask.to(chosen.device),
                    pixel_values=images.to(chosen.device),
                    max_new_tokens=64 if task == "describe" else 8,
                    do_sample=False,
                    pad_token_id=0,
                    eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
                )
            texts = tokenizer.batch_decode(out[:, longest:], skip_special_tokens=True)
            hits += sum(text.strip() == one.answer for text, one in zip(texts, asked, strict=True))
        right[task] = round(hits / chosen.fresh, 4)
    model.train()
    return right


def save(model: Any, rank: int, out: Path) -> None:
    """Write what was trained in bfloat16."""
    adapter, encoder = {}, {}
    for name, module in model.model.language_model.named_modules():
        if isinstance(module, Lora):
            for letter, matrix in (("A", module.a), ("B", module.b)):
                adapter[f"{name}.lora_{letter}.weight"] = matrix
    for prefix in ("vision_tower", "multi_modal_projector"):
        for name, tensor in getattr(model.model, prefix).state_dict().items():
            if tensor.is_floating_point():
                encoder[f"{prefix}.{name}"] = tensor
    for name, tensors in (("adapter", adapter), ("encoder", encoder)):
        rounded = {
            key: t.detach().to("cpu", torch.bfloat16).contiguous() for key, t in tensors.items()
        }
        save_file(rounded, out / f"{name}.safetensors")
    model.config.save_pretrained(out)
    (out / "adapter.json").write_text(json.dumps({"rank": rank, "scale": 2.0}))


def options() -> argparse.Namespace:
    """The options; the defaults are those of the bundled model, trained on one CPU core."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", type=Path, help="folder of the language model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mark", default=MARK, help="unused token of the base for a patch")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--encoder-steps", type=int, default=1000)
    parser.add_argument("--encoder-batch", type=int, default=64)
    parser.add_argument("--encoder-minutes", type=float, default=600)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=600)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--fresh", type=int, default=200)
    parser.add_argument("--fresh-batch", type=int, default=50)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    """Train, save, measure."""
    chosen = options()
    chosen.out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    log = (chosen.out / "training.jsonl").open("w")

    def note(**values: Any) -> None:
        values["seconds"] = round(time.perf_counter() - start, 1)
        print(values, flush=True)
        print(json.dumps(values), file=log, flush=True)

    torch.manual_seed(TRAIN)
    model, tokenizer = build(chosen.base, chosen.mark)
    model.model.language_model.to(torch.bfloat16)
    model.tie_weights()
    add_lora(model, chosen.rank)
    model.to(chosen.device).train()
    if chosen.device == "cpu":  # faster backwards than the fused kernel of a CPU
        model.set_attn_implementation("eager")
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    note(parameters=trained, torch=torch.__version__, device=chosen.device)
    train(model, tokenizer, chosen, note, lambda: save(model, chosen.rank, chosen.out))
    with torch.no_grad():
        for parameter in model.parameters():  # measured with the rounded numbers
            parameter.copy_(parameter.to(torch.bfloat16))
    save(model, chosen.rank, chosen.out)
    note(exact_match=exact_match(model, tokenizer, chosen))


if __name__ == "__main__":
    main()
