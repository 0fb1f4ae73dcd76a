"""What `generate` of transformers says of itself: where a reply begins, which sequences are over.

While a model is watched, its `generate` is seen beginning and ending, and the verdicts of its
stopping criteria are overheard as they fall: never guessed from token ids. Outside `generate` a
pass says how many tokens it feeds, and nothing else. Must not know what is counted, or how.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock, get_ident
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, StoppingCriteriaList

from attnscope.capture import patches
from attnscope.errors import ScopeError

NEVER = torch.iinfo(torch.int64).max


@dataclass(slots=True, eq=False)
class _Call:
    """One call of `generate`."""

    start: int | None = None
    """Where its reply began; None before its first token."""
    chosen: int = 0
    """Tokens chosen so far."""
    verdicts: list[Tensor] = field(default_factory=list)
    """bool [B] for each of the last ones, where nobody has looked yet: did it end its sequence?"""
    ends: Tensor | None = None

    def end(self) -> Tensor | None:
        """As in `CompletionSpan`; waits for the device, so it is not asked sooner than need be."""
        if self.verdicts and self.start is not None:
            first = self.start + self.chosen - len(self.verdicts)
            over = torch.stack(self.verdicts).cpu()
            self.verdicts = []
            ends = torch.where(over.any(0), over.int().argmax(0) + first, NEVER)
            self.ends = ends if self.ends is None else torch.minimum(self.ends, ends)
        ended = self.ends is not None and bool((self.ends < NEVER).any())
        return self.ends if ended else None


@dataclass(frozen=True, eq=False)
class Prompt:
    """What `generate` is given to continue, of which a pass may feed a piece. Positions are those
    of the sequence."""

    end: int
    """Tokens from here on are generated."""
    mask: Tensor | None
    """[B, end], 0 at padding; None where there is none."""

    @cached_property
    def last(self) -> Tensor:
        """int64 [B or 1] on the CPU: the last real token of each sequence. Synchronises with the
        device, so it is read only where it is needed."""
        if self.mask is None:
            return torch.tensor([self.end - 1])
        return torch.where(self.mask.cpu().bool(), torch.arange(self.end), -1).amax(1)

    @classmethod
    def of(
        cls, model: Any, ids: Tensor, cache: Any = None, inputs_embeds: Any = None, **given: Any
    ) -> "Prompt":
        """Read the arguments of a decoding method of transformers."""
        decodes = model.config.is_encoder_decoder
        mask = given.get("decoder_attention_mask" if decodes else "attention_mask")
        end = ids.shape[1]
        if inputs_embeds is not None and not decodes:
            end = inputs_embeds.shape[1]
        elif cache is not None:  # where only new tokens are given, the mask is longer
            config = given.get("generation_config")
            whole = getattr(config, "_mask_length", -1) if mask is None else mask.shape[1]
            end += 0 if whole == end else int(cache.get_seq_length())
        return cls(end, mask if mask is not None and mask.shape[1] == end else None)


@dataclass(frozen=True, slots=True, eq=False)
class CompletionSpan:
    """Whose words the tokens of one pass are. Positions are those of the sequence."""

    start: int
    """Tokens before this position are the prompt's; those from it on were generated."""
    turn: int
    """How many replies have begun so far."""
    call: _Call | None = None
    last: Tensor | None = None
    """int64 [B or 1] on the CPU: where the last token of the prompt is; None for that of a pass."""

    @property
    def end(self) -> Tensor | None:
        """int64 [B] on the CPU: tokens from here on came after the end of their sequence, that
        which ended it included (alone in its batch, it would not have been fed); None where none
        did."""
        return None if self.call is None else self.call.end()


class GenerationTracker:
    """The `generate` calls of one watched model, and the passes its user runs without them."""

    def __init__(self, base: nn.Module, over: Callable[[], None]):
        self.base = base
        self.over = over
        """Called when a `generate` call is over."""
        self.thread: int | None = None
        """The thread that entered the block."""
        self.depth = 0
        """`generate` calls under way, one inside the other."""
        self.call: _Call | None = None
        """The one whose stopping criteria are overheard."""
        self.prompt: Prompt | None = None
        """Of the outermost `generate` call."""
        self.pieces = 0
        """Passes of several tokens, one after the other: of one prompt, perhaps."""
        self.position = 0
        """How many tokens of the sequence have been fed."""
        self.turn = 0
        self.passes = 0
        """Passes since the last token was chosen."""
        self._reply: tuple[Any, CompletionSpan] | None = None

    def concerns(self, model: nn.Module) -> bool:
        """Whether a call of this model, on this thread, runs what is watched."""
        return get_ident() == self.thread and any(part is self.base for part in model.modules())

    def begin(self, beams: int) -> None:
        """A `generate` call is about to run."""
        if beams > 1:
            raise ScopeError(
                f"num_beams={beams}: beam search shuffles the sequences of its batch at every "
                "step, so attention cannot be added up by sequence; generate with num_beams=1, "
                "or run the finished text through the model once more and measure that",
                code="beam-search",
                num_beams=beams,
            )
        self.call, self.passes = _Call(), 0

    def end(self) -> None:
        """A `generate` call is over, or broke off."""
        self.depth -= 1
        if self.depth == 0:
            self.prompt, self.pieces = None, 0
        if self.depth == 0 and self.call is not None:
            self.call = None
            self.over()

    def hear(self, verdict: Tensor) -> None:
        """The next token is chosen, and this is what the stopping criteria say of it."""
        if self.call is None:
            return
        if self.call.start is None:
            self.call.start = self.position
            self.turn += 1
        self.call.verdicts.append(verdict)
        self.call.chosen += 1
        self.passes = 0

    def begin_pass(self) -> None:
        """The model is about to run once."""
        self.passes += 1

    def reply(self, first: int, queries: int) -> CompletionSpan:
        """Whose words a pass feeds that begins at position `first`."""
        key = first, queries, self.call, self.turn, self.passes
        if self._reply is None or self._reply[0] != key:
            told = self._told(first, queries)
            self._reply = (first, queries, self.call, self.turn, self.passes), told
        return self._reply[1]

    def _told(self, first: int, queries: int) -> CompletionSpan:
        if self.call is not None and first == 0 and self.passes > 1:
            raise ScopeError(
                "generate runs the model on a second sequence between two tokens of the first "
                "(guidance_scale does), so their attention cannot be told apart; generate "
                "without it",
                code="second-sequence",
            )
        self.position = first + queries
        self.pieces = 0 if queries == 1 and first > 0 else 1 if first == 0 else self.pieces + 1
        if self.call is not None:
            start = self.position if self.call.start is None else self.call.start
            return CompletionSpan(start, self.turn, self.call)
        # One token after others is how a loop of the user's own feeds what it has just chosen;
        # several at once are a prompt, a piece of one, or the next turn.
        alone = first > 0 and queries == 1
        self.turn += alone
        return CompletionSpan(first if alone else self.position, self.turn)


class _TrackedCriteria(StoppingCriteriaList):  # type: ignore[misc]
    """Stopping criteria that also tell the watches what they decide."""

    def __init__(self, prepared: Any, told: list[GenerationTracker]):
        super().__init__(prepared)
        self._told = told

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        verdict = super().__call__(input_ids, scores, **kwargs)
        for generation in self._told:
            generation.hear(verdict)
        return verdict


# Those of all open watches; replaced as a whole, because other threads may iterate over it.
_listeners: tuple[GenerationTracker, ...] = ()
_lock = Lock()


@contextmanager
def listening(generations: Iterable[GenerationTracker]) -> Iterator[None]:
    """Tell these of the `generate` calls of their models, in the thread that enters the block."""
    told = list(generations)
    for generation in told:
        generation.thread = get_ident()
    with patches.applied("generate", _patch_generate):
        _change_listeners(lambda before: (*before, *told))
        try:
            yield
        finally:
            _change_listeners(lambda before: tuple(g for g in before if g not in told))


def _change_listeners(
    change: Callable[[tuple[GenerationTracker, ...]], tuple[GenerationTracker, ...]],
) -> None:
    global _listeners
    with _lock:
        _listeners = change(_listeners)


def _patch_generate() -> ExitStack:
    undo = ExitStack()
    patches.replace_method(undo, GenerationMixin, "generate", _generate)
    patches.replace_method(undo, GenerationMixin, "_get_stopping_criteria", _criteria)
    for decoding in ("_sample", "_assisted_decoding"):
        patches.replace_method(undo, GenerationMixin, decoding, _decoding)
    return undo


def _generate(plain: Callable[..., Any]) -> Callable[..., Any]:
    def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as ends:  # all of them end, also where the end of one raises
            for generation in _listeners:
                if generation.concerns(model):
                    generation.depth += 1
                    ends.callback(generation.end)
            return plain(model, *args, **kwargs)

    return generate


def _criteria(plain: Callable[..., Any]) -> Callable[..., Any]:
    def criteria(model: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = plain(model, *args, **kwargs)
        told = [g for g in _listeners if g.depth > 0 and g.concerns(model)]
        config = kwargs.get("generation_config", args[0] if args else None)
        for generation in told:
            generation.begin(getattr(config, "num_beams", None) or 1)
        return _TrackedCriteria(prepared, told) if told else prepared

    return criteria


def _decoding(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A decoding method, whose arguments say what the prompt is before any of it is fed."""

    def decode(model: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        for generation in _listeners:
            if generation.depth == 1 and generation.concerns(model):
                cache = kwargs.get("past_key_values")
                generation.prompt = Prompt.of(model, input_ids, cache, **kwargs)
        return plain(model, input_ids, *args, **kwargs)

    return decode
