"""SQL over the tables of a run, and over nothing else.

polars can read files from SQL (`FROM read_csv('x')`), so every statement is parsed first. One
query passes; each table in it is a table of the run or a common table expression of the query.
What polars executes is written again from the tokens that were checked, without comments.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from attnscope.errors import InputError

if TYPE_CHECKING:
    from sqlglot import Token, exp

LONGEST_QUERY = 10_000
"""Characters; the parsers fail on very long expressions."""
DEEPEST = 40
"""Levels of brackets and of CASE."""
LONGEST_CHAIN = 200
"""Levels of the parsed query, such as terms of a sum. polars takes seconds for 1,000."""
_VALUES = "values of the run"
"""What the table `values` is called while the query is parsed."""
_READS_FILES = re.compile(r"(read|scan)_", re.IGNORECASE)
_UNSURE_QUOTE = re.compile(r"\\(['\"]|$)")
"""Some dialects read a backslash before a quote as part of the text, others do not."""
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*( [A-Za-z_]+)*|[0-9.]+([eE][+-]?[0-9]+)?")
_SIGNS = re.compile(r"[-+*/%=<>!~|&^@:;,.()\[\]{}]+")


def check_query(query: str, tables: Collection[str]) -> tuple[str, list[str]]:
    """The query as polars may execute it, and which of `tables` it reads; else an error."""
    from sqlglot.errors import SqlglotError

    if len(query) > LONGEST_QUERY:
        raise refused(f"{len(query):,} characters, at most {LONGEST_QUERY:,} are read")
    try:
        tokens = _tokens(query)
        text = " ".join(_written(token) for token in tokens)
        tree = _only_query(_renamed(tokens), query)
        named = {_table(source, tree, tables) for source in _sources(tree)}
    except (SqlglotError, RecursionError) as error:
        raise refused(_first_line(error)) from error
    return text, [table for table in tables if table in named]


def refused(part: str) -> InputError:
    """The error for a query that is not executed because of `part`."""
    return InputError(
        "a query is one SELECT over the run's own tables, without functions that read files; "
        f"not allowed: {part[:200]}",
        code="sql-not-allowed",
        part=part,
    )


def _tokens(query: str) -> list[Token]:
    from sqlglot import TokenType
    from sqlglot.dialects import DuckDB

    tokens = list(DuckDB().tokenize(query))  # of sqlglot's dialects the nearest to polars
    while tokens and tokens[-1].token_type is TokenType.SEMICOLON:
        tokens.pop()
    depth = 0
    for token, opens in _before_brackets(tokens):
        if token.text.upper() in ("(", "[", "{", "CASE"):
            depth += 1
        elif token.text.upper() in (")", "]", "}", "END"):
            depth -= 1
        if depth > DEEPEST:
            raise refused(f"more than {DEEPEST} levels of brackets")
        if opens and _READS_FILES.match(token.text):
            raise refused(token.text)
    return tokens


def _before_brackets(tokens: list[Token]) -> list[tuple[Token, bool]]:
    """Each token, and whether an opening bracket follows it."""
    from sqlglot import TokenType

    follows = [token.token_type is TokenType.L_PAREN for token in tokens]
    return list(zip(tokens, [*follows[1:], False], strict=False))


def _renamed(tokens: list[Token]) -> list[Token]:
    """The tokens for sqlglot, to which `values` is a keyword and never the name of a table."""
    from sqlglot import TokenType

    for token, opens in _before_brackets(tokens):
        name = token.token_type in (TokenType.VALUES, TokenType.IDENTIFIER)
        if name and not opens and token.text.lower() == "values":
            token.token_type, token.text = TokenType.IDENTIFIER, _VALUES
    return tokens


def _written(token: Token) -> str:
    """A token as polars reads it, whatever stood before and after it."""
    from sqlglot import TokenType

    if token.token_type in (TokenType.STRING, TokenType.IDENTIFIER):
        if _UNSURE_QUOTE.search(token.text) or "\0" in token.text:
            raise refused(repr(token.text))
        quote = "'" if token.token_type is TokenType.STRING else '"'
        return quote + token.text.replace(quote, 2 * quote) + quote
    special = token.token_type.name.endswith("_STRING") or token.token_type is TokenType.HINT
    if special or not (_PLAIN.fullmatch(token.text) or _SIGNS.fullmatch(token.text)):
        raise refused(repr(token.text))
    return token.text


def _only_query(tokens: list[Token], query: str) -> exp.Query:
    from sqlglot import ErrorLevel, exp
    from sqlglot.dialects import DuckDB

    trees = DuckDB().parser(error_level=ErrorLevel.IMMEDIATE).parse(tokens, query)
    if len(trees) != 1:
        raise refused(f"{len(trees)} statements")
    tree = trees[0]
    if not isinstance(tree, exp.Select | exp.SetOperation):
        raise refused("nothing" if tree is None else f"a start with {tokens[0].text!r}")
    levels = {id(None): 0}
    for node in tree.bfs():  # parents come first
        levels[id(node)] = level = levels[id(node.parent)] + 1
        if level > LONGEST_CHAIN:
            raise refused(f"more than {LONGEST_CHAIN} levels of operators")
        if isinstance(node, exp.Into | exp.Lateral | exp.Values | exp.Lock | exp.Pivot):
            raise refused(node.key.upper())
        if isinstance(node, exp.With) and node.args.get("recursive"):
            raise refused("WITH RECURSIVE")  # may never end
    return tree


def _sources(tree: exp.Query) -> Iterator[Any]:
    """Everything that rows come from."""
    from sqlglot import exp

    for node in tree.walk():
        if isinstance(node, exp.From | exp.Join):
            yield node.this
        elif isinstance(node, exp.Table):
            yield node


def _table(source: Any, tree: exp.Query, tables: Collection[str]) -> str:
    """The name of a source that may be read; of a query in brackets, none."""
    from sqlglot import exp
    from sqlglot.dialects import DuckDB

    if isinstance(source, exp.Subquery | exp.Paren):
        return ""
    plain = isinstance(source, exp.Table) and isinstance(source.this, exp.Identifier)
    names = {*tables, *(cte.alias for cte in tree.find_all(exp.CTE))}
    known = {name.lower(): name for name in names}
    known[_VALUES] = "values"
    if not plain or source.args.get("db") or source.name.lower() not in known:
        raise refused(source.sql(dialect=DuckDB).replace(f'"{_VALUES}"', "values"))
    return known[source.name.lower()]


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
