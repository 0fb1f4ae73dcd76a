"""`watch`: measure a model's attention while it runs, and leave the model as it was.

The output comes from torch's own fused attention; the statistics from a second, streamed pass
over queries and keys.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

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
from attnscope.errors import InputError


def watch(
    model: nn.Module,
    layers: Any = None,
    queries: Any = "all",
    backend: str = "auto",
    *,
    classes: Any = None,
    top: int = 0,
    keep: bool = False,
    seed: int = 0,
    hold: float = 1 / 256,
) -> AbstractContextManager[Scope]:
    """Measure where the attention of a transformers model goes, inside a `with` block.

        with attnscope.watch(model) as scope:
            model(**inputs)                  # or model.generate(**inputs)
        scope.received(layer)

    layers    which layers to measure, in the model's own numbering; all of them by default
    queries   which tokens' attention counts: "all", "last" (prompt token), "generated" (and
              fed back), "predicts" (what a new token was predicted from: the last prompt token
              and the generated ones), "sample:K" (K queries spread over the text: estimates,
              with standard errors), or a bool tensor [batch, keys], used as far as it goes
    backend   "auto", or "reference", "streaming", "triton", "eager-fallback"
    classes   int [batch, keys], -1 for none: also tell attention *from* these classes, for `flow`
    top       also keep, for each counted query, this many keys it looks at most
    keep      also keep queries and keys, as large as a key/value cache, so that `rows`, `weight`
              and all else that is told query by query can be asked for afterwards
    seed      of "sample:K"
    hold      the share of free memory that short calls may hold until they are measured together
              (the layers of a pass, the steps of a reply); 0 measures each at once
    """
    found = sites.find(model)
    places = sites.select_sites(found, layers)
    chosen = parse(queries, seed)
    _check(top, keep, hold)
    if keep and chosen.name == "sample":
        raise InputError(
            f"queries={queries!r} estimates from some queries, and keep=True is for what each of "
            "them looks at; choose them yourself: a bool tensor [batch, keys]"
        )
    ids, groups = _classes(classes)
    if len(found.stacks) > 1 and (chosen.mask is not None or ids is not None):
        raise InputError(
            f"this model has {len(found.stacks)} texts, an encoder's and a decoder's, and a query "
            "mask or classes are for one of them; watch them side by side: with "
            "watch(model.get_encoder(), …) as encoder, watch(model.get_decoder(), …) as decoder"
        )
    device = sites.device_of(found)
    if backend != "eager-fallback":
        backend = kernels.choose(backend, device)
    parts: dict[str, Scope] = {}
    for site in places:
        part = parts.get(site.part)
        if part is None:
            part = parts[site.part] = _empty(site, backend, chosen, ids, groups)
            part._left_out = found.left_out
        part.layers.append(site.layer)
    recorder = WatchHook(found, set(places), parts, backend, device, top=top, keep=keep, hold=hold)
    return _watching(recorder, found)


def _empty(site: Site, backend: str, queries: Queries, ids: Tensor | None, groups: int) -> Scope:
    """The scope of a site's part, without layers yet."""
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


def _check(top: Any, keep: Any, hold: Any) -> None:
    if isinstance(top, bool) or not isinstance(top, int) or top < 0:
        raise InputError(f"top={top!r}: the number of keys to keep is a whole number from 0")
    if isinstance(hold, bool) or not isinstance(hold, int | float) or not 0 <= hold <= 1:
        raise InputError(f"hold={hold!r}: a share of free memory is a number from 0 to 1")
    if not isinstance(keep, bool):
        raise InputError(f"keep={keep!r}: whether to keep queries and keys is True or False")


def _classes(classes: Any) -> tuple[Tensor | None, int]:
    if classes is None:
        return None, 0
    ids = torch.as_tensor(classes)
    if ids.ndim != 2 or ids.is_floating_point() or ids.dtype == torch.bool or ids.numel() == 0:
        raise InputError(
            "classes is an int tensor [batch, keys] with -1 for no class; got "
            f"{str(ids.dtype).removeprefix('torch.')} {list(ids.shape)}"
        )
    return ids.long().cpu(), max(int(ids.max()) + 1, 1)


@contextmanager
def _watching(recorder: WatchHook, found: sites.Sites) -> Iterator[Scope]:
    parts, backend = recorder.parts, recorder.reducer.backend
    with (
        tracking_generate(recorder.generations.values()),
        backward_inside(found.base_models.values(), (), changes=False),
        hooks.register(found, observer=recorder, dense=backend == "eager-fallback"),
    ):
        try:
            yield _whole(parts, backend)
        finally:
            recorder.finish()


def _whole(parts: dict[str, Scope], backend: str) -> Scope:
    """The scope of the only text, or one that has nothing but parts."""
    texts = [scope for scope in parts.values() if not scope._cross] or list(parts.values())
    whole = texts[0]
    if len(texts) > 1:
        whole = Scope(layers=[], backend=backend, queries=whole._queries, groups=0)
    for scope in (whole, *parts.values()):
        scope._parts = parts
    return whole
