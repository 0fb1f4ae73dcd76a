"""What an experiment lacks for a claim, before the run."""

import pytest

from attnscope.spec.claims import make_claims
from attnscope.spec.experiment import make_experiment
from attnscope.stats.decidable import lacking

RULES = [{"name": "digit", "pattern": "[0-9]+"}, {"name": "other", "every": "token"}]
EXPERIMENT = make_experiment(
    name="made",
    models={"one": "zoo:math-qwen2", "two": "zoo:math-qwen2"},
    prompts={"source": "math", "count": 6},
    conditions={"base": {}, "slashes": {"insert": {"kind": "repeat", "unit": "/", "count": 4}}},
    queries=["last"],
    keys=["all", "filler"],
    classes={"mine": RULES, "whole": "whole"},
    measures=["mass", "entropy", "lambda", "activations"],
)
LAYERS = {"one": range(6), "two": (0, 3)}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("mass[class=digit, queries=last, keys=filler, condition=slashes] > 0.1", ""),
        ("mass[classes=whole, queries=last] > 0.1 in layer 3", ""),
        ("lambda[queries=last] < 1", ""),
        ("near_zero > 0.1", ""),  # has no queries
        ("entropy[queries=last, model=b] > entropy[queries=last, model=a] in layers 0, 3", ""),
        ("entropy[queries=last, model=one] > 1 in layer 5", ""),
        ("mass[queries=last] > 0.1", "write classes= one of mine, whole"),
        ("mass[class=digits, queries=last] > 0.1", "no class set has digits; known: mine: digit"),
        ("mass[class=digit] > 0.1", "queries=all; known: last"),
        ("mass[class=digit, queries=last, keys=fill] > 0.1", "keys=fill; known: all, filler"),
        ("entropy[queries=last, keys=filler] > 0.1", "keys=filler; known: all"),
        ("entropy[queries=last, model=three] > 0.1", "no model 'three' in this run"),
        ("entropy[queries=last, condition=filler] > 0.1", "no condition 'filler' in this run"),
        ("renyi2[queries=last] > 0.1", "add 'renyi2' to the experiment's measures"),
        ("entropy[queries=last] > 1 in layer 5", "layer 5 is not measured; measured: 0, 3"),
    ],
)
def test_what_is_lacking(line: str, why: str) -> None:
    (claim,) = make_claims({"claim": line}, "test")
    found = lacking(claim, EXPERIMENT, LAYERS)
    assert why in found
    assert bool(why) == bool(found)
