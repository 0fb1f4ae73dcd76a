"""The page of what `causes.py` has measured: docs/causes.md and its figures."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from scipy.stats import spearmanr

from attnscope.report.scores import score_table
from attnscope.run.store import open_run
from attnscope.stats.families import false_discovery
from attnscope.stats.means import one_sample

DOCS = Path(__file__).parents[2] / "docs"
HEAD = """# Causes
Made by `tools/docs/causes.py`. Scores are shares of problems answered exactly; differences are \
paired by problem, with 95 % intervals as in [statistics.md](statistics.md).
"""
TASKS = {
    "math-*": "word problems",
    "direct-*": "the number alone",
    "spatial-*": "maps",
    "harness-*/generated": "lm-evaluation-harness, generated",
    "harness-*/chosen": "lm-evaluation-harness, choices",
}
"""Folders of runs to the names of tasks on the page."""
CLASSES = ("hash", "star", "whitespace")
SWEEP = [
    "baseline",
    "filler:10|25|40|55|70",
    "filler:55:/@before-system|between|end|random",
    "arm:c=0.05|0.15|0.25|0.35|0.45",
    "arm:p1=70|80|90|99.5",
    "arm:layer=0|1|2|3|4|5",
]


def page(out: Path) -> None:
    """All that is there, as Markdown; figures go into docs/images."""
    parts = [
        HEAD,
        _section("Scores under conditions", _answers(out)),
        _section("Does the attention on the maps matter for the answer?", _cuts(out)),
        _section("Does mass predict effect?", _heads(out)),
        _section("How much the settings matter", _sweeps(out)),
        _section("lm-evaluation-harness", _harness(out)),
        _section("Checked on these weights", _checks(out)),
    ]
    (DOCS / "causes.md").write_text("\n".join(part for part in parts if part), encoding="utf-8")


def _section(title: str, lines: list[str]) -> str:
    return "\n".join([f"## {title}", *lines, ""]) if lines else ""


def _answers(out: Path) -> list[str]:
    """A row for every task and model. With "the number alone", the whole answer counts."""
    lines = ["| task | model | n | baseline | difference |", "| --- " * 5 + "|"]
    for pattern, task in TASKS.items():
        for file in sorted(out.glob(f"{pattern}/completions.parquet")):
            label = file.relative_to(out).parts[0].partition("-")[2]
            base, *others = score_table(open_run(file.parent)).iter_rows(named=True)
            changes = "; ".join(f"{row['condition']} {_change(row)}" for row in others)
            lines.append(
                f"| {task} | {label} | {base['problems']} | {base['score']:.3f} | {changes} |"
            )
    return lines if len(lines) > 2 else []


def _change(row: dict[str, Any]) -> str:
    reach = "" if row["low"] is None else f" [{row['low']:+.3f}, {row['high']:+.3f}]"
    return f"{row['difference']:+.3f}{reach}"


def _cuts(out: Path) -> list[str]:
    """A row for every model and class, and what they come to."""
    lines = [
        "Attention to one class of the maps' tokens is blocked in every layer and head: the change "
        "of the right answer's log-probability (nats; negative: the answer relied on it), and the "
        "KL divergence of its first token (nats). In brackets the 95 % interval, and after it "
        "what blocking as many random tokens of the rest of the prompt does. Mass is that of the "
        "last prompt token on the class, mean over heads and layers. Means over problems.\n",
        "| model | keys | n | mass | log-probability | as many others | KL | others |",
        "| --- " * 8 + "|",
    ]
    files = sorted(out.glob("cut-*/cut.jsonl"))
    lost, more, count = [], [], 0
    for file in files:
        label = file.parent.name.removeprefix("cut-")
        rows = _rows(file)
        for name in CLASSES:
            pair = [rows.filter(keys=kind) for kind in (name, f"{name}: as many others")]
            log_probs, kl = (
                _means([one[of].to_numpy() for one in pair]) for of in ("logprob", "kl")
            )
            changes = [
                f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"
                for mean, low, high in zip(
                    *(log_probs[of] for of in ("difference", "low", "high")), strict=True
                )
            ]
            lines.append(
                f"| {label} | {name} | {len(pair[0])} | {pair[0]['mass'].mean():.3f} | "
                f"{changes[0]} | {changes[1]} | "
                f"{kl['difference'][0]:.3f} | {kl['difference'][1]:.3f} |"
            )
            count += 1
            where = f"{label}, {name}"
            lost += [where] if log_probs["high"][0] < 0 else []
            between = pair[0].join(pair[1], on="problem", suffix="_other")
            less = _means([(between["logprob"] - between["logprob_other"]).to_numpy()])
            more += [where] if less["high"][0] < 0 else []
    lines += [
        "",
        f"Without this attention the right answer becomes less likely (whole interval below 0) in "
        f"{len(lost)} of {count} cases, and by more than without as many others in {len(more)} "
        f"({'; '.join(more) or 'none'}).",
    ]
    return lines if files else []


def _rows(file: Path) -> pl.DataFrame:
    return pl.DataFrame([row for line in file.read_text().splitlines() for row in json.loads(line)])


def _means(columns: list[Any]) -> dict[str, Any]:
    """Means of columns of the same problems, with intervals and tests against 0."""
    values = np.stack(columns, 1)
    family = np.zeros(values.shape[1], dtype=np.int64)
    tested = one_sample(values)
    low, high = tested.interval()
    p = tested.two_sided()
    columns = {"difference": tested.estimate, "low": low, "high": high, "p": p}
    return columns | {"q": false_discovery(p, family), "n": tested.units}


def _checks(out: Path) -> list[str]:
    files = sorted(out.glob("check-*.json"))
    if not files:
        return []
    first = json.loads(files[0].read_text())
    lines = [
        "Statistics of activations against numpy on the stored activations of all layers (exact "
        "ones relative to themselves; quantiles are promised within 2 % of themselves, the Gini "
        "coefficient within 0.005), and logits under knockout and steering against float64 "
        "attention with −inf or the bias on those entries, as a share of the largest logit.\n",
        "| model | " + " | ".join(first) + " |",
        "| --- " * (1 + len(first)) + "|",
    ]
    for file in files:
        results = json.loads(file.read_text())
        cells = [f"{v:.1e}" if isinstance(v, float) else str(v) for v in results.values()]
        lines.append(f"| {file.stem.removeprefix('check-')} | " + " | ".join(cells) + " |")
    return lines


def _shown(file: Path, name: str, alt: str) -> str:
    images = DOCS / "images"
    shutil.copyfile(file, images / name)
    return f"\n![{alt}](images/{name})\n"


def _heads(out: Path) -> list[str]:
    lines = [
        "One head at a time: the mass that the last prompt token puts on a class of the maps' "
        "tokens, and the change of the right answer's log-probability (nats) when attention to "
        "them is blocked in that head. Means over problems; ρ is Spearman's correlation of "
        "mass and "
        "|effect| over heads.\n",
        "| model | class | problems | heads | ρ | most mass | its effect | largest effect |",
        "| --- " * 8 + "|",
    ]
    files = sorted(out.glob("heads-*/effects.jsonl"))
    for file in files:
        lines += _heads_lines(file.parent.name.removeprefix("heads-"), _rows(file))
    for file in files:
        label = file.parent.name.removeprefix("heads-")
        alt = f"Mass above and effect below, of every head of {label}, on hash, star and whitespace"
        lines.append(_shown(file.parent / "mass-effect.png", f"causes-heads-{label}.png", alt))
    return lines if files else []


def _sweeps(out: Path) -> list[str]:
    lines = []
    for file in sorted(out.glob("sweep-*/figures/sweep.png")):
        label = file.parents[1].name.removeprefix("sweep-")
        asked = " ".join(SWEEP)
        problems = score_table(open_run(file.parents[1]))["problems"][0]
        lines.append(f'`zoo:{label}`, {problems} problems, `--conditions "{asked}"`.')
        alt = f"Score of {label} minus its baseline over the settings of filler and ARM"
        lines.append(_shown(file, f"causes-sweep-{label}.png", alt))
    return lines


def _harness(out: Path) -> list[str]:
    """Completions and choices against those of `attnscope evaluate` and of single passes."""
    lines = []
    folders = sorted(file.parent for file in out.glob("harness-*/check.json"))
    for folder in folders:
        results = json.loads((folder / "check.json").read_text())
        lines.append(
            f"{folder.name.removeprefix('harness-')}: of {results['answers']} generated answers "
            f"{results['same answers']} are those of `attnscope evaluate` on the same problems and "
            f"{results['same scores']} are judged as there."
        )
        if "choices" in results:
            lines[-1] += (
                f" {results['same choices']} of {results['choices']} choices are those of "
                f"one unpadded "
                "forward pass after the other, whose log-likelihoods differ by "
                f"{results['largest difference']:.1e} at most."
            )
    return lines


def _heads_lines(label: str, rows: pl.DataFrame) -> list[str]:
    lines = []
    for name in CLASSES:
        mine = rows.filter(pl.col("class") == f"{name}@maps")
        n = mine["problem"].n_unique()
        mean = mine.group_by("layer", "head").agg(pl.col("mass").mean(), pl.col("effect").mean())
        rho = spearmanr(mean["mass"], mean["effect"].abs()).statistic
        top = mean.sort("mass", descending=True).row(0, named=True)
        far = mean.sort(pl.col("effect").abs(), descending=True).row(0, named=True)
        lines.append(
            f"| {label} | {name} | {n} | {len(mean)} | {rho:.2f} | {top['mass']:.3f} "
            f"(layer {top['layer']}, head {top['head']}) | {top['effect']:+.1e} | "
            f"{far['effect']:+.1e} (layer {far['layer']}, head {far['head']}, mass "
            f"{far['mass']:.3f}) |"
        )
    return lines
