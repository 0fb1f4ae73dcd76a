"""Keys that are kept by reference, and written over by someone else."""

import copy

import pytest
import torch

from attnscope.errors import ScopeError
from families import VOCABULARY, build
from pending_share import watching

IDS = torch.randint(5, VOCABULARY, (1, 10), generator=torch.Generator().manual_seed(0))
CLASSES = torch.arange(10)[None] % 2


@pytest.mark.parametrize("then", ["nothing", "a pass"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_keys_edited_in_place(mode: type, then: str) -> None:
    """Rows are those of the keys as they were, or an error."""
    model = build("llama")
    with mode(), watching(model, keep=True, share=0) as scope:
        cache = model(IDS[:, :6], use_cache=True).past_key_values
        wanted = scope.query_entropy(1)
        cache.layers[1].keys[:, :, 2] *= 3
        if then == "a pass":
            model(IDS[:, 6:], past_key_values=cache)
        try:
            found = scope.query_entropy(1)[:, :, :6]
        except ScopeError as error:
            assert error.code == "keys-changed"  # noqa: PT017
        else:
            torch.testing.assert_close(found, wanted)
        assert torch.isfinite(scope.received(1)).all()
        scope.query_entropy(0)  # whose keys are as they were


@torch.no_grad()
def test_a_copy_of_a_scope_can_be_read() -> None:
    model = build("llama")
    with watching(model, keep=True, share=0) as scope:
        model(IDS)
    keys = scope._stored_rows(1)[0].keys
    keys.tensor.mul_(1)  # written to, and then kept anew
    keys.replace_tensor(keys.tensor)
    assert torch.equal(copy.deepcopy(scope).query_entropy(1), scope.query_entropy(1))


@torch.no_grad()
def test_keys_left_alone() -> None:
    model = build("llama")
    with watching(model, keep=True, share=0) as whole:
        model(IDS)
    with watching(model, keep=True, share=0) as scope:
        cache = model(IDS[:, :6], use_cache=True).past_key_values
        for n in range(6, 10):
            model(IDS[:, n : n + 1], past_key_values=cache)
    torch.testing.assert_close(
        scope.rows(1, CLASSES, 2), whole.rows(1, CLASSES, 2), rtol=0, atol=1e-5
    )
