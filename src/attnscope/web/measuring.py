"""Measure a view: run the model once and keep the values that the page shows.

A view keeps sums for each choice of queries, layer and head, never a matrix of n × n. It also keeps
queries and keys, if they are small enough, for the attention rows of single tokens. The layers of
a long text are available one by one while the model runs.
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
    from attnscope.scope.scope import Scope

HEAD_VALUES = ("entropy", "first_token", "self_mass", "distance")
"""The measures of the map of heads, beside the mass and lift of every class."""
BY_QUERY = ("previous_token", "induction", "renyi2")
"""More measures of the map; they need the queries and keys."""
SHORT = 2048
"""The most tokens for `BY_QUERY`, which read every row again. Longer texts come layer by layer."""
KEPT_BYTES = 512 << 20
"""The most bytes of queries and keys that a view keeps."""
NEXT_TOKENS = 8
"""How many of the most probable next tokens a view has."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """The tokens of a request, and their alignment with the prompt without filler."""

    tokens: TokenizedPrompt
    pair: Pair | None


class Watcher:
    """Callbacks of a measurement: before every layer, and after every new layer of the view."""

    def check(self) -> None:
        """Raise an error to stop the measurement."""

    def measured(self, view: View) -> None:
        """The view has a new layer."""


def prepare(loaded: Loaded, request: ViewRequest) -> Prepared:
    """Tokenize the prompt of a request; raises InputError for a prompt that cannot be measured."""
    if not request.text.strip():
        raise InputError("the prompt is empty; type a text", code="empty-prompt")
    tokenizer, fill = loaded.tokenizer, request.filler
    prompt = as_question(request.text, tokenizer, system=request.system, chat=request.chat)
    tokens = tokenize(prompt, tokenizer)
    pair = None
    if fill is not None and fill.count:
        pair = insert(tokens, fill.filler, tokenizer, position=fill.position, by=fill.by)
        tokens = pair.variant
    check_fit(loaded.model.config, tokens.ids, beyond=request.beyond_positions)
    return Prepared(tokens=tokens, pair=pair)


def measure(loaded: Loaded, request: ViewRequest, watcher: Watcher | None = None) -> View:
    """Run the model once and return a view with all layers."""
    import torch

    import attnscope
    from attnscope.experiment.completion import greedy_config

    ready, watcher = prepare(loaded, request), watcher or Watcher()
    model, tokens = loaded.model, ready.tokens
    if request.completion and not model.can_generate():
        raise ModelError(
            f"{loaded.name} cannot generate text; set the completion length to 0",
            code="cannot-generate",
            model=loaded.name,
        )
    inputs = {name: value.to(model.device) for name, value in pad([tokens]).inputs.items()}
    keep = _kept_bytes(model, len(tokens) + request.completion) <= KEPT_BYTES
    view = _empty_view(loaded, request, ready)
    with ExitStack() as stack, torch.no_grad():
        chosen = ("all", "last", *(("predicts",) if request.completion else ()))
        scopes = {
            queries: stack.enter_context(attnscope.watch(model, queries=queries, keep=keep))
            for queries in chosen
        }
        view.layer_count = len(scopes["all"].layers)
        early = len(tokens) > SHORT and not request.completion

        def between() -> None:
            watcher.check()
            if early and _add_layers(view, scopes, loaded, keep=False):
                watcher.measured(view)

        stack.enter_context(between_layers(model, between))
        if request.completion:
            settings = greedy_config(model, loaded.tokenizer, request.completion)
            settings.return_dict_in_generate = settings.output_logits = True
            generated = model.generate(**inputs, generation_config=settings)
            ids, logits = generated.sequences[0].tolist(), generated.logits[0][0]
            _add_completion(view, loaded, ids)
        else:
            logits = last_logits(model, inputs)
    keep_short = keep and len(view.ids) <= SHORT
    _add_layers(view, scopes, loaded, keep=keep_short)
    view.next_tokens = [] if logits is None else next_tokens(logits, loaded.tokenizer)
    view.scope = scopes["all"] if keep else None
    return view


def _empty_view(loaded: Loaded, request: ViewRequest, ready: Prepared) -> View:
    """A view without layers."""
    tokens, aligned, filler = ready.tokens, None, []
    if ready.pair is not None:
        aligned = [-1] * len(tokens)
        alignment = ready.pair.alignment
        for base, variant in zip(alignment.base.tolist(), alignment.variant.tolist(), strict=True):
            aligned[variant] = base
        filler = alignment.filler.tolist()
    return View(
        request=request,
        model=loaded.name,
        bundled=loaded.bundled,
        tokens=list(token_names(tokens, loaded.tokenizer)),
        prompt=len(tokens),
        ids=tokens.ids.tolist(),
        classes=DEFAULT.table(loaded.tokenizer).classes[tokens.ids].tolist(),
        names=DEFAULT.names,
        aligned_positions=aligned,
        filler=filler,
        layer_count=0,
    )


def _add_completion(view: View, loaded: Loaded, ids: list[int]) -> None:
    """Append the generated tokens to the view."""
    new = ids[view.prompt :]
    texts = read_vocabulary(loaded.tokenizer).texts
    names = loaded.tokenizer.convert_ids_to_tokens(new)
    view.tokens += [texts[id] or name for id, name in zip(new, names, strict=True)]
    view.classes += DEFAULT.table(loaded.tokenizer).classes[np.asarray(new)].tolist()
    view.ids = ids


def _add_layers(view: View, scopes: dict[str, Scope], loaded: Loaded, *, keep: bool) -> int:
    """Add the layers that are readable now and return their number."""
    total, before = scopes["all"], len(view.layers)
    common = [n for n in total.readable if all(n in scope.readable for scope in scopes.values())]
    for layer in common[before:]:
        average = total.average(layer)[0]
        shares = DEFAULT.weights(np.asarray(view.ids[: average.shape[-1]]), loaded.tokenizer)
        for queries, scope in scopes.items():
            _add(view, queries, scope, layer, shares, keep)
        view.average.append(_numpy(average))
        view.uniform_average.append(total.sums(layer).uniform[0, 0].astype(np.float32))
        view.layers.append(layer)  # last, so that other threads read complete layers only
    return len(view.layers) - before


def _add(view: View, queries: str, scope: Scope, layer: int, shares: Float32s, keep: bool) -> None:
    """Add one layer: received and uniform mass per query, and the measures of every head."""
    import torch

    count = scope.count(layer)[0].clamp(min=1)
    received = scope.received(layer)[0]
    view.received.setdefault(queries, []).append(_numpy(received / count))
    view.uniform.setdefault(queries, []).append(_numpy(scope.uniform(layer)[0] / count))
    values = view.values.setdefault(queries, {})
    for name in (*HEAD_VALUES, *(BY_QUERY if keep else ())):
        values.setdefault(name, []).append(_numpy(scope.measure(name, layer)[0]))
    weights = torch.from_numpy(shares).float()[None].to(received.device)
    n = weights.shape[2]
    by_class = {"mass": scope.mass(layer, weights, n), "lift": scope.lift(layer, weights, n)}
    for measure_name, each in by_class.items():
        for c, name in enumerate(DEFAULT.names):
            if shares[:, c].any():
                values.setdefault(f"{measure_name} {name}", []).append(_numpy(each[0, :, c]))


@contextmanager
def between_layers(model: Any, callback: Callable[[], None]) -> Iterator[None]:
    """Call a function before every layer of a forward pass; it may raise."""
    from torch import nn

    def hook(*_: Any) -> None:
        callback()

    layers = [m for many in model.modules() if isinstance(many, nn.ModuleList) for m in many]
    handles = [layer.register_forward_pre_hook(hook) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _kept_bytes(model: Any, tokens: int) -> int:
    """The bytes of the queries and keys of all layers."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return int(config.num_hidden_layers * (heads + groups) * size * tokens * 4)


def last_logits(model: Any, inputs: dict[str, Any]) -> Any:
    """[V] logits of the last token; None for a model that predicts no next token."""
    parameters = inspect.signature(model.forward).parameters
    last = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
    logits = getattr(model(**inputs, **last), "logits", None)
    return logits[0, -1] if logits is not None and model.can_generate() else None


def next_tokens(logits: Any, tokenizer: Any) -> list[tuple[str, float]]:
    """The most probable next tokens with their probabilities."""
    probabilities, ids = logits.double().softmax(-1).topk(NEXT_TOKENS)
    known = read_vocabulary(tokenizer).texts
    names = tokenizer.convert_ids_to_tokens(ids.tolist())
    texts = [
        (known[id] if id < len(known) else "") or name or str(id)
        for id, name in zip(ids.tolist(), names, strict=True)
    ]
    return list(zip(texts, probabilities.tolist(), strict=True))


def _numpy(values: Any) -> Float32s:
    array: Float32s = values.detach().float().cpu().numpy()
    return array
