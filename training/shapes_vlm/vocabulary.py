"""The tokenizer of shapes-vlm: byte-level BPE whose merges come from the questions themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from attnscope.prompts.shapes import TASKS, ask, scene

SYSTEM = "Answer questions about the picture."
MARK = "<image>"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", MARK)
SIZE = 512
TEMPLATE = """{%- for turn in messages -%}
{{- '<|im_start|>' + turn['role'] + '\\n' -}}
{%- if turn['content'] is string -%}{{- turn['content'] -}}{%- else -%}
{%- for part in turn['content'] -%}
{{- '<image>\\n' if part['type'] == 'image' else part['text'] -}}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""ChatML; a picture is one line of image tokens."""


def make_tokenizer() -> Any:
    """The tokenizer; equal on every machine."""
    random = np.random.default_rng(0)
    texts = [SYSTEM, "system\n", "user\n", "assistant\n"]
    for _ in range(400):
        shapes = scene(random)
        for task in TASKS:
            question, answer, _ = ask(shapes, task, random)
            texts += [question, answer, f" {answer}"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=SIZE,
            special_tokens=list(SPECIAL),
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[2],
        extra_special_tokens={"image_token": MARK, "im_start_token": SPECIAL[1]},
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = TEMPLATE
    return fast
