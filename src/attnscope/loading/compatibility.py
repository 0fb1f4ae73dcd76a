"""Whether a text fits a model and its tokenizer: its length, its ids, its first token.

A prompt beyond the positions a model was made for gives numbers that mean nothing, or a crash. A
model that was trained with a begin-of-sequence token rests much of its attention on it; without
it the heads do something else (on one page, half of Gemma 3 270M's heads were sinks with it and
none without).

This module must not know files, or how anything is measured.
"""

import re
import warnings
from typing import Any

from attnscope.errors import AttnscopeWarning, InputError, ModelError

# Positions by distance, although their configurations state a number of positions.
_BY_DISTANCE = ("t5", "mt5", "umt5", "longt5", "switch_transformers", "deberta", "deberta-v2")
# Positions are counted from behind the padding token's number.
_AFTER_PADDING = (
    *("roberta", "camembert", "xlm-roberta", "xlm-roberta-xl", "roberta-prelayernorm", "xmod"),
    *("data2vec-text", "mpnet", "longformer", "esm", "ibert"),
)
_TRAINED_WITH_BOS = ("gemma", "llama", "mistral", "ministral", "mixtral", "cohere", "deepseek")


def positions(config: Any) -> tuple[int | None, bool]:
    """How many positions a model was made for (None: any number), and whether each was learned.

    Beyond learned positions nothing can be computed; beyond others it can.
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
    """Positions after a scaling that says what it started from, as YaRN's does."""
    if not isinstance(rotary, dict):
        return 0
    kinds = [rotary, *(kind for kind in rotary.values() if isinstance(kind, dict))]
    reached = [
        int(kind.get("factor") or 1) * int(kind.get("original_max_position_embeddings") or 0)
        for kind in kinds
    ]
    return max(reached)


def check_fit(config: Any, ids: Any, *, beyond: bool | None = False) -> None:
    """Refuse token ids [K] that the model has no positions or no embeddings for.

    With `beyond`, positions that were not learned one by one may be exceeded; None where the
    caller has no option to allow it.
    """
    made_for, learned = positions(config)
    if made_for is not None and len(ids) > made_for and (learned or not beyond):
        way = "make the prompt shorter"
        if learned:
            way = f"its positions were learned one by one, so there are no more; {way}"
        elif beyond is not None:
            way = f"{way}, or allow it: beyond_positions (--beyond-positions)"
        raise InputError(
            f"{len(ids):,} tokens, and the model was made for {made_for:,} positions; {way}",
            code="too-many-tokens",
            tokens=len(ids),
            positions=made_for,
        )
    words = getattr(config.get_text_config(), "vocab_size", None)
    highest = int(max(ids))
    if isinstance(words, int) and highest >= words:
        raise InputError(
            f"token id {highest} is beyond the model's {words:,} embeddings: this tokenizer is "
            "another model's"
        )


def check_vocabulary(tokenizer: Any, name: str) -> None:
    """Refuse a tokenizer that lost its vocabulary or its merges."""
    words = set(tokenizer.get_vocab()) - set(tokenizer.get_added_vocab())
    if not words:
        raise ModelError(
            f"the tokenizer of {name!r} has no vocabulary but its {len(tokenizer.get_vocab())} "
            "special tokens, so every text would be lost; is tokenizer.json missing?"
        )
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    if type(model).__name__ == "BPE" and not getattr(model, "ignore_merges", False):
        _check_merges(tokenizer, words, name)


def _check_merges(tokenizer: Any, words: set[str], name: str) -> None:
    """Without merges every word falls into letters. The longest plain word would not, with them."""
    plain = [word for word in words if word.isascii() and word.isalpha()]
    longest = max(plain, key=lambda word: (len(word), word), default="")
    if len(longest) < 2:
        return
    pieces = tokenizer.backend_tokenizer.model.tokenize(longest)
    if len(pieces) == len(longest):
        raise ModelError(
            f"the tokenizer of {name!r} lost its merges: {longest!r}, a word of its vocabulary, "
            f"becomes {len(pieces)} tokens; is merges.txt or a part of tokenizer.json missing?"
        )


def adds_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer puts its begin-of-sequence token in front of a text."""
    first = getattr(tokenizer, "bos_token_id", None)
    ids = tokenizer("a").input_ids
    return first is not None and ids[:1] == [first]


def expected_bos(config: Any, tokenizer: Any) -> str | None:
    """The begin-of-sequence token that a model was probably trained with; None where there is none.

    Many models name a token that never begins their texts (<|endoftext|>, <|im_start|>), so the
    family must be one that does and the name must say so; and the tokenizer's own configuration
    may say that it is not to be added.
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
    """Say so where token ids [K] do not begin as the texts did that the model was trained on."""
    token = expected_bos(config, tokenizer)
    if token is not None and int(ids[0]) != tokenizer.bos_token_id:
        warnings.warn(
            f"{whose}: texts do not begin with {token}, and the model was probably trained with "
            "it: without it, its heads may do something else. Add it with bos=True (--bos on "
            "the command line, bos: true in an experiment)",
            AttnscopeWarning,
            stacklevel=3,
        )


def add_bos(tokenizer: Any, name: str) -> None:
    """Let the tokenizer begin every text with its token for that; a chat template too."""
    from tokenizers.processors import Sequence, TemplateProcessing

    token = getattr(tokenizer, "bos_token", None)
    if token is None:
        raise ModelError(f"the tokenizer of {name!r} has no begin-of-sequence token to add")
    if not adds_bos(tokenizer):
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
