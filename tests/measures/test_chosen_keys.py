"""Keys of single queries where the attention mask has holes: what is hidden is not there."""

import pytest
import torch

import attnscope
from attnscope.measures.chosen_keys import earlier_keys
from families import VOCABULARY, build

N = 14


def test_hidden_tokens_are_no_occurrence_and_follow_nothing() -> None:
    tokens = torch.tensor([[5, 9, 5, -1, 7, 5, -1, 9]]).numpy()
    # The second 5 is followed by 7, and the hidden token between them is not there.
    assert earlier_keys(tokens, after=1).tolist() == [[-1, -1, 1, -1, -1, 4, -1, 2]]
    assert earlier_keys(tokens, after=0).tolist() == [[-1, -1, 0, -1, -1, 2, -1, 1]]


@pytest.mark.parametrize("measure", ["induction", "duplicate_token", "previous_token"])
@torch.no_grad()
def test_a_mask_with_holes_equals_the_text_without_them(measure: str) -> None:
    model = build("llama")
    ids = torch.randint(5, 9, (1, N), generator=torch.Generator().manual_seed(3))
    assert ids.max() < VOCABULARY
    real = torch.ones(1, N).long()
    real[0, [0, 3, 4, 9]] = 0
    places = (real.cumsum(1) - 1).clamp(min=0)
    with attnscope.watch(model, keep=True) as scope:
        model(ids, attention_mask=real, position_ids=places)
    with attnscope.watch(model, keep=True) as alone:
        model(ids[real.bool()][None])
    for layer in range(3):
        torch.testing.assert_close(
            scope.measure(measure, layer), alone.measure(measure, layer), rtol=0, atol=1e-5
        )


@torch.no_grad()
def test_the_duplicate_token_score_is_the_weight_on_the_earlier_occurrence() -> None:
    """Against eager attention: the mean of A[i, j] over the pairs of equal tokens."""
    model = build("llama")
    model.set_attn_implementation("eager")
    ids = torch.tensor([[5, 9, 7, 5, 8, 9, 5]])
    A = model(ids, output_attentions=True).attentions
    with attnscope.watch(model, keep=True) as scope:
        model(ids)
    for layer, weights in enumerate(A):
        expected = (weights[:, :, 3, 0] + weights[:, :, 5, 1] + weights[:, :, 6, 3]) / 3
        torch.testing.assert_close(
            scope.measure("duplicate_token", layer), expected, rtol=0, atol=1e-5
        )
