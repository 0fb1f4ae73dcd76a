"""Simulated error rates of the statistics: coverage, false positives, power.

python validation/error_rates.py --sets 4000 --out rates.json
python validation/error_rates.py --write rates.json          into docs/error-rates.md
"""

from __future__ import annotations

import argparse
import json
import zlib
from collections.abc import Callable, Iterator
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t as student

Rows = Iterator[tuple[str, str, str, float, int]]
"""Section, setting, number of prompts, rate, number of sets."""
PAGE = Path(__file__).parents[1] / "docs" / "error-rates.md"
NUMBERS = (6, 12, 30, 100)
E = np.exp
COMPLETE = ("a mean of 0 called",)
"""How the titles begin that the page has with every setting; of the others it has the worst."""
LOW = ("coverage", "power", "most heads, found")
"""How the titles begin where a smaller rate is worse."""
IMPLIED = ("coverage of a mean", "a mean of 0 called, clusters")
"""Not in the table: the test and the interval agree, so one is 100 % minus the other."""


class Build:
    """The statistics, as the simulations call them."""

    def __init__(self) -> None:
        from attnscope.stats import families, means

        self.families, self.means = families, means

    def mean(self, x, cluster=None):
        """Low, high and p of the mean of each column."""
        tested = self.means.one_sample(x, cluster=cluster)
        return (*tested.interval(), tested.two_sided())

    def ratio(self, a, b):
        """Low and high of the ratio of means."""
        return self.means.paired(a, b).ratio()[1:]

    def equal(self, a, b):
        """Whether a difference below 5 % of the first mean is shown."""
        contrast = self.means.paired(a, b)
        return np.maximum(contrast.at(0.95).more(), contrast.at(1.05).less()) <= 0.05

    def any_called(self, x):
        """Whether any column is called, family-wise."""
        contrast = self.means.paired(0 * x, x)
        p = self.families.romano_wolf(contrast, np.zeros(x.shape[1], int))
        return bool((p <= 0.05).any())

    def most(self, x):
        """Whether most columns are called above 0."""
        p = self.means.one_sample(x).more()
        return self.families.at_least(p, 0.025) > x.shape[1] // 2

    def each(self, x):
        """Which columns a claim "in each layer" calls above 0."""
        return self.means.one_sample(x).more() <= 0.025 / x.shape[1]

    def shares(self, a, b):
        """Low, high and p of the difference of two paired shares."""
        from attnscope.stats.proportions import newcombe

        found = newcombe(a, b)
        return found["low"], found["high"], found["p"]


def values(name: str, rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    """Values with mean 0."""
    normal, zeros = rng.normal(size=shape), rng.random(shape)
    made: dict[str, Callable[[], Any]] = {
        "normal": lambda: normal,
        "symmetric, a scale per prompt": lambda: normal * E(rng.normal(size=shape)),
        "t, 2.1 df": lambda: rng.standard_t(2.1, size=shape),
        "U-shaped beta": lambda: rng.beta(0.3, 0.3, size=shape) - 0.5,
        "R² under its ceiling": lambda: 0.1 - rng.beta(1, 9, size=shape),
        "masses beta(.5, 20) × exp": lambda: (
            rng.beta(0.5, 20, size=shape) * rng.exponential(size=shape) - 0.5 / 20.5
        ),
        "gamma, skewness 1": lambda: (rng.gamma(4, size=shape) - 4) / 2,
        "exponential, skewness 2": lambda: rng.exponential(size=shape) - 1,
        "minus exponential": lambda: 1 - rng.exponential(size=shape),
        "gamma ¼, skewness 4": lambda: rng.gamma(0.25, size=shape) - 0.25,
        "Weibull ½": lambda: rng.weibull(0.5, size=shape) - 2,
        "Pareto 2.5": lambda: rng.pareto(2.5, size=shape) - 1 / 1.5,
        "lognormal 1, skewness 6": lambda: E(normal) - E(0.5),
        "lognormal 1.5": lambda: E(1.5 * normal) - E(1.125),
        "two peaks 50:50": lambda: (zeros > 0.5) - 0.5 + 0.05 * normal,
        "minus lognormal 1": lambda: E(0.5) - E(normal),
        "two peaks 85:15": lambda: (zeros > 0.85) - 0.15 + 0.05 * normal,
        "3 % outliers": lambda: normal + 20 * (zeros < 0.03) - 0.6,
        "90 % zeros, tied": lambda: np.where(zeros < 0.1, E(normal), 0) - 0.1 * E(0.5),
        "90 % near zero": lambda: (
            np.where(zeros < 0.1, rng.exponential(size=shape), 3e-4 * zeros) - 0.1 - 1.485e-4
        ),
        "70 % zeros + t3": lambda: np.where(zeros < 0.3, rng.standard_t(3, size=shape), 0.0),
    }
    return made[name]()


ONE = (
    *("normal", "symmetric, a scale per prompt", "t, 2.1 df", "U-shaped beta"),
    *("R² under its ceiling", "masses beta(.5, 20) × exp", "gamma, skewness 1"),
    *("exponential, skewness 2", "Weibull ½", "Pareto 2.5", "lognormal 1, skewness 6"),
    *("lognormal 1.5", "two peaks 50:50", "two peaks 85:15", "3 % outliers", "90 % zeros, tied"),
    *("90 % near zero", "70 % zeros + t3"),
)


def one_mean(build: Any, sets: int, draw: Callable[[str], np.random.Generator]) -> Rows:
    for name in ONE:
        for n in NUMBERS:
            low, high, p = build.mean(values(name, draw(f"{name}{n}"), (n, sets)))
            given = ~np.isnan(low)
            cover = ((low <= 0) & (high >= 0))[given]
            yield "coverage of a mean", name, str(n), float(cover.mean()), int(given.sum())
            yield "no interval", name, str(n), float((~given).mean()), sets
            yield "a mean of 0 called", name, str(n), float((p <= 0.05).mean()), sets


def power(build: Any, sets: int, draw: Callable[[str], np.random.Generator]) -> Rows:
    spreads = {
        "normal": 1.0,
        "R² under its ceiling": sqrt(0.1 * 0.9 / 11),
        "minus exponential": 1.0,
        "minus lognormal 1": sqrt((np.e - 1) * np.e),
    }
    for name, spread in spreads.items():
        for n, shift in ((8, 1.0), (12, 0.8), (30, 0.49), (100, 0.26)):
            x = values(name, draw(f"power{name}{n}"), (n, sets)) + shift * spread
            p = build.mean(x)[2]
            title = "power, effects 1, 0.8, 0.49, 0.26 sd"
            yield title, name, str(n), float((p <= 0.05).mean()), sets
            t = x.mean(0) / (x.std(0, ddof=1) / sqrt(n))
            called = float((t > student.isf(0.025, n - 1)).mean())
            yield f"{title}: Student's t", name, str(n), called, sets


def many_heads(build: Any, sets: int, draw: Callable[[str], np.random.Generator]) -> Rows:
    runs = max(20, sets // 20)
    names = ("normal", "gamma, skewness 1", "exponential, skewness 2", "minus exponential")
    for name in (*names, "gamma ¼, skewness 4", "lognormal 1, skewness 6"):
        for n in NUMBERS[1:]:
            rng = draw(f"heads{name}{n}")
            alone, alike = [], []
            for _ in range(runs):
                x = values(name, rng, (n, 270))
                alone.append(build.any_called(x))
                shared = np.repeat(values(name, rng, (n, 30)), 9, axis=1)
                alike.append(build.any_called(x + shared))
            yield "any of 270 null heads called", name, str(n), float(np.mean(alone)), runs
            where = f"{name}; correlated"  # heads of a layer, by 0.5
            yield "any of 270 null heads called", where, str(n), float(np.mean(alike)), runs


def layers(build: Any, sets: int, draw: Callable[[str], np.random.Generator]) -> Rows:
    runs = max(20, sets // 10)
    for n in NUMBERS[1:]:
        for name, far in (("28 at the bound", 0.0), ("14 at the bound, 14 far below", -2.0)):
            rng, called = draw(f"layers{n}{name}"), 0
            for _ in range(runs):
                x = rng.normal(size=(n, 28)) + np.repeat([0.0, far], 14)
                called += bool(build.each(x)[:14].any())
            yield "any of 28 layers, falsely", name, str(n), called / runs, runs


def _correlated(rng, n: int, heads: int, how: str) -> Any:
    """Noise [n, heads], correlated within layers of 9 heads, or from each head to the next."""
    own = rng.normal(size=(n, heads))
    kind, r = how.split()
    if kind == "ICC":
        shared = np.repeat(rng.normal(size=(n, heads // 9)), 9, axis=1)
        return sqrt(float(r)) * shared + sqrt(1 - float(r)) * own
    for head in range(1, heads):
        own[:, head] = float(r) * own[:, head - 1] + sqrt(1 - float(r) ** 2) * own[:, head]
    return own


def votes(build: Any, sets: int, draw: Callable[[str], np.random.Generator]) -> Rows:
    runs = max(20, sets // 20)
    for how in ("ICC 0", "ICC 0.2", "ICC 0.5", "AR 0.65", "AR 0.9"):
        for n in (12, 30, 100):
            rng = draw(f"votes{how}{n}")
            drawn, half, most = [], [], []
            for _ in range(runs):
                beyond = _correlated(rng, 1, 72, how)[0] > 0  # each head with a chance of a half
                called = build.most(_correlated(rng, n, 72, how) + np.where(beyond, 2.0, -2.0))
                drawn.append(called and beyond.sum() <= 36)  # a claim is about these heads
                noise = _correlated(rng, n, 72, how)
                half.append(build.most(noise + np.repeat([2.0, 0.0], 36)))
                most.append(build.most(noise + np.repeat([1.0, 0.0], [44, 28])))
            what = "most heads, falsely: each of 72 beyond with a chance of a half"
            yield what, how, str(n), float(np.mean(drawn)), runs
            what = "most heads, falsely: 36 of 72 beyond, 36 at the bound"
            yield what, how, str(n), float(np.mean(half)), runs
            what = "most heads, found: 44 of 72 beyond by 1 sd"
            yield what, how, str(n), float(np.mean(most)), runs


def equivalence(build: Any, sets: int, draw: Callable[[str], np.random.Generator]) -> Rows:
    for n in (12, 30, 100):
        rng = draw(f"equal{n}")
        z, w = rng.normal(size=(n, sets)), rng.normal(size=(n, sets))
        worlds = {}
        for spread in (0.5, 1.0):
            a = rng.gamma(1 / spread**2, spread**2, size=(n, sets))
            worlds[f"a varies {100 * spread:.0f} %, difference constant"] = (
                a,
                a + 0.05 + 0.001 * w,
            )
        a = 1 + 0.3 * z
        worlds["a varies 30 %, difference ± 3 %"] = (a, a + 0.05 + 0.03 * w)
        worlds["b = 1.05 a (1 + 0.1 z)"] = (a, 1.05 * a * (1 + 0.1 * w))
        for name, (a, b) in worlds.items():
            yield "5 % apart, called equal", name, str(n), float(build.equal(a, b).mean()), sets


def ratios(build: Any, sets: int, draw: Callable[[str], np.random.Generator]) -> Rows:
    for n in NUMBERS:
        rng = draw(f"ratio{n}")
        shape = (n, sets)
        z, w = rng.normal(size=shape), rng.normal(size=shape)
        worlds = {
            "CV 20 %": (1 + 0.2 * z, 1.3 * (1 + 0.2 * w), 1.3),
            "first CV 100 %": (rng.gamma(1, size=shape), 1.3 * (1 + 0.2 * w), 1.3),
            "exponential / exponential": (
                rng.exponential(size=shape),
                rng.exponential(size=shape),
                1.0,
            ),
            "lognormal 1.5 / same": (E(1.5 * z), E(1.5 * w), 1.0),
            "masses beta(.5, 50)": (
                rng.beta(0.5, 50, size=shape),
                rng.beta(0.5, 50, size=shape),
                1.0,
            ),
        }
        for name, (a, b, true) in worlds.items():
            low, high = build.ratio(a, b)
            given = ~np.isnan(low) & ~np.isnan(high)
            cover = ((low <= true) & (high >= true))[given]
            rate = float(cover.mean()) if given.any() else float("nan")
            yield "coverage of a ratio", name, str(n), rate, int(given.sum())
            yield "no ratio interval", name, str(n), float((~given).mean()), sets


def clusters(build: Any, sets: int, draw: Callable[[str], np.random.Generator]) -> Rows:
    for count in (6, 8, 12, 30):
        rng = draw(f"clusters{count}")
        sizes = {
            "equal, 5": np.full(count, 5),
            "1 to 9": 1 + np.arange(count) * 9 // count,
            "Pareto, at most 60": np.minimum(1 + rng.pareto(1.0, count) * 2, 60).astype(int),
            "one has half": np.array([5 * (count - 1)] + [5] * (count - 1)),
        }
        for name, size in sizes.items():
            label = np.repeat(np.arange(count), size)
            for kind, made in (("normal", rng.normal), ("exponential", _exponential(rng))):
                shared = made(size=(count, sets))[label] * sqrt(0.3)
                x = shared + made(size=(len(label), sets)) * sqrt(0.7)
                low, high, p = build.mean(x, cluster=label)
                cover, where = float(((low <= 0) & (high >= 0)).mean()), f"{name}; {kind}"
                yield "coverage, clusters, ICC 0.3", where, str(count), cover, sets
                called = float((p <= 0.05).mean())
                yield "a mean of 0 called, clusters", where, str(count), called, sets


def _exponential(rng: np.random.Generator) -> Callable[..., Any]:
    return lambda size: rng.exponential(size=size) - 1


def shares(build: Any, sets: int, draw: Callable[[str], np.random.Generator]) -> Rows:
    for n in (20, 40, 100):
        for name, cells in (
            ("0.5, rarely discordant", (0.48, 0.02, 0.02, 0.48)),
            ("0.5, often discordant", (0.35, 0.15, 0.15, 0.35)),
            ("0.9 and 0.85", (0.83, 0.07, 0.02, 0.08)),
        ):
            rng = draw(f"shares{n}{name}")
            cell = rng.choice(4, p=cells, size=(n, sets))
            a, b = (cell <= 1) * 1.0, ((cell == 0) | (cell == 2)) * 1.0
            low, high, p = build.shares(a, b)
            true = cells[2] - cells[1]
            given = ~np.isnan(low)
            cover = float(((low <= true) & (high >= true))[given].mean())
            yield "coverage, paired shares", name, str(n), cover, int(given.sum())
            disagree = ((low > 0) | (high < 0)) != (p <= 0.05)
            yield "interval and p disagree", name, str(n), float(disagree[given].mean()), sets


SECTIONS = (one_mean, power, layers, votes, equivalence, ratios, clusters, shares, many_heads)


def simulate(sections: list[str], sets: int, seed: int) -> dict[str, Any]:
    """The rates of the build that is imported."""
    build = Build()

    def draw(name: str) -> np.random.Generator:
        return np.random.default_rng([seed, zlib.crc32(name.encode())])

    rates: dict[str, Any] = {}
    for section in (one for one in SECTIONS if one.__name__ in sections):
        for title, setting, n, rate, many in section(build, sets, draw):
            rates["|".join((title, setting, n))] = [rate, many]
        print(section.__name__, flush=True)
    return rates


def table(rates: dict[str, Any]) -> str:
    """Markdown: a table for each quantity, in per cent. Rows of zeros are left out."""
    titles = list(dict.fromkeys(key.split("|")[0] for key in rates))
    lines = []
    for title in (title for title in titles if title not in IMPLIED):
        keys = [key.split("|") for key in rates if key.split("|")[0] == title]
        numbers = sorted({key[2] for key in keys}, key=int)
        many = max(rates["|".join(key)][1] for key in keys)
        error = 100 * max(_error(*rates["|".join(key)]) for key in keys)
        what = "clusters" if "clusters" in title else "n"
        rows = []
        for setting in dict.fromkeys(key[1] for key in keys):
            found = [rates.get("|".join((title, setting, n)), [float("nan")])[0] for n in numbers]
            cells = [f"{100 * rate:.1f}" if rate == rate else "–" for rate in found]
            if set(cells) - {"0.0", "–"}:
                rows.append(f"| {setting} | {' | '.join(cells)} |")
        name = f"**{title[0].upper() + title[1:]}**"
        if not rows:
            lines += [f"{name}: never ({many:,} sets of each setting)\n"]
            continue
        name += f", {what} = ({many:,} sets, error ≤ {error:.1f})"
        lines += [f"| {name} | {' | '.join(numbers)} |"]
        lines += ["| --- |" + " --- |" * len(numbers), *rows, ""]
    return "\n".join(lines)


def worst(rates: dict[str, Any]) -> str:
    """Markdown: of each quantity the worst setting for every number of prompts or clusters."""
    titles = list(dict.fromkeys(key.split("|")[0] for key in rates))
    lines = ["| quantity: worst setting | sets | per cent (number of prompts or clusters) |"]
    lines.append("| --- " * 3 + "|")
    for title in (t for t in titles if t not in IMPLIED and not t.startswith(COMPLETE)):
        keys = [key.split("|") for key in rates if key.split("|")[0] == title]
        pick = min if title.startswith(LOW) else max
        cells = []
        for n in sorted({key[2] for key in keys}, key=int):
            found = [rates["|".join(key)][0] for key in keys if key[2] == n]
            rate = pick((rate for rate in found if rate == rate), default=float("nan"))
            cells.append(f"{100 * rate:.1f} ({n})")
        many = max(rates["|".join(key)][1] for key in keys)
        lines.append(f"| {title} | {many:,} | {', '.join(cells)} |")
    return "\n".join([*lines, ""])


def _error(rate: float, many: int) -> float:
    return sqrt(max(rate * (1 - rate), 0) / max(many, 1)) if rate == rate else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    names = [section.__name__ for section in SECTIONS]
    parser.add_argument("--only", nargs="*", default=names, choices=names)
    parser.add_argument("--out", type=Path, help="a file of rates; others in it are kept")
    parser.add_argument("--write", type=Path, metavar="RATES", help="into docs/error-rates.md")
    chosen = parser.parse_args()
    if chosen.write:
        text, mark = PAGE.read_text(), "<!-- simulated rates -->\n"
        rates = json.loads(chosen.write.read_text())
        few = {key: rate for key, rate in rates.items() if key.startswith(COMPLETE)}
        PAGE.write_text(text[: text.index(mark)] + mark + table(few) + "\n" + worst(rates))
        return
    rates = simulate(chosen.only, chosen.sets, chosen.seed)
    if chosen.out:
        old = json.loads(chosen.out.read_text()) if chosen.out.is_file() else {}
        chosen.out.write_text(json.dumps(old | rates, indent=0))
    else:
        print(table(rates))


if __name__ == "__main__":
    main()
