"""What would come next if nobody could look at some tokens of a prompt."""

from collections.abc import Callable
from typing import Any

from attnscope.errors import InputError, ModelError
from attnscope.web.measuring import between_layers, likely
from attnscope.web.model_cache import Loaded
from attnscope.web.views import View


def without_sight(
    view: View,
    loaded: Loaded,
    span: tuple[int, int],
    layers: list[int] | None,
    heads: list[int] | None,
    stop: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """The likely next tokens before and after, and how far the distribution moved."""
    import torch

    from attnscope.interventions.effect import next_token

    first, last = span
    model = loaded.model
    if not model.can_generate():
        raise ModelError(f"{loaded.name} predicts no next token")
    if not 0 <= first <= last < view.prompt:
        raise InputError(f"tokens {first} to {last}: the prompt has 0 to {view.prompt - 1}")
    if last + 1 == view.prompt:
        raise InputError("no token comes after this span, so nobody's gaze could be cut")
    ids = torch.tensor([view.ids[: view.prompt]], device=model.device)
    at = torch.arange(view.prompt, device=model.device)[None]
    keys, queries = (at >= first) & (at <= last), at > last  # a token always sees itself
    with between_layers(model, stop):
        moved = next_token(
            model, {"input_ids": ids}, keys=keys, queries=queries, layers=layers, heads=heads
        )
    return {
        "before": likely(moved.before[0], loaded.tokenizer),
        "after": likely(moved.after[0], loaded.tokenizer),
        "kl": float(moved.kl[0]),
    }
