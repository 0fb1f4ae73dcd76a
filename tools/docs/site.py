"""Pages of the documentation site that are made from the source: `make docs` runs this as a hook.

The command line, the errors, the Python interface and the notebooks become pages when the site is
built, so they are never out of date and no copy of them is committed.
"""

import ast
import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "attnscope"
NOTEBOOKS = ROOT / "docs" / "notebooks"
CENSUS = ROOT / "validation" / "census.md"
REPOSITORY = "https://attnscope.invalid/source"
"""PLACEHOLDER: the project has no public address yet."""
SCOPE = (
    "Results of `watch`. [What every number means](concepts.md) has the definitions.\n\n"
    "::: attnscope.scope.scope.Scope\n    options:\n      members: true\n"
)


DECLARED = (
    "measures.measure.Measure",
    "figures.figure.Figure",
    "figures.shapes.shape.Shape",
    "figures.shapes.lines.Lines",
    "figures.shapes.dots.Dots",
    "figures.shapes.matrix.Matrix",
    "recipes.recipe.Recipe",
)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the recipes, the decisions and the notebooks into the navigation."""
    folders = {"Recipes and papers": "recipes", "Decisions": "decisions"}
    assert config.nav is not None
    for section in config.nav:
        for title, pages in section.items() if isinstance(section, dict) else ():
            for page in pages:
                if isinstance(page, dict) and (folder := folders.get(next(iter(page)))):
                    found = sorted(path.name for path in (ROOT / "docs" / folder).glob("*.md"))
                    first = ["README.md"] if "README.md" in found else []
                    rest = [name for name in found if name not in first]
                    page[next(iter(page))] = [f"{folder}/{name}" for name in first + rest]
            if title == "Tutorials":
                pages[:] = [f"tutorials/{path.stem}.md" for path in sorted(NOTEBOOKS.glob("*"))]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages. `mkdocs` calls this when it has found the files of docs/."""
    pages = {
        "reference/cli.md": command_line(),
        "reference/errors.md": errors(),
        "reference/api.md": interface(),
        "reference/declarations.md": declarations(),
        "reference/model-types.md": CENSUS.read_text(encoding="utf-8"),
        "reference/measures.md": measures(),
        "reference/figures.md": figures(),
        "results-by-machine.md": benchmarks(),
        "reference/scope.md": "# Scope\n" + SCOPE.replace("(concepts.md)", "(../concepts.md)"),
    }
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        pages[f"tutorials/{path.stem}.md"] = notebook(path, files, config)
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to files outside docs/ lead to the source, and those to notebooks to the tutorials."""
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def to_source(link: re.Match[str]) -> str:
        target = (folder / link[1]).resolve()
        if target == CENSUS:
            return f"]({'../' * page.file.src_uri.count('/')}reference/model-types.md)"
        if not target.exists() or target.is_relative_to(ROOT / "docs"):
            return link[0]
        return f"]({REPOSITORY}/{target.relative_to(ROOT)})"

    markdown = re.sub(r"\]\((\.\./[^)#\s]+)\)", to_source, markdown)
    return re.sub(r"\]\(((?:\.\./)*)notebooks/([\w-]+)\.ipynb\)", r"](\1tutorials/\2.md)", markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """The links of llms.txt lead to the pages of the site."""
    path = Path(config.site_dir) / "llms.txt"
    text = re.sub(r"\]\(([\w/-]+?)(/README)?\.md\)", r"](\1/)", path.read_text(encoding="utf-8"))
    path.write_text(text, encoding="utf-8")


def interface() -> str:
    """The public functions, from their docstrings."""
    from attnscope import _MODULES

    names = sorted((name for name in _MODULES if name != "Scope"), key=str.swapcase)
    return "# Python\n" + "".join(f"::: {_MODULES[name]}.{name}\n\n" for name in names)


def declarations() -> str:
    """The fields of a measure, a figure, its shapes and a recipe, from their docstrings."""
    options = (
        "    options:\n      members: true\n      filters: ['!^_']\n      members_order: source\n"
    )
    text = "# Declarations\n[Adding to attnscope](../extending.md) shows how to write them.\n\n"
    return text + "\n".join(f"::: attnscope.{name}\n{options}" for name in DECLARED)


def measures() -> str:
    """Every measure with its definition, from the declarations."""
    from attnscope.measures.table import markdown

    return markdown()


def figures() -> str:
    """Every figure with its options, from the declarations."""
    from attnscope.figures.registry import table

    text = "# Figures\n[Figures and reports](../figures.md) shows how to draw and save them.\n\n"
    return f"{text}{table()}\n"


def benchmarks() -> str:
    """The tables that `benchmarks/run.py` kept, for each machine and version."""
    text = "# Results by machine\nMade from benchmarks/results; `benchmarks/run.py` adds to it.\n"
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        kept = json.loads(path.read_text(encoding="utf-8"))
        text += f"\n## {kept['machine']}, attnscope {kept['attnscope']}\n"
        for name, one in sorted(kept["benchmarks"].items()):
            versions = f"torch {one['torch']}, transformers {one['transformers']}"
            called = " ".join([f"{name}.py", *one["arguments"]])
            load = f", load of the machine {one['load']}" if "load" in one else ""
            text += f"\n`{called}`: {versions}{load}\n\n"
            for table in one["tables"]:
                rows = [table["columns"], ["---"] * len(table["columns"]), *table["rows"]]
                text += "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n\n"
    return text


def command_line() -> str:
    """Every command with its arguments and options, as `--help` has them."""
    from attnscope.cli import app

    group: Any = typer.main.get_command(app)
    text = "# Command line\nEvery command has `--help`. Exit codes: 0, or 2 after a user error.\n\n"
    for name, command in group.commands.items():
        text += f"## attnscope {name}\n{command.help or ''}\n\n"
        rows = [_option(parameter) for parameter in command.params if not _hidden(parameter)]
        if rows:
            text += "| | | default |\n| --- | --- | --- |\n" + "\n".join(rows) + "\n\n"
    return text


def _hidden(parameter: Any) -> bool:
    return bool(getattr(parameter, "hidden", False)) or parameter.name == "help"


def _option(parameter: Any) -> str:
    """A row of the table of options."""
    if parameter.param_type_name == "option":
        name = ", ".join(f"`{option}`" for option in [*parameter.opts, *parameter.secondary_opts])
    else:
        name = f"`{(parameter.name or '').upper()}`"
    text = " ".join((getattr(parameter, "help", None) or "").split()).replace("|", "\\|")
    default = parameter.default
    shown = "" if default in (None, False, ()) or callable(default) else f"`{default}`"
    return f"| {name} | {text} | {shown} |"


def errors() -> str:
    """Every error code with the class and the messages of the errors that have it."""
    found: dict[str, dict[str, set[str]]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for code, kind, message in _raised(ast.parse(path.read_text(encoding="utf-8"))):
            entry = found.setdefault(code, {"classes": set(), "messages": set()})
            entry["classes"].add(kind)
            entry["messages"].add(message)
    text = (
        "# Errors\nEvery error of attnscope is an `AttnscopeError` with a `code` and the wrong "
        "values as attributes. The command line prints the message alone and ends with exit code "
        "2. `…` stands for a value. A section per code:\n\n"
    )
    for code, entry in sorted(found.items()):
        classes = ", ".join(f"`{kind}`" for kind in sorted(entry["classes"]))
        messages = "".join(f"- {message}\n" for message in sorted(entry["messages"]) if message)
        text += f"## {code}\n{classes}\n\n{messages}\n"
    return text


def _raised(tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    """Code, class and message of every error that a module makes with its code as a literal."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from _of_call(node)
        elif isinstance(node, ast.ClassDef):
            for line in node.body:
                for code in _assigned(line):
                    yield code, node.name, _message(ast.Constant(ast.get_docstring(node) or ""))
        elif isinstance(node, ast.FunctionDef):
            for line in ast.walk(node):
                yield from ((code, "AttnscopeError", "") for code in _assigned(line))
        elif isinstance(node, ast.Tuple) and len(node.elts) == 2 and _codes(node.elts[0]):
            first, second = node.elts  # a code and its message, in a table
            if "-" in (code := _codes(first)[0]) and " " in (message := _message(second)):
                yield code, "AttnscopeError", message
        elif isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            for value in (v for k, v in pairs if isinstance(k, ast.Constant) and k.value == "code"):
                yield from ((code, "AttnscopeError", "") for code in _codes(value))


def _of_call(node: ast.Call) -> Iterator[tuple[str, str, str]]:
    name = ast.unparse(node.func).rpartition(".")[2]
    if name == "unknown" and node.args:
        yield f"unknown-{_slug(node.args[0])}", "InputError", ""
    kind = name if name.endswith(("Error", "Warning")) else "AttnscopeError"
    for value in (word.value for word in node.keywords if word.arg == "code"):
        for code in _codes(value):
            yield code, kind, _message(node.args[0]) if node.args else ""
    if name == "bad_path" and len(node.args) > 2:
        for code in _codes(node.args[2]):
            yield code, "ModelError", "… " + _message(node.args[1])


def _assigned(line: ast.AST) -> list[str]:
    """The codes of a line `code = …`."""
    named = isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "code"
    return _codes(line.value) if named and isinstance(line, ast.Assign) else []


def _codes(node: ast.expr) -> list[str]:
    """The codes in an expression: one, or those of `… if … else …`."""
    if isinstance(node, ast.IfExp):
        return _codes(node.body) + _codes(node.orelse)
    literal = isinstance(node, ast.Constant) and isinstance(node.value, str)
    text = str(node.value) if literal and isinstance(node, ast.Constant) else ""
    return [text] if re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", text) else []


def _slug(node: ast.expr) -> str:
    return re.sub(r"\W+", "-", _message(node)).strip("-")


def _message(node: ast.expr) -> str:
    """The text of a message, with … in place of values."""
    if isinstance(node, ast.Constant):
        text = str(node.value)
    elif isinstance(node, ast.JoinedStr):
        text = "".join(
            str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values
        )
    elif isinstance(node, ast.BinOp):
        text = _message(node.left) + _message(node.right)
    else:
        text = "…"
    return " ".join(re.sub(r"([<>*_\[\]`])", r"\\\1", text).split())


def notebook(path: Path, files: Files, config: MkDocsConfig) -> str:
    """A notebook as a page: its text, its code, and what the code printed or drew."""
    text = ""
    for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            text += source.replace(".ipynb)", ".md)") + "\n\n"  # links to the next one
            continue
        text += f"```python\n{source}\n```\n"
        for output in cell["outputs"]:
            text += _output(output, f"tutorials/{path.stem}-{number}.png", files, config)
    return text


def _output(output: dict[str, Any], image: str, files: Files, config: MkDocsConfig) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        content = base64.b64decode("".join(data["image/png"]))
        if files.get_file_from_path(image) is None:
            files.append(File.generated(config, image, content=content))
        return f"![what the code draws]({Path(image).name})\n\n"
    plain = "".join(output.get("text", data.get("text/plain", "")))
    return f"```text\n{plain.rstrip()}\n```\n\n" if plain.strip() else ""
