"""The largest entries of the residual stream after each layer, and the median of its sizes."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attnscope.activations.mlps import Nonlinearity, TokenHook, decoder_layers, hook_with_tokens
from attnscope.errors import ModelError
from attnscope.interception import sites
from attnscope.interception.forward_pass import ForwardPass
from attnscope.interception.intercept import register
from attnscope.measures.residual import FIELDS, MASSIVE, TIMES, TOP


def residual_peaks(
    model: nn.Module, layers: Any = None
) -> AbstractContextManager[dict[int, Tensor]]:
    """By layer, after a forward pass: float64 [batch, FIELDS] of every sequence, without padding.

    Positions count from the first token that is not padding. Only the last pass is kept.
    """
    model_sites = sites.find(model)
    sites.check_one_stack(model_sites)
    return _recording(model_sites, sites.validate_layers(model_sites, layers))


@contextmanager
def _recording(model_sites: sites.Sites, layers: frozenset[int]) -> Iterator[dict[int, Tensor]]:
    result: dict[int, Tensor] = {}
    hook = _PeaksHook(result)
    with ExitStack() as undo:
        for layer, module in decoder_layers(model_sites.model, model_sites).items():
            if layer in layers:
                point = Nonlinearity(layer, "residual", module)
                hook_with_tokens(point, hook, partial(hook.add, layer), undo)
        undo.enter_context(register(model_sites, hook))
        yield result


class _PeaksHook(TokenHook):
    """Reduces the output of every layer while the model runs."""

    def __init__(self, result: dict[int, Tensor]):
        super().__init__()
        self.result = result

    def begin(self, stack: str, forward_pass: ForwardPass) -> None:
        super().begin(stack, forward_pass)
        self.result.clear()

    def add(self, layer: int, rows: Tensor, which: Tensor) -> None:
        """Rows [B · tokens, width] of a layer, in the order of the tokens."""
        if not self.running:
            return
        stream = rows.detach().view(self.batch, self.tokens, -1)
        real = self.real().to(stream.device)
        self.result[layer] = torch.stack(
            [peaks(one[kept], layer) for one, kept in zip(stream, real, strict=True)]
        )


def peaks(stream: Tensor, layer: int = 0) -> Tensor:
    """float64 [FIELDS] of one text, [tokens, width]."""
    if bool(stream.isnan().any()):
        count = int(stream.isnan().sum())
        raise ModelError(
            f"{count} of {stream.numel()} entries of the residual stream after layer {layer} are "
            "NaN, so they have no statistics; load the model in float32 or bfloat16, or choose "
            "layers before this one",
            code="nan-activations",
            point="residual",
            layer=layer,
            count=count,
        )
    size = stream.abs().double().flatten()
    top, where = size.topk(TOP)
    median = size.median()
    massive = ((size > MASSIVE) & (size >= TIMES * median)).sum()
    token, dimension = where[0] // stream.shape[1], where[0] % stream.shape[1]
    fields = torch.cat(
        [top, torch.stack([median, *(n.double() for n in (massive, token, dimension))]).to(top)]
    )
    assert len(fields) == len(FIELDS)
    return fields
