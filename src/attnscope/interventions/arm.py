"""`arm`: move the activations nearest to zero a little away from it, at random.

After the non-linearity of an MLP, in each sequence by itself and over its real tokens alone, so
that neither the rest of a batch nor padding changes anything. On the model's device throughout,
which is never waited for; what is computed there is `kernels.redistribute`.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attnscope.capture import patches, sites
from attnscope.capture.checkpointing import backward_inside
from attnscope.capture.mlps import (
    Nonlinearity,
    PassInput,
    hook_with_tokens,
    nonlinearities,
    track_inputs,
)
from attnscope.errors import InputError, ModelError
from attnscope.kernels.redistribute import redistribute


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How many activations move, and how far."""

    c: float = 0.25
    """Near zero is |a| below 1.4826 · MAD · c; published: 0.05 to 0.45."""
    p1: float = 85.0
    """Positive ones move by up to this percentile of the activations; published: 70 to 99.5."""
    share: float | None = None
    """The share of entries to move, in place of what c says."""

    def __post_init__(self) -> None:
        for name, low, high in (("c", 0, math.inf), ("p1", 0, 100), ("share", 0, 1)):
            value = getattr(self, name)
            if value is None and name == "share":
                continue
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not low < value <= high or math.isinf(value):
                allowed = "above 0" if math.isinf(high) else f"above 0, up to {high}"
                raise InputError(
                    f"{name}={value!r}: give a number {allowed}",
                    code="value-out-of-range",
                    argument=name,
                    value=value,
                )


PRESETS: dict[str, Settings] = {"gemma": Settings(share=0.25), "other": Settings()}
"""By how the name of a family begins. Gemma's share is a published one; for others ranges of c and
p1 are published, and these are their middles."""


def arm(
    model: nn.Module,
    *,
    layers: int | Iterable[int] | None = 0,
    c: float | None = None,
    p1: float | None = None,
    share: float | None = None,
    seed: int | Sequence[int] = 0,
) -> AbstractContextManager[None]:
    """Redistribute the activations nearest to zero, inside a `with` block.

    This is the Activation Redistribution Module (ARM, arXiv 2510.01032). It changes the
    activations after the non-linearity of an MLP. It works on each sequence alone, over its real
    tokens of one forward pass.

    Let ε = 1.4826 · MAD · c, where MAD is the median distance of abs(a) from its median. The share
    of activations with abs(a) < ε is moved, but at least 2 % and at most 25 %. Those with the
    smallest abs(a) are moved first, with all that equal the last of them. Each keeps its sign.
    An activation of 0 or above gets a uniform amount in [0, p1-th percentile of a]; it stays the
    same where that percentile is not above 0. One below 0 gets a uniform amount in [min a, 0].

    Args:
        model: A transformers model with one stack of layers.
        layers: The layers whose MLPs are changed; default: 0, as published.
        c: Factor of ε; default: that of the model's family in `PRESETS`.
        p1: Percentile that limits the added amount; default: that of the model's family.
        share: Share of activations to move, in place of `c`; default: that of the family.
        seed: Seed of the amounts: one for all sequences, or one for each. A sequence alone and in
            a batch gets the same amounts. Every decode step of `generate` draws new ones.

    Returns:
        A context manager. The model is unchanged after the block.

    Raises:
        InputError: An argument has a wrong value, or the model has an encoder and a decoder.
        ModelError: The model has no MLP that can be changed, or it has packed experts.

    Example:
        >>> import attnscope
        >>> model, tokenizer = attnscope.load("zoo:spatial-phys")
        >>> inputs = tokenizer("The ball is left of the box.", return_tensors="pt")
        >>> before = model(**inputs).logits
        >>> with attnscope.arm(model, seed=1):
        ...     inside = model(**inputs).logits
        >>> bool((inside == before).all()), bool((model(**inputs).logits == before).all())
        (False, True)
    """
    model_sites = sites.find(model)
    if len(model_sites.stacks) > 1:
        raise InputError(
            "this model has an encoder and a decoder; apply arm to model.get_encoder() or "
            "model.get_decoder()",
            code="more-than-one-stack",
            stacks=len(model_sites.stacks),
        )
    for each in [seed] if isinstance(seed, int) else seed:
        if isinstance(each, bool) or not isinstance(each, int) or each < 0:
            raise InputError(
                f"seed={each!r}: give a whole number, 0 or larger",
                code="value-out-of-range",
                argument="seed",
                value=each,
            )
    family = str(getattr(model.config, "model_type", "other"))
    preset = next((s for name, s in PRESETS.items() if family.startswith(name)), PRESETS["other"])
    settings = Settings(
        c=preset.c if c is None else c,
        p1=preset.p1 if p1 is None else p1,
        share=(preset.share if c is None else None) if share is None else share,
    )
    points = nonlinearities(model, model_sites, sites.validate_layers(model_sites, layers))
    flat = [point for some in points.values() for point in some]
    if experts := next((point for point in flat if point.experts is not None), None):
        raise ModelError(
            f"layer {experts.layer} of {type(model).__name__} is a mixture of experts; ARM is "
            "defined for one MLP that processes all tokens: choose other layers",
            code="mixture-of-experts",
            layer=experts.layer,
        )
    return _arming(model_sites.base_model, flat, settings, seed)


@contextmanager
def _arming(
    base: nn.Module, points: list[Nonlinearity], settings: Settings, seed: int | Sequence[int]
) -> Iterator[None]:
    with ExitStack() as undo:
        undo.enter_context(patches.uncompiled())
        text = track_inputs(base, undo)
        modules = [point.module for point in points]
        undo.enter_context(backward_inside([base], modules, changes=True))
        for n, point in enumerate(points):
            hook_with_tokens(point, text, _make_hook(n, point, text, settings, seed), undo)
        yield


def _make_hook(
    n: int, point: Nonlinearity, text: PassInput, settings: Settings, seed: int | Sequence[int]
) -> Any:
    def move(rows: Tensor, which: Tensor) -> Tensor:
        seeds = [seed] * text.batch if isinstance(seed, int) else list(seed)
        if len(seeds) != text.batch:
            raise InputError(
                f"seed has {len(seeds)} numbers and the batch {text.batch} sequences; give one "
                "number, or one for each sequence",
                code="wrong-batch-size",
                argument="seed",
                size=len(seeds),
                batch=text.batch,
            )
        keys = [_key(each, point.layer, n, text.passes) for each in seeds]
        real = text.padding
        return redistribute(
            rows.view(text.batch, text.tokens, -1),
            torch.tensor(keys).to(rows.device, non_blocking=True),
            None if real is None else real.to(rows.device, non_blocking=True),
            **asdict(settings),
        )

    return move


@lru_cache(maxsize=1024)
def _key(*numbers: int) -> int:
    """What a pass of a sequence through one non-linearity draws by."""
    state = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    return int(state[0] >> 1)
