"""Loading, from folders laid out as the hub's."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import attnscope
from attnscope.errors import ModelError
from families import build


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = build("qwen2")
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    words = {f"w{i}": i for i in range(97)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0").save_pretrained(tmp_path)
    return tmp_path


def test_a_folder_of_sharded_safetensors(folder: Path) -> None:
    assert len(list(folder.glob("*.safetensors"))) > 1
    model, tokenizer = attnscope.load(folder)
    assert not model.training
    assert tokenizer.pad_token == "w0"
    ids = torch.randint(5, 97, (1, 9))
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, plain(ids).logits)
        with attnscope.watch(model) as scope:
            model(ids)
    assert scope.layers == [0, 1, 2]


def test_dtype(folder: Path) -> None:
    model, _ = attnscope.load(str(folder), dtype="bfloat16")
    assert model.dtype == torch.bfloat16
    with pytest.raises(ModelError, match=r"unknown dtype 'int3'; known: auto, float32"):
        attnscope.load(folder, dtype="int3")


def test_pickled_weights_are_refused_with_advice(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"only pickled weights.*save_pretrained"):
        attnscope.load(folder)


def test_a_folder_without_weights(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(ModelError, match="no weights"):
        attnscope.load(folder)


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelError, match=r"no config.json.*notes.txt"):
        attnscope.load(tmp_path)


def test_a_path_that_does_not_exist() -> None:
    with pytest.raises(ModelError, match="is not a folder"):
        attnscope.load("./no/such/folder")


def test_no_connection_says_what_was_tried() -> None:
    with pytest.raises(ModelError, match="tried the Hugging Face hub and its local cache"):
        attnscope.load("nobody/no-such-model")


def test_the_zoo_is_empty() -> None:
    with pytest.raises(ModelError, match="no models are bundled yet"):
        attnscope.load("zoo:spatial-base")
