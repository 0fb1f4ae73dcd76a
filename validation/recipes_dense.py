"""Every number of the three recipes against dense eager attention, on real models.

    python validation/recipes_dense.py LABEL=FOLDER [LABEL=FOLDER …] [--prompts 1]

The recipes are run as a user runs them, in float32, and every row of their tables is computed once
more from the matrices that transformers' eager attention returns, by the few lines of numpy that
the tests use. Printed are the largest absolute deviations.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import attnscope
from attnscope.experiment.execute import run
from attnscope.recipes.filler_profile import filler_profile
from attnscope.recipes.filler_vs_sentence import filler_vs_sentence
from attnscope.recipes.token_types import token_types

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
from dense_rows import check, eager


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="+", metavar="LABEL=FOLDER")
    parser.add_argument("--prompts", type=int, default=1)
    given = parser.parse_args()
    print("| model | recipe | measure | rows | off by |\n| --- | --- | --- | --- | --- |")
    for model in given.models:
        label, _, folder = model.partition("=")
        for recipe in (token_types, filler_profile, filler_vs_sentence):
            off: dict[str, float] = {}
            with tempfile.TemporaryDirectory() as out:
                run(recipe({label: folder}, prompts=given.prompts), Path(out) / "run")
                rows = check(attnscope.open_run(Path(out) / "run"), {label: folder}, off)
            eager.cache_clear()  # the next run loads the model once more
            for measure, most in off.items():
                count = rows.get(measure, rows.get("profile"))
                print(f"| {label} | {recipe.__name__} | {measure} | {count:,} | {most:.1e} |")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
