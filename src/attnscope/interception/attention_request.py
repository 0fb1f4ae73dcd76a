"""Interprets the arguments of an attention call of transformers.

An argument that attnscope does not support, and that the model's function reads, is not ignored:
the model's own function then computes the weights.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from attnscope.errors import ModelError
from attnscope.interception import masks
from attnscope.interception.arguments import is_shipped, parameters, unsupported_kwargs
from attnscope.interception.biases import split_biases
from attnscope.interception.captured_call import CallSpec
from attnscope.interception.forward_pass import ForwardPass
from attnscope.interception.geometry import Geometry
from attnscope.interception.sites import Site
from attnscope.kernels import AttentionCall
from attnscope.kernels.attend import bind_attention
from attnscope.kernels.autocast import autocast_dtype, round_as_autocast

_POSITIONAL = ("query", "key", "value", "attention_mask")


@dataclass(eq=False, slots=True, kw_only=True)
class AttentionRequest:
    """One call of an attention function. The names in `options` are those of transformers."""

    original: Callable[..., Any]
    """The attention function that the model was loaded with."""
    eager: Callable[..., Any]
    """The eager attention function of its family, which returns weights."""
    implementation: str
    module: nn.Module
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Any
    options: dict[str, Any]
    unrounded: tuple[Tensor, Tensor, Tensor]
    """Queries, keys and values before autocast rounds them; without autocast `q`, `k`, `v`."""
    rounding: torch.dtype | None
    """The dtype that autocast rounds them to; None without autocast."""
    forward_pass: ForwardPass = field(init=False)
    geometry: Geometry = field(init=False)
    call: AttentionCall = field(init=False)
    """The call as the model makes it."""
    spec: CallSpec = field(init=False)
    """Shared with other calls of its pass where it has a signature; these need no weights."""

    @classmethod
    def parse(
        cls,
        original: Callable[..., Any],
        eager: Callable[..., Any],
        implementation: str,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> "AttentionRequest":
        """Assign names to the arguments of a call."""
        options = kwargs
        if len(args) != len(_POSITIONAL):  # most models pass exactly these four by position
            order = [*_POSITIONAL, *list(parameters(original))[5:]]
            options = dict(zip(order, args, strict=False)) | kwargs
            args = (
                *(options.pop(name) for name in _POSITIONAL[:3]),
                options.pop(_POSITIONAL[3], None),
            )
        q, k, v, mask = args
        unrounded, rounding = (q, k, v), autocast_dtype(q.device)
        if rounding is not None:
            q, k, v = (round_as_autocast(tensor, rounding) for tensor in unrounded)
        return cls(
            original=original,
            eager=eager,
            implementation=implementation,
            module=module,
            q=q,
            k=k,
            v=v,
            mask=mask,
            options=options,
            unrounded=unrounded,
            rounding=rounding,
        )

    def call_original(self) -> Any:
        """Call the original function with the original arguments."""
        mask = self.mask.lazy.original if isinstance(self.mask, masks.MaskTensor) else self.mask
        return self.original(self.module, *self.unrounded, mask, **self.options)

    def interpret(self, site: Site, forward_pass: ForwardPass) -> None:
        """Determine geometry and call; layers with the same signature share the result."""
        self.forward_pass = forward_pass
        signature = self.original, self.eager, self.implementation, self.mask, site.kind
        q, k, v, options = self.q, self.k, self.v, self.options
        spec = forward_pass.spec_for(signature, options, q, k, v)
        if spec is not None:
            self.geometry, self.spec = spec.geometry, spec
            self.call = self._build_call(site, spec.scale, spec.softcap)
            return
        self._check_implementation()
        self.geometry, mask_bias = self._geometry_and_bias(site)
        softcap, sinks = self._softcap_and_sinks()
        scale = options.get("scaling")
        scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
        biases = self._biases(
            [self.rounded_bias(mask_bias), self.rounded_bias(options.get("position_bias"))]
        )
        self.call = self._build_call(site, scale, softcap, sinks=sinks, **biases)
        self.spec = CallSpec.of_call(self.call, self.geometry)
        can_share = isinstance(self.mask, masks.MaskTensor) and sinks is None and not biases
        if can_share and not self.needs_weights(self.call):
            self.spec.signature, self.spec.options = signature, options
            self.spec.shapes = q.shape, k.shape, v.shape
            self.spec.dtype, self.spec.device = q.dtype, q.device
            self.spec.attend = self._bind_attention()
            forward_pass.specs.append(self.spec)

    def _bind_attention(
        self,
    ) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]] | None:
        """Fused attention for later calls with the same signature; None if each must be parsed."""
        learns = any(tensor.requires_grad for tensor in (self.q, self.k, self.v))
        if self.dropout or learns or self.rounding is not None:
            return None
        return bind_attention(self.call)

    def _build_call(
        self, site: Site, scale: float, softcap: float | None, **more: Any
    ) -> AttentionCall:
        geometry, k, v = self.geometry, self.k, self.v
        keys = geometry.keys
        return AttentionCall(
            layer=site.layer,
            q=self.q,
            k=k if keys == k.shape[2] else k[:, :, :keys],
            v=v if keys == v.shape[2] else v[:, :, :keys],
            scale=scale,
            visible=geometry.visible,
            softcap=softcap,
            first=geometry.first_query - geometry.first_key,
            **more,
        )

    def rounded_bias(self, bias: Tensor | None) -> Tensor | None:
        """A score bias as the model applies it: autocast rounds the mask of sdpa."""
        if bias is None or self.rounding is None or self.implementation != "sdpa":
            return bias
        return round_as_autocast(bias, self.rounding).to(bias.dtype)

    def _check_implementation(self) -> None:
        is_own = self.implementation == "eager" and self.original is self.eager
        if is_own or is_shipped(self.original):
            return
        function = getattr(self.original, "__qualname__", type(self.original).__name__)
        raise ModelError(
            f"this model was loaded with attn_implementation={self.implementation!r}, which is "
            f"registered as {function}; transformers does not ship this function, so attnscope "
            "does not support it; load the model with 'sdpa' or 'eager', and register no other "
            "function under these names",
            code="foreign-attention-function",
            implementation=self.implementation,
            function=function,
        )

    @property
    def dropout(self) -> float:
        """The dropout probability of the weights, in training."""
        return float(self.options.get("dropout") or 0.0)

    def needs_weights(self, call: AttentionCall) -> bool:
        """Whether the call must be computed with its full weights."""
        if self.spec.signature is not None and call is self.call:
            return False
        has_trained_bias = torch.is_grad_enabled() and any(
            bias is not None and bias.requires_grad for bias in (call.key_bias, call.distance_bias)
        )
        return bool(
            call.bias is not None
            or has_trained_bias  # fused attention has no gradient for score biases
            or self.geometry.gap_mask is not None
            or self.unsupported
            or (self.implementation == "eager" and self.forward_pass.output_attentions)
        )

    @property
    def unsupported(self) -> list[str]:
        """Arguments that the model's function reads and attnscope does not support."""
        return unsupported_kwargs(self.original, self.options)

    def _geometry_and_bias(self, site: Site) -> tuple[Geometry, Tensor | None]:
        q, k, mask, bias = self.q, self.k, self.mask, None
        past = self.forward_pass.past
        if isinstance(mask, masks.MaskTensor):
            geometry = mask.geometry.on(q.device)
            if (
                geometry.queries != q.shape[2]
                or geometry.keys > k.shape[2]
                or geometry.batch != q.shape[0]
            ):
                raise ModelError(
                    f"{type(self.module).__name__} uses a mask of {geometry.queries} queries and "
                    f"{geometry.keys} keys for {q.shape[2]} queries and {k.shape[2]} keys, so "
                    "attnscope cannot identify the keys; choose other layers",
                    code="unsupported-mask",
                    mask=(geometry.queries, geometry.keys),
                    call=(q.shape[2], k.shape[2]),
                )
        elif mask is not None:
            cross = site.kind == "cross"  # its keys are not tokens of this text
            of_text = (None, None) if cross else (past, self.forward_pass.padding)
            geometry, bias = masks.geometry_of_dense(mask, q, k.shape[2], *of_text)
        else:
            causal = self.options.get("is_causal")
            if causal is None:
                causal = bool(getattr(self.module, "is_causal", True))
            # Eager attention without a mask is not causal.
            causal = causal and self.implementation != "eager"
            geometry = masks.geometry_without_mask(q, k, causal=causal)
        if site.kind == "cross":
            geometry = geometry.as_cross(past or 0, self.forward_pass.padding)
        return geometry, bias

    def _biases(self, biases: list[Tensor | None]) -> dict[str, Any]:
        """The score biases as arguments of an `AttentionCall`.

        They are split by key and by distance if possible. Layers share the result.
        """
        present = [bias for bias in biases if bias is not None]
        if not present:
            return {}
        key = tuple(map(id, (self.geometry, *present)))
        if key not in self.forward_pass.biases:
            split = self.forward_pass.biases[key] = split_biases(
                present, self.geometry, self.q.shape[1]
            )
            # Keeps these objects alive, because the key is made of their ids.
            split["of"] = present, self.geometry
        return {name: bias for name, bias in self.forward_pass.biases[key].items() if name != "of"}

    def _softcap_and_sinks(self) -> tuple[float | None, Tensor | None]:
        softcap, sinks = self.options.get("softcap"), self.options.get("s_aux")
        if self.original is sdpa_attention_forward and (softcap is not None or sinks is not None):
            # Old versions of transformers ignore them in sdpa: measure what the model computes.
            warnings.warn(
                f"{type(self.module).__name__} has a soft-cap or learned sinks, but sdpa ignores "
                "them; load the model with attn_implementation='eager'",
                stacklevel=2,
            )
            return None, None
        return softcap, sinks
