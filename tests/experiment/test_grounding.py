"""Attention to what a question is about: the numbers are those of dense attention."""

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

import attnscope
from attnscope.errors import InputError
from attnscope.experiment.execute import run
from attnscope.experiment.plan import make_plan
from attnscope.measures.grounding import cells_in, pointed, ratio
from attnscope.spec.experiment import Experiment, make_experiment
from attnscope.spec.experiment_yaml import read_experiment
from attnscope.vision import ImageTokens, View
from dense_boxes import expected
from picture_models import model_folder, picture, write_prompts
from support_errors import raises

pytestmark = pytest.mark.filterwarnings("ignore:.*texts do not start with")
GRID = 8
"""Rows and columns of the tokens of the family llava."""


def experiment_of(folder: Path, prompts: dict[str, Any], **keys: Any) -> Experiment:
    chosen = {"measures": ["grounding"], "queries": ["last", "region:question"], "chat": False}
    return make_experiment(
        name="boxes", models={"m": str(folder / "model")}, prompts=prompts, **(chosen | keys)
    )


def dense(model: Any, ids: torch.Tensor, pixels: torch.Tensor) -> Any:
    """By layer [1, H, Q, K]: the weights of eager attention; tests share the model."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            return model(input_ids=ids, pixel_values=pixels, output_attentions=True).attentions
    finally:
        model.set_attn_implementation(before)


def test_a_run_has_the_numbers_of_dense_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also behind a filler, in another's picture, beside a prompt without a box, and padded."""
    family = model_folder(tmp_path / "model", "llava", monkeypatch)
    prompts = {"source": "shapes", "count": 5, "tasks": ["color", "exists", "count"]}
    slashes = {"insert": {"kind": "repeat", "unit": "/", "count": 3}, "position": "before-system"}
    conditions = {"base": {}, "filler": slashes, "exchanged": {"image": "next"}}
    experiment = experiment_of(tmp_path, prompts, conditions=conditions, batch_tokens=100_000)
    assert run(experiment, tmp_path / "run").complete
    opened = attnscope.open_run(tmp_path / "run")
    plan = make_plan(experiment)
    assert len({len(cell.tokens) for cell in plan.models[0].cells()}) > 1
    for cell in plan.models[0].cells():
        box, task = plan.metadata[cell.prompt]["box"], plan.metadata[cell.prompt]["task"]
        rows = opened.values.filter(prompt=cell.prompt, condition=cell.condition)
        rows = rows.sort("layer", "head").collect()
        if box is None:
            assert task == "count"
            assert rows["value"].is_null().all()
            continue
        ids = torch.tensor(cell.tokens.ids)[None]
        images = plan.pictures.images(cell.prompt, cell.condition)
        pixels = family.processor.image_processor(images, return_tensors="pt")["pixel_values"]
        at = ids[0] == family.processor.image_token_id
        assert at.sum() == GRID**2
        regions = cell.tokens.mask("question")
        for layer, weights in enumerate(dense(family.model, ids, pixels)):
            for queries, counted in (("last", slice(-1, None)), ("region:question", regions)):
                of = weights[0][:, counted][..., at].double().mean(1).numpy()
                one = rows.filter(queries=queries, layer=layer)
                pointing, ratios = expected(of, box, GRID)
                assert one.filter(measure="pointing")["value"].to_list() == pointing
                found = one.filter(measure="box_ratio")["value"].to_numpy()
                np.testing.assert_allclose(found, ratios, rtol=1e-4)
    assert opened.values.filter(measure="pointing").collect()["value"].n_unique() > 1


def test_generated_queries_look_at_the_same_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What predicts the first generated token is the last token of the prompt."""
    model_folder(tmp_path / "model", "llava", monkeypatch)
    prompts = {"source": "shapes", "count": 2, "tasks": ["color", "place"]}
    keys = {"generate": {"max_new_tokens": 2}, "batch_tokens": 100_000}
    experiment = experiment_of(tmp_path, prompts, **keys, queries=["last", "predicts:generated"])
    run(experiment, tmp_path / "run")
    run(experiment_of(tmp_path, prompts, queries=["last"]), tmp_path / "read")
    where = pl.col("queries") == "last"
    generated, read = (
        attnscope.open_run(tmp_path / name).values.filter(where).sort("prompt", "layer", "head")
        for name in ("run", "read")
    )
    several = attnscope.open_run(tmp_path / "run").values.filter(queries="predicts:generated")
    assert several.collect()["value"].is_not_null().all()
    order = ["prompt", "layer", "head", "measure", "value"]
    one, other = (table.select(order).sort(order[:-1]).collect() for table in (generated, read))
    assert one.height == other.height > 0
    assert not several.sort(order[:-1]).collect()["value"].equals(other["value"])


def test_a_coarse_and_a_fine_grid_are_one_map() -> None:
    """Four cells in the fine grid: a coarse token spreads its weight over them."""
    tokens = ImageTokens(
        sequence=0,
        positions=np.arange(7),
        views=(View(1, 1), View(1, 2, None), View(2, 2)),
        height=10,
        width=10,
    )
    weights = np.array([[0.4, 9.0, 9.0, 0.1, 0.0, 0.0, 0.5], [0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]])
    cells = tokens.to_map(weights)
    cover, inside = cells_in(tokens, (0.5, 0.25, 1.0, 1.0))
    np.testing.assert_allclose(cover, [[0, 0.5], [0, 1]])
    np.testing.assert_array_equal(inside, [[False, True], [False, True]])
    np.testing.assert_allclose(pointed(cells, inside), [1, 0.5])  # an empty map has equal cells
    found = ratio(cells, cover)
    assert found[0] == pytest.approx((0.05 + 0.6) / 1.0 / 0.375)
    assert np.isnan(found[1])


def test_a_box_smaller_than_a_cell_has_the_cell_of_its_middle() -> None:
    tokens = ImageTokens(
        sequence=0, positions=np.arange(4), views=(View(2, 2),), height=10, width=10
    )
    cover, inside = cells_in(tokens, (0.6, 0.1, 0.7, 0.2))
    np.testing.assert_array_equal(inside, [[False, True], [False, False]])
    assert cover.sum() == pytest.approx(0.04)
    outside = cells_in(
        ImageTokens(
            sequence=0,
            positions=np.arange(4),
            views=(View(2, 2, (0.25, 0.0, 0.75, 1.0)),),
            height=10,
            width=20,
        ),
        (0.0, 0.0, 0.2, 1.0),
    )
    assert not outside[0].any()
    assert not outside[1].any()


def boxed(folder: Path, *boxes: Any, images: Any = "a.png") -> dict[str, Any]:
    files = folder / "prompts"
    files.mkdir(exist_ok=True)
    picture(0).save(files / "a.png")
    records = [{"image": images, "question": f"What {n}?", "box": b} for n, b in enumerate(boxes)]
    path = write_prompts(files, records)
    marks = "<image>" * (1 if isinstance(images, str) else len(images))
    return {"source": "file", "path": str(path), "template": marks + "{question}"}


def test_what_cannot_be_measured_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_folder(tmp_path / "model", "llava", monkeypatch)
    box = [0.1, 0.1, 0.5, 0.5]
    assert make_plan(experiment_of(tmp_path, boxed(tmp_path, box, None))).size == 2
    with raises(InputError, "needs-box", measure="grounding"):
        make_plan(experiment_of(tmp_path, boxed(tmp_path, None)))
    with raises(InputError, "needs-box", measure="grounding"):
        make_plan(experiment_of(tmp_path, {"source": "math", "count": 1}))
    for wrong in ([0.1, 0.1, 0.5], [0.5, 0.1, 0.1, 0.5], [0, 0, 100, 50], "0000", [0, 0, None, 1]):
        with raises(InputError, "bad-box", prompt=1, value=wrong):
            make_plan(experiment_of(tmp_path, boxed(tmp_path, box, wrong)))
    with raises(InputError, "image-count", prompt=0, images=2):
        make_plan(experiment_of(tmp_path, boxed(tmp_path, box, images=["a.png", "a.png"])))


def test_another_box_is_another_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that continues must not take the numbers of another box."""
    model_folder(tmp_path / "model", "llava", monkeypatch)

    def ids(box: list[float], measure: str) -> list[str]:
        experiment = experiment_of(tmp_path, boxed(tmp_path, box), measures=[measure])
        return [cell.id for cell in make_plan(experiment).models[0].cells()]

    one, other = [0.1, 0.1, 0.5, 0.5], [0.1, 0.1, 0.6, 0.5]
    assert ids(one, "grounding") != ids(other, "grounding")
    assert ids(one, "mass") == ids(other, "mass")


def test_one_question_about_two_pictures_is_asked_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts with equal texts are one unit only if their pictures are equal too."""
    model_folder(tmp_path / "model", "llava", monkeypatch)
    for n in (0, 1):
        picture(n).save(tmp_path / f"{n}.png")
    files = (0, 1, 0)
    records = [{"image": str(tmp_path / f"{n}.png"), "question": "What is it?"} for n in files]
    prompts = {"source": "inline", "template": "<image>{question}", "records": records}
    plan = make_plan(experiment_of(tmp_path, prompts, measures=["mass"]))
    assert [one["repeat_of"] for one in plan.metadata] == [0, 1, 0]


def test_shapes_are_kept_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_folder(tmp_path / "model", "llava", monkeypatch)
    experiment = experiment_of(tmp_path, {"source": "shapes", "count": 3, "seed": 4})
    assert run(experiment, tmp_path / "run").complete
    opened = attnscope.open_run(tmp_path / "run")
    assert opened.prompts["seed"].to_list() == [4, 4, 4]
    assert opened.prompts["number"].to_list() == [0, 1, 2]
    again = read_experiment(tmp_path / "run" / "experiment.yaml")
    assert run(again, tmp_path / "run").measured == 0
    assert run(experiment, tmp_path / "run").measured == 0
    longer = make_plan(experiment_of(tmp_path, {"source": "shapes", "count": 4, "seed": 4}))
    assert [one["number"] for one in longer.metadata] == [0, 1, 2, 3]
