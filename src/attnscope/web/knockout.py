"""The next-token prediction when no later token can attend to a span of the prompt."""

from collections.abc import Callable
from typing import Any

from attnscope.errors import InputError, ModelError
from attnscope.web.measuring import between_layers, next_tokens
from attnscope.web.model_cache import Loaded
from attnscope.web.views import View


def knockout_effect(
    view: View,
    loaded: Loaded,
    span: tuple[int, int],
    layers: list[int] | None,
    heads: list[int] | None,
    stop: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """The most probable next tokens before and after, and the Kullback–Leibler divergence."""
    import torch

    from attnscope.interventions.effect import next_token

    first, last = span
    model = loaded.model
    if not model.can_generate():
        raise ModelError(
            f"{loaded.name} predicts no next token; choose a causal language model",
            code="no-next-token",
            model=loaded.name,
        )
    if not 0 <= first <= last < view.prompt:
        raise InputError(
            f"tokens {first} to {last} are not in the prompt, which has tokens 0 to "
            f"{view.prompt - 1}",
            code="unknown-token",
            first=first,
            last=last,
            tokens=view.prompt,
        )
    if last + 1 == view.prompt:
        raise InputError(
            f"the span {first} to {last} ends with the last token, so a knockout changes nothing; "
            "choose a span with a token after it",
            code="no-later-token",
            first=first,
            last=last,
        )
    ids = torch.tensor([view.ids[: view.prompt]], device=model.device)
    at = torch.arange(view.prompt, device=model.device)[None]
    keys, queries = (at >= first) & (at <= last), at > last  # a token always sees itself
    with between_layers(model, stop):
        effect = next_token(
            model, {"input_ids": ids}, keys=keys, queries=queries, layers=layers, heads=heads
        )
    return {
        "before": next_tokens(effect.before[0], loaded.tokenizer),
        "after": next_tokens(effect.after[0], loaded.tokenizer),
        "kl": float(effect.kl[0]),
    }
