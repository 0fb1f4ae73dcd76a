"""The command line: it parses options, calls the library and prints results.

A command is a function in one of these files, listed here in the order of the help. For a user
error (`AttnscopeError`) it prints the message alone and exits with code 2. A traceback means a bug.
"""

import io
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from attnscope.cli.card import card
from attnscope.cli.compare import compare
from attnscope.cli.doctor import doctor
from attnscope.cli.evaluate import evaluate
from attnscope.cli.figure import describe, figure, report
from attnscope.cli.heads import heads
from attnscope.cli.look import look, models
from attnscope.cli.reproduce import reproduce
from attnscope.cli.run import merge, query, run
from attnscope.cli.serve import serve
from attnscope.errors import AttnscopeError, InputError

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="Where does a language model's attention go?",
)


def _print_version(version: bool) -> None:
    if version:
        from attnscope import __version__

        print(f"attnscope {__version__}")
        raise typer.Exit


@app.callback()
def _commands(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Where does a language model's attention go?"""


class _Running(TyperCommand):
    """A command whose help ends with the measures."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from attnscope.measures.table import lines

        self.epilog = "Measures:\n\n" + "\n\n".join(lines())
        super().format_help(ctx, formatter)


class _Run(_Running):
    """`run`, where `--ray` needs no address."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse `--ray` without an address as `--ray=local`."""
        following = [*args[1:], "-"]
        bare = [
            word == "--ray" and after.startswith("-")
            for word, after in zip(args, following, strict=False)
        ]
        full = ["--ray=local" if alone else word for word, alone in zip(args, bare, strict=True)]
        return super().parse_args(ctx, full)


class _Query(TyperCommand):
    """`query`, whose help ends with the tables."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from attnscope.run.schemas import QUERIED

        lines = [f"{name}: {', '.join(schema)}" for name, schema in QUERIED.items()]
        lines.append("prompts: prompt, and one column per prompt metadata field")
        self.epilog = "Tables and their columns:\n\n" + "\n\n".join(lines)
        super().format_help(ctx, formatter)


class _Reproduce(TyperCommand):
    """`reproduce`, whose help ends with the recipes."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from attnscope.recipes import BUNDLED, RECIPES

        lines = [f"{name}: {recipe.description}" for name, recipe in RECIPES.items()]
        self.epilog = (
            "Recipes:\n\n" + "\n\n".join(lines) + f"\n\n{', '.join(BUNDLED)} run on the bundled "
            "tiny models, or with --real on SmolLM2; alignment runs on Whisper tiny.en, image-… on "
            "zoo:shapes-vlm (with attnscope[vision]), the others on SmolLM2."
        )
        super().format_help(ctx, formatter)


_OWN_HELP: dict[Any, type[TyperCommand]] = {run: _Run, query: _Query, reproduce: _Reproduce}

for command in (
    reproduce,
    run,
    merge,
    figure,
    describe,
    report,
    compare,
    query,
    look,
    heads,
    card,
    serve,
    evaluate,
    models,
    doctor,
):
    app.command(cls=_OWN_HELP.get(command, TyperCommand))(command)


_warned: set[str] = set()


def _warn(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
    """Print a warning in one line, once."""
    line = f"warning: {message}"
    if line not in _warned:
        _warned.add(line)
        print(line, file=sys.stderr)


def _check_words(words: Sequence[str]) -> None:
    """Refuse arguments that cannot be file names."""
    for word in words:
        try:
            good = b"\0" not in os.fsencode(word)
        except UnicodeEncodeError:
            good = False
        if not good:
            raise InputError(
                f"the argument {word[:80]!r} has a null byte or half of a surrogate pair",
                code="bad-argument",
                argument=word,
            )


def main() -> None:
    """The program `attnscope`."""
    warnings.showwarning = _warn
    for stream in (sys.stdout, sys.stderr):  # file names may have bytes that are not valid text
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            _check_words(sys.argv[1:])
            app()
        finally:
            sys.stdout.flush()
    except AttnscopeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:  # an error of the system, such as a full disk
        with suppress(OSError, ValueError):  # an in-memory stream has no file number
            os.dup2(
                os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
            )  # the final flush must not fail again
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
