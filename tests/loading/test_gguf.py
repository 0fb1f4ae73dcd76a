"""GGUF files: unpacked once, loaded like a folder, refused with the reason."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import attnscope
from attnscope.cli import app
from attnscope.errors import ModelError
from attnscope.experiment.execute import run
from attnscope.loading import find, load_tokenizer
from attnscope.loading.cache import home
from attnscope.loading.gguf import read_head
from attnscope.loading.revision import digest_of_file
from attnscope.question.spec import made
from attnscope.run.store import open_run
from made_gguf import save_gguf
from made_models import save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("gguf") / "tiny")


@pytest.fixture(scope="module")
def file(folder: str) -> Path:
    return save_gguf(folder, Path(folder).with_suffix(".gguf"))


def test_the_same_model_as_its_folder(folder: str, file: Path) -> None:
    plain, tokenizer = attnscope.load(folder)
    model, unpacked = attnscope.load(file)
    ids = torch.tensor([tokenizer("Tom has 12 apples and 3 pears.").input_ids]).to(model.device)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, plain(ids).logits)
        with attnscope.watch(model) as scope:
            model(ids)
    assert scope.layers == [0, 1]
    assert getattr(model.config, "quantization_config", None) is None
    # The file says that texts begin with <s>, which transformers leaves out.
    assert unpacked.chat_template == "{{ bos_token }}" + tokenizer.chat_template
    assert unpacked("a 12").input_ids == [1, *tokenizer("a 12").input_ids]
    assert not list(home().rglob(".part-*"))


def test_quantised_weights_are_unpacked(folder: str, tmp_path: Path) -> None:
    plain, _ = attnscope.load(folder)
    model, _ = attnscope.load(save_gguf(folder, tmp_path / "q8.gguf", quantised=True))
    weight = plain.model.layers[0].mlp.up_proj.weight
    unpacked = model.model.layers[0].mlp.up_proj.weight
    assert not torch.equal(unpacked, weight)
    torch.testing.assert_close(unpacked, weight, rtol=0, atol=weight.abs().max().item() / 120)


def test_large_weights_are_not_kept(
    file: Path, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNSCOPE_HOME", str(tmp_path))
    monkeypatch.setattr("attnscope.loading.gguf.KEPT", 10)
    model, _ = attnscope.load(file)
    assert not list(tmp_path.rglob("*.safetensors"))
    plain, _ = attnscope.load(folder)
    assert torch.equal(model.lm_head.weight, plain.lm_head.weight)
    assert load_tokenizer(file).chat_template


def test_the_revision_is_the_digest(file: Path) -> None:
    assert find(file).revision == digest_of_file(file)


def test_in_a_run_and_in_look(file: Path, tmp_path: Path) -> None:
    prompts = {"source": "math", "count": 2, "level": 1}
    experiment = made(name="small", models={"tiny": str(file)}, prompts=prompts)
    run(experiment, tmp_path / "run")
    recorded = open_run(tmp_path / "run").environment["models"]["tiny"]
    assert recorded["revision"] == digest_of_file(file)
    assert recorded["name"] == str(file)
    seen = CliRunner().invoke(app, ["look", str(file), "Tom has 12 apples"])
    assert seen.exit_code == 0, seen.output
    assert "mean over layers" in seen.output


def kept() -> list[Path]:
    return sorted(path for path in home().rglob("*") if path.is_file())


def refused(file: Path) -> str:
    before = kept()
    with pytest.raises(ModelError) as caught:
        attnscope.load(file)
    assert kept() == before  # nothing half-written
    return str(caught.value)


@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.999])
def test_a_file_that_is_cut_off(file: Path, tmp_path: Path, share: float) -> None:
    content = file.read_bytes()
    (tmp_path / "cut.gguf").write_bytes(content[: int(len(content) * share)])
    assert "cut off" in refused(tmp_path / "cut.gguf") or "cut-off" in refused(
        tmp_path / "cut.gguf"
    )


def test_a_family_that_nobody_knows(folder: str, tmp_path: Path) -> None:
    said = refused(save_gguf(folder, tmp_path / "odd.gguf", family="oddity"))
    assert "'oddity'" in said
    assert "folder of safetensors" in said


def test_a_weight_that_is_missing(folder: str, tmp_path: Path) -> None:
    """What is random must not be kept as if it had been in the file."""
    lost = "model.layers.1.self_attn.k_proj.weight"
    said = refused(save_gguf(folder, tmp_path / "lost.gguf", without=lost))
    assert f"lacks weights of its Qwen2ForCausalLM: {lost}" in said


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + bytes(40), b"hello" * 99])
def test_a_file_that_is_no_gguf(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "no.gguf").write_bytes(content)
    assert "GGUF" in refused(tmp_path / "no.gguf")


def test_a_head_that_lies_about_lengths(file: Path, tmp_path: Path) -> None:
    content = bytearray(file.read_bytes())
    content[24:32] = (2**60).to_bytes(8, "little")  # the length of the first key
    (tmp_path / "lies.gguf").write_bytes(content)
    assert "broken" in refused(tmp_path / "lies.gguf")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"there is no file '.*none\.gguf'"):
        attnscope.load(tmp_path / "none.gguf")


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_without_the_extra(file: Path, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def without(name: str, *more: Any) -> Any:
        return None if name == package else found(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    with pytest.raises(ModelError, match=rf"package {package}: pip install 'attnscope\[gguf\]'"):
        read_head(file)


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        RuntimeError("while serializing: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_while_unpacking(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(*args: Any) -> None:
        (args[2] / "half").write_text("written")
        raise error

    monkeypatch.setenv("ATTNSCOPE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("attnscope.loading.gguf._unpack", full)
    with pytest.raises(ModelError, match=r"No space left.*ATTNSCOPE_HOME"):
        attnscope.load(file)
    assert not list((tmp_path / "home" / "gguf").rglob("*"))
