"""`watch`: measures the attention of a model while it runs, without changing the model.

The outputs come from torch's fused attention. The statistics come from a second, streamed pass over
queries and keys.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from attnscope import kernels
from attnscope.errors import InputError, unknown, wrong_shape
from attnscope.interception import sites
from attnscope.interception.generation import GenerationTracker, tracking_generate
from attnscope.interception.intercept import register
from attnscope.interception.sites import Site
from attnscope.interception.split_heads import refused
from attnscope.interception.wrappers import unwrapped
from attnscope.scope.gather_heads import GatherHeads
from attnscope.scope.queries import Queries, parse
from attnscope.scope.reduce import Reducer
from attnscope.scope.scope import Scope
from attnscope.scope.towers import (
    dual_encoder,
    patch_size,
    towers,
    watch_together,
    watch_with_towers,
)
from attnscope.scope.watch_hook import WatchHook
from attnscope.tokens.find_text import tokenizer_of

Gather = Literal["all", "rank0"]
WatchBackend = Literal["auto", "reference", "streaming", "triton", "eager-fallback"]


def watch(
    model: nn.Module,
    layers: int | Iterable[int] | None = None,
    queries: str | Tensor = "all",
    backend: WatchBackend = "auto",
    *,
    classes: Tensor | None = None,
    keep: bool = False,
    max_logit: bool = False,
    seed: int = 0,
    vision: bool = False,
    gather: Gather = "all",
) -> AbstractContextManager[Scope]:
    """Measure where the attention of a model goes, inside a `with` block.

    The model and its outputs stay the same. A forward pass without a KV cache starts a new
    measurement; a pass that continues a cache (every decode step of `generate`) adds to it.

    Args:
        model: A transformers model, or a part of it such as `model.get_encoder()`; also inside a
            wrapper (`PeftModel`, `torch.compile(model)`, `DataParallel`). Or a `vllm.LLM`, which
            gives a `Scope` for each request (docs/vllm.md).
        layers: The layers to measure, in the model's own numbering; default: all.
        queries: The tokens whose attention counts. "all"; "last": the last prompt token;
            "generated": the generated tokens that the model read; "predicts": the last prompt
            token and the generated ones, from which new tokens were predicted; "sample:K": K
            queries spread over the text, which gives estimates with standard errors; or a bool
            tensor [batch, keys], where later tokens do not count.
        backend: "auto", "reference", "streaming", "triton", or "eager-fallback".
        classes: Int [batch, keys], -1 for no class. Needed for `Scope.flow`, which splits
            attention by the class of the query.
        keep: Store queries and keys (as large as a KV cache), so that `Scope.rows`,
            `Scope.weight` and every other per-query result can be computed after the pass.
        max_logit: Compute the largest score of every head, for the measure `max_logit`; `keep=True`
            does too.
        seed: Seed of "sample:K".
        vision: Measure the vision or audio tower of a multimodal model too, all of its layers and
            queries: `scope["vision"]`, `scope["audio"]`. Models that compare a text with a
            picture (CLIP, SigLIP) always have `scope["text"]` and `scope["vision"]`.
        gather: Where the heads of a model with tensor parallelism can be read, numbered as in the
            model: "all" processes, or the first one only, "rank0". All of them must open the block
            and run the same passes.

    Returns:
        A context manager that gives a `Scope`, which can be read during and after the block.

    Raises:
        InputError: An argument has a wrong value, or an encoder–decoder model is measured with
            a query mask or classes.
        ModelError: The model cannot be measured; raised by a forward pass too.
        ScopeError: A forward pass continues a KV cache that was filled before the block.
        ConservationError: The attention weights of a layer do not add up.

    Examples:
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
    if _is_vllm(model):
        _refuse_for_vllm(max_logit=max_logit, vision=vision)
        from attnscope.integrations.vllm.watch import watch_engine

        scopes = watch_engine(model, layers, queries, backend, classes=classes, keep=keep)
        return cast(AbstractContextManager[Scope], scopes)  # scopes by request
    model = unwrapped(model)
    if encoders := dual_encoder(model):
        options: dict[str, Any] = {"keep": keep, "max_logit": max_logit, "seed": seed}
        return watch_together(
            encoders, lambda part: watch(part, layers, queries, backend, gather=gather, **options)
        )
    model_sites = sites.find(model, split=True)
    chosen_sites = sites.select_sites(model_sites, layers)
    parsed = parse(queries, seed)
    _check_options(parsed, keep=keep, max_logit=max_logit)
    _check_gather(model_sites, gather, keep=keep)
    ids, groups = class_ids(classes)
    if parsed.mask is not None or ids is not None:  # of one text
        sites.check_one_stack(model_sites)
    device = sites.device_of(model_sites)
    kernel = backend if backend == "eager-fallback" else kernels.choose(backend, device)
    parts = _empty_parts(model_sites, chosen_sites, kernel, parsed, (ids, groups))
    reducer = Reducer({**parts}, kernel, device, keep=keep, max_logit=max_logit)
    watching = _watching(model_sites, parts, set(chosen_sites), reducer, gather)
    if not vision:
        return watching
    return watch_with_towers(
        watching,
        towers(model_sites),
        lambda part: watch(part, backend=backend, keep=keep, max_logit=max_logit, gather=gather),
    )


def _refuse_for_vllm(**options: bool) -> None:
    for name, value in options.items():
        if value:
            raise InputError(
                f"{name}=True is not supported for a vllm.LLM; measure the Hugging Face model",
                code=f"{name.replace('_', '-')}-in-vllm",
                argument=name,
            )


def _check_options(queries: Queries, *, keep: bool, max_logit: bool) -> None:
    for name, value in {"keep": keep, "max_logit": max_logit}.items():
        if not isinstance(value, bool):
            raise InputError(
                f"{name}={value!r} must be True or False",
                code="not-boolean",
                argument=name,
                value=value,
            )
    if queries.name != "sample":
        return
    if keep:
        raise InputError(
            f"queries={str(queries)!r} gives estimates from a sample of queries; keep=True stores "
            "each query. To store some queries, choose them with a bool tensor [batch, keys]",
            code="keep-with-sample",
            queries=str(queries),
        )
    if max_logit:
        raise InputError(
            f"queries={str(queries)!r} reads a sample of queries, so the largest score of all is "
            "not known; measure max_logit with other queries",
            code="max-logit-with-sample",
            queries=str(queries),
        )


def _check_gather(model_sites: sites.Sites, gather: str, *, keep: bool) -> None:
    if gather not in (known := ("all", "rank0")):
        raise unknown("gather", gather, known)
    if keep and model_sites.split is not None:
        raise refused(model_sites.model, model_sites.split.size, "keep=True")


def _empty_parts(
    model_sites: sites.Sites,
    chosen: Iterable[Site],
    backend: str,
    queries: Queries,
    classes: tuple[Tensor | None, int],
) -> dict[str, Scope]:
    """The scopes of the parts of the model, with the layers to measure."""
    parts: dict[str, Scope] = {}
    for site in chosen:
        if site.part not in parts:
            parts[site.part] = _empty_scope(model_sites, site, backend, queries, classes[1])
            parts[site.part]._classes = classes[0]
        parts[site.part].layers.append(site.layer)
    return parts


def _empty_scope(
    model_sites: sites.Sites, site: Site, backend: str, queries: Queries, groups: int
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
    scope._left_out = model_sites.left_out
    scope._tokenizer = tokenizer_of(model_sites.model)
    scope._patch_size = patch_size(model_sites.model)
    return scope


def _is_vllm(model: object) -> bool:
    """Whether this is a `vllm.LLM`; vLLM is not imported."""
    return any(
        kind.__name__ == "LLM" and kind.__module__.partition(".")[0] == "vllm"
        for kind in type(model).__mro__
    )


def class_ids(classes: Any) -> tuple[Tensor | None, int]:
    """The classes of queries, checked, and their number."""
    if classes is None:
        return None, 0
    ids = torch.as_tensor(classes)
    if ids.ndim != 2 or ids.is_floating_point() or ids.dtype == torch.bool or ids.numel() == 0:
        expected = "an int tensor [batch, keys] with -1 for no class"
        raise wrong_shape("classes", expected, ids)
    return ids.long().cpu(), max(int(ids.max()) + 1, 1)


@contextmanager
def _watching(
    model_sites: sites.Sites,
    parts: dict[str, Scope],
    measured: set[Site],
    reducer: Reducer,
    gather: str,
) -> Iterator[Scope]:
    trackers = {
        stack: GenerationTracker(base, lambda: hook.flush("generate ends"))
        for stack, base in model_sites.base_models.items()
    }
    gathering = None
    if (split := model_sites.split) is not None:
        split.agree("watch", _options(parts, measured, reducer, gather))
        gathering = GatherHeads(split, model_sites, to_first=gather == "rank0")
    hook = WatchHook(measured, reducer, {**trackers}, gathering)
    with (
        tracking_generate(trackers.values()),
        register(model_sites, hook, dense=reducer.backend == "eager-fallback"),
    ):
        try:
            yield _combine(parts, reducer.backend)
        finally:
            hook.finish()


def _options(
    parts: dict[str, Scope], measured: set[Site], reducer: Reducer, gather: str
) -> dict[str, Any]:
    """What all processes that share the heads must have in common."""
    scope = next(iter(parts.values()))
    return {
        "layers": sorted(measured),
        "queries": str(scope._queries),
        "query mask": scope._queries.mask,
        "classes": scope._classes,
        "seed": scope._queries.seed,
        "max_logit": reducer.max_logit,
        "gather": gather,
    }


def _combine(parts: dict[str, Scope], backend: str) -> Scope:
    """The scope of the only text, or a scope that contains the parts."""
    texts = [scope for scope in parts.values() if not scope._cross] or list(parts.values())
    combined = texts[0]
    if len(texts) > 1:
        combined = Scope(layers=[], backend=backend, queries=combined._queries, groups=0)
    for scope in (combined, *parts.values()):
        scope._parts = {**parts}
    return combined
