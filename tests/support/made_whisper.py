"""Checkpoints and vocabularies in the form of OpenAI's Whisper, of tiny size."""

import base64
import itertools
from pathlib import Path
from typing import Any

import torch

WIDTH = 16


def _attention(prefix: str) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for part in ("query", "key", "value", "out"):
        shapes[f"{prefix}.{part}.weight"] = (WIDTH, WIDTH)
        if part != "key":
            shapes[f"{prefix}.{part}.bias"] = (WIDTH,)
    return shapes | _norm(f"{prefix}_ln")


def _norm(prefix: str) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}.weight": (WIDTH,), f"{prefix}.bias": (WIDTH,)}


def checkpoint(vocabulary: int = 51_864) -> dict[str, Any]:
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
    weights = {n: torch.randn(s, generator=generator) * s[-1] ** -0.5 for n, s in shapes.items()}
    dims = {
        **{"n_mels": 80, "n_vocab": vocabulary, "n_audio_ctx": 1500, "n_text_ctx": 448},
        **{"n_audio_state": WIDTH, "n_audio_head": 2, "n_audio_layer": 1},
        **{"n_text_state": WIDTH, "n_text_head": 2, "n_text_layer": 2},
    }
    return {"dims": dims, "model_state_dict": {n: t.half() for n, t in weights.items()}}


def save_checkpoint(folder: Path) -> tuple[Path, Path]:
    """A checkpoint, and a vocabulary of single bytes, `ab`, `abc` and further pairs."""
    torch.save(checkpoint(), folder / "tiny.en.pt")
    tokens = [bytes([byte]) for byte in range(256)] + [b"ab", b"abc"]
    pairs = (bytes(pair) for pair in itertools.product(range(256), repeat=2) if pair != (97, 98))
    tokens += itertools.islice(pairs, 50_256 - len(tokens))
    lines = (b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens))
    (folder / "gpt2.tiktoken").write_bytes(b"".join(lines))
    return folder / "tiny.en.pt", folder / "gpt2.tiktoken"
