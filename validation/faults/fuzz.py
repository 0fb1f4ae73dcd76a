"""Thousands of random inputs: whatever comes in, an answer or an error in words.

    python validation/faults/fuzz.py TARGET SECONDS [SEED]

Good inputs are changed at random, in their bytes, lines and words, and read as they would be. What
counts as a failure: any exception but our own, more than ten seconds for one input, and a file
opened for writing anywhere but in the folder of the fuzzing.
"""

from __future__ import annotations

import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from attnscope.errors import AttnscopeError
from results import keep
from structured import branch_changed, query

Draw = random.Random
WORDS = [
    "", " ", "\t", "\n", "\r\n", "\0", "\x1b[2J", "\u202e", "\ufeff", "\ud7ff", "é", "e\u0301",
    "😀", "👩\u200d👩", "ﷺ", "़", "../", "/etc/passwd", "~root/x", "file://x", "$HOME", "%s", "{}",
    "null", "true", "yes", "NaN", ".inf", "-.inf", "1e999", "0x7f", "-1", "0", "9" * 40, "1.5",
    "2026-13-45", "*a", "&a [*a]", "<<: *a", "!!python/object/apply:os.system [id]", "!!binary x",
    "- ", "? ", ": ", "[", "]", "{", "}", "|", ">", "'", '"', "#", "%", "@", "`", "---", "...",
    "all", "last", "after:", "region:question", "sample:3", "sample:-1", "generated", "base",
    "SELECT", "FROM", "values", "JOIN", "GROUP BY", "(", ")", ",", ";", "--", "/*", "'x'",
    "read_csv(",
    "<script>", "</script>", "&amp;", "\\", "\\u0000", "\\ud800", "a" * 300, "[" * 60, "- " * 60,
]  # fmt: skip


def changed(text: str, draw: Draw) -> str:
    """A text with a few things done to it."""
    for _ in range(draw.choice((1, 1, 1, 2, 3, 8))):
        at = draw.randrange(len(text) + 1)
        to = min(len(text), at + draw.choice((0, 1, 1, 2, 5, 20)))
        kind = draw.randrange(7)
        if kind == 0:
            text = text[:at] + draw.choice(WORDS) + text[to:]
        elif kind == 1:
            text = text[:at] + text[to:]
        elif kind == 2:
            text = text[:at] + chr(_point(draw)) + text[to:]
        elif kind == 3:
            text = text[:at] + text[at:to] * draw.choice((2, 3, 50)) + text[to:]
        elif kind == 4:
            lines = text.splitlines(keepends=True) or [""]
            lines.insert(draw.randrange(len(lines) + 1), draw.choice(lines))
            text = "".join(lines)
        elif kind == 5:
            lines = text.splitlines(keepends=True) or [""]
            del lines[draw.randrange(len(lines))]
            text = "".join(lines)
        else:
            words = text.split(" ")
            words[draw.randrange(len(words))] = draw.choice(WORDS)
            text = " ".join(words)
    return text


def _point(draw: Draw) -> int:
    """A character of any kind, surrogates aside."""
    point = draw.choice((draw.randrange(32), draw.randrange(256), draw.randrange(0x110000)))
    return point if not 0xD800 <= point < 0xE000 else 0xFFFD


def as_bytes(text: str, draw: Draw) -> bytes:
    content = bytearray(text.encode("utf-8", "surrogatepass"))
    if draw.random() < 0.15 and content:
        content[draw.randrange(len(content))] = draw.randrange(256)
    return bytes(content)


def experiments(folder: Path) -> Callable[[Draw], Any]:
    from asked import experiment
    from attnscope.spec.experiment_yaml import experiment_to_yaml, read_experiment

    seeds = [
        experiment_to_yaml(experiment()),
        "name: a\nmodels: {q: zoo:math-qwen2}\nprompts: {source: math, count: 4}\n"
        "conditions:\n  base: {}\n  f: {insert: {kind: repeat, unit: /, count: 5}}\n"
        "measures: [mass, lambda]\n",
        "models: [a, b]\nprompts: {source: file, path: p.jsonl, template: '{question}'}\n"
        "classes: [default, mine.yaml]\nqueries: [all, 'after:question']\nmeasures: mass\n",
    ]
    file = folder / "experiment.yaml"

    def one(draw: Draw) -> None:
        file.write_bytes(as_bytes(changed(draw.choice(seeds), draw), draw))
        read_experiment(file)

    return one


def claims(folder: Path) -> Callable[[Draw], Any]:
    from attnscope.recipes import RECIPES
    from attnscope.spec.claims import load_claims

    seeds = [f"claims:\n{recipe.claims_yaml}" for recipe in RECIPES.values()]
    file = folder / "claims.yaml"

    def one(draw: Draw) -> None:
        file.write_bytes(as_bytes(changed(draw.choice(seeds), draw), draw))
        load_claims(file)

    return one


def experiment_trees(folder: Path) -> Callable[[Draw], Any]:
    """Well-formed YAML with a branch changed; what is taken must be written and read the same."""
    import yaml

    from asked import experiment
    from attnscope.spec.experiment import make_experiment
    from attnscope.spec.experiment_yaml import experiment_to_yaml, read_experiment

    replaced = {"base": {}, "other": {"replace": {"region": "question", "new": "4"}}}
    seeds = [
        yaml.safe_load(experiment_to_yaml(experiment())),
        yaml.safe_load(experiment_to_yaml(experiment(conditions=replaced, measures=["mass"]))),
        {"models": {"a": "zoo:math-qwen2", "b": "zoo:chat-llama"}, "measures": ["mass", "rows"],
         "prompts": {"source": "math", "count": 4}, "classes": ["default"],
         "queries": ["all", "after:question"], "generate": {"max_new_tokens": 4}},
    ]  # fmt: skip
    file = folder / "experiment.yaml"

    def one(draw: Draw) -> None:
        tree = branch_changed(draw.choice(seeds), draw)
        if draw.random() < 0.1 or not all(isinstance(key, str) for key in tree):
            file.write_text(yaml.safe_dump(tree, allow_unicode=True), encoding="utf-8")
            read_experiment(file)
        else:
            taken = make_experiment(**tree)
            if draw.random() < 0.1:
                file.write_text(experiment_to_yaml(taken), encoding="utf-8")
                assert read_experiment(file, outside=True).digest == taken.digest

    return one


def claim_trees(folder: Path) -> Callable[[Draw], Any]:
    """The built-in claims with a branch changed."""
    import yaml

    import attnscope.spec.claims as room
    from attnscope.recipes import RECIPES

    written = [claim for r in RECIPES.values() for claim in yaml.safe_load(r.claims_yaml)]
    seeds = [{"claims": [claim]} for claim in written]

    def one(draw: Draw) -> None:
        for claim in room._claims(branch_changed(draw.choice(seeds), draw), "claims.yaml"):
            room.digest(claim)

    return one


def classes(folder: Path) -> Callable[[Draw], Any]:
    from attnscope.tokens.class_sets import load_classes

    seeds = [
        "classes: [digit, {name: other, every: token}]\n",
        "classes:\n  - {name: hash, characters: '#'}\n  - {name: w, pattern: '\\s+', "
        "judgement: contains}\n  - whitespace\n",
        "classes:\n  - {name: a, characters: abc, judgement: fraction}\n  - star\n",
    ]
    file = folder / "classes.yaml"

    def one(draw: Draw) -> None:
        file.write_bytes(as_bytes(changed(draw.choice(seeds), draw), draw))
        load_classes(file)

    return one


def prompts(folder: Path) -> Callable[[Draw], Any]:
    from attnscope.prompts import read

    seeds = {
        "jsonl": '{"question": "What is 1 + 1?", "n": 1}\n{"question": "And?", "m": [{"a": 2}]}\n',
        "csv": 'question,topic\n"What, now?",sums\nAnd 2?,"a\nb"\n',
        "txt": "What is 1 + 1?\n\nAnd 2 + 2?\n",
    }

    def one(draw: Draw) -> None:
        kind = draw.choice(list(seeds))
        file = folder / f"prompts.{kind}"
        file.write_bytes(as_bytes(changed(seeds[kind], draw), draw))
        list(islice(read(file), 100))

    return one


def sql(folder: Path) -> Callable[[Draw], Any]:
    import attnscope
    from asked import experiment
    from attnscope.experiment.execute import run

    run(experiment(prompts={"source": "math", "count": 2, "level": 1}), folder / "run")
    opened = attnscope.open_run(folder / "run")
    seeds = [
        "SELECT layer, head, avg(value) AS v FROM values GROUP BY layer, head ORDER BY v LIMIT 3",
        "SELECT c.condition, sum(v.value) FROM values AS v JOIN cells AS c ON v.prompt = c.prompt "
        "WHERE v.measure = 'mass' GROUP BY c.condition",
        "WITH a AS (SELECT * FROM tokens WHERE position < 3) SELECT text || 'x' FROM a",
        "SHOW TABLES",
        "SELECT count(*) FROM prompts WHERE level = 1 AND prompt IN (SELECT prompt FROM cells)",
    ]
    return lambda draw: opened.sql(changed(draw.choice(seeds), draw))


def sql_grammar(folder: Path) -> Callable[[Draw], Any]:
    import attnscope
    from asked import experiment
    from attnscope.experiment.execute import run

    run(experiment(prompts={"source": "math", "count": 2, "level": 1}), folder / "run")
    opened = attnscope.open_run(folder / "run")
    return lambda draw: opened.sql(query(draw))


def texts(folder: Path) -> Callable[[Draw], Any]:
    """Any Unicode through tokenizers, classes, regions, fillers and alignment."""
    import attnscope.loading as loading
    from attnscope.prompts import Filler, insert
    from attnscope.tokens import DEFAULT, Prompt, Region, tokenize

    names = ("zoo:math-qwen2", "zoo:chat-llama", "zoo:chat-gemma3")
    tokenizers = [loading.load_tokenizer(name) for name in names]

    def one(draw: Draw) -> None:
        tokenizer = draw.choice(tokenizers)
        text = changed("Tom has 12 apples.\n# * How many?", draw)
        a, b = sorted(draw.randrange(len(text) + 1) for _ in range(2))
        tokens = tokenize(Prompt(text, (Region(a, b, "question"),)), tokenizer)
        tokens.mask("question")
        ids = DEFAULT.ids(tokens.ids[None], tokenizer)
        assert ids.shape == (1, len(tokens))
        pair = insert(
            tokens,
            Filler(kind="repeat", unit=draw.choice(WORDS) or "/", count=draw.choice((1, 3))),
            tokenizer,
            position=draw.choice((a, "before:question", "after:question", "random")),
            by=draw.choice(("text", "ids")),
        )
        aligned = pair.base.ids[pair.alignment.base] == pair.variant.ids[pair.alignment.variant]
        assert aligned.all()

    return one


def token_ids(folder: Path) -> Callable[[Draw], Any]:
    """Any numbers as token ids and masks, as `scope.mass` and class sets take them."""
    import attnscope.loading as loading
    from attnscope.tokens import DEFAULT

    tokenizer = loading.load_tokenizer("zoo:math-qwen2")
    known = len(tokenizer)

    def one(draw: Draw) -> None:
        far = draw.choice((0, 0, 0, known, -1, 2**31, -(2**63), 2**63 - 1))
        shape = draw.choice(((3,), (1, 4), (2, 3), (0,), (1, 0), (2, 2, 2), ()))
        kind = draw.choice((np.int64, np.int64, np.int32, np.float64, np.bool_, np.uint8))
        near = np.random.default_rng(draw.randrange(2**32)).integers(0, known, shape)
        ids = (near + np.array(far if draw.random() < 0.5 else 0)).astype(kind)
        mask = None if draw.random() < 0.5 else np.ones(draw.choice((shape, (1,), (2, 2))), int)
        found = DEFAULT.ids(ids, tokenizer, mask)
        assert found.shape == ids.shape
        assert (found < len(DEFAULT)).all()

    return one


def options(folder: Path) -> Callable[[Draw], Any]:
    """The command line itself, as far as a command goes before it measures."""
    import contextlib
    import io

    from asked import experiment
    from attnscope import cli
    from attnscope.experiment.execute import run

    run(experiment(prompts={"source": "math", "count": 8, "level": 1}), folder / "run")
    at = str(folder / "run")
    seeds = [
        ["query", at, "SELECT count(*) FROM cells"],
        ["query", at, "SELECT text FROM tokens LIMIT 2", "--json"],
        ["run", str(folder / "none.yaml"), "--shard", "1/4", "--workers", "2", "--check"],
        ["describe", at, "token-types", "--set", "layer=1"],
        ["merge", at, at, "--out", str(folder / "joined")],
        ["figure", at, "no-such"],
        ["compare", at, "--measure", "mass", "--alpha", "0.1"],
        ["reproduce", "token-typ", "--layers", "0,1", "--heads", "0", "--queries", "last"],
        ["look", "zoo:nothing", "text", "--layer", "0"],
        ["models", "--get", "nothing"],
    ]

    def one(draw: Draw) -> None:
        words = list(draw.choice(seeds))
        at_word = draw.randrange(len(words))
        if words[at_word].startswith(str(folder)):
            words[at_word] += draw.choice(("", "x", "/cells", "/../run"))
        elif words[at_word] != "--out":
            words[at_word] = changed(words[at_word], draw).replace("\0", "")
        if draw.random() < 0.2:
            words.insert(draw.randrange(1, len(words) + 1), draw.choice(WORDS).replace("\0", ""))
        if "reproduce" in words[:1] and "token-types" in words:
            return  # would measure
        sys.argv = ["attnscope", *words]
        out, err = io.StringIO(), io.StringIO()
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                cli.app()
        except SystemExit:
            return

    return one


def short(folder: Path) -> Callable[[Draw], Any]:
    """What stands in a word: queries, shards, numbers, places of fillers."""
    from attnscope.cli.options import numbers
    from attnscope.experiment.shard import parse_shard
    from attnscope.paths import to_path
    from attnscope.spec.queries import parse_queries

    readers: list[tuple[Callable[[str], Any], tuple[str, ...]]] = [
        (parse_queries, ("all", "last", "after:maps", "sample:40", "region:x", "generated")),
        (parse_shard, ("1/4", "12/12", "5/4")),
        (lambda text: numbers("layers", text), ("0,1,2", "7")),
        (lambda text: to_path(Path(text)), ("runs/x", "memory://a/b", "/tmp/x")),
    ]

    def one(draw: Draw) -> None:
        reader, seeds = draw.choice(readers)
        reader(changed(draw.choice(seeds), draw))

    return one


TARGETS = {
    "experiments": experiments, "claims": claims, "classes": classes, "prompts": prompts,
    "sql": sql, "options": options, "texts": texts, "token_ids": token_ids, "short": short,
    "experiment_trees": experiment_trees, "claim_trees": claim_trees, "sql_grammar": sql_grammar,
}  # fmt: skip
CALLED = {
    "experiments": "experiment files", "claims": "claims files", "classes": "class rules",
    "prompts": "prompt files (JSONL, CSV, text)", "sql": "SQL", "options": "command lines",
    "texts": "texts of any Unicode (tokenised, classed, filled, aligned)",
    "token_ids": "token ids and masks", "short": "queries, shards, numbers, directories",
    "experiment_trees": "experiments of good YAML with branches changed",
    "claim_trees": "claims of good YAML with branches changed",
    "sql_grammar": "SQL put together from its grammar",
}  # fmt: skip


def main(target: str, seconds: float, seed: int) -> None:
    folder = Path(tempfile.mkdtemp()).resolve()
    warnings.simplefilter("ignore")
    one = TARGETS[target](folder)
    written: set[str] = set()

    def watch(event: str, given: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(given[0], str) and isinstance(given[1], str):
            inside = Path(given[0]).absolute().is_relative_to(folder)
            if set(given[1]) & set("wax+") and not inside and not given[0].startswith("/dev"):
                written.add(given[0])

    def late(*_: Any) -> None:
        raise TimeoutError("more than ten seconds")

    sys.addaudithook(watch)
    signal.signal(signal.SIGALRM, late)
    failures: Counter[str] = Counter()
    tried = refused = 0
    begun = time.monotonic()
    while time.monotonic() - begun < seconds:
        draw = Draw(f"{seed}:{tried}")
        tried += 1
        signal.alarm(10)
        try:
            one(draw)
        except AttnscopeError:
            refused += 1
        except Exception:
            where = traceback.format_exc().strip().splitlines()
            key = f"{where[-1][:160]} | {where[-3].strip() if len(where) > 2 else ''}"
            if not failures[key]:
                print(f"seed {seed}:{tried - 1}", *where[-9:], sep="\n  ", flush=True)
            failures[key] += 1
        finally:
            signal.alarm(0)
    took = time.monotonic() - begun
    print(f"{target}: {tried:,}, of which {refused:,} refused; {tried / took:,.0f} a second")
    bad = sum(failures.values())
    outcome = "no traceback, no hang, nothing written elsewhere"
    if bad or written:
        outcome = f"WRONG: {bad} failures, files written: {sorted(written)[:3]}"
    keep(f"fuzzing: {CALLED[target]}", tried, outcome, took)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
