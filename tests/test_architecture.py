"""The house rules a machine can check: public names, the import ladder, short functions, a cheap
import.
"""

import ast
import subprocess
import sys
from pathlib import Path

import attnscope

SOURCE = Path(attnscope.__file__).parent

PUBLIC = [
    "AttnscopeError",
    "Scope",
    "arm",
    "from_tensors",
    "knockout",
    "load",
    "open_run",
    "record",
    "steer",
    "watch",
]

# Bottom to top. A room imports from rooms below it (and from itself), never from above.
LADDER = [
    "errors",
    "memory",
    "paths",
    "yaml_file",
    "tokens",
    "prompts",
    "kernels",
    "measures",
    "spec",
    "run",
    "capture",
    "interventions",
    "zoo",
    "loading",
    "look",
    "experiment",
    "recipes",
    "stats",
    "figures",
    "report",
    "web",
    "evaluate",
    "cli",
]
# Parquet is the wall: what measures never draws, what draws never loads a model.
# The question and the run are on both sides, so they know neither.
RIGHT_OF_THE_WALL = ["spec", "run", "recipes", "stats", "figures", "report"]
# Charts are made in one room; whoever wants one asks it, also those above the wall.
DRAW = {"altair": ["figures"], "vl_convert": ["figures", "web"]}
# Whose modules load torch when they are imported; all others only when something is measured.
LOAD_TORCH = ["kernels", "capture", "interventions", "experiment", "evaluate"]

LONGEST = 60
"""Lines of a function, with its docstring."""
LONGER = {
    "kernels/triton_jit.py: columns": "one Triton program: its tile lives in registers throughout",
}
"""What may be longer, and why."""


def imports_of(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def modules() -> list[tuple[str, Path]]:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if room not in ("__init__", "__main__"):
            found.append((room, path))
    return found


def test_public_names() -> None:
    assert sorted(attnscope.__all__) == sorted(PUBLIC)
    for name in attnscope.__all__:
        assert getattr(attnscope, name).__module__.startswith("attnscope.")


def test_every_room_is_on_the_ladder() -> None:
    assert {room for room, _ in modules()} == set(LADDER)


def test_imports_go_down_the_ladder() -> None:
    wrong = []
    for room, path in modules():
        for name in imports_of(path):
            parts = name.split(".")
            ours = parts[0] == "attnscope" and len(parts) > 1 and parts[1] in LADDER
            if ours and LADDER.index(parts[1]) > LADDER.index(room):
                wrong.append(f"{path.relative_to(SOURCE)} imports {name}")
    assert not wrong


def test_the_wall() -> None:
    wrong = []
    for room, path in modules():
        packages = {name.split(".")[0] for name in imports_of(path)}
        drawn = [name for name, rooms in DRAW.items() if name in packages and room not in rooms]
        loaded = packages & {"torch", "transformers"} if room in RIGHT_OF_THE_WALL else ()
        wrong += [f"{path.relative_to(SOURCE)} imports {name}" for name in (*drawn, *loaded)]
    assert not wrong


def test_only_what_measures_loads_a_model_library() -> None:
    """Also not by way of something else it imports."""
    names = [
        ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")
        for room, path in modules()
        if room not in LOAD_TORCH
    ]
    assert len(names) > 150
    probe = (
        f"import importlib, sys\nfor name in {names}: importlib.import_module(name)\n"
        "print(sorted({'torch', 'transformers'} & {*sys.modules}))"
    )
    out = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def lines_of(function: ast.FunctionDef) -> int:
    """The lines of a function without its docstring, which may be long where it is public."""
    docstring = 0
    if ast.get_docstring(function) is not None:
        first = function.body[0]
        docstring = (first.end_lineno or 0) - first.lineno + 1
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


def test_functions_are_short() -> None:
    long = {
        f"{path.relative_to(SOURCE).as_posix()}: {node.name}"
        for _, path in modules()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and lines_of(node) > LONGEST
    }
    assert long == LONGER.keys()


def test_import_is_cheap() -> None:
    probe = (
        "import sys, attnscope;"
        "print(sorted({'torch', 'altair', 'transformers', 'numba'} & {*sys.modules}))"
    )
    out = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
