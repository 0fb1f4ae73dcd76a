"""How fast prompts are built, aligned and classified, and that none of them fails.

    python benchmarks/prompts.py [--problems math500.jsonl] [--tokenizers byte-level wordpiece …]

Prints Markdown tables; the committed ones are in docs/benchmarks.md. Without a file of
problems (JSONL with a field `problem`) the generator of `attnscope.prompts.math` is used.
"""

import argparse
import sys
import time
from itertools import islice, product
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from attnscope.prompts.datasets import read
from attnscope.prompts.filler import FILLERS, Filler
from attnscope.prompts.insertion import POSITIONS, insert
from attnscope.prompts.math import math_samples
from attnscope.prompts.spatial import spatial_samples
from attnscope.prompts.word_list import word_list
from attnscope.tokens import DEFAULT, apply_chat_template, read_vocabulary, tokenize

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
import made_tokenizers  # the tokenizers of the tests

LARGER = "byte-level, 8,000 tokens"
LENGTHS = (0, 10, 25, 40, 55, 70)
SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."


def insertions(samples: list, kind: str, by: str) -> None:
    """Every problem × position × length × kind of filler, in a ChatML prompt."""
    if kind == LARGER:
        # A vocabulary that knows the problems merges more across the edges of a filler.
        corpus = [sample.prompt.text + "\n" for sample in samples] + ["/" * 64 + "\n"] * 20
        tokenizer = made_tokenizers.byte_level(8000, corpus=corpus)
    else:
        tokenizer = made_tokenizers.made(kind)
    tokenizer.chat_template = made_tokenizers.CHATML
    start = time.perf_counter()
    pairs = failures = boundary = aligned = inserted = 0
    for n, sample in enumerate(samples):
        base = tokenize(apply_chat_template(sample.prompt, tokenizer), tokenizer)
        for position, count, filler in product(POSITIONS, LENGTHS, FILLERS):
            what = Filler(kind=filler, count=count, seed=n)
            try:
                pair = insert(base, what, tokenizer, position=position, by=by)
            except Exception as error:
                failures += 1
                print(f"failed: {kind} {by} problem {n} {position} {what}: {error!r}")
                continue
            pairs += 1
            boundary += len(pair.alignment.base_boundary)
            aligned += len(pair.alignment.base)
            inserted += len(pair.alignment.filler)
    seconds = time.perf_counter() - start
    print(
        f"| {kind} | {by} | {pairs:,} | {failures} | {100 * boundary / (boundary + aligned):.3f} % "
        f"| {inserted / pairs:.1f} | {seconds:.0f} s | {1000 * seconds / pairs:.2f} ms |",
        flush=True,
    )


def large_vocabulary() -> PreTrainedTokenizerFast:
    """As many byte-level pieces as a large model has; only reading and classifying use it."""
    words = [*word_list("noun"), *word_list("verb"), *word_list("adjective")]
    letters = made_tokenizers.pre_tokenizers.ByteLevel.alphabet()
    pieces = [*sorted(letters), *(f"Ġ{word}" for word in words)]
    pieces += (f"{space}{a}{b}" for space in ("", "Ġ") for a in words for b in words)
    tokenizer = Tokenizer(models.WordLevel({p: n for n, p in enumerate(islice(pieces, 151_643))}))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def classification() -> None:
    tokenizer = large_vocabulary()
    moments = [time.perf_counter()]
    read_vocabulary(tokenizer)
    moments.append(time.perf_counter())
    DEFAULT.table(tokenizer)
    moments.append(time.perf_counter())
    ids = np.random.default_rng(0).integers(0, len(tokenizer), 1_000_000)
    DEFAULT.ids(ids[:10], tokenizer)
    took = []
    for _ in range(7):
        start = time.perf_counter()
        DEFAULT.ids(ids, tokenizer)
        took.append(time.perf_counter() - start)
    size = f"{len(tokenizer):,}"
    print(f"| read a vocabulary of {size} tokens, once | {moments[1] - moments[0]:.2f} s |")
    print(f"| classify it with the default set, once | {moments[2] - moments[1]:.2f} s |")
    print(f"| classify a million tokens (median of 7) | {1000 * sorted(took)[3]:.1f} ms |")


def generators() -> None:
    for name, source in (("spatial", spatial_samples), ("math", math_samples)):
        start = time.perf_counter()
        made = sum(1 for _ in source(10_000))
        print(f"| make {made:,} {name} samples | {time.perf_counter() - start:.2f} s |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--problems", type=Path, help="JSONL with a field 'problem'")
    parser.add_argument("--tokenizers", nargs="+", default=[LARGER, *made_tokenizers.KINDS])
    options = parser.parse_args()
    if options.problems:
        samples = list(read(options.problems, fields={"question": "problem"}, system=SYSTEM))
    else:
        samples = list(math_samples(500))
    print("| what | time |\n| --- | ---: |")
    classification()
    generators()
    print(
        f"\n{len(samples)} problems × {len(POSITIONS)} positions × {len(LENGTHS)} lengths ", end=""
    )
    print(f"× {len(FILLERS)} kinds of filler\n")
    print("| tokenizer | inserted by | pairs | failures | base tokens in boundary ", end="")
    print("| filler tokens, mean | time | per pair |\n| --- | --- " + "| ---: " * 6 + "|")
    for kind, by in product(options.tokenizers, ("text", "ids")):
        insertions(samples, kind, by)


if __name__ == "__main__":
    main()
