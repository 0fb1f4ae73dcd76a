"""The effect of an attention knockout (ablation) of single heads on the next token.

One forward pass covers many heads: the batch is repeated, with another head knocked out in each
copy.
"""

import inspect
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnscope.errors import InputError, wrong_shape
from attnscope.interception.wrappers import unwrapped
from attnscope.interventions.key_choice import KeyChoice
from attnscope.interventions.knockout import knockout
from attnscope.scope.watch import watch


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Effect:
    """The effect of a knockout of single heads on the next token."""

    layers: list[int]
    """The layers of the second axis."""
    logprob: Tensor | None
    """float32 [batch, layers, heads]: the change of the log-probability of the answer, in nats;
    below 0 if the answer relies on this attention. None without an answer."""
    kl: Tensor
    """float32 [batch, layers, heads]: how far the next token's distribution moves, in nats: the
    Kullback–Leibler divergence KL(p ‖ p'), where p is the distribution of the unchanged model and
    p' the one under the knockout."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class NextTokenShift:
    """The next-token distribution without and with a knockout."""

    before: Tensor
    """float64 [batch, vocabulary]: log-probabilities of the next token."""
    after: Tensor
    """The same with the knockout."""
    kl: Tensor
    """float64 [batch]: KL(before ‖ after), in nats."""


@torch.no_grad()
def next_token(model: nn.Module, inputs: Mapping[str, Any], **cut: Any) -> NextTokenShift:
    """The next-token distribution without and with a knockout; `cut` holds its arguments."""
    where = _positions(inputs["input_ids"], inputs.get("attention_mask"), None)
    before = _LogProbs.of(model, inputs, where).next
    with knockout(model, **cut):
        after = _LogProbs.of(model, inputs, where).next
    return NextTokenShift(before=before, after=after, kl=_divergence(before, after))


def _divergence(plain: Tensor, changed: Tensor) -> Tensor:
    """Kullback–Leibler over the last axis of log-probabilities, in nats."""
    return (plain.exp() * (plain - changed)).sum(-1).clamp(min=0)


@torch.no_grad()
def effect(
    model: nn.Module,
    inputs: Mapping[str, Any],
    *,
    keys: Tensor | Sequence[int] | None = None,
    text: str | None = None,
    queries: str | Tensor = "all",
    answer: Tensor | None = None,
    layers: int | Iterable[int] | None = None,
    together: bool = False,
    at_once: int = 32,
    tokenizer: Any = None,
    progress: Callable[[int, int], None] | None = None,
) -> Effect:
    """Measure the effect on the next token of an attention knockout in every head, one by one.

    Args:
        model: A transformers model.
        inputs: The arguments of the model: the prompt, followed by the answer if there is one.
        keys: The keys to cut, as in `knockout`.
        text: Words of the prompt in place of `keys`, as in `knockout`.
        queries: The queries that lose the keys, as in `knockout`.
        answer: Bool [batch, keys], the tokens of the answer; the next token is the first of them.
            Default: no answer, and the next token is the one after the text.
        layers: The layers to try, in the model's own numbering; default: all.
        together: Whether to knock out all heads of a layer at once, for one number per layer.
        at_once: Largest number of sequences of a forward pass.
        tokenizer: Finds `text`; default: the one that `attnscope.load` returned with the model.
        progress: A function that gets the number of finished layers and of all layers; default:
            a line on standard error every 10 seconds.

    Returns:
        An `Effect`: `kl` and `logprob`, [batch, layers, heads].

    Raises:
        InputError: An argument has a wrong shape or value.
        ModelError: The attention of this model cannot be changed.

    Examples:
        >>> import attnscope
        >>> model, tokenizer = attnscope.load("zoo:spatial-phys")
        >>> inputs = tokenizer("The ball is left of the box.", return_tensors="pt")
        >>> attnscope.effect(model, inputs, text="ball", layers=[0, 1]).kl.shape
        torch.Size([1, 2, 12])
    """
    ids = inputs["input_ids"]
    B = ids.shape[0]
    choice = KeyChoice.of(unwrapped(model), keys, text, tokenizer)
    keys = choice.in_text(B, ids.shape[1], ids, inputs.get("attention_mask"))
    report = progress or _lines()
    where = _positions(ids, inputs.get("attention_mask"), answer)
    with watch(model, layers=layers, queries="last") as scope:
        plain = _LogProbs.of(model, inputs, where)
    layers_and_heads = [(layer, scope.entropy(layer).shape[1]) for layer in scope.layers]
    if len({heads for _, heads in layers_and_heads}) > 1 and not together:
        raise InputError(
            "the chosen layers have different numbers of heads; choose layers with the same "
            "number, or use together=True",
            code="unequal-head-counts",
            heads=dict(layers_and_heads),
        )
    logprobs, divergences = [], []
    for done, (layer, H) in enumerate(layers_and_heads):
        report(done, len(layers_and_heads))
        cuts = torch.ones(1, H, dtype=torch.bool) if together else torch.eye(H, dtype=torch.bool)
        step = max(1, at_once // B)
        for at in range(0, len(cuts), step):
            some = cuts[at : at + step]
            n = len(some)
            batch = {name: _tile_batch(value, n) for name, value in inputs.items()}
            cut = knockout(
                model,
                keys=_tile_batch(keys, n),
                queries=_tile_batch(queries, n),
                layers=[layer],
                heads=some.repeat_interleave(B, 0),
            )
            with cut:
                changed = _LogProbs.of(model, batch, where.tile_batch(n))
            logprobs.append(changed.answer.view(n, B) - plain.answer)
            divergences.append(_divergence(plain.next, changed.next.view(n, B, -1)))
    shape = len(layers_and_heads), -1, B
    logprob, kl = (
        torch.cat(each).view(shape).permute(2, 0, 1).float() for each in (logprobs, divergences)
    )
    return Effect(
        layers=[layer for layer, _ in layers_and_heads],
        logprob=None if answer is None else logprob,
        kl=kl,
    )


def _lines() -> Callable[[int, int], None]:
    """Print progress on standard error: a line every 10 seconds, none if it takes less."""
    printed = time.monotonic()

    def report(done: int, layers: int) -> None:
        nonlocal printed
        if time.monotonic() - printed >= 10:
            printed = time.monotonic()
            print(f"effect: {done} of {layers} layers", file=sys.stderr, flush=True)

    return report


def _tile_batch(value: Any, n: int) -> Any:
    """[n · B, …], the batch over and over."""
    return value.repeat(n, *[1] * (value.ndim - 1)) if isinstance(value, Tensor) else value


@dataclass(frozen=True, slots=True, eq=False)
class _Positions:
    """Positions of the answer tokens, and the position that predicts the next token."""

    ids: Tensor
    answer: Tensor
    """bool [B, n]"""
    next: Tensor
    """int64 [B]: the position that predicts the next token."""

    def tile_batch(self, n: int) -> "_Positions":
        return _Positions(*(_tile_batch(each, n) for each in (self.ids, self.answer, self.next)))


def _positions(ids: Tensor, real: Tensor | None, answer: Tensor | None) -> _Positions:
    real_tokens = torch.ones_like(ids, dtype=torch.bool) if real is None else real.bool()
    order = torch.arange(ids.shape[1], device=ids.device)
    last = torch.where(real_tokens, order, -1).amax(1)
    if answer is None:
        return _Positions(ids, torch.zeros_like(real_tokens), last)
    if answer.shape != ids.shape or answer.dtype != torch.bool:
        expected = f"a bool tensor {list(ids.shape)}, the shape of input_ids"
        raise wrong_shape("answer", expected, answer)
    answer = answer.to(ids.device) & real_tokens
    first = torch.where(answer, order, ids.shape[1]).amin(1)
    before = torch.where(real_tokens, order, ids.shape[1]).amin(1)
    if not bool(answer.any(1).all()) or bool((first <= before).any()):
        sequence = int((~answer.any(1) | (first <= before)).nonzero()[0])
        raise InputError(
            f"sequence {sequence} has no answer with a token before it; mark at least one answer "
            "token in every sequence, after its first token",
            code="no-answer",
            sequence=sequence,
        )
    return _Positions(ids, answer, first - 1)


@dataclass(frozen=True, slots=True, eq=False)
class _LogProbs:
    answer: Tensor
    """float64 [B]: log-probability of the answer."""
    next: Tensor
    """float64 [B, vocabulary]: log-probabilities of the next token."""

    @classmethod
    def of(cls, model: nn.Module, inputs: Mapping[str, Any], where: _Positions) -> "_LogProbs":
        predicts = where.answer.roll(-1, 1)
        needed = predicts.any(0)
        needed[where.next] = True
        kept = needed.nonzero()[:, 0]
        options: dict[str, Any] = {}
        if "logits_to_keep" in inspect.signature(unwrapped(model).forward).parameters:
            options["logits_to_keep"] = kept  # the others would be most of the memory
        logits = model(**inputs, **options).logits
        if not options:
            logits = logits[:, kept]
        log_probs = logits.double().log_softmax(-1)
        token = where.ids.roll(-1, 1)[:, kept]
        each = log_probs.gather(2, token[..., None])[..., 0] * predicts[:, kept]
        at = torch.searchsorted(kept, where.next)
        return cls(
            each.sum(1), log_probs[torch.arange(len(log_probs), device=log_probs.device), at]
        )
