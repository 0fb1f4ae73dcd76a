"""Alignment of two views, without a model."""

from types import SimpleNamespace

from attnscope.web.compare_texts import KEPT, MATCHED, Alignments, align


class Filler(list):
    """A list that counts how often it is read."""

    reads = 0

    def __iter__(self):
        self.reads += 1
        return super().__iter__()


def view(tokens, filler, text):
    request = SimpleNamespace(filler=filler, text=text, chat=False, system=None)
    return SimpleNamespace(
        tokens=tokens,
        prompt=len(tokens),
        filler=Filler(filler),
        aligned_positions=None,
        model="m",
        request=request,
    )


def test_aligning_long_texts_reads_each_filler_once():
    tokens = [str(n) for n in range(2_000)]
    a = view([*tokens, "end"], [], "a")
    b = view([*tokens, "/", "/", "end"], [2_000, 2_001], "b")
    aligned = align(a, b)
    assert len(aligned.a) == 2_001
    assert aligned.b[-1] == 2_002
    assert (aligned.unaligned_a, aligned.unaligned_b) == (0, 0)
    assert a.filler.reads + b.filler.reads <= 4


def test_only_the_last_alignments_are_kept():
    views = [view(["a", str(n)], [], str(n)) for n in range(KEPT + 2)]
    for n, one in enumerate(views):
        one.id = str(n)
    alignments = Alignments()
    first = alignments.of(views[0], views[1])
    assert alignments.of(views[0], views[1]) is first
    for one in views[2:]:
        alignments.of(views[0], one)
    assert alignments.of(views[0], views[1]) is not first


def test_long_texts_are_aligned_between_runs_that_both_have_once():
    """More tokens than are matched one by one: replaced and inserted tokens are left out."""
    tokens = [str(n) for n in range(2 * MATCHED)]
    changed = ["first", *("x" if n % 50 == 0 else t for n, t in enumerate(tokens)), "last"]
    changed[4_000:4_000] = ["y"] * 3
    aligned = align(view(tokens, [], "a"), view(changed, [], "b"))
    assert len(aligned.a) == len(tokens) - len(tokens[::50])
    assert all(tokens[m] == changed[n] for m, n in zip(aligned.a, aligned.b, strict=True))
    assert (aligned.b[1:] > aligned.b[:-1]).all()
    nothing = align(view(tokens, [], "a"), view(["z"] * len(tokens), [], "b"))
    assert len(nothing.a) == 0
