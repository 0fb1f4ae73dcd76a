"""`Scope`: the results of `watch`, read by layer."""

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnscope.capture.conservation import check_stacked, check_totals
from attnscope.capture.geometry import QuerySelection, VisibilityCounts
from attnscope.capture.per_query import PerQueryMixin
from attnscope.capture.query_selection import Queries
from attnscope.capture.sums import LayerAccumulator, StackedSums, join_visibility_counts
from attnscope.errors import (
    ConservationError,
    InputError,
    ModelError,
    ScopeError,
    describe,
    unknown,
)
from attnscope.kernels import AttentionSums
from attnscope.measures.flow import flow
from attnscope.measures.layer import Layer, Sums, mean_over_queries, or_nan
from attnscope.measures.mass import lift, mass, shares_of
from attnscope.measures.received import standard_error
from attnscope.measures.registry import BY_HEAD, MEASURES
from attnscope.tokens import DEFAULT, ClassSet

if TYPE_CHECKING:
    import polars as pl

    from attnscope.capture.html_page import HtmlPage

_NO_QUERY = {
    "all": "every token is padding",
    "generated": "the model read no generated token; call model.generate(…) with at least two new "
    "tokens (the model does not read the last one), or use queries='predicts'",
}


class Scope(PerQueryMixin):
    """The results of `attnscope.watch`. Do not create one yourself.

    Shapes: B sequences, H query heads, K keys (positions), Q counted queries. Results are float32
    on the device of the layer. Padding counts neither as query nor as key: its columns are 0 (nan
    in `average`).

    A forward pass without a KV cache deletes the results of the pass before. A pass that continues
    a cache (every decode step of `generate`) adds to them.

    Args:
        layers: The measured layers, in the model's own numbering.
        backend: The kernel that computes the sums.
        queries: Which queries count.
        groups: The number of classes of queries, for `flow`; 0 without classes.
        stack: The stack of layers that is measured: "decoder" or "encoder".
        cross: Whether this is cross-attention.

    Raises:
        InputError: By its methods: a layer was not measured, or an argument has a wrong value.
        ScopeError: By its methods: no forward pass was measured, or it did not finish, or the
            result needs an option that `watch` did not get, such as `keep=True`.
        ConservationError: By its methods: the attention weights of a layer do not add up.

    Example:
        >>> import attnscope
        >>> model, tokenizer = attnscope.load("zoo:spatial-phys")
        >>> inputs = tokenizer("The ball is left of the box.", return_tensors="pt")
        >>> with attnscope.watch(model, layers=0, keep=True) as scope:
        ...     _ = model(**inputs)
        >>> scope.layers, scope.count(0).tolist()
        ([0], [8.0])
        >>> scope.entropy(0).shape  # [batch, heads]
        torch.Size([1, 12])
        >>> scope.row(0, query=7).shape  # [heads, keys]
        torch.Size([12, 8])
        >>> scope.to_frame(tokenizer, measures=["received"]).height  # 12 heads × 8 tokens
        96
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
        self._stack = stack
        self._cross = cross
        self._left_out: tuple[str, ...] = ()
        """Stacks of the model with attention that are not measured (images, sound)."""
        self._parts: dict[str, Scope] = {}
        self._queries = queries
        self._groups = groups
        self._classes: Tensor | None = None
        self._by_layer: dict[int, LayerAccumulator] = {}
        self._stacked: list[StackedSums] = []
        """Sums of layers that were reduced together; split when a layer is first read."""
        self._pass_started = False
        """Whether a forward pass started."""
        self._pass_done = False
        self._measured_early: set[int] = set()
        """Layers of the current pass that are measured already."""
        self._verified = True
        """Whether the conservation of all measured sums was checked."""
        self._dtype = torch.float32
        """The dtype of the queries."""
        self._flush: Callable[[], None] | None = None
        """Measures pending calls and checks them; None after the `with` block."""
        self._input_ids: list[Tensor | None] = []
        """The token ids of each pass; None for a pass without token ids."""
        self._padding: Tensor | None = None
        """[B, K], 0 at padding: the attention mask of the last pass; None if it had none."""
        self._visibility_cache: tuple[list[QuerySelection], int, VisibilityCounts] | None = None

    @property
    def _layers(self) -> dict[int, LayerAccumulator]:
        """The sums of every measured layer."""
        for stacked in self._stacked:
            self._by_layer |= stacked.split_layers()
        self._stacked.clear()
        return self._by_layer

    def _clear(self) -> None:
        """Delete all results."""
        self._by_layer, self._stacked = {}, []

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

    def __repr__(self) -> str:
        if not self.layers:
            parts = (f"{name!r}: {part!r}" for name, part in self._parts.items())
            return f"<Scope of {len(self._parts)} parts: {', '.join(parts)}>"
        summary = f"{len(self.layers)} layers, queries {str(self._queries)!r}, {self.backend!r}"
        if self._left_out:
            summary += f", without {', '.join(self._left_out)}"
        if self._pass_started and not self._pass_done:
            return f"<Scope of {summary}: the last forward pass did not finish>"
        if not self._layers:
            return f"<Scope of {summary}: no forward pass yet>"
        if self._flush is not None:
            self._flush()
        totals = next(iter(self._layers.values())).result()
        counts = (
            totals.count().int().tolist() if totals.selections else [0] * len(totals.first_token)
        )
        counted = ", ".join(map(str, counts[:4])) + (" …" if len(counts) > 4 else "")
        return (
            f"<Scope of {summary}: {len(counts)} sequences of {totals.keys} keys, "
            f"{counted} queries counted>"
        )

    def __getstate__(self) -> dict[str, Any]:
        """The results without the hook."""
        if self._flush is not None and self._pass_done:
            self._flush()
        for totals in [*self._layers.values()] if self._pass_done else ():
            totals.compute_deferred()
        return vars(self) | {"_unread": None}

    @property
    def readable(self) -> list[int]:
        """The layers that can be read now.

        After a pass: all measured layers. During a pass (in a hook of the model): the layers that
        ran already, if the text is so long that each layer is measured at once.
        """
        known = self._layers if self._pass_done else self._measured_early
        return [layer for layer in self.layers if layer in known]

    @property
    def tokens(self) -> Tensor | None:
        """int64 [B, K] on the CPU: the token ids of the keys; None if the model got none, or has
        more keys than tokens."""
        if self._cross:
            other = self._parts.get("encoder")
            return None if other is None else other.tokens
        if self._flush is not None and self._pass_done:
            self._flush()
        keys = max((totals.keys for totals in self._layers.values()), default=0)
        if not self._input_ids or any(ids is None for ids in self._input_ids):
            return None
        token_ids = torch.cat([ids.cpu() for ids in self._input_ids if ids is not None], 1)
        return token_ids if token_ids.shape[1] == keys else None

    def _ids(self, layer: int) -> Any:
        """The token ids of the keys for a measure; None if they are unknown.

        They are -1 before the first real token and where the mask hides a key.
        """
        tokens = self.tokens
        if tokens is None:
            return None
        first = self._read(layer)[0].first_token
        hidden = torch.arange(tokens.shape[1]) < first[:, None]
        if self._padding is not None:
            known = min(self._padding.shape[1], tokens.shape[1])
            hidden[:, :known] |= self._padding[:, :known].cpu() == 0
        return tokens.masked_fill(hidden, -1).numpy()

    @property
    def parts(self) -> list[str]:
        """The parts of the model that were measured: "encoder", "decoder", "cross"."""
        return list(self._parts)

    def __getitem__(self, part: str) -> "Scope":
        """The scope of one part: self-attention of a stack, or "cross", where the queries are a
        decoder's and the keys an encoder's."""
        if part not in self._parts:
            raise unknown("part", part, self._parts)
        return self._parts[part]

    def count(self, layer: int) -> Tensor:
        """[B]: number of counted queries, |Q|."""
        return self._read(layer)[2].float()

    def received(self, layer: int) -> Tensor:
        """[B, H, K]: sum over the queries of their attention to each key."""
        totals, sums, _ = self._read(layer)
        return sums.received[..., : totals.keys].clone()

    def received_error(self, layer: int) -> Tensor:
        """[B, H, K]: standard error of `received` (and of its later part) when sampled, else 0."""
        totals, sums, _ = self._read(layer)
        variance = None if sums.variance is None else sums.variance[..., : totals.keys]
        return standard_error(variance, sums.received[..., : totals.keys])

    def average(self, layer: int) -> Tensor:
        """[B, H, K]: average attention weight from later tokens; nan if no later query sees it."""
        return self.sums(layer).average

    def average_error(self, layer: int) -> Tensor:
        """[B, H, K]: standard error of `average` when sampled, else 0; nan as in `average`."""
        n_visible_from = self._visibility(layer, "eligible_later").float()
        return self.received_error(layer) / or_nan(n_visible_from)[:, None]

    def eligible(self, layer: int) -> Tensor:
        """[B, K]: number of counted queries that see each key."""
        return self._visibility(layer, "eligible").float()

    def uniform(self, layer: int) -> Tensor:
        """[B, K]: what each key would receive under uniform attention."""
        return self._visibility(layer, "uniform").float()

    def mass(self, layer: int, class_ids: Any, n: int) -> Tensor:
        """[B, H, n]: mean over the queries of their attention to each class.

        `class_ids` is int [B, K], in 0 … n - 1, -1 for no class; or float [B, K, n], the share of
        each token in each class (`ClassSet.weights`), where tokens are divided.
        """
        sums = self.sums(layer)
        return mass(sums.received, self._shares(layer, class_ids, n), sums.count).float()

    def mass_error(self, layer: int, class_ids: Any, n: int) -> Tensor:
        """[B, H, n]: an upper bound of the standard error of `mass` when sampled, else 0.

        The errors of the keys of a class are added up, as if they were fully correlated.
        """
        shares = self._shares(layer, class_ids, n)
        return mass(self.received_error(layer), shares, self.sums(layer).count).float()

    def lift(self, layer: int, class_ids: Any, n: int) -> Tensor:
        """[B, H, n]: `mass` over what it would be under uniform attention; 1 is no preference."""
        sums, shares = self.sums(layer), self._shares(layer, class_ids, n)
        uniform = mass(self.uniform(layer)[:, None], shares, sums.count)
        return lift(mass(sums.received, shares, sums.count), uniform).float()

    def flow(self, layer: int) -> Tensor:
        """[B, H, n, n]: mean over the queries of class c of their mass on class d.

        The classes are those of `watch(…, classes=…)`: sums cannot be split by the class of the
        query after the pass.
        """
        sums = self.sums(layer)
        if self._cross:
            raise ScopeError(
                "in cross-attention queries and keys belong to two texts, so flow between classes "
                "of one text is not defined",
                code="cross-attention",
                measure="flow",
            )
        if sums.flow is None or self._classes is None:
            raise ScopeError(
                "flow needs the classes before the forward pass: watch(model, classes=class_ids)",
                code="no-classes",
            )
        ids = torch.full((len(sums.first_token), sums.received.shape[-1]), -1, dtype=torch.int64)
        known = min(self._classes.shape[1], ids.shape[1])
        ids[:, :known] = self._classes[:, :known]
        shares = shares_of(ids.to(sums.flow.device), self._groups)
        each = torch.eye(self._groups, dtype=torch.float64, device=sums.flow.device)
        return flow(sums.flow, shares, sums.visibility("groups"), each).float()

    def measure(self, name: str, layer: int) -> Tensor:
        """[B, H]: a measure by its name; [B, H, columns] if it has several numbers per head.

        Some need `watch(…, keep=True)`.
        """
        if name not in BY_HEAD:
            raise unknown("measure", name, sorted(BY_HEAD))
        rows = self.single(layer) if "rows" in MEASURES[name].needs else None
        layer_view = Layer(sums=self.sums(layer), rows=rows, tokens=self._ids(layer))
        return torch.as_tensor(MEASURES[name].numbers(layer_view).value)

    def entropy(self, layer: int) -> Tensor:
        """[B, H]: mean over the queries of -sum_j A ln A, in nats."""
        return self.measure("entropy", layer)

    def entropy_error(self, layer: int) -> Tensor:
        """[B, H]: standard error of `entropy` when sampled, else 0."""
        _, sums, count = self._read(layer)
        variance = sums.entropy_variance
        error = torch.zeros_like(sums.entropy) if variance is None else variance.sqrt()
        return mean_over_queries(error, count)

    def first_token(self, layer: int) -> Tensor:
        """[B, H]: mean over the queries of their attention to the first real token."""
        return self.measure("first_token", layer)

    def self_mass(self, layer: int) -> Tensor:
        """[B, H]: mean over the queries of their attention to themselves."""
        return self.measure("self_mass", layer)

    def distance(self, layer: int) -> Tensor:
        """[B, H]: mean over the queries of the distance of their attention, in tokens."""
        return self.measure("distance", layer)

    def learned_sink_mass(self, layer: int) -> Tensor:
        """[B, H]: mean over the queries of their attention on a learned sink; 0 without one."""
        return self.measure("learned_sink_mass", layer)

    def sums(self, layer: int) -> Sums:
        """The sums over counted queries, the input of measures."""
        totals, sums, count = self._read(layer)
        K = totals.keys
        later, self_mass = sums.received_later[..., :K], sums.self_mass
        if self._cross:  # queries and keys are different tokens
            later, self_mass = (
                torch.full_like(later, torch.nan),
                torch.full_like(self_mass, torch.nan),
            )
        return Sums(
            count=count,
            received=sums.received[..., :K],
            received_later=later,
            entropy=sums.entropy,
            self_mass=self_mass,
            first_token=totals.first_token,
            visibility=partial(self._visibility, layer),
            sink=totals.sink,
            sink_position=totals.sink_position,
            flow=None if sums.flow is None else sums.flow[..., :K],
            error=None if sums.variance is None else self.received_error(layer),
            entropy_error=None if sums.entropy_variance is None else sums.entropy_variance.sqrt(),
            group_key=(*map(id, totals.selections), K),
        )

    def to_frame(
        self,
        tokenizer: Any = None,
        measures: Sequence[str] = ("received", "average"),
        *,
        classes: ClassSet = DEFAULT,
        input_ids: Any = None,
    ) -> "pl.DataFrame":
        """All layers and heads in one polars frame, one row per number.

        The columns are sequence, layer, head, measure, item (a class), position, token, class and
        value.

        Args:
            tokenizer: The tokenizer of the model, for the columns token and class; default: none.
            measures: For each token "received", "average"; for each class "mass", "lift"; for each
                head any name that `measure` takes; for each query "rows" (by class),
                "query_entropy".
            classes: The set of token classes.
            input_ids: Int [batch, keys], if the model did not get token ids.
        """
        from attnscope.capture.data_frame import frame_of_scope

        return frame_of_scope(self, tokenizer, measures, classes, input_ids)

    def show(self, tokenizer: Any, sequence: int = 0, *, input_ids: Any = None) -> "HtmlPage":
        """An HTML page of the text, shaded by the attention each token receives.

        It has a choice of layer and head. A notebook displays it; `.save("page.html")` writes it.
        """
        from attnscope.capture.html_page import page_of_scope

        return page_of_scope(self, tokenizer, sequence, input_ids)

    def _read(self, layer: int) -> tuple[LayerAccumulator, AttentionSums, Tensor]:
        """The sums of a layer, and |Q| [B] in float64."""
        totals = self._layer_totals(layer)
        if totals.deferred is not None:
            self._layers[layer].compute_deferred()
            totals = self._layer_totals(layer)
        if totals.sums is None:
            hint = _NO_QUERY.get(self._queries.name, "the query mask selects no real token")
            raise ScopeError(
                f"no query counted: {hint}", code="no-query-counted", queries=str(self._queries)
            )
        return totals, totals.sums, totals.count().to(totals.sums.received.device)

    def _layer_totals(self, layer: int) -> LayerAccumulator:
        """The sums of a layer; they may still be deferred."""
        if not self.layers:
            raise ScopeError(
                "this model has several attention parts; read one of them: "
                + ", ".join(f"scope[{part!r}]" for part in self._parts),
                code="several-parts",
                parts=list(self._parts),
            )
        if isinstance(layer, bool) or layer not in self.layers:
            raise unknown("layer", layer, self.layers)
        if not self._pass_done and self._pass_started and layer not in self._measured_early:
            raise ScopeError(
                "the last forward pass did not finish, so it has no results", code="pass-unfinished"
            )
        if self._flush is not None:
            self._flush()
        if not self._verified:  # before layers are split: stacked sums are checked faster
            self._verify()
        if layer not in self._layers:
            raise ScopeError(
                "no forward pass was measured in the thread that opened the watch; call the model "
                "inside the with block. If another thread generates (as with a streamer), open "
                "the watch in that thread",
                code="no-forward-pass",
            )
        totals = self._layers[layer].result()
        mask = self._queries.mask
        if mask is not None and mask.shape[1] > totals.keys and not totals.continued:
            raise InputError(
                f"the query mask has {mask.shape[1]} columns, and the pass had {totals.keys} keys; "
                f"it must be [{mask.shape[0]}, {totals.keys}]",
                code="wrong-shape",
                argument="queries",
                got=list(mask.shape),
            )
        return totals

    def _visibility(self, layer: int, name: str) -> Tensor:
        totals, sums, _ = self._read(layer)
        value: Tensor = getattr(self._visibility_counts(totals), name)
        return value.to(sums.received.device)

    def _visibility_counts(self, totals: LayerAccumulator) -> VisibilityCounts:
        """The visibility counts so far; layers with the same masks share them."""
        now = totals.selections
        if self._visibility_cache is not None:  # stored selections keep their identity
            of, keys, visibility_counts = self._visibility_cache
            if keys == totals.keys and len(of) == len(now) and all(map(operator.is_, of, now)):
                return visibility_counts
        visibility_counts = join_visibility_counts(now, totals.keys)
        self._visibility_cache = [*now], totals.keys, visibility_counts
        return visibility_counts

    def _shares(self, layer: int, class_ids: Any, n: int) -> Tensor:
        totals = self._layer_totals(layer)
        device = (
            totals.device if totals.deferred is not None else self._read(layer)[1].received.device
        )
        ids = torch.as_tensor(class_ids)
        shape = [len(totals.first_token), totals.keys]
        if ids.is_floating_point() and list(ids.shape) == [*shape, n]:
            return ids.to(device)
        if list(ids.shape) != shape or ids.is_floating_point() or ids.dtype == torch.bool:
            raise InputError(
                f"class_ids must be an int tensor {shape} ([batch, keys]) or float shares "
                f"{[*shape, n]}; got {describe(ids)}",
                code="wrong-shape",
                argument="class_ids",
                got=describe(ids),
            )
        if ids.numel() and (int(ids.max()) >= n or int(ids.min()) < -1):
            raise InputError(
                f"class_ids must lie in -1 … {n - 1} for n={n}; "
                f"got {int(ids.min())} … {int(ids.max())}",
                code="out-of-range",
                argument="class_ids",
                value=[int(ids.min()), int(ids.max())],
            )
        return shares_of(ids.long().to(device), n)

    def _verify(self) -> None:
        """Check the conservation of new sums; delete all results if it fails."""
        try:
            self._check_conservation(self._dtype)
        except (ConservationError, ModelError):
            self._clear()
            raise
        self._verified = True

    def _check_conservation(self, dtype: torch.dtype, only: int | None = None) -> None:
        """Check the conservation of all layers with computed sums, or of one layer."""
        what = f"backend {self.backend!r}: attention adds up to the number of queries only within"
        if only is not None:
            check_totals({only: self._by_layer[only].result()}, dtype, what)
            return
        for stacked in self._stacked:
            check_stacked(stacked, dtype, what)
        accumulators = {
            layer: accumulator.result() for layer, accumulator in self._by_layer.items()
        }
        check_totals(accumulators, dtype, what)
