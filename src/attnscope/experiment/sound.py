"""Sound for a speech model: the features of the sentences of a batch, and their words in time."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from attnscope.errors import InputError
from attnscope.experiment.condition_batch import ConditionBatch
from attnscope.loading import load_processor
from attnscope.measures.layer import PerQuery, Sound
from attnscope.prompts.speech import RATE, Sentence, sentence_of
from attnscope.spec.prompt_sources import SpeechPrompts
from attnscope.tokens import TokenizedPrompt


def has_sound(batch: ConditionBatch) -> bool:
    """Whether the prompts of a batch are spoken."""
    return isinstance(batch.experiment.prompts, SpeechPrompts)


def speech_parts(model: Any) -> tuple[Any, Any]:
    """The model without its head, and its decoder; an error if it does not read sound."""
    if getattr(model, "main_input_name", None) != "input_features" or not (
        getattr(model.config, "is_encoder_decoder", False)
    ):
        raise InputError(
            f"{type(model).__name__} is no speech model with an encoder and a decoder; prompts of "
            "the source 'speech' need one, such as zoo:whisper-tiny-en",
            code="no-speech-model",
            model=type(model).__name__,
        )
    return model.base_model, model.get_decoder()


def speech_inputs(batch: ConditionBatch, model: Any) -> dict[str, Tensor]:
    """The inputs of a speech model: it hears the sentences and reads their transcripts."""
    speech_parts(model)
    sounds = [sentence.sound for sentence in _sentences(batch)]
    extracted = _extractor(batch.plan.info.pinned)(sounds, sampling_rate=RATE, return_tensors="pt")
    inputs = {f"decoder_{name}": value.to(model.device) for name, value in batch.inputs.items()}
    features: Tensor = extracted["input_features"].to(model.device, model.dtype)
    return {"input_features": features, **inputs}


def sound_of(batch: ConditionBatch, cross: PerQuery, frames: int) -> Sound:
    """The words in time, for measures of the cross-attention `cross` to so many frames."""
    sentences = _sentences(batch)
    seconds = _extractor(batch.plan.info.pinned).chunk_length / frames
    middles = (np.arange(frames) + 0.5) * seconds
    words = np.full((len(sentences), frames), -1)
    for row, sentence in enumerate(sentences):
        for number, word in enumerate(sentence.words):
            words[row, (middles >= word.start) & (middles < word.end)] = number
    of_tokens = np.full(batch.real.shape, -1)
    for row, (cell, sentence) in enumerate(zip(batch.cells, sentences, strict=True)):
        of_tokens[row, : len(cell.tokens)] = words_of_tokens(cell.tokens, sentence)
    heard = [int((middles < sentence.seconds).sum()) for sentence in sentences]
    return Sound(cross=cross, frames=np.array(heard), word_of_frame=words, word_of_token=of_tokens)


def words_of_tokens(tokens: TokenizedPrompt, sentence: Sentence) -> NDArray[np.int64]:
    """[K]: the word of the sentence that each token has a letter of; -1 for none."""
    text = tokens.prompt.text
    letters = np.full(len(text), -1)
    start = text.index(sentence.text)
    for number, word in enumerate(sentence.words):
        letters[start + word.first : start + word.last] = number
    letters[[at for at, letter in enumerate(text) if letter.isspace()]] = -1
    return np.array([letters[first:last].max(initial=-1) for first, last in tokens.offsets])


def _sentences(batch: ConditionBatch) -> list[Sentence]:
    return [sentence_of(cell.tokens.prompt.text) for cell in batch.cells]


@cache
def _extractor(name: str) -> Any:
    """The feature extractor of a model."""
    return load_processor(name).feature_extractor
