"""Folders with something missing or broken: an error that says what, never random numbers."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, BertModel

import attnscope
from attnscope.cli import main
from attnscope.errors import AttnscopeWarning, ModelError
from made_models import save_model
from made_tokenizers import some_tokenizer
from support_errors import raises


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(save_model(tmp_path / "model", layers=2))


def set_config(folder: Path, **keys: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **keys}))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})


def test_more_layers_than_weights(folder: Path) -> None:
    set_config(folder, num_hidden_layers=3, layer_types=None)
    with raises(ModelError, "missing-weights"):
        attnscope.load(folder)


def test_fewer_layers_than_weights_is_another_model(folder: Path) -> None:
    set_config(folder, num_hidden_layers=1, layer_types=None)
    with pytest.warns(AttnscopeWarning, match=r"does not use: model\.layers\.1\."):
        attnscope.load(folder)


def test_a_missing_weight(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.pop("model.layers.1.self_attn.k_proj.weight"))
    with raises(ModelError, "missing-weights"):
        attnscope.load(folder)


def test_a_missing_head_of_a_model_that_generates(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.pop("lm_head.weight"))
    with raises(ModelError, "missing-weights"):
        attnscope.load(folder)


def test_tied_weights_are_not_missing(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.pop("lm_head.weight"))
    set_config(folder, tie_word_embeddings=True)
    model, _ = attnscope.load(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_another_shape(folder: Path) -> None:
    def change(weights: dict[str, torch.Tensor]) -> None:
        weights["model.norm.weight"] = torch.ones(5)

    change_weights(folder, change)
    with raises(ModelError, "config-mismatch", keys=["model.norm.weight"]):
        attnscope.load(folder)


def test_weights_that_are_not_finite(folder: Path) -> None:
    def change(weights: dict[str, torch.Tensor]) -> None:
        weights["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.nan

    change_weights(folder, change)
    with raises(ModelError, "weights-not-finite", key="model.layers.1.mlp.up_proj.weight"):
        attnscope.load(folder)


def test_an_encoder_needs_no_pooler_or_head(tmp_path: Path) -> None:
    small = BertConfig(
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=32,
    )
    BertModel(small, add_pooling_layer=False).save_pretrained(tmp_path)
    some_tokenizer().save_pretrained(tmp_path)
    model, _ = attnscope.load(tmp_path)
    assert type(model) is BertModel
    set_config(tmp_path, architectures=["BertForMaskedLM"])
    model, _ = attnscope.load(tmp_path)
    assert type(model) is BertForMaskedLM


@pytest.mark.parametrize("damage", ["empty", "cut", "no tensors", "not safetensors"])
def test_broken_weights(folder: Path, damage: str) -> None:
    file = folder / "model.safetensors"
    content = file.read_bytes()
    if damage == "no tensors":
        save_file({}, file)
    else:
        file.write_bytes(
            {"empty": b"", "cut": content[:-64], "not safetensors": b"hello" * 99}[damage]
        )
    code = "no-weights" if damage == "no tensors" else "damaged-weights"
    with raises(ModelError, code):
        attnscope.load(folder)


@pytest.mark.parametrize(
    "keys",
    [
        {"vocab_size": 10**9, "hidden_size": 10**6},
        {"num_hidden_layers": "one"},
        {"num_attention_heads": 0},
        {"num_attention_heads": -3},
        {"rope_parameters": "fast"},
        {"model_type": "no-such-family"},
        {"transformers_weights": "../other.safetensors"},
    ],
)
def test_wrong_values_in_the_configuration(folder: Path, keys: dict[str, object]) -> None:
    set_config(folder, **keys)
    with pytest.raises(ModelError) as caught:
        attnscope.load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("named", [["os"], ["NoSuchModel"], []])
def test_an_unknown_class_is_replaced_by_that_of_the_family(folder: Path, named: list[str]) -> None:
    set_config(folder, architectures=named)
    assert type(attnscope.load(folder)[0]).__name__ == "Qwen2ForCausalLM"


@pytest.mark.parametrize("content", ["null", "[]", "{", "", "5", '"config"', "{}"])
def test_a_damaged_configuration(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(ModelError) as error:
        attnscope.load(folder)
    assert error.value.code in ("cannot-load", "damaged-config")


def test_a_tokenizer_that_lost_its_vocabulary(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError):
        attnscope.load(folder)


@pytest.mark.parametrize("lost", ["vocabulary", "merges", "half", "pair"])
def test_a_tokenizer_that_lost_a_part(folder: Path, lost: str) -> None:
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    if lost == "vocabulary":
        content["model"]["vocab"], content["model"]["merges"] = {}, []
    elif lost == "merges":
        content["model"]["merges"] = []
    elif lost == "pair":
        content["model"]["merges"][0] = ["no", "such"]
    text = json.dumps(content)
    file.write_text(text[: len(text) // 2] if lost == "half" else text)
    with pytest.raises(ModelError):
        attnscope.load(folder)


def test_an_index_that_names_pickles(folder: Path, tmp_path: Path) -> None:
    """The index has the name of safetensors, but its weights are a pickle."""
    weights = load_file(folder / "model.safetensors")
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "pytorch_model.bin")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with raises(ModelError, "pickled-weights", file="pytorch_model.bin"):
        attnscope.load(folder)


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/model.safetensors"])
def test_an_index_that_leaves_the_folder(folder: Path, shard: str) -> None:
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    index = {"weight_map": {"model.norm.weight": shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with raises(ModelError, "damaged-index", file=shard):
        attnscope.load(folder)


def test_an_index_whose_files_are_gone(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with raises(ModelError, "missing-weights", missing=["a.safetensors", "b.safetensors"]):
        attnscope.load(folder)


def test_on_the_command_line_one_line_and_no_traceback(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    set_config(folder, num_hidden_layers=3, layer_types=None)
    monkeypatch.setattr("sys.argv", ["attnscope", "look", str(folder), "hello"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ")
