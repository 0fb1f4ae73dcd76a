"""Detectors of wrong answers: LLM-Check (NeurIPS 2024) and LapEigvals (arXiv 2502.17598).

The model answers arithmetic questions. Its right and wrong answers are compared by the logarithm of
attention to the own token, by the eigenvalues of the attention graph's Laplacian, and by lookback
ratios (arXiv 2407.07071). A question with a large result is harder, so a detector has to be better
than the size of the result. Layers and classifiers are chosen on other prompts than they are
judged on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from attnscope.errors import InputError
from attnscope.prompts.number_answers import same_number
from attnscope.recipes.recipe import Recipe, Statistic
from attnscope.recipes.recipe_models import SMOLLM2, Models, labelled, recipe
from attnscope.recipes.run_tables import Floats, by_head, mean
from attnscope.spec.experiment import Experiment

if TYPE_CHECKING:
    from attnscope.run.store import Run

ANSWER = "generated"
FOLDS = 4
STEPS = 25
"""Of the fit of a classifier; it converges in fewer."""
LEAST = 1e-6
"""The smallest weight of a prompt in a step of the fit."""
SHOWN = ((4, 6), (31, 7))
"""The factors of the two examples in every prompt."""
LARGEST = 99
"""The largest factor."""


def detectors(
    models: Models = SMOLLM2, prompts: int = 64, seed: int = 0, **keys: Any
) -> Experiment:
    """Attention to the own token and Laplacian eigenvalues of right and of wrong answers."""
    named = labelled(models)
    task: dict[str, Any] = {
        "prompts": {"source": "inline", "count": prompts, "records": _products(prompts, seed)},
        "chat": False,
        "generate": {"max_new_tokens": 10},
    }
    if _bundled(named):  # these models were trained on word problems
        task = {
            "prompts": {"source": "math", "count": prompts, "seed": seed, "level": 5},
            "generate": {"max_new_tokens": 48},
        }
    return recipe(
        keys,
        name="detectors",
        models=named,
        **task,
        queries=[ANSWER, "all"],
        measures=["log_self_mass", "laplacian", "lookback"],
    )


def _bundled(models: dict[str, str]) -> bool:
    from attnscope import zoo

    return all(name.removeprefix(zoo.PREFIX) in zoo.names() for name in models.values())


def _products(count: int, seed: int) -> list[dict[str, str]]:
    """Different products of factors from 2 to 99, small ones as often as large ones, after two
    examples."""
    if count > LARGEST**2 // 10:
        raise InputError(
            f"{count} prompts of different products are too many; at most {LARGEST**2 // 10}",
            code="bad-count",
            value=count,
        )
    examples = "".join(f"{_question(a, b)} The answer is {a * b}.\n\n" for a, b in SHOWN)
    draw, pairs = Random(f"products:{seed}"), list(SHOWN)
    while len(pairs) < count + len(SHOWN):
        a, b = (int(2 * ((LARGEST + 1) / 2) ** draw.random()) for _ in range(2))
        if (a, b) not in pairs:
            pairs.append((a, b))
    new = pairs[len(SHOWN) :]
    return [{"question": examples + _question(a, b), "answer": str(a * b)} for a, b in new]


def _question(a: int, b: int) -> str:
    return f"Question: What is {a} * {b}?\nAnswer:"


def answers(run: Run) -> dict[int, str]:
    """The right answer of each prompt."""
    prompts = run.prompts
    if prompts is None or not {"answer", "quantities"} & set(prompts.columns):
        return {}
    if "answer" in prompts.columns:
        return {p: str(answer) for p, answer in prompts.select("prompt", "answer").rows()}
    lists = prompts.select("prompt", pl.col("quantities").str.extract(r"(-?\d+)\]$"))
    return dict(lists.rows())


def right_answers(run: Run, model: str) -> dict[int, bool]:
    """By prompt, whether the model's answer has the right number."""
    known = answers(run)
    base = run.cells.filter(model=model, condition=run.experiment.base)
    completions = base.select("prompt", "generated").rows()
    return {p: same_number(known[p], text or "") for p, text in completions if p in known}


def auroc(table: Floats) -> float:
    """Of rows (score, whether right, fold): how often a right answer has a larger score than a
    wrong one of the same fold; nan without such pairs."""
    score, right, fold = table.T
    above, pairs = 0.0, 0
    for one in np.unique(fold):
        good, bad = (score[(fold == one) & (right == value)] for value in (1, 0))
        difference = good[:, None] - bad
        above += float((difference > 0).sum() + 0.5 * (difference == 0).sum())
        pairs += difference.size
    return above / pairs if pairs else float("nan")


def folds(right: Floats) -> Floats:
    """The fold of each prompt; each has its share of right and of wrong answers."""
    numbers = np.empty(len(right))
    for value in (0, 1):
        numbers[right == value] = np.arange((right == value).sum()) % FOLDS
    return numbers


def held_out(features: Floats, right: Floats, method: Callable[..., Floats]) -> Floats:
    """[prompts, 3]: score, whether right, and fold. `method` learns from the other folds."""
    fold, scores = folds(right), np.empty(len(right))
    for one in np.unique(fold):
        test = fold == one
        scores[test] = method(features[~test], right[~test], features[test])
    return np.stack([scores, right, fold], axis=1)


def best_feature(known: Floats, right: Floats, new: Floats) -> Floats:
    """The column of `new` that separates the known prompts best, with its sign."""
    zero = np.zeros(len(right))
    areas = [auroc(np.stack([column, right, zero], axis=1)) - 0.5 for column in known.T]
    best = int(np.argmax(np.abs(areas)))
    return np.asarray(np.sign(areas[best]) * new[:, best])


def classified(known: Floats, right: Floats, new: Floats) -> Floats:
    """Scores of `new` by a logistic regression with a quadratic penalty on standardised features;
    right and wrong answers have equal weight. Solved for one coefficient per prompt, because there
    are more features than prompts."""
    middle, spread = known.mean(axis=0), known.std(axis=0)
    width = np.sqrt(known.shape[1]) * np.where(spread > 0, spread, 1)
    x, z = (known - middle) / width, (new - middle) / width
    kernel, many = x @ x.T, len(known)
    share = right.mean()
    weight = np.where(right == 1, 0.5 / share, 0.5 / (1 - share))
    solution = np.zeros(many + 1)
    for _ in range(STEPS):
        at = kernel @ solution[:-1] + solution[-1]
        p = 1 / (1 + np.exp(-at))
        slope = np.maximum(p * (1 - p), LEAST)
        system = np.ones((many + 1, many + 1))
        system[:-1, :-1] = kernel + np.diag(1 / (weight * slope))
        system[-1, -1] = 0
        solution = np.linalg.solve(system, np.append(at + (right - p) / slope, 0))
    return np.asarray(z @ x.T @ solution[:-1] + solution[-1])


def features(run: Run, model: str) -> tuple[dict[str, Floats], list[int]]:
    """Of the prompts that have all of them: log self-attention and lookback ratios of the answer
    [prompts, heads], and Laplacian eigenvalues of the whole text [prompts, heads · 10]."""
    where = {"model": model, "condition": run.experiment.base}
    parts = {
        "log": [by_head(run, "log_self_mass", queries=ANSWER, **where)],
        "lookback": [by_head(run, "lookback_per_token", queries=ANSWER, **where)],
        "laplacian": [
            by_head(run, "laplacian", queries="all", item=str(n), **where) for n in range(1, 11)
        ],
    }
    shared = sorted(set.intersection(*(set(p) for part in parts.values() for _, p in part)))
    return {
        name: np.concatenate([t[[p.index(n) for n in shared]] for t, p in part], axis=1)
        for name, part in parts.items()
    }, shared


def _statistics(run: Run) -> Iterator[Statistic]:
    known = answers(run)
    for model in run.experiment.models:
        labels = right_answers(run, model)
        of, prompts = features(run, model)
        prompts = [prompt for prompt in prompts if prompt in labels]
        right = np.array([labels[prompt] for prompt in prompts], dtype=np.float64)
        yield Statistic(f"{model}: share of right answers", right[:, None], mean)
        if min(right.sum(), (1 - right).sum()) < 2 * FOLDS:
            continue  # too few of one kind to learn from some and judge others
        rows = run.values.filter(measure="log_self_mass", model=model)
        layers = rows.select("layer").unique().collect().height
        by_layer = of["log"].reshape(len(right), layers, -1).sum(-1)
        size = np.array([-abs(float(known[prompt])) for prompt in prompts])
        zero = np.zeros(len(right))
        learned = {
            "log self-attention of the layer that is best on other prompts": (
                by_layer,
                best_feature,
            ),
            "log self-attention of all heads": (of["log"], classified),
            "Laplacian eigenvalues of all heads": (of["laplacian"], classified),
            "lookback ratios of all heads": (of["lookback"], classified),
        }
        for what, (table, method) in learned.items():
            by = "" if method is best_feature else ", classifier of other prompts"
            label = f"{model}: AUROC of {what}{by}"
            yield Statistic(label, held_out(table, right, method), auroc)
        label = f"{model}: AUROC of the size of the result alone, smaller ones as right"
        yield Statistic(label, np.stack([size, right, zero], axis=1), auroc)


RECIPE = Recipe(
    name="detectors",
    paper="arXiv 2502.17598",
    question="does attention to the own token differ between right and wrong answers?",
    experiment=detectors,
    figures={"detectors": {}},
    statistics=_statistics,
)
