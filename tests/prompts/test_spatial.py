"""The spatial task, checked by other means: maps read back from the text, cell by cell."""

from hypothesis import given
from hypothesis import strategies as st

from attnscope.errors import InputError
from attnscope.prompts.spatial import ACTIONS, Shape, apply, draw_map, spatial_samples
from support_errors import raises

SIZE = 9


def read_map(text: str) -> tuple[complex, set[complex]]:
    """The centre and the arm cells of a drawn map; columns are real, rows (downwards) imaginary."""
    rows = text.splitlines()
    assert {len(row) for row in rows} == {len(rows)}
    cells = {complex(c, r): mark for r, row in enumerate(rows) for c, mark in enumerate(row)}
    assert set(cells.values()) <= set("#* ")
    (centre,) = (cell for cell, mark in cells.items() if mark == "*")
    return centre, {cell for cell, mark in cells.items() if mark == "#"}


def ring(radius: int) -> list[complex]:
    """The cells at one distance around 0, clockwise on the screen from the top left corner."""
    cells, cell = [], complex(-radius, -radius)
    for step in (1, 1j, -1, -1j):
        for _ in range(2 * radius):
            cells.append(cell)
            cell += step
    return cells


def moved_on(cell: complex, eighths: int) -> complex:
    radius = int(max(abs(cell.real), abs(cell.imag)))
    around = ring(radius)
    return around[(around.index(cell) + eighths * radius) % len(around)]


def check(action: str, before: str, after: str) -> bool:
    """Whether the action leads from one drawn map to the other. Knows nothing of arms."""
    centre, cells = read_map(before)
    around = {cell - centre for cell in cells}
    word, amount = action.split()
    if word == "move":
        centre += {"left": -1, "right": 1, "up": -1j, "down": 1j}[amount]
    elif word == "rotate":
        around = {moved_on(cell, int(amount) // 45) for cell in around}
    elif amount == "x2":
        # Every cell goes twice as far out, and the gap it leaves towards the centre is closed.
        unit = {cell: cell / max(abs(cell.real), abs(cell.imag)) for cell in around}
        around = {2 * cell for cell in around} | {2 * cell - unit[cell] for cell in around}
    else:
        return check("scale x2", after, before)
    return read_map(after) == (centre, {centre + cell for cell in around})


def test_ten_thousand_samples_state_the_right_result() -> None:
    prompts = set()
    for sample in spatial_samples(10_000, seed=1, size=SIZE):
        prompt, metadata = sample.prompt, sample.metadata
        assert prompt.read("current") == metadata["current"]
        assert prompt.read("target") == metadata["target"] == metadata["result"]
        assert sample.answer == metadata["action"]
        assert check(metadata["action"], prompt.read("current"), prompt.read("target"))
        prompts.add(prompt.text)
    assert len(prompts) > 9_000


def test_exactly_one_action_is_right_by_the_other_means_too() -> None:
    for sample in spatial_samples(1000, seed=5):
        current, target = sample.metadata["current"], sample.metadata["target"]
        assert [action for action in ACTIONS if check(action, current, target)] == [sample.answer]


def test_what_does_not_fit_or_halve_is_not_possible() -> None:
    shape = Shape(4, 4, (3, 0, 2, 0, 0, 0, 0, 0))
    assert apply("scale x1/2", shape, SIZE) is None
    assert apply("scale x2", shape, SIZE) is None
    assert apply("move up", Shape(3, 4, shape.arms), SIZE) is None
    assert apply("move down", shape, SIZE) == Shape(5, 4, shape.arms)


def test_drawing_a_map_is_another_task() -> None:
    for sample in spatial_samples(200, seed=2, task="map"):
        assert sample.answer == sample.metadata["result"]
        assert sample.metadata["action"] in sample.prompt.read("question")
        assert check(sample.metadata["action"], sample.prompt.read("current"), sample.answer)
        assert sample.prompt.read("target") not in (sample.answer, sample.metadata["current"])


def test_regions_and_history() -> None:
    histories = set()
    for sample in spatial_samples(50):
        prompt = sample.prompt
        assert prompt.names == ("system", "maps", "target", "current", "history", "question")
        assert prompt.read("target") in prompt.read("maps")
        assert prompt.read("current") in prompt.read("maps")
        histories.add(sample.metadata["history"])
        assert sample.metadata["history"] in prompt.read("history")
        earlier = sample.metadata["history"].split(", ")
        assert earlier == ["none"] or set(earlier) <= set(ACTIONS)
        answered = sample.answered()
        assert answered.read("answer") == sample.answer
        assert answered.text.startswith(prompt.text)
    assert "none" in histories
    assert any("," in history for history in histories)


def test_actions_come_up_equally_often() -> None:
    answers = [sample.answer for sample in spatial_samples(1800)]
    for action in ACTIONS:
        assert 140 < answers.count(action) < 260


def test_seeds_and_splits() -> None:
    first = [sample.prompt.text for sample in spatial_samples(50, seed=1)]
    assert first[:20] == [sample.prompt.text for sample in spatial_samples(20, seed=1)]
    assert first != [sample.prompt.text for sample in spatial_samples(50, seed=2)]
    train, test = (
        {
            (s.metadata["current"], s.metadata["result"])
            for s in spatial_samples(400, seed=9, split=split)
        }
        for split in ("train", "test")
    )
    assert not train & test
    assert len(test) > 300


shapes = st.builds(
    Shape,
    row=st.integers(0, 8),
    column=st.integers(0, 8),
    arms=st.tuples(*[st.integers(0, 4)] * 8),
).filter(lambda shape: shape.fits(SIZE))


@given(shape=shapes)
def test_actions_undo_each_other(shape: Shape) -> None:
    room = 40  # enough that nothing falls off
    shape = Shape(shape.row + 16, shape.column + 16, shape.arms)

    def after(*actions: str) -> Shape | None:
        result: Shape | None = shape
        for action in actions:
            assert result is not None
            result = apply(action, result, room)
        return result

    assert after("rotate 45", "rotate 45") == after("rotate 90")
    assert after("rotate 90", "rotate 90") == after("rotate 180")
    assert after("rotate 180", "rotate 180") == shape
    assert after("scale x2", "scale x1/2") == shape
    assert after("move left", "move right") == shape
    assert after("move up", "move down") == shape


@given(shape=shapes, action=st.sampled_from(ACTIONS))
def test_any_shape_is_changed_as_the_drawing_says(shape: Shape, action: str) -> None:
    result = apply(action, shape, SIZE)
    if result is not None:
        assert check(action, draw_map(shape, SIZE), draw_map(result, SIZE))


def test_bad_input_is_refused() -> None:
    with raises(InputError, "unknown-action", value="rotate 30"):
        apply("rotate 30", Shape(4, 4, (1,) * 8), 9)
    with raises(InputError, "map-too-small", size=3):
        next(spatial_samples(1, size=3))
    with raises(InputError, "unknown-spatial-task", value="plan"):
        next(spatial_samples(1, task="plan"))  # type: ignore[arg-type]
    with raises(InputError, "unknown-split", value="dev"):
        next(spatial_samples(1, split="dev"))  # type: ignore[arg-type]
    with raises(InputError, "bad-count", value=-1):
        next(spatial_samples(-1))
