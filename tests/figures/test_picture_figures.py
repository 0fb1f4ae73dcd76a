"""Maps over pictures in figures: their cells are the attention to the tokens there."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from PIL import Image

from attnscope.errors import InputError
from attnscope.figures import draw
from made_runs import MadeRun, made_run

CONDITIONS = {"base": 0, "neutral": 9}


def run_with_picture() -> MadeRun:
    return made_run(
        models=("one",), conditions=CONDITIONS, profile_heads=(0, 2), heads=3, picture=True
    )


def share(run: MadeRun, condition: str, head: int) -> np.ndarray[Any, Any]:
    """[tokens]: what each token of the picture receives, of all that the head gives."""
    rows = run.positions.collect().filter(prompt=0, condition=condition, layer=0, head=head)
    received = rows.sort("position")["received"].cast(pl.Float64).fill_null(0).to_numpy()
    return received[1:7] / received.sum()


def cells(figure: Any) -> np.ndarray[Any, Any]:
    data = figure.data.sort("queries", "panel", "row", "column")
    return data["value"].to_numpy()


def test_a_map_is_the_mean_over_heads_of_the_share_of_attention() -> None:
    run = run_with_picture()
    figure = draw(run, "image-map")
    mean = (share(run, "base", 0) + share(run, "base", 2)) / 2
    np.testing.assert_allclose(cells(figure), mean, rtol=1e-3)
    assert figure.data["left"].unique().sort().to_list() == [0, 20, 40]
    assert figure.data["bottom"].unique().sort().to_list() == [20, 40]
    heads = draw(run, "image-map", maps="heads")
    np.testing.assert_allclose(cells(heads)[6:], share(run, "base", 2), rtol=1e-3)


def test_a_relative_map_is_divided_by_that_of_a_paired_condition() -> None:
    run = run_with_picture()
    figure = draw(run, "image-map", relative="neutral", maps="heads")
    ratio = share(run, "base", 0) / share(run, "neutral", 0)
    np.testing.assert_allclose(cells(figure)[:6], ratio, rtol=2e-3)
    other = [
        {**row, "views": [[3, 2, [0.0, 0.0, 1.0, 1.0], False]]}
        if row["condition"] == "neutral"
        else row
        for row in run.image_tokens
    ]
    with pytest.raises(InputError) as error:
        draw(replace(run, image_tokens=other), "image-map", relative="neutral")
    assert error.value.code == "other-grid"


def test_the_picture_is_in_the_figure_if_its_file_is_there(tmp_path: Path) -> None:
    run = run_with_picture()
    assert "data:image" not in str(draw(run, "image-map").spec)
    (tmp_path / "images").mkdir()
    Image.new("RGB", (60, 40), (200, 0, 0)).save(tmp_path / "images" / "none.png")
    figure = draw(replace(run, path=tmp_path), "image-map")
    assert "data:image/jpeg;base64," in str(figure.spec)
    assert "data:image" not in figure.description
    with pytest.raises(InputError) as error:
        draw(run, "image-map", image=2)
    assert error.value.code == "unknown-image"


def test_each_part_of_the_prompt_has_a_line() -> None:
    run = made_run(measures=("mass",), keys=("all", "image:1"), classes=("all",))
    assert set(draw(run, "modality-depth").data["class"]) == {"all", "image:1"}
    modalities = made_run(measures=("mass",), classes=("image", "text"))
    assert set(draw(modalities, "modality-depth").data["class"]) == {"image", "text"}
    for keys in (("all",), ("all", "not-first")):  # no part of the prompt
        with pytest.raises(InputError) as error:
            draw(made_run(measures=("mass",), keys=keys), "modality-depth")
        assert error.value.code == "not-measured"
