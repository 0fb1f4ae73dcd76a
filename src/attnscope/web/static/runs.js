// Runs: the report of each, findings first, and a box for SQL.
import {get, guarded, post} from "./api.js";
import {make, select} from "./dom.js";
import {set, state} from "./state.js";

export const runs = (host, choices) => {
  if (!choices.runs.length) {
    host.replaceChildren(make("p", {textContent: "No runs here. Start the page with the folder of a run, or a folder of runs: attnscope serve runs"}));
    return () => {};
  }
  const list = make("div", {className: "scroll"}), report = make("iframe", {title: "report of the run"});
  report.setAttribute("sandbox", "allow-scripts allow-downloads");
  const sql = make("textarea", {id: "sql", value: "SELECT model, condition, layer, item, avg(value) AS mass FROM values WHERE measure = 'mass' GROUP BY ALL ORDER BY ALL LIMIT 20"});
  sql.setAttribute("aria-label", "SQL");
  const answer = make("div", {className: "scroll", id: "rows"});
  const which = select("run", choices.runs, state.run, (value) => open(value));
  const open = (name) => {
    set({run: name});
    which.value = name;
    report.src = `/api/report?run=${encodeURIComponent(name)}`;
  };
  const ask = guarded(async () => {
    const {columns, rows, of} = await post("/api/query", {run: which.value, sql: sql.value});
    answer.replaceChildren(make("p", {className: "faint", textContent: `${rows.length} of ${of} rows`}),
      make("table", {className: "data"}, make("thead", {}, make("tr", {}, ...columns.map((c) => make("th", {textContent: c})))),
        make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((v) => make("td", {textContent: v ?? "—"})))))));
  });
  guarded(async () => {
    const {runs: found} = await get("/api/runs");
    list.replaceChildren(make("table", {className: "data"}, make("thead", {}, make("tr", {}, ...["run", "models", "conditions", "cells"].map((c) => make("th", {textContent: c})))),
      make("tbody", {}, ...found.map((run) => make("tr", {}, make("td", {}, make("button", {textContent: run.name, onclick: () => open(run.name)})),
        ...(run.error ? [make("td", {textContent: run.error, colSpan: 3})] : [run.models.join(", "), run.conditions.join(", "), String(run.cells)].map((v) => make("td", {textContent: v}))))))));
  })();
  host.replaceChildren(make("div", {className: "card"}, list), make("div", {className: "card"}, make("div", {className: "controls"}, which), report),
    make("div", {className: "card"}, make("h2", {textContent: "Ask the tables"}), sql, make("div", {className: "controls"}, make("button", {id: "ask", textContent: "Ask", onclick: ask})), answer));
  return () => { if (!report.src) open(which.value); };
};
