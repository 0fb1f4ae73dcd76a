"""Token classes, regions of a prompt, and the alignment of the tokens of two prompts."""

from attnscope.tokens.align import Alignment, align, align_by
from attnscope.tokens.chat import (
    apply_chat_template,
    apply_chat_template_to_all,
    as_question,
    turns_of,
)
from attnscope.tokens.class_sets import DEFAULT, MODALITY, load_classes
from attnscope.tokens.classes import ClassSet, ClassTable
from attnscope.tokens.regions import Prompt, Region, join
from attnscope.tokens.token_class import TokenClass
from attnscope.tokens.tokenized import (
    PaddedBatch,
    TokenizedPrompt,
    pad,
    prompt_from_ids,
    tokenize,
    tokenize_all,
)
from attnscope.tokens.vocabulary import Vocabulary, read_vocabulary

__all__ = [
    "DEFAULT",
    "MODALITY",
    "Alignment",
    "ClassSet",
    "ClassTable",
    "PaddedBatch",
    "Prompt",
    "Region",
    "TokenClass",
    "TokenizedPrompt",
    "Vocabulary",
    "align",
    "align_by",
    "apply_chat_template",
    "apply_chat_template_to_all",
    "as_question",
    "join",
    "load_classes",
    "pad",
    "prompt_from_ids",
    "read_vocabulary",
    "tokenize",
    "tokenize_all",
    "turns_of",
]
