"""`watch`: measures the attention of a model while it runs, without changing the model.

The outputs come from torch's fused attention. The statistics come from a second, streamed pass over
queries and keys.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attnscope import kernels
from attnscope.capture import hooks, sites
from attnscope.capture.checkpointing import backward_inside
from attnscope.capture.generation import tracking_generate
from attnscope.capture.query_selection import Queries, parse
from attnscope.capture.scope import Scope
from attnscope.capture.sites import Site
from attnscope.capture.watch_hook import WatchHook
from attnscope.errors import InputError, describe

WatchBackend = Literal["auto", "reference", "streaming", "triton", "eager-fallback"]


def watch(
    model: nn.Module,
    layers: int | Iterable[int] | None = None,
    queries: str | Tensor = "all",
    backend: WatchBackend = "auto",
    *,
    classes: Tensor | None = None,
    top: int = 0,
    keep: bool = False,
    seed: int = 0,
    max_pending: float = 1 / 256,
) -> AbstractContextManager[Scope]:
    """Measure where the attention of a transformers model goes, inside a `with` block.

    The model and its outputs stay the same. A forward pass without a KV cache starts a new
    measurement; a pass that continues a cache (every decode step of `generate`) adds to it.

    Args:
        model: A transformers model, or a part of it such as `model.get_encoder()`.
        layers: The layers to measure, in the model's own numbering; default: all.
        queries: The tokens whose attention counts. "all"; "last": the last prompt token;
            "generated": the generated tokens that the model read; "predicts": the last prompt
            token and the generated ones, from which new tokens were predicted; "sample:K": K
            queries spread over the text, which gives estimates with standard errors; or a bool
            tensor [batch, keys], where later tokens do not count.
        backend: "auto", "reference", "streaming", "triton", or "eager-fallback".
        classes: Int [batch, keys], -1 for no class. Needed for `Scope.flow`, which splits
            attention by the class of the query.
        top: Store this many keys with the largest weights for every counted query; default: 0.
        keep: Store queries and keys (as large as a KV cache), so that `Scope.rows`,
            `Scope.weight` and every other per-query result can be computed after the pass.
        seed: Seed of "sample:K".
        max_pending: Share of free memory that pending calls may use before they are measured
            together (layers of a pass, decode steps); 0 measures each call at once. Default: 1/256.

    Returns:
        A context manager that gives a `Scope`, which can be read during and after the block.

    Raises:
        InputError: An argument has a wrong value, or an encoder–decoder model is measured with
            a query mask or classes.
        ModelError: The model cannot be measured; raised by a forward pass too.
        ScopeError: A forward pass continues a KV cache that was filled before the block.
        ConservationError: The attention weights of a layer do not add up.

    Example:
        >>> import attnscope
        >>> model, tokenizer = attnscope.load("zoo:spatial-phys")
        >>> inputs = tokenizer("The ball is left of the box.", return_tensors="pt")
        >>> with attnscope.watch(model, layers=[0, 1]) as scope:
        ...     _ = model(**inputs)  # or model.generate(**inputs)
        >>> scope.received(0).shape  # [batch, heads, keys]
        torch.Size([1, 12, 8])
        >>> float(scope.received(0).sum(-1).mean().round())  # each of the 8 queries gives 1
        8.0
    """
    model_sites = sites.find(model)
    chosen_sites = sites.select_sites(model_sites, layers)
    parsed = parse(queries, seed)
    _check_options(top, keep, max_pending)
    if keep and parsed.name == "sample":
        raise InputError(
            f"queries={queries!r} gives estimates from a sample of queries; keep=True stores "
            "each query. To store some queries, choose them with a bool tensor [batch, keys]",
            code="keep-with-sample",
            queries=queries,
        )
    ids, groups = _classes(classes)
    if len(model_sites.stacks) > 1 and (parsed.mask is not None or ids is not None):
        raise InputError(
            "this model has an encoder and a decoder, each with its own text; a query mask or "
            "classes belong to one text. Measure both parts: with watch(model.get_encoder(), …) "
            "as encoder, watch(model.get_decoder(), …) as decoder",
            code="encoder-decoder",
            stacks=list(model_sites.stacks),
        )
    device = sites.device_of(model_sites)
    kernel = backend if backend == "eager-fallback" else kernels.choose(backend, device)
    parts: dict[str, Scope] = {}
    for site in chosen_sites:
        part = parts.get(site.part)
        if part is None:
            part = parts[site.part] = _empty_scope(site, kernel, parsed, ids, groups)
            part._left_out = model_sites.left_out
        part.layers.append(site.layer)
    hook = WatchHook(
        model_sites,
        set(chosen_sites),
        parts,
        kernel,
        device,
        top=top,
        keep=keep,
        max_pending=max_pending,
    )
    return _watching(hook, model_sites)


def _empty_scope(
    site: Site, backend: str, queries: Queries, ids: Tensor | None, groups: int
) -> Scope:
    """The scope of a part of the model, without layers."""
    scope = Scope(
        layers=[],
        backend=backend,
        queries=queries,
        groups=groups,
        stack=site.stack,
        cross=site.kind == "cross",
    )
    scope._classes = ids
    return scope


def _check_options(top: Any, keep: Any, max_pending: Any) -> None:
    if isinstance(top, bool) or not isinstance(top, int) or top < 0:
        raise InputError(
            f"top={top!r} must be a whole number from 0: how many keys to store for each query",
            code="bad-number",
            argument="top",
            value=top,
        )
    if (
        isinstance(max_pending, bool)
        or not isinstance(max_pending, int | float)
        or not 0 <= max_pending <= 1
    ):
        raise InputError(
            f"max_pending={max_pending!r} must be a number from 0 to 1: the share of free "
            "memory for pending calls",
            code="bad-number",
            argument="max_pending",
            value=max_pending,
        )
    if not isinstance(keep, bool):
        raise InputError(
            f"keep={keep!r} must be True or False", code="not-boolean", argument="keep", value=keep
        )


def _classes(classes: Any) -> tuple[Tensor | None, int]:
    if classes is None:
        return None, 0
    ids = torch.as_tensor(classes)
    if ids.ndim != 2 or ids.is_floating_point() or ids.dtype == torch.bool or ids.numel() == 0:
        raise InputError(
            "classes must be an int tensor [batch, keys] with -1 for no class; got "
            f"{describe(ids)}",
            code="wrong-shape",
            argument="classes",
            got=describe(ids),
        )
    return ids.long().cpu(), max(int(ids.max()) + 1, 1)


@contextmanager
def _watching(hook: WatchHook, model_sites: sites.Sites) -> Iterator[Scope]:
    parts, backend = hook.parts, hook.reducer.backend
    with (
        tracking_generate(hook.generations.values()),
        backward_inside(model_sites.base_models.values(), (), changes=False),
        hooks.register(model_sites, observer=hook, dense=backend == "eager-fallback"),
    ):
        try:
            yield _combine(parts, backend)
        finally:
            hook.finish()


def _combine(parts: dict[str, Scope], backend: str) -> Scope:
    """The scope of the only text, or a scope that contains the parts."""
    texts = [scope for scope in parts.values() if not scope._cross] or list(parts.values())
    combined = texts[0]
    if len(texts) > 1:
        combined = Scope(layers=[], backend=backend, queries=combined._queries, groups=0)
    for scope in (combined, *parts.values()):
        scope._parts = parts
    return combined
