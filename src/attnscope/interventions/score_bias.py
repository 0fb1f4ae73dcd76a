"""The hook behind `knockout` and `steer`: it adds a bias to some attention scores.

The bias applies to chosen layers, heads, queries and keys. It is stored per query and per key,
never as an n × n matrix. A key that is hidden from all queries and heads is treated as padding,
which every kernel supports.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from attnscope.capture import hooks, sites
from attnscope.capture.checkpointing import backward_inside
from attnscope.capture.generation import CompletionSpan, GenerationTracker, tracking_generate
from attnscope.capture.geometry import Geometry
from attnscope.capture.hook_registry import CapturedCall
from attnscope.capture.query_selection import Queries, counted_queries, parse
from attnscope.capture.sites import Site
from attnscope.errors import InputError
from attnscope.kernels import AttentionCall, VisibleRanges
from attnscope.kernels.call import ScoreBias


@contextmanager
def bias_scores(
    model: nn.Module, *, bias: float, queries: Any, keys: Any, layers: Any, heads: Any
) -> Iterator[None]:
    """Add `bias` to these scores, inside a `with` block."""
    model_sites = sites.find(model)
    parsed = parse(queries, 0)
    if parsed.name == "sample":
        raise InputError(
            f"queries={queries!r} works for watch only; use 'all', 'last', 'generated', "
            "'predicts' or a bool tensor [batch, keys]",
            code="unsupported-queries",
            queries=queries,
        )
    if len(model_sites.stacks) > 1:
        raise InputError(
            "this model has an encoder and a decoder, each with its own keys; apply the "
            "intervention to model.get_encoder() or model.get_decoder()",
            code="more-than-one-stack",
            stacks=len(model_sites.stacks),
        )
    change = ScoreBiasHook(
        queries=parsed,
        keys=_key_mask(keys),
        layers=sites.validate_layers(model_sites, layers),
        heads=_head_mask(heads),
        bias=bias,
        base=model_sites.base_model,
    )
    with (
        tracking_generate([change.generation]),
        backward_inside([model_sites.base_model], model_sites.modules, changes=True),
        hooks.register(model_sites, observer=change, change=change, layers=change.layers),
    ):
        yield


def _key_mask(keys: Any) -> Tensor:
    mask = torch.as_tensor(keys)
    if mask.dtype != torch.bool or mask.ndim != 2:
        raise InputError(
            "keys must be a bool tensor [batch, keys]; got "
            f"{str(mask.dtype).removeprefix('torch.')} {list(mask.shape)}",
            code="wrong-shape",
            argument="keys",
            shape=list(mask.shape),
        )
    if not bool(mask.any()):
        raise InputError(
            "keys is False everywhere; set it to True for at least one key", code="no-keys"
        )
    return mask.detach().cpu()


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
        if isinstance(head, bool) or not isinstance(head, int) or head < 0:
            raise InputError(
                f"unknown head {head!r}; heads are whole numbers, counted from 0",
                code="unknown-head",
                value=head,
            )
    return chosen_heads


class ScoreBiasHook:
    """The hook of one intervention: it rewrites the attention calls of the chosen layers."""

    needs_geometry = True

    def __init__(
        self,
        *,
        queries: Queries,
        keys: Tensor,
        layers: frozenset[int],
        heads: Tensor | list[int] | None,
        bias: float,
        base: nn.Module,
    ):
        self.queries = queries
        self.keys = keys
        """bool [B, keys] on the CPU."""
        self.layers = layers
        self.heads = heads
        self.bias = bias
        self.generation = GenerationTracker(base, self._clear)
        self.cache: dict[Any, tuple[VisibleRanges, tuple[ScoreBias, ...], Geometry]] = {}
        """Results that layers of one pass share, by their input."""

    def __call__(self, site: Site, call: AttentionCall, frame: Geometry) -> AttentionCall:
        """The call with the bias added."""
        if site.kind != "self" or site.layer not in self.layers:
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
                return _mask_keys(
                    call.visible, keys.to(device, non_blocking=True)
                ), call.score_biases
        bias = torch.zeros(frame.batch, heads.shape[1], frame.keys)
        bias.masked_fill_(keys[:, None] & heads[..., None], self.bias)
        if rows is not None:
            rows = rows.to(device, non_blocking=True)
        added = ScoreBias(bias=bias.to(device, non_blocking=True), queries=rows)
        return call.visible, (*call.score_biases, added)

    def _completion_of(self, frame: Geometry) -> CompletionSpan:
        """Which tokens of a frame are prompt, and which of them is its last."""
        completion = self.generation.span(frame.first_query, frame.queries)
        prompt = self.generation.prompt
        if prompt is not None:
            by_role = self.queries.name in ("last", "predicts")
            return CompletionSpan(
                prompt.end, completion.turn, last=prompt.last if by_role else None
            )
        if self.generation.prefill_passes > 1 and self.queries.name in ("last", "predicts"):
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
        B, n = self.keys.shape
        prompt, fed = self.generation.prompt, frame.queries
        fed = fed if prompt is None else min(fed, prompt.end)
        if frame.batch != B or (frame.first_query == 0 and n < fed):
            raise InputError(
                f"keys has shape {[B, n]}; this forward pass has batch {frame.batch} and "
                f"{fed} tokens, so it must be [{frame.batch}, {fed}]",
                code="wrong-shape",
                argument="keys",
                shape=[B, n],
                expected=[frame.batch, fed],
            )
        keys = self.keys[:, frame.first_key : frame.first_key + frame.keys]
        return pad(keys, (0, frame.keys - keys.shape[1]))

    def _heads_in_call(self, call: AttentionCall, frame: Geometry) -> Tensor:
        """bool [B or 1, H or 1]: the heads meant."""
        H = call.q.shape[1]
        if self.heads is None:
            return torch.ones(1, 1, dtype=torch.bool)
        if isinstance(self.heads, Tensor):
            if self.heads.shape != (frame.batch, H):
                raise InputError(
                    f"heads has shape {list(self.heads.shape)}; layer {call.layer} has {H} heads "
                    f"in a batch of {frame.batch}, so it must be [{frame.batch}, {H}]",
                    code="wrong-shape",
                    argument="heads",
                    shape=list(self.heads.shape),
                    expected=[frame.batch, H],
                )
            return self.heads
        unknown = [head for head in self.heads if head >= H]
        if unknown:
            raise InputError(
                f"unknown head {unknown[0]}; layer {call.layer} has heads 0–{H - 1}",
                code="unknown-head",
                value=unknown[0],
                layer=call.layer,
            )
        return torch.isin(torch.arange(H), torch.tensor(self.heads))[None]

    def begin(self, stack: str, cache: Any) -> None:
        """A forward pass begins."""
        self.generation.begin_pass()
        self._clear()

    def wants(self, site: Site) -> bool:
        """False: this hook rewrites calls and captures none."""
        return False

    def on_call(self, captured: CapturedCall) -> None:
        """Never called."""

    def end(self, stack: str, *, finished: bool) -> None:
        """A forward pass is over."""
        self._clear()

    def _clear(self) -> None:
        self.cache.clear()


def _mask_keys(visible: VisibleRanges, keys: Tensor) -> VisibleRanges:
    """The same intervals, with these keys, bool [B, K], hidden from all queries."""
    real = ~keys if visible.real is None else visible.real & ~keys
    return VisibleRanges(form="interval", bounds=lambda: (visible.start, visible.stop), real=real)


def _check_visible_keys(
    call: AttentionCall, frame: Geometry, rows: Tensor | None, hidden: Tensor
) -> None:
    """Raise if a query keeps no visible key, with earlier knockouts included.

    `rows` bool [B, Q] or None for all, `hidden` bool [B, 1 or H, K], on the CPU. Of the knockouts
    before, every combination is tried: the one that holds for a query and head is among them.
    """
    if rows is None:
        rows = torch.ones(frame.batch, frame.queries, dtype=torch.bool)
        if frame.real_queries is not None:
            rows = frame.real_queries
    earlier = [
        added_bias for added_bias in call.score_biases if bool((added_bias.bias == -math.inf).any())
    ]
    for n in range(len(earlier) + 1):
        for some in combinations(earlier, n):
            queries, masked = rows, hidden
            for added_bias in some:
                masked = masked | (added_bias.bias == -math.inf).cpu()
                if added_bias.queries is not None:
                    queries = queries & added_bias.queries.cpu()
            n_visible = _n_visible(frame, call.visible, masked)
            if bool(((n_visible == 0) & queries[:, None]).any()):
                b, _, i = ((n_visible == 0) & queries[:, None]).nonzero()[0].tolist()
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
