"""What a model asks of its attention function, read without guessing.

Knows the names of transformers' arguments. One that it does not know, and that the model's own
function heeds, is not passed over: then that function itself is asked for the weights.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from attnscope.capture import masks
from attnscope.capture.arguments import is_shipped, parameters, unsupported_kwargs
from attnscope.capture.biases import additive_mask, split_biases, total_bias
from attnscope.capture.forward_pass import CallSpec, ForwardPass
from attnscope.capture.geometry import Geometry
from attnscope.capture.sites import Site
from attnscope.errors import ModelError
from attnscope.kernels import AttentionCall
from attnscope.kernels.attend import attend, prepared
from attnscope.kernels.autocast import autocast_dtype, round_as_autocast, without_autocast

# Modules whose eager attention was asked and agreed, with the function.
_verified: WeakKeyDictionary[nn.Module, Callable[..., Any]] = WeakKeyDictionary()
_POSITIONAL = ("query", "key", "value", "attention_mask")


def eager_verified(module: nn.Module, eager: Callable[..., Any]) -> bool:
    """Whether the eager attention of a module's family was asked and said what we computed."""
    return _verified.get(module) is eager


@dataclass(eq=False, slots=True, kw_only=True)
class AttentionRequest:
    """One call of an attention function. The names of `options` are those of transformers."""

    original: Callable[..., Any]
    """The function the model was loaded with."""
    eager: Callable[..., Any]
    """The one of its family that returns weights."""
    implementation: str
    module: nn.Module
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Any
    options: dict[str, Any]
    unrounded: tuple[Tensor, Tensor, Tensor]
    """Queries, keys and values before autocast rounds them; `q`, `k` and `v` without it."""
    rounding: torch.dtype | None
    """The type that autocast rounds them to; None without it."""
    forward_pass: ForwardPass = field(init=False)
    geometry: Geometry = field(init=False)
    call: AttentionCall = field(init=False)
    """As the model made it."""
    spec: CallSpec | None = None
    """What it has in common with other calls of its pass; then fused attention does for it."""

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
        """Name the arguments of a call."""
        options = kwargs
        if len(args) != len(_POSITIONAL):  # most models pass these four by place, and only these
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
        """What the model would have got."""
        mask = self.mask.lazy.original if isinstance(self.mask, masks.MaskTensor) else self.mask
        return self.original(self.module, *self.unrounded, mask, **self.options)

    def interpret(self, site: Site, forward_pass: ForwardPass) -> None:
        """Work out the frame and the call; layers that say the same share the answer."""
        self.forward_pass = forward_pass
        signature = self.original, self.eager, self.implementation, self.mask, site.kind
        q, k, v, options = self.q, self.k, self.v, self.options
        for spec in forward_pass.specs:
            if spec.matches(signature, options, q, k, v):
                self.geometry, self.spec = spec.geometry, spec
                self.call = self._build_call(site, spec.scale, spec.softcap)
                return
        self._check_implementation()
        self.geometry, mask_bias = self._geometry_and_bias(site)
        softcap, sinks = self._softcap_and_sinks()
        scale = options.get("scaling")
        scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
        biases = self._biases(
            [self._rounded_bias(mask_bias), self._rounded_bias(options.get("position_bias"))]
        )
        self.call = self._build_call(site, scale, softcap, sinks=sinks, **biases)
        is_shared = isinstance(self.mask, masks.MaskTensor) and sinks is None and not biases
        if is_shared and not self.needs_weights(self.call):
            self.spec = CallSpec(
                signature=signature,
                options=options,
                shapes=(q.shape, k.shape, v.shape),
                dtype=q.dtype,
                device=q.device,
                geometry=self.geometry,
                scale=scale,
                softcap=softcap,
                attend=self._bind_attention(),
            )
            forward_pass.specs.append(self.spec)

    def _bind_attention(
        self,
    ) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]] | None:
        """Attention for calls of this pass that say the same; None where each must be read."""
        learns = any(tensor.requires_grad for tensor in (self.q, self.k, self.v))
        if self.dropout or learns or self.rounding is not None:
            return None
        attend, keys = prepared(self.call), self.geometry.keys
        if keys == self.k.shape[2]:
            return attend
        return lambda q, k, v: attend(q, k[:, :, :keys], v[:, :, :keys])

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

    def _rounded_bias(self, bias: Tensor | None) -> Tensor | None:
        """What is added to scores; sdpa takes it as a mask, which autocast rounds too."""
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
            f"registered as {function}, a function that transformers does not ship; attnscope "
            "does not know what it computes: load the model with 'sdpa' or 'eager' and register "
            "nothing over these",
            code="foreign-attention-function",
            implementation=self.implementation,
            function=function,
        )

    @property
    def dropout(self) -> float:
        """The share of weights that is dropped, in training."""
        return float(self.options.get("dropout") or 0.0)

    @property
    def sinks(self) -> bool:
        """Whether learned sinks take part."""
        return self.call.sinks is not None

    def needs_weights(self, call: AttentionCall) -> bool:
        """Whether only the weights themselves tell what this call does."""
        if self.spec is not None and call is self.call:
            return False
        has_trained_bias = torch.is_grad_enabled() and any(
            bias is not None and bias.requires_grad for bias in (call.key_bias, call.distance_bias)
        )
        return bool(
            call.bias is not None
            or has_trained_bias  # fused attention has no gradient for what is added to scores
            or self.geometry.seen is not None
            or self.unsupported
            or (self.implementation == "eager" and self.forward_pass.output_attentions)
        )

    @property
    def unsupported(self) -> list[str]:
        """Arguments that we do not know and the model's function heeds."""
        return unsupported_kwargs(self.original, self.options)

    def call_dense(self, call: AttentionCall) -> tuple[Any, Tensor]:
        """What the attention function returns, and the weights [B, H, Q, K]."""
        module, names = type(self.module).__name__, ", ".join(self.unsupported)
        if call is not self.call and self.unsupported:
            raise ModelError(
                f"{module} passes {names} to its attention function; attnscope does not support "
                "this, so it cannot change the call; choose other layers",
                code="unsupported-argument",
                module=module,
                arguments=self.unsupported,
            )
        if self.unsupported and self.implementation not in ("eager", "sdpa"):
            raise ModelError(
                f"{module} passes {names} to its attention function; attnscope does not support "
                "this; load the model with attn_implementation='eager'",
                code="unsupported-argument",
                module=module,
                arguments=self.unsupported,
            )
        if call is self.call:
            output = self.call_original()
            weights = output[1] if self.implementation == "eager" else self._weights(call)
        else:
            out, weights = self._call_eager(
                call.q,
                call.k,
                call.v,
                additive_mask(call, self.geometry),
                scaling=call.scale,
                softcap=call.softcap,
                s_aux=call.sinks,
                position_bias=total_bias(call, self.geometry),
            )
            output = out, weights if self.implementation == "eager" else None
        return output, self._apply_sink(call, weights.detach()[..., : call.k.shape[2]])

    @torch.no_grad()
    @without_autocast
    def _weights(self, call: AttentionCall) -> Tensor:
        """The weights of a call as the model made it."""
        q, k, v, mask = self.q, self.k, self.v, self.mask
        if not isinstance(mask, Tensor) or not mask.is_floating_point():
            k, v, mask = call.k, call.v, additive_mask(call, self.geometry)
        else:
            mask = self._rounded_bias(mask)
        if self.rounding is not None:  # sdpa rounds its tensors, and no score
            q, k, v = (tensor.float() for tensor in (q, k, v))
        weights: Tensor = self._call_eager(q, k, v, mask, scaling=call.scale)[1]
        return weights

    def _call_eager(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **options: Any) -> Any:
        """Ask the family's eager attention, which takes additive masks."""
        options = self.options | options
        bias = options.get("position_bias")
        if bias is not None and "position_bias" not in parameters(self.eager):
            mask = mask + bias
        return self.eager(self.module, q, k, v, mask, **options)

    def _apply_sink(self, call: AttentionCall, weights: Tensor) -> Tensor:
        """The weights beside a sink. Some families scale the output instead, and return them as
        they are without."""
        sums_to_one = (weights.sum(-1) - 1).abs().max() < 1e-6
        if call.sinks is None or not bool(sums_to_one):
            return weights
        _, lse = attend(replace(call, sinks=None))
        if lse is None or call.bias is not None or self.geometry.seen is not None:
            raise ModelError(
                f"{type(self.module).__name__} returns its weights without the sinks they stood "
                "beside; load it with attn_implementation='sdpa'",
                code="weights-without-sinks",
                module=type(self.module).__name__,
            )
        return weights * torch.sigmoid(lse - call.sinks.float()[:, None])[..., None]

    def check_can_change(self) -> None:
        """Raise where the family does more than its call says: such attention can be measured, by
        asking it, and not changed."""
        verified = self.implementation != "eager" or eager_verified(self.module, self.eager)
        if verified or self.needs_weights(self.call) or self.eager_matches(attend(self.call)[0]):
            return
        raise ModelError(
            f"the attention of {type(self.module).__name__} does more than its arguments say, so "
            "it can be measured and not changed",
            code="intervention-not-applied",
            module=type(self.module).__name__,
        )

    @torch.no_grad()
    def eager_matches(self, out: Tensor) -> bool:
        """Whether the family's eager attention, asked about one row, says what we computed.

        Asked once for every module: a family may do more than its arguments say.
        """
        call, visible = self.call, self.call.visible
        if self.implementation != "eager" or eager_verified(self.module, self.eager):
            return True
        sees_a_key = visible.stop[:, -1] > visible.start[:, -1]
        if self.dropout or not bool(sees_a_key.any()):
            return True
        if self.mask is None or isinstance(self.mask, masks.MaskTensor):
            mask = additive_mask(call, self.geometry, last=True)
        else:
            mask = self.mask[:, :, -1:, : call.k.shape[2]]
        options = {"scaling": call.scale}
        if (bias := self.options.get("position_bias")) is not None:
            options["position_bias"] = bias[:, :, -1:, : call.k.shape[2]]
        expected = self._call_eager(self.q[:, :, -1:], call.k, call.v, mask, **options)[0][:, 0]
        deviation = (expected - out[:, :, -1])[sees_a_key].abs().max()
        tolerance = 1e-3 if out.dtype in (torch.float32, torch.float64) else 3e-2
        if not bool(deviation <= tolerance * expected[sees_a_key].abs().max().clamp(min=1)):
            return False
        _verified[self.module] = self.eager
        return True

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
            geometry, bias = masks.geometry_of_dense(
                mask, q, k.shape[2], past, self.forward_pass.padding
            )
        else:
            causal = self.options.get("is_causal")
            if causal is None:
                causal = bool(getattr(self.module, "is_causal", True))
            # Eager attention hides nothing that no mask hides.
            causal = causal and self.implementation != "eager"
            geometry = masks.geometry_without_mask(q, k, causal=causal)
        if site.kind == "cross":
            geometry = geometry.across(past or 0, self.forward_pass.padding)
        return geometry, bias

    def _biases(self, biases: list[Tensor | None]) -> dict[str, Any]:
        """What is added to scores: by key and by distance as far as it goes, or else as it is.

        Layers share their biases, and the answer.
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
            # Old versions of transformers let sdpa drop them: measure what the model does.
            warnings.warn(
                f"{type(self.module).__name__} has a soft-cap or sinks, and sdpa, which this model "
                "was loaded with, leaves them out; load it with attn_implementation='eager'",
                stacklevel=2,
            )
            return None, None
        return softcap, sinks
