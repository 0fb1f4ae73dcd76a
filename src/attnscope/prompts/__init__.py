"""Where prompts come from, and what is inserted into them."""

from attnscope.prompts.datasets import Layout, from_hub, from_records, read
from attnscope.prompts.filler import Filler
from attnscope.prompts.insertion import Pair, insert
from attnscope.prompts.math import math_samples
from attnscope.prompts.sample import Sample
from attnscope.prompts.spatial import spatial_samples

__all__ = [
    "Filler",
    "Layout",
    "Pair",
    "Sample",
    "from_hub",
    "from_records",
    "insert",
    "math_samples",
    "read",
    "spatial_samples",
]
