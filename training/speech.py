"""Make the spoken sentences of `attnscope.prompts.speech` with espeak-ng.

    apt-get install libespeak-ng1
    python training/speech.py src/attnscope/prompts/sounds

espeak-ng is called through its C library, because that reports when each word begins. Every
sentence becomes a WAV file (16 kHz, one channel, 8-bit µ-law), and `sentences.json` has the texts
and the times of the words. Needs numpy and scipy.
"""

from __future__ import annotations

import ctypes
import json
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.signal import resample_poly

RATE = 16_000
WORDS_PER_MINUTE = 180
VOICES = ("en-us", "en-gb", "en-gb-scotland")
SENTENCES = (
    "The old keeper climbed the narrow stairs every evening.",
    "Seven small boats left the harbor before sunrise.",
    "My grandmother keeps honey on the highest shelf.",
    "A train from the north arrives at half past nine.",
    "The children built a bridge of wooden blocks.",
    "They cannot remember a colder winter than this one.",
    "Please put the yellow basket beside the kitchen door.",
    "Heavy rain covered the road with mud and leaves.",
    "He painted the garden fence green last summer.",
    "Our teacher reads a long story on Friday morning.",
    "Two black horses were waiting behind the barn.",
    "She bought fresh bread and apples at the market.",
    "The doctor asked him to open his mouth.",
    "Strong wind carried the kite above the trees.",
    "They found an empty bottle under the bridge.",
    "The museum opens its doors at ten on Sunday.",
    "A young man with a guitar sang near the fountain.",
    "Snow fell quietly on the roof of the church.",
    "I forgot my umbrella in the back of the car.",
    "The farmer sold his oldest cow last Tuesday.",
    "Every window of the house was painted blue.",
    "We followed the river until the valley became wide.",
    "The cook added salt and pepper to the soup.",
    "An island appeared on the horizon after lunch.",
)


class Event(ctypes.Structure):
    """`espeak_EVENT` of speak_lib.h."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("unique_identifier", ctypes.c_uint),
        ("text_position", ctypes.c_int),
        ("length", ctypes.c_int),
        ("audio_position", ctypes.c_int),
        ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p),
        ("id", ctypes.c_char * 8),
    )


WORD = 1
Callback = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(Event)
)


class Speaker:
    """espeak-ng."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libespeak-ng.so.1")
        synchronous = 2
        self.rate = self.library.espeak_Initialize(synchronous, 0, None, 0)
        self.callback = Callback(self._receive)
        self.library.espeak_SetSynthCallback(self.callback)
        self.parts: list[NDArray[np.int16]] = []
        self.words: list[tuple[int, int, float]] = []

    def _receive(self, wave: Any, count: int, events: Any) -> int:
        if count:
            self.parts.append(np.ctypeslib.as_array(wave, (count,)).copy())
        number = 0
        while events[number].type:
            event = events[number]
            if event.type == WORD:
                start = event.text_position - 1
                self.words.append((start, start + event.length, event.audio_position / 1000))
            number += 1
        return 0

    def say(self, text: str, voice: str) -> tuple[NDArray[np.float64], list[list[float]]]:
        """The sound at 16 kHz, −1 … 1; and of each word its characters and its seconds."""
        self.parts, self.words = [], []
        self.library.espeak_SetVoiceByName(voice.encode())
        self.library.espeak_SetParameter(1, WORDS_PER_MINUTE, 0)
        data = text.encode() + b"\0"
        self.library.espeak_Synth(data, len(data), 0, 1, 0, 1, None, None)
        self.library.espeak_Synchronize()
        sound = resample_poly(np.concatenate(self.parts) / 32768.0, RATE, self.rate)
        events = [word for word in self.words if word[1] > word[0]]
        nexts = [*events[1:], (len(text.rstrip(".")), 0, len(sound) / RATE)]
        words = [  # espeak-ng speaks some pairs, such as "on the", as one word
            [first, len(text[:after].rstrip()), round(start, 3), round(end, 3)]
            for (first, _, start), (after, _, end) in zip(events, nexts, strict=True)
        ]
        return sound, words


def to_mu_law(sound: NDArray[np.float64]) -> bytes:
    """G.711 µ-law of samples −1 … 1."""
    samples = np.clip(sound * 32768, -32_635, 32_635).astype(np.int64)
    biased = np.abs(samples) + 132
    exponent = np.floor(np.log2(biased)).astype(np.int64) - 7
    mantissa = (biased >> (exponent + 3)) & 15
    code = (np.where(samples < 0, 128, 0) | (exponent << 4) | mantissa) ^ 255
    return bytes(code.astype(np.uint8))


def write_wav(path: Path, sound: NDArray[np.float64]) -> None:
    """A WAV file with µ-law samples (format 7)."""
    data = to_mu_law(sound)
    data += b"\xff" * (len(data) % 2)
    form = struct.pack("<HHIIHHH", 7, 1, RATE, RATE, 1, 8, 0)
    fact = struct.pack("<I", len(data))
    chunks = b"".join(
        name + struct.pack("<I", len(content)) + content
        for name, content in ((b"fmt ", form), (b"fact", fact), (b"data", data))
    )
    path.write_bytes(b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks)


def main(folder: Path) -> None:
    """All sentences."""
    speaker = Speaker()
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for number, text in enumerate(SENTENCES):
        sound, words = speaker.say(text, VOICES[number % len(VOICES)])
        name = f"{number:02d}.wav"
        write_wav(folder / name, sound)
        entries.append({"file": name, "text": text, "words": words})
    lines = ",\n".join(json.dumps(entry) for entry in entries)
    (folder / "sentences.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
