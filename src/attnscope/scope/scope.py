"""`Scope`: the results of `watch`, read by layer."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnscope.errors import ScopeError, unknown
from attnscope.measures.flow import flow
from attnscope.measures.layer import Layer, Sums, mean_over_queries, or_nan
from attnscope.measures.mass import lift, mass, shares_of
from attnscope.measures.received import standard_error
from attnscope.measures.registry import BY_HEAD, MEASURES
from attnscope.scope.class_shares import known_tokens
from attnscope.scope.image_maps import ImageMaps
from attnscope.tokens import DEFAULT, ClassSet
from attnscope.tokens.find_text import check_tokenizer, find_tokens

if TYPE_CHECKING:
    import polars as pl

    from attnscope.look.html_page import HtmlPage


class Scope(ImageMaps):
    """The results of `attnscope.watch`. Do not create one yourself.

    Shapes: B sequences, H query heads, K keys (positions), Q counted queries. Results are float32
    on the device of the layer. Padding counts neither as query nor as key: its columns are 0 (nan
    in `average`).

    A forward pass without a KV cache deletes the results of the pass before. A pass that continues
    a cache (every decode step of `generate`) adds to them.

    Args:
        layers: The measured layers, in the model's own numbering.
        backend: The kernel that computes the sums.
        queries: Which queries count.
        groups: The number of classes of queries, for `flow`; 0 without classes.
        stack: The stack of layers that is measured: "decoder" or "encoder".
        cross: Whether this is cross-attention.

    Raises:
        InputError: By its methods: a layer was not measured, or an argument has a wrong value.
        ScopeError: By its methods: no forward pass was measured, or it did not finish, or the
            result needs an option that `watch` did not get, such as `keep=True`.
        ConservationError: By its methods: the attention weights of a layer do not add up.

    Examples:
        >>> import attnscope
        >>> model, tokenizer = attnscope.load("zoo:spatial-phys")
        >>> inputs = tokenizer("The ball is left of the box.", return_tensors="pt")
        >>> with attnscope.watch(model, layers=0, keep=True) as scope:
        ...     _ = model(**inputs)
        >>> scope.layers, scope.count(0).tolist()
        ([0], [8.0])
        >>> scope.entropy(0).shape  # [batch, heads]
        torch.Size([1, 12])
        >>> scope.row(0, query=7).shape  # [heads, keys]
        torch.Size([12, 8])
        >>> scope.to_frame(tokenizer, measures=["received"]).height  # 12 heads × 8 tokens
        96
    """

    def __repr__(self) -> str:
        if not self.layers:
            parts = (f"{name!r}: {part!r}" for name, part in self._parts.items())
            return f"<Scope of {len(self._parts)} parts: {', '.join(parts)}>"
        summary = f"{len(self.layers)} layers, queries {str(self._queries)!r}, {self.backend!r}"
        if self._left_out:
            summary += f", without {', '.join(self._left_out)}"
        if self._failed:
            return f"<Scope of {summary}: the last forward pass did not finish>"
        if not self._extents:
            return f"<Scope of {summary}: no forward pass yet>"
        layer, (_, keys) = next(iter(self._extents.items()))
        block = self._own_sums(layer)
        counts = [0] * len(self._first_token) if block is None else block.count.int().tolist()
        counted = ", ".join(map(str, counts[:4])) + (" …" if len(counts) > 4 else "")
        shape = f"{len(counts)} sequence{'s' if len(counts) > 1 else ''} of {keys} keys"
        last = f", the last of {self._texts} texts" if self._texts > 1 else ""
        return f"<Scope of {summary}: {shape}, {counted} queries counted{last}>"

    @property
    def readable(self) -> list[int]:
        """The layers that can be read now.

        After a pass: all measured layers. During a pass (in a hook of the model): the layers whose
        attention has run in this pass.
        """
        known = self._extents if self._running is None else self._running
        return [layer for layer in self.layers if layer in known]

    def find(self, text: str, tokenizer: Any = None) -> Tensor:
        """bool [B, K]: the tokens that contain `text`, in every place that has it as whole words.

        `mass`, `rows` and the interventions take the result: `knockout(model, keys=…)`. A sequence
        without the text is an error. `tokenizer` is needed if the model does not come from
        `attnscope.load`.
        """
        self._ensure_captured(self.layers[0])
        tokenizer = check_tokenizer(self._tokenizer if tokenizer is None else tokenizer)
        ids, real = known_tokens(self).numpy(), self._real_keys().numpy()
        return torch.from_numpy(find_tokens(ids, real, tokenizer, text))

    @property
    def parts(self) -> list[str]:
        """The parts of the model that were measured: "encoder", "decoder", "cross"."""
        return list(self._parts)

    def __getitem__(self, part: str) -> "Scope":
        """The scope of one part: self-attention of a stack, or "cross", where the queries are a
        decoder's and the keys an encoder's."""
        if part not in self._parts:
            raise unknown("part", part, self._parts)
        scope: Scope = self._parts[part]
        return scope

    def count(self, layer: int) -> Tensor:
        """[B]: number of counted queries, |Q|."""
        block = self._read(layer)
        return block.count.float().to(block.computed().received.device)

    def received(self, layer: int) -> Tensor:
        """[B, H, K]: sum over the queries of their attention to each key."""
        return self._read(layer).computed().received.clone()

    def received_error(self, layer: int) -> Tensor:
        """[B, H, K]: standard error of `received` (and of its later part) when sampled, else 0."""
        sums = self._read(layer).computed()
        return standard_error(sums.variance, sums.received)

    def average(self, layer: int) -> Tensor:
        """[B, H, K]: average attention weight from later tokens; nan if no later query sees it."""
        return self.sums(layer).average

    def average_error(self, layer: int) -> Tensor:
        """[B, H, K]: standard error of `average` when sampled, else 0; nan as in `average`."""
        n_visible_from = self._visibility(layer, "eligible_later").float()
        return self.received_error(layer) / or_nan(n_visible_from)[:, None]

    def eligible(self, layer: int) -> Tensor:
        """[B, K]: number of counted queries that see each key."""
        return self._visibility(layer, "eligible").float()

    def uniform(self, layer: int) -> Tensor:
        """[B, K]: what each key would receive under uniform attention."""
        return self._visibility(layer, "uniform").float()

    def mass(self, layer: int, classes: Any, n: Any = None) -> Tensor:
        """[B, H, n]: mean over the queries of their attention to each class.

        Args:
            layer: A measured layer.
            classes: A class set, whose `names` name the last axis: `scope.mass(0, DEFAULT)`. Or
                int [B, K], the class of each key, in 0 … n - 1, -1 for no class; or bool [B, K],
                one class, such as `find` returns; or float [B, K, n], the share of each key in
                each class. After `generate`, these may have the length of the prompt (later
                tokens have no class) or of the whole output.
            n: The number of classes; default: the largest class + 1. With a class set: the
                tokenizer or processor, which is needed if the model does not come from
                `attnscope.load`.
        """
        sums = self.sums(layer)
        return mass(sums.received, self._shares(layer, classes, n), sums.count).float()

    def mass_error(self, layer: int, classes: Any, n: Any = None) -> Tensor:
        """[B, H, n]: an upper bound of the standard error of `mass` when sampled, else 0.

        The errors of the keys of a class are added up, as if they were fully correlated.
        """
        shares = self._shares(layer, classes, n)
        return mass(self.received_error(layer), shares, self.sums(layer).count).float()

    def lift(self, layer: int, classes: Any, n: Any = None) -> Tensor:
        """[B, H, n]: `mass` over what it would be under uniform attention; 1 is no preference."""
        sums, shares = self.sums(layer), self._shares(layer, classes, n)
        uniform = mass(self.uniform(layer)[:, None], shares, sums.count)
        return lift(mass(sums.received, shares, sums.count), uniform).float()

    def flow(self, layer: int) -> Tensor:
        """[B, H, n, n]: mean over the queries of class c of their mass on class d.

        The classes are those of `watch(…, classes=…)`: sums cannot be split by the class of the
        query after the pass.
        """
        sums = self.sums(layer)
        if self._cross:
            raise ScopeError(
                "in cross-attention queries and keys belong to two texts, so flow between classes "
                "of one text is not defined",
                code="cross-attention",
                measure="flow",
            )
        if sums.flow is None or self._classes is None:
            raise ScopeError(
                "flow needs the classes before the forward pass: watch(model, classes=class_ids)",
                code="no-classes",
            )
        ids = torch.full((len(sums.first_token), sums.received.shape[-1]), -1, dtype=torch.int64)
        known = min(self._classes.shape[1], ids.shape[1])
        ids[:, :known] = self._classes[:, :known]
        shares = shares_of(ids.to(sums.flow.device), self._groups)
        each = torch.eye(self._groups, dtype=torch.float64, device=sums.flow.device)
        return flow(sums.flow, shares, sums.visibility("groups"), each).float()

    def measure(self, name: str, layer: int) -> Tensor:
        """[B, H]: a measure by its name; [B, H, columns] if it has several numbers per head.

        Some need `watch(…, keep=True)`, and `max_logit` needs `watch(…, max_logit=True)`.
        """
        if name not in BY_HEAD:
            raise unknown("measure", name, sorted(BY_HEAD))
        rows = self.single(layer) if "rows" in MEASURES[name].needs else None
        ids = self.tokens
        if ids is not None:
            ids = ids.masked_fill(~self._real_keys(), -1)
        layer_view = Layer(
            sums=self.sums(layer), rows=rows, tokens=None if ids is None else ids.numpy()
        )
        return torch.as_tensor(MEASURES[name].numbers(layer_view).value)

    def entropy(self, layer: int) -> Tensor:
        """[B, H]: mean over the queries of -sum_j A ln A, in nats."""
        return self.measure("entropy", layer)

    def entropy_error(self, layer: int) -> Tensor:
        """[B, H]: standard error of `entropy` when sampled, else 0."""
        sums = self.sums(layer)
        error = torch.zeros_like(sums.entropy) if sums.entropy_error is None else sums.entropy_error
        return mean_over_queries(error, sums.count)

    def first_token(self, layer: int) -> Tensor:
        """[B, H]: mean over the queries of their attention to the first real token."""
        return self.measure("first_token", layer)

    def self_mass(self, layer: int) -> Tensor:
        """[B, H]: mean over the queries of their attention to themselves."""
        return self.measure("self_mass", layer)

    def distance(self, layer: int) -> Tensor:
        """[B, H]: mean over the queries of the distance of their attention, in tokens."""
        return self.measure("distance", layer)

    def learned_sink_mass(self, layer: int) -> Tensor:
        """[B, H]: mean over the queries of their attention on a learned sink; 0 without one."""
        return self.measure("learned_sink_mass", layer)

    def sums(self, layer: int) -> Sums:
        """The sums over counted queries, the input of measures."""
        block, sums = self._read(layer), self._read(layer).computed()
        later, self_mass = sums.received_later, sums.self_mass
        if self._cross:  # queries and keys are different tokens
            later, self_mass = (torch.full_like(each, torch.nan) for each in (later, self_mass))
        return Sums(
            count=block.count.to(sums.received.device),
            received=sums.received,
            received_later=later,
            entropy=sums.entropy,
            self_mass=self_mass,
            first_token=self._first_token,
            visibility=partial(self._visibility, layer),
            sink=sums.sink,
            sink_position=sums.sink_position,
            flow=sums.flow,
            error=None if sums.variance is None else self.received_error(layer),
            max_logit=sums.max_logit,
            entropy_error=None if sums.entropy_variance is None else sums.entropy_variance.sqrt(),
            group_key=(*map(id, block.selections), self._extents[layer][1]),
        )

    def to_frame(
        self,
        tokenizer: Any = None,
        measures: Sequence[str] = ("received", "average"),
        *,
        classes: ClassSet = DEFAULT,
        input_ids: Any = None,
    ) -> "pl.DataFrame":
        """All layers and heads in one polars frame, one row per number.

        The columns are sequence, layer, head, measure, item (a class), position, token, class and
        value.

        Args:
            tokenizer: The tokenizer or processor of the model, for the columns token and class;
                default: that of `attnscope.load`, else these columns are left out.
            measures: For each token "received", "average"; for each class "mass", "lift"; for each
                head any name that `measure` takes; for each query "rows" (by class),
                "query_entropy".
            classes: The set of token classes.
            input_ids: Int [batch, keys], if the model did not get token ids.
        """
        from attnscope.look.data_frame import frame_of_scope

        if tokenizer is None and (input_ids is not None or self.tokens is not None):
            tokenizer = self._tokenizer
        if tokenizer is not None:
            tokenizer = check_tokenizer(tokenizer)
        return frame_of_scope(self, tokenizer, measures, classes, input_ids)

    def show(
        self, tokenizer: Any = None, sequence: int = 0, *, input_ids: Any = None
    ) -> "HtmlPage":
        """An HTML page of the text, shaded by the attention each token receives.

        After `place_images`, a page of the pictures of the text: a heat map over each follows the
        token that is pointed at (needs `watch(…, keep=True)`). Both have a choice of layer and
        head. A notebook displays the page; `.save("page.html")` writes it. `tokenizer` may be a
        processor.
        """
        from attnscope.look.html_page import page_of_scope
        from attnscope.look.image_page import page_of_images

        tokenizer = check_tokenizer(self._tokenizer if tokenizer is None else tokenizer)
        if self._images is not None and any(one.sequence == sequence for one in self._images):
            return page_of_images(self, tokenizer, sequence, input_ids)
        return page_of_scope(self, tokenizer, sequence, input_ids)

    def map(self, tokenizer: Any = None, sequence: int = 0, *, input_ids: Any = None) -> "HtmlPage":
        """An HTML page of the attention patterns of all heads, for a text of at most 512 tokens.

        Every head is a small picture; a click shows its matrix and its rows. A notebook displays
        the page; `.save("page.html")` writes it. Needs `watch(…, keep=True)`.
        """
        from attnscope.look.map_page import map_of_scope

        tokenizer = check_tokenizer(self._tokenizer if tokenizer is None else tokenizer)
        return map_of_scope(self, tokenizer, sequence, input_ids)
