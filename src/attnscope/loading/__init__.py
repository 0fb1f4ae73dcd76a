"""Load a model and its tokenizer by name (`model_names.py` lists the forms of names).

Code of a model's repository is never run, and weights are never unpickled, unless the caller
requests it. A model with missing weights is refused, because they would be random.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnscope.errors import AttnscopeError, ModelError, unknown
from attnscope.loading.adapter import merged
from attnscope.loading.compatibility import add_bos, check_vocabulary, warn_without_bos, writes_bos
from attnscope.loading.device import chosen_device
from attnscope.loading.gguf import load_packed, read_header
from attnscope.loading.model_names import Source, find
from attnscope.loading.processors import Reader, has_processor, has_tokenizer, read_processor
from attnscope.loading.weights import WHOLE, check_loaded, check_memory, count_weights
from attnscope.tokens.find_text import remember_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "cached",
    "count_parameters",
    "find",
    "load",
    "load_config",
    "load_processor",
    "load_text_model",
    "load_tokenizer",
    "model_class",
]

# While transformers loads a model, it disables weight tying for the whole process. Two overlapping
# loads would leave it disabled, and later models with tied weights would lack some.
_one_at_a_time = threading.RLock()
DTYPES = ("auto", "float32", "bfloat16", "float16")


def load(
    name: str | Path,
    *,
    adapter: str | Path | None = None,
    revision: str | None = None,
    device: str | None = None,
    dtype: str = "auto",
    bos: bool = False,
    trust_remote_code: bool = False,
    unpickle: bool = False,
) -> "tuple[PreTrainedModel, Any]":
    """Load a model in evaluation mode, and its tokenizer or processor.

    Gated models need your own token: `hf auth login`, or the variable HF_TOKEN.

    Args:
        name: A bundled model ("zoo:spatial-phys"), a model that is downloaded once
            ("zoo:smollm2"), a hub id ("Qwen/Qwen2.5-0.5B-Instruct"), a local folder, or a GGUF
            file. "BASE+ADAPTER" and "OWNER/MODEL@REVISION" work too.
        adapter: A PEFT adapter to merge into the model; default: none.
        revision: A branch, tag or commit of a hub id; default: the main branch.
        device: "cpu", "cuda", "cuda:1", "mps", or "auto" to spread the model over all devices
            (needs accelerate). Default: the first GPU, otherwise the CPU.
        dtype: "auto", "float32", "bfloat16" or "float16". "auto" is the dtype of the stored
            weights, but float32 on a CPU.
        bos: Whether the tokenizer adds the begin-of-sequence token that the model was trained
            with, where it does not by default.
        trust_remote_code: Whether to run the Python code of the model's repository. Such code can
            do anything.
        unpickle: Whether to read pickled weights where there are no safetensors. Pickled files
            can run code.

    Returns:
        The transformers model and its tokenizer; if it reads pictures or sound, its processor,
        whose `tokenizer` is the tokenizer.

    Raises:
        InputError: An argument has a wrong value, or the processor needs a missing package.
        ModelError: The model cannot be loaded, or it has no attention.

    Examples:
        >>> import attnscope
        >>> model, tokenizer = attnscope.load("zoo:spatial-phys", dtype="float32")
        >>> model.config.num_hidden_layers
        28
        >>> tokenizer("The ball is left of the box.", return_tensors="pt").input_ids.shape
        torch.Size([1, 8])
    """
    source = find(name, revision=revision, adapter=adapter)
    reader = _reader(source, bos, trust_remote_code)
    if reader.missing is not None:
        raise reader.missing
    model = _model(source, reader.tokenizer, device, dtype, trust_remote_code, unpickle)
    return model, reader.tokenizer if reader.processor is None else reader.processor


def load_text_model(
    name: str | Path, *, device: str | None = None, dtype: str = "auto", bos: bool = False
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """A model and its tokenizer, as `load`; the packages of its processor may be missing."""
    source = find(name)
    tokenizer = _text_tokenizer(source, bos)
    return _model(source, tokenizer, device, dtype), tokenizer


def _model(
    source: Source,
    tokenizer: Any,
    device: str | None,
    dtype: str,
    trust_remote_code: bool = False,
    unpickle: bool = False,
) -> "PreTrainedModel":
    import torch

    from attnscope.interception.sites import has_attention

    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    where = chosen_device(device)
    config = _config(source, unpickle=unpickle, trust_remote_code=trust_remote_code)
    if tokenizer is not None and not writes_bos(tokenizer):
        warn_without_bos(config, tokenizer, tokenizer("a").input_ids, source.name)
    number: Any = "auto" if dtype == "auto" else getattr(torch, dtype)
    if dtype == "auto" and where == "cpu":
        number = torch.float32
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if where == "auto":  # spread over all devices
        options["device_map"] = "auto"
    else:
        stored = getattr(config.get_text_config(), "dtype", None)
        width = getattr(stored if number == "auto" else number, "itemsize", 4)
        check_memory(_count_weights(source, unpickle), width, source.name, where)
    with _one_at_a_time, _explained(source):
        model, info = _weights(source, config, number, options, unpickle)
        check_loaded(model, info, source.name)
        if source.adapter is not None:
            model = merged(model, source.adapter, source.location)
        if where != "auto":
            model = model.to(where)
    if not has_attention(model):
        raise ModelError(
            f"{type(model).__name__} has no attention layers that attnscope supports; models such "
            "as Mamba and RWKV have none",
            code="no-attention",
            model=type(model).__name__,
        )
    model.name_or_path = source.name
    if tokenizer is not None:
        remember_tokenizer(model, tokenizer)
    return model.eval()


def _count_weights(source: Source, unpickle: bool) -> int:
    """The number of weights of a model; 0 if its files are not on this machine."""
    if source.packed is not None:
        return read_header(source.packed).numbers
    folder = source.folder
    if folder is None:
        from huggingface_hub import try_to_load_from_cache

        here = try_to_load_from_cache(source.location, WHOLE, revision=source.commit)
        folder = Path(here).parent if isinstance(here, str) else None
    return 0 if folder is None else count_weights(folder, unpickle)


def count_parameters(name: str | Path) -> int:
    """The number of weights in the files of a model; 0 if they are not on this machine."""
    return _count_weights(find(name), unpickle=False)


def _weights(
    source: Source, config: Any, number: Any, options: dict[str, Any], unpickle: bool
) -> tuple[Any, dict[str, Any]]:
    if source.packed is not None:
        return load_packed(source.packed, number if number != "auto" else config.dtype, **options)
    kind = model_class(config, options["trust_remote_code"])
    model, info = kind.from_pretrained(
        source.location,
        revision=source.commit,
        config=config,
        dtype=number,
        use_safetensors=None if unpickle else True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # reported in `info`, and refused by name
        **options,
    )
    return model, info


def load_tokenizer(name: str | Path, *, bos: bool = False) -> Any:
    """Load the tokenizer of a model by name."""
    return _text_tokenizer(find(name), bos)


def load_processor(name: str | Path, *, bos: bool = False) -> Any:
    """Load the processor of a model by name; an error if it has none."""
    source = find(name)
    reader = _reader(source, bos)
    if reader.missing is not None:
        raise reader.missing
    if reader.processor is None or reader.tokenizer is None:
        raise ModelError(
            f"{source.name!r} has no processor for text with pictures or sound; use a "
            "vision-language model, or prompts of text alone",
            code="no-processor",
            model=source.name,
        )
    return reader.processor


def _text_tokenizer(source: Source, bos: bool) -> Any:
    tokenizer = _reader(source, bos).tokenizer
    if tokenizer is None:
        raise ModelError(
            f"{source.name!r} has no tokenizer: it reads no text",
            code="no-tokenizer",
            model=source.name,
        )
    return tokenizer


def _reader(source: Source, bos: bool = False, trust_remote_code: bool = False) -> Reader:
    """The tokenizer of a model, and its processor if it has one."""
    processing = has_processor(source)
    tokenizer = None
    if has_tokenizer(source) or not processing:
        tokenizer = _tokenizer(source, bos=bos, trust_remote_code=trust_remote_code)
    if not processing:
        return Reader(tokenizer)
    with _explained(source):
        return read_processor(source, tokenizer, trust_remote_code)


def load_config(name: str | Path) -> Any:
    """Load the configuration of a model by name."""
    return _config(find(name))


def _config(source: Source, *, unpickle: bool = False, trust_remote_code: bool = False) -> Any:
    import transformers

    if source.folder is not None and source.gguf is None:
        count_weights(source.folder, unpickle)
    with _explained(source):
        config = transformers.AutoConfig.from_pretrained(
            source.location, revision=source.commit, trust_remote_code=trust_remote_code
        )
        config.get_text_config()
    if (other := getattr(config, "transformers_weights", None)) is not None:
        raise ModelError(
            f"the configuration of {source.name!r} sets transformers_weights to {other!r}, a file "
            "that no digest covers; remove this key",
            code="unsupported-config",
            value=other,
        )
    return config


def _tokenizer(source: Source, *, bos: bool = False, trust_remote_code: bool = False) -> Any:
    import transformers

    with _explained(source):
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            source.location, revision=source.commit, trust_remote_code=trust_remote_code
        )
        check_vocabulary(tokenizer, source.name)
    if bos:
        add_bos(tokenizer, source.name)
    return tokenizer


@contextmanager
def _explained(source: Source) -> Iterator[None]:
    """Turn errors of transformers into a ModelError of one line, and silence its messages."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    except AttnscopeError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:400]
        if " " not in reason:  # a bare key or name is no explanation
            reason = f"{type(error).__name__} {reason}"
        tried = "the folder" if source.folder else "the Hugging Face hub and its local cache"
        raise ModelError(
            f"could not load {source.name!r} (tried {tried}): {reason}",
            code="cannot-load",
            model=source.name,
        ) from error
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def cached() -> list[tuple[str, int]]:
    """The models in the local cache of the Hugging Face hub, with their sizes in bytes."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return []
    return sorted((repo.repo_id, repo.size_on_disk) for repo in repos if repo.repo_type == "model")


def model_class(config: Any, trust_remote_code: bool = False) -> Any:
    """The class named in the configuration, or the causal model of the family, or any.

    A name from a file can only select a model class of transformers.
    """
    import transformers

    if trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return transformers.AutoModelForCausalLM
    for name in getattr(config, "architectures", None) or ():
        kind = getattr(transformers, str(name), None)
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
            return kind
    causal = transformers.AutoModelForCausalLM._model_mapping
    mapping = causal if type(config) in causal else transformers.AutoModel._model_mapping
    kind = mapping[type(config)]
    return kind[0] if isinstance(kind, list | tuple) else kind
