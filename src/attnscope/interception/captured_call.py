"""The types of interception: `CallSpec` describes an attention call, `CapturedCall` is for hooks.

A `CallSpec` is everything about a call except its tensors. Most layers of a forward pass differ
only in their tensors, so they share one spec. A `CapturedCall` is a site, a spec and the tensors.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attnscope.interception.geometry import Geometry
from attnscope.interception.sites import Site
from attnscope.kernels import ScoreSpec, VisibleRanges
from attnscope.kernels.call import ScoreBias

_SIMPLE = (float, int, bool, str)


@dataclass(slots=True, eq=False, kw_only=True)
class CallSpec(ScoreSpec):
    """Everything about an attention call except its tensors, as attnscope interprets it.

    `visible` is that of `geometry`, unless a hook hid some keys.
    """

    geometry: Geometry
    signature: tuple[Any, ...] | None = None
    """(original function, eager function, implementation, mask, kind of site), as objects.

    None if the spec is that of one call alone.
    """
    options: dict[str, Any] = field(default_factory=dict)
    shapes: tuple[torch.Size, ...] = ()
    """The shapes of queries, keys and values."""
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    attend: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]] | None = None
    """(q, k, v) → (output, lse) for calls that match; None if each call must be parsed."""
    nbytes: int = 0
    """Bytes of one call that a queue holds; 0 before it is known."""

    @classmethod
    def of_call(cls, call: ScoreSpec, geometry: Geometry) -> "CallSpec":
        """The spec of one call alone."""
        shared: dict[str, Any] = {name: getattr(call, name) for name in ScoreSpec.__slots__}
        return cls(geometry=geometry, **shared)

    @classmethod
    def of_weights(cls, geometry: Geometry) -> "CallSpec":
        """The spec of a call of which only the weights are known."""
        return cls(geometry=geometry, visible=geometry.visible, scale=math.nan)

    @property
    def can_stack(self) -> bool:
        """Whether such calls can be stacked: no bias, and no key hidden by a hook."""
        return not self.biased and self.visible is self.geometry.visible

    def matches(
        self, signature: tuple[Any, ...], options: dict[str, Any], q: Tensor, k: Tensor, v: Tensor
    ) -> bool:
        """Whether a call has the same signature, shapes, dtype and device."""
        if self.signature is None or self.signature[3] is not signature[3]:
            return False
        original, eager, name, _, kind = self.signature
        return (
            original is signature[0]
            and eager is signature[1]
            and name == signature[2]
            and kind == signature[4]
            and self.shapes == (q.shape, k.shape, v.shape)
            and self.dtype is q.dtype
            and self.device == q.device
            and _same_options(self.options, options)
        )


def _same_options(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether options are the same objects, or equal strings and numbers."""
    if len(one) != len(other):
        return False
    for name, value in one.items():
        other_value = other.get(name, one)
        if value is not other_value and (type(value) not in _SIMPLE or value != other_value):
            return False
    return True


# Not frozen, because that would take as long as a small layer. Do not change it.
@dataclass(slots=True, eq=False)
class CapturedCall:
    """One attention call of a model, as it was computed.

    It has `weights` only if no smaller description exists. Then queries, keys and values may be
    None.
    """

    site: Site
    """Which attention module: stack, layer, and kind ("self" or "cross")."""
    spec: CallSpec | None
    """None if no hook needs the geometry; then only the tensors are given."""
    q: Tensor | None = None
    """[B, H, Q, D]: queries, as the scores are computed from them."""
    k: Tensor | None = None
    """[B, G, K, D]: keys; G divides H."""
    v: Tensor | None = None
    """[B, G, K, E]: values."""
    lse: Tensor | None = None
    """float32 [B, H, Q]: log-sum-exp of the scores; None if the operator does not return it."""
    weights: Tensor | None = None
    """[B, H, Q, K]: the attention weights."""
    row_max: Tensor | None = None
    """[B, H, Q]: with `weights`, the largest score of each query; None if no hook needs it, or if
    it is unknown."""

    @property
    def geometry(self) -> Geometry:
        """Which keys each query sees, and the positions of both."""
        assert self.spec is not None
        return self.spec.geometry

    @property
    def scale(self) -> float:
        """Factor of the dot products."""
        assert self.spec is not None
        return self.spec.scale

    def on_cpu(self) -> "CapturedCall":
        """The same call on the CPU, for devices without float64."""

        def cpu(tensor: Tensor | None) -> Any:
            return None if tensor is None else tensor.cpu()

        old = self.spec
        assert old is not None
        geometry = old.geometry.on(torch.device("cpu"))
        visible = geometry.visible
        if old.visible is not old.geometry.visible:  # a hook hid some keys
            bounds, real = (old.visible.start.cpu(), old.visible.stop.cpu()), cpu(old.visible.real)
            visible = VisibleRanges(form=old.visible.form, bounds=lambda: bounds, real=real)
        spec = replace(
            old,
            geometry=geometry,
            visible=visible,
            sinks=cpu(old.sinks),
            key_bias=cpu(old.key_bias),
            distance_bias=cpu(old.distance_bias),
            score_biases=tuple(
                ScoreBias(bias=cpu(added.bias), queries=cpu(added.queries))
                for added in old.score_biases
            ),
        )
        tensors = (self.q, self.k, self.v, self.lse, self.weights, self.row_max)
        return CapturedCall(self.site, spec, *map(cpu, tensors))
