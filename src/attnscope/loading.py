"""`load`: a model and its tokenizer by name, from the zoo, a local folder or the Hugging Face hub.

Code that came with a model is never run, and weights are never unpickled, unless asked for in so
many words.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attnscope import zoo
from attnscope.errors import ModelError

__all__ = ["cached", "load", "load_config", "load_tokenizer", "model_class", "source_of"]

PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def load(
    name: str | Path,
    *,
    device: str | None = None,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    unpickle: bool = False,
) -> tuple[Any, Any]:
    """A model in evaluation mode and its tokenizer.

        model, tokenizer = attnscope.load("zoo:spatial-phys")             # a bundled tiny model
        model, tokenizer = attnscope.load("Qwen/Qwen2.5-0.5B-Instruct")   # a hub id
        model, tokenizer = attnscope.load("path/to/folder")               # or a local folder

    device   where to put the model: "cpu", "cuda", "cuda:1", "mps", or "auto" to spread it over
             all devices (needs accelerate); by default the first GPU there is, else the CPU
    dtype    "auto" (as the weights are stored, but float32 on a CPU), "float32", "bfloat16",
             "float16"
    trust_remote_code   run the Python code in the model's own repository: anything could be in it
    unpickle            read weights that are pickled where there are no safetensors

    Gated models need the user's own token (`hf auth login`, or the HF_TOKEN variable).
    """
    import torch
    import transformers

    source = _source(str(name), unpickle)
    kinds = {
        "auto": "auto",
        **{kind: getattr(torch, kind) for kind in ("float32", "bfloat16", "float16")},
    }
    if dtype not in kinds:
        raise ModelError(f"unknown dtype {dtype!r}; known: {', '.join(kinds)}")
    where = _device(torch, device)
    chosen = torch.float32 if dtype == "auto" and where == "cpu" else kinds[dtype]
    options = {"trust_remote_code": trust_remote_code}
    try:
        config = transformers.AutoConfig.from_pretrained(source, **options)
        kind = _class_for(transformers, config, trust_remote_code)
        with _quiet(transformers, when=str(name).startswith(zoo.PREFIX)):
            model = kind.from_pretrained(
                source,
                config=config,
                dtype=chosen,
                use_safetensors=None if unpickle else True,
                device_map="auto" if where == "auto" else None,
                **options,
            )
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **options)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ModelError(_explain(source, error)) from error
    _must_attend(model)
    if where != "auto":
        model = model.to(where)
    return model.eval(), tokenizer


def cached() -> list[tuple[str, int]]:
    """The models in the local cache of the Hugging Face hub, with their sizes in bytes."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return []
    return sorted((repo.repo_id, repo.size_on_disk) for repo in repos if repo.repo_type == "model")


@contextmanager
def _quiet(transformers: Any, *, when: bool) -> Iterator[None]:
    """No progress bar for what takes a moment."""
    logging = transformers.utils.logging
    silence = when and logging.is_progress_bar_enabled()
    if silence:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if silence:
            logging.enable_progress_bar()


def _device(torch: Any, wanted: str | None) -> str:
    """The device asked for, checked, or the best there is."""
    if wanted is None:
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    kind = wanted.split(":")[0]
    there = {"cpu": True, "auto": True, "cuda": torch.cuda.is_available()}
    there["mps"] = torch.backends.mps.is_available()
    if not there.get(kind, False):
        here = ", ".join(name for name, is_there in there.items() if is_there)
        raise ModelError(f"there is no device {wanted!r} here; there are: {here}")
    return wanted


def _must_attend(model: Any) -> None:
    from attnscope.capture.sites import attends

    if not attends(model):
        raise ModelError(
            f"{type(model).__name__} has no attention layers that attnscope can see; models "
            "without attention (Mamba, RWKV …) have no attention to measure"
        )


def _source(name: str, unpickle: bool = False) -> str:
    """The folder or hub id to load from, checked as far as it can be without loading."""
    if name.startswith(zoo.PREFIX):
        return str(zoo.folder(name))
    folder = Path(name).expanduser()
    if not folder.is_dir():
        looks_like_a_path = name.startswith((".", "/", "~")) or name.count("/") > 1
        if looks_like_a_path or folder.exists():
            raise ModelError(f"{name!r} is not a folder; a model is a folder with a config.json")
        return name
    if not (folder / "config.json").is_file():
        found = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
        raise ModelError(f"{name!r} has no config.json, so it is no model; it holds: {found}")
    if not any(folder.glob("*.safetensors")):
        pickled = sorted(p.name for pattern in PICKLED for p in folder.glob(pattern))
        if pickled and not unpickle:
            raise ModelError(
                f"{name!r} holds only pickled weights ({', '.join(pickled[:3])}), and loading a "
                "pickle can run anything. Convert them once, where you trust them: load the model "
                "with transformers and call model.save_pretrained(folder), which writes "
                "safetensors; or say load(…, unpickle=True)"
            )
        if pickled:
            return str(folder)
        raise ModelError(f"{name!r} holds no weights: no *.safetensors file is in it")
    return str(folder)


def _class_for(transformers: Any, config: Any, trust_remote_code: bool = False) -> Any:
    """The class the config names, if transformers has it; else the family's causal model.

    A name from a file is looked up only among the models of transformers.
    """
    if trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return transformers.AutoModelForCausalLM
    for wanted in getattr(config, "architectures", None) or ():
        found = getattr(transformers, wanted, None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    if type(config) in transformers.AutoModelForCausalLM._model_mapping:
        return transformers.AutoModelForCausalLM
    return transformers.AutoModel


def _explain(source: str, error: Exception) -> str:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    tried = "the folder" if Path(source).is_dir() else "the Hugging Face hub and its local cache"
    return (
        f"could not load {source!r} (tried {tried}): {reason}\n"
        "Without a connection, give the path of a folder that holds config.json, the tokenizer "
        "and *.safetensors files."
    )


def load_tokenizer(name: str | Path) -> Any:
    """The tokenizer alone, by the same names: enough to plan with."""
    import transformers

    source = _source(str(name))
    try:
        return transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ModelError(_explain(source, error)) from error


def load_config(name: str | Path) -> Any:
    """The model's configuration alone, by the same names."""
    import transformers

    source = _source(str(name))
    try:
        return transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ModelError(_explain(source, error)) from error


def source_of(name: str | Path) -> Path | None:
    """The folder a name stands for; None where it is a hub id."""
    source = Path(_source(str(name)))
    return source if source.is_dir() else None


def model_class(config: Any) -> Any:
    """The class that `load` would make a model of."""
    import transformers

    found = _class_for(transformers, config)
    mapping = getattr(found, "_model_mapping", None)
    return found if mapping is None else mapping[type(config)]
