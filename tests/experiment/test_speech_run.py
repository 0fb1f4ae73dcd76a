"""Spoken sentences through a tiny Whisper, against dense cross-attention of plain transformers."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import attnscope
from attnscope.cli import app
from attnscope.errors import InputError, ModelError
from attnscope.experiment.execute import run
from attnscope.loading.openai_whisper import convert
from attnscope.prompts.speech import sentences, speech_samples
from attnscope.recipes import RECIPES
from attnscope.recipes.alignment import auroc
from attnscope.spec.experiment import make_experiment
from dense_speech import SOUNDS, reference
from made_models import save_model
from made_whisper import save_checkpoint
from support_errors import raises


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("whisper")
    convert(*save_checkpoint(folder), folder / "model", [(0, 1)])
    return str(folder / "model")


@pytest.mark.slow
def test_rows_are_those_of_dense_cross_attention(whisper: str, tmp_path: Path) -> None:
    """Sentences of different lengths in one padded batch."""
    run(RECIPES["alignment"](models={"m": whisper}, prompts=3, seed=1), tmp_path / "run")
    values = attnscope.open_run(tmp_path / "run").values.collect()
    entries = json.loads((SOUNDS / "sentences.json").read_text(encoding="utf-8"))[3:6]
    assert values.height == 3 * 3 * 2 * 2  # prompts, numbers, layers, heads
    for prompt, entry in enumerate(entries):
        for (measure, item), expected in reference(whisper, entry).items():
            rows = values.filter(measure=measure, prompt=prompt)
            rows = rows if item is None else rows.filter(item=item)
            found = rows.sort("layer", "head")["value"].to_numpy().reshape(2, 2)
            # Centres that are equal in float32 may change places: 2 of 435 pairs.
            atol = 0.01 if measure == "alignment" else 2e-5
            np.testing.assert_allclose(found, expected, rtol=0, atol=atol)


def test_other_measures_are_those_of_the_decoder(whisper: str, tmp_path: Path) -> None:
    recipe = RECIPES["alignment"]
    run(recipe({"m": whisper}, prompts=2, measures=["entropy"]), tmp_path / "run")
    values = attnscope.open_run(tmp_path / "run").values.collect()
    model, processor = attnscope.load(whisper)
    sentence = sentences()[1]
    features = processor(sentence.sound, sampling_rate=16_000, return_tensors="pt")
    ids = processor.tokenizer(f" {sentence.text}", return_tensors="pt").input_ids
    queries = torch.zeros_like(ids, dtype=torch.bool)
    queries[:, 1:-2] = True
    with attnscope.watch(model.get_decoder(), queries=queries) as scope, torch.no_grad():
        model(**features, decoder_input_ids=ids)
    for layer in (0, 1):
        found = values.filter(prompt=1, layer=layer).sort("head")["value"].to_numpy()
        np.testing.assert_allclose(found, scope.entropy(layer)[0], rtol=0, atol=2e-5)


def test_seeds_take_other_sentences() -> None:
    first, second = ([s.prompt.text for s in speech_samples(12, seed=seed)] for seed in (0, 1))
    assert len({*first, *second}) == 24
    with raises(InputError, "too-few-prompts", prompts=24, count=25):
        list(speech_samples(25))


@pytest.mark.parametrize("number", range(24))
def test_words_cover_the_sentence(number: int) -> None:
    sentence = sentences()[number]
    spoken = " ".join(sentence.text[word.first : word.last] for word in sentence.words)
    assert spoken == sentence.text.rstrip(".")
    assert sentence.words[0].start == 0
    for one, after in zip(sentence.words, sentence.words[1:], strict=False):
        assert one.start < one.end == after.start
    assert sentence.words[-1].end == pytest.approx(sentence.seconds, abs=0.01)
    assert 0.3 < abs(sentence.sound).max() <= 1


def test_what_speech_cannot_have(whisper: str, tmp_path: Path) -> None:
    spoken = {"name": "s", "models": {"m": whisper}, "prompts": {"source": "speech", "count": 2}}
    with raises(InputError, "needs-sound", measure="alignment"):
        make_experiment(name="t", models=["x"], prompts=["a"], measures=["alignment"])
    changed = {"base": {}, "other": {"bos": False}}
    with raises(InputError, "speech-changed"):
        make_experiment(**spoken, measures=["entropy"], conditions=changed)
    with raises(InputError, "speech-changed"):
        make_experiment(**spoken, measures=["entropy"], generate={"max_new_tokens": 3})
    for measure in ("residual", "activations"):
        with raises(InputError, "not-with-speech", measures=[measure]):
            make_experiment(**spoken, measures=[measure])
    with raises(InputError, "not-with-speech"):
        make_experiment(**spoken, measures=["entropy"], engine="vllm")
    text_model = save_model(tmp_path / "text")
    with pytest.raises(ModelError, match="zoo:whisper-tiny-en"):
        run(RECIPES["alignment"]({"m": text_model}, prompts=1), tmp_path / "run")


def test_look_has_no_sound(whisper: str) -> None:
    result = CliRunner().invoke(app, ["look", whisper, "a b"])
    assert result.exit_code == 1
    assert isinstance(result.exception, InputError | SystemExit)  # no other error


def test_auroc() -> None:
    table = np.array([[0.9, 0.2, 0.5, 0.2], [0.7, 0.4, 0.5, 0.4]])
    assert auroc([True, False, False, False])(table) == 1
    assert auroc([False, True, False, False])(table) == pytest.approx((0.5 + 0 + 0) / 3)
    assert auroc([True, False, False, True])(table) == pytest.approx((1 + 1 + 0.5 + 0) / 4)
