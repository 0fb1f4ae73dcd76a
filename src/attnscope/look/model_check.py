"""Check a model in one short text: sums, rows against eager attention, and a knockout.

`attnscope doctor MODEL` prints the result. Every check uses the model as it is, with its own
weights and dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from attnscope.errors import AttnscopeError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from attnscope.scope.scope import Scope

TEXT = (
    "The captain wrote in the log that the harbour was empty. The captain wrote in the log that "
    "the harbour was empty, and then # # 3 ships came."
)
"""It has repeated words, digits and signs."""
TOLERANCE = {"torch.float32": 1e-4}
OTHER_TOLERANCE = 0.03
"""Allowed difference between a row and eager attention, by dtype. Two kernels of torch differ by
about as much as the rounding of the dtype."""


class Check(NamedTuple):
    """The outcome of one check."""

    name: str
    passed: bool | None
    """None: the check does not apply to this model."""
    detail: str


def check_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[Check]:
    """Run all checks on a loaded model."""
    from attnscope import watch

    inputs = dict(tokenizer(TEXT, return_tensors="pt").to(model.device))
    inputs.pop("token_type_ids", None)
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"][:, :8]
    try:
        with watch(model, keep=True) as scope:
            plain = _output(model, inputs)
    except AttnscopeError as error:
        return [Check("watch", False, str(error))]
    scopes = {part: scope[part] for part in scope.parts if part != "cross"}
    return [
        _checked("sums", lambda: _sums(scopes)),
        _checked("eager attention", lambda: _rows(model, inputs, scopes)),
        _checked("knockout", lambda: _knockout(model, inputs, plain)),
        Check("backend", True, "; ".join(f"{part}: {_layers(scopes[part])}" for part in scopes)),
    ]


def _checked(name: str, check: Callable[[], Check]) -> Check:
    """The outcome of a check; an error of attnscope is a failure."""
    try:
        return check()
    except AttnscopeError as error:
        return Check(name, False, str(error))


def _layers(scope: Scope) -> str:
    return f"{len(scope.layers)} layers, {scope.backend}"


def _output(model: Any, inputs: Mapping[str, Any], **options: Any) -> Any:
    """Logits, or the last hidden state of a model without a head; all outputs with options."""
    import torch

    with torch.no_grad():
        output = model(**inputs, **options)
    if options:
        return output
    return next(output[name] for name in ("logits", "last_hidden_state") if name in output)


def _sums(scopes: Mapping[str, Scope]) -> Check:
    """Reading a layer verifies its sums; the largest deviation is printed."""
    largest = 0.0
    for scope in scopes.values():
        for layer in scope.layers:
            total = scope.received(layer).sum(-1) / scope.count(layer)[:, None]
            sunk = scope.learned_sink_mass(layer)
            largest = max(largest, float((total + sunk - 1).abs().max()))
    return Check(
        "sums", True, f"attention adds up to 1 per query within {largest:.1g}, in every head"
    )


def _rows(model: Any, inputs: Mapping[str, Any], scopes: Mapping[str, Scope]) -> Check:
    """The attention row of the last query of every layer, against the model's eager attention."""
    with _eager(model) as refused:
        output = None if refused else _output(model, inputs, output_attentions=True)
    if output is None:
        return Check("eager attention", None, "the model has no eager attention to compare with")
    largest, compared = 0.0, 0
    for part, scope in scopes.items():
        named = output.get(f"{part}_attentions") or output.get("attentions") or ()
        dense = [weights for weights in named if weights is not None]
        if len(dense) != len(scope.layers):
            continue
        for layer, weights in zip(scope.layers, dense, strict=True):
            row = scope.row(layer, query=weights.shape[-2] - 1)
            expected = weights[0, :, -1, : row.shape[-1]].float()
            largest = max(largest, float((row - expected).abs().max()))
            compared += 1
    if not compared:
        return Check("eager attention", None, "the model does not return its attention weights")
    allowed = TOLERANCE.get(str(model.dtype), OTHER_TOLERANCE)
    return Check(
        "eager attention",
        largest <= allowed,
        f"rows of {compared} layers differ by at most {largest:.1g} from the model's own eager "
        f"attention (allowed: {allowed:g})",
    )


@contextmanager
def _eager(model: Any) -> Iterator[bool]:
    """Eager attention while the block runs; yields whether the model refuses it."""
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation("eager")
        refused = False
    except (ValueError, NotImplementedError):
        refused = True
    try:
        yield refused
    finally:
        if not refused:
            model.set_attn_implementation(before)


def _knockout(model: Any, inputs: Mapping[str, Any], plain: Any) -> Check:
    """Blocking the attention to three tokens has to change the output."""
    from attnscope import knockout

    if model.config.is_encoder_decoder:
        return Check("knockout", None, "not checked for models with an encoder and a decoder")
    with knockout(model, keys=[3, 4, 5]):
        blocked = _output(model, inputs)
    change = float((blocked - plain)[:, 6:].abs().max())
    return Check("knockout", change > 0, f"blocking three tokens changes outputs by {change:.2g}")
