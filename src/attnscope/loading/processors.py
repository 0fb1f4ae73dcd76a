"""Load the processor of a model that reads pictures or sound."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any, NamedTuple

from attnscope.errors import InputError, missing_package
from attnscope.tokens.modalities import forget_modalities, tokenizer_in

if TYPE_CHECKING:
    from attnscope.loading.model_names import Source

FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
"""A model with one of these files has a processor."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


class Reader(NamedTuple):
    """What turns text, pictures and sound into the inputs of a model."""

    tokenizer: Any
    """None for a vision tower, which reads no text."""
    processor: Any = None
    missing: InputError | None = None
    """Why the processor cannot be loaded: a package is missing."""


def has_processor(source: Source) -> bool:
    """Whether a model has a processor."""
    return _has_any(source, FILES)


def has_tokenizer(source: Source) -> bool:
    """Whether a model has a tokenizer; a vision tower has none."""
    return _has_any(source, TOKENIZER_FILES)


def _has_any(source: Source, names: tuple[str, ...]) -> bool:
    if source.folder is not None:
        return any((source.folder / name).is_file() for name in names)
    from transformers.utils import cached_file

    paths = (
        cached_file(
            source.location,
            name,
            revision=source.commit,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        for name in names
    )
    return any(path is not None for path in paths)


def read_processor(source: Source, tokenizer: Any, trust_remote_code: bool = False) -> Reader:
    """The processor of a model, with this tokenizer as its own; or its image processor alone."""
    import transformers

    try:
        processor = transformers.AutoProcessor.from_pretrained(
            source.location, revision=source.commit, trust_remote_code=trust_remote_code
        )
    except (ImportError, ValueError) as error:
        missing = _missing(source, str(error))
        if missing is None:
            raise
        if tokenizer is not None:
            forget_modalities(tokenizer, missing)
        return Reader(tokenizer, missing=missing)
    if tokenizer is None or not hasattr(processor, "tokenizer"):
        return Reader(tokenizer, None if hasattr(processor, "get_vocab") else processor)
    processor.tokenizer = tokenizer
    template = getattr(processor, "chat_template", None)
    if template and not tokenizer.chat_template:
        tokenizer.chat_template = template
    return Reader(tokenizer_in(processor), processor)


def _missing(source: Source, reason: str) -> InputError | None:
    """The error for a package that the processor needs; None if none is missing."""
    if importlib.util.find_spec("PIL") is None:
        return missing_package(f"the processor of {source.name!r}", "pillow", "vision")
    if "torchvision" in reason.lower() and importlib.util.find_spec("torchvision") is None:
        return InputError(
            f"the processor of {source.name!r} has a video part, which needs the package "
            "torchvision: install the build for your version of torch",
            code="missing-package",
            package="torchvision",
        )
    return None
