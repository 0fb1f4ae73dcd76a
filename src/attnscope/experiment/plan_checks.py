"""Checks a plan before anything is measured: every error here names the model, prompt or key."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscope.errors import AttnscopeWarning, InputError
from attnscope.experiment.picture_writer import PictureWriter
from attnscope.experiment.tokenized_prompts import TokenizedPrompts
from attnscope.experiment.variants import Row
from attnscope.loading import model_class
from attnscope.loading.compatibility import check_fit, warn_without_bos
from attnscope.spec.experiment import Experiment
from attnscope.spec.generate import GENERATED
from attnscope.spec.queries import parse_queries
from attnscope.tokens.modalities import remembered_ids

if TYPE_CHECKING:
    from attnscope.experiment.plan import ModelPlan


def check_interim(experiment: Experiment, prompts: int) -> None:
    """Raise an error if the experiment had more prompts before than it has now."""
    if experiment.interim and experiment.interim[-1] >= prompts:
        raise InputError(
            f"interim is {list(experiment.interim)}, and there are {prompts} prompts; it lists "
            "smaller numbers",
            code="bad-interim",
            value=list(experiment.interim),
            prompts=prompts,
        )


def check_image_tokens(
    label: str, rows: list[Row], tokenizer: Any, writer: PictureWriter | None
) -> None:
    """Raise an error for image tokens in prompts without pictures."""
    if writer is not None:
        return
    ids = sorted(remembered_ids(tokenizer))
    for number, row in enumerate(rows) if ids else ():
        for condition, (tokens, _) in row.items():
            if np.isin(tokens.ids, ids).any():
                raise InputError(
                    f"model {label!r}, prompt {number}, condition {condition!r}: the text has "
                    "tokens that stand for pictures, videos or sounds, and the prompt has no "
                    "picture; give the record the field 'image'",
                    code="no-images",
                    model=label,
                    prompt=number,
                    condition=condition,
                )


def check_texts_fit(
    experiment: Experiment, model: ModelPlan, config: Any, tokenized: TokenizedPrompts
) -> None:
    """Check that every text fits the model's positions and vocabulary.

    Warn if the model expects a BOS token and the texts have none.
    """
    new_tokens = 0
    if experiment.generate is not None:
        _check_generation(model.label, config)
        new_tokens = experiment.generate.max_new_tokens - 1
    worst = np.full(tokenized.longest + new_tokens, tokenized.highest)
    try:
        check_fit(config, worst, beyond=experiment.beyond_positions)
    except InputError:  # a text may not fit: find it
        _find_unfit(experiment, model.label, config, tokenized.rows, new_tokens)
    first = tokenized.rows[0][experiment.base][0].ids
    warn_without_bos(config, model.tokenizer, first, model.info.name)


def _find_unfit(
    experiment: Experiment, label: str, config: Any, rows: list[Row], new_tokens: int
) -> None:
    for number, row in enumerate(rows):
        for condition, (tokens, _) in row.items():
            try:
                ids = np.pad(tokens.ids, (0, new_tokens), mode="edge")
                check_fit(config, ids, beyond=experiment.beyond_positions)
            except InputError as error:
                where = f"model {label!r}, prompt {number}, condition {condition!r}"
                raise InputError(
                    f"{where}: {error}",
                    code=error.code,
                    **{**error.values, "model": label, "prompt": number, "condition": condition},
                ) from error


def _check_generation(label: str, config: Any) -> None:
    """Raise an error if the model cannot generate a continuation of the prompt."""
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(
            f"model {label!r} has an encoder and a decoder, so its completion is not a "
            "continuation of the prompt. Use attnscope.watch around model.generate, or leave out "
            "'generate'",
            code="cannot-generate",
            model=label,
        )
    if not model_class(config).can_generate():
        raise InputError(
            f"model {label!r} ({type(config).__name__}) cannot generate text; leave out "
            "'generate', and queries and keys that are 'generated'",
            code="cannot-generate",
            model=label,
        )


def check_regions(experiment: Experiment, label: str, rows: list[Row]) -> None:
    """Raise an error for a region that no prompt has, because its name is probably misspelled.

    Warn about a region that only some prompts have. A region may exist in only some conditions.
    """
    names = [{name for tokens, _ in row.values() for name in tokens.prompt.names} for row in rows]
    known = dict.fromkeys(
        name for row in rows for tokens, _ in row.values() for name in tokens.prompt.names
    )
    if experiment.generate is not None:
        known[GENERATED] = None
        names = [some | {GENERATED} for some in names]
    for what, text, region in _named_regions(experiment):
        lacking = sum(region not in some for some in names)
        if lacking == len(rows):
            listed = [*known, *(("all", "not-first") if what == "keys" else ())]
            raise InputError(
                f"{what} {text!r}: the prompts have no region {region!r}; "
                f"known: {', '.join(listed) or 'none'}",
                code="unknown-region",
                value=region,
                known=listed,
            )
        if lacking:
            consequence = (
                "it changes nothing there" if what == "condition" else "values are null there"
            )
            warnings.warn(
                f"model {label!r}, {what} {text!r}: {lacking} of {len(rows)} prompts have no "
                f"region {region!r}; {consequence}",
                AttnscopeWarning,
                stacklevel=2,
            )


def _named_regions(experiment: Experiment) -> Iterator[tuple[str, str, str]]:
    """Each use of a region: the kind of use (keys, queries, condition), its text, the region."""
    for key in experiment.keys:
        if key not in ("all", "not-first"):
            yield "keys", key, key
    for queries in experiment.queries:
        region = parse_queries(queries).region
        if region is not None:
            yield "queries", queries, region
    for name, condition in experiment.conditions.items():
        for intervention in (condition.knockout, condition.steer):
            if intervention is not None and intervention.region is not None:
                yield "condition", name, intervention.region


def check_classes(experiment: Experiment) -> None:
    """Raise an error if a condition names a class that the experiment does not have."""
    known = list(
        dict.fromkeys(c for class_set in experiment.classes.values() for c in class_set.names)
    )
    for name, condition in experiment.conditions.items():
        for intervention in (condition.knockout, condition.steer):
            if (
                intervention is not None
                and intervention.tokens is not None
                and intervention.tokens not in known
            ):
                raise InputError(
                    f"condition {name!r}: unknown class {intervention.tokens!r}; known: "
                    f"{', '.join(known)}",
                    code="unknown-class",
                    value=intervention.tokens,
                    known=known,
                    condition=name,
                )
