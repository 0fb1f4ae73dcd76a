"""The built-in class sets, and class sets from YAML files.

The default set judges a token by its visible characters: `" *"`, `"**"` and `"*\\n"` are stars,
`"  "` is whitespace, `"\\n  "` is a newline. `word` takes every token with a letter, so `"\\frac"`
is one. `punctuation` takes every other run of marks and symbols. `other` takes the rest, including
tokens that are part of a character. Conjunctions are matched by spelling alone, in any case.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from attnscope.errors import InputError, unknown
from attnscope.tokens.classes import ClassSet
from attnscope.tokens.modalities import MODALITIES
from attnscope.tokens.token_class import TokenClass, unknown_in_class
from attnscope.yaml_file import read_yaml

_CONJUNCTIONS = (
    "and|or|but|nor|so|yet|for|if|then|because|since|while|although|though|unless|until|when|"
    "whenever|whereas|whether|once"
)

DEFAULT = ClassSet(
    (
        TokenClass(name="hash", characters="#", strip=True),
        TokenClass(name="star", characters="*", strip=True),
        TokenClass(name="slash", characters="/", strip=True),
        TokenClass(name="whitespace", pattern=r"[^\S\r\n]+"),
        TokenClass(name="newline", pattern=r"\s*[\r\n]\s*"),
        TokenClass(name="digit", pattern=r"\p{Nd}+", strip=True),
        TokenClass(name="operator", pattern=r"[-^%·\p{Sm}]+", strip=True),
        TokenClass(name="conjunction", pattern=rf"^(?i:{_CONJUNCTIONS})$", strip=True),
        TokenClass(name="punctuation", pattern=r"[\p{P}\p{S}]+", strip=True),
        TokenClass(name="word", pattern=r"\p{L}+", judgement="contains"),
        TokenClass(name="special", every="special"),
        TokenClass(name="other", every="token"),
    )
)

# Tokenizers merge maps drawn with # and * into tokens such as "##*" and " *\n". Here each
# character counts separately, and a line break counts as whitespace.
MAPS = ClassSet(
    (
        TokenClass(name="hash", characters="#", judgement="fraction"),
        TokenClass(name="star", characters="*", judgement="fraction"),
        TokenClass(name="whitespace", pattern=r"\s+", judgement="fraction"),
        TokenClass(name="other", every="token"),
    )
)

# One class for all tokens: gives the mass of a region as one number.
WHOLE = ClassSet((TokenClass(name="all", every="token"),))

# Only the processor of a model knows its image, video and audio tokens.
MODALITY = ClassSet(
    (
        *(TokenClass(name=modality, every=modality) for modality in MODALITIES),
        TokenClass(name="special", every="special"),
        TokenClass(name="text", every="token"),
    )
)

NAMED = {"default": DEFAULT, "maps": MAPS, "whole": WHOLE, "modality": MODALITY}
_EXPECTED = {
    "name": "text",
    "characters": "text in quotes",
    "pattern": "text in quotes",
    "words": "a list of words",
    "token_ids": "a list of whole numbers",
    "every": "special, image, video, audio or token",
    "judgement": "pure, contains or fraction",
    "strip": "true or false",
}


def load_classes(source: str | Path | ClassSet) -> ClassSet:
    """A class set by its name (`default`, `maps`, `whole`, `modality`) or from a YAML file.

    The file has a list under `classes`. An entry has the fields of `TokenClass`, or is the name
    of a class of the default set:

        classes:
          - hash
          - {name: wave, characters: "~", judgement: contains}
          - {name: number, pattern: '[0-9]+(\\.[0-9]+)?'}
          - {name: negation, words: ['no', not, never]}
          - {name: begin, token_ids: [1]}
          - {name: other, every: token}
    """
    if isinstance(source, ClassSet):
        return source
    if str(source) in NAMED:
        return NAMED[str(source)]
    path = Path(source)
    if not os.path.isfile(path):  # unlike pathlib's, no error for very long names
        raise unknown("class set", str(source), [*NAMED, "a YAML file"])
    content, _ = read_yaml(path)
    entries = content.get("classes") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise InputError(
            f"{path}: expected a list of classes under 'classes'",
            code="bad-class-file",
            path=str(path),
        )
    try:
        return class_set(entries)
    except InputError as error:
        raise InputError(f"{path}: {error}", code=error.code, **error.values) from error


def class_set(entries: Iterable[Any]) -> ClassSet:
    """A class set from plain data: the list under `classes` of a file, or `ClassSet.rules`."""
    return ClassSet(tuple(_entry(entry) for entry in entries))


def _entry(entry: Any) -> TokenClass:
    if isinstance(entry, str):
        return DEFAULT.classes[DEFAULT.index(entry)]
    if not isinstance(entry, dict) or "name" not in entry:
        raise InputError(
            f"a class is a name or a mapping with a name, not {entry!r}",
            code="bad-class",
            entry=entry,
        )
    for field, value in entry.items():
        if field not in _EXPECTED:
            raise unknown_in_class(entry["name"], "field", field, _EXPECTED)
        if not _fits(field, value):
            raise InputError(
                f"class {entry['name']!r}: {field} is {value!r}; expected {_EXPECTED[field]}",
                code="bad-class-field",
                token_class=entry["name"],
                field=field,
                value=value,
            )
    return TokenClass(**entry)


def _fits(field: str, value: object) -> bool:
    if field == "words":
        return True  # the class itself checks every word
    if field == "token_ids":
        return isinstance(value, list) and all(type(id) is int for id in value)
    return isinstance(value, bool if field == "strip" else str)
