"""Spoken sentences with the time of each word, made with espeak-ng (`training/speech.py`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import InputError
from attnscope.prompts.sample import Sample
from attnscope.tokens.regions import join

RATE = 16_000
"""Samples per second."""
TRANSCRIPT = "transcript"
"""The region of the spoken words."""
_FOLDER = Path(__file__).parent / "sounds"


@dataclass(frozen=True)
class Word:
    """A spoken word."""

    first: int
    """Its first character in the text."""
    last: int
    """The character after it."""
    start: float
    """Seconds."""
    end: float


@dataclass(frozen=True)
class Sentence:
    """A spoken sentence."""

    file: str
    text: str
    words: tuple[Word, ...]

    @cached_property
    def sound(self) -> NDArray[np.float32]:
        """The samples, −1 … 1."""
        return read_mu_law(_FOLDER / self.file)

    @property
    def seconds(self) -> float:
        """The length of the sound."""
        return len(self.sound) / RATE


@cache
def sentences() -> tuple[Sentence, ...]:
    """All sentences."""
    entries: list[dict[str, Any]] = json.loads((_FOLDER / "sentences.json").read_text("utf-8"))
    return tuple(
        Sentence(entry["file"], entry["text"], tuple(Word(*word) for word in entry["words"]))
        for entry in entries
    )


def speech_samples(count: int, *, seed: int = 0) -> Iterator[Sample]:
    """So many sentences; seed n begins after those of seed n − 1, in a circle."""
    known = sentences()
    if count > len(known):
        raise InputError(
            f"prompts.count is {count}, and there are {len(known)} spoken sentences; give a "
            "smaller count",
            code="too-few-prompts",
            prompts=len(known),
            count=count,
        )
    for number in range(seed * count, (seed + 1) * count):
        sentence = known[number % len(known)]
        # A space before the first word, as Whisper writes it.
        prompt = join([(None, " "), (TRANSCRIPT, sentence.text)])
        yield Sample(prompt, None, {"sound": sentence.file, "seconds": sentence.seconds})


def sentence_of(text: str) -> Sentence:
    """The sentence of a prompt's text."""
    for sentence in sentences():
        if sentence.text == text.strip():
            return sentence
    raise InputError(
        f"no sound has the text {text[:80]!r}; prompts of the source 'speech' cannot be changed",
        code="no-sound",
        text=text[:80],
    )


def read_mu_law(path: Path) -> NDArray[np.float32]:
    """The samples of a WAV file with 8-bit µ-law, one channel, 16 kHz."""
    data = path.read_bytes()
    at, chunks = 12, {}
    while at + 8 <= len(data):
        size = int.from_bytes(data[at + 4 : at + 8], "little")
        chunks[data[at : at + 4]] = data[at + 8 : at + 8 + size]
        at += 8 + size
    code = np.frombuffer(chunks[b"data"], np.uint8) ^ np.uint8(255)
    value = ((code & 15).astype(np.int32) * 8 + 132 << (code >> 4 & 7).astype(np.int32)) - 132
    return (np.where(code & 128, -value, value) / 32768).astype(np.float32)
