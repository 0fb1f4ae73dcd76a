"""Lines of `src/` by room, now and at an earlier commit, with what is new since set apart.

    python benchmarks/lines.py [--since 3976bef]

Counts Python files as they are, comments and docstrings included. A file stands under what is new
if all it does could not be done then; what was rewritten, corrected or made faster does not.
"""

import argparse
import subprocess
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "attnscope"
BEFORE = {"experiment": "question, run, experiment", "loading.py": "loading"}
"""Rooms that have another name now."""
TOGETHER = {"question": "question, run, experiment", "run": "question, run, experiment"}
TOGETHER["experiment"] = "question, run, experiment"
NEW = {
    "several parts and texts of a generation": ["capture/generation.py"],
    "single queries": [
        *("capture/stored_rows.py", "capture/per_query.py", "kernels/one_row.py"),
        *("measures/by_distance.py", "measures/chosen_keys.py", "measures/largest.py"),
        *("measures/renyi2.py", "stats/head_types.py", "experiment/head_scores.py"),
        *("figures/head_types.py", "cli/heads.py", "measures/by_query.py"),
        *("figures/by_query.py", "figures/series.py", "experiment/unpad.py"),
    ],
    "plain tensors": ["capture/from_tensors.py"],
    "frames and pages of a scope": [
        *(
            "capture/data_frame.py",
            "capture/html_page.py",
            "capture/to_pandas.py",
            "tokens/visible.py",
        ),
    ],
    "activations": [
        *(
            "capture/mlps.py",
            "capture/record.py",
            "capture/log_histogram.py",
            "capture/token_sums.py",
        ),
        *("measures/activations.py", "recipes/filler_activations.py"),
        *("measures/activation_shape.py", "figures/activations.py", "figures/near_zero.py"),
        "figures/variance.py",
    ],
    "passes measured together": ["capture/pending.py", "capture/forward_pass.py"],
    "interventions": [
        *("interventions", "experiment/intervene.py"),
        *("kernels/redistribute.py", "kernels/redistribute_jit.py"),
    ],
    "evaluation": ["evaluate", "cli/evaluate.py"],
    "the live page": ["web", "cli/serve.py"],
    "GGUF, adapters, fetching, checks of weights": [
        *("loading/adapter.py", "loading/cache.py", "loading/fetch.py", "loading/compatibility.py"),
        *("loading/gguf.py", "loading/revision.py", "loading/weights.py", "loading/memory.py"),
        "tokens/template_check.py",
    ],
    "Ray, shards, parts that fail": [
        *("experiment/ray.py", "experiment/shard.py", "experiment/split_retry.py", "run/merge.py"),
        *("experiment/executor.py", "run/locks.py", "cli/run_in_terminal.py"),
    ],
    "answers in experiments": [
        *("experiment/completion.py", "question/generate.py", "measures/completion.py"),
    ],
    "prompts of several kinds, rewritten": [
        *("prompts/conversations.py", "prompts/documents.py", "prompts/needle.py"),
        *("prompts/rewriting.py", "prompts/equations.py"),
    ],
    "recipes of seven more papers": [
        *("recipes/drift.py", "recipes/induction.py", "recipes/injection.py"),
        *("recipes/lookback.py", "recipes/needle.py", "recipes/position.py", "recipes/sinks.py"),
        *("stats/published.py", "stats/focus.py"),
    ],
    "figures of evaluations": ["figures/sweep.py", "figures/mass_effect.py"],
    "six more figures": [
        *(
            "figures/head_map.py",
            "figures/head_strip.py",
            "figures/head_panels.py",
            "figures/steps.py",
        ),
        *("figures/needle_map.py", "figures/order.py"),
    ],
    "clusters, strata, step-down maxima, equivalence": [
        *("stats/units.py", "stats/resampling.py", "stats/permute.py", "stats/correction.py"),
    ],
    "two more measures, and their table": [
        *("measures/effective_tokens.py", "measures/reshaping.py", "measures/table.py"),
    ],
}


def lines_then(commit: str) -> Counter[str]:
    """By room, at a commit."""
    found: Counter[str] = Counter()
    root = SOURCE.relative_to(SOURCE.parents[1]).as_posix()
    listed = ["git", "ls-tree", "-r", "--name-only", commit, root]
    for name in subprocess.check_output(listed, text=True, cwd=SOURCE.parents[1]).split():
        if name.endswith(".py"):
            text = subprocess.check_output(["git", "show", f"{commit}:{name}"], cwd=SOURCE)
            room = name.removeprefix(f"{root}/").split("/")[0]
            room = BEFORE.get(room, room)
            found["(top)" if room.endswith(".py") else room] += text.count(b"\n")
    return found


def lines_now() -> tuple[Counter[str], Counter[str], dict[str, Counter[str]]]:
    """By room: all, what is new, and by what it is for."""
    every: Counter[str] = Counter()
    new: Counter[str] = Counter()
    told: dict[str, Counter[str]] = {}
    of = {place: what for what, places in NEW.items() for place in places}
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        first = name.split("/")[0]
        room = "(top)" if first.endswith(".py") else TOGETHER.get(first, first)
        count = path.read_bytes().count(b"\n")
        every[room] += count
        what = of.get(name, of.get(first))
        if what is not None:
            new[room] += count
            told.setdefault(room, Counter())[what] += count
    return every, new, told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--since", default="3976bef", help="a commit")
    then = lines_then(parser.parse_args().since)
    every, new, told = lines_now()
    print("| room | then | now | of it new since | the rest | what is new |")
    print("| --- | ---: | ---: | ---: | ---: | --- |")
    for room in sorted(every):
        what = "; ".join(f"{name} {count:,}" for name, count in told.get(room, Counter()).items())
        rest = every[room] - new[room]
        print(f"| {room} | {then[room]:,} | {every[room]:,} | {new[room]:,} | {rest:,} | {what} |")
    sums = [sum(counted.values()) for counted in (then, every, new)]
    print(f"| all | {sums[0]:,} | {sums[1]:,} | {sums[2]:,} | {sums[1] - sums[2]:,} | |")


if __name__ == "__main__":
    main()
