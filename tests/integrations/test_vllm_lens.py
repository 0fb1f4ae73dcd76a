"""Captures of vllm-lens, compared with a dense softmax; their form is that of version 1.3.0."""

from typing import Any

import pytest
import torch

from attnscope.errors import InputError, ModelError
from attnscope.integrations.vllm_lens import read_capture
from support_errors import raises

L, T, H, G, D = 3, 12, 4, 2, 8
PLAIN = {"scale": 0.3, "logits_soft_cap": 0.0, "sliding_window": [-1, -1]}
SETTINGS: list[dict[str, Any]] = [
    PLAIN | {"alibi_slopes": None, "sinks": None, "use_alibi_sqrt": False},
    PLAIN | {"logits_soft_cap": 1.5, "sliding_window": [4, 0]},
    PLAIN | {"sinks": [0.5, -1.0, 2.0, 0.0]},
]


def capture(**changes: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    whole = {
        "residual_stream": torch.zeros(1),
        "attn_q": torch.randn(L, T, H, D) * 2,
        "attn_k": torch.randn(L, T, G, D),
        "qk_layers": [3, 7, 9],
        "qk_meta": SETTINGS,
    }
    return {name: value for name, value in (whole | changes).items() if value is not None}


def dense(q: torch.Tensor, k: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
    """[H, T, T], by loops over queries and keys that a query sees."""
    left, cap = settings["sliding_window"][0], settings["logits_soft_cap"]
    A = torch.zeros(H, T, T, dtype=torch.float64)
    for h in range(H):
        for i in range(T):
            first = 0 if left < 0 else max(0, i - left)
            x = k[first : i + 1, h // (H // G)].double() @ q[i, h].double() * settings["scale"]
            x = cap * torch.tanh(x / cap) if cap else x
            sinks = settings.get("sinks")
            total = x.exp().sum() + (0.0 if sinks is None else torch.tensor(sinks[h]).exp())
            A[h, i, first : i + 1] = x.exp() / total
    return A


def test_every_layer_against_a_dense_softmax() -> None:
    given = capture()
    scopes = read_capture(given)
    assert list(scopes) == [3, 7, 9]
    for at, scope in enumerate(scopes.values()):
        A = dense(given["attn_q"][at], given["attn_k"][at], SETTINGS[at])
        torch.testing.assert_close(scope.received(0)[0].double(), A.sum(1), rtol=0, atol=1e-5)
        entropy = torch.special.entr(A).sum(-1).mean(1)
        torch.testing.assert_close(scope.entropy(0)[0].double(), entropy, rtol=0, atol=1e-5)
    last = read_capture(given, [7], queries="last")[7]
    A = dense(given["attn_q"][1], given["attn_k"][1], SETTINGS[1])
    torch.testing.assert_close(last.received(0)[0].double(), A[:, -1], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"attn_q": None}, "no-capture"),
        ({"qk_meta": [{}] * L}, "no-capture"),
        ({"attn_k": torch.zeros(L, T - 1, G, D)}, "incomplete-capture"),
        ({"qk_layers": [3]}, "incomplete-capture"),
        ({"attn_q": torch.zeros(T, H, D)}, "wrong-shape"),
    ],
)
def test_what_is_incomplete_is_refused(changes: dict[str, Any], code: str) -> None:
    with raises(InputError, code):
        read_capture(capture(**changes))


def test_what_is_not_known_is_refused() -> None:
    with raises(InputError, "unknown-layer"):
        read_capture(capture(), [4])
    for change in ({"alibi_slopes": [0.1] * H}, {"sliding_window": [4, 2]}):
        with raises(ModelError, "unsupported-attention"):
            read_capture(capture(qk_meta=[PLAIN | change] * L), [3])
