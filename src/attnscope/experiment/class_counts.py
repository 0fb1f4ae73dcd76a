"""How many tokens of every class the prompts of a plan have, before anything is measured."""

from dataclasses import dataclass

import numpy as np

from attnscope.experiment.plan import Plan


@dataclass(frozen=True)
class ClassCount:
    """One class in the prompts under the base condition, as one tokenizer divides them."""

    models: tuple[str, ...]
    """The labels of the models that have this tokenizer."""
    classes: str
    """The label of the class set."""
    name: str
    tokens: float
    """A class that is judged by fraction has shares of tokens."""
    prompts: int
    without: tuple[int, ...]
    """The numbers of the prompts that have no such token."""


def class_counts(plan: Plan) -> list[ClassCount]:
    """Every class of every class set, in order, for every tokenizer."""
    models: dict[int, list[str]] = {}
    for model in plan.models:
        models.setdefault(id(model.tokenizer), []).append(model.label)
    counts = []
    for labels in models.values():
        model = next(one for one in plan.models if one.label == labels[0])
        base = [cell for cell in model.cells() if cell.condition == plan.experiment.base]
        for label, classes in plan.experiment.classes.items():
            shares = np.array(
                [classes.weights(cell.tokens.ids, model.tokenizer).sum(0) for cell in base]
            )
            for number, name in enumerate(classes.names):
                lacking = tuple(
                    cell.prompt for cell, one in zip(base, shares, strict=True) if not one[number]
                )
                total = round(float(shares[:, number].sum(dtype=np.float64)), 2)
                counts.append(ClassCount(tuple(labels), label, name, total, len(base), lacking))
    return counts
