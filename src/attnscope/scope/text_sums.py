"""`TextSums`: the sums of one text, which forward passes add to and results are read from."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnscope.errors import (
    ConservationError,
    ModelError,
    ScopeError,
    unknown,
    wrong_shape,
)
from attnscope.interception.forward_pass import ForwardPass
from attnscope.interception.generation import CompletionSpan
from attnscope.interception.geometry import Geometry
from attnscope.scope.conservation import verify
from attnscope.scope.queries import Queries
from attnscope.scope.query_selection import (
    QuerySelection,
    VisibilityCounts,
    join_visibility_counts,
)
from attnscope.scope.stored_rows import StoredRows
from attnscope.scope.sums import SumsBlock, join_blocks

_NO_QUERY = {
    "all": "every token is padding",
    "generated": "the model read no generated token; call model.generate(…) with at least two new "
    "tokens (the model does not read the last one), or use queries='predicts'",
}
_NOT_HERE = {
    "not-gathered": "tensor parallelism splits the heads of this model over processes, and the "
    "heads of this pass are not gathered yet; read them after the pass, or after generate",
    "gathered-on-rank0": 'gather="rank0": the first process has the results; read them there, or '
    'use gather="all"',
}


class TextSums:
    """The sums of one text: of a stack of layers, or of its cross-attention.

    A forward pass without a KV cache starts a new text. A pass that continues a cache adds to it.
    """

    def __init__(
        self,
        *,
        layers: list[int],
        backend: str,
        queries: Queries,
        groups: int,
        stack: str = "decoder",
        cross: bool = False,
    ):
        self.layers = layers
        """The layers being measured, in the model's own numbering."""
        self._backend = backend
        self._queries = queries
        self._groups = groups
        self._stack = stack
        self._cross = cross
        self._classes: Tensor | None = None
        self._left_out: tuple[str, ...] = ()
        """Stacks of the model with attention that are not measured (images, sound)."""
        self._parts: dict[str, Any] = {}
        """The scopes of all parts of the model, this one included."""
        self._flush: Callable[[], None] | None = None
        """Measures pending calls; None after the `with` block."""
        self._not_here: str | None = None
        """The code of the error for a read before the heads are gathered (tensor parallelism)."""
        self._running: set[int] | None = None
        """The layers that were captured in the running forward pass; None if none is running."""
        self._failed = False
        """Whether the last forward pass raised an error."""
        self._turn = 0
        """The number of completions started so far."""
        self._texts = 0
        """The number of texts that were run; results are those of the last one."""
        self._tokenizer: Any = None
        """The tokenizer that `attnscope.load` returned with the model; None for other models."""
        self._visibility_memo: tuple[list[QuerySelection], int, VisibilityCounts] | None = None
        self._clear()

    def _clear(self) -> None:
        """Delete all results."""
        self._blocks: list[SumsBlock] = []
        """The sums of layers that were reduced together."""
        self._extents: dict[int, tuple[int, int]] = {}
        """By layer: the number of tokens of the queries' text, and of keys, so far."""
        self._joined: dict[int, SumsBlock | None] = {}
        """Memo of the sums of layers that were read; None if no query counted."""
        self._kept_bytes: dict[int, int] = {}
        """By layer: bytes of the stored rows."""
        self._first_token = torch.empty(0, dtype=torch.int64)
        """int64 [B], on the CPU: position of the first real token; -1 if there is none yet."""
        self._continued = False
        """Whether the text may have several forward passes."""
        self._completion_start = 0
        """Position of the first generated token of the last completion."""
        self._in_generate = False
        """Whether the last pass was part of a `generate` call."""
        self._input_ids: list[Tensor | None] = []
        """The token ids of each pass; None for a pass without token ids."""
        self._padding: Tensor | None = None
        """[B, K], 0 at padding: the attention mask of the last pass; None if it had none."""

    @property
    def backend(self) -> str:
        """One of "reference", "streaming", "triton" and "eager-fallback"; the last one
        if any layer used it."""
        scopes = [self] if self.layers else [*self._parts.values()]
        backends = {scope._backend for scope in scopes}
        return "eager-fallback" if "eager-fallback" in backends else self._backend

    @backend.setter
    def backend(self, backend: str) -> None:
        self._backend = backend

    # What forward passes write.

    def _begin_pass(self) -> None:
        """A forward pass begins."""
        self._running, self._failed = set(), False

    def _end_pass(self, *, finished: bool) -> None:
        """A forward pass is over. A text whose pass failed cannot be continued."""
        self._running, self._failed = None, not finished
        if not finished:
            self._clear()

    def _add_input(self, forward_pass: ForwardPass) -> None:
        """Store the token ids and the padding of a pass."""
        self._input_ids.append(forward_pass.tokens)
        self._padding = forward_pass.padding

    def _capture(self, layer: int, geometry: Geometry, span: CompletionSpan) -> None:
        """Note a call of a layer; an error if it does not continue the calls before it."""
        assert self._running is not None
        if geometry.first_query > 0:
            self._check_continues(layer, geometry)
        self._extents[layer] = (
            geometry.first_query + geometry.queries,
            geometry.first_key + geometry.keys,
        )
        self._joined.pop(layer, None)
        if not self._running:
            self._follow(geometry, span)
        self._running.add(layer)

    def _follow(self, geometry: Geometry, span: CompletionSpan) -> None:
        """Note what all layers of a pass share, at its first call."""
        if len(self._first_token) == 0:
            self._first_token = geometry.first_token
        elif bool((self._first_token < 0).any()):
            self._first_token = torch.where(
                self._first_token < 0, geometry.first_token, self._first_token
            )
        self._continued |= geometry.first_query > 0 or span.call is not None
        self._completion_start, self._in_generate = span.start, span.call is not None
        self._texts += geometry.first_query == 0
        if self._turn != span.turn and self._queries.name == "predicts":
            for block in self._blocks:
                block.provisional = False
        self._turn = span.turn

    def _check_continues(self, layer: int, geometry: Geometry) -> None:
        """Check that a pass with a KV cache continues the pass before it."""
        if layer not in self._extents:
            raise ScopeError(
                "this forward pass continues a KV cache that was filled before the with block, or "
                "by a pass that failed; run the whole sequence inside the block",
                code="cache-from-before",
            )
        position = self._extents[layer][0]
        if geometry.first_query != position:
            raise ScopeError(
                f"this forward pass continues at token {geometry.first_query}, but {position} "
                "tokens were measured so far; run the whole sequence inside the with block",
                code="tokens-missing",
                position=geometry.first_query,
                measured=position,
            )
        last_key = geometry.first_key + geometry.keys
        if not geometry.cross and last_key > geometry.first_query + geometry.queries:
            raise ScopeError(
                "some keys of this model are not tokens of this text (compressed blocks, or keys "
                "of another text), so its decode steps cannot be added up by key; measure one "
                "forward pass over the whole text",
                code="keys-not-tokens",
            )

    def _add_block(self, block: SumsBlock) -> None:
        """Add the sums of a call; a later provisional one replaces an earlier one."""
        self._joined.clear()
        if block.provisional:
            self._replace_provisional(block)
        for other in () if block.provisional or block.compute else self._blocks:
            if other.layers == block.layers and not (other.provisional or other.compute):
                other.merge(block)
                return
        self._blocks.append(block)

    def _replace_provisional(self, block: SumsBlock) -> None:
        """Drop the provisional sums of the sequences and layers that this block counts."""
        layers, counted, kept = set(block.layers), block.count > 0, []
        for old in self._blocks:
            if not old.provisional or layers.isdisjoint(old.layers):
                kept.append(old)
                continue
            together = layers.issuperset(old.layers)
            for part in [old] if together else [old.of(layer) for layer in old.layers]:
                if layers.isdisjoint(part.layers):
                    kept.append(part)
                elif not bool(counted.all()):
                    part.exclude(counted)
                    kept.append(part)
        self._blocks = kept

    # What results read.

    @property
    def tokens(self) -> Tensor | None:
        """int64 [B, K] on the CPU: the token ids of the keys; None if the model got none, or has
        more keys than tokens."""
        if self._cross:
            other = self._parts.get("encoder")
            return None if other is None else other.tokens
        keys = max((keys for _, keys in self._extents.values()), default=0)
        if not self._input_ids or any(ids is None for ids in self._input_ids):
            return None
        token_ids = torch.cat([ids.cpu() for ids in self._input_ids if ids is not None], 1)
        return token_ids if token_ids.shape[1] == keys else None

    def _real_keys(self) -> Tensor:
        """bool [B, K] on the CPU: the keys that are not padding."""
        real: Tensor
        if self._cross and "encoder" in self._parts:
            real = self._parts["encoder"]._real_keys()
            return real
        keys = max(keys for _, keys in self._extents.values())
        real = torch.arange(keys) >= self._first_token[:, None]
        if self._cross:
            return real
        if self._padding is not None:
            known = min(self._padding.shape[1], keys)
            real[:, :known] &= self._padding[:, :known].cpu() != 0
        geometries = {each.geometry for block in self._blocks for each in block.selections}
        for geometry in geometries:  # of a mask with four dimensions
            if geometry.real_queries is not None:
                columns = slice(geometry.first_query, geometry.first_query + geometry.queries)
                real[:, columns] &= geometry.real_queries
        return real

    def _read(self, layer: int) -> SumsBlock:
        """The sums of a layer, checked; an error if it has none."""
        self._ensure_captured(layer)
        block = self._sums_of(layer)
        if block is None:
            hint = _NO_QUERY.get(self._queries.name, "the query mask selects no real token")
            raise ScopeError(
                f"no query counted: {hint}", code="no-query-counted", queries=str(self._queries)
            )
        return block

    def _sums_of(self, layer: int) -> SumsBlock | None:
        """The sums of a captured layer, checked; None if no query counted."""
        if self._not_here is not None and layer not in self._joined:
            raise ScopeError(_NOT_HERE[self._not_here], code=self._not_here)
        self._flush_pending()
        if layer not in self._joined:
            self._joined[layer] = self._own_sums(layer)
        return self._joined[layer]

    def _own_sums(self, layer: int) -> SumsBlock | None:
        """The sums of the heads that this process computes."""
        self._flush_pending()
        for block in self._blocks:
            if layer in block.layers:
                block.computed()
        self._verify()
        return join_blocks(self._blocks, layer, self._extents[layer][1])

    def _flush_pending(self) -> None:
        if self._flush is not None:
            self._flush()

    def _stored_rows(self, layer: int) -> list[StoredRows]:
        """The stored rows of all calls of a layer."""
        return [rows for block in self._blocks for rows in block.stored.get(layer, ())]

    def _ensure_captured(self, layer: int) -> None:
        """Raise an error if a layer has no results."""
        if not self.layers:
            raise ScopeError(
                "this model has several attention parts; read one of them: "
                + ", ".join(f"scope[{part!r}]" for part in self._parts),
                code="several-parts",
                parts=list(self._parts),
            )
        if isinstance(layer, bool) or layer not in self.layers:
            raise unknown("layer", layer, self.layers)
        if self._failed or (self._running is not None and layer not in self._running):
            raise ScopeError(
                "the last forward pass did not finish, so it has no results"
                if self._failed
                else f"the forward pass that is running has not reached layer {layer} yet",
                code="pass-unfinished",
            )
        if layer not in self._extents:
            raise ScopeError(
                "no forward pass was measured in the thread that opened the watch; call the model "
                "inside the with block. If another thread generates (as with a streamer), open "
                "the watch in that thread",
                code="no-forward-pass",
            )
        mask, keys = self._queries.mask, self._extents[layer][1]
        if mask is not None and mask.shape[1] > keys and not self._continued:
            raise wrong_shape("queries", f"[{mask.shape[0]}, {keys}] as the forward pass", mask)

    def _visibility(self, layer: int, name: str) -> Tensor:
        """One of the visibility counts; layers with the same masks share them."""
        block, keys = self._read(layer), self._extents[layer][1]
        now, memo = block.selections, self._visibility_memo
        same = memo is not None and memo[1] == keys and len(memo[0]) == len(now)
        if memo is None or not same or not all(map(operator.is_, memo[0], now)):
            memo = [*now], keys, join_visibility_counts(now, keys)
            self._visibility_memo = memo
        value: Tensor = getattr(memo[2], name)
        return value.to(block.computed().received.device)

    def _verify(self) -> None:
        """Check the conservation of new sums; delete all results if it fails."""
        what = f"backend {self.backend!r}: attention adds up to the number of queries only within"
        try:
            verify(self._blocks, what)
        except (ConservationError, ModelError):
            self._clear()
            raise

    def __getstate__(self) -> dict[str, Any]:
        """The results without the hook."""
        self._flush_pending()
        for block in self._blocks:
            block.computed()
        return vars(self) | {"_flush": None, "_tokenizer": None}
