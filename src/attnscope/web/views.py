"""A view: one prompt, measured once, from which every picture of it is sliced.

Sums for each choice of queries, every layer and head; queries and keys where there is room, so that
a token's gaze can be told when it is asked for. Never n × n. The numbers are the library's own.
This module must not know HTTP or HTML.
"""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import InputError, ModelError, unknown
from attnscope.loading.fit import check_fit
from attnscope.look.measure import token_names
from attnscope.prompts.filler import Filler
from attnscope.prompts.insertion import Pair, insert
from attnscope.tokens import (
    DEFAULT,
    Prompt,
    TokenizedPrompt,
    apply_chat_template,
    join,
    pad,
    read_vocabulary,
    tokenize,
)
from attnscope.web.shelf import Loaded

if TYPE_CHECKING:
    from attnscope.capture.scope import Scope

Floats = NDArray[np.float32]

SHADES = ("received", "average", "lift")
"""What tokens can be shaded by."""
HEAD_VALUES = ("entropy", "first_token", "self_mass", "distance")
"""What a head can be mapped by, beside the mass and lift of a class."""
BY_QUERY = ("previous_token", "induction", "renyi2")
"""And by these, where queries and keys are kept."""
SHORT = 2048
"""Up to so many tokens: each of them reads every row again."""
ROOM = 512 << 20
"""Bytes of queries and keys that a view may keep; beyond, a layer's are kept when asked for."""
LIKELY = 8
"""How many likely next tokens are told."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is to be measured."""

    text: str
    chat: bool = False
    system: str | None = None
    filler: Filler | None = None
    position: str = "between"
    answer: int = 0
    """How many tokens the model may answer with."""
    beyond: bool = False
    """Allow more tokens than the model was made for, where it can compute them at all."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """The tokens of what was asked, and where the base's stand among them."""

    tokens: TokenizedPrompt
    pair: Pair | None


@dataclass(kw_only=True, eq=False)
class View:
    """One prompt as one model saw it."""

    asked: Asked
    model: str
    bundled: bool
    tokens: list[str]
    """The prompt's, then the answer's."""
    prompt: int
    """How many of them are the prompt's."""
    classes: list[int]
    """Of each token, among `names`; -1 for none."""
    names: tuple[str, ...]
    layers: list[int]
    received: dict[str, list[Floats]]
    """For every choice of queries, for every layer, [H, K]: from the average query."""
    average: list[Floats]
    even: dict[str, list[Floats]]
    """[K]: what `received` would be under even attention."""
    values: dict[str, dict[str, list[Floats]]]
    """For every choice of queries and every map, for every layer, [H]."""
    twins: list[int] | None
    """Of a variant, for every token: its twin in the prompt without filler, or -1."""
    filler: list[int]
    """The tokens of the filler."""
    likely: list[tuple[str, float]]
    """What would come next, with probabilities."""
    scope: Scope | None
    ids: list[int]
    id: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    by_layer: dict[int, Scope] = field(default_factory=dict)

    @property
    def queries(self) -> list[str]:
        """The choices of queries there are."""
        return list(self.received)

    @property
    def bytes(self) -> int:
        """About how much memory this holds, the kept queries and keys aside."""
        kept = [*self.average, *(a for of in self.received.values() for a in of)]
        return sum(array.nbytes for array in kept)

    def at(self, layer: int) -> int:
        """Where a layer stands in the lists."""
        if layer not in self.layers:
            raise unknown("layer", layer, self.layers)
        return self.layers.index(layer)

    def maps(self) -> list[str]:
        """What heads can be mapped by."""
        return list(self.values[self.queries[0]])

    def shade(self, of: str, queries: str, layer: int | None, head: int | None) -> Floats:
        """[K]: what each token is shaded by; means over layers and heads where none is said."""
        if of not in SHADES:
            raise unknown("shade", of, SHADES)
        if queries not in self.received:
            raise unknown("choice of queries", queries, self.received)
        places = range(len(self.layers)) if layer is None else [self.at(layer)]
        source = self.average if of == "average" else self.received[queries]
        total = np.zeros(source[0].shape[-1], dtype=np.float64)
        even = np.zeros_like(total)
        for n in places:
            total += self._of_head(source[n], head, self.layers[n])
            even += self.even[queries][n]
        if of == "lift":
            total = np.divide(total, even, out=np.full_like(total, np.nan), where=even > 0)
            return total.astype(np.float32)
        return (total / len(places)).astype(np.float32)

    def head_map(self, of: str, queries: str) -> list[Floats]:
        """For every layer [H]: the value of each head."""
        if queries not in self.values:
            raise unknown("choice of queries", queries, self.values)
        if of not in self.values[queries]:
            raise unknown("map", of, self.values[queries])
        return self.values[queries][of]

    def class_bars(self, queries: str, head: int | None) -> list[dict[str, Any]]:
        """The mass of every class that occurs, layer by layer."""
        there = [name for name in self.names if f"mass {name}" in self.maps()]
        return [
            {
                "layer": layer,
                "class": name,
                "mass": float(
                    self._of_head(self.head_map(f"mass {name}", queries)[n], head, layer)
                ),
            }
            for n, layer in enumerate(self.layers)
            for name in there
        ]

    def _of_head(self, values: Floats, head: int | None, layer: int) -> Any:
        if head is None:
            return values.mean(0)
        if not 0 <= head < len(values):
            raise InputError(f"layer {layer} has heads 0 to {len(values) - 1}, not {head}")
        return values[head]


def prepare(loaded: Loaded, asked: Asked) -> Prepared:
    """The tokens; whatever is wrong with the prompt is said here."""
    if not asked.text.strip():
        raise InputError("the prompt is empty: type something for the model to read")
    tokenizer = loaded.tokenizer
    parts = [] if asked.system is None else [("system", asked.system)]
    prompt: Prompt = join([*parts, ("question", asked.text)])
    if asked.chat or asked.system is not None:
        prompt = apply_chat_template(prompt, tokenizer)
    tokens = tokenize(prompt, tokenizer)
    pair = None
    if asked.filler is not None and asked.filler.count:
        pair = insert(tokens, asked.filler, tokenizer, position=asked.position)
        tokens = pair.variant
    check_fit(loaded.model.config, tokens.ids, beyond=asked.beyond)
    return Prepared(tokens=tokens, pair=pair)


def measure(loaded: Loaded, asked: Asked, stop: Callable[[], None] = lambda: None) -> View:
    """Run the model once and keep what every picture needs; `stop` may raise between layers."""
    import torch

    import attnscope

    ready = prepare(loaded, asked)
    model, tokens = loaded.model, ready.tokens
    if asked.answer and not model.can_generate():
        raise ModelError(f"{loaded.name} reads texts and writes none: it cannot answer")
    inputs = {name: value.to(model.device) for name, value in pad([tokens]).inputs.items()}
    keep = _room(model, len(tokens) + asked.answer) <= ROOM
    with ExitStack() as stack, torch.no_grad():
        stack.enter_context(_interrupted(model, stop))
        scopes = {
            "all": stack.enter_context(attnscope.watch(model, keep=keep)),
            "last": stack.enter_context(attnscope.watch(model, queries="last", keep=keep)),
        }
        if asked.answer:
            scopes["predicts"] = stack.enter_context(
                attnscope.watch(model, queries="predicts", keep=keep)
            )
            made = model.generate(
                **inputs,
                max_new_tokens=asked.answer,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
                pad_token_id=_pad(loaded.tokenizer),
            )
            ids, logits = made.sequences[0].tolist(), made.logits[0][0]
        else:
            ids, logits = tokens.ids.tolist(), _last_logits(model, inputs)
    return _view(loaded, asked, ready, scopes, ids, logits, keep)


def _view(
    loaded: Loaded,
    asked: Asked,
    ready: Prepared,
    scopes: dict[str, Scope],
    ids: list[int],
    logits: Any,
    keep: bool,
) -> View:
    everyone, tokens = scopes["all"], ready.tokens
    layers = everyone.layers
    keys = everyone.received(layers[0]).shape[-1]
    table = DEFAULT.table(loaded.tokenizer).classes[np.asarray(ids)]
    shares = DEFAULT.weights(np.asarray(ids[:keys]), loaded.tokenizer)
    said = read_vocabulary(loaded.tokenizer).texts
    names = loaded.tokenizer.convert_ids_to_tokens(ids[len(tokens) :])
    new = [said[id] or name for id, name in zip(ids[len(tokens) :], names, strict=True)]
    twins, filler = None, []
    if ready.pair is not None:
        twins = [-1] * len(tokens)
        alignment = ready.pair.alignment
        for base, variant in zip(alignment.base.tolist(), alignment.variant.tolist(), strict=True):
            twins[variant] = base
        filler = alignment.filler.tolist()
    short = keep and keys <= SHORT
    found = {name: _sums(scope, shares, short) for name, scope in scopes.items()}
    return View(
        asked=asked,
        model=loaded.name,
        bundled=loaded.bundled,
        tokens=[*token_names(tokens, loaded.tokenizer), *new],
        prompt=len(tokens),
        classes=table.tolist(),
        names=DEFAULT.names,
        layers=layers,
        received={name: sums[0] for name, sums in found.items()},
        average=[_numpy(everyone.average(layer)[0]) for layer in layers],
        even={name: sums[1] for name, sums in found.items()},
        values={name: sums[2] for name, sums in found.items()},
        twins=twins,
        filler=filler,
        likely=[] if logits is None else _likely(logits, loaded.tokenizer),
        scope=everyone if keep else None,
        ids=ids,
    )


def _sums(
    scope: Scope, shares: Floats, keep: bool
) -> tuple[list[Floats], list[Floats], dict[str, list[Floats]]]:
    """Received and even from the average query, and the value of every head, layer by layer."""
    import torch

    of_keys = torch.from_numpy(shares).float()[None]
    received, even = [], []
    values: dict[str, list[Floats]] = {}
    for layer in scope.layers:
        count = scope.count(layer)[0].clamp(min=1)
        received.append(_numpy(scope.received(layer)[0] / count))
        even.append(_numpy(scope.uniform(layer)[0] / count))
        for name in (*HEAD_VALUES, *(BY_QUERY if keep else ())):
            values.setdefault(name, []).append(_numpy(scope.measure(name, layer)[0]))
        n = of_keys.shape[2]
        there = of_keys.to(scope.received(layer).device)
        by_class = {"mass": scope.mass(layer, there, n), "lift": scope.lift(layer, there, n)}
        for what, each in by_class.items():
            for c, name in enumerate(DEFAULT.names):
                if shares[:, c].any():
                    values.setdefault(f"{what} {name}", []).append(_numpy(each[0, :, c]))
    return received, even, values


def gaze(
    view: View, loaded: Loaded, token: int, layer: int, stop: Callable[[], None] = lambda: None
) -> tuple[Floats, Floats]:
    """For every head, what a token looks at [H, K], and who looks at it [H, K]: nan where no query
    was counted or the token cannot be seen."""
    import torch

    view.at(layer)
    scope = _kept(view, loaded, layer, stop)
    if not 0 <= token < view.received["all"][0].shape[1]:
        last = view.received["all"][0].shape[1] - 1
        raise InputError(f"token {token} was never read by the model; it read 0 to {last}")
    row = scope.row(layer, token)
    column = torch.full_like(row, torch.nan)
    positions = scope.query_positions(layer)[0]
    ids = torch.full((1, row.shape[1]), -1, dtype=torch.int64)
    ids[0, token] = 0
    looked = scope.rows(layer, ids, 1)[0, :, :, 0]
    column[:, positions] = looked
    column[:, :token] = torch.nan if _causal(column, token) else column[:, :token]
    return _numpy(row), _numpy(column)


def _causal(column: Any, token: int) -> bool:
    """Whether nobody before a token looks at it."""
    return bool((column[:, :token].nan_to_num() == 0).all())


def _kept(view: View, loaded: Loaded, layer: int, stop: Callable[[], None]) -> Scope:
    """The queries and keys of a layer: kept with the view, or by a pass of their own."""
    import torch

    import attnscope

    if view.scope is not None:
        return view.scope
    if layer not in view.by_layer:
        read = view.received["all"][0].shape[1]
        ids = torch.tensor([view.ids[:read]], device=loaded.model.device)
        while len(view.by_layer) >= 2:
            view.by_layer.pop(next(iter(view.by_layer)))
        with (
            torch.no_grad(),
            _interrupted(loaded.model, stop),
            attnscope.watch(loaded.model, layers=layer, keep=True) as scope,
        ):
            _last_logits(loaded.model, {"input_ids": ids})
        view.by_layer[layer] = scope
    return view.by_layer[layer]


def knocked_out(
    view: View,
    loaded: Loaded,
    span: tuple[int, int],
    layers: list[int] | None,
    heads: list[int] | None,
    stop: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """What would come next if nobody could look at some tokens of the prompt, and how far the
    distribution moved (Kullback–Leibler, in nats)."""
    import torch

    import attnscope

    first, last = span
    if not 0 <= first <= last < view.prompt:
        raise InputError(f"tokens {first} to {last}: the prompt has 0 to {view.prompt - 1}")
    model = loaded.model
    ids = torch.tensor([view.ids[: view.prompt]], device=model.device)
    keys = torch.zeros_like(ids, dtype=torch.bool)
    keys[0, first : last + 1] = True
    # A token always sees itself: cut for the queries behind the span.
    queries = torch.zeros_like(keys)
    queries[0, last + 1 :] = True
    if not bool(queries.any()):
        raise InputError("no token comes after this span, so nobody's gaze could be cut")
    with torch.no_grad(), _interrupted(model, stop):
        before = _last_logits(model, {"input_ids": ids})
        with attnscope.knockout(model, keys=keys, queries=queries, layers=layers, heads=heads):
            after = _last_logits(model, {"input_ids": ids})
    if before is None or after is None:
        raise ModelError(f"{loaded.name} predicts no next token")
    p, q = before.double().log_softmax(-1), after.double().log_softmax(-1)
    return {
        "before": _likely(before, loaded.tokenizer),
        "after": _likely(after, loaded.tokenizer),
        "kl": float((p.exp() * (p - q)).sum()),
    }


@contextmanager
def _interrupted(model: Any, stop: Callable[[], None]) -> Iterator[None]:
    """Ask at every layer whether to go on."""
    from torch import nn

    def ask(*_: Any) -> None:
        stop()

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


def _last_logits(model: Any, inputs: dict[str, Any]) -> Any:
    """[V] of the last token; None for a model that predicts none."""
    known = inspect.signature(model.forward).parameters
    last = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
    logits = getattr(model(**inputs, **last), "logits", None)
    return logits[0, -1] if logits is not None and model.can_generate() else None


def _likely(logits: Any, tokenizer: Any) -> list[tuple[str, float]]:
    chances, ids = logits.double().softmax(-1).topk(LIKELY)
    said = read_vocabulary(tokenizer).texts
    names = tokenizer.convert_ids_to_tokens(ids.tolist())
    texts = [
        (said[id] if id < len(said) else "") or name or str(id)
        for id, name in zip(ids.tolist(), names, strict=True)
    ]
    return list(zip(texts, chances.tolist(), strict=True))


def _pad(tokenizer: Any) -> int | None:
    found = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return found if isinstance(found, int) else None


def _numpy(values: Any) -> Floats:
    array: Floats = values.detach().float().cpu().numpy()
    return array
