"""Measuring a view: the model runs once, and what every picture needs is kept.

Sums for each choice of queries, every layer and head; queries and keys where there is room, so that
a token's gaze can be told when it is asked for. Never n × n. The layers of a long text can be
looked at as soon as each is measured. The numbers are the library's own. This module must not know
HTTP or HTML.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscope.errors import InputError, ModelError
from attnscope.loading.compatibility import check_fit
from attnscope.look.text_measures import token_names
from attnscope.prompts.insertion import Pair, insert
from attnscope.tokens import (
    DEFAULT,
    TokenizedPrompt,
    as_question,
    pad,
    read_vocabulary,
    tokenize,
)
from attnscope.web.api_schemas import ViewRequest
from attnscope.web.model_cache import Loaded
from attnscope.web.views import Float32s, View

if TYPE_CHECKING:
    from attnscope.capture.scope import Scope

HEAD_VALUES = ("entropy", "first_token", "self_mass", "distance")
"""What a head can be mapped by, beside the mass and lift of a class."""
BY_QUERY = ("previous_token", "induction", "renyi2")
"""And by these, where queries and keys are kept."""
SHORT = 2048
"""Up to so many tokens: each of them reads every row again. Longer texts come layer by layer."""
ROOM = 512 << 20
"""Bytes of queries and keys that a view may keep; beyond, a layer's are kept when asked for."""
LIKELY = 8
"""How many likely next tokens are told."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """The tokens of what was asked, and where the base's stand among them."""

    tokens: TokenizedPrompt
    pair: Pair | None


class Watcher:
    """Whoever waits for a view: asked between layers, and told of every layer."""

    def check(self) -> None:
        """Raises where the work was called off."""

    def measured(self, view: View) -> None:
        """Another layer of the view can be looked at."""


def prepare(loaded: Loaded, asked: ViewRequest) -> Prepared:
    """The tokens; whatever is wrong with the prompt is said here."""
    if not asked.text.strip():
        raise InputError("the prompt is empty: type something for the model to read")
    tokenizer, fill = loaded.tokenizer, asked.filler
    put = as_question(asked.text, tokenizer, system=asked.system, chat=asked.chat)
    tokens = tokenize(put, tokenizer)
    pair = None
    if fill is not None and fill.count:
        pair = insert(tokens, fill.filler, tokenizer, position=fill.position, by=fill.by)
        tokens = pair.variant
    check_fit(loaded.model.config, tokens.ids, beyond=asked.beyond)
    return Prepared(tokens=tokens, pair=pair)


def measure(loaded: Loaded, asked: ViewRequest, watcher: Watcher | None = None) -> View:
    """Run the model once and keep what every picture needs."""
    import torch

    import attnscope
    from attnscope.experiment.completion import greedily

    ready, watcher = prepare(loaded, asked), watcher or Watcher()
    model, tokens = loaded.model, ready.tokens
    if asked.answer and not model.can_generate():
        raise ModelError(f"{loaded.name} reads texts and writes none: it cannot answer")
    inputs = {name: value.to(model.device) for name, value in pad([tokens]).inputs.items()}
    keep = _room(model, len(tokens) + asked.answer) <= ROOM
    view = _begun(loaded, asked, ready)
    with ExitStack() as stack, torch.no_grad():
        chosen = ("all", "last", *(("predicts",) if asked.answer else ()))
        scopes = {
            queries: stack.enter_context(attnscope.watch(model, queries=queries, keep=keep))
            for queries in chosen
        }
        view.deep = len(scopes["all"].layers)
        early = len(tokens) > SHORT and not asked.answer

        def between() -> None:
            watcher.check()
            if early and _add_layers(view, scopes, loaded, keep=False):
                watcher.measured(view)

        stack.enter_context(between_layers(model, between))
        if asked.answer:
            how = greedily(model, loaded.tokenizer, asked.answer)
            how.return_dict_in_generate = how.output_logits = True
            made = model.generate(**inputs, generation_config=how)
            ids, logits = made.sequences[0].tolist(), made.logits[0][0]
            _answered(view, loaded, ids)
        else:
            logits = last_logits(model, inputs)
    keep_short = keep and len(view.ids) <= SHORT
    _add_layers(view, scopes, loaded, keep=keep_short)
    view.likely = [] if logits is None else likely(logits, loaded.tokenizer)
    view.scope = scopes["all"] if keep else None
    return view


def _begun(loaded: Loaded, asked: ViewRequest, ready: Prepared) -> View:
    """A view of which nothing is measured yet."""
    tokens, twins, filler = ready.tokens, None, []
    if ready.pair is not None:
        twins = [-1] * len(tokens)
        alignment = ready.pair.alignment
        for base, variant in zip(alignment.base.tolist(), alignment.variant.tolist(), strict=True):
            twins[variant] = base
        filler = alignment.filler.tolist()
    return View(
        asked=asked,
        model=loaded.name,
        bundled=loaded.bundled,
        tokens=list(token_names(tokens, loaded.tokenizer)),
        prompt=len(tokens),
        ids=tokens.ids.tolist(),
        classes=DEFAULT.table(loaded.tokenizer).classes[tokens.ids].tolist(),
        names=DEFAULT.names,
        twins=twins,
        filler=filler,
        deep=0,
    )


def _answered(view: View, loaded: Loaded, ids: list[int]) -> None:
    """Put what the model wrote behind the prompt."""
    new = ids[view.prompt :]
    said = read_vocabulary(loaded.tokenizer).texts
    names = loaded.tokenizer.convert_ids_to_tokens(new)
    view.tokens += [said[id] or name for id, name in zip(new, names, strict=True)]
    view.classes += DEFAULT.table(loaded.tokenizer).classes[np.asarray(new)].tolist()
    view.ids = ids


def _add_layers(view: View, scopes: dict[str, Scope], loaded: Loaded, *, keep: bool) -> int:
    """Add the layers that can be read by now; how many they were."""
    everyone, before = scopes["all"], len(view.layers)
    common = [n for n in everyone.readable if all(n in scope.readable for scope in scopes.values())]
    for layer in common[before:]:
        average = everyone.average(layer)[0]
        shares = DEFAULT.weights(np.asarray(view.ids[: average.shape[-1]]), loaded.tokenizer)
        for queries, scope in scopes.items():
            _add(view, queries, scope, layer, shares, keep)
        view.average.append(_numpy(average))
        view.uniform_average.append(everyone.sums(layer).uniform[0, 0].astype(np.float32))
        view.layers.append(layer)  # last: whoever looks meanwhile finds all of it
    return len(view.layers) - before


def _add(view: View, queries: str, scope: Scope, layer: int, shares: Float32s, keep: bool) -> None:
    """Add what keys of one layer receive, measured and under uniform attention, and its values."""
    import torch

    count = scope.count(layer)[0].clamp(min=1)
    received = scope.received(layer)[0]
    view.received.setdefault(queries, []).append(_numpy(received / count))
    view.uniform.setdefault(queries, []).append(_numpy(scope.uniform(layer)[0] / count))
    values = view.values.setdefault(queries, {})
    for name in (*HEAD_VALUES, *(BY_QUERY if keep else ())):
        values.setdefault(name, []).append(_numpy(scope.measure(name, layer)[0]))
    there = torch.from_numpy(shares).float()[None].to(received.device)
    n = there.shape[2]
    by_class = {"mass": scope.mass(layer, there, n), "lift": scope.lift(layer, there, n)}
    for what, each in by_class.items():
        for c, name in enumerate(DEFAULT.names):
            if shares[:, c].any():
                values.setdefault(f"{what} {name}", []).append(_numpy(each[0, :, c]))


@contextmanager
def between_layers(model: Any, doing: Callable[[], None]) -> Iterator[None]:
    """Do something before every layer of a forward pass; it may raise."""
    from torch import nn

    def ask(*_: Any) -> None:
        doing()

    layers = [m for many in model.modules() if isinstance(many, nn.ModuleList) for m in many]
    handles = [layer.register_forward_pre_hook(ask) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _room(model: Any, tokens: int) -> int:
    """Bytes that the queries and keys of all layers take."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return int(config.num_hidden_layers * (heads + groups) * size * tokens * 4)


def last_logits(model: Any, inputs: dict[str, Any]) -> Any:
    """[V] of the last token; None for a model that predicts none."""
    known = inspect.signature(model.forward).parameters
    last = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
    logits = getattr(model(**inputs, **last), "logits", None)
    return logits[0, -1] if logits is not None and model.can_generate() else None


def likely(logits: Any, tokenizer: Any) -> list[tuple[str, float]]:
    """The tokens that are most probable next, with their probabilities."""
    chances, ids = logits.double().softmax(-1).topk(LIKELY)
    said = read_vocabulary(tokenizer).texts
    names = tokenizer.convert_ids_to_tokens(ids.tolist())
    texts = [
        (said[id] if id < len(said) else "") or name or str(id)
        for id, name in zip(ids.tolist(), names, strict=True)
    ]
    return list(zip(texts, chances.tolist(), strict=True))


def _numpy(values: Any) -> Float32s:
    array: Float32s = values.detach().float().cpu().numpy()
    return array
