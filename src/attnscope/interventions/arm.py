"""`arm`: move the activations nearest to zero a little away from it, at random.

After the non-linearity of an MLP, in each sequence by itself and over its real tokens alone, so
that neither the rest of a batch nor padding changes anything. On the model's device throughout,
which is never waited for; what is computed there is `redistribute`.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache, partial

import numpy as np
from torch import Tensor, nn

from attnscope.activations.mlps import (
    Nonlinearity,
    TokenHook,
    hook_with_tokens,
    nonlinearities,
)
from attnscope.errors import InputError, ModelError, check_int
from attnscope.interception import sites
from attnscope.interception.intercept import register
from attnscope.interventions.redistribute import redistribute


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How many activations move, and how far."""

    c: float = 0.25
    """Near zero is |a| below 1.4826 · MAD · c; published: 0.05 to 0.45."""
    p1: float = 85.0
    """Positive ones move by up to this percentile of the activations; published: 70 to 99.5."""
    share: float | None = None
    """The share of entries to move, in place of the share that follows from `c`."""

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
            a batch gets the same amounts; a CPU and a GPU draw different ones. Every decode step
            of `generate` draws new amounts.

    Returns:
        A context manager. The model is unchanged after the block.

    Raises:
        InputError: An argument has a wrong value, or the model has an encoder and a decoder.
        ModelError: The model has no MLP that can be changed, or it has packed experts.

    Examples:
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
    sites.check_one_stack(model_sites)
    for each in [seed] if isinstance(seed, int) else seed:
        check_int("seed", each, "the seed of the amounts")
    model = model_sites.model
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
    return _arming(model_sites, flat, settings, seed)


@contextmanager
def _arming(
    model_sites: sites.Sites,
    points: list[Nonlinearity],
    settings: Settings,
    seed: int | Sequence[int],
) -> Iterator[None]:
    hook = _ArmHook(settings, seed)
    with ExitStack() as undo:
        for n, point in enumerate(points):
            hook_with_tokens(point, hook, partial(hook.move, n, point.layer), undo)
        undo.enter_context(register(model_sites, hook))
        yield


class _ArmHook(TokenHook):
    """Moves activations after the non-linearities of MLPs."""

    changes_layers = True

    def __init__(self, settings: Settings, seed: int | Sequence[int]):
        super().__init__()
        self.settings = settings
        self.seed = seed

    def move(self, n: int, layer: int, rows: Tensor, which: Tensor) -> Tensor:
        """The activations of non-linearity `n` after the move."""
        seeds = [self.seed] * self.batch if isinstance(self.seed, int) else list(self.seed)
        if len(seeds) != self.batch:
            raise InputError(
                f"seed has {len(seeds)} numbers and the batch {self.batch} sequences; give one "
                "number, or one for each sequence",
                code="wrong-batch-size",
                argument="seed",
                size=len(seeds),
                batch=self.batch,
            )
        real = self.padding
        return redistribute(
            rows.view(self.batch, self.tokens, -1),
            [_key(each, layer, n, self.passes) for each in seeds],
            None if real is None else real.to(rows.device, non_blocking=True),
            **asdict(self.settings),
        )


@lru_cache(maxsize=1024)
def _key(*numbers: int) -> int:
    """What a pass of a sequence through one non-linearity draws by."""
    state = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    return int(state[0] >> 1)
