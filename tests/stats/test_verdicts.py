"""Verdicts on made values: the word follows from the printed interval and the needed value."""

from collections.abc import Callable
from typing import Any

import numpy as np
import polars as pl
import pytest

from attnscope.spec.claims import make_claims, parse_line
from attnscope.stats.means import one_sample
from attnscope.stats.outcome import word_of
from attnscope.stats.verdicts import WRITTEN, judge, verdict_dict
from made_values import masses, measured

RNG = np.random.default_rng(0)
NOISE = RNG.normal(size=(200, 40))


def verdicts(line: str | list[str], table: pl.DataFrame, **settings: Any) -> list:
    return judge(make_claims({"claim": line}, "test"), table, **settings)


def one(line: str | list[str], table: pl.DataFrame, **settings: Any) -> Any:
    (verdict,) = verdicts(line, table, **settings)
    return verdict


def firsts(value: Callable[..., float], **options: Any) -> pl.DataFrame:
    return measured("first_token", value, conditions=("base",), **options)


def near(middle: float, spread: float = 0.02) -> Callable[..., float]:
    def value(model: str, prompt: int, condition: str, layer: int, head: int) -> float:
        return middle + spread * NOISE[prompt, 10 * layer + head]

    return value


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (1.06, 1.2, "holds"),
        (1.05, 1.2, "holds"),
        (1.01, 1.04, "smaller than claimed"),
        (0.99, 1.04, "smaller than claimed"),
        (0.8, 0.9, "opposite"),
        (1.0, 1.1, "open"),
    ],
)
def test_the_word_follows_from_interval_and_needed_value(low, high, word):
    line = parse_line("mass[model=b] >= 1.05 * mass[model=a]")
    assert word_of(line, low, high, (1.05,), 1.0) == word
    less = parse_line("mass[model=b] <= 0.95 * mass[model=a]")
    assert word_of(less, 2 - high, 2 - low, (0.95,), 1.0) == word


def test_less_by_five_per_cent_is_below_95():
    line = parse_line("mass[model=b] <= 0.95 * mass[model=a]")
    assert word_of(line, 0.951, 0.952, (0.95,), 1.0) == "smaller than claimed"


@pytest.mark.parametrize(
    ("low", "high", "word"), [(0.92, 1.08, "holds"), (0.8, 1.0, "open"), (1.2, 1.3, "opposite")]
)
def test_a_range(low, high, word):
    line = parse_line("lambda within 0.9 .. 1.1 * lambda_ratio")
    assert word_of(line, low, high, (0.9, 1.1), 1.0) == word


def test_a_value_above_a_threshold_holds():
    verdict = one("first_token > 0.3 in layer 0", firsts(near(0.5)))
    assert verdict.verdict == "holds"
    (result,) = verdict.results
    assert result.low > 0.3
    assert (result.needed, result.n, result.kind) == ((0.3,), 12, "value")


def test_a_value_below_a_threshold_is_the_opposite():
    assert one("first_token > 0.3 in layer 0", firsts(near(0.1))).verdict == "opposite"


def test_a_value_at_a_threshold_is_open():
    assert one("first_token > 0.3 in layer 0", firsts(near(0.3))).verdict == "open"


def test_five_prompts_cannot_tell():
    verdict = one("first_token > 0.3 in layer 0", firsts(near(0.5), prompts=range(5)))
    assert verdict.verdict == "cannot tell"


def test_most_heads_are_these_heads():
    """Four of six heads are far beyond, and one prompt decides nothing."""

    def value(model: str, prompt: int, condition: str, layer: int, head: int) -> float:
        at = 3 * layer + head
        return (0.6 if at < 4 else 0.1) + 0.01 * NOISE[prompt, at]

    table = firsts(value, layers=2, heads=3)
    verdict = one("first_token > 0.3 in most heads", table)
    assert verdict.verdict == "holds"
    (result,) = verdict.results
    assert (result.low, result.high, result.rows, result.needed) == (4, 4, 6, (4.0,))
    assert set(result.heads) == {"0.0", "0.1", "0.2", "1.0"}
    assert one("first_token > 0.3 in every head", table).verdict == "smaller than claimed"
    assert one("first_token > 0.7 in at least 1 head", table).verdict == "smaller than claimed"
    assert one("first_token > 0.3 in at least 7 heads", table).verdict == "cannot tell"


def test_an_open_number_of_heads_names_the_heads_so_far():
    """Two heads are far beyond, one a little, and three are not."""

    def value(model: str, prompt: int, condition: str, layer: int, head: int) -> float:
        at = 3 * layer + head
        return (0.6 if at in (1, 3) else 0.1) + 0.2 * (at == 5) + 0.1 * NOISE[prompt, at]

    table = firsts(value, layers=2, heads=3)
    verdict = one("first_token > 0.29 in at least 3 heads", table)
    (result,) = verdict.results
    assert (verdict.verdict, result.low, result.estimate) == ("open", 2, 3)
    assert (set(result.heads[:2]), result.heads[2:]) == ({"0.1", "1.0"}, ("1.2",))
    assert all(name in verdict.reason for name in result.heads)
    (result,) = one("first_token > 0.29 in at least 2 heads", table).results
    assert set(result.heads) == {"0.1", "1.0"}


def test_most_heads_with_few_prompts_say_how_many_are_needed():
    for n, word in ((6, "cannot tell"), (7, "cannot tell"), (8, "holds")):
        verdict = one("first_token > 0.3 in most heads", firsts(near(0.6), prompts=range(n)))
        assert verdict.verdict == word


def test_no_retrieval_in_any_head_is_decided():
    """Heads that are always 0 have no variance, but a share is at most 1."""
    table = measured(
        "retrieval", lambda *_: 0.0, conditions=("base",), prompts=range(100), layers=1, heads=2
    ).with_columns(keys=pl.lit("answer"), queries=pl.lit("generated"))
    line = "retrieval[keys=answer, queries=generated] > 0.1 in at least 1 head"
    assert one(line, table).verdict == "smaller than claimed"


def test_the_ratio_is_that_of_the_printed_means():
    """Mean attention falls although most prompts rise: logarithms would say the opposite."""

    def value(model: str, prompt: int, *_: Any) -> float:
        low = 0.01 * (1 + 0.05 * prompt)
        if prompt % 3:
            return low * (1.5 if model == "tuned" else 1.0)
        return 0.5 * (0.7 if model == "tuned" else 1.0) + 0.01 * NOISE[prompt, 0]

    table = masses(
        value, prompts=range(30), layers=1, heads=1, items=("hash",), conditions=("base",)
    )
    verdict = one("mass[model=b] >= 1.05 * mass[model=a]", table)
    (result,) = verdict.results
    assert result.estimate == pytest.approx(result.after / result.before)
    assert verdict.verdict == "opposite"


def test_without_a_scope_the_mean_over_layers_decides():
    def value(model: str, prompt: int, condition: str, layer: int, head: int) -> float:
        rise = 0.4 if layer == 0 else -0.05
        return 0.3 + rise * (model == "b") + 0.005 * NOISE[prompt, layer + 5 * (model == "b")]

    table = firsts(value, models=("a", "b"), layers=3, heads=1)
    assert one("first_token[model=b] > first_token[model=a]", table).verdict == "holds"
    in_layers = one("first_token[model=b] > first_token[model=a] in most layers", table)
    assert in_layers.verdict == "smaller than claimed"


def test_each_layer_has_its_verdict_at_a_joint_level():
    table = firsts(near(0.5), layers=4)
    found = verdicts("first_token > 0.3 in each layer", table)
    assert [verdict.layer for verdict in found] == [0, 1, 2, 3]
    alone = one("first_token > 0.3 in layer 0", table)
    assert found[0].results[0].low < alone.results[0].low


def test_several_lines_have_to_hold():
    table = firsts(near(0.5))
    both = one(["first_token > 0.3 in layer 0", "first_token > 0.9 in layer 0"], table)
    assert both.verdict == "does not hold"
    assert [result.word for result in both.results] == ["holds", "opposite"]
    unclear = one(["first_token > 0.3 in layer 0", "first_token > 0.5 in layer 0"], table)
    assert unclear.verdict == "open"


def test_the_lines_of_a_claim_hold_together_at_95_per_cent():
    """Each of k lines has the level 1 - 0.05 / k; else one of several true lines would be called
    false in more than 5 % of runs."""
    table = firsts(near(0.305), layers=1, heads=1)
    alone = one("first_token > 0.3", table).results[0]
    for lines in (2, 4):
        results = one(["first_token > 0.3"] * lines, table).results
        sample = np.array([near(0.305)("", prompt, "", 0, 0) for prompt in range(alone.n)])
        low, high = one_sample(sample).interval(1 - 0.05 / lines)
        for result in results:
            assert (result.low, result.high) == (pytest.approx(low[0]), pytest.approx(high[0]))
            assert result.low < alone.low < alone.high < result.high


def test_the_heads_of_several_lines_are_counted_at_their_joint_level():
    """At a joint level, a p between the two levels shows nothing."""
    table = firsts(lambda model, prompt, *_: 0.3 + 0.001 * (prompt + 1), prompts=range(7), heads=1)
    line = "first_token > 0.3 in at least 1 head of layer 0"
    assert one(line, table).verdict == "holds"
    assert one([line] * 4, table).verdict == "cannot tell"  # 7 prompts have p ≥ 1 / 128 each


def test_keys_are_never_taken_from_the_order_of_a_list():
    table = firsts(near(0.5)).with_columns(keys=pl.lit("maps"))
    verdict = one("first_token > 0.3", table)
    assert verdict.verdict == "not measured"
    assert "keys=maps" in verdict.reason
    assert one("first_token[keys=maps] > 0.3", table).verdict == "holds"


def test_a_class_in_two_sets_needs_the_set():
    table = pl.concat(
        [masses(models=("m",), conditions=("base",)).with_columns(classes=pl.lit(c)) for c in "xy"]
    )
    assert one("mass[class=hash] > 0.1", table).verdict == "cannot tell"
    assert one("mass[class=hash, classes=x] > 0.01", table).verdict == "holds"


def test_a_prompt_on_one_side_only_cannot_tell():
    table = firsts(near(0.5), models=("a", "b"))
    table = table.filter((pl.col("model") == "a") | (pl.col("prompt") > 0))
    verdict = one("first_token[model=b] > first_token[model=a]", table)
    assert verdict.verdict == "cannot tell"


def test_prompts_without_a_value_are_named_and_more_than_a_tenth_do_not_count():
    table = firsts(near(0.5), prompts=range(20), layers=1, heads=1)
    some = table.with_columns(value=pl.when(pl.col("prompt") > 0).then("value"))
    verdict = one("first_token > 0.3", some)
    assert verdict.verdict == "holds"
    assert "1 of 20 prompts" in verdict.reason
    many = table.with_columns(value=pl.when(pl.col("prompt") > 4).then("value"))
    assert one("first_token > 0.3", many).verdict == "cannot tell"


def test_a_claim_says_when_it_was_written():
    table, line = firsts(near(0.5)), "first_token > 0.3"
    assert one(line, table).written is None
    assert one(line, table, written={"claim": line}).written == WRITTEN[0]
    assert one(line, table, written={"claim": "first_token > 0.2"}).written == WRITTEN[1]
    assert one(line, table, written={}).written == WRITTEN[2]
    again = one(line, table, written={"claim": line}, earlier=["first-run"]).written
    assert again.startswith(WRITTEN[0])
    assert "first-run" in again


def test_an_unfinished_run_is_in_the_verdict():
    verdict = one("first_token > 0.3", firsts(near(0.5)), unfinished=True)
    assert verdict.notes
    assert verdict.notes[0] in str(verdict)


def test_similar_prompts_are_in_the_verdict():
    def value(model: str, prompt: int, *_: Any) -> float:
        return 0.32 + 0.03 * NOISE[prompt // 4, 0] + 0.002 * NOISE[prompt, 1]

    metadata = pl.DataFrame({"prompt": range(24), "action": [str(n // 4) for n in range(24)]})
    table = firsts(value, prompts=range(24), layers=1, heads=1)
    verdict = one("first_token > 0.3", table, prompts=metadata)
    assert any("action" in note for note in verdict.notes)
    clustered = one("first_token > 0.3", table, prompts=metadata, cluster="action")
    assert clustered.verdict in verdict.notes[0]
    assert not clustered.notes


def test_few_groups_of_similar_prompts_are_no_sample_of_others():
    def value(model: str, prompt: int, *_: Any) -> float:
        return 0.5 + 0.03 * (prompt % 5) + 0.002 * NOISE[prompt, 1]

    metadata = pl.DataFrame({"prompt": range(24), "level": [str(n % 5) for n in range(24)]})
    table = firsts(value, prompts=range(24), layers=1, heads=1)
    (note,) = one("first_token > 0.3", table, prompts=metadata).notes
    assert "5 groups only" in note  # as clusters, five could decide nothing
    assert "cannot tell" not in note


def test_near_unique_labels_are_not_reported():
    labels = [str(n) for n in range(23)] + ["0"]
    metadata = pl.DataFrame({"prompt": range(24), "current": labels})
    table = firsts(near(0.5), prompts=range(24), layers=1, heads=1)
    assert one("first_token > 0.3", table, prompts=metadata).notes == ()


def test_a_measure_that_the_run_lacks_is_not_measured():
    verdict = one("entropy > 1", firsts(near(0.5)))
    assert verdict.verdict == "not measured"
    assert "entropy" in verdict.reason


def test_a_verdict_is_plain_data():
    verdict = one("first_token > 0.3 in most heads", firsts(near(0.5)))
    data = verdict_dict(verdict)
    assert data["lines"][0]["line"] == "first_token > 0.3 in most heads"
    assert data["lines"][0]["word"] == data["verdict"] == "holds"


def test_the_sentence_is_generated_from_the_line():
    table = firsts(near(0.5), models=("x", "y"))
    statement = one("first_token[model=b] >= 1.05 * first_token[model=a]", table).statement
    assert statement == "first_token of y is at least 1.05 times that of x."


def _false_holds(correlation: float, sets: int = 60) -> float:
    """How often "most" holds where 4 of 8 heads are beyond and 4 at the bound."""
    rng = np.random.default_rng(1)
    wrong = 0
    for _ in range(sets):
        shared = rng.normal(size=(30, 1))
        noise = np.sqrt(correlation) * shared + np.sqrt(1 - correlation) * rng.normal(size=(30, 8))
        values = 0.3 + np.repeat([0.3, 0.0], 4) + 0.05 * noise

        def value(m: str, prompt: int, c: str, layer: int, head: int, x: Any = values) -> float:
            return float(x[prompt, head])

        table = firsts(value, prompts=range(30), layers=1, heads=8)
        wrong += one("first_token > 0.3 in most heads", table).verdict == "holds"
    return wrong / sets


@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_similar_heads_do_not_make_a_majority(correlation):
    assert _false_holds(correlation) <= 0.1


def test_a_line_can_name_its_units():
    labels = [str(n // 4) for n in range(24)]
    metadata = pl.DataFrame({"prompt": range(24), "action": labels})
    table = firsts(near(0.5), prompts=range(24))
    (result,) = one("first_token > 0.3 clustered by action", table, prompts=metadata).results
    assert (result.n, result.units) == (24, 6)
    absent = one("first_token > 0.3 clustered by level", table, prompts=metadata)
    assert absent.verdict == "not measured"


def test_heads_without_enough_values_are_named_and_not_called_too_few_prompts():
    def values(lacking: int, heads: tuple[int, ...]) -> Callable[..., float | None]:
        def value(model: str, prompt: int, condition: str, layer: int, head: int) -> float | None:
            return (
                None if prompt < lacking and head in heads else near(0.8)("", prompt, "", 0, head)
            )

        return value

    line, size = "first_token > 0.3 in at least 1 head", {"prompts": range(20), "layers": 1}
    (result,) = one(line, firsts(values(3, (0, 1, 2)), heads=3, **size)).results
    assert result.word == "cannot tell"
    assert "1 in 10" in result.note
    (result,) = one(line, firsts(values(3, (0,)), heads=3, **size)).results
    assert (result.word, result.low) == ("holds", 2)
    assert "1 of 3" in result.note
    (result,) = one(line, firsts(values(2, (0, 1, 2)), heads=3, **size)).results
    assert (result.word, result.low, result.note) == ("holds", 3, "")


def test_parts_with_one_measure_are_numbered_in_the_reason():
    verdict = one(["first_token > 0.3", "first_token > 0.9"], firsts(near(0.6)))
    first, second = verdict.reason.split("; ")
    assert first.startswith("part 1 (first_token) holds: ")
    assert second.startswith("part 2 (first_token) opposite: ")
