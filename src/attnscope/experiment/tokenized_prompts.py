"""The tokens of all prompts for one tokenizer, shared by the models that have equal tokenizers."""

import hashlib
import json
from typing import Any

from attnscope.experiment.boxes import Boxes, prints_of
from attnscope.experiment.pictures import PromptPictures
from attnscope.experiment.variants import Row
from attnscope.tokens import TokenizedPrompt


class TokenizedPrompts:
    """The tokens of every prompt under every condition, for one tokenizer, with their extremes."""

    def __init__(
        self, rows: list[Row], pictures: PromptPictures | None = None, boxes: Boxes | None = None
    ):
        self.rows = rows
        self.prints = [b"".join(_print_of(tokens) for tokens, _ in row.values()) for row in rows]
        if pictures is not None:
            for number, row in enumerate(rows):
                names = {condition: pictures.names(number, condition) for condition in row}
                self.prints[number] += json.dumps(names).encode()
                if boxes is not None:
                    self.prints[number] += prints_of(boxes, number)
        texts = [tokens for row in rows for tokens, _ in row.values()]
        self.longest = max(map(len, texts))
        self.highest = max(int(tokens.ids.max()) for tokens in texts)
        self.widths = [max(len(tokens) for tokens, _ in row.values()) for row in rows]

    def identity(self, numbers: list[int]) -> bytes:
        """Digests of these prompts with their numbers, because prompts may have the same text."""
        return b"".join(f"{number}:".encode() + self.prints[number] for number in numbers)


def _print_of(tokens: TokenizedPrompt) -> bytes:
    """A digest of the tokens, their offsets, the text and its regions."""
    regions = [(r.start, r.end, r.name) for r in tokens.prompt.regions]
    digest = hashlib.sha256(tokens.ids.tobytes())
    digest.update(tokens.offsets.tobytes())
    digest.update(json.dumps([tokens.prompt.text, regions]).encode())
    return digest.digest()


def share_equal(tokenizers: dict[str, Any]) -> dict[str, Any]:
    """Replace equal tokenizers by one object, because many models often share few tokenizers.

    Two tokenizers are equal if they differ only in the paths of their files.
    """
    first: dict[str, Any] = {}
    for label, tokenizer in tokenizers.items():
        places = ("name_or_path", "tokenizer_file", "vocab_file", "merges_file")
        options = {k: v for k, v in (tokenizer.init_kwargs or {}).items() if k not in places}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        identity = [
            type(tokenizer).__name__,
            label if backend is None else backend.to_str(),
            repr(sorted(options.items(), key=str)),
            repr(tokenizer.special_tokens_map),
            repr(getattr(tokenizer, "chat_template", None)),
        ]
        key = hashlib.sha256("\0".join(identity).encode("utf-8", "backslashreplace")).hexdigest()
        tokenizers[label] = first.setdefault(key, tokenizer)
    return tokenizers
