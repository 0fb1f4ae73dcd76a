"""The models that the page offers, and a cache of the models in memory.

Only offered models can be loaded: the zoo, the local cache of the hub, and the models named at the
start of the server. A name from a request is never used as a path.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnscope import zoo
from attnscope.errors import ModelError, unknown

KEPT = 2
"""How many models stay in memory: two, because the page compares two."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A model that the page offers."""

    name: str
    source: str
    """The argument of `attnscope.load`."""
    about: str
    here: bool = True
    """Whether its files are on this machine."""
    kind: str = "real"
    """`yours`, `real`, or `tiny` (trained for this project)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Loaded:
    """A model in memory."""

    name: str
    source: str
    """The argument of `attnscope.load`."""
    model: Any
    tokenizer: Any
    bundled: bool
    head_types: dict[bool, dict[str, Any]] = field(default_factory=dict)
    """The cached head types, with (True) and without (False) the search for retrieval heads."""


class ModelCache:
    """Models by name. One thread at a time may use it."""

    def __init__(
        self,
        models: Mapping[str, str] | None = None,
        device: str | None = None,
        dtype: str = "auto",
    ):
        self._named = dict(models or {})
        self._device, self._dtype = device, dtype
        self._loaded: OrderedDict[str, Loaded] = OrderedDict()
        self._known: set[str] = set()
        """The names of all models loaded since the start."""

    def offers(self) -> list[Offer]:
        """All offered models; those named at the start come first."""
        from attnscope.loading import cached
        from attnscope.loading.fetch import where

        offers = [
            Offer(name=name, source=source, about="named at the start", kind="yours")
            for name, source in self._named.items()
        ]

        def offer(name: str, about: str, *, here: bool = True, kind: str = "real") -> None:
            offers.append(Offer(name=name, source=name, about=about, here=here, kind=kind))

        for name, real in zoo.FETCHED.items():
            if real.reads_sound:  # the page has no sound
                continue
            here = where(name) is not None
            first = "" if here else f" (fetch it with: attnscope models --get {name})"
            offer(f"zoo:{name}", f"{real.title}, a real model{first}", here=here)
        for name in zoo.adapters():
            base = zoo.base_of(name)
            here = where(base.removeprefix(zoo.PREFIX)) is not None
            offer(f"zoo:{name}", f"our fine-tune of {base}", here=here)
        for name in zoo.names():
            offer(f"zoo:{name}", "tiny, trained for this project", kind="tiny")
        for name, _ in cached():
            offer(name, "in the hub's cache")
        return list({one.name: one for one in reversed(offers)}.values())[::-1]

    def get(self, name: str) -> Loaded:
        """A model, from the cache if possible."""
        if name in self._loaded:
            self._loaded.move_to_end(name)
            return self._loaded[name]
        source = self._source(name)
        while len(self._loaded) >= KEPT:
            self._loaded.popitem(last=False)
        try:
            model, tokenizer = self._load(source)
        except ModelError as error:
            if error.code != "not-enough-memory" or not self._loaded:
                raise
            self._loaded.clear()  # free the memory of the other models
            model, tokenizer = self._load(source)
        bare = name.removeprefix(zoo.PREFIX)
        loaded = Loaded(
            name=name,
            source=source,
            model=model,
            tokenizer=tokenizer,
            bundled=name.startswith(zoo.PREFIX) and bare in zoo.names(),
        )
        self._loaded[name] = loaded
        self._known.add(name)
        return loaded

    def _source(self, name: str) -> str:
        """The source of an offered model; refuses a model that cannot be loaded."""
        offers = {offer.name: offer for offer in self.offers()}
        if name not in offers:
            if name in self._known:
                raise ModelError(
                    f"the files of {name} were deleted; choose another model",
                    code="model-deleted",
                    model=name,
                )
            raise unknown("model", name, offers)
        if not offers[name].here:
            raise ModelError(
                f"{name} is not on this machine: {offers[name].about}",
                code="model-not-fetched",
                model=name,
            )
        source = offers[name].source
        if name in self._named and Path(source).is_absolute() and not Path(source).exists():
            raise ModelError(
                f"the files of {name} were moved or deleted; restore them or choose another model",
                code="model-deleted",
                model=name,
            )
        return source

    def _load(self, source: str) -> tuple[Any, Any]:
        import gc

        from attnscope.loading import load_text_model

        gc.collect()
        return load_text_model(source, device=self._device, dtype=self._dtype)
