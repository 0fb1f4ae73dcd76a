"""The keys that an intervention changes: a mask, positions of one sequence, or words."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnscope.errors import InputError, is_int, wrong_shape
from attnscope.tokens.find_text import check_tokenizer, find_tokens, tokenizer_of


@dataclass(frozen=True, eq=False, kw_only=True)
class KeyChoice:
    """The caller's choice of keys; exactly one field is set."""

    mask: Tensor | None = None
    """bool [B, keys] on the CPU."""
    positions: tuple[int, ...] | None = None
    words: str | None = None
    tokenizer: Any = None

    @classmethod
    def of(cls, model: Any, keys: Any, text: str | None, tokenizer: Any) -> "KeyChoice":
        """Check the arguments of an intervention."""
        if (keys is None) == (text is None):
            raise InputError(
                "give either keys (a bool tensor [batch, keys], or positions such as [4, 5]) or "
                "text (words of the prompt)",
                code="bad-argument",
                argument="keys",
            )
        if text is not None:
            tokenizer = tokenizer_of(model) if tokenizer is None else tokenizer
            return cls(words=text, tokenizer=check_tokenizer(tokenizer))
        tensor = torch.as_tensor(keys)
        if tensor.dtype == torch.bool and tensor.ndim == 2:
            if not bool(tensor.any()):
                raise InputError(
                    "keys is False everywhere; set it to True for at least one key", code="no-keys"
                )
            return cls(mask=tensor.detach().cpu())
        integral = not tensor.is_floating_point() and tensor.dtype != torch.bool
        if tensor.ndim != 1 or not integral or not len(tensor):
            raise wrong_shape(
                "keys",
                "a bool tensor [batch, keys], or a list of positions of one sequence",
                tensor,
            )
        return cls(positions=tuple(tensor.tolist()))

    def in_text(self, batch: int, tokens: int, ids: Tensor | None, padding: Any) -> Tensor:
        """bool [B, keys] on the CPU: the keys among the tokens of a text.

        `ids` [B, tokens] are None if the model did not get token ids; `padding` is 0 at padding.
        """
        if self.mask is not None:
            return self.mask
        if self.positions is not None:
            return self._at_positions(batch, tokens)
        if ids is None:
            raise InputError(
                "text: the model did not get token ids (it got inputs_embeds), so words cannot be "
                "found; give keys as a bool tensor [batch, keys]",
                code="no-token-ids",
            )
        real = torch.ones(batch, tokens, dtype=torch.bool)
        if padding is not None:
            real = padding[:, -tokens:].cpu() != 0
        mask = find_tokens(ids.cpu().numpy(), real.numpy(), self.tokenizer, self.words or "")
        return torch.from_numpy(mask)

    def _at_positions(self, batch: int, tokens: int) -> Tensor:
        if batch != 1:
            raise InputError(
                f"keys={list(self.positions or ())} are positions of one sequence, and the batch "
                f"has {batch}; give a bool tensor [{batch}, keys]",
                code="wrong-batch-size",
                argument="keys",
                batch=batch,
            )
        for position in self.positions or ():
            if not is_int(position) or position >= tokens:
                raise InputError(
                    f"keys: there is no token at position {position}; the text has tokens at 0 to "
                    f"{tokens - 1}",
                    code="out-of-range",
                    argument="keys",
                    value=position,
                )
        mask = torch.zeros(1, tokens, dtype=torch.bool)
        mask[0, list(self.positions or ())] = True
        return mask
