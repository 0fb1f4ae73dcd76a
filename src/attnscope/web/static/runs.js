// The tab of runs: the list of runs, the report of one, and an SQL query.
import {get, guarded, post} from "./api.js";
import {area, group, make} from "./dom.js";
import {set, state} from "./state.js";

const QUERIES = [
  [
    "Mass of every class",
    "SELECT model, condition, layer, item AS class, avg(value) AS mass FROM values " +
      "WHERE measure = 'mass' GROUP BY model, condition, layer, item ORDER BY mass DESC LIMIT 50",
  ],
  [
    "What was measured",
    "SELECT model, condition, measure, count(*) AS numbers FROM values " +
      "GROUP BY model, condition, measure ORDER BY model, condition, measure",
  ],
  ["Cells", "SELECT * FROM cells LIMIT 50"],
];
// Six digits; the tooltip of a cell has all of them.
const rounded = (v) =>
  v === null
    ? "—"
    : typeof v === "number" && !Number.isInteger(v)
      ? String(Number(v.toPrecision(6)))
      : v;
const table = (columns, rows) =>
  make(
    "table",
    {className: "data"},
    make(
      "thead",
      {},
      make("tr", {}, ...columns.map((c) => make("th", {textContent: c, scope: "col"}))),
    ),
    make("tbody", {}, ...rows),
  );

export const runs = (host, choices) => {
  if (!choices.runs.length) {
    host.replaceChildren(
      group(
        "card empty",
        make("p", {}, make("strong", {textContent: "No runs"})),
        make(
          "p",
          {},
          "Start the page with a run directory or a folder of runs: ",
          make("code", {textContent: "attnscope serve runs"}),
          ". These commands make a run: ",
          make("code", {textContent: "attnscope run"}),
          " and ",
          make("code", {textContent: "attnscope reproduce"}),
          ".",
        ),
      ),
    );
    return () => {};
  }
  const list = make("div", {
      className: "scroll",
      tabIndex: 0,
      role: "region",
      "aria-label": "runs",
    }),
    report = make("iframe", {title: "report of the run"});
  report.setAttribute("sandbox", "allow-scripts allow-downloads");
  const sql = area("sql", "SQL", QUERIES[0][1], "SELECT …", () => {}, "low");
  const result = make("div", {
    className: "scroll",
    id: "rows",
    tabIndex: 0,
    role: "region",
    "aria-label": "rows of the result",
  });
  const title = make("h2"),
    making = make("p", {className: "faint", textContent: "Building the report …"});
  report.addEventListener("load", () => {
    making.hidden = true;
  });
  const open = (name) => {
    set({run: name});
    title.textContent = `Report of ${name}`;
    making.hidden = false;
    report.src = `/api/report?run=${encodeURIComponent(name)}`;
    for (const row of list.querySelectorAll("tbody tr"))
      row.setAttribute("aria-selected", String(row.dataset.run === name));
  };
  const query = guarded(async () => {
    const {columns, rows, of} = await post("/api/query", {run: state.run, sql: sql.value});
    result.replaceChildren(
      make("p", {
        className: "faint",
        textContent: `${rows.length.toLocaleString("en")} of ${of.toLocaleString("en")} rows`,
      }),
      table(
        columns,
        rows.map((row) =>
          make("tr", {}, ...row.map((v) => make("td", {textContent: rounded(v), title: v ?? ""}))),
        ),
      ),
    );
  });
  const examples = QUERIES.map(([name, text]) =>
    make("button", {
      className: "chip",
      textContent: name,
      onclick: () => {
        sql.value = text;
        query();
      },
    }),
  );
  guarded(async () => {
    const {runs: entries} = await get("/api/runs");
    list.replaceChildren(
      table(
        ["run", "models", "conditions", "cells"],
        entries.map((run) => {
          const row = make(
            "tr",
            {},
            make(
              "td",
              {},
              make("button", {
                className: "chip",
                textContent: run.name,
                onclick: () => open(run.name),
              }),
            ),
            ...(run.error
              ? [make("td", {textContent: run.error, colSpan: 3})]
              : [
                  run.models.join(", "),
                  run.conditions.join(", "),
                  run.cells.toLocaleString("en"),
                ].map((v) => make("td", {textContent: v}))),
          );
          row.dataset.run = run.name;
          row.setAttribute("aria-selected", String(run.name === state.run));
          return row;
        }),
      ),
    );
  })();
  host.replaceChildren(
    group("card", group("head", make("h2", {textContent: "Runs"})), list),
    group("card", group("head", title, making), report),
    group(
      "card",
      group("head", make("h2", {textContent: "Query the tables"}), group("controls", ...examples)),
      sql,
      group(
        "controls",
        make("button", {
          className: "main",
          id: "run-query",
          textContent: "Run the query",
          onclick: query,
        }),
        make("span", {
          className: "faint",
          textContent: "SQL over the tables values, cells, tokens …",
        }),
      ),
      result,
    ),
  );
  return () => {
    if (!report.src) open(choices.runs.includes(state.run) ? state.run : choices.runs[0]);
  };
};
