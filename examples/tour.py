"""A tour of the engine, in a minute, without downloads: `make demo`.

The model is tiny and its weights are random, so its attention means nothing; what is shown is
what can be measured, and that the numbers are right.
"""

import time
from contextlib import nullcontext

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import attnscope


def heading(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}")


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=500,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
    )
    model = Qwen2ForCausalLM(config).eval()
    print("A tiny Qwen2 with random weights: 4 layers, 4 heads, 2 key/value heads.")

    heading("Where does it look? A batch of two prompts, the second padded")
    ids = torch.randint(10, 500, (2, 12))
    real = torch.ones_like(ids)
    real[1, :4] = 0
    with attnscope.watch(model) as scope:
        model(ids, attention_mask=real)
    print(scope)
    print("received by each token, layer 0, mean over heads:")
    for row in scope.received(0).mean(1):
        print("  " + " ".join(f"{value:5.2f}" for value in row.tolist()))
    print("entropy (nats), first-token mass, self mass, distance (tokens), by layer:")
    for layer in scope.layers:
        numbers = (scope.entropy, scope.first_token, scope.self_mass, scope.distance)
        print(f"  {layer}  " + "  ".join(f"{n(layer).mean():.3f}" for n in numbers))

    heading("How much goes to each class of token?")
    classes = ids % 3  # any int tensor; attnscope.tokens makes them from text
    mass, lift = scope.mass(0, classes, 3), scope.lift(0, classes, 3)
    for c in range(3):
        print(f"  class {c}: mass {mass[:, :, c].mean():.3f}, lift {lift[:, :, c].mean():.2f}")

    heading("The same numbers as dense eager attention")
    model.set_attn_implementation("eager")
    dense = model(ids[:1], output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    with attnscope.watch(model) as scope:
        model(ids[:1])
    off = max((scope.received(n) - dense[n].sum(2)).abs().max().item() for n in scope.layers)
    print(f"  largest difference over all layers, heads and tokens: {off:.1e}")

    heading("While it generates")
    with attnscope.watch(model, queries="generated") as scope:
        model.generate(ids[:1], max_new_tokens=6, do_sample=False, pad_token_id=0)
    looked = scope.received(3).mean(1)[0]
    share = looked[:12].sum() / looked.sum()
    print(f"  5 generated tokens looked at {len(looked)} keys; {share:.0%} went to the prompt")

    heading("A long text, without the matrix")
    long = torch.randint(10, 500, (1, 4096))

    def seconds(queries: str | None) -> float:
        begin = time.perf_counter()
        with attnscope.watch(model, queries=queries) if queries else nullcontext():
            model(long, use_cache=False, logits_to_keep=1)
        return time.perf_counter() - begin

    plain = min(seconds(None) for _ in range(3))
    for queries in ("all", "last"):
        ratio = min(seconds(queries) for _ in range(3)) / plain
        print(f"  4096 tokens, queries={queries!r}: {ratio:.2f} times a plain forward pass")
    print("  (attention is most of the work in so narrow a model; see docs/benchmarks.md)")


if __name__ == "__main__":
    main()
