"""GGUF files: unpacked once, loaded like a folder, refused with the reason."""

import importlib.util
import random
import struct
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from typer.testing import CliRunner

import attnscope
from attnscope.cli import app
from attnscope.errors import AttnscopeError, InputError, ModelError
from attnscope.experiment.execute import run
from attnscope.loading import find, load_tokenizer
from attnscope.loading import gguf as gguf_file
from attnscope.loading.cache import home
from attnscope.loading.gguf import read_header
from attnscope.loading.revision import digest_of_file
from attnscope.run.store import open_run
from attnscope.spec.experiment import make_experiment
from made_gguf import save_gguf
from made_models import save_model
from support_errors import raises


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


def test_quantised_weights_are_unpacked_without_a_bar(
    folder: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plain, _ = attnscope.load(folder)
    file = save_gguf(folder, tmp_path / "q8.gguf", quantised=True)
    capfd.readouterr()
    model, _ = attnscope.load(file)
    assert "GGUF tensors" not in capfd.readouterr().err
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
    experiment = make_experiment(name="small", models={"tiny": str(file)}, prompts=prompts)
    run(experiment, tmp_path / "run")
    recorded = open_run(tmp_path / "run").environment["models"]["tiny"]
    assert recorded["revision"] == digest_of_file(file)
    assert recorded["name"] == str(file)
    seen = CliRunner().invoke(app, ["look", str(file), "Tom has 12 apples"])
    assert seen.exit_code == 0, seen.output
    assert "mean over layers" in seen.output


def kept() -> list[Path]:
    return sorted(path for path in home().rglob("*") if path.is_file())


def refused(file: Path) -> ModelError:
    before = kept()
    with pytest.raises(ModelError) as caught:
        attnscope.load(file)
    assert kept() == before  # no incomplete files
    return caught.value


@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.999])
def test_a_file_that_is_cut_off(file: Path, tmp_path: Path, share: float) -> None:
    content = file.read_bytes()
    (tmp_path / "cut.gguf").write_bytes(content[: int(len(content) * share)])
    assert refused(tmp_path / "cut.gguf").code == "damaged-gguf"


def test_an_unknown_family(folder: str, tmp_path: Path) -> None:
    error = refused(save_gguf(folder, tmp_path / "odd.gguf", family="oddity"))
    assert error.code == "cannot-unpack-gguf"
    assert error.values["architecture"] == "oddity"


def test_a_weight_that_is_missing(folder: str, tmp_path: Path) -> None:
    """Random weights must not be cached."""
    lost = "model.layers.1.self_attn.k_proj.weight"
    error = refused(save_gguf(folder, tmp_path / "lost.gguf", without=lost))
    assert error.code == "missing-weights"
    assert error.values["missing"] == [lost]


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + bytes(40), b"hello" * 99])
def test_a_file_that_is_no_gguf(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "no.gguf").write_bytes(content)
    assert refused(tmp_path / "no.gguf").code in ("not-gguf", "damaged-gguf")


def test_a_header_with_a_wrong_length(file: Path, tmp_path: Path) -> None:
    content = bytearray(file.read_bytes())
    content[24:32] = (2**60).to_bytes(8, "little")  # the length of the first key
    (tmp_path / "lies.gguf").write_bytes(content)
    assert refused(tmp_path / "lies.gguf").code == "damaged-gguf"


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with raises(ModelError, "file-missing"):
        attnscope.load(tmp_path / "none.gguf")


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_without_the_extra(file: Path, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def without(name: str, *more: Any) -> Any:
        return None if name == package else found(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    with raises(InputError, "missing-package", package=package):
        read_header(file)


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
    with raises(ModelError, "cannot-write"):
        attnscope.load(file)
    assert not list((tmp_path / "home" / "gguf").rglob("*"))


def mutated(content: bytes, head: int) -> dict[str, bytes]:
    """Cut, with changed bits, and with noise, each in the first `head` bytes."""
    draw, made = random.Random(7), {}
    for n in (24, 100, head // 3, head - 1, head + 1):
        made[f"cut at {n}"] = content[:n]
    for n in range(40):
        changed, times = bytearray(content), 1 if n < 32 else 12
        for _ in range(times):
            changed[draw.randrange(head)] ^= 1 << draw.randrange(8)
        made[f"changed {n}"] = bytes(changed)
    return made


def test_a_changed_head_loads_or_is_refused(file: Path, tmp_path: Path) -> None:
    loaded = refusals = 0
    for name, content in mutated(file.read_bytes(), int(gguf.GGUFReader(file).data_offset)).items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(content)
        try:
            attnscope.load(path)
            loaded += 1
        except AttnscopeError:
            refusals += 1
    assert loaded
    assert refusals > 10


def start(tensors: int = 1, facts: int = 0, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, facts) + rest


def key(kind: int) -> bytes:
    return struct.pack("<Q1sI", 1, b"k", kind)


MANY = 2**40
BAD_HEADS = {
    "tensors": start(tensors=MANY),
    "tensors that the file could hold": start(tensors=400_000),
    "metadata": start(facts=MANY),
    "metadata that the file could hold": start(facts=400_000),
    "strings of a list": start(facts=1, rest=key(9) + struct.pack("<IQ", 8, MANY)),
    "numbers of a list": start(facts=1, rest=key(9) + struct.pack("<IQ", 0, 2**63)),
    "lists in lists": start(facts=1, rest=key(9) + struct.pack("<IQ", 9, 1) * 5_000),
    "dimensions": start(rest=struct.pack("<Q1sI", 1, b"t", 2**20)),
}


@pytest.mark.parametrize("what", BAD_HEADS)
def test_counts_are_checked_before_they_are_looped_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Zeros follow, which read as empty names: a loop would go through all of them."""
    reads, get = [], gguf.GGUFReader._get

    def counted(*arguments: Any) -> Any:
        reads.append(arguments)
        return get(*arguments)

    monkeypatch.setattr(gguf.GGUFReader, "_get", counted)
    path = tmp_path / "bad.gguf"
    path.write_bytes(BAD_HEADS[what] + bytes(16 << 20))
    with raises(ModelError, "damaged-gguf"):
        read_header(path)
    assert len(reads) < 20


def sized(file: Path, name: str, value: int) -> bytes:
    at = gguf.GGUFReader(file).fields[name].offset + 8 + len(name) + 4
    content = bytearray(file.read_bytes())
    struct.pack_into("<I", content, at, value)
    return bytes(content)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("qwen2.block_count", 10**6),
        ("qwen2.block_count", 1),
        ("qwen2.feed_forward_length", 2**31),
        ("qwen2.embedding_length", 2**20),
    ],
)
def test_sizes_that_the_weights_do_not_have(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: int
) -> None:
    path = tmp_path / "sized.gguf"
    path.write_bytes(sized(file, name, value))
    monkeypatch.setattr(gguf_file, "_unpack", lambda *_: pytest.fail("nothing may be built"))
    with pytest.raises(ModelError) as error:
        attnscope.load(path)
    assert error.value.code == "gguf-sizes"


def test_a_panic_of_the_tokenizers_library(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rust's panics are no `Exception`."""

    class PanicException(BaseException):
        pass

    def panics(*_: Any) -> None:
        raise PanicException("index out of bounds")

    monkeypatch.setenv("ATTNSCOPE_HOME", str(tmp_path))
    monkeypatch.setattr(gguf_file, "_unpack", panics)
    with pytest.raises(ModelError):
        attnscope.load(file)
