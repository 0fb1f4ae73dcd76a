"""Loading, from folders laid out as the hub's."""

import json
import threading
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
)

import attnscope
from attnscope.errors import InputError, ModelError
from families import build
from made_tokenizers import some_tokenizer
from support_errors import raises

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = build("qwen2")
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    some_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_a_folder_of_sharded_safetensors(folder: Path) -> None:
    assert len(list(folder.glob("*.safetensors"))) > 1
    model, tokenizer = attnscope.load(folder)
    assert not model.training
    assert tokenizer.pad_token == "w0"
    ids = torch.randint(5, 97, (1, 9)).to(model.device)
    plain = AutoModelForCausalLM.from_pretrained(folder).eval().to(model.device)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, plain(ids).logits)
        with attnscope.watch(model) as scope:
            model(ids)
    assert scope.layers == [0, 1, 2]


def test_dtype(folder: Path) -> None:
    model, _ = attnscope.load(str(folder), dtype="bfloat16")
    assert model.dtype == torch.bfloat16
    with raises(InputError, "unknown-dtype", value="int3"):
        attnscope.load(folder, dtype="int3")


def test_pickled_weights_are_refused_with_advice(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with raises(ModelError, "pickled-weights"):
        attnscope.load(folder)


def test_a_folder_without_weights(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    with raises(ModelError, "no-weights"):
        attnscope.load(folder)


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with raises(ModelError, "no-config"):
        attnscope.load(tmp_path)


def test_a_path_that_does_not_exist() -> None:
    with raises(ModelError, "no-folder"):
        attnscope.load("./no/such/folder")


def test_no_connection_says_what_was_tried() -> None:
    with raises(ModelError, "cannot-load"):
        attnscope.load("someone/no-such-model")


def test_pickled_weights_only_when_asked_for(folder: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    torch.save(plain.state_dict(), folder / "pytorch_model.bin")
    model, _ = attnscope.load(folder, unpickle=True)
    assert torch.equal(model.lm_head.weight.cpu(), plain.lm_head.weight)


def test_an_unknown_device() -> None:
    with raises(InputError, "unknown-device", value="tpu"):
        attnscope.load("zoo:math-qwen2", device="tpu")


def test_an_architecture_without_attention(tmp_path: Path) -> None:
    config = MambaConfig(vocab_size=97, hidden_size=16, state_size=4, num_hidden_layers=1)
    MambaForCausalLM(config).save_pretrained(tmp_path)
    some_tokenizer().save_pretrained(tmp_path)
    with raises(ModelError, "no-attention"):
        attnscope.load(tmp_path)


def test_code_in_a_folder_is_not_run(folder: Path) -> None:
    """A config that points at its own code is refused; the code would leave a file behind."""
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "of-its-own"
    config["auto_map"] = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    with raises(ModelError, "cannot-load"):
        attnscope.load(folder)
    assert not (folder / "ran").exists()


def test_the_class_is_the_one_the_config_names(tmp_path: Path) -> None:
    """Gemma 3's larger models see pictures too: text and head must come, not the bare model."""
    text = {**SMALL, "head_dim": 8, "sliding_window": 4}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path)
    some_tokenizer().save_pretrained(tmp_path)
    model, _ = attnscope.load(tmp_path)
    assert type(model) is Gemma3ForConditionalGeneration
    with torch.no_grad(), attnscope.watch(model) as scope:
        model(torch.randint(5, 97, (1, 9)).to(model.device))
    assert scope.received(0).sum().item() == pytest.approx(9 * 4, abs=1e-3)


def test_an_unknown_zoo_name_lists_the_known() -> None:
    with raises(ModelError, "unknown-model", value="zoo:qwen"):
        attnscope.load("zoo:qwen")


def test_loads_in_several_threads_leave_nothing_behind() -> None:
    """transformers takes tying away while it loads: overlapping loads once left it away."""
    tied = PreTrainedModel.tie_weights
    meet, failed = threading.Barrier(3, timeout=200), []

    def load() -> None:
        meet.wait()
        try:
            attnscope.load("zoo:math-qwen2")
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert PreTrainedModel.tie_weights is tied
