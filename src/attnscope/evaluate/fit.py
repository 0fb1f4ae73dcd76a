"""Refuses prompts that are longer than the positions of a model, before it generates."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from attnscope.errors import InputError
from attnscope.loading.compatibility import check_fit
from attnscope.tokens import TokenizedPrompt


def check_all_fit(
    model: Any, condition: str, texts: Iterable[TokenizedPrompt], *, new_tokens: int = 1
) -> None:
    """Raise an error if a text and its generated tokens need more positions than the model has.

    The last generated token is not fed to the model, so it needs no position.
    """
    for tokens in texts:
        ids = np.pad(tokens.ids, (0, new_tokens - 1), mode="edge") if len(tokens) else tokens.ids
        try:
            check_fit(model.config, ids, beyond=None)
        except InputError as error:
            of = f"the prompt's {len(tokens):,} and up to {new_tokens:,} generated: "
            where = f"condition {condition!r}, {of if new_tokens > 1 else ''}"
            raise InputError(
                f"{where}{error} ({tokens.prompt.text!r:.60})", code=error.code, **error.values
            ) from error
