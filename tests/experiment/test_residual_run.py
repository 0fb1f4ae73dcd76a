"""The largest entries of the residual stream, against numpy on what plain transformers makes."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import attnscope
from attnscope.activations.residual_peaks import peaks, residual_peaks
from attnscope.errors import InputError, ModelError
from attnscope.experiment.execute import run
from attnscope.measures.residual import FIELDS
from support_errors import raises

Array = np.ndarray[Any, Any]


def streams(folder: str, ids: list[int]) -> list[Array]:
    """[tokens, width] after each layer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found: list[Array] = []
    for layer in model.model.layers:
        layer.register_forward_hook(
            lambda module, args, output: found.append(
                (output[0] if isinstance(output, tuple) else output)
                .reshape(len(ids), -1)
                .double()
                .numpy()
            )
        )
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]))
    return found


def reference(x: Array) -> dict[str, float]:
    size = np.sort(np.abs(x), axis=None)
    median = size[(len(size) - 1) // 2]
    token, dimension = np.unravel_index(np.abs(x).argmax(), x.shape)
    return {
        "residual_largest": size[-1],
        "residual_second": size[-2],
        "residual_third": size[-3],
        "residual_median": median,
        "residual_ratio": size[-1] / median,
        "massive_entries": ((size > 100) & (size >= 1000 * median)).sum(),
        "massive_token": token,
        "massive_dimension": dimension,
    }


def test_rows_are_those_of_the_whole_stream(small: Any, folder: str, tmp_path: Any) -> None:
    """Prompts of different lengths in a padded batch, and a variant with more tokens."""
    prompts = {"source": "math", "count": 3, "level": 1}
    run(small(measures=["residual"], prompts=prompts, queries=["all", "last"]), tmp_path / "run")
    opened = attnscope.open_run(tmp_path / "run")
    values = opened.values.collect()
    assert values["queries"].unique().to_list() == ["all"]
    rows = 0
    for prompt, condition in opened.cells.select("prompt", "condition").rows():
        cell = opened.tokens.filter(prompt=prompt, condition=condition).collect().sort("position")
        dense = [reference(x) for x in streams(folder, cell["id"].to_list())]
        for row in values.filter(prompt=prompt, condition=condition).iter_rows(named=True):
            assert row["head"] is None
            assert row["value"] == pytest.approx(dense[row["layer"]][row["measure"]], rel=1e-5)
            rows += 1
    assert rows == len(opened.cells) * len(dense) * len(dense[0])


def test_an_entry_is_massive_by_size_and_by_ratio() -> None:
    stream = torch.full((3, 5), 0.05)
    stream[1, 4], stream[2, 0], stream[0, 0] = -150.0, 120.0, 99.0
    found = dict(zip(FIELDS, peaks(stream).tolist(), strict=True))
    assert found["massive_entries"] == 2  # 99 is too small
    assert (found["massive_token"], found["massive_dimension"]) == (1, 4)
    assert found["residual_largest"] == 150
    assert dict(zip(FIELDS, peaks(stream * 3).tolist(), strict=True))["massive_entries"] == 3
    other = torch.where(stream.abs() < 1, 1.0, stream)  # large, but not 1,000 times the median
    assert dict(zip(FIELDS, peaks(other).tolist(), strict=True))["massive_entries"] == 0


def test_padding_on_the_left_changes_nothing(folder: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(5, 60, (1, 9), generator=torch.Generator().manual_seed(0))
    padded = torch.cat([ids.new_zeros(1, 4), ids], 1)
    real = torch.cat([torch.zeros(1, 4), torch.ones(1, 9)], 1).long()
    with torch.no_grad(), residual_peaks(model) as alone:
        model(input_ids=ids)
    with torch.no_grad(), residual_peaks(model, [1]) as left:
        model(input_ids=padded, attention_mask=real)
    assert list(left) == [1]
    torch.testing.assert_close(left[1], alone[1], rtol=1e-4, atol=1e-5)


def test_nan_is_an_error() -> None:
    with raises(ModelError, "nan-activations", layer=3, count=1):
        peaks(torch.tensor([[1.0, 2.0], [torch.nan, 4.0]]), layer=3)


@pytest.mark.parametrize("measure", ["residual", "activations"])
def test_not_while_a_model_generates(measure: str, small: Any) -> None:
    generate = {"max_new_tokens": 2}
    with raises(InputError, "measure-with-generate", measure=measure):
        small(measures=[measure], generate=generate, queries=["generated"])
