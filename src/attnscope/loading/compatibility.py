"""Check that a text matches a model and its tokenizer: length, token ids, first token.

A prompt longer than the model's positions gives meaningless numbers or a crash. A model that was
trained with a begin-of-sequence token puts much of its attention on it, and its heads behave
differently without it. (On one text, half of the heads of Gemma 3 270M were sinks with the token,
and none without.)
"""

import re
import warnings
from typing import Any

from attnscope.errors import AttnscopeWarning, InputError, ModelError

# Families with relative positions, although their configurations have a number of positions.
_BY_DISTANCE = ("t5", "mt5", "umt5", "longt5", "switch_transformers", "deberta", "deberta-v2")
# Families whose positions start after the id of the padding token.
_AFTER_PADDING = (
    *("roberta", "camembert", "xlm-roberta", "xlm-roberta-xl", "roberta-prelayernorm", "xmod"),
    *("data2vec-text", "mpnet", "longformer", "esm", "ibert"),
)
_TRAINED_WITH_BOS = ("gemma", "llama", "mistral", "ministral", "mixtral", "cohere", "deepseek")


def positions(config: Any) -> tuple[int | None, bool]:
    """The model's number of positions (None: unlimited), and whether they are learned embeddings.

    A model cannot compute tokens beyond learned positions; beyond others it can.
    """
    text = config.get_text_config()
    made_for = getattr(text, "max_position_embeddings", None)
    if not isinstance(made_for, int) or made_for < 1:
        return None, False
    if text.model_type in _AFTER_PADDING:
        made_for -= (getattr(text, "pad_token_id", None) or 0) + 1
    rotary = getattr(text, "rope_parameters", None)
    learned = not (rotary or getattr(text, "alibi", False) or text.model_type in _BY_DISTANCE)
    return max(made_for, _stretched(rotary)), learned


def _stretched(rotary: Any) -> int:
    """The number of positions after rotary scaling, such as YaRN; 0 without scaling."""
    if not isinstance(rotary, dict):
        return 0
    parts = [rotary, *(part for part in rotary.values() if isinstance(part, dict))]
    return max(
        int(part.get("factor") or 1) * int(part.get("original_max_position_embeddings") or 0)
        for part in parts
    )


def check_fit(config: Any, ids: Any, *, beyond: bool | None = False) -> None:
    """Refuse token ids [K] for which the model has no positions or no embeddings.

    `beyond` allows more tokens than positions, unless the positions are learned. None: the caller
    has no option for it, so the message names none.
    """
    made_for, learned = positions(config)
    if made_for is not None and len(ids) > made_for and (learned or not beyond):
        way = "make the prompt shorter"
        if learned:
            way = f"its position embeddings are learned, so it has no more; {way}"
        elif beyond is not None:
            way = f"{way}, or set beyond_positions (--beyond-positions)"
        raise InputError(
            f"the prompt has {len(ids):,} tokens and the model {made_for:,} positions; {way}",
            code="too-many-tokens",
            tokens=len(ids),
            positions=made_for,
        )
    words = getattr(config.get_text_config(), "vocab_size", None)
    highest = int(max(ids))
    if isinstance(words, int) and highest >= words:
        raise InputError(
            f"token id {highest} exceeds the model's {words:,} embeddings; use the tokenizer of "
            "this model",
            code="wrong-tokenizer",
            id=highest,
            embeddings=words,
        )


def check_vocabulary(tokenizer: Any, name: str) -> None:
    """Refuse a tokenizer without its vocabulary or its merges."""
    words = set(tokenizer.get_vocab()) - set(tokenizer.get_added_vocab())
    if not words:
        raise ModelError(
            f"the tokenizer of {name!r} has only its {len(tokenizer.get_vocab())} special tokens; "
            "is tokenizer.json missing?",
            code="no-vocabulary",
            model=name,
        )
    model: Any = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    if type(model).__name__ != "BPE" or getattr(model, "ignore_merges", False):
        return
    plain = [word for word in words if word.isascii() and word.isalpha()]
    longest = max(plain, key=lambda word: (len(word), word), default="")
    if len(model.tokenize(longest)) == len(longest) > 1:
        raise ModelError(
            f"the tokenizer of {name!r} has no merges: it splits {longest!r}, a word of its "
            "vocabulary, into letters; is merges.txt or a part of tokenizer.json missing?",
            code="no-merges",
            model=name,
        )


def expected_bos(config: Any, tokenizer: Any) -> str | None:
    """The begin-of-sequence token that a model was probably trained with, or None.

    Many configurations name a token that no text starts with (<|endoftext|>, <|im_start|>). So
    the family must use such a token, its name must be one of a begin-of-sequence token, and the
    tokenizer's configuration must not disable it.
    """
    text = config.get_text_config()
    token = getattr(tokenizer, "bos_token", None)
    stated = getattr(text, "bos_token_id", None)
    if token is None or stated != tokenizer.bos_token_id:
        return None
    if not text.model_type.startswith(_TRAINED_WITH_BOS):
        return None
    if (tokenizer.init_kwargs or {}).get("add_bos_token") is False:
        return None
    begins = re.fullmatch(r"<s>|.*(bos|begin).*", str(token), re.IGNORECASE | re.DOTALL)
    return str(token) if begins else None


def warn_without_bos(config: Any, tokenizer: Any, ids: Any, whose: str) -> None:
    """Warn if token ids [K] lack the begin-of-sequence token that the model was trained with."""
    token = expected_bos(config, tokenizer)
    if token is not None and int(ids[0]) != tokenizer.bos_token_id:
        warnings.warn(
            f"{whose}: texts do not start with {token}, but the model was probably trained with "
            "it. Its heads may behave differently without it. Add it with bos=True (--bos on the "
            "command line, bos: true in an experiment)",
            AttnscopeWarning,
            stacklevel=3,
        )


def add_bos(tokenizer: Any, name: str) -> None:
    """Make the tokenizer and its chat template add the begin-of-sequence token."""
    from tokenizers.processors import Sequence, TemplateProcessing

    token = getattr(tokenizer, "bos_token", None)
    if token is None:
        raise ModelError(
            f"the tokenizer of {name!r} has no begin-of-sequence token; omit bos",
            code="no-bos-token",
            model=name,
        )
    if tokenizer("a").input_ids[:1] != [tokenizer.bos_token_id]:
        backend = tokenizer.backend_tokenizer
        first = TemplateProcessing(
            single=[token, "$A"],
            pair=[token, "$A", "$B"],
            special_tokens=[(token, tokenizer.bos_token_id)],
        )
        before = backend.post_processor
        backend.post_processor = first if before is None else Sequence([before, first])
    if isinstance(tokenizer.chat_template, str) and not writes_bos(tokenizer):
        tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template


def writes_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer's chat template writes the begin-of-sequence token."""
    template, token = getattr(tokenizer, "chat_template", None), tokenizer.bos_token
    if not isinstance(template, str) or token is None:
        return False
    return "bos_token" in template or token in template
