"""The models a page may choose from, and the few that are in memory.

Only what is offered can be loaded: the zoo, what the hub's cache holds, and what was named when the
server was started. No name from a request is ever taken for a path.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnscope import zoo
from attnscope.errors import ModelError, unknown
from attnscope.loading.memory_check import NotEnoughMemoryError

KEPT = 2
"""How many models stay in memory: two are compared."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A model that can be chosen."""

    name: str
    source: str
    """What `attnscope.load` is given."""
    about: str
    here: bool = True
    """Whether it can be loaded without being fetched first."""
    kind: str = "real"
    """`yours`, `real`, or `tiny`: trained for this project, to try things out with."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Loaded:
    """A model in memory."""

    name: str
    model: Any
    tokenizer: Any
    bundled: bool
    kinds: dict[bool, dict[str, Any]] = field(default_factory=dict)
    """What kind each head is, with and without a search for needles; filled when asked for."""


class ModelCache:
    """Models by name. Used by one thread at a time."""

    def __init__(self, given: Mapping[str, str] | None = None, device: str | None = None):
        self._given = dict(given or {})
        self._device = device
        self._loaded: OrderedDict[str, Loaded] = OrderedDict()
        self._known: set[str] = set()
        """Every model that was ever loaded."""

    def offers(self) -> list[Offer]:
        """What there is, the given ones first."""
        from attnscope.loading import cached
        from attnscope.loading.fetch import where

        found = [
            Offer(name=name, source=source, about="given at the start", kind="yours")
            for name, source in self._given.items()
        ]

        def offer(name: str, about: str, *, here: bool = True, kind: str = "real") -> None:
            found.append(Offer(name=name, source=name, about=about, here=here, kind=kind))

        for name, real in zoo.FETCHED.items():
            here = where(name) is not None
            first = "" if here else f" (first: attnscope models --get {name})"
            offer(f"zoo:{name}", f"{real.title}, a real model{first}", here=here)
        for name in zoo.adapters():
            base = zoo.base_of(name)
            here = where(base.removeprefix(zoo.PREFIX)) is not None
            offer(f"zoo:{name}", f"our fine-tune of {base}", here=here)
        for name in zoo.names():
            offer(f"zoo:{name}", "tiny, trained for this project", kind="tiny")
        for name, _ in cached():
            offer(name, "in the hub's cache")
        return list({one.name: one for one in reversed(found)}.values())[::-1]

    def get(self, name: str) -> Loaded:
        """A model, from memory if it is there."""
        if name in self._loaded:
            self._loaded.move_to_end(name)
            return self._loaded[name]
        source = self._source(name)
        while len(self._loaded) >= KEPT:
            self._loaded.popitem(last=False)
        try:
            model, tokenizer = self._load(source)
        except NotEnoughMemoryError:
            if not self._loaded:
                raise
            self._loaded.clear()  # those that nobody looks at now make room
            model, tokenizer = self._load(source)
        bare = name.removeprefix(zoo.PREFIX)
        loaded = Loaded(
            name=name,
            model=model,
            tokenizer=tokenizer,
            bundled=name.startswith(zoo.PREFIX) and bare in zoo.names(),
        )
        self._loaded[name] = loaded
        self._known.add(name)
        return loaded

    def _source(self, name: str) -> str:
        """What is loaded for a name; refuses what cannot be."""
        offers = {offer.name: offer for offer in self.offers()}
        if name not in offers:
            if name in self._known:
                raise ModelError(f"{name} was deleted since the page loaded it: choose another")
            raise unknown("model", name, offers)
        if not offers[name].here:
            raise ModelError(f"{name} is not on this machine yet: {offers[name].about}")
        source = offers[name].source
        if name in self._given and Path(source).is_absolute() and not Path(source).exists():
            raise ModelError(f"the model {name} is no longer where it was when the page started")
        return source

    def _load(self, source: str) -> tuple[Any, Any]:
        import gc

        import attnscope

        gc.collect()
        return attnscope.load(source, device=self._device)
