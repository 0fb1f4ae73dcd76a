"""Scores of every head by published tests: sinks, previous tokens, induction, retrieval, nearness
and classes, per prompt.

The texts are made here: English sentences without meaning, random tokens written twice, and needles
in haystacks with a question about the needle.
"""

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray

from attnscope.capture.scope import Scope
from attnscope.capture.watch import watch
from attnscope.errors import InputError
from attnscope.experiment.completion import greedy_config
from attnscope.loading.compatibility import check_fit
from attnscope.prompts.needle import needle_samples, recall
from attnscope.prompts.word_list import english
from attnscope.tokens import DEFAULT, Prompt, read_vocabulary, tokenize

LENGTH = 64
"""Tokens of a text, as in the published test for sinks."""
REPEATED = 32
"""Random tokens that are written twice."""
RECENT = 8
"""Tokens up to a query's own that are near."""
NEEDLE_WORDS = 120
"""Words of a haystack."""
NEW_TOKENS = 20
TRIES = 3
"""Needles that are tried for each that is to be found."""

Scores = NDArray[np.float64]
Progress = Callable[[str], None]


def head_scores(
    model: Any,
    tokenizer: Any,
    *,
    prompts: int = 8,
    seed: int = 0,
    needles: bool = True,
    progress: Progress | None = None,
) -> pl.DataFrame:
    """One row for each score, item, prompt, layer and head: `score`, `item` (a class), `prompt`,
    `layer`, `head`, `value` (null where a prompt has none).

    sink        mean over the queries of A[i, 0], 64 tokens of text (arXiv 2410.10781)
    previous    mean over the queries of A[i, i - 1], same texts
    local       mean over the queries of the mass on the 8 tokens up to i, the first token of the
                text aside, same texts
    class_mass  mass of each class, the first token aside, same texts; `class_lift` beside it
    induction   mean of A[i, i - n + 1] over the second half of n = 32 random tokens written twice
                (arXiv 2209.11895)
    retrieval   share of the needle's tokens that were generated while the head's largest weight
                lay on them (arXiv 2404.15574); null where the model says no more than half of the
                needle's words, and needles are hidden until so many are found, or three times as
                many tried. The most of the time goes here: without `needles` it
                is left out
    """
    if isinstance(prompts, bool) or not isinstance(prompts, int) or prompts < 1:
        raise InputError(
            f"prompts={prompts!r} is not a whole number of at least 1",
            code="bad-count",
            value=prompts,
        )
    if needles and not model.can_generate():
        raise InputError(
            f"{type(model).__name__} does not generate text, and the retrieval score needs a "
            "completion; give a causal language model",
            code="cannot-generate",
            model=type(model).__name__,
        )
    report = progress or (lambda what: None)
    parts: list[pl.DataFrame] = []
    report(f"{prompts} texts of {LENGTH} tokens")
    parts += _of_texts(model, tokenizer, prompts, seed)
    report(f"{prompts} times {REPEATED} random tokens, written twice")
    parts += _of_repeats(model, tokenizer, prompts, seed)
    for found_count, of_needle in _of_needles(model, tokenizer, prompts, seed) if needles else ():
        report(f"needles: {found_count} of {prompts} found")
        parts += of_needle
    return pl.concat(parts)


@torch.no_grad()
def _watched(model: Any, ids: torch.Tensor, **options: Any) -> Scope:
    for row in ids.tolist():
        check_fit(model.config, row)
    with watch(model, keep=True, **options) as scope:
        model(input_ids=ids.to(model.device), use_cache=False)
    return scope


def _of_texts(model: Any, tokenizer: Any, prompts: int, seed: int) -> Iterator[pl.DataFrame]:
    ids = torch.tensor([_text(tokenizer, seed, number) for number in range(prompts)])
    scope = _watched(model, ids)
    classes = DEFAULT.ids(ids, tokenizer)
    classes[:, 0] = -1
    for layer in scope.layers:
        near = scope.by_distance(layer, first=1, recent=RECENT)[..., 1].nanmean(2)
        for score, of in {
            "sink": scope.first_token(layer),
            "previous": scope.measure("previous_token", layer),
            "local": near,
        }.items():
            yield _table(score, layer, of)
        mass, lift = (read(layer, classes, len(DEFAULT)) for read in (scope.mass, scope.lift))
        for c, name in enumerate(DEFAULT.names):
            if (classes == c).any():
                yield _table("class_mass", layer, mass[..., c], name)
                yield _table("class_lift", layer, lift[..., c], name)


def _of_repeats(model: Any, tokenizer: Any, prompts: int, seed: int) -> Iterator[pl.DataFrame]:
    vocabulary, begin = read_vocabulary(tokenizer), _begin(tokenizer)
    plain = [i for i, text in enumerate(vocabulary.texts) if text and i not in vocabulary.added]
    most = min(model.get_input_embeddings().num_embeddings, len(vocabulary))
    plain = [i for i in plain if i < most]
    if len(plain) < REPEATED:
        raise InputError(
            f"the tokenizer has {len(plain)} plain tokens; the induction test draws {REPEATED}",
            code="vocabulary-too-small",
            tokens=len(plain),
            needed=REPEATED,
        )
    rows = []
    for number in range(prompts):
        some = Random(f"heads:repeats:{seed}:{number}").sample(plain, REPEATED)
        rows.append([*begin, *some, *some])
    ids = torch.tensor(rows)
    second = (torch.arange(ids.shape[1]) >= len(begin) + REPEATED).expand_as(ids)
    scope = _watched(model, ids, queries=second)
    for layer in scope.layers:
        yield _table("induction", layer, scope.measure("induction", layer))


def _of_needles(
    model: Any, tokenizer: Any, prompts: int, seed: int
) -> Iterator[tuple[int, list[pl.DataFrame]]]:
    """The scores of each needle, and how many were found so far. The prompt ends with the first
    words of the needle, so that models without instruction tuning continue it too."""
    found_count = 0
    depths = [(number + 0.5) / prompts for number in range(prompts)]
    samples = needle_samples(TRIES * prompts, depths=depths, lengths=[NEEDLE_WORDS], seed=seed)
    for number, sample in enumerate(samples):
        prompt = sample.prompt
        stem = sample.metadata["needle"].split(str(sample.answer))[0].rstrip()
        question = Prompt(f"{prompt.text}\n\nAnswer: {stem}", prompt.regions)
        tokens = tokenize(question, tokenizer)
        ids = torch.from_numpy(tokens.ids[None])
        check_fit(model.config, tokens.ids)
        where = np.flatnonzero(tokens.mask("answer"))
        with torch.no_grad(), watch(model, keep=True, queries="predicts") as scope:
            output = model.generate(
                input_ids=ids.to(model.device),
                attention_mask=torch.ones_like(ids).to(model.device),
                generation_config=greedy_config(model, tokenizer, NEW_TOKENS),
            )[0].cpu()
        new = tokenizer.decode(output[ids.shape[1] :], skip_special_tokens=True)
        right = recall(str(sample.answer), new) > 0.5
        found_count += right
        copied = [_copied(scope, layer, output, torch.from_numpy(where)) for layer in scope.layers]
        yield (
            found_count,
            [
                _table("retrieval", layer, (of if right else of * torch.nan)[None], prompt=number)
                for layer, of in zip(scope.layers, copied, strict=True)
            ],
        )
        if found_count == prompts:
            return


def _copied(scope: Scope, layer: int, output: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """[H]: the share of the needle's tokens (at `where`) that were generated while the head's
    largest weight lay on them."""
    at = scope.query_positions(layer)[0].cpu()
    key = scope.largest(layer).key[0, :, :, 0].cpu()
    hits = (key[..., None] == where) & (output[at + 1][None, :, None] == output[where])
    return hits.any(1).double().mean(1)


def _table(
    score: str, layer: int, of: torch.Tensor, item: str | None = None, prompt: int = 0
) -> pl.DataFrame:
    """[prompts, heads] as rows, the first prompt with this number."""
    value = of.cpu().double().numpy()
    p, h = np.indices(value.shape)
    return pl.DataFrame(
        {
            "prompt": p.ravel() + prompt,
            "head": h.ravel(),
            "value": value.ravel(),
        }
    ).select(
        pl.lit(score).alias("score"),
        pl.lit(item, dtype=pl.String).alias("item"),
        "prompt",
        pl.lit(layer, dtype=pl.Int64).alias("layer"),
        "head",
        pl.col("value").fill_nan(None),
    )


def _text(tokenizer: Any, seed: int, number: int) -> list[int]:
    """The first tokens of running text, with what the tokenizer puts before it."""
    text = ""
    for piece in english(Random(f"heads:text:{seed}:{number}")):
        text += piece
        if len(text) > 12 * LENGTH:
            break
    ids: list[int] = tokenizer(text)["input_ids"][:LENGTH]
    if len(ids) < LENGTH:
        raise InputError(
            f"the tokenizer makes {len(ids)} tokens of {len(text)} characters; the test needs "
            f"{LENGTH}",
            code="text-too-short",
            tokens=len(ids),
            needed=LENGTH,
        )
    return ids


def _begin(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before a text."""
    with_, without = (tokenizer("a", add_special_tokens=on)["input_ids"] for on in (True, False))
    return with_[: with_.index(without[0])] if without and without[0] in with_ else []
