"""Load GGUF files: one file with weights, configuration and tokenizer, usually quantised.

Transformers dequantises the weights. That is slow, so the result is cached as an ordinary model
folder, under the digest of the file. Weights of more than `KEPT` bytes are not cached, but
dequantised at every load.

The header is checked here before any other code opens the file. A truncated file, a file in an
unknown format, or a file that is no GGUF is refused.
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
from attnscope.loading.cache import complete_folder, home, raise_if_full
from attnscope.loading.compatibility import add_bos
from attnscope.loading.memory_check import check_memory
from attnscope.loading.revision import digest_of_file
from attnscope.loading.weights import check_loaded

KEPT = 2**32
FORMAT = 1  # version of the cached folder: a new version is unpacked again

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_NUMBERS |= {12: "d"}
_STRING, _ARRAY = 8, 9
_DIMENSIONS = range(1, 5)  # dimensions of a tensor in GGML
_STRINGS = 2**24  # strings of a list at most; vocabularies have under a million
_BLOCK = re.compile(r"blk\.(\d{1,9})\.")
_PLAIN = {0: "float32", 1: "float16", 30: "bfloat16"}


@dataclass(frozen=True)
class GgufHeader:
    """The header of a GGUF file."""

    metadata: dict[str, Any]
    """The metadata, without its lists."""
    numbers: int
    """The number of weights."""
    blocks: int
    """The number of layers, from the names of the tensors."""
    dtype: str
    """The type that holds the weights exactly; float32 for quantised weights."""

    @property
    def architecture(self) -> str:
        """The model family, by its name in GGUF."""
        return str(self.metadata.get("general.architecture"))

    @property
    def adds_bos(self) -> bool:
        """Whether texts start with the begin-of-sequence token; as in llama.cpp."""
        by_default = self.metadata.get("tokenizer.ggml.model") == "llama"
        return bool(self.metadata.get("tokenizer.ggml.add_bos_token", by_default))


def read_head(file: Path) -> GgufHeader:
    """Read the header of a file and check that the file is long enough for its weights."""
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise ModelError(
                f"{str(file)!r} is a GGUF file, which needs the package {package}: "
                "pip install 'attnscope[gguf]'",
                code="missing-package",
                package=package,
            )
    size = file.stat().st_size
    if size < 24:
        raise ModelError(
            f"{str(file)!r} is no GGUF file: it has {size} bytes", code="not-gguf", path=str(file)
        )
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as raw:
        try:
            head, end = _head(raw, str(file))
        except (struct.error, IndexError, UnicodeDecodeError, OverflowError, ValueError) as error:
            raise ModelError(
                f"{str(file)!r} is a damaged GGUF file: cannot read its header: {error}. "
                "Download it again",
                code="damaged-gguf",
                path=str(file),
            ) from error
    if end > size:
        raise ModelError(
            f"{str(file)!r} is truncated: its weights need {end:,} bytes, and it has {size:,}. "
            "Download it again",
            code="truncated-file",
            path=str(file),
            needed=end,
            size=size,
        )
    return head


def _head(raw: mmap.mmap, name: str) -> tuple[GgufHeader, int]:
    """The header, and the smallest possible length of the file."""
    from gguf.constants import GGML_QUANT_SIZES

    if raw[:4] != b"GGUF":
        raise ModelError(
            f"{name!r} is no GGUF file: it does not start with GGUF", code="not-gguf", path=name
        )
    version, tensors, entries = struct.unpack_from("<IQQ", raw, 4)
    if version not in (2, 3):
        raise ModelError(
            f"{name!r} has the unknown GGUF version {version}; known: 2, 3",
            code="unknown-gguf-version",
            value=version,
        )
    at = 24
    # An entry takes at least 13 bytes, and the description of a tensor 32.
    if 13 * entries + 32 * tensors > len(raw) - at:
        raise ValueError(f"{entries:,} entries and {tensors:,} tensors in {len(raw):,} bytes")
    metadata: dict[str, Any] = {}
    for _ in range(entries):
        key, at = _string(raw, at)
        if not key or key in metadata:
            raise ValueError(f"an entry without a name, or a second {key!r}")
        (kind,) = struct.unpack_from("<I", raw, at)
        metadata[key], at = _value(raw, at + 4, kind)
    sizes = {int(kind): of for kind, of in GGML_QUANT_SIZES.items()}
    numbers, end, blocks, types = 0, 0, 0, set()
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
            raise ModelError(
                f"{name!r} has weights of the unknown GGML type {kind}; known: {sorted(sizes)}",
                code="unknown-gguf-type",
                value=kind,
            )
        count = 1
        for side in shape:
            count *= side
        per_block, width = sizes[kind]
        numbers += count
        end = max(end, offset + count // per_block * width)
        types.add(kind)
    if not tensors:
        raise ModelError(f"{name!r} has no tensors", code="no-weights", path=name)
    step = metadata.get("general.alignment") or 32
    if type(step) is not int or not 0 < step <= 2**16:
        raise ValueError(f"general.alignment is {step!r}")
    exact = next((_PLAIN[k] for k in (30, 1, 0) if k in types), "float32")
    dtype = exact if types <= set(_PLAIN) else "float32"
    return GgufHeader(metadata, numbers, blocks, dtype), -(-at // step) * step + end


def _string(raw: mmap.mmap, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", raw, at)
    end = at + 8 + length
    if end > len(raw):
        raise ValueError("beyond the end of the file")
    return raw[at + 8 : end].decode("utf-8", "replace"), end


def _value(raw: mmap.mmap, at: int, kind: int) -> tuple[Any, int]:
    """A value and the offset of its end; the value of a list is None."""
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
    """The cached folder of a GGUF file: configuration, tokenizer and weights up to `KEPT`."""
    import transformers

    kept_as = f"{digest_of_file(file)[:32]}-{FORMAT}-{transformers.__version__}"
    target = home() / "gguf" / kept_as
    if target.is_dir():
        return target
    head = read_head(file)
    _check_sizes(file, head)
    large = head.numbers * 4 > KEPT
    size = "without weights" if large else f"{head.numbers * 4 / 1e9:.1f} GB"
    print(f"unpacking {file.name} into {target} ({size})", file=sys.stderr, flush=True)
    with complete_folder(target, f"the unpacked {file.name}") as folder:
        try:
            _unpack(file, head, folder)
        except (OSError, AttnscopeError):
            raise
        except BaseException as error:
            # A Rust panic (tokenizers, safetensors) is no subclass of Exception.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise_if_full(str(error))
            raise _unsupported(file, head, error) from error
    return target


def _check_sizes(file: Path, head: GgufHeader) -> None:
    """Refuse metadata whose sizes do not match the tensors, before a model is built.

    With too few layers it would be another model. With too many or too wide layers, building it
    would take hours.
    """
    of = {
        name: value
        for name in ("block_count", "embedding_length", "feed_forward_length", "vocab_size")
        if type(value := head.metadata.get(f"{head.architecture}.{name}")) is int
    }
    widest = max(of.get("feed_forward_length", 1), of.get("vocab_size", 1), 1)
    layers, numbers = of.get("block_count", head.blocks), of.get("embedding_length", 1) * widest
    odd = layers != head.blocks if head.blocks else layers > 200
    if odd or numbers > 8 * head.numbers:
        raise ModelError(
            f"the metadata of {str(file)!r} does not match its tensors: {layers:,} layers and a "
            f"matrix of {numbers:,} weights in the metadata, {head.blocks:,} layers and "
            f"{head.numbers:,} weights in the tensors. Download the file again",
            code="gguf-sizes",
            layers=layers,
            blocks=head.blocks,
        )


def _unpack(file: Path, head: GgufHeader, folder: Path) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    if head.adds_bos and tokenizer.bos_token is not None:
        add_bos(tokenizer, str(file))  # transformers ignores this setting of the file
    tokenizer.save_pretrained(folder)
    if head.numbers * 4 <= KEPT:
        check_memory(head.numbers, 4, str(file))
        model, info = load_packed(file, head.dtype)
        check_loaded(model, info, str(file))  # random weights would be cached
        model.save_pretrained(folder)
        return
    config = transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    family = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    config.architectures = [family.__name__]
    config.dtype = head.dtype
    config.save_pretrained(folder)


def load_packed(file: Path, dtype: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    """The dequantised model, and the loading report of transformers."""
    import torch
    import transformers

    # Newer versions can keep weights quantised; older ones always dequantise.
    if kind := getattr(transformers, "GgufConfig", None):
        options["quantization_config"] = kind(dequantize=True)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # reported in the second result
        **options,
    )
    # The weights are no longer quantised, and this setting would block `to` and `save`.
    if quantizer := getattr(model, "hf_quantizer", None):
        quantizer.remove_quantization_config(model)
    return model, info


def _unsupported(file: Path, head: GgufHeader, error: BaseException) -> ModelError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ModelError(
        f"could not unpack {str(file)!r}, a GGUF file of the family {head.architecture!r}: "
        f"{reason}. Transformers supports some families only; use the model as a folder of "
        "safetensors",
        code="cannot-unpack-gguf",
        path=str(file),
        architecture=head.architecture,
    )
