"""Reads keys from the pages of vLLM's KV cache.

A KV cache is a tensor [pages, KV heads, tokens, channels] that holds the keys and values of a
layer. How a page is laid out depends on the attention backend and on the processor. So the backend
writes numbered keys to two spare pages, and the numbers show where each element of a key lies.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attnscope.errors import ModelError

BASE = 64
"""Numbers are written as digits below this base, which every dtype of a KV cache holds exactly."""

Writer = Callable[[Tensor, Tensor, Tensor, Tensor], object]
"""Writes keys and values [tokens, KV heads, size] to the slots of a KV cache, in this order:
keys, values, cache, slots."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PageLayout:
    """Where the keys of a page lie."""

    size: int
    """The size of a key."""
    index: Tensor
    """int64 [tokens, size]: index of each element of a key in the page of a head, laid flat."""
    strides: tuple[int, int, int] | None
    """Index of the first element, and its step per token and per dimension; None if the steps
    differ."""

    def view(self, cache: Tensor) -> Tensor | None:
        """[pages, KV heads, tokens, size]: the keys of a cache without a copy; None if the layout
        has no regular steps."""
        if self.strides is None:
            return None
        tokens, channels = cache.shape[2:]
        if self.strides == (0, channels, 1):
            return cache[..., : self.size]
        if cache.stride(3) != 1 or cache.stride(2) != channels:
            return None
        first, *steps = self.strides
        return cache.as_strided(
            (*cache.shape[:2], tokens, self.size),
            (*cache.stride()[:2], *steps),
            cache.storage_offset() + first,
        )

    def read(self, cache: Tensor, pages: Tensor) -> Tensor:
        """[KV heads, keys, size]: the keys of these pages, one page after the other."""
        view = self.view(cache)
        if view is not None:
            keys = view.index_select(0, pages)
        else:
            flat = cache.index_select(0, pages).flatten(2)
            index = self.index.to(cache.device)
            keys = flat.index_select(2, index.flatten()).view(*flat.shape[:2], *index.shape)
        return keys.transpose(0, 1).flatten(1, 2)


def learn_layout(write: Writer, cache: Tensor, size: int) -> PageLayout:
    """The layout of the pages of a cache, from two spare pages that the backend writes.

    Raises:
        ModelError: The backend changes keys as it writes them, or does not write them all.
    """
    heads, tokens, channels = cache.shape[1:]
    pages = torch.zeros_like(cache[:2])
    slots = torch.arange(tokens, 2 * tokens, device=cache.device)
    order = torch.arange(tokens * size)
    number = torch.zeros(tokens * channels, dtype=torch.int64)
    base = 1
    while base < tokens * size:
        digits = (order // base % BASE + 1).view(tokens, 1, size).expand(-1, heads, -1)
        keys = digits.to(cache.device, cache.dtype).contiguous()
        values = keys.new_full((tokens, heads, channels - size), -1.0)
        write(keys, values, pages, slots)
        written = pages[1].flatten(1).cpu().double()
        if bool((written != written[:1]).any()) or bool((pages[0] != 0).any()):
            raise _unreadable(cache)
        is_key = written[0] > 0
        if int(is_key.sum()) != len(order) or bool((written[0] != written[0].round()).any()):
            raise _unreadable(cache)
        number += torch.where(is_key, (written[0].long() - 1) * base, 0)
        base *= BASE
    positions = is_key.nonzero()[:, 0]
    number = number[positions]
    if not torch.equal(number.sort().values, order):
        raise _unreadable(cache)
    index = torch.empty_like(positions)
    index[number] = positions
    index = index.view(tokens, size)
    return PageLayout(size=size, index=index, strides=_strides(index))


def _strides(index: Tensor) -> tuple[int, int, int] | None:
    first = int(index[0, 0])
    by_token = int(index[1, 0]) - first if len(index) > 1 else 0
    by_size = int(index[0, 1]) - first if index.shape[1] > 1 else 0
    tokens, sizes = torch.arange(len(index))[:, None], torch.arange(index.shape[1])
    regular = torch.equal(index, first + tokens * by_token + sizes * by_size)
    return (first, by_token, by_size) if regular else None


def _unreadable(cache: Tensor) -> ModelError:
    return ModelError(
        f"attnscope cannot read keys from the KV cache {list(cache.shape)} of {cache.dtype}: the "
        "attention backend does not store keys as they are. Use the backend CPU_ATTN, FLASH_ATTN "
        "or TRITON_ATTN and kv_cache_dtype='auto'",
        code="unreadable-pages",
        shape=list(cache.shape),
        dtype=str(cache.dtype),
    )
