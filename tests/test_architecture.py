"""Rules of the code: public names, dependency order of packages, short functions, light imports."""

import ast
import subprocess
import sys
from pathlib import Path

import attnscope

SOURCE = Path(attnscope.__file__).parent

PUBLIC = [
    "AttnscopeError",
    "Scope",
    "TrainerCallback",
    "arm",
    "effect",
    "from_tensors",
    "intercept",
    "knockout",
    "load",
    "open_run",
    "record",
    "steer",
    "watch",
]

# Dependency order. A package imports only itself and packages before it in this list.
ORDER = [
    "errors",
    "memory",
    "paths",
    "yaml_file",
    "tokens",
    "prompts",
    "vision",
    "kernels",
    "measures",
    "spec",
    "run",
    "interception",
    "scope",
    "activations",
    "interventions",
    "zoo",
    "loading",
    "look",
    "recipes",
    "experiment",
    "integrations",
    "stats",
    "figures",
    "report",
    "card",
    "web",
    "evaluate",
    "cli",
]
# Measurement code never imports plotting code, and readers of runs never load a model: they share
# only the Parquet files. `spec` and `run` are used by both sides.
READERS = ["spec", "run", "recipes", "stats", "figures", "report", "card"]
# The only packages that may import these libraries for charts.
CHART_LIBRARIES = {"altair": ["figures"], "vl_convert": ["figures"]}
# Packages whose modules import torch; all others import it only inside functions.
LOAD_TORCH = [
    "kernels",
    "interception",
    "scope",
    "activations",
    "interventions",
    "integrations",
    "experiment",
    "evaluate",
]
# Methods of `Scope` that return a page or a table import the module that makes it.
# `watch` passes an engine of vLLM on to its integration; so does a run with `engine: vllm`.
SHORTCUTS = {
    "experiment/vllm_model.py": ["attnscope.integrations.vllm"],
    "scope/watch.py": ["attnscope.integrations.vllm"],
    "scope/scope.py": [
        "attnscope.look.data_frame",
        "attnscope.look.html_page",
        "attnscope.look.image_page",
        "attnscope.look.map_page",
    ],
}

# Scripts and tests outside the package. A file imports only files of its own folder and of folders
# before it, so benchmarks, validation and tests never import each other in a circle.
ROOT = Path(__file__).parents[1]
SCRIPTS = [
    "tests/support",
    "tools",
    "tools/docs",
    "training",
    "training/shapes_vlm",
    "benchmarks",
    "validation",
    "validation/faults",
    "tests",
]

MAX_LINES = 60
"""Maximum number of lines of a function, with its docstring unless the function is public."""
LONG_FUNCTIONS = {
    "kernels/triton_jit.py: columns": "one Triton program: its tile lives in registers throughout",
    "kernels/triton_paged.py: paged_columns": "one Triton program, as `columns`",
    "kernels/triton_jit.py: attention": "one Triton program, a line over the limit",
    "cli/reproduce.py: reproduce": "the options of a command are its arguments",
    "figures/select.py: select": "its docstring lists the arguments",
    "look/text_measures.py: look": "its docstring lists the arguments",
}
"""Longer functions, with the reason."""


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
        package = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if package not in ("__init__", "__main__"):
            found.append((package, path))
    return found


def test_public_names() -> None:
    assert sorted(attnscope.__all__) == sorted(PUBLIC)
    for name in attnscope.__all__:
        assert getattr(attnscope, name).__module__.startswith("attnscope.")


def test_every_package_is_in_the_order() -> None:
    assert {package for package, _ in modules()} == set(ORDER)


def test_imports_follow_the_order() -> None:
    wrong = []
    for package, path in modules():
        shortcuts = SHORTCUTS.get(path.relative_to(SOURCE).as_posix(), [])
        for name in imports_of(path):
            parts = name.split(".")
            if ".".join(parts[:3]) in shortcuts:
                continue
            ours = parts[0] == "attnscope" and len(parts) > 1 and parts[1] in ORDER
            if ours and ORDER.index(parts[1]) > ORDER.index(package):
                wrong.append(f"{path.relative_to(SOURCE)} imports {name}")
    assert not wrong


def scripts() -> dict[str, list[Path]]:
    """The Python files by their folder in `SCRIPTS`; `tests` has those of all its packages."""
    found: dict[str, list[Path]] = {folder: [] for folder in SCRIPTS}
    for top in sorted({folder.split("/")[0] for folder in SCRIPTS}):
        for path in sorted((ROOT / top).rglob("*.py")):
            folder = path.relative_to(ROOT).parent.as_posix()
            in_a_package = top == "tests" and folder != "tests/support"
            found["tests" if in_a_package else folder].append(path)
    return found


def test_scripts_and_tests_import_in_one_direction() -> None:
    files = scripts()
    homes: dict[str, list[str]] = {}
    for folder, paths in files.items():
        for path in paths:
            homes.setdefault(path.stem, []).append(folder)
    wrong = []
    for at, (folder, paths) in enumerate(files.items()):
        assert paths, folder
        allowed = SCRIPTS[: at + 1]
        for path in paths:
            ours = {name.split(".")[0] for name in imports_of(path)} & homes.keys()
            wrong += [
                f"{path.relative_to(ROOT)} imports {homes[name][0]}/{name}.py"
                for name in sorted(ours)
                if not set(homes[name]) & set(allowed)
            ]
    assert not wrong


def test_readers_of_runs_load_no_model_and_others_draw_no_chart() -> None:
    wrong = []
    for package, path in modules():
        packages = {name.split(".")[0] for name in imports_of(path)}
        drawn = [
            name
            for name, packages_allowed in CHART_LIBRARIES.items()
            if name in packages and package not in packages_allowed
        ]
        loaded = packages & {"torch", "transformers"} if package in READERS else ()
        wrong += [f"{path.relative_to(SOURCE)} imports {name}" for name in (*drawn, *loaded)]
    assert not wrong


def test_only_measuring_packages_import_a_model_library() -> None:
    """Directly or through another import."""
    names = [
        ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")
        for package, path in modules()
        if package not in LOAD_TORCH
    ]
    assert len(names) > 150
    probe = (
        f"import importlib, sys\nfor name in {names}: importlib.import_module(name)\n"
        "print(sorted({'torch', 'transformers'} & {*sys.modules}))"
    )
    out = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def lines_of(function: ast.FunctionDef) -> int:
    """The lines of a function; the docstring of a public one has arguments and an example."""
    docstring = 0
    if function.name in PUBLIC and ast.get_docstring(function) is not None:
        first = function.body[0]
        docstring = (first.end_lineno or 0) - first.lineno + 1
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


def test_functions_are_short() -> None:
    long = {
        f"{path.relative_to(SOURCE).as_posix()}: {node.name}"
        for _, path in modules()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and lines_of(node) > MAX_LINES
    }
    assert long == LONG_FUNCTIONS.keys()


def test_import_is_cheap() -> None:
    probe = (
        "import sys, attnscope;"
        "print(sorted({'torch', 'altair', 'transformers', 'numba'} & {*sys.modules}))"
    )
    out = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
