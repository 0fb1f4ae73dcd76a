"""What a watched model's attention did: the numbers of the definitions, read layer by layer."""

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnscope.capture.conservation import check
from attnscope.capture.frame import Exposure, Selection
from attnscope.capture.kept import binned, bins_of, tell
from attnscope.capture.queries import Queries
from attnscope.capture.totals import LayerTotals, join_exposures
from attnscope.errors import InputError, ScopeError, unknown
from attnscope.kernels import Asked, ByQuery, Totals
from attnscope.kernels.single import renyi2
from attnscope.measures.flow import flow
from attnscope.measures.layer import Layer, Sums, mean_over_queries, or_nan
from attnscope.measures.mass import lift, mass, shares_of
from attnscope.measures.received import standard_error
from attnscope.measures.registry import MEASURES

__all__ = ["Scope"]

_NO_QUERY = {
    "all": "every token is padding",
    "generated": "no token was generated and fed back; call model.generate(…) for more than one "
    "new token (the last one is never fed), or ask for queries='predicts'",
}


class Scope:
    """Results of `attnscope.watch`. Shapes: B sequences, H query heads, K keys (positions).

    A forward pass without a cache begins a new sequence and forgets the one before; one that
    continues a cache (every step of `generate`) adds to it. Results are float32 on the layer's
    own device. Padding is neither query nor key: its columns are 0 (nan in `average`).
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
        self.backend = backend
        """"reference", "streaming", "triton" or "eager-fallback"."""
        self._stack = stack
        self._cross = cross
        self._parts: dict[str, Scope] = {}
        self._queries = queries
        self._groups = groups
        self._classes: Tensor | None = None
        self._layers: dict[int, LayerTotals] = {}
        self._complete = False
        self._checked = True
        self._unread: Callable[[], None] | None = None
        """Measures what still waits, and checks it; while watched."""
        self._exposures: tuple[list[Selection], int, Exposure] | None = None

    def __repr__(self) -> str:
        asked = f"{len(self.layers)} layers, queries {str(self._queries)!r}, {self.backend!r}"
        if not self._layers:
            return f"<Scope of {asked}: no forward pass yet>"
        if not self._complete:
            return f"<Scope of {asked}: the last forward pass did not finish>"
        if self._unread is not None:
            self._unread()
        totals = next(iter(self._layers.values())).result()
        counts = totals.count().int().tolist() if totals.selections else [0] * len(totals.first)
        counted = ", ".join(map(str, counts[:4])) + (" …" if len(counts) > 4 else "")
        return (
            f"<Scope of {asked}: {len(counts)} sequences of {totals.keys} keys, "
            f"{counted} queries counted>"
        )

    def __getstate__(self) -> dict[str, Any]:
        """What was measured; not the watch that still measures."""
        if self._unread is not None and self._complete:
            self._unread()
        return vars(self) | {"_unread": None}

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
        """[B]: how many queries counted, |Q|."""
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
        """[B, H, K]: average attention weight, from later tokens; nan where none could look."""
        return self.sums(layer).average

    def average_error(self, layer: int) -> Tensor:
        """[B, H, K]: standard error of `average` when sampled, else 0; nan as in `average`."""
        could = self._exposed(layer, "eligible_later").float()
        return self.received_error(layer) / or_nan(could)[:, None]

    def eligible(self, layer: int) -> Tensor:
        """[B, K]: the number of queries that could see each key."""
        return self._exposed(layer, "eligible").float()

    def uniform(self, layer: int) -> Tensor:
        """[B, K]: what each key would receive if every query spread its attention evenly."""
        return self._exposed(layer, "uniform").float()

    def mass(self, layer: int, class_ids: Any, n: int) -> Tensor:
        """[B, H, n]: mean over the queries of their attention to each class.

        `class_ids` is int [B, K], in 0 … n - 1, -1 for no class; or float [B, K, n], the share of
        each token in each class (`ClassSet.weights`), where tokens are divided.
        """
        sums = self.sums(layer)
        return mass(sums.received, self._shares(layer, class_ids, n), sums.count).float()

    def mass_error(self, layer: int, class_ids: Any, n: int) -> Tensor:
        """[B, H, n]: an upper bound of the standard error of `mass` when sampled, else 0.

        The errors of a class's keys are added up, as if all erred the same way.
        """
        shares = self._shares(layer, class_ids, n)
        return mass(self.received_error(layer), shares, self.sums(layer).count).float()

    def lift(self, layer: int, class_ids: Any, n: int) -> Tensor:
        """[B, H, n]: `mass` over what it would be under even attention; 1 is no preference."""
        sums, shares = self.sums(layer), self._shares(layer, class_ids, n)
        even = mass(self.uniform(layer)[:, None], shares, sums.count)
        return lift(mass(sums.received, shares, sums.count), even).float()

    def flow(self, layer: int) -> Tensor:
        """[B, H, n, n]: mean over the queries of class c of their mass on class d.

        The classes are those given as `watch(…, classes=…)`: attention from a class cannot be
        told apart after the fact.
        """
        sums = self.sums(layer)
        if self._cross:
            raise ScopeError("in cross-attention queries and keys are two texts: there is no flow")
        if sums.flow is None or self._classes is None:
            raise ScopeError("flow needs the classes beforehand: watch(model, classes=class_ids)")
        ids = torch.full((len(sums.first), sums.received.shape[-1]), -1, dtype=torch.int64)
        known = min(self._classes.shape[1], ids.shape[1])
        ids[:, :known] = self._classes[:, :known]
        shares = shares_of(ids.to(sums.flow.device), self._groups)
        each = torch.eye(self._groups, dtype=torch.float64, device=sums.flow.device)
        return flow(sums.flow, shares, sums.exposed("groups"), each).float()

    def measure(self, name: str, layer: int) -> Tensor:
        """[B, H]: any measure by its name that is one number per head."""
        one = {m.name for m in MEASURES.values() if m.level == "head" and not m.pair and not m.over}
        if name not in one:
            raise unknown("measure", name, sorted(one))
        return torch.as_tensor(MEASURES[name].numbers(Layer(sums=self.sums(layer))).value)

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
        """[B, H]: mean over the queries of how far back they look, in tokens."""
        return self.measure("distance", layer)

    def sink_mass(self, layer: int) -> Tensor:
        """[B, H]: mean over the queries of what a learned sink took; 0 in models without one."""
        return self.measure("sink_mass", layer)

    def sums(self, layer: int) -> Sums:
        """What the counted queries add up to: what measures are functions of."""
        totals, sums, count = self._read(layer)
        K = totals.keys
        later, own = sums.later[..., :K], sums.own
        if self._cross:  # no query is a key, or comes after one
            later, own = torch.full_like(later, torch.nan), torch.full_like(own, torch.nan)
        return Sums(
            count=count,
            received=sums.received[..., :K],
            later=later,
            entropy=sums.entropy,
            own=own,
            first=totals.first,
            exposed=partial(self._exposed, layer),
            sink=totals.sink,
            sink_position=totals.sink_position,
            flow=None if sums.flow is None else sums.flow[..., :K],
            error=None if sums.variance is None else self.received_error(layer),
            entropy_error=None if sums.entropy_variance is None else sums.entropy_variance.sqrt(),
        )

    def top_keys(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """The keys each query looks at most, as asked for with `watch(…, top=k)`.

        Positions of the queries [B, M] (-1 where a shorter sequence has fewer), their keys
        [B, H, M, k] (-1 where fewer are visible) and the weights [B, H, M, k], largest first.
        """
        totals, _, _ = self._read(layer)
        if not totals.top:
            raise ScopeError("top keys must be asked for beforehand: watch(model, top=5)")
        queries, keys, weights = zip(*totals.top, strict=True)
        width = max(part.shape[-1] for part in keys)
        wide = [torch.nn.functional.pad(k, (0, width - k.shape[-1]), value=-1) for k in keys]
        heavy = [torch.nn.functional.pad(w, (0, width - w.shape[-1])) for w in weights]
        return torch.cat(queries, 1), torch.cat(wide, 2), torch.cat(heavy, 2)

    def query_positions(self, layer: int, bin: int | None = None) -> Tensor:
        """int64 [B, Q]: where the counted queries stand, in the order of `rows`; -1 where a shorter
        sequence has none. With `bin`, the first position of each bin of so many."""
        where = self._kept(layer)
        return where if bin is None else bins_of(where, bin)

    def rows(self, layer: int, class_ids: Any, n: int, bin: int | None = None) -> Tensor:
        """[B, H, Q, n]: the attention of every counted query to each class; `mass` is their mean.

        Needs `watch(…, keep=True)`. The classes are given as in `mass`; `query_positions` says
        which queries these are, and nan stands where it says -1. With `bin`, means over the
        queries of every so many positions.
        """
        mass = self._told(layer, Asked(shares=self._shares(layer, class_ids, n))).mass
        assert mass is not None
        return self._binned(layer, mass, bin)

    def weight(self, layer: int, key_of: Any, bin: int | None = None) -> Tensor:
        """[B, H, Q]: the attention of every counted query to a key of its own.

        `key_of` is int [B, Q], the position of a key for each of `query_positions`, negative for
        none, where the weight is nan: `query_positions(layer) - 1` is the token before it.
        """
        where = self._kept(layer)
        keys = torch.as_tensor(key_of)
        most = self._read(layer)[0].keys
        if keys.shape != where.shape or keys.is_floating_point() or keys.dtype == torch.bool:
            raise InputError(
                f"key_of is an int tensor {list(where.shape)}, a key for each of "
                f"query_positions({layer}), -1 for none; got "
                f"{str(keys.dtype).removeprefix('torch.')} {list(keys.shape)}"
            )
        if keys.numel() and int(keys.max()) >= most:
            raise InputError(
                f"key_of asks for key {int(keys.max())}, and there are {most}: 0 … {most - 1}"
            )
        keys = keys.long().to(where.device)
        weight = self._told(layer, Asked(keys=keys)).weight
        assert weight is not None
        return self._binned(layer, weight.where(keys[:, None] >= 0, torch.nan), bin)

    def by_distance(
        self, layer: int, first: int = 4, recent: int = 64, bin: int | None = None
    ) -> Tensor:
        """[B, H, Q, 3]: the attention of every counted query to the `first` tokens of the text, to
        the `recent` ones up to itself (less those), and to the rest."""
        for name, value in {"first": first, "recent": recent}.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InputError(f"{name}={value!r}: a number of tokens is a whole number from 0")
        where = self._kept(layer)
        if self._cross:
            raise ScopeError("in cross-attention no key is a query's own: there is no distance")
        totals = self._read(layer)[0]
        begin = totals.first.to(where.device)[:, None].expand_as(where)
        near = torch.maximum(where - recent + 1, begin + first)
        spans = [(begin, begin + first), (near, where + 1), (where * 0, where * 0 + totals.keys)]
        asked = Asked(spans=torch.stack([torch.stack(span, -1) for span in spans], 2))
        told = self._told(layer, asked).spans
        assert told is not None
        sink, close, everything = told.unbind(-1)
        rest = (everything - sink - close).clamp(min=0)
        return self._binned(layer, torch.stack([sink, close, rest], -1), bin)

    def query_entropy(self, layer: int, order: int = 1, bin: int | None = None) -> Tensor:
        """[B, H, Q]: the entropy of every counted query in nats: Shannon's, -sum_j A ln A, or of
        order 2 Rényi's, -ln sum_j A²."""
        if isinstance(order, bool) or order not in (1, 2):
            raise InputError(f"order={order!r}: entropies are of order 1 (Shannon) or 2 (Rényi)")
        told = self._told(layer, Asked(entropies=True))
        assert told.entropy is not None
        assert told.squares is not None
        return self._binned(layer, told.entropy if order == 1 else renyi2(told.squares), bin)

    def largest(self, layer: int, k: int = 1) -> tuple[Tensor, Tensor, Tensor]:
        """The keys each counted query looks at most, int64 [B, H, Q, k] (-1 where fewer are
        visible), their weights, and their scores as the softmax took them (scaled, soft-capped,
        biased; nan where only weights are known)."""
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise InputError(f"k={k!r}: the number of keys is a whole number from 1")
        told = self._told(layer, Asked(top=k))
        assert told.top_key is not None
        assert told.top_weight is not None
        assert told.top_score is not None
        return told.top_key, told.top_weight, told.top_score

    def _kept(self, layer: int) -> Tensor:
        """Positions of the queries whose rows can be told."""
        totals, sums, _ = self._read(layer)
        if not totals.kept:
            raise ScopeError(
                "what single queries look at must be kept beforehand: watch(model, keep=True)"
            )
        where = torch.cat([kept.positions for kept in totals.kept], 1)
        return where.to(sums.received.device)

    def _told(self, layer: int, asked: Asked) -> ByQuery:
        self._kept(layer)
        return tell(self._read(layer)[0].kept, asked, self.backend)

    def _binned(self, layer: int, values: Tensor, bin: int | None) -> Tensor:
        return values if bin is None else binned(values, self._kept(layer), bin)

    def _read(self, layer: int) -> tuple[LayerTotals, Totals, Tensor]:
        """The totals of a layer, and |Q| [B] in float64 beside them."""
        if not self.layers:
            raise ScopeError(
                "this model attends to more than one text; read one part of it: "
                + ", ".join(f"scope[{part!r}]" for part in self._parts)
            )
        if isinstance(layer, bool) or layer not in self.layers:
            known = ", ".join(map(str, self.layers))
            raise InputError(f"layer {layer!r} was not measured; measured: {known}")
        if layer not in self._layers:
            raise ScopeError("nothing measured yet; call the model inside the with block first")
        if not self._complete:
            raise ScopeError("the last forward pass did not finish, so there is nothing to read")
        if self._unread is not None:
            self._unread()
        totals = self._layers[layer].result()
        mask = self._queries.mask
        if mask is not None and mask.shape[1] > totals.keys and not totals.continued:
            raise InputError(
                f"the query mask has {mask.shape[1]} columns, and there were {totals.keys} keys; "
                f"it must be [{mask.shape[0]}, {totals.keys}]"
            )
        if totals.sums is None:
            hint = _NO_QUERY.get(self._queries.name, "the query mask selects no real token")
            raise ScopeError(f"no query counted: {hint}")
        return totals, totals.sums, totals.count().to(totals.sums.received.device)

    def _exposed(self, layer: int, name: str) -> Tensor:
        totals, sums, _ = self._read(layer)
        value: Tensor = getattr(self._exposure(totals), name)
        return value.to(sums.received.device)

    def _exposure(self, totals: LayerTotals) -> Exposure:
        """What could be seen so far; layers under the same masks share the answer."""
        now = totals.selections
        if self._exposures is not None:  # held here, so that no other can take a selection's place
            of, keys, exposure = self._exposures
            if keys == totals.keys and len(of) == len(now) and all(map(operator.is_, of, now)):
                return exposure
        exposure = join_exposures(now, totals.keys)
        self._exposures = [*now], totals.keys, exposure
        return exposure

    def _shares(self, layer: int, class_ids: Any, n: int) -> Tensor:
        totals, sums, _ = self._read(layer)
        ids = torch.as_tensor(class_ids)
        wanted = [len(totals.first), totals.keys]
        if ids.is_floating_point() and list(ids.shape) == [*wanted, n]:
            return ids.to(sums.received.device)
        if list(ids.shape) != wanted or ids.is_floating_point() or ids.dtype == torch.bool:
            raise InputError(
                f"class_ids is an int tensor {wanted} ([batch, keys]) or shares "
                f"{[*wanted, n]}; got "
                f"{str(ids.dtype).removeprefix('torch.')} {list(ids.shape)}"
            )
        if ids.numel() and (int(ids.max()) >= n or int(ids.min()) < -1):
            raise InputError(
                f"class_ids must lie in -1 … {n - 1} for n={n}; "
                f"found {int(ids.min())} … {int(ids.max())}"
            )
        return shares_of(ids.long().to(sums.received.device), n)

    def _check(self, dtype: torch.dtype) -> None:
        """Conservation: what the keys received and the sinks took is the number of queries, and
        every row agrees with the log-sum-exp that the model's own attention had."""
        alike: dict[Any, list[tuple[int, Tensor, Tensor, Tensor, Tensor]]] = {}
        for layer, so_far in self._layers.items():
            totals = so_far.result()
            if totals.sums is None:
                continue
            mass = totals.sums.mass if totals.sink is None else totals.sums.mass + totals.sink
            count = totals.count()
            if totals.sampled:  # estimates add up only on average; their rows are audited instead
                mass, count = torch.zeros_like(mass), torch.zeros_like(count)
            drift = torch.zeros_like(mass) if totals.drift is None else totals.drift
            reach = mass * 0 if totals.reach is None else totals.reach
            alike.setdefault((mass.device, mass.shape), []).append(
                (layer, mass, count, drift, reach)
            )
        for (device, _), parts in alike.items():
            layers, masses, counts, drifts, reaches = zip(*parts, strict=True)
            wanted = torch.stack(counts).to(device)[..., None]
            off = (torch.stack(masses) - wanted).abs() / wanted.clamp(min=1)
            check(
                layers,
                torch.maximum(off, torch.stack(drifts)),
                torch.stack(reaches),
                dtype,
                f"backend {self.backend!r}: attention adds up to the number of queries only within",
            )
