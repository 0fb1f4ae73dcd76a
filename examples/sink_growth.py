"""Train a tiny model on a CPU and watch an attention sink grow.

    python examples/sink_growth.py --out sink-growth          # a minute or two

Every text is a list of random words, and then the same list again. In the second half the model
can copy: it learns heads that find the earlier copy of a word (induction heads). In the first half
there is no copy to find, and these heads attend to the first token: an attention sink. Writes the
run of the probes to OUT/attention and its figure to OUT/attention/figures/over-steps.png. Needs
`pip install 'attnscope[train]'`.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import attnscope
from attnscope.figures import draw, save
from attnscope.prompts.word_list import word_list

WORDS = 16
"""Words of a list."""


def texts(tokenizer: Any, count: int, seed: int) -> list[str]:
    """Lists of words that are one token each, two times."""
    known = [
        w
        for w in word_list("noun")
        if len(tokenizer(f" {w}", add_special_tokens=False).input_ids) == 1
    ]
    generator = torch.Generator().manual_seed(seed)
    lists = torch.randint(0, min(64, len(known)), (count, WORDS), generator=generator).tolist()
    halves = ["".join(f" {known[n]}" for n in one) for one in lists]
    return [half + half for half in halves]


def sink_of_halves(model: Any, tokenizer: Any) -> dict[str, float]:
    """First-token mass of the last layer, for queries of the first and of the second list."""
    ids = torch.tensor(tokenizer(texts(tokenizer, 16, seed=1)).input_ids)
    ids = torch.cat([torch.full((len(ids), 1), tokenizer.bos_token_id), ids], 1)
    places = torch.arange(ids.shape[1]).expand_as(ids)
    halves = {"first": (places > 0) & (places < WORDS), "second": places >= WORDS + 1}
    shares = {}
    for half, queries in halves.items():
        with torch.no_grad(), attnscope.watch(model.eval(), queries=queries) as scope:
            model(ids)
        shares[half] = scope.first_token(scope.layers[-1]).mean().item()
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=160)
    chosen = parser.parse_args()
    torch.manual_seed(0)
    _, tokenizer = attnscope.load("zoo:chat-llama")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.05,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    some = texts(tokenizer, 64 * chosen.steps, seed=0)
    rows = [[tokenizer.bos_token_id, *ids] for ids in tokenizer(some).input_ids]
    callback = attnscope.TrainerCallback(
        every=max(1, chosen.steps // 16),
        prompts=texts(tokenizer, 16, seed=1),
        out=chosen.out / "attention",
        chat=False,
        bos=True,
    )
    trainer = Trainer(
        LlamaForCausalLM(config),
        TrainingArguments(
            str(chosen.out),
            max_steps=chosen.steps,
            per_device_train_batch_size=64,
            learning_rate=3e-3,
            lr_scheduler_type="constant",
            weight_decay=0.1,
            logging_steps=max(1, chosen.steps // 4),
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            dataloader_pin_memory=False,
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in map(torch.tensor, rows)],
        processing_class=tokenizer,
        callbacks=[callback],
    )
    trainer.train()
    for half, share in sink_of_halves(trainer.model, tokenizer).items():
        print(f"layer 1, {half} half: {share:.2f} of the attention is on the first token")
    run = attnscope.open_run(chosen.out / "attention")
    for path in save(draw(run, "over-steps"), run.path / "figures", ["png", "csv"]):
        print(path)


if __name__ == "__main__":
    main()
