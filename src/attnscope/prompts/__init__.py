"""Where prompts come from, and what is inserted into them."""

from attnscope.prompts.conversations import made_conversations, read_conversations
from attnscope.prompts.datasets import Layout, from_hub, from_records, read
from attnscope.prompts.documents import document_samples
from attnscope.prompts.equations import equation_samples
from attnscope.prompts.filler import Filler
from attnscope.prompts.insertion import Pair, insert
from attnscope.prompts.math import math_samples
from attnscope.prompts.needle import needle_samples
from attnscope.prompts.sample import Sample
from attnscope.prompts.spatial import spatial_samples
from attnscope.prompts.speech import speech_samples

__all__ = [
    "Filler",
    "Layout",
    "Pair",
    "Sample",
    "document_samples",
    "equation_samples",
    "from_hub",
    "from_records",
    "insert",
    "made_conversations",
    "math_samples",
    "needle_samples",
    "read",
    "read_conversations",
    "spatial_samples",
    "speech_samples",
]
