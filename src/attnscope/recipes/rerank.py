"""Documents ranked by attention from the query (ICR, arXiv 2410.02642; QRHead, 2506.09944).

Ten passages, of which one answers the query. The score of a passage in a head is the attention from
the query, minus that from the query "N/A". The heads with the best ranking are chosen on one half
of the prompts and judged on the other half, beside all heads and beside heads drawn at random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscope.prompts.passages import passage_records
from attnscope.recipes.recipe import Recipe, Statistic
from attnscope.recipes.recipe_models import SMOLLM2, Models, labelled, recipe
from attnscope.recipes.run_tables import Floats, by_head, mean
from attnscope.spec.experiment import Experiment

if TYPE_CHECKING:
    from attnscope.run.store import Run

DOCUMENTS = 10
HEADS = 16
"""How many heads are chosen; at most a fifth of a model's heads."""
QUERIES = {"region:query": "from the query", "after:passages": "from all tokens after the passages"}
EMPTY = "no-query"
DRAWS = 100
"""Sets of heads drawn at random."""


def rerank(models: Models = SMOLLM2, prompts: int = 24, seed: int = 0, **keys: Any) -> Experiment:
    """Which of ten passages gets more attention from the query than from an empty query."""
    documents = {f"document:{n}": f"d{n}" for n in range(1, DOCUMENTS + 1)}
    others = ("relevant", "distractor")
    return recipe(
        keys,
        name="rerank",
        models=labelled(models),
        prompts={
            "source": "inline",
            "count": prompts,
            "records": list(passage_records(prompts, documents=DOCUMENTS, seed=seed)),
            "template": "Here are some paragraphs:\n\n{passages}\n\nPlease find information that "
            "is relevant to the following query in the paragraphs above.\n\nQuery: {query}",
            "mark": {**documents, **{name: name for name in others}},
        },
        conditions={"query": {}, EMPTY: {"replace": {"region": "query", "new": "N/A"}}},
        queries=list(QUERIES),
        keys=[*documents, *others],
        classes=["whole"],
        measures=["rerank"],
    )


def ranks(scores: Floats, relevant: Floats) -> Floats:
    """[prompts, …]: the rank from 1 of the relevant document; scores [prompts, …, documents], and
    the number of the relevant one from 0 [prompts]. Equal scores share their ranks."""
    at = relevant.astype(int).reshape(-1, *[1] * (scores.ndim - 1))
    of_relevant = np.take_along_axis(scores, at, axis=-1)
    above, equal = (scores > of_relevant).sum(-1), (scores == of_relevant).sum(-1)
    return np.asarray(1 + above + (equal - 1) / 2)


def ndcg(rank: Floats) -> Floats:
    """NDCG@10 where one document is relevant."""
    return np.where(rank <= 10, 1 / np.log2(1 + rank), 0.0)


def best(scores: Floats, relevant: Floats) -> Floats:
    """The heads with the largest mean NDCG@10; scores [prompts, heads, documents]."""
    number = max(1, min(HEADS, scores.shape[1] // 5))
    quality = ndcg(ranks(scores, relevant)).mean(axis=0)
    return np.argsort(-quality, kind="stable")[:number].astype(np.float64)


def held_out(scores: Floats, relevant: Floats) -> Floats:
    """[prompts]: the rank of the relevant document by the heads that are best on the other half of
    the prompts."""
    rank = np.empty(len(scores))
    for half in (0, 1):
        mine = np.arange(len(scores)) % 2 == half
        heads = best(scores[~mine], relevant[~mine]).astype(int)
        rank[mine] = ranks(scores[mine][:, heads].sum(1), relevant[mine])
    return rank


def drawn_at_random(scores: Floats, relevant: Floats) -> Floats:
    """[prompts, draws]: the same by as many heads drawn at random."""
    random, number = np.random.default_rng(0), max(1, min(HEADS, scores.shape[1] // 5))
    sets = [random.choice(scores.shape[1], number, replace=False) for _ in range(DRAWS)]
    return np.stack([ranks(scores[:, heads].sum(1), relevant) for heads in sets], axis=1)


def document_scores(run: Run, model: str, queries: str) -> tuple[Floats, Floats]:
    """Scores [prompts, heads, documents], and the number of each relevant document from 0."""
    where = {"model": model, "queries": queries, "condition": EMPTY}
    keys = [f"document:{n}" for n in range(1, DOCUMENTS + 1)]
    tables = [by_head(run, "rerank_score", keys=key, **where) for key in keys]
    shared = sorted(set.intersection(*(set(prompts) for _, prompts in tables)))
    scores = [table[[prompts.index(p) for p in shared]] for table, prompts in tables]
    assert run.prompts is not None
    numbers = dict(run.prompts.select("prompt", "number").rows())
    return np.stack(scores, -1), np.array([float(numbers[p]) - 1 for p in shared])


def _first(rank: Floats) -> float:
    return float((rank == 1).mean())


def _quality(rank: Floats) -> float:
    return mean(ndcg(rank))


def _statistics(run: Run) -> Iterator[Statistic]:
    chance = np.mean(ndcg(np.arange(1.0, DOCUMENTS + 1)))
    measured: tuple[tuple[str, Callable[[Floats], float]], ...] = (
        (f"right document first (by chance {1 / DOCUMENTS:g})", _first),
        (f"NDCG@10 (by chance {chance:.2g})", _quality),
    )
    for model in run.experiment.models:
        for queries in (name for name in QUERIES if name in run.experiment.queries):
            scores, relevant = document_scores(run, model, queries)
            if len(scores) < 4:
                continue
            number = len(best(scores, relevant))
            ways = {
                f"{number} best heads of the other half": held_out(scores, relevant)[:, None],
                "all heads": ranks(scores.sum(1), relevant)[:, None],
                f"{number} heads at random": drawn_at_random(scores, relevant),
            }
            for way, table in ways.items():
                for what, statistic in measured:
                    label = f"{model}, {QUERIES[queries]}, {way}: {what}"
                    yield Statistic(label, table, statistic)


_SCORE = f"rerank_score[condition={EMPTY}, queries=region:query, keys={{}}]"
RECIPE = Recipe(
    name="rerank",
    paper="arXiv 2506.09944",
    question="which heads find the document that answers a query?",
    experiment=rerank,
    figures={
        name: {"measure": "rerank_score", "keys": "relevant", "conditions": EMPTY}
        for name in ("head-strip", "head-map")
    },
    statistics=_statistics,
    claim_lines={
        "rerank": (
            f"{_SCORE.format('relevant')} > {_SCORE.format('distractor')} in at least 16 heads",
        ),
    },
)
