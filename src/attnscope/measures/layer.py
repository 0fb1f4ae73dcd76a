"""The input of a measure: one layer of a batch for one choice of queries.

Shapes: B sequences, H query heads, G key/value heads, K keys (positions), C classes. Tensors are on
the device of the layer.

Packages that never load torch import the declarations of measures. So this package does not import
torch at module level: functions use methods of tensors, or import torch when called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import InputError
from attnscope.vision.image_tokens import ImageTokens
from attnscope.vision.views import Box

if TYPE_CHECKING:
    from torch import Tensor as Tensor  # measures import it from here
else:
    Tensor = Any

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Target = tuple[ImageTokens, Box]
"""The tokens of a picture, and the part of it that the question is about."""


def or_nan(count: Tensor) -> Tensor:
    """A denominator: nan in place of 0."""
    return count.where(count > 0, np.nan)


def mean_over_queries(total: Tensor, count: Tensor) -> Tensor:
    """Means [B, H] of sums over queries; nan for a sequence without queries."""
    return (total / or_nan(count)[:, None]).float()


@dataclass(eq=False, kw_only=True)
class Sums:
    """Sums over the counted queries of one layer, from the kernels."""

    count: Tensor
    """float64 [B]: the number of queries, |Q|."""
    received: Tensor
    """float32 [B, H, K]"""
    received_later: Tensor
    """float32 [B, H, K]: received from queries after the key."""
    entropy: Tensor
    """float32 [B, H]"""
    self_mass: Tensor
    """float32 [B, H]: attention of queries to their own token."""
    first_token: Tensor
    """int64 [B]: position of the first real token."""
    visibility: Callable[[str], Tensor]
    """Numbers that depend on visibility alone, by name: the fields of
    `scope.query_selection.VisibilityCounts`."""
    sink: Tensor | None = None
    """float64 [B, H]: attention of learned sinks; None if the layer has none."""
    sink_position: Tensor | None = None
    """float64 [B, H]: the same, times the position of the query."""
    flow: Tensor | None = None
    """float32 [B, H, groups, K]: received from each group of queries."""
    max_logit: Tensor | None = None
    """float32 [B, H]: the largest score, -inf without one; None if it was not computed."""
    error: Tensor | None = None
    """float32 [B, H, K]: standard error of `received`; None if all queries were counted."""
    entropy_error: Tensor | None = None
    """float32 [B, H]: standard error of `entropy`; None if all queries were counted."""
    group_key: Any = None
    """Layers of a pass with equal keys share `count`, `first_token` and `visibility`; None if not
    known."""

    @cached_property
    def average(self) -> Tensor:
        """float32 [B, H, K]: average attention weight; nan if no later query sees the key."""
        could = self.visibility("eligible_later").float()[:, None]
        return (self.received_later / could.clamp(min=1)).where(could > 0, np.nan)

    @cached_property
    def averages(self) -> Array:
        """`average` in float64, for measures that compare token by token."""
        return numpy_of(self.average)

    @cached_property
    def uniform(self) -> Array:
        """float64 [B, 1, K]: `average` under uniform attention over the visible keys.

        Equal for all heads, because it depends on visibility alone.
        """
        could = numpy_of(self.visibility("eligible_later"))
        total = numpy_of(self.visibility("uniform_later"))
        return np.where(could > 0, total / np.maximum(could, 1), np.nan)[:, None]

    def select_heads(self, heads: Sequence[int]) -> Sums:
        """The sums of these heads."""
        if list(heads) == list(range(self.received.shape[1])):
            return self
        picked = list(heads)
        return replace(self, **{name: sums[:, picked] for name, sums in self._by_head().items()})

    def empty_copy(self) -> Sums:
        """Sums of the same shape over no queries; every mean of them is nan."""
        nothing = {name: sums.new_zeros(sums.shape) for name, sums in self._by_head().items()}

        def visibility(name: str) -> Tensor:
            real = self.visibility(name)
            return real.new_zeros(real.shape)

        return replace(
            self, count=self.count.new_zeros(len(self.count)), visibility=visibility, **nothing
        )

    def _by_head(self) -> dict[str, Any]:
        always = ("received", "received_later", "entropy", "self_mass")
        names = (*always, "sink", "sink_position", "flow", "max_logit", "error", "entropy_error")
        return {name: sums for name in names if (sums := getattr(self, name)) is not None}


@dataclass(eq=False, kw_only=True)
class PerQuery:
    """The attention rows of Q counted queries, if the pass kept them; nan where there is no
    query."""

    scope: Any
    """The `Scope` that kept them."""
    layer: int
    positions: Tensor
    """int64 [B, Q]: positions of the queries; -1 for none."""
    heads: Sequence[int] | None = None
    """The heads to read; None: all."""
    empty: bool = False
    """Whether no query was selected: then every number is nan."""

    def mass(self, classes: Tensor, n: int) -> Tensor:
        """[B, H, Q, n]: the attention to each class; ids int [B, K] or shares [B, K, n]."""
        return self._select(self.scope.rows(self.layer, classes, n))

    def weight(self, key_of: Tensor) -> Tensor:
        """[B, H, Q]: the weight on one key of each query, int64 [B, Q]; -1 for none."""
        return self._select(self.scope.weight(self.layer, key_of))

    def entropy(self, order: int = 1) -> Tensor:
        """[B, H, Q]: the entropy of order 1 (Shannon) or 2 (Rényi), in nats."""
        return self._select(self.scope.query_entropy(self.layer, order))

    def by_distance(self, first: int, recent: int) -> Tensor:
        """[B, H, Q, 3]: the attention to the first, the recent and the other tokens."""
        return self._select(self.scope.by_distance(self.layer, first, recent))

    def largest(self) -> tuple[Tensor, Tensor, Tensor]:
        """[B, H, Q] each: the key with the largest weight (-1 or nan: none), weight and score."""
        key, weight, score = (self._select(top[..., 0]) for top in self.scope.largest(self.layer))
        return key, weight, score

    def _select(self, result: Tensor) -> Tensor:
        result = result if self.heads is None else result[:, list(self.heads)]
        return result * np.nan if self.empty else result


@dataclass(eq=False, kw_only=True)
class Sound:
    """What a speech model heard: its cross-attention, and the words in time. F frames."""

    cross: PerQuery
    """The attention of each counted query to the frames."""
    frames: NDArray[np.int64]
    """[B]: the number of frames with sound; the others are silence that was added."""
    word_of_frame: NDArray[np.int64]
    """[B, F]: the word that is spoken; -1 for none."""
    word_of_token: NDArray[np.int64]
    """[B, K]: the word that a token belongs to; -1 for none."""


@dataclass(eq=False, kw_only=True)
class Completions:
    """What the model generated after each prompt of a batch."""

    start: NDArray[np.int64]
    """[B]: position of the first token of the completion; -1 for none."""
    next_token: NDArray[np.int64]
    """[B, K]: the token after each token, including the last of a completion; -1 for none."""
    max_new_tokens: int
    """The largest number of tokens of a completion."""


@dataclass(eq=False, kw_only=True)
class Baseline:
    """The base that a variant is compared with, and the aligned tokens."""

    sums: Sums
    aligned_position: NDArray[np.int64]
    """[B, K of variant]: position in the base of each token of the variant; -1 for none."""
    inserted: Mask
    """[B, K of variant]: the tokens that were inserted."""
    recorded: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors of the base's layer, as in `Layer.recorded`."""

    @cached_property
    def averages(self) -> Array:
        """[B, H, K of variant]: averages of the base at aligned positions."""
        return align_to_variant(self.sums.averages, self.aligned_position)

    @cached_property
    def uniform(self) -> Array:
        """[B, 1, K of variant]: `averages` under uniform attention."""
        return align_to_variant(self.sums.uniform, self.aligned_position)


@dataclass(eq=False, kw_only=True)
class Layer:
    """One layer of a batch for one choice of queries."""

    sums: Sums
    recorded: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors of the layer by the name in `Measure.needs`: values [B, G, K, size], heads and
    outputs [B, K, size], activations [B, K, sums of each token] and with them histogram [B, bins
    and the Gini coefficient], residual [B, fields of `residual.py`],
    next_token [B, vocabulary]: log-probabilities, in the first layer alone."""
    keys: Mask = field(default_factory=lambda: np.ones((1, 1), dtype=bool))
    """[B, K]: the keys that count; default: all."""
    shares: Tensor | None = None
    """float64 [B, K, C]: the share of each token in each class, 0 for keys that do not count; nan
    for a prompt without such keys."""
    groups: Tensor | None = None
    """float64 [groups, C]: 1 if a group of queries belongs to a class."""
    base: Baseline | None = None
    rows: PerQuery | None = None
    tokens: NDArray[np.int64] | None = None
    """[B, K]: the ids of the tokens, -1 for padding."""
    generated: Completions | None = None
    sound: Sound | None = None
    targets: Sequence[Target | None] | None = None
    """[B]: None for a prompt whose question is about no part of its picture."""
    sentences: Callable[[], NDArray[np.int64]] | None = None
    """Returns the sentence of each token, [B, K]; -1 for none."""

    @property
    def sentence_numbers(self) -> NDArray[np.int64]:
        """The sentence of each token, for a measure of sentences."""
        assert self.sentences is not None
        return self.sentences()

    @property
    def heard(self) -> Sound:
        """The sound, for a measure that needs it."""
        assert self.sound is not None
        return self.sound

    @property
    def question_targets(self) -> Sequence[Target | None]:
        """What the questions are about, for a measure that needs `box`."""
        assert self.targets is not None
        return self.targets

    @property
    def per_query(self) -> PerQuery:
        """The attention rows per query, for a measure that needs `rows`."""
        assert self.rows is not None
        return self.rows

    @property
    def completions(self) -> Completions:
        """The completions, for a measure of generation."""
        assert self.generated is not None
        return self.generated

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """The token ids, for a measure that compares them."""
        if self.tokens is None:
            raise InputError(
                "this measure compares token ids, and this forward pass has none; call the model "
                "with input_ids, without inputs_embeds",
                code="no-token-ids",
            )
        return self.tokens

    @property
    def baseline(self) -> Baseline:
        """The base, for a measure that declares `compares_to_base`."""
        assert self.base is not None
        return self.base


def stack_layers(layers: Sequence[Layer], max_size: int = 1 << 22) -> list[Layer]:
    """Stack neighbouring layers with the same geometry along the heads, up to `max_size` elements.

    For measures that treat each head separately and read sums alone: a short text then needs one
    operation for all layers.
    """
    joined: list[list[Sums]] = []
    for layer in layers:
        sums, before = layer.sums, joined[-1] if joined else []
        held = sum(one.received.numel() for one in (*before, sums))
        if before and held <= max_size and _can_stack(before[-1], sums):
            before.append(sums)
        else:
            joined.append([sums])
    return [replace(layers[0], sums=_cat_heads(some), recorded={}, rows=None) for some in joined]


def _can_stack(one: Sums, other: Sums) -> bool:
    def signature(sums: Sums) -> Any:
        types = {name: (of.dtype, of.device) for name, of in sums._by_head().items()}
        return sums.group_key, types, sums.received.shape[-1]

    return one.group_key is not None and signature(one) == signature(other)


def _cat_heads(some: Sequence[Sums]) -> Sums:
    if len(some) == 1:
        return some[0]
    from torch import cat

    parts = [sums._by_head() for sums in some]
    joined: dict[str, Any] = {name: cat([of[name] for of in parts], 1) for name in parts[0]}
    return replace(some[0], **joined)


def align_to_variant(base: Array, aligned: NDArray[np.int64]) -> Array:
    """Numbers of the base [B, H, K of base] at aligned positions of the variant; nan elsewhere."""
    where = np.broadcast_to(np.maximum(aligned, 0)[:, None], (*base.shape[:2], aligned.shape[1]))
    return np.where((aligned < 0)[:, None], np.nan, np.take_along_axis(base, where, axis=2))


def numpy_of(tensor: Tensor) -> Array:
    """A tensor as float64 on the CPU."""
    array: Array = tensor.cpu().double().numpy()
    return array
