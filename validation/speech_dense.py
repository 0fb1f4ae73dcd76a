"""The recipe alignment against dense eager cross-attention, on real weights.

    python validation/speech_dense.py [MODEL] [--prompts 12]

The recipe is run as a user runs it, and every row is computed once more from the matrices that
transformers' eager attention returns, by the loops that the tests use. Printed are the largest
absolute deviations.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

import attnscope
from attnscope.experiment.execute import run
from attnscope.loading import find
from attnscope.recipes import RECIPES

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
from dense_speech import SOUNDS, reference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default="zoo:whisper-tiny-en")
    parser.add_argument("--prompts", type=int, default=12)
    given = parser.parse_args()
    folder = find(given.model).location
    entries = json.loads((SOUNDS / "sentences.json").read_text(encoding="utf-8"))
    off: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as out:
        run(RECIPES["alignment"]({"m": given.model}, prompts=given.prompts), Path(out) / "run")
        values = attnscope.open_run(Path(out) / "run").values.collect()
    for prompt, entry in enumerate(entries[: given.prompts]):
        for (measure, item), expected in reference(folder, entry).items():
            rows = values.filter(measure=measure, prompt=prompt)
            rows = rows if item is None else rows.filter(item=item)
            found = rows.sort("layer", "head")["value"].to_numpy().reshape(expected.shape)
            name = measure if item is None else f"{measure}, {item}"
            off[name] = max(off.get(name, 0.0), float(np.abs(found - expected).max()))
    for name, most in off.items():
        print(f"{name}: off by {most:.1e} at most")


if __name__ == "__main__":
    main()
