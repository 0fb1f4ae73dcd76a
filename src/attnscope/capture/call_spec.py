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
from attnscope.capture.arguments import parameters, shipped, unanswered
from attnscope.capture.biases import additive_mask, split_biases, total_bias
from attnscope.capture.forward_pass import CallSpec, ForwardPass
from attnscope.capture.geometry import Geometry
from attnscope.capture.sites import Site
from attnscope.errors import ModelError
from attnscope.kernels import AttentionCall
from attnscope.kernels.attend import attend, prepared
from attnscope.kernels.autocast import autocast_dtype, round_as_autocast, without_autocast

# Modules whose eager attention was asked and agreed, with the function.
_agreed: WeakKeyDictionary[nn.Module, Callable[..., Any]] = WeakKeyDictionary()
_FIRST = ("query", "key", "value", "attention_mask")


def agreed(module: nn.Module, eager: Callable[..., Any]) -> bool:
    """Whether the eager attention of a module's family was asked and said what we computed."""
    return _agreed.get(module) is eager


@dataclass(eq=False, slots=True, kw_only=True)
class AttentionRequest:
    """One call of an attention function. The names of `options` are those of transformers."""

    plain: Callable[..., Any]
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
    passed: tuple[Tensor, Tensor, Tensor]
    """Queries, keys and values before autocast rounds them; `q`, `k` and `v` without it."""
    rounding: torch.dtype | None
    """The type that autocast rounds them to; None without it."""
    given: ForwardPass = field(init=False)
    frame: Geometry = field(init=False)
    call: AttentionCall = field(init=False)
    """As the model made it."""
    terms: CallSpec | None = None
    """What it has in common with other calls of its pass; then fused attention does for it."""

    @classmethod
    def read(
        cls,
        plain: Callable[..., Any],
        eager: Callable[..., Any],
        implementation: str,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> "AttentionRequest":
        """Name the arguments of a call."""
        options = kwargs
        if len(args) != len(_FIRST):  # most models pass these four by place, and only these
            order = [*_FIRST, *list(parameters(plain))[5:]]
            options = dict(zip(order, args, strict=False)) | kwargs
            args = (*(options.pop(name) for name in _FIRST[:3]), options.pop(_FIRST[3], None))
        q, k, v, mask = args
        passed, rounding = (q, k, v), autocast_dtype(q.device)
        if rounding is not None:
            q, k, v = (round_as_autocast(tensor, rounding) for tensor in passed)
        return cls(
            plain=plain,
            eager=eager,
            implementation=implementation,
            module=module,
            q=q,
            k=k,
            v=v,
            mask=mask,
            options=options,
            passed=passed,
            rounding=rounding,
        )

    def plainly(self) -> Any:
        """What the model would have got."""
        mask = self.mask.dense.plain if isinstance(self.mask, masks.MaskTensor) else self.mask
        return self.plain(self.module, *self.passed, mask, **self.options)

    def describe(self, site: Site, given: ForwardPass) -> None:
        """Work out the frame and the call; layers that say the same share the answer."""
        self.given = given
        said = self.plain, self.eager, self.implementation, self.mask, site.kind
        q, k, v, options = self.q, self.k, self.v, self.options
        for terms in given.terms:
            if terms.cover(said, options, q, k, v):
                self.frame, self.terms = terms.frame, terms
                self.call = self._made(site, terms.scale, terms.softcap)
                return
        self._refuse_strangers()
        self.frame, soft = self._frame_and_bias(site)
        softcap, sinks = self._softcap_and_sinks()
        scale = options.get("scaling")
        scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
        biases = self._biases([self._added(soft), self._added(options.get("position_bias"))])
        self.call = self._made(site, scale, softcap, sinks=sinks, **biases)
        shared = isinstance(self.mask, masks.MaskTensor) and sinks is None and not biases
        if shared and not self.needs_weights(self.call):
            self.terms = CallSpec(
                said=said,
                options=options,
                shapes=(q.shape, k.shape, v.shape),
                dtype=q.dtype,
                device=q.device,
                frame=self.frame,
                scale=scale,
                softcap=softcap,
                attend=self._prepared(),
            )
            given.terms.append(self.terms)

    def _prepared(self) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]] | None:
        """Attention for calls of this pass that say the same; None where each must be read."""
        learns = any(tensor.requires_grad for tensor in (self.q, self.k, self.v))
        if self.dropout or learns or self.rounding is not None:
            return None
        attend, keys = prepared(self.call), self.frame.keys
        if keys == self.k.shape[2]:
            return attend
        return lambda q, k, v: attend(q, k[:, :, :keys], v[:, :, :keys])

    def _made(self, site: Site, scale: float, softcap: float | None, **more: Any) -> AttentionCall:
        frame, k, v = self.frame, self.k, self.v
        keys = frame.keys
        return AttentionCall(
            layer=site.layer,
            q=self.q,
            k=k if keys == k.shape[2] else k[:, :, :keys],
            v=v if keys == v.shape[2] else v[:, :, :keys],
            scale=scale,
            visible=frame.visible,
            softcap=softcap,
            first=frame.first_query - frame.first_key,
            **more,
        )

    def _added(self, bias: Tensor | None) -> Tensor | None:
        """What is added to scores; sdpa takes it as a mask, which autocast rounds too."""
        if bias is None or self.rounding is None or self.implementation != "sdpa":
            return bias
        return round_as_autocast(bias, self.rounding).to(bias.dtype)

    def _refuse_strangers(self) -> None:
        own = self.implementation == "eager" and self.plain is self.eager
        if own or shipped(self.plain):
            return
        function = getattr(self.plain, "__qualname__", type(self.plain).__name__)
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
        if self.terms is not None and call is self.call:
            return False
        trained = torch.is_grad_enabled() and any(
            bias is not None and bias.requires_grad for bias in (call.key_bias, call.distance_bias)
        )
        return bool(
            call.bias is not None
            or trained  # fused attention has no gradient for what is added to scores
            or self.frame.seen is not None
            or self.unknown
            or (self.implementation == "eager" and self.given.attentions)
        )

    @property
    def unknown(self) -> list[str]:
        """Arguments that we do not know and the model's function heeds."""
        return unanswered(self.plain, self.options)

    def densely(self, call: AttentionCall) -> tuple[Any, Tensor]:
        """What the attention function returns, and the weights [B, H, Q, K]."""
        who, what = type(self.module).__name__, ", ".join(self.unknown)
        if call is not self.call and self.unknown:
            raise ModelError(
                f"{who} tells its attention {what}, which attnscope does not know, so the call "
                "cannot be changed",
                code="unsupported-argument",
                module=who,
                arguments=self.unknown,
            )
        if self.unknown and self.implementation not in ("eager", "sdpa"):
            raise ModelError(
                f"{who} tells its attention {what}, which attnscope does not know; load it with "
                "attn_implementation='eager'",
                code="unsupported-argument",
                module=who,
                arguments=self.unknown,
            )
        if call is self.call:
            output = self.plainly()
            weights = output[1] if self.implementation == "eager" else self._weights(call)
        else:
            out, weights = self._eagerly(
                call.q,
                call.k,
                call.v,
                additive_mask(call, self.frame),
                scaling=call.scale,
                softcap=call.softcap,
                s_aux=call.sinks,
                position_bias=total_bias(call, self.frame),
            )
            output = out, weights if self.implementation == "eager" else None
        return output, self._beside_sinks(call, weights.detach()[..., : call.k.shape[2]])

    @torch.no_grad()
    @without_autocast
    def _weights(self, call: AttentionCall) -> Tensor:
        """The weights of a call as the model made it."""
        q, k, v, mask = self.q, self.k, self.v, self.mask
        if not isinstance(mask, Tensor) or not mask.is_floating_point():
            k, v, mask = call.k, call.v, additive_mask(call, self.frame)
        else:
            mask = self._added(mask)
        if self.rounding is not None:  # sdpa rounds its tensors, and no score
            q, k, v = (tensor.float() for tensor in (q, k, v))
        weights: Tensor = self._eagerly(q, k, v, mask, scaling=call.scale)[1]
        return weights

    def _eagerly(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **options: Any) -> Any:
        """Ask the family's eager attention, which takes additive masks."""
        options = self.options | options
        bias = options.get("position_bias")
        if bias is not None and "position_bias" not in parameters(self.eager):
            mask = mask + bias
        return self.eager(self.module, q, k, v, mask, **options)

    def _beside_sinks(self, call: AttentionCall, weights: Tensor) -> Tensor:
        """The weights beside a sink. Some families scale the output instead, and return them as
        they are without."""
        whole = (weights.sum(-1) - 1).abs().max() < 1e-6
        if call.sinks is None or not bool(whole):
            return weights
        _, lse = attend(replace(call, sinks=None))
        if lse is None or call.bias is not None or self.frame.seen is not None:
            raise ModelError(
                f"{type(self.module).__name__} returns its weights without the sinks they stood "
                "beside; load it with attn_implementation='sdpa'",
                code="weights-without-sinks",
                module=type(self.module).__name__,
            )
        return weights * torch.sigmoid(lse - call.sinks.float()[:, None])[..., None]

    def refuse_to_change(self) -> None:
        """Raise where the family does more than its call says: such attention can be measured, by
        asking it, and not changed."""
        asked = self.implementation != "eager" or agreed(self.module, self.eager)
        if asked or self.needs_weights(self.call) or self.agrees(attend(self.call)[0]):
            return
        raise ModelError(
            f"the attention of {type(self.module).__name__} does more than its arguments say, so "
            "it can be measured and not changed",
            code="intervention-not-applied",
            module=type(self.module).__name__,
        )

    @torch.no_grad()
    def agrees(self, out: Tensor) -> bool:
        """Whether the family's eager attention, asked about one row, says what we computed.

        Asked once for every module: a family may do more than its arguments say.
        """
        call, visible = self.call, self.call.visible
        if self.implementation != "eager" or agreed(self.module, self.eager):
            return True
        looking = visible.stop[:, -1] > visible.start[:, -1]
        if self.dropout or not bool(looking.any()):
            return True
        if self.mask is None or isinstance(self.mask, masks.MaskTensor):
            mask = additive_mask(call, self.frame, last=True)
        else:
            mask = self.mask[:, :, -1:, : call.k.shape[2]]
        options = {"scaling": call.scale}
        if (bias := self.options.get("position_bias")) is not None:
            options["position_bias"] = bias[:, :, -1:, : call.k.shape[2]]
        theirs = self._eagerly(self.q[:, :, -1:], call.k, call.v, mask, **options)[0][:, 0]
        off = (theirs - out[:, :, -1])[looking].abs().max()
        close = 1e-3 if out.dtype in (torch.float32, torch.float64) else 3e-2
        if not bool(off <= close * theirs[looking].abs().max().clamp(min=1)):
            return False
        _agreed[self.module] = self.eager
        return True

    def _frame_and_bias(self, site: Site) -> tuple[Geometry, Tensor | None]:
        q, k, mask, bias = self.q, self.k, self.mask, None
        past = self.given.past
        if isinstance(mask, masks.MaskTensor):
            frame = mask.frame.on(q.device)
            if frame.queries != q.shape[2] or frame.keys > k.shape[2] or frame.batch != q.shape[0]:
                raise ModelError(
                    f"{type(self.module).__name__} uses a mask of {frame.queries} queries and "
                    f"{frame.keys} keys for {q.shape[2]} queries and {k.shape[2]} keys; attnscope "
                    "cannot tell which keys these are",
                    code="unsupported-mask",
                    mask=(frame.queries, frame.keys),
                    call=(q.shape[2], k.shape[2]),
                )
        elif mask is not None:
            frame, bias = masks.frame_of_dense(mask, q, k.shape[2], past, self.given.padding)
        else:
            causal = self.options.get("is_causal")
            if causal is None:
                causal = bool(getattr(self.module, "is_causal", True))
            # Eager attention hides nothing that no mask hides.
            causal = causal and self.implementation != "eager"
            frame = masks.frame_without_mask(q, k, causal=causal)
        if site.kind == "cross":
            frame = frame.across(past or 0, self.given.padding)
        return frame, bias

    def _biases(self, biases: list[Tensor | None]) -> dict[str, Any]:
        """What is added to scores: by key and by distance as far as it goes, or else as it is.

        Layers share their biases, and the answer.
        """
        given = [bias for bias in biases if bias is not None]
        if not given:
            return {}
        key = tuple(map(id, (self.frame, *given)))
        if key not in self.given.biases:
            found = self.given.biases[key] = split_biases(given, self.frame, self.q.shape[1])
            found["of"] = given, self.frame  # which must not be forgotten while their ids count
        return {name: bias for name, bias in self.given.biases[key].items() if name != "of"}

    def _softcap_and_sinks(self) -> tuple[float | None, Tensor | None]:
        softcap, sinks = self.options.get("softcap"), self.options.get("s_aux")
        if self.plain is sdpa_attention_forward and (softcap is not None or sinks is not None):
            # Old versions of transformers let sdpa drop them: measure what the model does.
            warnings.warn(
                f"{type(self.module).__name__} has a soft-cap or sinks, and sdpa, which this model "
                "was loaded with, leaves them out; load it with attn_implementation='eager'",
                stacklevel=2,
            )
            return None, None
        return softcap, sinks
