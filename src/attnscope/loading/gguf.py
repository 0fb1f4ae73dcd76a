"""GGUF: one file with weights, configuration and tokenizer, usually quantised.

Transformers unpacks them into plain numbers. That is slow, so it is done once: what comes out is
kept as an ordinary folder in the user's cache, under the digest of the file. Weights that would
take more than `KEPT` bytes are not kept but unpacked at every load.

The head is read here, before anything else opens the file: a file that is cut off, of an unknown
kind, or no GGUF at all is refused with the reason.

This module must not know names of models or devices.
"""

import importlib.util
import mmap
import re
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnscope.errors import AttnscopeError, ModelError
from attnscope.loading.cache import home, kept_whole, refuse_if_full
from attnscope.loading.compatibility import add_bos
from attnscope.loading.memory_check import check_room
from attnscope.loading.revision import digest_of_file
from attnscope.loading.weights import check_loaded

KEPT = 2**32
FORMAT = 1  # of what is kept: another number, and it is made anew

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_NUMBERS |= {12: "d"}
_STRING, _ARRAY = 8, 9
_DIMENSIONS = range(1, 5)  # of a tensor: GGML has no others
_STRINGS = 2**24  # of a list; vocabularies have under a million
_BLOCK = re.compile(r"blk\.(\d{1,9})\.")
_PLAIN = {0: "float32", 1: "float16", 30: "bfloat16"}


@dataclass(frozen=True)
class GgufHeader:
    """What a file says of itself."""

    facts: dict[str, Any]
    """The metadata, without its lists."""
    numbers: int
    """How many numbers the weights are."""
    blocks: int
    """How many layers the names of the tensors have."""
    dtype: str
    """What holds them exactly: the file's own type, or float32 where they are quantised."""

    @property
    def architecture(self) -> str:
        """The family, in the words of GGUF."""
        return str(self.facts.get("general.architecture"))

    @property
    def adds_bos(self) -> bool:
        """Whether its texts begin with a token for that; SentencePiece models' do unless said."""
        by_default = self.facts.get("tokenizer.ggml.model") == "llama"
        return bool(self.facts.get("tokenizer.ggml.add_bos_token", by_default))


def read_head(file: Path) -> GgufHeader:
    """Read what stands before the weights, and see that the weights are all there."""
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise ModelError(
                f"{str(file)!r} is a GGUF file, and reading one needs the package {package}: "
                "pip install 'attnscope[gguf]'"
            )
    size = file.stat().st_size
    if size < 24:
        raise ModelError(f"{str(file)!r} is no GGUF file: it has {size} bytes")
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as raw:
        try:
            head, end = _head(raw, str(file))
        except (struct.error, IndexError, UnicodeDecodeError, OverflowError, ValueError) as error:
            raise ModelError(
                f"{str(file)!r} is a broken or cut-off GGUF file: its head cannot be read: {error}",
                code="broken-gguf",
            ) from error
    if end > size:
        raise ModelError(
            f"{str(file)!r} is cut off: its weights need {end:,} bytes, and it has {size:,}; "
            "fetch it again"
        )
    return head


def _head(raw: mmap.mmap, name: str) -> tuple[GgufHeader, int]:
    """The head, and how long the file must be."""
    from gguf.constants import GGML_QUANT_SIZES

    if raw[:4] != b"GGUF":
        raise ModelError(f"{name!r} is no GGUF file: it does not begin with GGUF")
    version, tensors, facts = struct.unpack_from("<IQQ", raw, 4)
    if version not in (2, 3):
        raise ModelError(f"{name!r} is GGUF of version {version}; known: 2, 3")
    at = 24
    # The shortest entry of each: 13 and 32 bytes.
    if 13 * facts + 32 * tensors > len(raw) - at:
        raise ValueError(f"{facts:,} entries and {tensors:,} tensors in {len(raw):,} bytes")
    found: dict[str, Any] = {}
    for _ in range(facts):
        key, at = _string(raw, at)
        if not key or key in found:
            raise ValueError(f"an entry without a name, or a second {key!r}")
        (kind,) = struct.unpack_from("<I", raw, at)
        found[key], at = _value(raw, at + 4, kind)
    sizes = {int(kind): of for kind, of in GGML_QUANT_SIZES.items()}
    numbers, end, blocks, kinds = 0, 0, 0, set()
    for _ in range(tensors):
        tensor, at = _string(raw, at)
        if block := _BLOCK.match(tensor):
            blocks = max(blocks, int(block[1]) + 1)
        (dimensions,) = struct.unpack_from("<I", raw, at)
        if dimensions not in _DIMENSIONS:
            raise ValueError(f"{tensor!r} has {dimensions:,} dimensions; known: 1 to 4")
        shape = struct.unpack_from(f"<{dimensions}Q", raw, at + 4)
        kind, offset = struct.unpack_from("<IQ", raw, at + 4 + 8 * dimensions)
        at += 16 + 8 * dimensions
        if kind not in sizes:
            raise ModelError(f"{name!r} holds weights in a format that is not known: {kind}")
        count = 1
        for side in shape:
            count *= side
        per_block, width = sizes[kind]
        numbers += count
        end = max(end, offset + count // per_block * width)
        kinds.add(kind)
    if not tensors:
        raise ModelError(f"{name!r} holds no weights: there is no tensor in it")
    step = found.get("general.alignment") or 32
    if type(step) is not int or not 0 < step <= 2**16:
        raise ValueError(f"general.alignment is {step!r}")
    exact = next((_PLAIN[k] for k in (30, 1, 0) if k in kinds), "float32")
    dtype = exact if kinds <= set(_PLAIN) else "float32"
    return GgufHeader(found, numbers, blocks, dtype), -(-at // step) * step + end


def _string(raw: mmap.mmap, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", raw, at)
    end = at + 8 + length
    if end > len(raw):
        raise ValueError("beyond the end of the file")
    return raw[at + 8 : end].decode("utf-8", "replace"), end


def _value(raw: mmap.mmap, at: int, kind: int) -> tuple[Any, int]:
    """A value and where it ends; None for a list."""
    if kind in _NUMBERS:
        form = "<" + _NUMBERS[kind]
        return struct.unpack_from(form, raw, at)[0], at + struct.calcsize(form)
    if kind == _STRING:
        return _string(raw, at)
    if kind != _ARRAY:
        raise ValueError(f"a value of kind {kind}")
    of, count = struct.unpack_from("<IQ", raw, at)
    at += 12
    if of != _STRING and of not in _NUMBERS:
        raise ValueError(f"a list of values of kind {of}")
    least = 8 if of == _STRING else struct.calcsize("<" + _NUMBERS[of])
    if count * least > len(raw) - at or (of == _STRING and count > _STRINGS):
        raise ValueError(f"a list of {count:,} values")
    if of in _NUMBERS:
        return None, at + count * least
    for _ in range(count):
        at += 8 + struct.unpack_from("<Q", raw, at)[0]
    return None, at


def unpacked(file: Path) -> Path:
    """The folder of a GGUF file: configuration, tokenizer, and the weights if they are not many."""
    import transformers

    kept_as = f"{digest_of_file(file)[:32]}-{FORMAT}-{transformers.__version__}"
    target = home() / "gguf" / kept_as
    if target.is_dir():
        return target
    head = read_head(file)
    _check_sizes(file, head)
    large = head.numbers * 4 > KEPT
    size = "its weights at every load" if large else f"{head.numbers * 4 / 1e9:.1f} GB"
    print(f"unpacking {file.name} into {target} ({size})", file=sys.stderr, flush=True)
    with kept_whole(target, f"what {file.name} unpacks to") as folder:
        try:
            _unpack(file, head, folder)
        except (OSError, AttnscopeError):
            raise
        except BaseException as error:
            # A panic of Rust (tokenizers, safetensors) is no Exception.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            refuse_if_full(str(error))
            raise ModelError(_explain(file, head, error)) from error
    return target


def _check_sizes(file: Path, head: GgufHeader) -> None:
    """Before anything is built: the sizes in the metadata must fit the tensors. With too few layers
    it would be another model, with too many or too wide ones building it would take hours."""
    of = {
        name: value
        for name in ("block_count", "embedding_length", "feed_forward_length", "vocab_size")
        if type(value := head.facts.get(f"{head.architecture}.{name}")) is int
    }
    widest = max(of.get("feed_forward_length", 1), of.get("vocab_size", 1), 1)
    layers, numbers = of.get("block_count", head.blocks), of.get("embedding_length", 1) * widest
    odd = layers != head.blocks if head.blocks else layers > 200
    if odd or numbers > 8 * head.numbers:
        raise ModelError(
            f"the metadata of {str(file)!r} does not fit its tensors: it says {layers:,} layers "
            f"and a matrix of {numbers:,} numbers; the tensors have {head.blocks:,} layers and "
            f"{head.numbers:,} numbers. Fetch the file again",
            code="gguf-sizes",
            layers=layers,
            blocks=head.blocks,
        )


def _unpack(file: Path, head: GgufHeader, folder: Path) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    if head.adds_bos and tokenizer.bos_token is not None:
        add_bos(tokenizer, str(file))  # what the file says, and transformers leaves out
    tokenizer.save_pretrained(folder)
    if head.numbers * 4 <= KEPT:
        check_room(head.numbers, 4, str(file))
        model, info = load_packed(file, head.dtype)
        check_loaded(model, info, str(file))  # what was random would be kept for good
        model.save_pretrained(folder)
        return
    config = transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    family = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    config.architectures = [family.__name__]
    config.dtype = head.dtype
    config.save_pretrained(folder)


def load_packed(file: Path, dtype: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    """The model, unpacked, and what transformers says of the loading."""
    import torch
    import transformers

    # Newer versions can leave weights packed; older ones know no other way than unpacking.
    if kind := getattr(transformers, "GgufConfig", None):
        options["quantization_config"] = kind(dequantize=True)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # told in the second result
        **options,
    )
    # Nothing is quantised any more, and what says so would be in the way of `to` and `save`.
    if quantizer := getattr(model, "hf_quantizer", None):
        quantizer.remove_quantization_config(model)
    return model, info


def _explain(file: Path, head: GgufHeader, error: BaseException) -> str:
    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    return (
        f"could not unpack {str(file)!r}, a GGUF of the family {head.architecture!r}: {said}. "
        "Transformers reads some families only; the same model as a folder of safetensors works"
    )
