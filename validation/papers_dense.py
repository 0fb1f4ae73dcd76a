"""What the recipes measure against the papers' formulas on dense attention, head by head.

    python validation/papers_dense.py MODEL [MODEL …]             the largest deviations
    python validation/papers_dense.py --prompts 4 MODEL
    python validation/papers_dense.py --only needle,sinks MODEL
    python validation/papers_dense.py --write MODEL [MODEL …]     into docs/recipes/README.md

Every recipe is run on a few prompts. Then the tokens of its run go through the model once more,
in float32 with its own eager attention and all weights returned, and each statistic is computed
from these as its paper writes it. Nothing of the streamed path takes part in that.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

import attnscope
from attnscope.experiment.execute import run
from attnscope.measures.registry import COLUMNS
from attnscope.recipes import RECIPES
from attnscope.recipes.injection import important_heads

sys.path.insert(0, str(Path(__file__).parents[1] / "tools" / "docs"))

from pages import put

PAGE = Path(__file__).parents[1] / "docs" / "recipes" / "README.md"
Array = np.ndarray[Any, np.dtype[np.float64]]


class Text:
    """A prompt of a run, and what was generated after it: tokens, regions, dense attention."""

    def __init__(self, tokens: pl.DataFrame, model: Any):
        self.model = model
        self.ids = np.array(tokens["id"].to_list())
        self.pieces = tokens["text"].to_list()
        self._regions = tokens["regions"].to_list()
        self.prompt = int((tokens["role"] != "generated").sum())
        ids = torch.from_numpy(self.ids)[None].long()
        with torch.no_grad():
            seen = model(input_ids=ids, output_attentions=True, use_cache=False)
        self.A = np.stack([layer[0].double().numpy() for layer in seen.attentions])
        """[layers, heads, queries, keys]"""
        self.next = seen.logits[0].argmax(-1).numpy()
        """The likeliest token after each, which is the generated one."""

    @cached_property
    def stream(self) -> list[Array]:
        """[tokens, width] after each layer: hooks of our own on a pass of its own."""
        kept: list[Array] = []

        def keep(module: Any, args: Any, output: Any) -> None:
            made = output[0] if isinstance(output, tuple) else output
            kept.append(made.reshape(len(self.ids), -1).double().numpy())

        hooks = [layer.register_forward_hook(keep) for layer in self.model.model.layers]
        with torch.no_grad():
            self.model(input_ids=torch.from_numpy(self.ids)[None].long(), use_cache=False)
        for hook in hooks:
            hook.remove()
        return kept

    def where(self, name: str) -> Array:
        """The positions of a region."""
        return np.array([n for n, names in enumerate(self._regions) if name in names], dtype=int)


def sink(text: Text) -> Array:
    """Mean over all queries of the weight on the first token (arXiv 2410.10781)."""
    return text.A[..., 0].mean(-1)


def induction(text: Text) -> Array:
    """Mean over the second copy of the weight on what followed the token the first time
    (2209.11895)."""
    rows = text.where("repeat:2")
    n = len(rows)
    return np.stack([text.A[:, :, i, i - n + 1] for i in rows], -1).mean(-1)


def lookback(text: Text) -> Array:
    """Of every new token: mean weight on the context, over that plus the mean weight on the new
    tokens; mean over the new tokens (2407.07071)."""
    ratios = []
    for t in range(text.prompt, len(text.ids)):
        context = text.A[:, :, t, : text.prompt].mean(-1)
        new = text.A[:, :, t, text.prompt : t + 1].mean(-1)
        ratios.append(context / (context + new))
    return np.stack(ratios, -1).mean(-1)


def retrieval(text: Text) -> Array:
    """|g ∩ k| / |k|: k the needle's tokens; g those with the head's largest weight at the
    step that generated the same token (2404.15574)."""
    needle = text.where("answer")
    found = np.zeros((*text.A.shape[:2], len(needle)), dtype=bool)
    for t in range(text.prompt - 1, len(text.ids)):
        top = text.A[:, :, t].argmax(-1)
        for n, j in enumerate(needle):
            found[..., n] |= (top == j) & (text.ids[j] == text.next[t])
    return found.mean(-1)


def focus(text: Text) -> Array:
    """Of the last query: the weight on the instruction over that on instruction and data
    (2411.00348, as its authors' program divides)."""
    last = text.A[:, :, -1]
    instruction = last[..., text.where("system")].sum(-1)
    data = np.union1d(text.where("question"), text.where("filler")).astype(int)
    return instruction / (instruction + last[..., data].sum(-1))


def sizes(text: Text) -> list[Array]:
    """The absolute values after each layer, from the smallest."""
    return [np.sort(np.abs(x), axis=None) for x in text.stream]


def nth_largest(n: int) -> Any:
    """The n-th largest absolute value of the residual stream after each layer (2402.17762)."""
    return lambda text: np.array([[size[-n]] for size in sizes(text)])


def median_size(text: Text) -> Array:
    """torch's median, which the paper's program takes: the lower one of two in the middle."""
    return np.array([[size[(len(size) - 1) // 2]] for size in sizes(text)])


def massive_entries(text: Text) -> Array:
    """How many are above 100 and at least 1,000 times the median."""
    median = median_size(text)[:, 0]
    pairs = zip(sizes(text), median, strict=True)
    return np.array([[np.sum((size > 100) & (size >= 1000 * m))] for size, m in pairs])


def place_of_largest(axis: int) -> Any:
    """Token or dimension of the largest."""
    return lambda text: np.array(
        [[np.unravel_index(np.abs(x).argmax(), x.shape)[axis]] for x in text.stream]
    )


def top_fifth(text: Text) -> Array:
    """Share of the attention on the fifth of the keys with the largest column sums (2306.14048)."""
    columns = -np.sort(-text.A.sum(2), axis=-1)
    return columns[..., : -(-len(text.ids) // 5)].sum(-1) / columns.sum(-1)


def beyond(first_query: str) -> Any:
    """Mean over queries of the weight on neither the first 4 tokens nor the last 64: of all
    queries, or of those that predict generated tokens."""

    def rest(text: Text) -> Array:
        i, j = np.indices(text.A.shape[2:])
        of_queries = (text.A * ((j >= 4) & (i - j >= 64))).sum(-1)
        return of_queries[..., 0 if first_query == "all" else text.prompt - 1 :].mean(-1)

    return rest


def sentences(text: Text) -> list[Array]:
    """The positions of each sentence. A word begins one if `.`, `!` or `?` (and closing marks)
    stand before it, or an empty line, and at least ten characters since the last one began."""
    whole, begun, of_letters = "".join(text.pieces), 0, [0]
    for n in range(1, len(whole)):
        new = False
        if whole[n - 1].isspace() and not whole[n].isspace():
            words = whole[begun:n].rstrip()
            ended = words.rstrip("\"')]}*")[-1:] in (".", "!", "?")
            new = (ended or whole[len(words) + begun : n].count("\n") > 1) and len(
                words.strip()
            ) >= 10
        begun = n if new else begun
        of_letters.append(of_letters[-1] + new)
    ends = np.cumsum([len(piece) for piece in text.pieces])
    indents = [len(piece) - len(piece.lstrip()) for piece in text.pieces]
    firsts = [
        end - len(piece) + indent % max(1, len(piece))
        for end, piece, indent in zip(ends, text.pieces, indents, strict=True)
    ]
    of_tokens = np.array(of_letters)[firsts]
    return [np.flatnonzero(of_tokens == number) for number in range(of_tokens.max() + 1)]


def receivers(keys: str, read: Any) -> Any:
    """Of the sentences of the keys: the block means of A, and for each sentence the mean of its
    column from 4 sentences below it on (2506.19143)."""

    def of_heads(text: Text) -> Array:
        chosen = {"all": np.arange(len(text.ids)), "not-first": np.arange(1, len(text.ids))}
        inside = chosen[keys] if keys in chosen else text.where(keys)
        blocks = [np.intersect1d(piece, inside) for piece in sentences(text)]
        blocks = [block for block in blocks if len(block)]
        mean = np.array(
            [[text.A[:, :, i][..., j].mean((2, 3)) for j in blocks] for i in blocks]
        )  # [sentences, sentences, layers, heads]
        scores = [mean[j + 4 :, j].mean(0) for j in range(len(blocks) - 4)]
        return read(np.stack(scores, -1))

    return of_heads


def document(region: str, rows: str, text: Text, empty: Text) -> Array:
    """Sum over the document's tokens of the mean attention from the query, minus that from the
    empty query, without tokens 2 standard deviations below the mean (2410.02642, 2506.09944)."""
    at = text.where(region)
    assert (text.ids[at] == empty.ids[at]).all()

    def attention(of: Text) -> Array:
        last = of.where("passages").max() + 1
        queries = of.where("query") if rows == "region:query" else np.arange(last, len(of.ids))
        return of.A[:, :, queries].mean(2)[..., at]

    tokens = attention(text) - attention(empty)
    least = tokens.mean(-1, keepdims=True) - 2 * tokens.std(-1, ddof=1, keepdims=True)
    return (tokens * (tokens > least)).sum(-1)


def own(text: Text) -> Array:
    """Attention of every token to itself."""
    return np.diagonal(text.A, axis1=2, axis2=3)


def log_of_own(text: Text) -> Array:
    """Mean over the new tokens of the logarithm of the attention to themselves (LLM-Check)."""
    return np.log(own(text)[..., text.prompt :]).mean(-1)


def eigenvalue(n: int) -> Any:
    """The n-th largest of the mean of a column's visible part, minus the entry of the diagonal
    (2502.17598)."""

    def of_heads(text: Text) -> Array:
        degree = text.A.sum(2) / np.arange(len(text.ids), 0, -1)
        return np.sort(degree - own(text), axis=-1)[..., -n]

    return of_heads


def excess(scores: Array) -> Array:
    """Fisher's kurtosis over the last axis."""
    off = scores - scores.mean(-1, keepdims=True)
    return (off**4).mean(-1) / (off**2).mean(-1) ** 2 - 3


def on(region: str, rows: str) -> Any:
    """Mass on a region, mean over the queries of another."""

    def mass(text: Text) -> Array:
        at = [-1] if rows == "last" else text.where(rows.removeprefix("region:"))
        return text.A[:, :, at][..., text.where(region)].sum(-1).mean(-1)

    return mass


def measured(opened: Any, measure: str, prompt: int, condition: str, **more: str) -> Array:
    """[layers, heads] of a run."""
    item = {"item": COLUMNS[measure].default} if COLUMNS[measure].items else {}
    where = {"measure": measure, "prompt": prompt, "condition": condition, **item, **more}
    of = opened.values.filter(**where)
    of = of.sort("layer", "head").collect()
    return of["value"].to_numpy().reshape(of["layer"].n_unique(), -1)


def shares(opened: Any, prompt: int, condition: str) -> Array:
    """The focus score of every head, from the masses of a run."""
    of = {
        key: measured(opened, "mass", prompt, condition, keys=key)
        for key in ("system", "question", "filler")
    }
    return of["system"] / (of["system"] + of["question"] + np.nan_to_num(of["filler"]))


def texts(opened: Any, model: Any) -> Iterator[tuple[int, str, Text]]:
    tokens = opened.tokens.collect()
    for prompt, condition in opened.cells.select("prompt", "condition").rows():
        its = tokens.filter(prompt=prompt, condition=condition).sort("position")
        yield prompt, condition, Text(its, model)


FORMULAS: dict[str, list[tuple[str, dict[str, str], Any]]] = {
    "sinks": [("first_token", {}, sink)],
    "induction": [("induction", {}, induction)],
    "lookback": [("lookback_per_token", {}, lookback)],
    "needle": [("retrieval", {}, retrieval)],
    "heavy": [("top_share", {}, top_fifth)],
    "streaming": [
        *(("on_rest", {"queries": q}, beyond(q)) for q in ("all", "predicts:generated")),
        ("retrieval", {"queries": "predicts:generated"}, retrieval),
    ],
    "detectors": [
        ("log_self_mass", {"queries": "generated"}, log_of_own),
        ("laplacian", {"queries": "all", "item": "1"}, eigenvalue(1)),
        ("laplacian", {"queries": "all", "item": "10"}, eigenvalue(10)),
        ("lookback_per_token", {"queries": "generated"}, lookback),
    ],
    "receivers": [
        *(
            ("receiver_kurtosis", {"keys": keys}, receivers(keys, excess))
            for keys in ("all", "not-first", "solution")
        ),
        ("receiver_sentence", {"keys": "solution"}, receivers("solution", lambda s: s.argmax(-1))),
    ],
    "massive": [
        ("residual_largest", {}, nth_largest(1)),
        ("residual_second", {}, nth_largest(2)),
        ("residual_third", {}, nth_largest(3)),
        ("residual_median", {}, median_size),
        ("massive_entries", {}, massive_entries),
        ("massive_token", {}, place_of_largest(0)),
        ("massive_dimension", {}, place_of_largest(1)),
        ("first_token", {}, sink),
    ],
}
"""Of recipes that measure these and no masses: measure, further columns, and formula."""


def deviations(
    recipe: str, model: Any, opened: Any, dense: dict[tuple[int, str], Array] | None = None
) -> dict[str, tuple[float, float]]:
    """Statistic to the largest deviation of any head, and the largest value there is."""
    found: dict[str, tuple[float, float]] = {}

    def compare(what: str, ours: Array, theirs: Array) -> None:
        assert ours.shape == theirs.shape, (what, ours.shape, theirs.shape)
        assert np.isfinite(ours).all(), what
        off, most = found.get(what, (0.0, 0.0))
        found[what] = (max(off, np.abs(ours - theirs).max()), max(most, np.abs(theirs).max()))

    bases: dict[int, Text] = {}
    for prompt, condition, text in texts(opened, model):
        if recipe == "rerank":
            base = bases.setdefault(prompt, text)
            for queries in opened.experiment.queries if text is not base else ():
                for keys in opened.experiment.keys:
                    more = {"queries": queries, "keys": keys}
                    ours = measured(opened, "rerank_score", prompt, condition, **more)
                    compare(f"rerank: {queries}", ours, document(keys, queries, base, text))
        elif recipe in FORMULAS:
            for measure, more, formula in FORMULAS[recipe]:
                alone = len(FORMULAS[recipe]) == 1
                what = recipe if alone else f"{recipe}: {', '.join([measure, *more.values()])}"
                compare(what, measured(opened, measure, prompt, condition, **more), formula(text))
        elif recipe == "injection":
            literal = focus(text)
            compare("focus score of a head", shares(opened, prompt, condition), literal)
            if dense is not None:
                dense[prompt, condition] = literal
        else:
            for queries in opened.experiment.queries:
                for keys in opened.experiment.keys:
                    more = {"queries": queries, "keys": keys}
                    of = measured(opened, "mass", prompt, condition, **more)
                    compare(f"{recipe}: mass", of, on(keys, queries)(text))
    return found


def chosen(opened: Any, dense: dict[tuple[int, str], Array]) -> tuple[int, int]:
    """How many heads the published rule takes of dense scores, and how many the run's differ in."""
    prompts = sorted({prompt for prompt, _ in dense})

    def rule(score: Any) -> Any:
        clean, attacked = (
            np.stack([score(prompt, name).ravel() for prompt in prompts])
            for name in ("clean", "ignore")
        )
        return important_heads(clean, attacked)

    ours = rule(lambda prompt, name: shares(opened, prompt, name))
    theirs = rule(lambda prompt, name: dense[prompt, name])
    return int(theirs.sum()), int((ours != theirs).sum())


def check(name: str, recipes: list[str], prompts: int) -> Iterator[tuple[str, str]]:
    """Statistics with their largest deviation, of the largest value."""
    model, _ = attnscope.load(name, dtype="float32")
    model.set_attn_implementation("eager")
    for recipe in recipes:
        with tempfile.TemporaryDirectory() as folder:
            asked = RECIPES[recipe](models={"m": name}, prompts=prompts, dtype="float32")
            run(asked, Path(folder) / "run")
            opened = attnscope.open_run(Path(folder) / "run")
            dense: dict[tuple[int, str], Array] = {}
            for what, (off, most) in deviations(recipe, model, opened, dense).items():
                yield what, f"{off:.2g} of {most:.3g}"
            if dense:
                many, other = chosen(opened, dense)
                yield "heads chosen for the focus score", f"{other} of {many}"


def table(found: dict[str, dict[str, str]]) -> list[str]:
    """A row for each recipe, a column for each model: the largest deviation, as a share of the
    largest value."""

    def share(text: str) -> float:
        off, most = map(float, text.split(" of "))
        return off / (most or 1)

    recipes = dict.fromkeys(what.partition(": ")[0] for what in next(iter(found.values())))
    lines = ["| statistic | " + " | ".join(found) + " |", "| --- " * (len(found) + 1) + "|"]
    for recipe in recipes:
        few = ([text for what, text in of.items() if what.partition(": ")[0] == recipe]
               for of in found.values())  # fmt: skip
        lines.append(f"| {recipe} | {' | '.join(max(texts, key=share) for texts in few)} |")
    return lines


def main() -> None:
    known = [*FORMULAS, "injection", "drift", "position", "rerank"]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--only", default=",".join(known))
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    found: dict[str, dict[str, str]] = {}
    for name in given.models:
        label = Path(name).name.removeprefix("zoo:")
        found[label] = {}
        print(label, flush=True)
        for what, off in check(name, given.only.split(","), given.prompts):
            print(f"  {what}: off by {off}", flush=True)
            found[label][what] = off
    if given.write:
        put("papers", table(found), PAGE)


if __name__ == "__main__":
    main()
