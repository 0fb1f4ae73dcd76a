"""Statistics of a watched model beside a dense float64 computation on the same queries and keys,
for every intervention, mask and choice of queries. Runs on any device (tests/gpu, tests/capture).
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as hf
from torch import Tensor

import attnscope
from attnscope.interception import sites
from attnscope.interception.hooks import Hook
from attnscope.interception.intercept import register

INTERVENTIONS = (
    "none",
    "knockout all",
    "knockout last",
    "knockout generated",
    "knockout predicts",
    "knockout mask",
    "knockout heads",
    "knockout layers",
    "steer",
    "arm",
    "nested",
)
MASKS = ("none", "left", "right", "holes", "window", "chunked", "4-D", "bidirectional")
QUERIES = ("all", "last", "generated", "predicts", "sample:4", "mask")
# What `generate` is tried with.
GENERATED = ("none", "left")
NEW, WINDOW, CLASSES = 3, 37, 3
COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
}
GROUPED = {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}


def build(mask: str, device: str, dtype: torch.dtype) -> Any:
    """A small random model whose attention has this mask, with scores that differ."""
    torch.manual_seed(0)
    if mask == "window":
        config = hf.MistralConfig(**COMMON, **GROUPED, sliding_window=WINDOW)
        model: Any = hf.MistralForCausalLM(config)
    elif mask == "chunked":
        more = {"head_dim": 32, "moe_layers": [], "intermediate_size_mlp": 64}
        kinds = ["chunked_attention"] * 3
        config = hf.Llama4TextConfig(
            **COMMON, **GROUPED, **more, attention_chunk_size=WINDOW, layer_types=kinds
        )
        model = hf.Llama4ForCausalLM(config)
    elif mask == "bidirectional":
        model = hf.BertModel(hf.BertConfig(**COMMON))
    else:
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**COMMON, **GROUPED))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj" in name or "query" in name:
                weight.mul_(4.0)
    return model.eval().to(dtype).to(device)


@dataclass
class Case:
    """One forward pass or generation: model, inputs, and who can see whom."""

    mask: str
    tokens: int
    device: str
    dtype: torch.dtype
    generates: bool
    ids: Tensor = field(init=False)
    real: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.model = build(self.mask, self.device, self.dtype)
        n = self.tokens
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(5, 97, (2, n), generator=generator)
        self.real = torch.ones(2, n, dtype=torch.bool)
        if self.mask == "left":
            self.real[1, : n // 4] = False
        if self.mask == "right":
            self.real[1, -(n // 4) :] = False
        if self.mask == "holes":
            self.real[1, n // 3 : n // 3 + 5] = False
            self.real[0, n // 2] = False
        order = torch.arange(n)
        # No first token of a chunk: a query that sees itself alone cannot lose it.
        self.keys = ((order % 11 == 6) & (order % WINDOW != 0)).expand(2, n)
        self.some = (order % 3 == 1).expand(2, n) & self.real
        self.classes = torch.arange(n + NEW).expand(2, -1) % CLASSES

    def run(self) -> None:
        """The pass."""
        ids = self.ids.to(self.device)
        given: dict[str, Any] = {}
        if self.mask in ("left", "right", "holes"):
            given["attention_mask"] = self.real.long().to(self.device)
        if self.mask == "4-D":
            given["attention_mask"] = self.visible(self.tokens)[:, None].to(self.device)
        if self.generates:
            more = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": NEW}
            self.model.generate(input_ids=ids, **given, **more)
        else:
            self.model(input_ids=ids, **given)

    def real_of(self, Q: int) -> Tensor:
        """bool [B, Q]: generated tokens are real."""
        return torch.cat([self.real, torch.ones(2, Q - self.tokens, dtype=torch.bool)], 1)

    def visible(self, Q: int) -> Tensor:
        """bool [B, Q, Q]: who sees whom."""
        order = torch.arange(Q)
        own, key = order[:, None], order[None]
        seen = torch.ones(Q, Q, dtype=torch.bool) if self.mask == "bidirectional" else key <= own
        if self.mask == "window":
            seen = seen & (own - key < WINDOW)
        if self.mask == "chunked":
            seen = seen & (own // WINDOW == key // WINDOW)
        if self.mask == "4-D":  # two packed texts
            seen = seen & ((own >= Q // 3) == (key >= Q // 3))
        return seen & self.real_of(Q)[:, None]

    def chosen(self, queries: str, Q: int) -> Tensor:
        """bool [B, Q]: the queries of this name."""
        real, order = self.real_of(Q), torch.arange(Q)
        prompt = real & (order < self.tokens)
        last = prompt & (order == torch.where(prompt, order, -1).amax(1, keepdim=True))
        generated = real & (order >= self.tokens)
        some = torch.nn.functional.pad(self.some, (0, Q - self.tokens))
        return {
            "last": last,
            "generated": generated,
            "predicts": last | generated,
            "mask": some,
        }.get(queries, real)

    def links(self, intervention: str) -> list[dict[str, Any]]:
        """What the intervention adds to scores: bias, queries, heads and layers."""
        cut: dict[str, Any] = {"bias": -torch.inf, "queries": "all", "heads": None, "layers": None}
        steer = cut | {"bias": float(torch.tensor(3.0).log())}
        if intervention in ("none", "arm"):
            return []
        if intervention == "steer":
            return [steer]
        if intervention == "nested":
            return [cut | {"queries": "mask", "heads": [1]}, steer, cut | {"layers": [1]}]
        what = intervention.removeprefix("knockout ")
        if what == "heads":
            return [cut | {"heads": [0, 2]}]
        if what == "layers":
            return [cut | {"layers": [1, 2]}]
        return [cut | {"queries": what}]

    @contextmanager
    def changed(self, intervention: str) -> Iterator[None]:
        """Inside the block the model is changed."""
        with ExitStack() as stack:
            if intervention == "arm":
                stack.enter_context(attnscope.arm(self.model, seed=[1, 2]))
            for link in self.links(intervention):
                where = {"keys": self.keys, "heads": link["heads"], "layers": link["layers"]}
                if link["bias"] == -torch.inf:
                    queries = self.some if link["queries"] == "mask" else link["queries"]
                    block = attnscope.knockout(self.model, queries=queries, **where)
                else:
                    block = attnscope.steer(self.model, factor=3.0, **where)
                stack.enter_context(block)
            yield


class Collect(Hook):
    """Keeps queries, keys and the scale of every layer."""

    def __init__(self) -> None:
        self.q: dict[int, list[Tensor]] = {}
        self.k: dict[int, Tensor] = {}
        self.scale = 1.0

    def on_call(self, seen: Any) -> None:
        """One attention call."""
        self.q.setdefault(seen.site.layer, []).append(seen.q.detach().clone())
        self.k[seen.site.layer] = seen.k.detach().clone()
        self.scale = seen.scale


@torch.no_grad()
def dense(case: Case, intervention: str) -> dict[int, Tensor]:
    """A [B, H, Q, K] in float64 by layer, from the queries and keys of a pass of its own."""
    found = Collect()
    with case.changed(intervention), register(sites.find(case.model), found):
        case.run()
    weights = {}
    for layer, parts in found.q.items():
        q, k = torch.cat(parts, 2).double(), found.k[layer].double()
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        x = q @ k.transpose(2, 3) * found.scale
        Q = q.shape[2]
        hidden = ~case.visible(Q)[:, None]
        for link in case.links(intervention):
            if link["layers"] is not None and layer not in link["layers"]:
                continue
            heads = torch.ones(q.shape[1], dtype=torch.bool)
            if link["heads"] is not None:
                heads = torch.isin(torch.arange(q.shape[1]), torch.tensor(link["heads"]))
            keys = torch.nn.functional.pad(case.keys, (0, Q - case.tokens))
            meant = case.chosen(link["queries"], Q)[:, None, :, None] & keys[:, None, None]
            meant = (meant & heads[:, None, None]).to(x.device)
            x = torch.where(meant, x + link["bias"], x)
        x = x.masked_fill(hidden.to(x.device), -torch.inf)
        weights[layer] = x.softmax(-1).nan_to_num(0.0)
    return weights


def statistics(case: Case, A: Tensor, queries: str) -> dict[str, Tensor] | None:
    """Every statistic of A by its definition; None where no query counts. Whether a key could be
    seen is the mask's: a knockout does not change the divisor of `average`."""
    B, _, Q, K = A.shape
    counted = case.chosen(queries, Q)
    if not bool(counted.any(1).all()):
        return None
    counted, visible = counted.to(A.device), case.visible(Q).to(A.device)
    order = torch.arange(Q, device=A.device)
    n = counted.sum(1).double()[:, None]
    A = A * counted[:, None, :, None]
    later = order[:, None] > order
    divisor = (visible & later & counted[..., None]).sum(1).double()
    first = case.real_of(Q).int().argmax(1).to(A.device)
    classes = torch.nn.functional.one_hot(case.classes[:, :K].to(A.device), CLASSES).double()
    rows = A @ classes[:, None]
    return {
        "received": A.sum(2),
        "average": (A * later).sum(2) / divisor[:, None].where(divisor[:, None] > 0, torch.nan),
        "entropy": torch.special.entr(A).sum((2, 3)) / n,
        "mass": rows.sum(2) / n[..., None],
        "first_token": A[torch.arange(B), :, :, first].sum(-1) / n,
        "self_mass": A.diagonal(dim1=2, dim2=3).sum(-1) / n,
        "distance": (A * (order[:, None] - order)).sum((2, 3)) / n,
        "rows": rows,
    }


@torch.no_grad()
def deviation(case: Case, intervention: str, queries: str, wanted: Any, backend: str) -> float:
    """The largest deviation of a statistic of the watched pass from the dense one, relative to the
    largest value of that statistic where this is above 1."""
    keep = queries != "sample:4"
    asked = case.some if queries == "mask" else queries
    watching = attnscope.watch(case.model, queries=asked, keep=keep, backend=backend)
    with case.changed(intervention), watching as scope:
        case.run()
    worst = 0.0
    for layer, A in wanted.items():
        exact = statistics(case, A, queries)
        assert exact is not None
        K = A.shape[3]
        classes = case.classes[:, :K]
        for name, right in exact.items():
            if name == "rows":
                if not keep:
                    continue
                at = scope.query_positions(layer).to(A.device)
                got = scope.rows(layer, classes, CLASSES).double()
                index = at.clamp(min=0)[:, None, :, None].expand_as(got)
                right = right.gather(2, index) * (at >= 0)[:, None, :, None]
                got = got.nan_to_num(0.0)
            elif name == "mass":
                got = scope.mass(layer, classes, CLASSES).double()
            else:
                got = getattr(scope, name)(layer).double()
            assert torch.equal(got.isnan(), right.isnan()), (name, layer)
            off = (got - right).nan_to_num(0.0).abs().max()
            worst = max(worst, float(off / right.nan_to_num(0.0).abs().max().clamp(min=1.0)))
    return worst


def combinations(intervention: str, mask: str) -> list[str]:
    """The `queries` that go with an intervention and a mask, those of `generate` included."""
    late = intervention in ("knockout generated", "knockout predicts")
    # ARM refuses a 4-D mask, because it does not mark padding.
    if (late and mask not in GENERATED) or (intervention, mask) == ("arm", "4-D"):
        return []
    return [q for q in QUERIES if q not in ("generated", "predicts") or mask in GENERATED]


def worst(
    intervention: str, mask: str, queries: list[str], device: str, dtype: torch.dtype, **more: Any
) -> float:
    """The largest deviation over these queries."""
    late = {"generated", "predicts"}
    found = 0.0
    for generates in (False, True):
        of_generation = intervention.split()[-1] in late
        some = [q for q in queries if (q in late or of_generation) == generates]
        if not some:
            continue
        case = Case(mask, more["tokens"], device, dtype, generates)
        wanted = dense(case, intervention)
        for each in some:
            found = max(found, deviation(case, intervention, each, wanted, more["backend"]))
    return found
