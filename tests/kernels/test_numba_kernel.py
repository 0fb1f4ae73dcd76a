"""The compiled kernel against the reference: taken where it should be, the same on any number of
threads, and never in the way."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

from attnscope.kernels import AttentionSums, KernelRows, installed_kernels, kernel, numba_kernel
from attnscope.kernels.call import SINGLE
from made_rows import assert_same, seen_rows, selections


def plain(rows: KernelRows) -> KernelRows:
    """These rows as a fused operator leaves them, without what is left to torch."""
    biases = {"key_bias": None, "distance_bias": None, "score_biases": ()}
    rows = replace(rows, softcap=None, fpc=None, **biases)
    lse = kernel("reference")(rows).lse.where(seen_rows(rows), 0.0)
    return replace(rows, lse=lse.float())


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[KernelRows]]:
    """The rows that were reduced here."""
    seen: list[KernelRows] = []
    real = numba_kernel.reduce

    def reduce(
        rows: KernelRows, score_bound: torch.Tensor, large: list[list[bool]]
    ) -> AttentionSums:
        seen.append(rows)
        return real(rows, score_bound, large)

    monkeypatch.setattr(numba_kernel, "reduce", reduce)
    return seen


def text(
    tokens: int, *, heads: int = 4, size: float = 1.0, batch: int = 1, D: int = 8
) -> KernelRows:
    """A long text: more than one block of keys, and more than one piece of work for a head."""
    torch.manual_seed(tokens)
    self_key = torch.arange(tokens, dtype=torch.int32).expand(batch, -1).contiguous()
    rows = KernelRows(
        q=torch.randn(batch, heads, tokens, D) * size,
        k=torch.randn(batch, heads // 2, tokens, D),
        scale=0.3,
        start=torch.zeros_like(self_key),
        stop=self_key + 1,
        self_key=self_key,
    )
    return plain(rows)


def test_against_the_reference(taken: list[KernelRows]) -> None:
    @settings(max_examples=150, deadline=None)
    @given(selections(sizes=(2, 2000)))
    def check(rows: KernelRows) -> None:
        rows = plain(rows)
        taken.clear()
        assert_same(kernel("streaming")(rows), kernel("reference")(rows), rows)
        assert bool(taken) == (rows.q.shape[2] > SINGLE)

    check()


@pytest.mark.parametrize("size", [1.0, 60.0], ids=["small scores", "large scores"])
@pytest.mark.parametrize("window", [None, 450], ids=["causal", "windowed"])
def test_long_texts(taken: list[KernelRows], size: float, window: int | None) -> None:
    rows = text(1100, size=size)
    if window is not None:
        rows = plain(replace(rows, start=(rows.self_key - window).clamp(min=0)))
    assert_same(kernel("streaming")(rows), kernel("reference")(rows), rows)
    assert len(taken) == 1


def same_bytes(one: AttentionSums, other: AttentionSums) -> None:
    for each in fields(AttentionSums):
        a, b = getattr(one, each.name), getattr(other, each.name)
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b), each.name


@pytest.fixture(params=["torch's threads", "threads of our own"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All work is shared, by threads of either kind."""
    monkeypatch.setattr(numba_kernel, "WORTH", 0)
    if request.param == "threads of our own":
        monkeypatch.setattr(numba_kernel, "_openmp", lambda: None)


@pytest.mark.usefixtures("threads")
def test_the_same_bytes_on_any_number_of_threads(
    monkeypatch: pytest.MonkeyPatch, taken: list[KernelRows]
) -> None:
    rows = replace(text(700, batch=2), weight=torch.rand(2, 700))
    found = []
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=threads: n)
        found.append(kernel("streaming")(rows))
    same_bytes(found[0], found[1])
    same_bytes(found[0], found[2])
    assert len(taken) == 3


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_what_a_thread_raises_is_raised(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def broken(first: int, *_: object) -> None:
        if first == 0:
            raise error

    monkeypatch.setattr(numba_kernel, "compiled_function", lambda wide: broken)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with pytest.raises(error):
        kernel("streaming")(text(90))


def test_work_that_is_lost_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal may end a thread's turn before it begins."""
    monkeypatch.setattr(numba_kernel, "WORTH", 0)
    monkeypatch.setattr(numba_kernel, "_parallel_for", lambda work, threads: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with pytest.raises(RuntimeError):
        kernel("streaming")(text(90))


def test_the_same_bytes_in_any_batch() -> None:
    rows = text(90, batch=3)
    whole = kernel("streaming")(rows)
    names = ("q", "k", "start", "stop", "self_key", "lse")
    for b in range(3):
        one = replace(rows, **{n: getattr(rows, n)[b : b + 1] for n in names}, cache={})
        alone = kernel("streaming")(one)
        for each in ("received", "received_later", "mass", "entropy", "self_mass", "lse"):
            assert torch.equal(getattr(alone, each)[0], getattr(whole, each)[b])


@pytest.mark.parametrize(
    ("name", "there", "value"),
    [("k", (0, 1, 5), torch.nan), ("q", (0, 2, 40), torch.inf), ("lse", (0, 3, 50), torch.nan)],
)
def test_what_is_not_finite_comes_out(
    taken: list[KernelRows], name: str, there: tuple[int, ...], value: float
) -> None:
    rows = text(60)
    broken = getattr(rows, name).clone()
    broken[there] = value
    got = kernel("streaming")(replace(rows, **{name: broken}))
    heads = {"k": [2, 3], "q": [2], "lse": [3]}[name]
    for head in range(4):
        assert bool(got.received[0, head].isfinite().all()) == (head not in heads)
    assert taken


def test_strides_and_16_bits_are_taken(taken: list[KernelRows]) -> None:
    rows = text(80)
    turned = replace(rows, q=rows.q.transpose(1, 2).contiguous().transpose(1, 2))
    same_bytes(kernel("streaming")(turned), kernel("streaming")(rows))
    half = plain(replace(rows, q=rows.q.bfloat16(), k=rows.k.half()))
    assert_same(kernel("streaming")(half), kernel("reference")(half), half)
    assert len(taken) == 3


LEFT: dict[str, Callable[[KernelRows], KernelRows]] = {
    "soft-cap": lambda rows: replace(rows, softcap=20.0),
    "bias by key": lambda rows: replace(rows, key_bias=torch.zeros(1, 4, 60)),
    "bias by distance": lambda rows: replace(rows, distance_bias=torch.zeros(4, 3)),
    "sampled": lambda rows: replace(rows, fpc=torch.ones(1, 30)),
    "log-sum-exp unknown": lambda rows: replace(rows, lse=None),
    "parts of rows": lambda rows: replace(rows, partial=True),
    "float64": lambda rows: replace(rows, q=rows.q.double(), k=rows.k.double()),
    "gradients": lambda rows: replace(rows, q=rows.q.clone().requires_grad_()),
}


@pytest.mark.parametrize("what", LEFT)
def test_what_is_left_to_torch(what: str) -> None:
    rows = text(60)
    assert numba_kernel.supports(rows, [[False, False]])
    assert not numba_kernel.supports(LEFT[what](rows), [[False, False]])


def test_torch_does_it_all_where_numba_does_not_work(
    monkeypatch: pytest.MonkeyPatch, taken: list[KernelRows]
) -> None:
    rows = text(90)

    def broken(wide: bool) -> None:
        raise ImportError("numba")

    monkeypatch.setattr(numba_kernel, "compiled_function", broken)
    numba_kernel.available.cache_clear()
    try:
        assert_same(kernel("streaming")(rows), kernel("reference")(rows), rows)
    finally:
        numba_kernel.available.cache_clear()
    assert not taken


def test_code_is_made_where_nothing_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Loops:
        @staticmethod
        def build(*, wide: bool, cache: bool) -> str:
            asked.append(cache)
            if cache:
                raise RuntimeError("cannot cache function: no locator available")
            return "code"

    monkeypatch.setattr(numba_kernel, "_jit", lambda: Loops)
    assert numba_kernel.compiled_function.__wrapped__(False) == "code"
    assert asked == [True, False]


WITHOUT_NUMBA = """
import sys
sys.modules["numba"] = None  # an import of numba fails
import torch
from attnscope.kernels import KernelRows, installed_kernels, kernel
q, k, lse = torch.load(sys.argv[1], weights_only=True)
rows = KernelRows(q=q, k=k, scale=0.3, causal=True, lse=lse)
torch.save(kernel("streaming")(rows).received, sys.argv[1])
print(installed_kernels()["kernel on a CPU"])
"""


def test_the_same_numbers_without_numba(taken: list[KernelRows], tmp_path: Path) -> None:
    rows, file = text(90), tmp_path / "rows.pt"
    torch.save([rows.q, rows.k, rows.lse], file)
    command = [sys.executable, "-c", WITHOUT_NUMBA, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    got = torch.load(file, weights_only=True)
    wanted = kernel("streaming")(rows).received
    assert len(taken) == 1
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert not torch.equal(got, wanted)  # another kernel rounds otherwise
    assert "pip install 'attnscope[cpu]'" in done.stdout
    assert installed_kernels()["kernel on a CPU"] == "numba"
