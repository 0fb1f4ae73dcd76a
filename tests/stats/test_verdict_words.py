"""The text of a verdict: statement, layer, parts, and rows that do not count."""

from pathlib import Path
from typing import Any

import pytest

from attnscope.errors import InputError
from attnscope.spec.claims import PLACEHOLDERS, Claim, load_claims
from attnscope.stats.outcome import part_names
from attnscope.stats.verdicts import judge
from made_values import masses, measured
from support_errors import raises


def claim(**given: Any) -> Claim:
    return Claim.model_validate(
        {
            "name": "mine",
            "statement": "{model} puts more on {b} than on {a}.",
            "quantity": {"measure": "mass"},
            "comparison": {"over": "item", "pair": ["hash", "star"]},
            "direction": "more",
            **given,
        }
    )


@pytest.mark.parametrize("placeholder", ["a.b", "a:>200000000", "a!r", "0", "", "modle"])
def test_an_unknown_placeholder_is_refused_when_claims_are_loaded(
    tmp_path: Path, placeholder: str
) -> None:
    (tmp_path / "claims.yaml").write_text(
        f"claims:\n  - name: mine\n    statement: 'In {{{placeholder}}}.'\n"
        "    quantity: {measure: entropy}\n    comparison: {threshold: 1}\n    direction: more\n"
    )
    with pytest.raises(InputError) as error:
        load_claims(tmp_path / "claims.yaml")
    assert error.value.code == "unknown-placeholder"
    assert error.value.values == {"value": placeholder, "known": list(PLACEHOLDERS)}


def test_the_old_key_of_a_rule_is_refused_with_the_new_one(tmp_path: Path) -> None:
    (tmp_path / "claims.yaml").write_text(
        "claims:\n  - name: mine\n    statement: Old.\n    rule: {vote: such}\n"
        "    quantity: {measure: entropy}\n    comparison: {threshold: 1}\n    direction: more\n"
    )
    with raises(InputError, "renamed-key", old="vote", new="share_of"):
        load_claims(tmp_path / "claims.yaml")


def test_the_sides_of_a_claim_over_classes_are_the_classes() -> None:
    (verdict,) = judge([claim()], masses(models=("base",)))
    assert verdict.statement == "base puts more on star than on hash."


def test_the_sides_of_a_claim_over_keys_are_the_keys() -> None:
    table = measured("entropy", lambda m, p, *_: 1 + p / 9, keys="document:1").vstack(
        measured("entropy", lambda m, p, *_: 2 + p / 7, keys="document:5")
    )
    over = {"over": "keys", "pair": ["document:5", "document:1"]}
    mine = claim(quantity={"measure": "entropy"}, comparison=over, condition="filler")
    (verdict,) = judge([mine], table)
    assert verdict.statement == "base puts more on document:1 than on document:5."


def test_a_verdict_on_each_layer_names_its_layer() -> None:
    scope = {"layers": "each"}
    verdicts = judge([claim(scope=scope)], masses(models=("base",), layers=3))
    assert [verdict.layer for verdict in verdicts] == [0, 1, 2]
    assert len({verdict.statement for verdict in verdicts}) == 3
    assert all(f"{verdict.layer}" in verdict.statement for verdict in verdicts)
    named = claim(scope=scope, statement="In layer {layer}.")
    verdicts = judge([named], masses(models=("base",), layers=2))
    assert [verdict.statement for verdict in verdicts] == ["In layer 0.", "In layer 1."]


@pytest.mark.parametrize(
    "parts",
    [
        [{"comparison": {"over": "item", "pair": ["hash", other]}} for other in ("star", "word")],
        [
            {"quantity": {"measure": "mass", "item": item}, "comparison": {"threshold": 0.3}}
            for item in ("hash", "star")
        ],
        [
            {"scope": {"layers": [0], "heads": heads}, "comparison": {"threshold": 0.3}}
            for heads in ("mean", "max")
        ],
    ],
)
def test_two_parts_have_different_names_in_the_reason(parts: list[dict[str, Any]]) -> None:
    part = {"quantity": {"measure": "mass"}, "direction": "more"}
    mine = Claim.model_validate(
        {"name": "mine", "statement": "Both.", "parts": [part | own for own in parts]}
    )
    table = masses(models=("base",), layers=1, items=("hash", "star", "word"))
    (verdict,) = judge([mine], table)
    names = [part.partition(": ")[0] for part in verdict.reason.split("; ")]
    assert names == part_names(mine)
    assert len(set(names)) == len(names) == 2


def undefined(prompts: int, without: int) -> Any:
    """Entropy far above 1, undefined in some prompts of every head."""
    return measured(
        "entropy",
        lambda m, p, c, layer, head: None if p < without else 3 + 0.01 * ((7 * p + head) % 10),
        prompts=range(prompts),
    )


@pytest.mark.parametrize(
    ("prompts", "without", "decides"), [(20, 2, True), (21, 2, True), (19, 2, False)]
)
def test_a_tenth_of_all_prompts_may_be_undefined(prompts: int, without: int, decides: bool) -> None:
    mine = claim(
        quantity={"measure": "entropy"},
        comparison={"threshold": 1},
        condition="filler",
        scope={"heads": "each"},
    )
    (verdict,) = judge([mine], undefined(prompts, without))
    assert verdict.figures is not None
    assert verdict.figures["disqualified"].to_list() == [not decides] * 6
    assert verdict.figures["supports"].to_list() == [decides] * 6
    assert (verdict.verdict == "supported") == decides
    # The reason has the number of rows that do not count.
    assert verdict.reason.count("of 6 heads") == (1 if decides else 2)
    assert (f"({without} of {prompts})" in verdict.reason) != decides


def test_a_single_row_with_too_few_values_does_not_count() -> None:
    mine = claim(
        quantity={"measure": "entropy"},
        comparison={"threshold": 1},
        condition="filler",
        scope={"layers": [0]},
    )
    (verdict,) = judge([mine], undefined(19, 2))
    assert verdict.verdict == "undetermined"
    assert "2 of 19 prompts" in verdict.reason
