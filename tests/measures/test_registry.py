"""What every declared measure promises."""

import subprocess
import sys
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import attnscope
from attnscope.cli import app
from attnscope.errors import InputError, ScopeError
from attnscope.measures import measure as declared
from attnscope.measures.chosen_keys import earlier_keys
from attnscope.measures.registry import COLUMNS, MEASURES
from attnscope.measures.table import lines, markdown
from families import build
from support_errors import raises


@pytest.mark.parametrize("name", MEASURES)
def test_a_declaration_is_whole(name: str) -> None:
    measure = MEASURES[name]
    assert measure.name == name
    assert measure.needs <= set(get_args(declared.Need))
    assert measure.per <= set(get_args(declared.Per))
    assert measure.level in get_args(declared.Level)
    assert all([measure.description, *measure.columns.values()])
    assert bool(measure.items) == (measure.default is not None)
    assert measure.default is None or measure.default in measure.items


def test_no_two_measures_give_numbers_of_the_same_name() -> None:
    assert len(COLUMNS) == sum(len(measure.columns) for measure in MEASURES.values())


def test_declarations_need_no_torch() -> None:
    probe = "import sys, attnscope.measures.registry; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_every_file_that_declares_is_listed() -> None:
    folder = Path(declared.__file__).parent
    rest = {"__init__", "measure", "layer", "registry", "table"}
    files = {p.stem for p in folder.glob("*.py")} - rest
    assert {
        sys.modules[m.function.__module__].__name__.split(".")[-1] for m in MEASURES.values()
    } == files


def test_the_page_of_measures_defines_every_number() -> None:
    rows = {tuple(row.split(" | ")[1:3]) for row in markdown().splitlines()}
    for measure in MEASURES.values():
        for column, meaning in measure.columns.items():
            assert ("" if column == measure.name else f"`{column}`", meaning) in rows


def test_a_scope_gives_any_measure_of_a_head_by_name() -> None:
    model, ids = build("qwen2"), torch.randint(5, 97, (2, 12))
    with torch.no_grad(), attnscope.watch(model) as scope:
        model(input_ids=ids)
    torch.testing.assert_close(scope.measure("effective_tokens", 1), scope.entropy(1).exp())
    with raises(InputError, "unknown-measure", value="lambda"):
        scope.measure("lambda", 1)


def test_measures_of_single_queries_need_them_kept() -> None:
    model, ids = build("qwen2"), torch.randint(5, 9, (2, 12))
    with torch.no_grad(), attnscope.watch(model) as scope:
        model(input_ids=ids)
    with pytest.raises(ScopeError):
        scope.measure("induction", 1)
    with torch.no_grad(), attnscope.watch(model, keep=True) as scope:
        model(input_ids=ids)
    assert scope.measure("induction", 1).shape == (2, 4)
    first, recent, rest = scope.measure("by_distance", 1).unbind(-1)
    torch.testing.assert_close(first + recent + rest, torch.ones(2, 4))
    weight = scope.measure("largest", 1)
    torch.testing.assert_close(weight, scope.largest(1).weight[..., 0].mean(-1))
    embedded = model.get_input_embeddings()(ids)
    with torch.no_grad(), attnscope.watch(model, keep=True) as scope:
        model(inputs_embeds=embedded)
    with raises(InputError, "no-token-ids"):
        scope.measure("induction", 1)


def test_the_token_after_the_last_of_its_kind() -> None:
    tokens = np.array([[7, 5, 7, 7, 6, 5], [-1, -1, 5, 5, 6, 5]])
    assert earlier_keys(tokens, after=1).tolist() == [[-1, -1, 1, 3, -1, 2], [-1, -1, -1, 3, -1, 4]]


def test_classes_by_id_are_shares_of_ones_and_zeros() -> None:
    model, ids = build("qwen2"), torch.randint(5, 97, (2, 12))
    with torch.no_grad(), attnscope.watch(model) as scope:
        model(input_ids=ids)
    classes = ids % 4 - 1  # -1 is no class
    shares = torch.eye(4)[classes][..., :3]  # -1 is the last
    for read in (scope.mass, scope.lift):
        torch.testing.assert_close(read(0, shares, 3), read(0, classes, 3))
    half = scope.mass(0, shares / 2, 3)
    torch.testing.assert_close(half, scope.mass(0, classes, 3) / 2)
    with pytest.raises(InputError):
        scope.mass(0, shares, 4)


def test_the_help_lists_every_measure() -> None:
    shown = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "200"}).output
    assert all(line in shown for line in lines())
