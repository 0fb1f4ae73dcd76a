"""Lines of claims: what they mean, and the column of a mistake."""

import re
from pathlib import Path

import pytest
import yaml

from attnscope.errors import InputError
from attnscope.recipes import built_in_claims
from attnscope.spec.claims import (
    Quantity,
    Scope,
    frozen,
    load_claims,
    make_claims,
    parse_line,
    to_yaml,
)


def test_a_value_against_a_number_in_most_heads():
    line = parse_line("first_token > 0.3 in most heads")
    assert line.left == Quantity("first_token")
    assert (line.relation, line.right, line.offset, line.strict) == ("more", None, 0.3, True)
    assert line.scope == Scope("heads", None, "most")


def test_two_models_in_each_layer():
    line = parse_line("mass[keys=maps, model=b] >= 1.05 * mass[keys=maps, model=a] in each layer")
    assert (line.left.keys, line.left.model, line.right.model) == ("maps", "b", "a")
    assert (line.factor, line.offset, line.strict) == (1.05, 0.0, False)
    assert line.scope.kind == "each"


def test_an_offset_and_a_layer_of_each_side():
    line = parse_line("affine_r2[layer=1] <= affine_r2[layer=0] - 0.05")
    assert (line.left.layer, line.right.layer, line.offset) == (1, 0, -0.05)
    assert line.relation == "less"


def test_a_range_of_factors():
    line = parse_line("lambda within 0.9 .. 1.1 * lambda_ratio in most heads of layer 0")
    assert line.bounds == (0.9, 1.1)
    assert line.right.measure == "lambda_ratio"
    assert line.scope == Scope("heads", (0,), "most")


def test_classes_regions_and_percentages():
    line = parse_line("mass[class=hash + star, queries=region:turn:1:assistant, as=lift] > 30 %")
    assert line.left.cls == ("hash", "star")
    assert line.left.queries == "region:turn:1:assistant"
    assert line.left.scale == "lift"
    assert line.offset == pytest.approx(0.3)


def test_layers_may_be_ranges():
    scope = parse_line("first_token > 0.3 in at least 2 heads of layers 0-3, 7").scope
    assert scope == Scope("heads", (0, 1, 2, 3, 7), 2)


def test_spaces_do_not_matter():
    text = parse_line("  first_token   >  0.3 ").text
    assert text == parse_line(text).text


@pytest.mark.parametrize(
    ("text", "column"),
    [
        ("first_token >> 1", 14),
        ("foo > 1", 1),
        ("first_token > foo", 15),
        ("mass[kyes=all] > 1", 6),
        ("mass[keys=all > 1", 18),
        ("mass[keys=all, keys=maps] > 1", 15),
        ("mass[as=weight] > 1", 6),
        ("first_token", 12),
        ("first_token > 0.3 in some heads", 19),
        ("first_token > 0.3 in at least 0 heads", 19),
        ("first_token within 0.9 .. 0.8", 30),
        ("first_token > 0 * entropy", 15),
        ("affine_r2[layer=x] > 1", 11),
        ("affine_r2[layer=1] > 0 in layer 3", 24),
        ("affine_r2 > 0 in most heads", 15),
        ("first_token > 0.3 in layer 3-1", 28),
        ("first_token > 0.3 in layer 0-99999999999", 28),
        ("first_token > 1.2", 15),
        ("entropy > 1e400", 11),
        ("entropy < -1", 11),
        ("first_token[class=digit] > 0.3", 1),
        ("first_token[as=lift] > 0.3", 1),
        ("entropy[to=digit] > 0.3", 1),
        ("flow[class=digit] > 0.3", 1),
        ("flow[to=digit] > 0.3", 1),
        ("class_near_zero[class=digit+word] > 0.3", 1),
        ("class_near_zero > 0.3", 1),
        ("step_mass[class=digit] > 0.3", 1),
        ("average > 0.3", 1),
        ("entropy[model=b] > entropy[model=a] * 1.05", 37),
        ("entropy[model=b] >= 5% + entropy[model=a]", 24),
    ],
)
def test_a_mistake_has_its_column(text, column):
    with pytest.raises(InputError) as error:
        parse_line(text)
    assert error.value.code in ("bad-claim", "unknown-measure")
    assert abs(error.value.values["column"] - column) <= 1


def test_claims_are_read_back(tmp_path: Path):
    claims = make_claims({"one": "first_token > 0.3", "two": ["entropy < 2", "mass > 0"]}, "here")
    (tmp_path / "claims.yaml").write_text(to_yaml(claims))
    assert load_claims(tmp_path / "claims.yaml") == claims
    assert frozen(claims)["two"] == "entropy < 2; mass > 0"


@pytest.mark.parametrize(
    "data", [{}, {"claims": []}, {"claims": {"a": []}}, {"claims": {"a": 1}}, {"a": "mass > 0"}]
)
def test_a_file_without_claims_is_refused(data, tmp_path: Path):
    import yaml

    (tmp_path / "claims.yaml").write_text(yaml.safe_dump(data))
    with pytest.raises(InputError) as error:
        load_claims(tmp_path / "claims.yaml")
    assert error.value.code == "bad-claims-file"


def test_each_layer_is_for_all_lines_or_none():
    with pytest.raises(InputError) as error:
        make_claims({"a": ["first_token > 0.3 in each layer", "entropy < 2"]}, "here")
    assert error.value.code == "bad-claim"


def test_every_built_in_claim_names_its_keys_and_queries():
    for claim in built_in_claims():
        for line in claim.lines:
            assert parse_line(line.text) == line
            assert all(q.keys and q.queries for q in line.quantities)


def test_every_line_of_the_page_is_a_line():
    page = (Path(__file__).parents[2] / "docs" / "claims.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|]*\? \| `(.+?)` \|$", page, flags=re.MULTILINE)
    assert len(rows) >= 6
    blocks = re.findall(r"```yaml\n(.+?)```", page, flags=re.DOTALL)
    lines = [line for block in blocks for line in yaml.safe_load(block)["claims"].values()]
    for line in rows + lines:
        assert parse_line(line).text == line


def test_an_unknown_measure_gets_similar_names():
    for wrong, meant in (("kl", "next_token_kl"), ("entropi", "entropy")):
        with pytest.raises(InputError) as error:
            parse_line(f"{wrong} > 0.1")
        assert error.value.code == "unknown-measure"
        assert meant in str(error.value)
