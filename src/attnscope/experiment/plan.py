"""Plans an experiment: its cells, their batches and their identities.

A cell is one model × prompt × condition. Its identity is a hash of everything that can change its
numbers: the model's revision, the tokens, the regions, the measures and the batch. The batch is
included because the last digits of a sum depend on it. A batch has prompts of similar length. The
plan fixes all batches, so a run that continues after an interruption uses the same batches.
"""

import gc
import hashlib
import json
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from attnscope.errors import AttnscopeError, AttnscopeWarning, InputError
from attnscope.experiment.batching import PADDING, by_length, default_tokens, kind_of
from attnscope.experiment.boxes import boxes_of, targets_of
from attnscope.experiment.cells import Batch, Cell, batch_of
from attnscope.experiment.model_info import ModelInfo, check_numbers, model_info
from attnscope.experiment.picture_writer import PictureWriter
from attnscope.experiment.pictures import PromptPictures, gather
from attnscope.experiment.plan_checks import (
    check_classes,
    check_image_tokens,
    check_interim,
    check_regions,
    check_texts_fit,
)
from attnscope.experiment.prompt_list import (
    file_digest,
    hub_file,
    prompt_metadata,
    samples_of,
    short_name,
)
from attnscope.experiment.tokenized_prompts import TokenizedPrompts, share_equal
from attnscope.experiment.variants import Row, tokenize_variants
from attnscope.loading import load_config, load_processor, load_tokenizer
from attnscope.loading.device import chosen_device
from attnscope.measures.layer import Target
from attnscope.run.layout import FORMAT
from attnscope.spec.engines import not_with_vllm
from attnscope.spec.experiment import Experiment
from attnscope.spec.prompt_sources import SpeechPrompts, TokenPrompts


@dataclass(frozen=True, eq=False)
class ModelPlan:
    """The part of a plan for one model."""

    label: str
    info: ModelInfo
    tokenizer: Any
    layers: tuple[int, ...] | None
    """None means all layers. The same holds for `heads` and the profile fields below."""
    heads: tuple[int, ...] | None
    profile_layers: tuple[int, ...] | None
    profile_heads: tuple[int, ...] | None
    batches: tuple[Batch, ...]
    processor: Any = None
    """Of prompts with pictures; None without."""
    pictures: PromptPictures | None = None
    targets: Mapping[tuple[int, str], Target] = field(default_factory=dict)
    """By prompt and condition: what the question is about, if a measure needs it."""

    def keeps(self, layer: int, head: int) -> bool:
        """Whether the run stores the profile of this head."""
        return (self.profile_layers is None or layer in self.profile_layers) and (
            self.profile_heads is None or head in self.profile_heads
        )

    def cells(self) -> list[Cell]:
        """All cells, sorted by prompt, then by condition."""
        cells = (cell for batch in self.batches for cell in batch.by_prompt())
        return sorted(cells, key=lambda cell: cell.prompt)


@dataclass(frozen=True, kw_only=True)
class Settled:
    """What planning decides where an experiment leaves it open."""

    chat: bool
    """Whether prompts go through the chat template."""
    batch_tokens: int
    digest: str | None
    """SHA-256 of the prompt file, if there is one."""
    hub_file: bytes | None = None
    """The prompt file, if it is not one that was given: the prompts come from a hub, or they have
    pictures."""


@dataclass(frozen=True, eq=False)
class Plan:
    """An experiment with the batches of every model."""

    experiment: Experiment
    """As it was asked, with the names of the run's files in place of pictures."""
    settled: Settled
    models: tuple[ModelPlan, ...]
    device: str
    metadata: tuple[dict[str, Any], ...]
    """The metadata of each prompt."""
    pictures: PromptPictures | None = None
    image_tokens: tuple[dict[str, Any], ...] = ()
    """The tokens of every picture, with their grids."""

    @cached_property
    def stored(self) -> Experiment:
        """The experiment with the settled values. A run stores it, so that a repetition does not
        depend on the machine."""
        keys: dict[str, Any] = {"chat": self.settled.chat}
        keys["batch_tokens"] = self.settled.batch_tokens
        if self.settled.digest is not None:
            settled = {"digest": self.settled.digest}
            if self.settled.hub_file is not None:  # a folder has its path on this machine only
                settled |= short_name(self.experiment.prompts)
            keys["prompts"] = self.experiment.prompts.model_dump() | settled
        return self.experiment.with_keys(**keys)

    @property
    def size(self) -> int:
        """The number of cells."""
        return sum(len(batch) for model in self.models for batch in model.batches)


@dataclass(frozen=True)
class ModelSource:
    """What planning needs to know of a model that is in memory."""

    info: ModelInfo
    tokenizer: Any
    config: Any


def make_plan(experiment: Experiment, sources: Mapping[str, ModelSource] | None = None) -> Plan:
    """Build the prompts and plan the cells. Loads tokenizers and configurations, no weights; if
    the models are in memory, `sources` has them by label."""
    with _keeping_all():
        return _make_plan(experiment, sources or {})


@contextmanager
def _keeping_all() -> Iterator[None]:
    """Turn garbage collection off: a plan has many small objects, and none of them is garbage."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _make_plan(experiment: Experiment, sources: Mapping[str, ModelSource]) -> Plan:
    content = hub_file(experiment)
    digest = file_digest(experiment, content)  # before the file is read
    gathered = gather(experiment, samples_of(experiment, content), content)
    experiment, samples, content = gathered.experiment, gathered.samples, gathered.content
    if gathered.pictures is not None and content is not None:
        digest = hashlib.sha256(content).hexdigest()
    if gathered.pictures is not None and experiment.engine == "vllm":
        raise not_with_vllm("prompts with pictures", "image")
    check_interim(experiment, len(samples))
    device = chosen_device(experiment.device)
    infos = {label: source.info for label, source in sources.items()}
    infos = infos or {label: model_info(name) for label, name in experiment.models.items()}
    tokenizers, writers = _readers(experiment, infos, gathered.pictures, sources)
    batch_tokens = experiment.batch_tokens
    settled = Settled(
        chat=_chat(experiment, tokenizers),
        batch_tokens=default_tokens(device) if batch_tokens == "auto" else batch_tokens,
        digest=digest,
        hub_file=content,
    )
    boxes = boxes_of(experiment, samples)
    # By id of the tokenizer: models with the same tokenizer share the prompts.
    tokenized: dict[int, TokenizedPrompts] = {}
    models, places = [], list[dict[str, Any]]()
    for label, tokenizer in tokenizers.items():
        writer = writers.get(label)
        if id(tokenizer) not in tokenized:
            prompts = [sample.prompt for sample in samples]
            options: dict[str, Any] = {"chat": settled.chat, "writer": writer}
            tokenized[id(tokenizer)] = TokenizedPrompts(
                tokenize_variants(experiment, label, prompts, tokenizer, **options),
                gathered.pictures,
                boxes,
            )
            check_regions(experiment, label, tokenized[id(tokenizer)].rows)
            check_image_tokens(label, tokenized[id(tokenizer)].rows, tokenizer, writer)
        rows = tokenized[id(tokenizer)]
        if writer is not None:
            places += _places(label, writer, rows.rows)
        padding = PADDING.get(kind_of(device), math.inf)
        groups = [
            [first + number for number in numbers]
            for first, end in pairwise((0, *experiment.interim, len(samples)))
            for numbers in by_length(rows.widths[first:end], settled.batch_tokens, padding)
        ]
        info = infos[label]
        of_model = _plan_model(experiment, label, info, tokenizer, rows, groups, device)
        config = sources[label].config if sources else load_config(info.pinned)
        check_texts_fit(experiment, of_model, config, rows)
        if writer is not None:
            of_model = replace(of_model, processor=writer.processor, pictures=gathered.pictures)
            if boxes is not None:
                targets = targets_of(label, boxes, writer, rows.rows)
                of_model = replace(of_model, targets=targets)
        models.append(of_model)
    metadata = tuple(prompt_metadata(experiment, samples))
    pictures = gathered.pictures
    return Plan(experiment, settled, tuple(models), device, metadata, pictures, tuple(places))


def _readers(
    experiment: Experiment,
    infos: Mapping[str, ModelInfo],
    pictures: PromptPictures | None,
    sources: Mapping[str, ModelSource],
) -> tuple[dict[str, Any], dict[str, PictureWriter]]:
    """The tokenizer of each model; and for prompts with pictures what writes them."""
    if sources and pictures is not None:
        raise InputError(
            "prompts with pictures need a model that is loaded by its name; measure saved "
            "checkpoints with attnscope run",
            code="pictures-in-memory",
        )
    if sources:
        return share_equal({label: source.tokenizer for label, source in sources.items()}), {}
    if pictures is None:
        tokenizers = {
            label: load_tokenizer(info.pinned, bos=experiment.bos) for label, info in infos.items()
        }
        return share_equal(tokenizers), {}
    writers = {}
    for label, info in infos.items():
        try:
            processor = load_processor(info.pinned, bos=experiment.bos)
            writers[label] = PictureWriter(pictures, processor, experiment.base)
        except AttnscopeError as error:
            message = f"model {label!r} cannot read the pictures of the prompts: {error}"
            raise InputError(message, code=error.code, **error.values) from error
    return {label: writer.processor.tokenizer for label, writer in writers.items()}, writers


def _places(label: str, writer: PictureWriter, rows: list[Row]) -> Iterator[dict[str, Any]]:
    """The tokens of every picture of a model; warn once if their places are unknown."""
    if writer.unknown:
        warnings.warn(
            f"model {label!r}: figures cannot show maps over its pictures: {writer.unknown}",
            AttnscopeWarning,
            stacklevel=2,
        )
    for number, row in enumerate(rows):
        for picture in writer.rows(number, row):
            yield {"model": label, **picture}


def _chat(experiment: Experiment, tokenizers: dict[str, Any]) -> bool:
    """Whether prompts go through the chat template. With `auto` they do if all models have one;
    if only some models have one, raise an error."""
    if isinstance(experiment.prompts, TokenPrompts | SpeechPrompts):
        return False
    if experiment.chat != "auto":
        return experiment.chat
    having = [label for label, one in tokenizers.items() if getattr(one, "chat_template", None)]
    lacking = [label for label in tokenizers if label not in having]
    if having and lacking:
        raise InputError(
            f"model {having[0]!r} has a chat template and {lacking[0]!r} has none, so their "
            "prompts would differ; write chat: false (--no-chat) for plain text",
            code="chat-templates-differ",
            having=having,
            lacking=lacking,
        )
    return bool(having)


def _plan_model(
    experiment: Experiment,
    label: str,
    info: ModelInfo,
    tokenizer: Any,
    tokenized: TokenizedPrompts,
    groups: list[list[int]],
    device: str,
) -> ModelPlan:
    layers = check_numbers(info, label, "layer", experiment.layers)
    heads = check_numbers(info, label, "head", experiment.heads_of(label))
    profile_layers = check_numbers(info, label, "layer", experiment.profiles.layers)
    profile_heads = check_numbers(info, label, "head", experiment.profiles.heads_of(label))
    check_classes(experiment)
    identity = {
        "format": FORMAT,
        "label": label,
        "model": {**asdict(info), "dtype": experiment.dtype, "device": kind_of(device)},
        "layers": layers,
        "heads": heads,
        "profiles": [profile_layers, profile_heads],
        "classes": {name: class_set.fingerprint for name, class_set in experiment.classes.items()},
        **experiment.model_dump(
            mode="json",
            include={
                "bin",
                "conditions",
                "generate",
                "queries",
                "keys",
                "measures",
                "seed",
                "truncate",
                "backend",
            },
        ),
    }
    if experiment.engine != "transformers":
        identity["engine"] = experiment.engine
    common = json.dumps(identity, sort_keys=True).encode()
    batches = [
        batch_of(
            common + tokenized.identity(numbers), numbers, [tokenized.rows[n] for n in numbers]
        )
        for numbers in groups
    ]
    return ModelPlan(
        label, info, tokenizer, layers, heads, profile_layers, profile_heads, tuple(batches)
    )
