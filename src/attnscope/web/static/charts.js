// Vega-Lite charts under a policy that forbids eval and inline styles, with buttons to save them.
import {group, make, save} from "./dom.js";

const dark = window.matchMedia("(prefers-color-scheme: dark)");
// The colours of figures, from the server: charts for light and dark, and the two sides compared.
export const theme = {};
const drawn = new Map();
dark.addEventListener("change", () => {
  for (const again of drawn.values()) again();
});
const sizes = new Map();
const resized = new ResizeObserver((entries) => {
  for (const {target, contentRect} of entries) {
    const wide = Math.round(contentRect.width),
      before = sizes.get(target);
    sizes.set(target, wide);
    if (before && wide && Math.abs(before - wide) > 8) drawn.get(target)?.();
  }
});

const csv = (rows) => {
  if (!rows.length) return "";
  const names = [...new Set(rows.flatMap((row) => Object.keys(row)))];
  const cell = (value) => {
    // A spreadsheet would read these as formulas.
    const text =
      typeof value === "string" && /^[=+\-@]/.test(value) ? `'${value}` : String(value ?? "");
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return (
    [names.join(","), ...rows.map((row) => names.map((name) => cell(row[name])).join(","))].join(
      "\n",
    ) + "\n"
  );
};

// `spec` is a chart, or a function from the width to a chart. `label` describes it to screen
// readers.
export const draw = async (host, spec, {name, rows, label, beside = []}) => {
  let chart = host.querySelector(":scope > .chart");
  if (!chart) {
    chart = group("chart");
    host.replaceChildren(chart, group("saves"));
    chart.setAttribute("role", "img");
  }
  chart.setAttribute("aria-label", label);
  let view;
  const again = async () => {
    const wide = Math.max(240, host.clientWidth || 640),
      made = typeof spec === "function" ? spec(wide) : spec;
    ({view} = await window.vegaEmbed(
      chart,
      {
        $schema: "https://vega.github.io/schema/vega-lite/v6.json",
        config: theme[dark.matches ? "dark" : "light"],
        ...made,
        datasets: {...made.datasets, points: rows},
        data: {name: "points"},
      },
      {
        ast: true,
        actions: false,
        renderer: "svg",
        defaultStyle: false,
        tooltip: {disableDefaultStyle: true},
      },
    ));
    chart.querySelector("svg").setAttribute("aria-hidden", "true"); // the label describes it
    return view;
  };
  await again();
  drawn.set(host, again);
  resized.observe(host);
  const button = (text, action) =>
    make("button", {
      className: "small",
      textContent: text,
      title: `Save ${name} as ${text}`,
      onclick: action,
    });
  host.querySelector(":scope > .saves").replaceChildren(
    button("PNG", async () => save(`${name}.png`, await view.toImageURL("png", 2))),
    button("SVG", async () => save(`${name}.svg`, await view.toSVG(), "image/svg+xml")),
    button("CSV", () => save(`${name}.csv`, csv(rows), "text/csv")),
    ...beside,
  );
  return view;
};

// Curves along a text. Only the visible range is fetched, in at most BINS bins; a narrower range
// has smaller bins, down to single tokens.
const BINS = 600;
export class Curves {
  constructor(host, {name, label, onrange = () => {}}) {
    Object.assign(this, {host, name, label, onrange, first: 0, last: 0, length: 0});
    this.chart = make("div");
    this.line = make("p", {className: "faint", "aria-live": "polite"});
    const button = (text, title, action) =>
      make("button", {
        className: "small",
        textContent: text,
        title,
        "aria-label": `${title} (${label})`,
        onclick: action,
      });
    this.zoom = group(
      "zoom",
      button("+", "Zoom in", () => this.scaled(0.5)),
      button("−", "Zoom out", () => this.scaled(2)),
      button("◀", "Earlier", () => this.moved(-0.5)),
      button("▶", "Later", () => this.moved(0.5)),
      button("All", "Show all tokens", () => this.range(0, this.length)),
      button(
        "Without the first",
        "Hide the first token, which often receives most of the attention",
        () => this.range(1, this.length),
      ),
    );
    host.replaceChildren(this.chart, this.line);
  }

  // `fetch(first, last, bins)` returns a list of {side, start, size, mean, low, high}; `spans` are
  // shaded.
  async show(
    length,
    fetch,
    {
      spans = [],
      textOf = null,
      title = "token",
      y = "average attention weight",
      colours = theme.sides,
      first = 0,
      last = null,
    } = {},
  ) {
    Object.assign(this, {fetch, spans, textOf, title, y, colours});
    const changed = this.length !== length;
    this.length = length;
    if (changed || !this.last)
      [this.first, this.last] = [
        Math.max(0, Math.min(first, length - 1)),
        Math.min(last ?? length, length),
      ];
    if (this.last <= this.first) [this.first, this.last] = [0, length];
    await this.redraw();
  }

  scaled(by) {
    const wide = Math.min(this.length, Math.max(4, Math.round((this.last - this.first) * by))),
      middle = (this.first + this.last) / 2;
    const first = Math.max(0, Math.min(this.length - wide, Math.round(middle - wide / 2)));
    this.range(first, first + wide);
  }

  moved(by) {
    const wide = this.last - this.first,
      to = Math.max(0, Math.min(this.length - wide, Math.round(this.first + by * wide)));
    this.range(to, to + wide);
  }

  async range(first, last) {
    this.first = Math.max(0, Math.min(Math.floor(first), this.length - 2));
    this.last = Math.min(this.length, Math.max(Math.ceil(last), this.first + 2));
    this.onrange(this.first, this.last);
    await this.redraw();
  }

  async redraw() {
    const [first, last] = [this.first, this.last];
    const curves = await this.fetch(first, last, BINS);
    if (first !== this.first || last !== this.last) return;
    const size = curves[0]?.size ?? 1;
    const rows = curves.flatMap((c) =>
      c.start
        .map((token, i) => ({
          side: c.side,
          token,
          tokens: Math.min(c.size, last - token),
          value: c.mean[i],
          low: c.low[i],
          high: c.high[i],
          text: c.size === 1 && this.textOf ? (this.textOf(token, c.side) ?? "") : "",
        }))
        .filter((row) => row.value !== null),
    );
    const shown = `tokens ${first.toLocaleString("en")} to ${(last - 1).toLocaleString("en")}`;
    const points =
      size === 1
        ? "every token"
        : `a point is the mean of ${size} tokens, the band their smallest and largest value`;
    this.line.textContent = `${shown}; ${points}. Drag across the chart to zoom in.`;
    const names = [...new Set(curves.map((c) => c.side))];
    const x = {
      field: "token",
      type: "quantitative",
      title: this.title,
      scale: {domain: [first, last], nice: false, zero: false},
      axis: {tickMinStep: 1, format: ",d"},
    };
    const color = {
      field: "side",
      type: "nominal",
      sort: null,
      scale: {domain: names, range: this.colours},
      legend:
        names.length > 1
          ? {title: null, orient: "top", symbolType: "stroke", symbolStrokeWidth: 3}
          : null,
    };
    const y = {
      type: "quantitative",
      title: this.y,
      ...(rows.length ? {} : {scale: {domain: [0, 1]}}),
    }; // no token can see this range
    const spans = this.spans
      .map(([a, b]) => ({a: Math.max(a, first), b: Math.min(b, last)}))
      .filter(({a, b}) => b > a);
    const spec = {
      width: "container",
      height: 170,
      autosize: {type: "fit-x", contains: "padding"},
      datasets: {spans},
      layer: [
        {
          data: {name: "spans"},
          mark: {type: "rect", style: "span"},
          encoding: {x: {...x, field: "a"}, x2: {field: "b"}},
        },
        ...(size > 1
          ? [
              {
                mark: {type: "area", interpolate: "step-after", opacity: 0.2, clip: true},
                encoding: {x, y: {...y, field: "low"}, y2: {field: "high"}, color},
              },
            ]
          : []),
        {
          mark: {type: "line", interpolate: "step-after", strokeWidth: 1.6, clip: true},
          params: [{name: "brush", select: {type: "interval", encodings: ["x"]}}],
          encoding: {x, y: {...y, field: "value"}, color},
        },
        {
          mark: {type: "point", size: 60, opacity: 0},
          encoding: {
            x,
            y: {...y, field: "value"},
            color,
            tooltip: [
              {field: "side"},
              {field: "token", format: ",d"},
              ...(size === 1 ? [{field: "text"}] : [{field: "tokens", title: "mean of"}]),
              {field: "value", format: ".5f"},
            ],
          },
        },
      ],
    };
    const view = await draw(this.chart, spec, {
      name: this.name,
      rows,
      label: this.label,
      beside: [this.zoom],
    });
    if (first !== this.first || last !== this.last) return;
    this.bins = size;
    this.host.dataset.bins = String(size);
    this.host.dataset.range = `${first} ${last}`;
    let later = 0;
    const picked = (_, value) => {
      clearTimeout(later);
      const chosen = value?.token;
      if (chosen && chosen[1] - chosen[0] > 0.5)
        later = setTimeout(() => this.range(chosen[0], chosen[1]), 350);
    };
    view.addSignalListener("brush", picked);
  }
}
