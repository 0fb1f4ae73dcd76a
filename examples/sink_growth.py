"""Train a tiny model on a CPU and watch its attention sink grow.

    python examples/sink_growth.py --out sink-growth          # about four minutes on one core

Needs a checkout (the texts come from training/) and `pip install 'attnscope[train]'`. Writes the
run of the probes to OUT/attention and the figure to OUT/attention/figures/over-steps.png.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import attnscope
from attnscope.figures import draw, save

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "training"))
from corpus import documents

LENGTH = 96


def texts(count: int, seed: int) -> list[str]:
    """Short conversations as plain text."""
    return ["\n".join(text for _, text in turns) for turns in documents(count, seed)]


def rows(tokenizer: Any, some: list[str]) -> list[dict[str, torch.Tensor]]:
    """Texts one after the other in rows of equal length, each of which begins with BOS."""
    ids = [id for text in some for id in tokenizer(text + "\n", add_special_tokens=False).input_ids]
    starts = range(0, len(ids) - LENGTH, LENGTH - 1)
    each = [torch.tensor([tokenizer.bos_token_id, *ids[n : n + LENGTH - 1]]) for n in starts]
    return [{"input_ids": row, "labels": row} for row in each]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--documents", type=int, default=12_000)
    chosen = parser.parse_args()
    torch.manual_seed(0)
    _, tokenizer = attnscope.load("zoo:chat-llama")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    probes = [tokenizer.bos_token + text for text in texts(400, seed=1) if 150 < len(text) < 220]
    callback = attnscope.TrainerCallback(
        every=max(1, chosen.steps // 12),
        prompts=probes[:16],
        out=chosen.out / "attention",
        chat=False,
    )
    trainer = Trainer(
        LlamaForCausalLM(config),
        TrainingArguments(
            str(chosen.out),
            max_steps=chosen.steps,
            per_device_train_batch_size=16,
            learning_rate=2e-3,
            warmup_steps=chosen.steps // 12,
            lr_scheduler_type="cosine",
            weight_decay=0.1,
            logging_steps=max(1, chosen.steps // 6),
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            dataloader_pin_memory=False,
            disable_tqdm=True,
        ),
        train_dataset=rows(tokenizer, texts(chosen.documents, seed=0)),
        processing_class=tokenizer,
        callbacks=[callback],
    )
    trainer.train()
    figure = draw(attnscope.open_run(chosen.out / "attention"), "over-steps")
    for path in save(figure, chosen.out / "attention" / "figures", ["png", "csv"]):
        print(path)


if __name__ == "__main__":
    main()
