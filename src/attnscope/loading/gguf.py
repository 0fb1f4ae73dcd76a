"""Load GGUF files: one file with weights, configuration and tokenizer, usually quantised.

Transformers dequantises the weights. That is slow, so the result is cached as an ordinary model
folder, under the digest of the file. Weights of more than `KEPT` bytes are not cached, but
dequantised at every load.

The header is checked before transformers opens the file. A damaged or truncated file is refused.
"""

import importlib.util
import re
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from attnscope.errors import AttnscopeError, bad_path, is_int, missing_package
from attnscope.loading.cache import complete_folder, home, raise_if_full
from attnscope.loading.compatibility import add_bos
from attnscope.loading.revision import digest_of_file
from attnscope.loading.weights import check_loaded, check_memory

KEPT = 2**32
FORMAT = 1  # version of the cached folder: a new version is unpacked again

MAX_COUNT = 2**16
"""Maximum number of tensors and of metadata entries; large models have a few thousand."""
MAX_VALUES = 2**24
"""Maximum number of values in a list; vocabularies have under a million."""
_BLOCK = re.compile(r"blk\.(\d{1,9})\.")
_PLAIN = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


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


def require_packages(what: str) -> None:
    """Refuse to go on without the packages that read GGUF files."""
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise missing_package(what, package, "gguf")


def read_header(file: Path) -> GgufHeader:
    """Read the header of a file; refuses a damaged or truncated file."""
    require_packages(f"the GGUF file {str(file)!r}")
    with file.open("rb") as opened:
        start = opened.read(24)
    if len(start) < 24 or start[:4] != b"GGUF":
        raise bad_path(file, "is no GGUF file", "not-gguf")
    try:
        reader = _reader(file, *struct.unpack_from("<QQ", start, 8))
        metadata = {
            name: field.contents()
            for name, field in reader.fields.items()
            if len(field.types) == 1  # no list
        }
    # The reader checks little: a damaged file fails in any of its steps.
    except (ArithmeticError, LookupError, TypeError, ValueError, struct.error) as error:
        problem = (
            f"has a header that cannot be read: {error}. The file is damaged, truncated or of an "
            "unknown version; download it again"
        )
        raise bad_path(file, problem, "damaged-gguf") from error
    if not reader.tensors:
        raise bad_path(file, "has no tensors", "no-weights")
    blocks = [int(block[1]) + 1 for t in reader.tensors if (block := _BLOCK.match(t.name))]
    types = {tensor.tensor_type.name for tensor in reader.tensors}
    plain = types <= set(_PLAIN)
    return GgufHeader(
        metadata,
        numbers=sum(tensor.n_elements for tensor in reader.tensors),
        blocks=max(blocks, default=0),
        dtype=next(_PLAIN[name] for name in _PLAIN if name in types) if plain else "float32",
    )


def _reader(file: Path, *counts: int) -> Any:
    """A GGUFReader that skips lists and checks counts; it would make objects of every value."""
    from gguf import GGUFReader, GGUFValueType

    class Reader(GGUFReader):  # type: ignore[misc]
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            kind, count = struct.unpack_from("<IQ", self.data, orig_offs)
            if count > MAX_VALUES:
                raise ValueError(f"a list of {count:,} values, maximum {MAX_VALUES:,}")
            end = orig_offs + 12
            if kind == GGUFValueType.STRING:
                for _ in range(count):
                    end += 8 + struct.unpack_from("<Q", self.data, end)[0]
            else:
                end += count * self.gguf_scalar_to_np[GGUFValueType(kind)]().itemsize
            return end - orig_offs, [], [], [GGUFValueType.ARRAY, GGUFValueType(kind)]

    if max(counts) > MAX_COUNT:
        raise ValueError(f"{max(counts):,} tensors or entries, maximum {MAX_COUNT:,}")
    return Reader(file)


def unpacked(file: Path) -> Path:
    """The cached folder of a GGUF file: configuration, tokenizer and weights up to `KEPT`."""
    import transformers

    kept_as = f"{digest_of_file(file)[:32]}-{FORMAT}-{transformers.__version__}"
    target = home() / "gguf" / kept_as
    if target.is_dir():
        return target
    head = read_header(file)
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
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            family = head.architecture
            problem = (
                f"of the family {family!r} could not be unpacked: {reason}. Transformers supports "
                "some families only; use the model as a folder of safetensors"
            )
            raise bad_path(file, problem, "cannot-unpack-gguf", architecture=family) from error
    return target


def _check_sizes(file: Path, head: GgufHeader) -> None:
    """Refuse sizes that the tensors do not have: too few layers would be another model, and too
    many or too wide ones would fill the memory."""
    names = ("block_count", "embedding_length", "feed_forward_length")
    stated = [head.metadata.get(f"{head.architecture}.{name}") for name in names]
    layers, wide, inner = (value if is_int(value) else 0 for value in stated)
    if (head.blocks and layers != head.blocks) or wide * inner > head.numbers:
        problem = (
            f"has metadata of {layers:,} layers with matrices of {wide:,} × {inner:,}, but tensors "
            f"of {head.blocks:,} layers with {head.numbers:,} weights. Download it again"
        )
        raise bad_path(file, problem, "gguf-sizes", layers=layers, blocks=head.blocks)


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
    with _no_bar():
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


@contextmanager
def _no_bar() -> Iterator[None]:
    """Hide the progress bar of the dequantisation, which ignores the setting of transformers."""
    name = "transformers.modeling_gguf_pytorch_utils"  # not in every version
    module: Any = import_module(name) if importlib.util.find_spec(name) else None
    bar = getattr(module, "tqdm", None)
    if bar is not None:
        module.tqdm = lambda things, **_: things
    try:
        yield
    finally:
        if bar is not None:
            module.tqdm = bar
