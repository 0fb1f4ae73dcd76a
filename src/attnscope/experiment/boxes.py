"""The part of a picture that each question is about: the field `box` of the records."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from attnscope.errors import InputError
from attnscope.experiment.picture_writer import PictureWriter
from attnscope.experiment.variants import Row
from attnscope.measures.layer import Target
from attnscope.measures.registry import MEASURES
from attnscope.prompts import Sample
from attnscope.spec.experiment import Experiment
from attnscope.vision.views import Box

FIELD = "box"
Boxes = Sequence[Box | None]
"""By prompt; None for a question about no part of the picture."""


def boxes_of(experiment: Experiment, samples: Sequence[Sample]) -> Boxes | None:
    """The box of each prompt; None if no measure of the experiment needs them."""
    needing = [name for name in experiment.measures if FIELD in MEASURES[name].needs]
    if not needing:
        return None
    boxes = [_box(number, sample.metadata.get(FIELD)) for number, sample in enumerate(samples)]
    if not any(boxes):
        raise InputError(
            f"{needing[0]!r} needs prompts with a picture and the field {FIELD!r}: left, top, "
            "right and bottom of what the question is about, as fractions of the picture; the "
            "source 'shapes' has them",
            code="needs-box",
            measure=needing[0],
        )
    for number, (sample, box) in enumerate(zip(samples, boxes, strict=True)):
        if box is not None and len(sample.images) != 1:
            raise InputError(
                f"prompt {number} has {len(sample.images)} pictures and one {FIELD}; {needing[0]!r}"
                " needs prompts with one picture",
                code="image-count",
                prompt=number,
                images=len(sample.images),
            )
    return boxes


def _box(number: int, value: Any) -> Box | None:
    if value is None:
        return None
    try:
        left, top, right, bottom = map(float, value)
    except (TypeError, ValueError):
        left = math.nan
    if isinstance(value, str) or not (0 <= left < right <= 1 and 0 <= top < bottom <= 1):
        raise InputError(
            f"prompt {number}: {FIELD} is {value!r:.60}; give left, top, right and bottom as "
            "fractions of the picture from 0 to 1: [0.1, 0.2, 0.5, 0.6]",
            code="bad-box",
            prompt=number,
            value=value,
        )
    return left, top, right, bottom


def prints_of(boxes: Boxes, number: int) -> bytes:
    """What the numbers of a prompt depend on, beside its tokens and pictures."""
    return json.dumps(boxes[number]).encode()


def targets_of(
    label: str, boxes: Boxes, writer: PictureWriter, rows: Sequence[Row]
) -> Mapping[tuple[int, str], Target]:
    """By prompt and condition: the tokens of the picture, and the box."""
    if writer.unknown:
        raise InputError(
            f"model {label!r}: the places of its image tokens are unknown, so attention to a "
            f"{FIELD} cannot be measured: {writer.unknown}",
            code="unknown-image-layout",
            model=label,
        )
    targets: dict[tuple[int, str], Target] = {}
    for number, (box, row) in enumerate(zip(boxes, rows, strict=True)):
        if box is not None:
            for condition, _, picture in writer.placed(number, row):
                targets[number, condition] = picture, box
    return targets
