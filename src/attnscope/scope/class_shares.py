"""The share of every key of a scope in every class: from a class set, class ids, or a mask."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnscope.errors import InputError, ScopeError, is_int, out_of_range, wrong_shape
from attnscope.measures.mass import shares_of
from attnscope.tokens import ClassSet
from attnscope.tokens.find_text import check_tokenizer

if TYPE_CHECKING:
    from attnscope.scope.text_sums import TextSums


def class_shares(scope: "TextSums", keys: int, classes: Any, n: Any) -> Tensor:
    """[B, keys, n]: see `Scope.mass` for `classes` and `n`."""
    if isinstance(classes, ClassSet):
        tokenizer = check_tokenizer(scope._tokenizer if n is None else n)
        ids, real = known_tokens(scope), scope._real_keys().numpy()
        return torch.from_numpy(classes.weights(ids.where(ids >= 0, 0).numpy(), tokenizer, real))
    if n is not None and not is_int(n, 1):
        raise InputError(
            f"n={n!r} must be the number of classes, a whole number from 1; a tokenizer goes with "
            "a class set",
            code="bad-number",
            argument="n",
            value=n,
        )
    ids = torch.as_tensor(classes)
    shape = [*_widths(scope, keys, ids)]
    if ids.dtype == torch.bool and ids.ndim == 2:  # a mask is one class
        ids, n = ids.long() - 1, n or 1
    if ids.is_floating_point() and list(ids.shape) == [*shape, n or ids.shape[-1]]:
        return pad(ids[:, :keys], (0, 0, 0, max(keys - shape[1], 0)))
    if list(ids.shape) != shape or ids.is_floating_point():
        expected = (
            f"an int tensor {shape} ([batch, keys]), a bool tensor of this shape or float shares "
            f"{[*shape, n or 'classes']}"
        )
        raise wrong_shape("class_ids", expected, ids)
    n = n or max(int(ids.max()) + 1, 1)
    if ids.numel() and (int(ids.max()) >= n or int(ids.min()) < -1):
        extremes = int(ids.min()), int(ids.max())
        raise out_of_range("class_ids", f"in -1 … {n - 1} for n={n}", *extremes)
    return shares_of(pad(ids.long()[:, :keys], (0, max(keys - shape[1], 0)), value=-1), n)


def _widths(scope: "TextSums", keys: int, ids: Tensor) -> tuple[int, int]:
    """The batch, and the number of keys that class ids may have.

    After `generate` they may be those of the prompt, where later tokens have no class, or of the
    whole output, whose last token the model did not read.
    """
    width = ids.shape[1] if ids.ndim > 1 else keys
    prompt_or_output = scope._completion_start <= width <= keys + scope._in_generate
    return len(scope._first_token), width if scope._continued and prompt_or_output else keys


def known_tokens(scope: "TextSums") -> Tensor:
    """int64 [B, K]: the token ids of the keys; an error if they are unknown."""
    ids = scope.tokens
    if ids is None:
        raise ScopeError(
            "the model did not get the token ids of these keys (it got inputs_embeds, or a "
            "prefix before them); give class ids, int [batch, keys], in place of a class set",
            code="no-token-ids",
        )
    return ids
