"""Experiments with pictures: their numbers are those of dense attention, and nothing is lost."""

import base64
import io
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from PIL import Image

import attnscope
import made_processors
from attnscope.errors import InputError
from attnscope.experiment.execute import run, run_plan
from attnscope.experiment.extend import plan_run
from attnscope.experiment.plan import make_plan
from attnscope.experiment.shard import Shard
from attnscope.run.merge import merge
from attnscope.spec.experiment import Experiment, make_experiment
from attnscope.spec.experiment_yaml import read_experiment
from attnscope.vision import image_token_id
from attnscope.vision.pictures import blank_picture
from picture_models import model_folder, picture, write_prompts
from run_bytes import bytes_of

FAMILIES = list(made_processors.FAMILIES)
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*texts do not start with"),
    pytest.mark.filterwarnings("ignore:.*__array__:DeprecationWarning"),  # PaliGemma's processor
]


def experiment_of(folder: Path, prompts: dict[str, Any], **keys: Any) -> Experiment:
    chosen = {"measures": ["mass"], "classes": ["modality"], "chat": False} | keys
    return make_experiment(
        name="pictures", models={"m": str(folder / "model")}, prompts=prompts, **chosen
    )


def two_prompts(folder: Path) -> dict[str, Any]:
    """A prompt with one picture, and one with two."""
    files = folder / "prompts"
    files.mkdir()
    picture(0).save(files / "a.png")
    picture(1, 40, 64).save(files / "b.jpg", quality=95)
    records = [
        {"image": "a.png", "question": "What is it?"},
        {"image": ["a.png", "b.jpg"], "question": "and <image> or a ball?"},
    ]
    path = write_prompts(files, records)
    return {"source": "file", "path": str(path), "template": "Look: <image>{question}"}


def dense(model: Any, inputs: Any) -> list[torch.Tensor]:
    """By layer [B, H, Q, K]: the weights of eager attention."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            return list(model(**inputs, output_attentions=True).attentions)
    finally:
        model.set_attn_implementation(before)


def received(run_folder: Path, prompt: int, condition: str, queries: str, layer: int) -> Any:
    """[heads, keys]: what the run has in its table of positions."""
    rows = (
        attnscope.open_run(run_folder)
        .positions.filter(
            (pl.col("prompt") == prompt)
            & (pl.col("condition") == condition)
            & (pl.col("queries") == queries)
            & (pl.col("layer") == layer)
        )
        .sort("head", "position")
        .collect()
    )
    return rows["received"].to_numpy().reshape(rows["head"].n_unique(), -1)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_run_has_the_numbers_of_dense_attention(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = model_folder(tmp_path / "model", name, monkeypatch)
    experiment = experiment_of(
        tmp_path,
        two_prompts(tmp_path),
        measures=["mass", "profile"],
        queries=["all", "last"],
        conditions={"base": {}, "blank": {"image": "blank"}},
        batch_tokens=100_000,  # one batch, with padding
    )
    assert run(experiment, tmp_path / "run").complete
    files = tmp_path / "prompts"
    with Image.open(files / "b.jpg") as second:
        pictures = [picture(0), second.convert("RGB")]
    mark = family.mark
    texts = [f"Look: {mark}What is it?", f"Look: {mark}and {mark} or a ball?"]
    stored = attnscope.open_run(tmp_path / "run")
    for condition in ("base", "blank"):
        shown = [blank_picture(one) if condition == "blank" else one for one in pictures]
        for prompt, images in enumerate(([shown[0]], shown)):
            inputs = made_processors.model_inputs(family, [texts[prompt]], [images])
            ids = inputs["input_ids"][0].numpy()
            tokens = stored.tokens.filter(prompt=prompt, condition=condition).sort("position")
            np.testing.assert_array_equal(tokens.collect()["id"].to_numpy(), ids)
            places = np.isin(ids, family.processor.image_token_ids)
            for layer, weights in enumerate(dense(family.model, inputs)):
                sums = weights[0].sum(1).numpy()
                found = received(tmp_path / "run", prompt, condition, "all", layer)
                np.testing.assert_allclose(found, sums, atol=2e-4, rtol=1e-5)
                last = weights[0][:, -1].numpy()
                found = received(tmp_path / "run", prompt, condition, "last", layer)
                np.testing.assert_allclose(found, last, atol=5e-6)
                mass = stored.values.filter(
                    prompt=prompt, condition=condition, layer=layer, item="image", queries="last"
                )
                value = mass.sort("head").collect()["value"].to_numpy()
                np.testing.assert_allclose(value, last[:, places].sum(1), atol=1e-5)


@pytest.mark.parametrize("name", ["llava", "gemma3", "qwen2-vl", "idefics3", "paligemma"])
def test_chat_templates_write_the_mark_of_the_family(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = model_folder(tmp_path / "model", name, monkeypatch, chat=True)
    plan = make_plan(experiment_of(tmp_path, two_prompts(tmp_path), chat="auto"))
    mark = family.mark
    texts = [
        f"user: Look:{mark}What is it?\nassistant:",
        f"user: Look:{mark}and{mark}or a ball?\nassistant:",
    ]
    for cell, text in zip(plan.models[0].cells(), texts, strict=True):
        images = plan.pictures.images(cell.prompt, "base")
        options = {} if name == "paligemma" else {"add_special_tokens": False}
        inputs = made_processors.model_inputs(family, [text], [images], **options)
        np.testing.assert_array_equal(cell.tokens.ids, inputs["input_ids"][0].numpy())
        token = image_token_id(family.processor)
        for number in range(len(images)):
            assert (cell.tokens.ids[cell.tokens.mask(f"image:{number + 1}")] == token).all()
        inside = sum(cell.tokens.mask(f"image:{n + 1}").sum() for n in range(len(images)))
        assert inside == (cell.tokens.ids == token).sum()
        question = cell.tokens.prompt.read("question")
        assert question.startswith(("What", "and"))
        assert question.endswith("?")


def test_completions_are_those_of_each_prompt_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("gemma3", "qwen2-vl"):
        folder = tmp_path / name
        folder.mkdir()
        family = model_folder(folder / "model", name, monkeypatch)
        experiment = experiment_of(
            folder,
            two_prompts(folder),
            queries=["predicts:generated"],
            keys=["all", "image:1"],
            generate={"max_new_tokens": 3},
            batch_tokens=100_000,
        )
        assert run(experiment, folder / "run").complete
        stored = attnscope.open_run(folder / "run")
        mark = family.mark
        texts = [f"Look: {mark}What is it?", f"Look: {mark}and {mark} or a ball?"]
        second = Image.open(folder / "prompts" / "b.jpg").convert("RGB")
        for prompt, images in enumerate(([picture(0)], [picture(0), second])):
            inputs = made_processors.model_inputs(family, [texts[prompt]], [images])
            with torch.no_grad():
                new = family.model.generate(
                    **inputs, max_new_tokens=3, do_sample=False, pad_token_id=0
                )
            new = new[0, inputs["input_ids"].shape[1] :].tolist()
            ids = stored.tokens.filter(prompt=prompt).sort("position").collect()["id"].to_list()
            assert ids == [*inputs["input_ids"][0].tolist(), *new[:-1]]


def test_pictures_are_kept_once_and_the_run_needs_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_folder(tmp_path / "model", "llava", monkeypatch)
    prompts = two_prompts(tmp_path)
    picture(5).save(tmp_path / "other.png")
    conditions = {"base": {}, "other": {"image": str(tmp_path / "other.png")}}
    experiment = experiment_of(tmp_path, prompts, conditions=conditions)
    assert run(experiment, tmp_path / "run").complete
    kept = sorted(path.name for path in (tmp_path / "run" / "images").iterdir())
    assert len(kept) == 3
    original = (tmp_path / "prompts" / "b.jpg").read_bytes()
    assert any((tmp_path / "run/images" / name).read_bytes() == original for name in kept)
    text = (tmp_path / "run" / "experiment.yaml").read_text()
    assert "other.png" not in text
    assert "a.png" not in (tmp_path / "run" / "prompts.jsonl").read_text()
    run_prompts = attnscope.open_run(tmp_path / "run").prompts
    assert run_prompts["image"][0].startswith("images/")

    before = bytes_of(tmp_path / "run")
    assert run(experiment, tmp_path / "run").measured == 0  # the same run
    for name in ("a.png", "b.jpg"):
        (tmp_path / "prompts" / name).unlink()
    (tmp_path / "other.png").unlink()
    again = read_experiment(tmp_path / "run" / "experiment.yaml")
    assert run(again, tmp_path / "run").measured == 0
    assert run(again, tmp_path / "copy").complete
    assert bytes_of(tmp_path / "run") == before
    assert bytes_of(tmp_path / "copy") == before


def test_shards_with_pictures_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_folder(tmp_path / "model", "llava", monkeypatch)
    experiment = experiment_of(tmp_path, two_prompts(tmp_path), batch_tokens=1)
    assert run(experiment, tmp_path / "whole").complete
    for number in (1, 2):
        run(experiment, tmp_path / f"part{number}", shard=Shard(number, 2))
    merge([tmp_path / "part1", tmp_path / "part2"], tmp_path / "joined")
    assert bytes_of(tmp_path / "joined") == bytes_of(tmp_path / "whole")


def test_a_run_with_pictures_can_be_extended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_folder(tmp_path / "model", "llava", monkeypatch)
    prompts = two_prompts(tmp_path)
    first = experiment_of(tmp_path, prompts | {"count": 1})
    assert run(first, tmp_path / "run").complete
    plan, old = plan_run(experiment_of(tmp_path, prompts), tmp_path / "run", extend=True)
    outcome = run_plan(plan, tmp_path / "run", extends=old)
    assert (outcome.measured, outcome.complete) == (1, True)
    assert attnscope.open_run(tmp_path / "run").cells["prompt"].to_list() == [0, 1]


def test_a_changed_picture_is_another_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_folder(tmp_path / "model", "llava", monkeypatch)
    experiment = experiment_of(tmp_path, two_prompts(tmp_path))
    run(experiment, tmp_path / "run")
    picture(7).save(tmp_path / "prompts" / "a.png")
    with pytest.raises(InputError) as error:
        run(experiment, tmp_path / "run")
    assert error.value.code == "other-experiment"


def test_pictures_come_from_records_folders_base64_and_data_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_folder(tmp_path / "model", "llava", monkeypatch)
    folder = tmp_path / "photos"
    (folder / "cats").mkdir(parents=True)
    picture(0).save(folder / "b.png")
    picture(1).save(folder / "cats" / "a.png")
    (folder / "notes.txt").write_text("no picture")
    encoded = [
        base64.b64encode(path.read_bytes()).decode()
        for path in (folder / "b.png", folder / "cats" / "a.png")
    ]
    template = "<image>{question}"
    names = {}
    sources: dict[str, dict[str, Any]] = {
        "folder": {"source": "pictures", "folder": str(folder), "template": template},
        "inline": {
            "source": "inline",
            "template": template,
            "records": [
                {"image": str(folder / "b.png"), "question": "What is in the picture?"},
                {"image": f"data:image/png;base64,{encoded[1]}", "question": "What is it?"},
            ],
        },
        "base64": {
            "source": "file",
            "template": template,
            "path": str(
                write_prompts(tmp_path, [{"image": e, "question": "What?"} for e in encoded])
            ),
        },
    }
    frame = pl.DataFrame(
        {"image": [{"bytes": base64.b64decode(e), "path": None} for e in encoded]}
    ).with_columns(question=pl.lit("What?"))
    frame.write_parquet(tmp_path / "data.parquet")
    parquet = {"source": "file", "path": str(tmp_path / "data.parquet"), "template": template}
    sources["parquet"] = parquet
    for source, prompts in sources.items():
        plan = make_plan(experiment_of(tmp_path, prompts))
        names[source] = plan.pictures.prompts
        shown = [plan.pictures.images(n, "base")[0] for n in range(2)]
        assert all(np.array_equal(np.asarray(one), picture(n)) for n, one in enumerate(shown))
    assert len(set(names.values())) == 1
    plan = make_plan(experiment_of(tmp_path, sources["folder"]))
    assert [one["label"] for one in plan.metadata] == [None, "cats"]
    for source in ("folder", "inline"):
        assert run(experiment_of(tmp_path, sources[source]), tmp_path / source).complete
        again = read_experiment(tmp_path / source / "experiment.yaml")
        assert run(again, tmp_path / source).measured == 0
        assert str(folder) not in (tmp_path / source / "experiment.yaml").read_text()


def test_columns_of_pictures_of_a_data_set_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    model_folder(tmp_path / "model", "llava", monkeypatch)
    features = datasets.Features(
        {"picture": datasets.List(datasets.Image()), "text": datasets.Value("string")}
    )
    data = {"picture": [[picture(0), picture(1)]], "text": ["one <image> two <image> what?"]}
    made = datasets.Dataset.from_dict(data, features=features)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: made)
    prompts = {"source": "hub", "name": "made/pictures", "split": "train", "image": "picture"}
    prompts |= {"template": "{text}"}
    plan = make_plan(experiment_of(tmp_path, prompts))
    shown = plan.pictures.images(0, "base")
    assert all(np.array_equal(np.asarray(one), picture(n)) for n, one in enumerate(shown))
    assert run(experiment_of(tmp_path, prompts), tmp_path / "run").complete
    again = read_experiment(tmp_path / "run" / "experiment.yaml")
    assert run(again, tmp_path / "run").measured == 0


@pytest.mark.parametrize("chat", [False, True])
def test_conditions_change_pictures_and_words_around_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chat: bool
) -> None:
    model_folder(tmp_path / "model", "idefics3", monkeypatch, chat=chat)
    files = tmp_path / "prompts"
    files.mkdir()
    for n, size in enumerate(((50, 70), (50, 70), (20, 90))):
        picture(n, *size).save(files / f"{n}.png")
    records = [{"image": f"{n}.png", "question": "What is it?"} for n in range(3)]
    prompts = {
        "source": "file",
        "path": str(write_prompts(files, records)),
        "template": "<image>{question}",
    }
    conditions: dict[str, Any] = {
        "base": {},
        "blank": {"image": "blank"},
        "next": {"image": "next"},
        "neutral": {"replace": {"region": "question", "new": "Describe the picture."}},
        "filler": {"insert": {"kind": "repeat", "unit": "/", "count": 3}, "position": "end"},
    }
    experiment = experiment_of(tmp_path, prompts, chat=chat, conditions=conditions)
    plan = make_plan(experiment)
    cells = {(cell.prompt, cell.condition): cell for cell in plan.models[0].cells()}
    for number in range(3):
        base, blank = cells[number, "base"], cells[number, "blank"]
        np.testing.assert_array_equal(blank.tokens.ids, base.tokens.ids)
        np.testing.assert_array_equal(blank.alignment.base, np.arange(len(base.tokens)))
        for name in ("neutral", "filler"):
            aligned = np.zeros(len(base.tokens), dtype=bool)
            aligned[cells[number, name].alignment.base] = True
            assert aligned[base.tokens.mask("image:1")].all()
    one = cells[0, "next"]  # the same size: every token is aligned
    assert len(one.alignment.base) == len(one.tokens)
    other = cells[1, "next"]
    aligned = np.zeros(len(cells[1, "base"].tokens), dtype=bool)
    aligned[other.alignment.base] = True
    assert not aligned[cells[1, "base"].tokens.mask("image:1")].any()
    assert aligned[cells[1, "base"].tokens.mask("question")].all()
    assert np.array_equal(np.asarray(plan.pictures.images(2, "next")[0]), picture(0))
    blank = np.asarray(plan.pictures.images(0, "blank")[0])
    assert (blank == blank[0, 0]).all()
    assert run(experiment, tmp_path / "run").complete


def test_places_of_image_tokens_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = model_folder(tmp_path / "model", "llava-next", monkeypatch)
    experiment = experiment_of(
        tmp_path,
        two_prompts(tmp_path),
        conditions={
            "base": {},
            "filler": {"insert": {"kind": "repeat", "unit": "/", "count": 3}, "position": 0},
        },
    )
    run(experiment, tmp_path / "run")
    rows = [
        json.loads(line)
        for line in (tmp_path / "run" / "image_tokens.jsonl").read_text().splitlines()
    ]
    assert [(row["prompt"], row["condition"], row["image"]) for row in rows] == [
        (0, "base", 1),
        (0, "filler", 1),
        (1, "base", 1),
        (1, "base", 2),
        (1, "filler", 1),
        (1, "filler", 2),
    ]
    tokens = attnscope.open_run(tmp_path / "run").tokens.collect()
    for row in rows:
        own = tokens.filter(prompt=row["prompt"], condition=row["condition"])
        region = own.filter(pl.col("regions").list.contains(f"image:{row['image']}"))
        assert sorted(region["position"]) == row["positions"]
        assert (tmp_path / "run" / row["file"]).is_file()
        counted = sum(r * (c + newline) for r, c, _, newline in row["views"])
        assert counted == len(row["positions"])
    assert family.processor.image_token_ids


def png(height: int, width: int) -> bytes:
    """A PNG whose header says this size."""
    buffer = io.BytesIO()
    Image.new("L", (8, 8)).save(buffer, "PNG")
    data = bytearray(buffer.getvalue())
    data[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    data[29:33] = zlib.crc32(bytes(data[12:29])).to_bytes(4, "big")
    return bytes(data)


@pytest.mark.parametrize(
    ("record", "template", "code"),
    [
        ({"image": "a.png"}, "{question}", "no-image-mark"),
        ({"image": ["a.png", "a.png"]}, "<image>{question}", "image-count"),
        ({}, "<image>{question}", "no-images"),
        ({"image": "missing.png"}, "<image>{question}", "no-image-file"),
        ({"image": "broken.png"}, "<image>{question}", "broken-image"),
        ({"image": "text.png"}, "<image>{question}", "broken-image"),
        ({"image": "huge.png"}, "<image>{question}", "image-too-large"),
        ({"image": "../secret.png"}, "<image>{question}", "path-outside-folder"),
        ({"image": 7}, "<image>{question}", "bad-image"),
    ],
)
def test_bad_input_is_an_error_before_anything_is_measured(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record: dict[str, Any],
    template: str,
    code: str,
) -> None:
    model_folder(tmp_path / "model", "llava", monkeypatch)
    files = tmp_path / "prompts"
    files.mkdir()
    picture(0).save(files / "a.png")
    picture(0).save(tmp_path / "secret.png")
    (files / "broken.png").write_bytes((files / "a.png").read_bytes()[:400])
    (files / "text.png").write_text("no picture")
    (files / "huge.png").write_bytes(png(20_000, 10_000))
    good = {"image": "a.png", "question": "<image>?" if template == "{question}" else "What?"}
    path = write_prompts(files, [good, {"question": "What?", **record}])
    prompts = {"source": "file", "path": str(path), "template": template}
    experiment = experiment_of(tmp_path, prompts)
    assert run(experiment.with_keys(prompts=prompts | {"count": 1}), tmp_path / "run").complete
    before = bytes_of(tmp_path / "run")
    with pytest.raises(InputError) as error:
        run(experiment, tmp_path / "run")
    assert error.value.code == code
    assert "1" in str(error.value)  # the prompt, or its line
    assert bytes_of(tmp_path / "run") == before


def test_what_would_lose_a_picture_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_folder(tmp_path / "model", "llava", monkeypatch)
    prompts = two_prompts(tmp_path)
    for conditions, keys, code in (
        ({"noise": {"random": 0}}, {}, "image-tokens-lost"),
        ({}, {"truncate": 20}, "image-tokens-lost"),
        ({"words": {"replace": {"old": "<image>", "new": "it"}}}, {}, "image-count"),
        ({"missing": {"image": "nowhere.png"}}, {}, "no-image-file"),
        ({"next": {"image": "next"}}, {}, "no-next-image"),
    ):
        asked = experiment_of(tmp_path, prompts, conditions={"base": {}, **conditions}, **keys)
        with pytest.raises(InputError) as error:
            make_plan(asked)
        assert error.value.code == code, conditions
    text = {"source": "inline", "records": ["What is it?"]}
    with pytest.raises(InputError) as error:
        make_plan(experiment_of(tmp_path, text, conditions={"base": {}, "b": {"image": "blank"}}))
    assert error.value.code == "no-images"


def test_a_model_without_a_processor_is_refused(tmp_path: Path) -> None:
    files = tmp_path / "prompts"
    files.mkdir()
    picture(0).save(files / "a.png")
    path = write_prompts(files, [{"image": "a.png", "question": "<image>What?"}])
    experiment = make_experiment(
        name="p", models=["zoo:math-qwen2"], prompts={"source": "file", "path": str(path)}
    )
    with pytest.raises(InputError) as error:
        make_plan(experiment)
    assert error.value.code == "no-processor"
    ignored = experiment.prompts.model_dump() | {"image": None}
    assert make_plan(experiment.with_keys(prompts=ignored)).pictures is None


def test_paths_of_pictures_in_an_experiment_stay_in_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    picture(0).save(tmp_path / "outside.png")
    picture(0).save(folder / "inside.png")
    text = "name: p\nmodels: [zoo:math-qwen2]\nprompts:\n  - {image: IMAGE, question: '<image>?'}\n"
    (folder / "a.yaml").write_text(text.replace("IMAGE", "inside.png"))
    record = read_experiment(folder / "a.yaml").prompts.records[0]
    assert record["image"] == str(folder / "inside.png")
    (folder / "b.yaml").write_text(text.replace("IMAGE", "../outside.png"))
    with pytest.raises(InputError) as error:
        read_experiment(folder / "b.yaml")
    assert error.value.code == "path-outside-folder"
