"""Small tokenizers of every kind, trained on the spot: tests need no downloads.

Four ways to cut text, as the common model families do it, and byte-level BPE a second time with
`trim_offsets`. Three chat templates, in the formats the families use.
"""

import json
from collections.abc import Callable
from functools import cache
from typing import Any

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "Tom has 12 apples and gives 5 of them to Ann. How many apples are left? 12 - 5 = 7.",
    "Solve the problem step by step, then write the answer.\n\nWhat is 30 + 48 * 2 / 6?",
    "Target:\n    #    \n  ##*##  \n    #    \nCurrent:\n   ###   \n# * # **\nHistory: rotate 90",
    "# Title\n\n* one item\n* another item // a comment ///// //////// ## ### ####\n\tindented",
    "It's naïve to say the café — or the übergroße Straße — isn't open. 日本語 and 中文 👍 🙂",
    "If x = 3 and y > 2, then x^2 + y <= 14 because \\frac{1}{2} of it is small; but not zero.",
    "he he he he said that the old house near the river was quiet and green, so they stayed.",
    "bread and milk and eggs and tea and salt and rice and soap and oil and and and",
] * 3

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
MARKERS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
]

CHATML = """{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""

LLAMA3 = """{{- bos_token -}}
{%- for m in messages -%}
{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif -%}"""

GEMMA = """{{- bos_token -}}
{%- set ns = namespace(first='') -%}
{%- for m in messages -%}
{%- if m.role == 'system' -%}{%- set ns.first = m.content + '\\n\\n' -%}
{%- else -%}
{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}
{{- ns.first + m.content | trim + '<end_of_turn>\\n' }}
{%- set ns.first = '' -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"""

CHAT_TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "gemma": GEMMA}

# Letters with a space or a mark in front, digits alone, marks with the line break after them.
WORDS_AND_MARKS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(
    size: int = 900, *, corpus: list[str] = CORPUS, trim_offsets: bool = False
) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS_AND_MARKS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<pad>", "<s>", "</s>", *MARKERS],
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    return wrapped(tokenizer)


def byte_level_trimmed() -> PreTrainedTokenizerFast:
    return byte_level(trim_offsets=True)


def sentencepiece_unigram() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    trainer = trainers.UnigramTrainer(
        vocab_size=700,
        special_tokens=["<unk>", "<pad>", "<s>", "</s>", *MARKERS, *BYTES],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(ascii_only(), trainer)
    return wrapped(with_byte_fallback(tokenizer))


def sentencepiece_bpe() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<unk>", "<pad>", "<s>", "</s>", *MARKERS, *BYTES],
        show_progress=False,
        max_token_length=8,
    )
    tokenizer.train_from_iterator(ascii_only(), trainer)
    return wrapped(with_byte_fallback(tokenizer), begin=True)


def wordpiece() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=700,
        special_tokens=["[UNK]", "<pad>", "<s>", "</s>", *MARKERS],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    ids = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=ids
    )
    return wrapped(tokenizer, unk_token="[UNK]")


def ascii_only() -> list[str]:
    """Without the rare characters and line breaks, which byte pieces then have to stand for."""
    return [text.replace("\n", " ") for text in CORPUS if text.isascii()]


def with_byte_fallback(tokenizer: Tokenizer) -> Tokenizer:
    """Byte pieces are ordinary tokens of the model, not special ones."""
    state: dict[str, Any] = json.loads(tokenizer.to_str())
    state["model"]["byte_fallback"] = True
    state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] not in BYTES]
    return Tokenizer.from_str(json.dumps(state))


def wrapped(tokenizer: Tokenizer, *, begin: bool = False, **special: str) -> Any:
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
        **special,
    )


KINDS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "byte-level": byte_level,
    "byte-level-trimmed": byte_level_trimmed,
    "sentencepiece-unigram": sentencepiece_unigram,
    "sentencepiece-bpe": sentencepiece_bpe,
    "wordpiece": wordpiece,
}


@cache
def made(kind: str) -> Any:
    """The tokenizer of a kind, trained once per run."""
    return KINDS[kind]()


def some_tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(97)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0")
