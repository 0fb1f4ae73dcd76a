"""A small engine with paged keys: what vLLM does to a KV cache, without a model and without vLLM.

Queries and keys of every request are random and known in advance. The engine schedules tokens,
allocates, shares and frees pages, writes keys to them, and calls a recorder as a worker does.
Pages are filled with nan when they are allocated, so that a page that is read too late shows.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnscope.integrations.vllm.pages import PageLayout, learn_layout
from attnscope.integrations.vllm.recorder import Recorder
from attnscope.integrations.vllm.reduction import AttentionLayer
from attnscope.integrations.vllm.requests import NewRequest, Step
from attnscope.kernels import AttentionSums, KernelRows, reference


def write_plain(keys: Tensor, values: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Keys before values, token by token, as FlashAttention stores them."""
    page, size = cache.shape[2], keys.shape[2]
    cache[slots // page, :, slots % page, :size] = keys.to(cache.dtype)
    cache[slots // page, :, slots % page, size:] = values.to(cache.dtype)


def write_transposed(keys: Tensor, values: Tensor, cache: Tensor, slots: Tensor) -> None:
    """The keys of a page dimension by dimension, as vLLM's vector kernels store them."""
    P, G, page, _ = cache.shape
    flat = cache.view(P, G, 2, -1)
    by_size = flat[:, :, 0].unflatten(2, (keys.shape[2], page))
    by_size[slots // page, :, :, slots % page] = keys.to(cache.dtype)
    by_token = flat[:, :, 1].unflatten(2, (page, values.shape[2]))
    by_token[slots // page, :, slots % page] = values.to(cache.dtype)


def write_paired(keys: Tensor, values: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Pairs of dimensions of all tokens side by side, as matrix units take them."""
    P, G, page, _ = cache.shape
    flat = cache.view(P, G, 2, -1)
    pairs = flat[:, :, 0].unflatten(2, (keys.shape[2] // 2, page, 2))
    pairs[slots // page, :, :, slots % page] = keys.unflatten(2, (-1, 2)).to(cache.dtype)
    by_token = flat[:, :, 1].unflatten(2, (page, values.shape[2]))
    by_token[slots // page, :, slots % page] = values.to(cache.dtype)


def write_after(keys: Tensor, values: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Values before keys."""
    write_plain(values, keys, cache, slots)


WRITERS = {
    "plain": write_plain,
    "after": write_after,
    "transposed": write_transposed,
    "paired": write_paired,
}


@dataclass
class Model:
    """The attention layers of the engine."""

    layers: list[AttentionLayer]
    caches: dict[str, Tensor]
    write: Any
    page: int

    @classmethod
    def of(
        cls,
        specs: list[dict[str, Any]],
        *,
        writer: str = "plain",
        pages: int = 40,
        page: int = 4,
        heads: int = 4,
        kv_heads: int = 2,
        size: int = 8,
        dtype: torch.dtype = torch.float32,
    ) -> "Model":
        write, layers, caches = WRITERS[writer], [], {}
        for number, spec in enumerate(specs):
            cache = torch.full((pages, kv_heads, page, 2 * size), torch.nan, dtype=dtype)
            layout: PageLayout = learn_layout(write, cache, size)
            name = f"model.layers.{number}.attn"
            caches[name] = cache
            layers.append(
                AttentionLayer(
                    name=name,
                    layer=number,
                    heads=heads,
                    kv_heads=kv_heads,
                    scale=size**-0.5,
                    layout=layout,
                    **spec,
                )
            )
        return cls(layers, caches, write, page)


@dataclass
class Sequence:
    """A request with all its queries and keys."""

    id: str
    prompt: int
    q: Tensor
    """[L, N, H, D]"""
    k: Tensor
    """[L, N, G, D]"""
    ids: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    started: bool = False
    resumed: bool = False


class PagedEngine:
    """Runs steps on paged keys and shows them to a recorder."""

    def __init__(self, model: Model, recorder: Recorder):
        self.model, self.recorder = model, recorder
        pages = next(iter(model.caches.values())).shape[0]
        self.free = list(range(1, pages))
        self.sequences: dict[str, Sequence] = {}
        self.finished: list[str] = []
        self.shared: dict[int, int] = {}
        """By page: how many requests use it."""

    def add(
        self,
        name: str,
        prompt: int,
        total: int,
        *,
        seed: int = 0,
        prefix_of: str | None = None,
        prefix_pages: int = 0,
        options: Any = None,
        stops_late: bool = False,
    ) -> Sequence:
        """Add a request; its first pages may be those of another one."""
        layers, draw = self.model.layers, torch.Generator().manual_seed(seed)
        H, G, D = layers[0].heads, layers[0].kv_heads, layers[0].layout.size
        q = torch.randn(len(layers), total, H, D, generator=draw) * 2
        k = torch.randn(len(layers), total, G, D, generator=draw) * 2
        ids = torch.randint(0, 50, (total,), generator=draw).tolist()
        new = Sequence(name, prompt, q, k, ids)
        if prefix_of is not None:
            other, cached = self.sequences[prefix_of], prefix_pages * self.model.page
            new.k[:, :cached] = other.k[:, :cached]
            new.ids[:cached] = other.ids[:cached]
            new.blocks, new.computed = other.blocks[:prefix_pages], cached
            for block in new.blocks:
                self.shared[block] += 1
        new.options, new.stops_late = options, stops_late  # type: ignore[attr-defined]
        self.sequences[name] = new
        return new

    def finish(self, name: str) -> None:
        """End a request: its pages are free at once, and the next step says so."""
        self._release(self.sequences.pop(name))
        self.finished.append(name)

    def preempt(self, name: str) -> None:
        """Take all pages of a request away; it starts again from its first token."""
        sequence = self.sequences[name]
        self._release(sequence)
        sequence.computed, sequence.resumed = 0, True

    def _release(self, sequence: Sequence) -> None:
        for block in sequence.blocks:
            self.shared[block] -= 1
            if not self.shared[block]:
                self.free.append(block)
        sequence.blocks = []

    def step(self, counts: dict[str, int], order: list[str] | None = None) -> None:
        """Run so many tokens of each request, in this order of the query tensor."""
        page, new, tokens, blocks, fresh = self.model.page, [], {}, {}, []
        for name, count in counts.items():
            sequence = self.sequences[name]
            known = list(sequence.blocks) if not sequence.started or sequence.resumed else []
            need = -(-(sequence.computed + count) // page) - len(sequence.blocks)
            more = [self.free.pop(0) for _ in range(need)]
            fresh += more
            for block in more:
                self.shared[block] = 1
            sequence.blocks += more
            blocks[name] = [*known, *more]
            tokens[name] = sequence.computed, count
            if not sequence.started:
                new.append(
                    NewRequest(
                        id=name,
                        prompt=sequence.ids[: sequence.prompt],
                        prompt_length=sequence.prompt,
                        options=sequence.options,  # type: ignore[attr-defined]
                        stops_late=sequence.stops_late,  # type: ignore[attr-defined]
                    )
                )
            sequence.started = True
        replaced = [name for name in counts if self.sequences[name].resumed]
        replaced += [request.id for request in new]
        finished, self.finished = self.finished, []
        self.recorder.begin(
            Step(new=new, finished=finished, tokens=tokens, blocks=blocks, replaced=replaced)
        )
        for cache in self.model.caches.values():  # what new pages held is gone
            cache[fresh] = torch.nan
        self._forward(order or list(counts), tokens)
        for name, count in counts.items():
            self.sequences[name].computed += count
            self.sequences[name].resumed = False
        self.recorder.end()

    def _forward(self, order: list[str], tokens: dict[str, tuple[int, int]]) -> None:
        page = self.model.page
        spans = [(self.sequences[name], *tokens[name]) for name in order]
        width = max(len(sequence.blocks) for sequence, _, _ in spans)
        table = torch.zeros(len(order), width + 2, dtype=torch.int32)
        slots = []
        for row, (sequence, first, count) in enumerate(spans):
            table[row, : len(sequence.blocks)] = torch.tensor(sequence.blocks)
            slots += [
                sequence.blocks[at // page] * page + at % page for at in range(first, first + count)
            ]
        ids = torch.tensor([s.ids[at] for s, f, n in spans for at in range(f, f + n)])
        for i, layer in enumerate(self.model.layers):
            query = torch.cat([s.q[i, f : f + n] for s, f, n in spans])
            key = torch.cat([s.k[i, f : f + n] for s, f, n in spans])
            cache = self.model.caches[layer.name]
            self.model.write(key, torch.zeros_like(key), cache, torch.tensor(slots))
            padded = torch.cat([query, torch.full_like(query[:1], torch.nan)])
            self.recorder.on_call(layer.name, padded, key, cache, table, lambda: (order, ids))
        table.fill_(-1)  # as vLLM overwrites its tables


def expected(
    layer: AttentionLayer, sequence: Sequence, positions: list[int], length: int
) -> tuple[AttentionSums, Tensor]:
    """The sums of these queries by the definition, and their weights [H, M, K]."""
    at = torch.tensor(positions)
    low = torch.zeros_like(at) if layer.window is None else (at - layer.window + 1).clamp(min=0)
    bias = None
    if layer.slopes is not None:
        bias = (layer.slopes[:, None] * torch.arange(length))[None]
    rows = KernelRows(
        q=sequence.q[layer.layer, at].transpose(0, 1)[None],
        k=sequence.k[layer.layer, :length].transpose(0, 1)[None],
        scale=layer.scale,
        start=low.int()[None],
        stop=at.int()[None] + 1,
        self_key=at.int()[None],
        softcap=layer.softcap,
        sinks=layer.sinks,
        key_bias=bias,
    )
    return reference.reduce(rows), reference.weights(rows)[0][0]
