"""`knockout`: some queries can no longer look at some keys."""

import math
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from attnscope.interventions.links import linking


def knockout(
    model: nn.Module, *, keys: Any, queries: Any = "all", layers: Any = None, heads: Any = None
) -> AbstractContextManager[None]:
    """Cut the attention of some queries to some keys, inside a `with` block.

        hash = DEFAULT.ids(ids, tokenizer) == DEFAULT.index("hash")
        with attnscope.knockout(model, keys=hash, queries="last"):
            model(**inputs)                  # or model.generate(**inputs)

    The scores of these keys become -inf, so the rest of a row adds up to 1 again. A watch inside
    the block measures the attention that is left. Blocks nest.

    keys      bool tensor [batch, keys]; tokens that come later (generated ones) are not meant
    queries   "all", "last" (prompt token), "generated", "predicts", or a bool tensor like `keys`
    layers    in the model's own numbering; all of them by default
    heads     counted from 0; all of them by default. A bool tensor [batch, heads] says it for every
              sequence by itself
    """
    return linking(model, bias=-math.inf, queries=queries, keys=keys, layers=layers, heads=heads)
