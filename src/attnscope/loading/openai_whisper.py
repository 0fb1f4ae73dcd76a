"""Convert an English Whisper checkpoint of OpenAI to a folder of transformers.

The checkpoint holds tensors and a dictionary of sizes; it is read without unpickling objects. The
vocabulary is a list of byte strings with ranks, as tiktoken stores it.
"""

import base64
import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnscope.errors import ModelError

RENAMED = (
    (r"^", "model."),
    (r"\.blocks\.", ".layers."),
    (r"\.cross_attn_ln\.", ".encoder_attn_layer_norm."),
    (r"\.attn_ln\.", ".self_attn_layer_norm."),
    (r"\.mlp_ln\.", ".final_layer_norm."),
    (r"\.cross_attn\.", ".encoder_attn."),
    (r"\.attn\.", ".self_attn."),
    (r"_attn\.query\.", "_attn.q_proj."),
    (r"_attn\.key\.", "_attn.k_proj."),
    (r"_attn\.value\.", "_attn.v_proj."),
    (r"_attn\.out\.", "_attn.out_proj."),
    (r"\.mlp\.0\.", ".fc1."),
    (r"\.mlp\.2\.", ".fc2."),
    (r"\.token_embedding\.", ".embed_tokens."),
    (r"\.positional_embedding$", ".embed_positions.weight"),
    (r"encoder\.ln_post\.", "encoder.layer_norm."),
    (r"decoder\.ln\.", "decoder.layer_norm."),
)
END, START, NO_TIMESTAMPS, FIRST_TIME = 50256, 50257, 50362, 50363
LANGUAGES, TIMES = 99, 1501
CONTROLS = ("translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps")


def convert(
    checkpoint: Path, vocabulary: Path, folder: Path, heads: Sequence[tuple[int, int]]
) -> None:
    """Write config, weights, tokenizer and feature extractor; `heads` are the alignment heads."""
    import torch
    from safetensors.torch import save_file
    from transformers import WhisperFeatureExtractor, WhisperProcessor

    read = torch.load(checkpoint, map_location="cpu", weights_only=True)
    dims, weights = read["dims"], read["model_state_dict"]
    if dims["n_vocab"] != FIRST_TIME + TIMES:
        raise ModelError(
            f"{checkpoint.name} has {dims['n_vocab']:,} tokens; only English checkpoints with "
            f"{FIRST_TIME + TIMES:,} tokens can be converted",
            code="unsupported-checkpoint",
            tokens=dims["n_vocab"],
        )
    _config(dims).save_pretrained(folder)
    save_file(
        {_renamed(name): tensor.contiguous() for name, tensor in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    _generation(dims, heads).save_pretrained(folder)
    extractor = WhisperFeatureExtractor(feature_size=dims["n_mels"])
    WhisperProcessor(extractor, _tokenizer(vocabulary)).save_pretrained(folder)


def _config(dims: dict[str, int]) -> Any:
    from transformers import WhisperConfig

    return WhisperConfig(
        vocab_size=dims["n_vocab"],
        num_mel_bins=dims["n_mels"],
        d_model=dims["n_text_state"],
        encoder_layers=dims["n_audio_layer"],
        encoder_attention_heads=dims["n_audio_head"],
        encoder_ffn_dim=4 * dims["n_audio_state"],
        decoder_layers=dims["n_text_layer"],
        decoder_attention_heads=dims["n_text_head"],
        decoder_ffn_dim=4 * dims["n_text_state"],
        max_source_positions=dims["n_audio_ctx"],
        max_target_positions=dims["n_text_ctx"],
        bos_token_id=END,
        eos_token_id=END,
        pad_token_id=END,
        decoder_start_token_id=START,
        architectures=["WhisperForConditionalGeneration"],
        dtype="float16",
    )


def _generation(dims: dict[str, int], heads: Sequence[tuple[int, int]]) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(
        bos_token_id=END,
        eos_token_id=END,
        pad_token_id=END,
        decoder_start_token_id=START,
        no_timestamps_token_id=NO_TIMESTAMPS,
        max_length=dims["n_text_ctx"],
        is_multilingual=False,
        alignment_heads=[list(head) for head in heads],
        suppress_tokens=[],
        begin_suppress_tokens=[220, END],
    )


def _renamed(name: str) -> str:
    for pattern, new in RENAMED:
        name = re.sub(pattern, new, name)
    return name


def _tokenizer(vocabulary: Path) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import WhisperTokenizer

    ranks = {
        base64.b64decode(token): int(rank)
        for token, rank in (line.split() for line in vocabulary.read_bytes().splitlines() if line)
    }
    letters = _letters()
    vocab = {"".join(letters[byte] for byte in token): rank for token, rank in ranks.items()}
    special = [f"<|language-{number}|>" for number in range(LANGUAGES)]
    special[0] = "<|en|>"
    names = ["<|endoftext|>", "<|startoftranscript|>", *special, *(f"<|{n}|>" for n in CONTROLS)]
    names += [f"<|{number * 0.02:.2f}|>" for number in range(TIMES)]
    vocab["<|endoftext|>"] = END
    backend = Tokenizer(models.BPE(vocab=vocab, merges=_merges(ranks, letters)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return WhisperTokenizer(
        tokenizer_object=backend,
        unk_token="<|endoftext|>",
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
    )


def _letters() -> list[str]:
    """The visible letter of each byte in byte-level BPE."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return [chr(byte) if byte in visible else chr(next(hidden)) for byte in range(256)]


def _merges(ranks: dict[bytes, int], letters: list[str]) -> list[tuple[str, str]]:
    """The merges of a BPE vocabulary: the last pair of which each token is made."""
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            pairs = [ranks.get(a + b, rank) for a, b in itertools.pairwise(parts)]
            best = min(range(len(pairs)), key=pairs.__getitem__)
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        if len(parts) == 2:
            first, second = ("".join(letters[byte] for byte in part) for part in parts)
            merges.append((first, second))
    return merges


def alignment_heads(folder: Path) -> list[tuple[int, int]]:
    """(layer, head) of the published alignment heads of a converted model."""
    settings = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    return [(layer, head) for layer, head in settings["alignment_heads"]]
