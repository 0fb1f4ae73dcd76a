"""The hook behind `knockout` and `steer`: it adds a bias to some attention scores.

The bias applies to chosen layers, heads, queries and keys. It is stored per query and per key,
never as an n × n matrix. A key that is hidden from all queries and heads is treated as padding,
which every kernel supports.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from attnscope.errors import InputError, is_int, unknown, wrong_shape
from attnscope.interception import sites
from attnscope.interception.forward_pass import ForwardPass
from attnscope.interception.generation import CompletionSpan, GenerationTracker, tracking_generate
from attnscope.interception.geometry import Geometry
from attnscope.interception.hooks import Hook
from attnscope.interception.intercept import register
from attnscope.interception.sites import Site
from attnscope.interception.split_heads import SplitHeads, total_heads
from attnscope.interventions.key_choice import KeyChoice
from attnscope.kernels import AttentionCall, VisibleRanges
from attnscope.kernels.call import ScoreBias
from attnscope.scope.queries import Queries, counted_queries, parse


@contextmanager
def bias_scores(
    model: nn.Module,
    *,
    bias: float,
    keys: Any,
    text: str | None,
    tokenizer: Any,
    queries: Any,
    layers: Any,
    heads: Any,
    part: str | None,
) -> Iterator[None]:
    """Add `bias` to these scores, inside a `with` block."""
    model_sites = sites.find(model, split=True)
    parsed = parse(queries, 0)
    if parsed.name == "sample":
        raise InputError(
            f"queries={queries!r} works for watch only; use 'all', 'last', 'generated', "
            "'predicts' or a bool tensor [batch, keys]",
            code="unsupported-queries",
            queries=queries,
        )
    chosen = _sites_of_part(model_sites, part, layers)
    stack = next(iter(chosen)).stack
    change = ScoreBiasHook(
        queries=parsed,
        keys=KeyChoice.of(model_sites.model, keys, text, tokenizer),
        sites=chosen,
        heads=_head_mask(heads),
        bias=bias,
        bases=model_sites.base_models,
        stack=stack,
        split=model_sites.split,
    )
    if model_sites.split is not None:
        model_sites.split.agree("knockout or steer", change.options())
    with (
        tracking_generate([change.generation]),
        register(model_sites, change, rewritten=chosen),
    ):
        yield


def _sites_of_part(model_sites: sites.Sites, part: str | None, layers: Any) -> frozenset[Site]:
    """The chosen sites of one part of the model; by default, of its only self-attention."""
    parts = sorted({site.part for site in model_sites.all_sites})
    if part is None and len(model_sites.stacks) > 1:
        raise InputError(
            "this model has an encoder and a decoder, each with its own text; choose one "
            f"attention with part=: {', '.join(parts)} (keys of 'cross' are encoder tokens)",
            code="encoder-decoder",
            parts=parts,
        )
    part = model_sites.stacks[0] if part is None else part
    if part not in parts:
        raise unknown("part", part, parts)
    of_part = [site for site in model_sites.all_sites if site.part == part]
    layers = sites.validate_layers(replace(model_sites, all_sites=of_part), layers)
    return frozenset(site for site in of_part if site.layer in layers)


def _head_mask(heads: Any) -> Tensor | list[int] | None:
    if heads is None:
        return None
    if isinstance(heads, Tensor) and heads.dtype == torch.bool and heads.ndim == 2:
        return heads.detach().cpu()
    chosen_heads = [heads] if isinstance(heads, int) else list(heads)
    if not chosen_heads:
        raise InputError(
            "heads=[] selects no head; leave heads out to select all of them", code="no-heads"
        )
    for head in chosen_heads:
        if not is_int(head):
            raise InputError(
                f"unknown head {head!r}; heads are whole numbers, counted from 0",
                code="unknown-head",
                value=head,
            )
    return chosen_heads


class ScoreBiasHook(Hook):
    """The hook of one intervention: it rewrites the attention calls of the chosen layers."""

    in_graphs = True
    keeps_values = False

    def __init__(
        self,
        *,
        queries: Queries,
        keys: KeyChoice,
        sites: frozenset[Site],
        heads: Tensor | list[int] | None,
        bias: float,
        bases: dict[str, nn.Module],
        stack: str,
        split: SplitHeads | None = None,
    ):
        self.queries = queries
        self.choice = keys
        self.keys = torch.zeros(0, 0, dtype=torch.bool)
        """bool [B, keys] on the CPU: the keys in the current text."""
        self.sites = sites
        self.heads = heads
        self.bias = bias
        self.cache: dict[Any, tuple[VisibleRanges, tuple[ScoreBias, ...], Geometry]] = {}
        """Results that layers of one pass share, by their input."""
        self.bases = bases
        self.passes: dict[str, ForwardPass] = {}
        """By stack: the inputs of its last forward pass."""
        self.stack = stack
        """The stack that the queries belong to."""
        self.split = split
        """The processes that share the heads; None if this one has all."""
        self.generation = GenerationTracker(bases[stack], self.cache.clear)

    def options(self) -> dict[str, Any]:
        """What all processes that share the heads must have in common."""
        return {
            "keys": self.choice.mask,
            "positions": self.choice.positions,
            "text": self.choice.words,
            "queries": str(self.queries),
            "query mask": self.queries.mask,
            "layers": sorted(self.sites),
            "heads": self.heads,
            "factor": self.bias,
        }

    def rewrite_call(self, site: Site, call: AttentionCall, frame: Geometry) -> AttentionCall:
        """The call with the bias added."""
        if site not in self.sites:
            return call
        H = call.q.shape[1]
        key = call.visible, call.score_biases, id(frame), H
        if key not in self.cache:  # the frame is kept with it, so that its id stays its own
            visible, score_biases = self._biased(call, frame)
            self.cache[key] = visible, score_biases, frame
        visible, score_biases, _ = self.cache[key]
        if visible is call.visible and score_biases == call.score_biases:
            return call
        return replace(call, visible=visible, score_biases=score_biases)

    def _biased(
        self, call: AttentionCall, frame: Geometry
    ) -> tuple[VisibleRanges, tuple[ScoreBias, ...]]:
        """The visible ranges and the score biases of a call after the intervention."""
        keys = self._keys_in_pass(frame)
        heads = self._heads_in_call(call, frame)
        rows = counted_queries(self.queries, frame, self._completion_of(frame))
        if not bool(keys.any()) or (rows is not None and not bool(rows.any())):
            return call.visible, call.score_biases
        device = call.q.device
        if self.bias == -math.inf:
            _check_visible_keys(call, frame, rows, keys[:, None] & heads[..., None])
            if self.queries.name == "all" and self.heads is None:
                hidden = keys.to(device, non_blocking=True)
                return _mask_keys(call.visible, hidden), call.score_biases
        bias = torch.zeros(frame.batch, heads.shape[1], frame.keys)
        bias.masked_fill_(keys[:, None] & heads[..., None], self.bias)
        if rows is not None:
            rows = rows.to(device, non_blocking=True)
        added = ScoreBias(bias=bias.to(device, non_blocking=True), queries=rows)
        return call.visible, (*call.score_biases, added)

    def _completion_of(self, frame: Geometry) -> CompletionSpan:
        """Which tokens of a frame are prompt, and which of them is its last."""
        completion = self.generation.span(frame.first_query, frame.queries)
        prompt, by_role = self.generation.prompt, self.queries.name in ("last", "predicts")
        if prompt is not None:
            last = prompt.last if by_role else None
            return CompletionSpan(prompt.end, completion.turn, last=last)
        if self.generation.prefill_passes > 1 and by_role:
            raise InputError(
                f"queries={self.queries.name!r}: this pass adds {frame.queries} tokens after a "
                "pass of several tokens, so the last token of the prompt is not known; call "
                "generate with prefill_chunk_size, run the prompt in one pass, or use a bool "
                "tensor [batch, keys]",
                code="prompt-in-pieces",
                queries=self.queries.name,
            )
        return CompletionSpan(completion.start, completion.turn)

    def _keys_in_pass(self, frame: Geometry) -> Tensor:
        """bool [B, K]: the keys meant, among those of a frame; tokens beyond the given are not."""
        fed = self._tokens_fed(frame)
        if frame.first_query == 0:
            self.keys = self._keys_of_text(frame, fed)
        B, n = self.keys.shape
        wrong = n != fed if frame.cross else frame.first_query == 0 and n < fed
        if frame.batch != B or wrong:
            raise wrong_shape("keys", f"[{frame.batch}, {fed}] as this forward pass", self.keys)
        keys = self.keys[:, frame.first_key : frame.first_key + frame.keys]
        return pad(keys, (0, frame.keys - keys.shape[1]))

    def _tokens_fed(self, frame: Geometry) -> int:
        """The number of tokens that the keys of a new text must cover."""
        if frame.cross:
            return frame.keys
        prompt = self.generation.prompt
        return frame.queries if prompt is None else min(frame.queries, prompt.end)

    def _keys_of_text(self, frame: Geometry, fed: int) -> Tensor:
        """The keys of a text whose first tokens this pass feeds."""
        other = next((stack for stack in self.bases if stack != self.stack), None)
        text = self.passes.get(other if frame.cross and other else self.stack, ForwardPass())
        prompt = self.generation.prompt
        if self.choice.mask is None and not frame.cross and prompt is not None and fed < prompt.end:
            raise InputError(
                f"the first pass of generate feeds {fed} of {prompt.end} prompt tokens, so words "
                "and positions cannot be found in it; give keys as a bool tensor [batch, keys], "
                "or generate without prefill_chunk_size",
                code="prompt-in-pieces",
            )
        ids = None if frame.cross and other is None else text.tokens
        return self.choice.in_text(frame.batch, fed, ids, text.padding)

    def _heads_in_call(self, call: AttentionCall, frame: Geometry) -> Tensor:
        """bool [B or 1, H or 1]: the heads meant, of those that this process computes."""
        if self.heads is None:
            return torch.ones(1, 1, dtype=torch.bool)
        H = here = call.q.shape[1]
        first = 0
        if self.split is not None:
            H = total_heads(self.bases[self.stack], here)
            first = self.split.first_head(here, H, call.layer)
        return self._chosen_heads(call, frame, H)[:, first : first + here]

    def _chosen_heads(self, call: AttentionCall, frame: Geometry, H: int) -> Tensor:
        """bool [B or 1, H]: the heads meant, of all."""
        if isinstance(self.heads, Tensor):
            if self.heads.shape != (frame.batch, H):
                expected = f"[{frame.batch}, {H}] (batch, heads) in layer {call.layer}"
                raise wrong_shape("heads", expected, self.heads)
            return self.heads
        assert self.heads is not None
        if max(self.heads) >= H:
            raise InputError(
                f"unknown head {max(self.heads)}; layer {call.layer} has heads 0–{H - 1}",
                code="unknown-head",
                value=max(self.heads),
                layer=call.layer,
            )
        return torch.isin(torch.arange(H), torch.tensor(self.heads))[None]

    def begin(self, stack: str, forward_pass: ForwardPass) -> None:
        """A forward pass begins."""
        self.passes[stack] = forward_pass
        if stack == self.stack:
            self.generation.begin_pass()
        self.cache.clear()

    def wants(self, site: Site) -> bool:
        """False: this hook rewrites calls and captures none."""
        return False

    def end(self, stack: str, *, finished: bool) -> None:
        """A forward pass is over."""
        self.cache.clear()


def _mask_keys(visible: VisibleRanges, keys: Tensor) -> VisibleRanges:
    """The same intervals, with these keys, bool [B, K], hidden from all queries."""
    real = ~keys if visible.real is None else visible.real & ~keys
    return VisibleRanges(form="interval", bounds=lambda: (visible.start, visible.stop), real=real)


def _check_visible_keys(
    call: AttentionCall, frame: Geometry, rows: Tensor | None, hidden: Tensor
) -> None:
    """Raise if a query keeps no visible key, with earlier knockouts included.

    `rows` bool [B, Q] or None for all, `hidden` bool [B, 1 or H, K], on the CPU. Queries to which
    the same knockouts apply are checked together.
    """
    everything = torch.ones(frame.batch, frame.queries, dtype=torch.bool)
    if rows is None:
        rows = everything if frame.real_queries is None else frame.real_queries
    knockouts = [(rows, hidden)]
    for earlier in call.score_biases:
        if bool((masked := earlier.bias == -math.inf).any()):
            queries = everything if earlier.queries is None else earlier.queries.cpu()
            knockouts.append((queries, masked.cpu()))
    applies = torch.stack([queries for queries, _ in knockouts])  # [knockouts, B, Q]
    for which in {tuple(column) for column in applies[:, rows].T.tolist()}:
        masks = (mask for (_, mask), applied in zip(knockouts, which, strict=True) if applied)
        n_visible = _n_visible(frame, call.visible, reduce(torch.logical_or, masks))
        selected = (applies == torch.tensor(which)[:, None, None]).all(0)
        for b, _, i in ((n_visible == 0) & selected[:, None]).nonzero()[:1].tolist():
            raise InputError(
                f"the knockout would hide every key from the token at position "
                f"{frame.first_query + i} of sequence {b} in layer {call.layer}; leave it a "
                "key (for example itself), or remove it from queries",
                code="no-visible-key",
                position=frame.first_query + i,
                sequence=b,
                layer=call.layer,
            )


def _n_visible(frame: Geometry, visible: VisibleRanges, hidden: Tensor) -> Tensor:
    """int64 [B, 1 or H, Q]: how many keys each query still sees."""
    if frame.gap_mask is not None:
        return (frame.visibility().cpu() & ~hidden[:, :, None]).sum(-1)
    shown = ~hidden if visible.real is None else ~hidden & visible.real.cpu()[:, None]
    before = pad(shown.long().cumsum(-1), (1, 0))
    start, stop = (bound[:, None].expand(-1, hidden.shape[1], -1) for bound in frame.visible_ranges)
    before = before.expand(frame.batch, -1, -1)
    return before.gather(2, stop) - before.gather(2, start)
