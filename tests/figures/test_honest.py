"""What a figure says is what it shows: the choice asked for, the rule that decides, what is left
out, what rests on few prompts.
"""

from __future__ import annotations

import re
from dataclasses import replace

import polars as pl
import pytest

from attnscope.errors import InputError
from attnscope.figures import draw
from attnscope.figures.export import FORMATS
from attnscope.figures.numbers import PAIRED
from attnscope.figures.pdf import in_fixed_order
from attnscope.stats.run_stats import compare_run
from attnscope.stats.summary import summary
from attnscope.stats.tables import combine
from made_runs import MadeRun, made_run
from reading_back import section


def asking(run: MadeRun, **keys: object) -> MadeRun:
    """The run of an experiment that asks for more than the made one."""
    return replace(run, experiment=run.experiment.changed(**keys))


def test_an_experiment_that_asks_for_lift_gets_lift() -> None:
    run = asking(made_run(models=("one",), layers=(0,)), normalise="lift")
    figure = draw(run, "token-types")
    row = figure.data.filter(pl.col("class") == "star").row(0, named=True)
    of_star = pl.col("measure") == "mass", pl.col("item") == "star"
    heads = run.values.filter(*of_star).collect().group_by("prompt")
    by_prompt = heads.agg(pl.col("value").mean() / pl.col("uniform").first())
    assert row["value"] == pytest.approx(by_prompt["value"].mean(), rel=1e-5)
    assert "Lift: the mass of a class divided by" in figure.caption
    assert "total" not in set(figure.data["class"])
    assert figure.data["bottom"].unique().to_list() == [0.0]


@pytest.mark.parametrize("how", ["lift", "per-token"])
def test_what_does_not_add_up_is_not_stacked(how: str) -> None:
    figure = draw(made_run(), "token-types", normalise=how)
    assert figure.data["top"].to_list() == figure.data["value"].to_list()
    assert "xOffset" in str(figure.spec)
    with pytest.raises(InputError, match=f"{how} has neither token counts"):
        draw(made_run(), "token-types", normalise=how, counts=True)


def test_an_experiment_that_asks_for_each_head_is_told_what_it_gets() -> None:
    run = asking(made_run(), combine="each")
    for name in ("token-types", "classes", "depth", "flow"):
        caption = draw(run, name).caption
        assert "mean over all heads (the experiment says each:" in caption
        assert "the experiment says" not in draw(run, name, combine="sum").caption


def test_lambda_and_evenness_are_of_the_queries_that_are_drawn() -> None:
    run = made_run(
        models=("m",),
        conditions={"base": 0, "slashes": 9, "sentence": 9},
        profile_heads=(0,),
        measures=("lambda", "uniformity"),
        heads=1,
        layers=(0,),
    )
    last = run.values.with_columns(
        pl.lit("last").alias("queries"),
        pl.when(pl.col("condition") == "sentence").then(0.25).otherwise(0.5).alias("value"),
    )
    both = replace(
        asking(run, queries=["all", "last"], measures=["lambda", "uniformity"]),
        values=pl.concat([run.values, last]),
        positions=pl.concat(
            [run.positions, run.positions.with_columns(pl.lit("last").alias("queries"))]
        ),
    )
    for queries, told in (("all", "λ = 0.9"), ("last", "λ = 0.5 ")):
        assert told in draw(both, "filler-profile", queries=queries).description
    evenness = draw(both, "filler-vs-sentence", queries="last").description
    assert "slashes minus sentence = 0.25 " in evenness
    unmeasured = replace(both, values=run.values)
    assert "λ =" not in draw(unmeasured, "filler-profile", queries="last").description


def test_the_keys_of_a_lambda_are_said_where_there_are_several() -> None:
    run = made_run(
        models=("m",),
        conditions={"base": 0, "slashes": 9},
        profile_heads=(0,),
        measures=("lambda",),
        heads=1,
        layers=(0,),
    )
    other = run.values.with_columns(pl.lit("not-first").alias("keys"), pl.lit(0.5).alias("value"))
    both = replace(asking(run, keys=["all", "not-first"]), values=pl.concat([run.values, other]))
    assert "λ (keys: all) = 0.9" in draw(both, "filler-profile").description
    chosen = draw(both, "filler-profile", keys="not-first").description
    assert "λ (keys: not-first) = 0.5 " in chosen
    caption = draw(both, "lambda", keys="not-first").caption
    assert "keys: not-first (the first left out, the others not scaled up)" in caption
    assert "scaled up" not in draw(both, "lambda").caption


def test_an_insertion_of_nothing_is_a_variant() -> None:
    run = made_run(models=("one",), conditions={"base": 0, "empty": 9})
    cells = run.cells.with_columns(pl.col("filler_tokens", "boundary_tokens") * 0)
    nothing = {"base": {}, "empty": {"insert": {"kind": "repeat", "unit": "/", "count": 0}}}
    figure = draw(replace(asking(run, conditions=nothing), cells=cells), "effect-heads")
    assert "empty minus base, model one" in figure.caption


def test_only_undefined_values_of_what_is_shown_are_counted() -> None:
    run = made_run(models=("one",), layers=(0, 1, 2), heads=2, prompts=3)
    in_layer = (pl.col("measure") == "flow") & (pl.col("item") == "star")

    def without(layer: int) -> MadeRun:
        gone = in_layer & (pl.col("layer") == layer)
        value = pl.when(gone).then(None).otherwise("value").alias("value")
        return replace(run, values=run.values.with_columns(value))

    assert "undefined" not in draw(without(1), "flow").caption
    # A class of queries, 5 of keys, 2 heads, 3 prompts.
    told = "30 undefined values (a class without queries) are left out"
    assert told in draw(without(0), "flow").caption


def test_what_rests_on_fewer_prompts_says_so() -> None:
    run = made_run(models=("one",), layers=(0, 1))
    gone = (pl.col("item") == "star") & (pl.col("layer") == 0) & (pl.col("prompt") > 0)
    value = pl.when(gone).then(None).when(pl.col("item") == "star").then(9.0).otherwise("value")
    figure = draw(replace(run, values=run.values.with_columns(value.alias("value"))), "lift")
    largest = section(figure.description, "Largest and smallest")[0]
    assert "layer 0, star (n = 1)" in largest
    assert "layer 1, star" in largest
    assert "layer 1, star (n" not in largest
    assert "Hollow points have no interval" in figure.caption
    assert "datum.low === null" in str(figure.spec)
    assert "Hollow" not in draw(run, "lift").caption


def test_what_holds_up_is_what_the_comparison_finds() -> None:
    run = made_run(prompts=7, layers=(0, 1))
    # In layer 0 two of seven fall a little: p = 8 / 128, whatever the interval says.
    rises = [0.1, 0.2, 0.15, 0.05, 0.11, -0.001, -0.002]
    rise = pl.col("prompt").replace_strict(dict(enumerate(rises)), return_dtype=pl.Float64)
    steady = 0.1 + 0.001 * pl.col("prompt")
    second = (pl.col("model") == "spatial-base").cast(pl.Float64)
    flat = pl.when(pl.col("layer") == 0).then(0.3 + second * rise).otherwise(0.3 + second * steady)
    run = replace(run, values=run.values.with_columns(flat.alias("value")))
    compared = compare_run(run).filter(pl.col("measure") == "mass")
    assert compared.filter(pl.col("layer") == 0)["p"].unique().to_list() == [0.0625]
    holds = (pl.col("q") < 0.05) & ((pl.col("low") > 0) | (pl.col("high") < 0))
    lines = section(draw(run, "classes").description, "Differences")
    start = next(i for i, line in enumerate(lines) if line.startswith("**Hold up**"))
    told = [re.match(r"- layer (\d+), (.*?):", line) for line in lines[start + 1 : start + 6]]
    held = {(int(m[1]), m[2]) for m in told if m}
    assert held == set(compared.filter(holds).select("layer", "item").iter_rows())
    assert {layer for layer, _ in held} == {1}


def test_a_pdf_has_the_same_bytes_every_time() -> None:
    run = made_run(models=("one",), layers=(0, 1), prompts=2, profile_heads=(0,))
    figure = draw(run, "text")
    made = {FORMATS["pdf"](figure) for _ in range(5)}
    assert len(made) == 1
    check_pdf(made.pop())


def check_pdf(pdf: bytes) -> None:
    """Every entry of the table is where its object begins, and every reference has its object."""
    start = int(pdf[pdf.rindex(b"startxref") :].split()[1])
    lines = pdf[start:].splitlines()
    assert lines[0] == b"xref"
    size = int(lines[1].split()[1])
    for number, line in enumerate(lines[3 : size + 2], start=1):
        at = int(line.split()[0])
        assert pdf[at:].startswith(b"%d 0 obj\n" % number)
    assert f"/Size {size}".encode() in pdf[start:]
    bodies = re.sub(rb"stream\n.*?\nendstream", b"", pdf, flags=re.S)
    assert {int(n) for n in re.findall(rb"\b(\d+) 0 R\b", bodies)} <= set(range(1, size))
    assert pdf.endswith(b"%%EOF")


def test_a_pdf_keeps_what_it_is_made_of() -> None:
    import vl_convert

    svg = '<svg xmlns="http://www.w3.org/2000/svg" width="50" height="50"><text>λ</text></svg>'
    before = bytes(vl_convert.svg_to_pdf(svg))
    after = in_fixed_order(before)

    def streams(pdf: bytes) -> list[bytes]:
        return sorted(re.findall(rb"stream\n(.*?)\nendstream", pdf, flags=re.S))

    assert streams(after) == streams(before)
    assert after.count(b" 0 obj\n") == before.count(b" 0 obj\n")


def test_what_is_resampled_is_what_was_asked_for() -> None:
    """Intervals, tests, captions and claims of a figure by cluster, as `summary` has them."""
    facts = pl.DataFrame({"prompt": range(24), "document": [p // 3 for p in range(24)]})
    run = replace(made_run(prompts=24, layers=(0,)), prompts=facts)
    plain, by = (
        draw(run, "classes", **units)
        for units in ({}, {"cluster": "document"})  # type: ignore[arg-type]
    )
    values = run.values.filter(pl.col("measure") == "mass", pl.col("item") == "star")
    values = combine(values.filter(pl.col("model") == "spatial-phys"))
    (wanted,) = summary(values, prompts=facts, cluster="document").to_dicts()
    row = by.data.filter(pl.col("class") == "star", pl.col("model") == "spatial-phys")
    assert row["low"].item() == pytest.approx(wanted["low"], rel=1e-4)
    assert not by.data["low"].equals(plain.data["low"])
    assert by.data["value"].equals(plain.data["value"])
    assert "n = 24 prompts in 8 clusters (document); intervals: 95 %" in by.caption
    assert "skewness, over clusters" in by.caption
    assert "the 95 % interval over clusters" in by.description
    assert "skewness, over prompts" in plain.caption
    few = draw(run, "effect-heads", cluster="document", prompts=list(range(15)))
    assert "in 5 clusters (document), so there are no intervals" in few.caption
    assert "No tests: fewer clusters than the 6" in few.caption
    with pytest.raises(InputError, match="unknown fact 'topic' of a prompt; stored with it: docu"):
        draw(run, "classes", cluster="topic")


@pytest.mark.parametrize(("number", "pairs"), [(3, 3), (PAIRED + 1, PAIRED)])
def test_of_many_models_each_is_compared_with_the_first(number: int, pairs: int) -> None:
    names = [f"m{n}" for n in range(number)]
    run = made_run(models=names, layers=(0,), heads=1, prompts=6, measures=("entropy",))
    said = draw(run, "depth").description
    assert len(re.findall(r"m\d minus m\d = ", said)) == pairs
    assert ("each is compared with m0 alone" in said) == (number > PAIRED)


def test_intervals_that_a_few_prompts_dominate_are_said_to_be_doubtful() -> None:
    run = made_run(models=("one",), layers=(0,))
    one = pl.when(pl.col("prompt") == 0).then(pl.col("value") * 100).otherwise(pl.col("value"))
    skewed = replace(run, values=run.values.with_columns(one.alias("value")))
    for name in ("token-types", "classes", "depth", "head-strip"):
        figure = draw(skewed, name)
        assert figure.data["unreliable"].all(), name
        there = figure.data.height
        assert f"{there} of {there} are unreliable" in figure.caption
