"""The zoo's tokenizer: byte-level BPE with Qwen-like pre-tokenisation, in three chat formats.

One list of merges serves all five models; each family adds its own special tokens and its own
chat template. Digits stand alone, letters carry the space before them, runs of marks and of
blank space stay together: so `####`, `**` and indentation merge, as they do in the real ones.
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from attnscope.prompts import math_samples, spatial_samples
from attnscope.prompts.word_list import word_list
from corpus import documents, worked

SIZE = 3072
SPECIAL = 8  # ids set aside at the end for the family's special tokens

PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHATML = """{%- for turn in messages -%}
{{- '<|im_start|>' + turn['role'] + '\\n' + turn['content'] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
LLAMA3 = """{{- bos_token -}}
{%- for turn in messages -%}
{{- '<|start_header_id|>' + turn['role'] + '<|end_header_id|>\\n\\n' -}}
{{- turn['content'] | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{%- endif -%}
"""
# Gemma knows no system turn: its text stands at the top of the user's first.
GEMMA = """{{- bos_token -}}
{%- set above = namespace(text='') -%}
{%- for turn in messages -%}
{%- if turn['role'] == 'system' -%}
{%- set above.text = turn['content'] + '\\n\\n' -%}
{%- else -%}
{{- '<start_of_turn>' + ('model' if turn['role'] == 'assistant' else turn['role']) + '\\n' -}}
{{- above.text + turn['content'] | trim + '<end_of_turn>\\n' -}}
{%- set above.text = '' -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}
"""

FORMATS: dict[str, dict[str, Any]] = {
    "chatml": {
        "template": CHATML,
        "pad": "<|endoftext|>",
        "eos": "<|im_end|>",
        "bos": None,
        "others": ["<|im_start|>"],
    },
    "llama3": {
        "template": LLAMA3,
        "pad": "<|finetune_right_pad_id|>",
        "eos": "<|eot_id|>",
        "bos": "<|begin_of_text|>",
        "others": ["<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"],
    },
    "gemma": {
        "template": GEMMA,
        "pad": "<pad>",
        "eos": "<end_of_turn>",
        "bos": "<bos>",
        "others": ["<eos>", "<start_of_turn>"],
    },
}


def texts(seed: int) -> list[str]:
    """What the merges are learned from; maps are few, so that blank runs merge as runs."""
    draw = Random(f"rules:{seed}")
    pages = [text for turns in documents(30_000, seed) for _, text in turns if "map" not in text]
    roles = ["system\n", "user\n", "assistant\n", "model\n"] * 500
    sums = [part for s in math_samples(3_000, seed=seed) for part in (s.prompt.text, worked(s))]
    texts = [sample.prompt.text for sample in spatial_samples(300, seed=seed, split="train")]
    rules = [draw.choice("#*/-= ") * draw.choice((2, 3, 4, 8, 16)) for _ in range(600)]
    words = [f" {word}" for kind in ("adverb", "preposition", "latin") for word in word_list(kind)]
    return [*pages, *roles, *sums, *texts, *rules, *words]


def train(seed: int = 0) -> Tokenizer:
    """The merges, without special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.train_from_iterator(
        texts(seed),
        trainers.BpeTrainer(
            vocab_size=SIZE - SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            max_token_length=16,
            show_progress=False,
        ),
    )
    return tokenizer


def in_format(merges: Path, name: str) -> PreTrainedTokenizerFast:
    """The tokenizer of one family: the merges with its special tokens and template."""
    kind = FORMATS[name]
    tokenizer = Tokenizer.from_file(str(merges))
    special = [token for token in (kind["pad"], kind["bos"], kind["eos"]) if token]
    tokenizer.add_special_tokens([*special, *kind["others"]])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=kind["pad"],
        eos_token=kind["eos"],
        bos_token=kind["bos"],
        additional_special_tokens=kind["others"],
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    made.chat_template = kind["template"]
    return made


if __name__ == "__main__":
    where = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("merges.json")
    train().save(str(where))
    print(f"{where}: {len(Tokenizer.from_file(str(where)).get_vocab())} tokens")
