// Vega-Lite charts under a policy that forbids eval and inline styles, with what can be saved.
import {make, save} from "./dom.js";

const dark = window.matchMedia("(prefers-color-scheme: dark)");
const look = () => {
  const ink = dark.matches ? "#ececec" : "#1a1a1a", line = dark.matches ? "#444a52" : "#dfe2e6";
  return {
    background: "transparent", view: {stroke: null},
    axis: {labelColor: ink, titleColor: ink, gridColor: line, domainColor: line, tickColor: line},
    legend: {labelColor: ink, titleColor: ink}, title: {color: ink}, header: {labelColor: ink, titleColor: ink},
  };
};
const drawn = new Map();
dark.addEventListener("change", () => { for (const again of drawn.values()) again(); });

const csv = (rows) => {
  if (!rows.length) return "";
  const names = Object.keys(rows[0]);
  const cell = (value) => (/[",\n]/.test(String(value ?? "")) ? `"${String(value).replaceAll('"', '""')}"` : String(value ?? ""));
  return [names.join(","), ...rows.map((row) => names.map((name) => cell(row[name])).join(","))].join("\n") + "\n";
};

export const draw = async (host, spec, {name, rows, told}) => {
  const chart = make("div", {className: "chart"});
  chart.setAttribute("role", "img");
  chart.setAttribute("aria-label", told);
  const buttons = make("div", {className: "controls"});
  const again = async () => {
    const {view} = await window.vegaEmbed(chart, {
      $schema: "https://vega.github.io/schema/vega-lite/v6.json", config: look(), ...spec, data: {values: rows},
    }, {ast: true, actions: false, renderer: "svg", defaultStyle: false, tooltip: {disableDefaultStyle: true}});
    return view;
  };
  let view = await again();
  drawn.set(host, async () => { view = await again(); });
  const button = (label, doing) => make("button", {textContent: label, title: `Save ${name} as ${label}`, onclick: doing});
  buttons.append(
    button("PNG", async () => save(`${name}.png`, await view.toImageURL("png", 2))),
    button("SVG", async () => save(`${name}.svg`, await view.toSVG(), "image/svg+xml")),
    button("CSV", () => save(`${name}.csv`, csv(rows), "text/csv")),
  );
  host.replaceChildren(chart, buttons);
};

// At most so many points on a curve: means over stretches; a narrower stretch shows more.
export const MOST = 600;
export const binned = (rows, by) => {
  const groups = Map.groupBy ? Map.groupBy(rows, (row) => row[by]) : new Map([[null, rows]]);
  return [...groups.values()].flatMap((each) => {
    const size = Math.ceil(each.length / MOST);
    if (size <= 1) return each;
    const out = [];
    for (let i = 0; i < each.length; i += size) {
      const some = each.slice(i, i + size).filter((row) => row.value !== null);
      if (some.length) out.push({...some[0], value: some.reduce((t, row) => t + row.value, 0) / some.length, bin: size});
    }
    return out;
  });
};
