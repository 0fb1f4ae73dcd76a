"""SQL over a run: its own tables and nothing else."""

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from attnscope.errors import InputError
from attnscope.experiment.execute import run
from attnscope.run.sql import DEEPEST, LONGEST_CHAIN, LONGEST_QUERY, check_query
from attnscope.run.store import open_run
from attnscope.spec.experiment import make_experiment

TABLES = ["values", "tokens", "positions", "by_query", "cells", "prompts"]


@pytest.fixture(scope="module")
def done(tmp_path_factory, folder):
    out = tmp_path_factory.mktemp("runs") / "run"
    source = {"source": "math", "count": 2, "level": 1}
    run(
        make_experiment(name="small", models={"tiny": folder}, prompts=source, measures=["mass"]),
        out,
    )
    return open_run(out)


@pytest.fixture(scope="module")
def secret(tmp_path_factory):
    path = tmp_path_factory.mktemp("elsewhere") / "secret.csv"
    path.write_text("a,b\n1,2\n")
    return str(path)


READ_A_FILE = [
    "SELECT * FROM read_csv('X')",
    "SELECT * FROM READ_CSV('X')",
    "SELECT * FROM read_csv/**/('X')",
    "SELECT * FROM read_csv /* a */ ('X')",
    "SELECT * FROM read_csv -- a\n('X')",
    "SELECT * FROM read_csv\n\t('X')",
    "SELECT * FROM read_csv\u00a0('X')",
    "SELECT * FROM read\u200b_csv('X')",
    "SELECT * FROM ｒｅａｄ_csv('X')",
    "SELECT * FROM \"read_csv\"('X')",
    "SELECT * FROM \"Read_Csv\" ('X')",
    "SELECT * FROM `read_csv`('X')",
    "SELECT * FROM [read_csv]('X')",
    "SELECT * FROM U&\"read_csv\"('X')",
    "SELECT * FROM scan_csv('X')",
    "SELECT * FROM read_parquet('X')",
    "SELECT * FROM \"read_json\"('X')",
    "SELECT * FROM \"read_ipc\"('X')",
    "SELECT * FROM main.read_csv('X')",
    'SELECT * FROM "values"."read_csv"(\'X\')',
    "WITH a AS (SELECT * FROM read_csv/**/('X')) SELECT * FROM a",
    "WITH a AS (WITH b AS (SELECT * FROM \"read_csv\"('X')) SELECT * FROM b) SELECT * FROM a",
    "WITH read_csv AS (SELECT 1 AS x) SELECT * FROM read_csv/**/('X')",
    "SELECT * FROM (SELECT * FROM read_csv\n('X')) AS t",
    "SELECT * FROM (\"read_csv\"('X'))",
    "SELECT * FROM (values JOIN \"read_csv\"('X') ON true)",
    "SELECT * FROM values WHERE prompt IN (SELECT a FROM \"read_csv\"('X'))",
    "SELECT (SELECT a FROM \"read_csv\"('X')) FROM values",
    "SELECT EXISTS (SELECT 1 FROM \"read_csv\"('X'))",
    "SELECT 1 UNION ALL SELECT a FROM \"read_csv\"('X')",
    "SELECT 1 ORDER BY (SELECT a FROM \"read_csv\"('X'))",
    "SELECT 1 LIMIT (SELECT a FROM \"read_csv\"('X'))",
    "SELECT * FROM values, \"read_csv\"('X')",
    "SELECT * FROM values JOIN \"read_csv\"('X') AS t ON true",
    "SELECT * FROM values CROSS JOIN LATERAL \"read_csv\"('X')",
    "SELECT * FROM LATERAL (SELECT * FROM \"read_csv\"('X')) AS t",
    "SELECT * FROM TABLE(\"read_csv\"('X'))",
    "SELECT * FROM (TABLE \"read_csv\"('X'))",
    "SELECT * FROM values AS read_csv('X')",
    "SELECT * FROM 'X'",
    'SELECT * FROM "X"',
    "SELECT * FROM 'X' AS values",
    "FROM read_csv/**/('X')",
    "FROM \"read_csv\"('X') SELECT *",
    "(FROM \"read_csv\"('X'))",
    "SELECT 1; SELECT * FROM \"read_csv\"('X')",
    "SELECT '\\' FROM \"read_csv\"('X') --'",
    "SELECT 'a\\' || ' FROM \"read_csv\"(''X'') --'",
    "SELECT E'\\'' FROM \"read_csv\"('X')",
    "SELECT * -- a\rFROM \"read_csv\"('X')\nFROM values",
    "SELECT read_csv('X') FROM values",
    "CREATE TABLE t AS SELECT * FROM \"read_csv\"('X')",
    "COPY values TO 'X'",
    "ATTACH 'X'",
    "LOAD 'X'",
]
OTHERS = [
    "",
    ";",
    "SELEC",
    "DROP TABLE values",
    "DELETE FROM values",
    "INSERT INTO values VALUES (1)",
    "UPDATE values SET value = 1",
    "TRUNCATE TABLE values",
    "EXPLAIN SELECT * FROM values",
    "SHOW TABLES",
    "SELECT * INTO x FROM values",
    "SELECT * FROM values; DROP TABLE values",
    "SELECT * FROM value",
    "SELECT * FROM main.values",
    "SELECT * FROM UNNEST([1, 2]) AS t(x)",
    "SELECT * FROM generate_series(1, 3)",
    "SELECT * FROM some_new_function('X')",
    "WITH RECURSIVE a AS (SELECT 1 AS x UNION ALL SELECT x FROM a) SELECT * FROM a",
    "SELECT $$a$$ FROM values",
    "SELECT 'a\0b' FROM values",
    "SELECT * FROM {{ x }}",
    "SELECT " + "1+" * LONGEST_CHAIN + "1",
    "SELECT " + "NOT " * 2_000 + "1",
    "SELECT " + "(" * (DEEPEST + 1) + "1" + ")" * (DEEPEST + 1),
    "SELECT " + "1," * LONGEST_QUERY + "1",
]


@pytest.mark.parametrize("query", READ_A_FILE + OTHERS)
def test_a_query_reads_nothing_but_the_tables_of_the_run(done, secret, query):
    with pytest.raises(InputError) as error:
        done.sql(query.replace("X", secret))
    assert error.value.code == "sql-not-allowed"
    assert error.value.part


@pytest.mark.parametrize(
    ("query", "reads"),
    [
        ("SELECT 1", []),
        ("SELECT * FROM values;", ["values"]),
        ("SELECT * FROM VALUES", ["values"]),
        ('SELECT "values"."value" FROM "values"', ["values"]),
        ("SELECT values.value FROM values", ["values"]),
        ("SELECT v.value FROM values AS v JOIN cells c USING (prompt)", ["values", "cells"]),
        ("FROM values SELECT value", ["values"]),
        ("SELECT * FROM values read_csv", ["values"]),  # an alias
        ("WITH read_csv AS (SELECT * FROM cells) SELECT * FROM read_csv", ["cells"]),
        ("WITH a AS (SELECT * FROM tokens), b AS (SELECT * FROM a) SELECT * FROM b", ["tokens"]),
        ("SELECT * FROM (SELECT * FROM cells) AS t UNION ALL SELECT * FROM cells", ["cells"]),
        ("SELECT count(*) FROM prompts WHERE prompt IN (SELECT prompt FROM cells)",
         ["cells", "prompts"]),
        ("SELECT 'read_csv(''x'')' AS a, \"text\" FROM tokens", ["tokens"]),
        ("SELECT layer, count(*) FROM values GROUP\n BY /* a */ ALL ORDER BY layer -- b",
         ["values"]),
        ("SELECT * EXCLUDE (value) FROM values ORDER BY layer DESC NULLS LAST LIMIT 3", ["values"]),
        ("SELECT COLUMNS('^l.*') FROM values", ["values"]),
        ("SELECT sum(value) OVER (PARTITION BY layer ORDER BY head) FROM values", ["values"]),
        ("SELECT value::int AS v, 5 // 2, text ~ 'a' FROM values JOIN tokens USING (prompt) "
         "ORDER BY ALL", ["values", "tokens"]),
        ("SELECT CASE WHEN layer = 0 THEN 'é\\d' ELSE 'b' END FROM values", ["values"]),
        ("SELECT 1e-3, 0.5, -2 FROM cells", ["cells"]),
    ],
)  # fmt: skip
def test_what_a_query_may_be(done, query, reads):
    text, named = check_query(query, TABLES)
    assert named == reads
    frames = {name: getattr(done, name).lazy() for name in TABLES}
    with pl.SQLContext(frames) as context:
        expected = context.execute(query, eager=True)
    # A union has its rows in any order.
    assert_frame_equal(done.sql(query), expected, check_row_order="UNION" not in query)
    assert "--" not in text


def test_a_misspelt_select_is_named():
    with pytest.raises(InputError) as error:
        check_query("SELEC", TABLES)
    assert "SELEC" in error.value.part


def test_the_command_and_the_page_refuse_too(done, secret, monkeypatch, capsys):
    from attnscope.cli import main
    from attnscope.web.runs import Runs

    query = f"SELECT * FROM read_csv/**/('{secret}')"
    with pytest.raises(InputError) as error:
        Runs(done.path.parent).query("run", query)
    assert error.value.code == "sql-not-allowed"
    monkeypatch.setattr("sys.argv", ["attnscope", "query", str(done.path), query])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().out == ""
