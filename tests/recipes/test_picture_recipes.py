"""The recipes on pictures: run on the bundled model, drawn, and counted once more."""

import json

import numpy as np
import polars as pl
import pytest

import attnscope
from attnscope.experiment.execute import run
from attnscope.experiment.plan import make_plan
from attnscope.figures import draw
from attnscope.recipes import BUNDLED, RECIPES
from attnscope.recipes.image_grounding import best_heads
from attnscope.report.published import published_statistics
from attnscope.run.store import Run
from attnscope.stats.run_stats import judge_run

PICTURES = [name for name in RECIPES if RECIPES[name].extra == "vision"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    opened = {}
    for name in PICTURES:
        folder = tmp_path_factory.mktemp(name) / "run"
        run(RECIPES[name](prompts=12), folder, claims=RECIPES[name].claims)
        opened[name] = attnscope.open_run(folder)
    return opened


def test_recipes_that_need_an_extra_are_not_run_without_their_name() -> None:
    assert PICTURES == ["image-grounding", "image-tokens"]
    assert not {*PICTURES} & {*BUNDLED}
    assert all(RECIPES[name].models == RECIPES[name].real for name in PICTURES)


@pytest.mark.parametrize("name", PICTURES)
def test_another_seed_gives_other_pictures(name: str) -> None:
    pictures = []
    for seed in (0, 1):
        plan = make_plan(RECIPES[name](prompts=6, seed=seed))
        assert plan.pictures is not None
        pictures.append({*plan.pictures.files})
    assert len(pictures[0]) == 6
    assert not pictures[0] & pictures[1]


@pytest.mark.parametrize("name", PICTURES)
def test_a_recipe_is_drawn_and_judged(name: str, runs: dict[str, Run]) -> None:
    assert runs[name].complete
    for figure in RECIPES[name].figures:
        assert draw(runs[name], figure).data.height > 0
    verdicts = judge_run(runs[name], RECIPES[name].claims)
    assert {v.verdict for v in verdicts} <= {"holds", "open", "cannot tell", "smaller than claimed"}
    assert "not measured" not in {v.verdict for v in verdicts}


def values(opened: Run, measure: str, column: str = "value", **where: str) -> np.ndarray:
    """[prompts, heads]."""
    rows = opened.values.filter(pl.col("measure") == measure).filter(**where).collect()
    rows = rows.sort("prompt", "layer", "head")
    return rows[column].to_numpy().reshape(rows["prompt"].n_unique(), -1)


def test_heads_are_chosen_on_one_half_and_judged_on_the_other(runs: dict[str, Run]) -> None:
    opened = runs["image-grounding"]
    found = {one.what: one for one in published_statistics(opened)}
    for queries in ("region:target", "last"):
        of = f"shapes-vlm, queries {queries}: "
        pointing = values(opened, "pointing", queries=queries)
        best = int(pointing[0::2].mean(0).argmax())
        named = f"{of}pointing game, head {best // 6}.{best % 6}, chosen on other prompts"
        assert found[named].value == pytest.approx(pointing[1::2, best].mean())
        assert found[named].n == 6
        random = found[f"{of}pointing game, a random head"]
        assert random.value == pytest.approx(pointing[1::2].mean())
        ratio = values(opened, "box_ratio", queries=queries)
        three = np.argsort(-ratio[0::2].mean(0), kind="stable")[:3]
        names = ", ".join(f"{head // 6}.{head % 6}" for head in three)
        named = f"{of}attention in the box over its area, heads {names}, chosen on other prompts"
        assert found[named].value == pytest.approx(ratio[1::2][:, three].mean())
    shapes = opened.prompts.sort("prompt")["shapes"].to_numpy()[1::2]
    blind = found["pointing game, a random shape of the picture"]
    assert blind.value == pytest.approx((1 / shapes).mean())
    cells = values(opened, "pointing", "uniform", queries="last")[1::2]
    assert found["pointing game, a random cell of the map"].value == pytest.approx(cells.mean())


def test_the_name_of_a_color_points_at_its_shape(runs: dict[str, Run]) -> None:
    """In "What shape is red?" some head of the trained model looks at the red shape."""
    opened = runs["image-grounding"]
    prompts = opened.prompts.filter(task="shape")["prompt"].to_list()
    table = values(opened, "pointing", queries="region:target")[prompts]
    assert len(prompts) == 4
    assert table.mean(0).max() == 1


def test_best_heads_are_the_first_of_equal_ones() -> None:
    assert best_heads(np.array([[0.0, 1.0, 1.0], [0.0, 1.0, 1.0]]), 2) == [1, 2]


def test_image_tokens_are_compared_with_the_others(runs: dict[str, Run]) -> None:
    opened = runs["image-tokens"]
    found = {one.what: one.value for one in published_statistics(opened)}
    image, text, special = (
        values(opened, "mass", queries="last", item=item).reshape(12, 8, 6).mean(2)
        for item in ("image", "text", "special")
    )
    tokens = opened.tokens.group_by("prompt", "class").len().collect()
    others = tokens.filter(pl.col("class") != "image").group_by("prompt").agg(pl.col("len").sum())
    count = others.sort("prompt")["len"].to_numpy()[:, None]
    of = "shapes-vlm, queries last: "
    assert found[f"{of}mass on image tokens, layers 0–1"] == pytest.approx(image[:, :2].mean())
    ratio = (image / 144)[:, 2:].mean() / ((text + special) / count)[:, 2:].mean()
    named = f"{of}attention to an image token over that to another token, deeper layers"
    assert found[named] == pytest.approx(ratio)


def test_the_figure_shows_heads_chosen_in_other_prompts_and_the_box(runs: dict[str, Run]) -> None:
    opened = runs["image-grounding"]
    figure = draw(opened, "image-map")
    pointing = values(opened, "pointing", queries="region:target")
    others = np.delete(pointing, 1, axis=0).mean(0)
    best = sorted(np.argsort(-others, kind="stable")[:4].tolist())
    panels = [f"layer {head // 6}, head {head % 6}" for head in best]
    assert figure.data["panel"].unique(maintain_order=True).to_list() == panels
    box = json.loads(opened.prompts.filter(prompt=1)["box"].item())
    outline = dict(zip(("left", "top", "right", "bottom"), np.array(box) * 192, strict=True))
    drawn = [data for data in figure.spec["datasets"].values() if len(data) == 1]
    assert any(data[0] == pytest.approx(outline) for data in drawn if "left" in data[0])
    with pytest.raises(attnscope.errors.InputError) as error:
        draw(runs["image-tokens"], "image-map", maps="pointing")
    assert error.value.code == "not-measured"
