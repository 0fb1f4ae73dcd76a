"""The recipes on tiny models of the right shape, every row checked against eager attention."""

from pathlib import Path
from typing import Any

import polars as pl
import pytest
from transformers import AutoTokenizer

import attnscope
from attnscope.errors import InputError
from attnscope.experiment.execute import run
from attnscope.experiment.plan import make_plan
from attnscope.experiment.prompt_list import samples_of
from attnscope.recipes import RECIPES
from attnscope.recipes.filler_profile import filler_profile
from attnscope.recipes.filler_vs_sentence import filler_vs_sentence
from attnscope.recipes.token_types import token_types
from attnscope.spec.experiment import Experiment
from dense_rows import check
from made_models import save_model
from support_errors import raises


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Tiny models in place of the recipes' own."""
    at = tmp_path_factory.mktemp("models")
    return {
        "spatial-base": save_model(at / "base", layers=28, heads=12, kv_heads=2),
        "spatial-phys": save_model(at / "phys", layers=28, heads=12, kv_heads=2, seed=1),
        "math-qwen2": save_model(at / "math", layers=3, heads=8, seed=2),
        "chat-llama": save_model(at / "llama", "llama", layers=3, heads=32, kv_heads=8, seed=3),
        "chat-gemma3": save_model(at / "gemma", "gemma3", layers=3, heads=8, seed=4),
    }


def of(folders: dict[str, str], experiment: Experiment) -> dict[str, str]:
    return {label: folders[label] for label in experiment.models}


def chat_ids(folder: str, prompt: Any) -> list[int]:
    """The prompt as plain transformers writes it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    system, _, rest = prompt.text.partition("\n\n")
    turns = [{"role": "system", "content": system}, {"role": "user", "content": rest}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return found


def measured(experiment: Experiment, folders: dict[str, str], out: Path) -> Any:
    """Run it; the base prompts must be the recipe's, in the model's chat template."""
    run(experiment, out)
    opened = attnscope.open_run(out)
    assert opened.complete
    tokens = opened.tokens.filter(condition="base").collect()
    for label, folder in of(folders, experiment).items():
        for number, sample in enumerate(samples_of(experiment)):
            ids = tokens.filter(model=label, prompt=number).sort("position")["id"].to_list()
            assert ids == chat_ids(folder, sample.prompt)
    return opened


@pytest.mark.slow
def test_token_types(folders: dict[str, str], tmp_path: Path) -> None:
    default = token_types()
    assert default.models == {
        "spatial-base": "zoo:spatial-base",
        "spatial-phys": "zoo:spatial-phys",
    }
    experiment = token_types(of(folders, default), prompts=2)
    opened = measured(experiment, folders, tmp_path / "run")
    rows = check(opened, folders)
    assert rows == {"mass": 2 * 2 * 4 * 12 * 4}  # models × prompts × layers × heads × classes
    values = opened.values.collect()
    assert set(values["layer"]) == {0, 16, 20, 27}
    assert set(values["item"]) == {"hash", "star", "whitespace", "other"}
    assert set(values["keys"]) == {"maps"}
    counts = values.filter(pl.col("item") == "star").group_by("prompt").agg(pl.col("tokens").max())
    # Two maps, a centre in each; a token that shares a star with other characters counts in part.
    assert (counts["tokens"] <= 2).all()
    assert (counts["tokens"] > 0).all()


def test_token_types_other_choices(folders: dict[str, str], tmp_path: Path) -> None:
    models = of(folders, token_types())
    options = {"queries": ["last", "region:question"], "keys": ["all"], "layers": [27]}
    experiment = token_types(models, prompts=1, heads=[3], classes=["default"], **options)
    rows = check(measured(experiment, folders, tmp_path / "run"), folders)
    assert rows == {"mass": 2 * 2 * 12}  # models × queries × classes


def test_filler_profile(folders: dict[str, str], tmp_path: Path) -> None:
    experiment = filler_profile(of(folders, filler_profile()), prompts=2)
    opened = measured(experiment, folders, tmp_path / "run")
    rows = check(opened, folders)
    assert set(rows) == {
        "mass",
        "entropy",
        "first_token",
        "lambda",
        "lambda_ratio",
        "lambda_r2",
        "spike_ratio",
        "rest_ratio",
        "spike_fall",
        "uniform_slope",
        "uniform_ratio",
        "uniformity",
        "value_similarity",
        "affine_lambda",
        "affine_sigma",
        "affine_r2",
        "affine_heads_lambda",
        "affine_heads_sigma",
        "affine_heads_r2",
        "profile",
    }
    values = opened.values.filter(pl.col("measure") != "value_similarity").collect()
    assert set(values["head"]) == {*range(8), None}  # of the whole layer: the affine fit
    profiles = opened.positions.select("layer", "head").unique().collect()
    assert sorted(profiles.rows()) == [(0, 0), (0, 1), (0, 7)]
    assert opened.cells.filter(condition="filler")["filler_tokens"].to_list() == [55, 55]
    filler = opened.tokens.filter(role="filler").collect()
    assert set(filler["text"]) == {"/"}
    assert all("question" not in regions for regions in filler["regions"].to_list())


@pytest.mark.slow
def test_filler_vs_sentence(folders: dict[str, str], tmp_path: Path) -> None:
    default = filler_vs_sentence()
    heads = {"math-qwen2": (0,), "chat-llama": (26,), "chat-gemma3": (7,)}
    assert default.profiles.heads == heads
    few = {"classes": ["maps"], "keys": ["not-first"]}  # every row is checked, slowly
    experiment = filler_vs_sentence(of(folders, default), prompts=2, heads=heads, **few)
    opened = measured(experiment, folders, tmp_path / "run")
    rows = check(opened, folders)
    layers_and_heads = 3 * (8 + 32 + 8)
    assert rows["uniformity"] == layers_and_heads * 2 * 2  # prompts × conditions
    profiles = opened.positions.select("model", "layer", "head").unique().collect()
    assert set(profiles.rows()) == {(model, 0, head[0]) for model, head in heads.items()}
    inserted = opened.cells.filter(pl.col("condition") != "base")
    assert set(inserted["filler_tokens"]) == {55}
    assert set(inserted["boundary_tokens"]) == {0}
    sentences = (
        opened.tokens.filter(condition="sentence", role="filler", model="math-qwen2")
        .collect()
        .group_by("prompt")
        .agg(pl.col("text").str.join(""))
    )
    assert sentences["text"].n_unique() == 2  # a sentence of its own for every prompt


def test_heads_of_the_papers() -> None:
    names = [
        "Qwen/Qwen2.5-Math-7B-Instruct",
        "meta-llama/Llama-3.1-8B-Instruct",
        "google/gemma-3-4b-it",
    ]
    experiment = filler_vs_sentence(names)
    assert experiment.profiles.heads == {
        "Qwen2.5-Math-7B-Instruct": (0,),
        "Llama-3.1-8B-Instruct": (26,),
        "gemma-3-4b-it": (7,),
    }


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_takes_enough_prompts_for_statistics_or_one(name: str) -> None:
    make = RECIPES[name]
    assert make().prompts.count >= 12
    assert make(prompts=1).prompts.count == 1
    with pytest.raises(InputError):
        make(prompts=0)


WITHOUT_SEED = {"injection"}
"""Its prompts are those of a file."""


@pytest.mark.parametrize(
    "name", [name for name in RECIPES if name not in WITHOUT_SEED and not RECIPES[name].extra]
)
def test_another_seed_gives_other_prompts(name: str, folders: dict[str, str]) -> None:
    """Not one prompt of two seeds is the same, random tokens included."""
    seen = []
    for seed in (0, 1):
        models = {"m": folders["spatial-base"]}
        plan = make_plan(RECIPES[name](models, prompts=3, seed=seed, beyond_positions=True))
        cells = [cell for model in plan.models for batch in model.batches for cell in batch]
        seen.append({tuple(cell.tokens.ids.tolist()) for cell in cells})
    assert seen[0]
    assert not seen[0] & seen[1]


def test_prompts_of_a_file_have_no_seed() -> None:
    with raises(InputError, "unsupported-seed", value=1):
        RECIPES["injection"](seed=1)


def test_two_models_of_one_name() -> None:
    with raises(InputError, "duplicate-name"):
        token_types(["a/model", "b/model"])
