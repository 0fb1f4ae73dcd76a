"""The effect of a knockout, against one forward pass for every head."""

import pytest
import torch

import attnscope
from attnscope.errors import InputError
from attnscope.interventions.effect import effect
from families import VOCABULARY, build
from support_errors import raises


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
@torch.no_grad()
def test_equals_one_knockout_after_another(name: str) -> None:
    model = build(name)
    ids, real = torch.randint(5, VOCABULARY, (2, 11)), torch.ones(2, 11, dtype=torch.long)
    real[1, 9:] = 0
    inputs = {"input_ids": ids, "attention_mask": real}
    keys = torch.isin(torch.arange(11), torch.tensor([2, 5, 6])).expand(2, -1)
    answer = torch.zeros(2, 11, dtype=torch.bool)
    answer[0, 8:] = answer[1, 7:9] = True
    found = effect(model, inputs, keys=keys, answer=answer, at_once=6, layers=[0, 2])
    whole = effect(model, inputs, keys=keys, layers=[2], together=True)
    plain = model(**inputs).logits.double().log_softmax(-1)
    assert found.layers == [0, 2]
    assert found.logprob is not None
    for at, layer in enumerate([0, 2]):
        for head in range(4):
            with attnscope.knockout(model, keys=keys, layers=layer, heads=head):
                other = model(**inputs).logits.double().log_softmax(-1)
            for b, first in enumerate([8, 7]):
                there = answer[b].nonzero()[:, 0]
                more = (other - plain)[b, there - 1, ids[b, there]].sum()
                kl = (plain.exp() * (plain - other))[b, first - 1].sum()
                assert abs(found.logprob[b, at, head] - more) < 1e-5
                assert abs(found.kl[b, at, head] - kl) < 1e-5
    assert found.kl.max() > 1e-3
    with attnscope.knockout(model, keys=keys, layers=2):
        other = model(**inputs).logits.double().log_softmax(-1)
    for b, last in enumerate([10, 8]):
        kl = (plain.exp() * (plain - other))[b, last].sum()
        assert abs(whole.kl[b, 0, 0] - kl) < 1e-5
    assert whole.logprob is None


def test_an_answer_has_something_before_it() -> None:
    model, ids = build("qwen2"), torch.randint(5, VOCABULARY, (2, 5))
    keys = torch.arange(5).expand(2, -1) == 2
    answer = torch.zeros(2, 5, dtype=torch.bool)
    answer[0, 3] = True
    with raises(InputError, "no-answer", sequence=1):
        effect(model, {"input_ids": ids}, keys=keys, answer=answer)
    with raises(InputError, "wrong-shape", argument="answer", got="bool [2, 4]"):
        effect(model, {"input_ids": ids}, keys=keys, answer=answer[:, 1:])
