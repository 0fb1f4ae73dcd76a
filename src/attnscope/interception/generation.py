"""Tracks `generate` of transformers: where the completion starts, and which sequences have ended.

While a model is watched, `generate` and its stopping criteria are patched. The results of the
criteria mark the end of a sequence; token ids are never used for that. Outside `generate`, the
number of tokens of a pass is all that is known.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock, get_ident
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import StoppingCriteriaList

from attnscope.errors import ScopeError
from attnscope.interception import patches

NEVER = torch.iinfo(torch.int64).max


@dataclass(slots=True, eq=False)
class _Call:
    """One call of `generate`."""

    start: int | None = None
    """Where its completion starts; None before its first token."""
    n_chosen: int = 0
    """Tokens generated so far."""
    finished_flags: list[Tensor] = field(default_factory=list)
    """bool [B] for each of the last tokens that `end` has not read: did it end its sequence?"""
    ends: Tensor | None = None

    def end(self) -> Tensor | None:
        """As in `CompletionSpan`. Synchronizes with the device, so call it as late as possible."""
        if self.finished_flags and self.start is not None:
            first = self.start + self.n_chosen - len(self.finished_flags)
            finished = torch.stack(self.finished_flags).cpu()
            self.finished_flags = []
            ends = torch.where(finished.any(0), finished.int().argmax(0) + first, NEVER)
            self.ends = ends if self.ends is None else torch.minimum(self.ends, ends)
        ended = self.ends is not None and bool((self.ends < NEVER).any())
        return self.ends if ended else None


@dataclass(frozen=True, eq=False)
class Prompt:
    """The prompt of a `generate` call; chunked prefill feeds it in several passes.

    Positions are those of the sequence.
    """

    end: int
    """Tokens from here on are generated."""
    mask: Tensor | None
    """[B, end], 0 at padding; None without padding."""

    @cached_property
    def last(self) -> Tensor:
        """int64 [B or 1] on the CPU: the last real token of each sequence.

        Synchronizes with the device, so read it only if needed.
        """
        if self.mask is None:
            return torch.tensor([self.end - 1])
        return torch.where(self.mask.cpu().bool(), torch.arange(self.end), -1).amax(1)

    @classmethod
    def of(
        cls, model: Any, ids: Tensor, cache: Any = None, inputs_embeds: Any = None, **kwargs: Any
    ) -> "Prompt":
        """Read the arguments of a decoding method of transformers."""
        is_encoder_decoder = model.config.is_encoder_decoder
        mask = kwargs.get("decoder_attention_mask" if is_encoder_decoder else "attention_mask")
        end = ids.shape[1]
        if inputs_embeds is not None and not is_encoder_decoder:
            end = inputs_embeds.shape[1]
        elif cache is not None:  # if ids hold only the new tokens, the mask is longer
            config = kwargs.get("generation_config")
            full = getattr(config, "_mask_length", -1) if mask is None else mask.shape[1]
            end += 0 if full == end else int(cache.get_seq_length())
        return cls(end, mask if mask is not None and mask.shape[1] == end else None)


@dataclass(frozen=True, slots=True, eq=False)
class CompletionSpan:
    """Which tokens of a pass are prompt and which are completion, by position in the sequence."""

    start: int
    """Tokens before this position are the prompt; those from it on were generated."""
    turn: int
    """The number of completions so far."""
    call: _Call | None = None
    last: Tensor | None = None
    """int64 [B or 1] on the CPU: the last token of the prompt; None for the last of the pass."""

    @property
    def end(self) -> Tensor | None:
        """int64 [B] on the CPU: tokens from here on are not counted; None if no sequence has ended.

        The token that ended a sequence is not counted either. A batch of one would not feed it.
        """
        return None if self.call is None else self.call.end()


class Spans(Protocol):
    """The source of completion spans: a model that generates, or one whose spans are known."""

    @property
    def in_generate(self) -> bool:
        """Whether a `generate` call is running."""

    def begin_pass(self) -> None:
        """Called when a forward pass starts."""

    def span(self, first: int, queries: int) -> CompletionSpan:
        """The completion span of a pass of `queries` tokens from position `first`."""


@dataclass(frozen=True, slots=True)
class KnownSpans:
    """The spans of a source that is no transformers model: its completion starts at `start`."""

    start: int | None = None
    """None if it has no completion."""
    in_generate = False

    def begin_pass(self) -> None:
        """Nothing to do."""

    def span(self, first: int, queries: int) -> CompletionSpan:
        """As in `Spans`."""
        return CompletionSpan(first + queries if self.start is None else self.start, 0)


class GenerationTracker:
    """Tracks the `generate` calls of one watched model, and its passes outside `generate`."""

    def __init__(self, base: nn.Module, on_end: Callable[[], None]):
        self.base = base
        self.on_end = on_end
        """Called at the end of a `generate` call."""
        self.thread: int | None = None
        """The thread that entered the block."""
        self.depth = 0
        """The number of nested `generate` calls that are running."""
        self.call: _Call | None = None
        """The `generate` call whose stopping criteria are tracked."""
        self.prompt: Prompt | None = None
        """The prompt of the outermost `generate` call."""
        self.prefill_passes = 0
        """Consecutive passes of several tokens; chunked prefill makes more than one."""
        self.position = 0
        """The number of tokens of the sequence that were fed."""
        self.turn = 0
        self.passes = 0
        """Passes since the last token was generated."""
        self._span_cache: tuple[Any, CompletionSpan] | None = None

    @property
    def in_generate(self) -> bool:
        """Whether a `generate` call is running."""
        return self.call is not None

    def tracks(self, model: nn.Module) -> bool:
        """Whether a call of this model, in this thread, runs the watched base model."""
        return get_ident() == self.thread and any(part is self.base for part in model.modules())

    def begin(self, beams: int) -> None:
        """Start to track a `generate` call."""
        if beams > 1:
            raise ScopeError(
                f"num_beams={beams}: beam search reorders the sequences of its batch at every "
                "decode step, so attention cannot be summed by sequence; generate with "
                "num_beams=1, or generate first and then watch one forward pass of the whole text",
                code="beam-search",
                num_beams=beams,
            )
        self.call, self.passes = _Call(), 0

    def end(self) -> None:
        """End a `generate` call, also after an error."""
        self.depth -= 1
        if self.depth == 0:
            self.prompt, self.prefill_passes = None, 0
        if self.depth == 0 and self.call is not None:
            self.call = None
            self.on_end()

    def on_token(self, finished: Tensor) -> None:
        """Record a generated token; `finished` is the result of the stopping criteria, bool [B]."""
        if self.call is None:
            return
        if self.call.start is None:
            self.call.start = self.position
            self.turn += 1
        self.call.finished_flags.append(finished)
        self.call.n_chosen += 1
        self.passes = 0

    def begin_pass(self) -> None:
        """Record that a forward pass starts."""
        self.passes += 1

    def span(self, first: int, queries: int) -> CompletionSpan:
        """The completion span for a pass of `queries` tokens from position `first`."""
        key = first, queries, self.call, self.turn, self.passes
        if self._span_cache is None or self._span_cache[0] != key:
            span = self._make_span(first, queries)
            self._span_cache = (first, queries, self.call, self.turn, self.passes), span
        return self._span_cache[1]

    def _make_span(self, first: int, queries: int) -> CompletionSpan:
        if self.call is not None and first == 0 and self.passes > 1:
            raise ScopeError(
                "generate runs the model on a second sequence between two tokens of the first, so "
                "their attention cannot be separated; generate without guidance_scale",
                code="second-sequence",
            )
        self.position = first + queries
        self.prefill_passes = (
            0 if queries == 1 and first > 0 else 1 if first == 0 else self.prefill_passes + 1
        )
        if self.call is not None:
            start = self.position if self.call.start is None else self.call.start
            return CompletionSpan(start, self.turn, self.call)
        # Outside `generate`, one token after others is a decode step of the user's own loop.
        # Several tokens are a prompt, a chunk of a prompt, or the next turn.
        is_decode_step = first > 0 and queries == 1
        self.turn += is_decode_step
        return CompletionSpan(first if is_decode_step else self.position, self.turn)


class _TrackedCriteria(StoppingCriteriaList):  # type: ignore[misc]
    """Stopping criteria that pass their result to the trackers."""

    def __init__(self, criteria_list: Any, trackers: list[GenerationTracker]):
        super().__init__(criteria_list)
        self._trackers = trackers

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        finished = super().__call__(input_ids, scores, **kwargs)
        for tracker in self._trackers:
            tracker.on_token(finished)
        return finished


# The trackers of all open watches; replaced as a whole, as other threads may iterate over it.
_trackers: tuple[GenerationTracker, ...] = ()
_lock = Lock()


@contextmanager
def tracking_generate(trackers: Iterable[GenerationTracker]) -> Iterator[None]:
    """Track the `generate` calls of these trackers' models, in the thread that enters the block."""
    trackers = list(trackers)
    for tracker in trackers:
        tracker.thread = get_ident()
    with patches.applied(*_generate_patch()):
        _update_trackers(lambda before: (*before, *trackers))
        try:
            yield
        finally:
            _update_trackers(lambda before: tuple(g for g in before if g not in trackers))


def _update_trackers(
    change: Callable[[tuple[GenerationTracker, ...]], tuple[GenerationTracker, ...]],
) -> None:
    global _trackers
    with _lock:
        _trackers = change(_trackers)


def _generate(original: Callable[..., Any]) -> Callable[..., Any]:
    def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as ends:  # each tracker ends, even if the end of another one raises
            for tracker in _trackers:
                if tracker.tracks(model):
                    tracker.depth += 1
                    ends.callback(tracker.end)
            return original(model, *args, **kwargs)

    return generate


def _criteria(original: Callable[..., Any]) -> Callable[..., Any]:
    def criteria(model: Any, *args: Any, **kwargs: Any) -> Any:
        criteria_list = original(model, *args, **kwargs)
        trackers = [g for g in _trackers if g.depth > 0 and g.tracks(model)]
        config = kwargs.get("generation_config", args[0] if args else None)
        for tracker in trackers:
            tracker.begin(getattr(config, "num_beams", None) or 1)
        return _TrackedCriteria(criteria_list, trackers) if trackers else criteria_list

    return criteria


def _decoding(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a decoding method, whose arguments hold the prompt before the first pass."""

    def decode(model: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        for tracker in _trackers:
            if tracker.depth == 1 and tracker.tracks(model):
                cache = kwargs.get("past_key_values")
                tracker.prompt = Prompt.of(model, input_ids, cache, **kwargs)
        return original(model, input_ids, *args, **kwargs)

    return decode


def _generate_patch() -> Any:
    return patches.generate_methods(
        {
            "generate": _generate,
            "_get_stopping_criteria": _criteria,
            "_sample": _decoding,
            "_assisted_decoding": _decoding,
        }
    )
