// Two sides of one prompt: with and without a filler, filler against a sentence, or two models.
import {get, guarded, work} from "./api.js";
import {binned, draw} from "./charts.js";
import {fill, labelled, make, select} from "./dom.js";
import {numberOr, set, state} from "./state.js";

export const compare = (host, choices) => {
  const models = choices.models.map((m) => m.name);
  const text = make("textarea", {id: "prompt-b", value: state.text, placeholder: "The prompt of both sides",
    oninput: () => set({text: text.value})});
  text.setAttribute("aria-label", "prompt");
  const first = select("first model", models, state.model, (value) => set({model: value}));
  const second = select("second model", [["", "the same model"], ...models], state.b, (value) => { set({b: value}); again(); });
  const kind = select("filler", choices.fillers, state.kind, (value) => { set({kind: value}); again(); });
  const unit = make("input", {value: state.unit, size: 4, oninput: () => { set({unit: unit.value}); again(); }});
  unit.setAttribute("aria-label", "what is repeated");
  const count = make("input", {type: "range", min: 0, max: 200, value: state.count, id: "count", oninput: () => {
    set({count: count.value}); counted.textContent = count.value; again();
  }});
  count.setAttribute("aria-label", "how many");
  const counted = make("span", {textContent: state.count});
  const position = select("position", choices.positions, state.position, (value) => { set({position: value}); again(); });
  const other = select("compared with", [["none", "no filler"], ...choices.fillers], state.other === "sentence" ? "none" : state.other,
    (value) => { set({other: value}); again(); });
  const layer = select("layer", [["0", "layer 0"]], state.layer || "0", (value) => { set({layer: value}); show(); });
  const head = select("head", [["", "mean of heads"]], state.head, (value) => { set({head: value}); show(); });
  const curves = make("div", {id: "curves"}), whole = make("div", {id: "whole"}), bars = make("div", {id: "pair-bars"});
  const note = make("p", {className: "note"});
  let sides = null;

  const filler = (which, many) => (which === "none" || !many ? null : {kind: which, count: many, position: state.position,
    unit: ["repeat", "word"].includes(which) ? (state.unit || "/") : null});
  const measure = guarded(async () => {
    const many = Number(state.count), body = {text: text.value, chat: false};
    const b = await work("/api/views", {...body, model: state.b || first.value, filler: filler(kind.value, state.b && !many ? 0 : many)}, "b");
    if (!b) return;
    const a = await work("/api/views", {...body, model: first.value, filler: state.b ? filler(kind.value, many) : filler(other.value, many)}, "a");
    if (!a) return;
    sides = await Promise.all([a, b].map((side) => get(`/api/views/${side.view}`)));
    note.textContent = [...new Set(sides.map((s) => s.note).filter(Boolean))].join("; ");
    const shared = sides[0].layers.filter((n) => sides[1].layers.includes(n));
    if (!shared.map(String).includes(state.layer)) set({layer: String(shared[0])});
    fill(layer, shared.map((n) => [n, `layer ${n}`]), state.layer);
    const most = Math.min(...sides.map((s) => Math.max(...s.heads)));
    if (state.head !== "" && Number(state.head) >= most) set({head: ""});
    fill(head, [["", "mean of heads"], ...[...Array(most).keys()].map((n) => [n, `head ${n}`])], state.head);
    await show();
  });
  let waiting = 0;
  const again = () => { clearTimeout(waiting); waiting = setTimeout(() => { if (text.value.trim()) measure(); }, 120); };

  const label = (side) => (state.b ? side.model : side === sides[0] ? (other.value === "none" ? "without filler" : other.value) : kind.value);
  const show = guarded(async () => {
    if (!sides) return;
    const where = {layer: state.layer, head: state.head, of: "average", queries: "all"};
    const values = await Promise.all(sides.map((side) => get(`/api/views/${side.id}/shade`, where).then((r) => r.values)));
    const twin = (side) => side.twins ?? side.tokens.map((_, n) => n);
    const aligned = sides.flatMap((side, i) => twin(side).map((base, n) => ({side: label(side), token: base, says: side.tokens[n], value: values[i][n]}))
      .filter((row) => row.token >= 0 && row.value !== null)).sort((a, b) => a.token - b.token);
    const every = sides.flatMap((side, i) => values[i].map((value, n) => ({side: label(side), token: n, says: side.tokens[n], value,
      part: side.filler.includes(n) ? "filler" : "prompt"})).filter((row) => row.value !== null));
    const line = (title) => ({width: 640, height: 200, mark: {type: "line", interpolate: "step-after"}, params: [{name: "zoom", select: {type: "interval", encodings: ["x"]}, bind: "scales"}],
      encoding: {x: {field: "token", type: "quantitative", title}, y: {field: "value", type: "quantitative", title: "average attention weight"},
        color: {field: "side", type: "nominal", sort: null, title: null}, tooltip: [{field: "side"}, {field: "token"}, {field: "says"}, {field: "value", format: ".5f"}]}});
    await draw(curves, line("token of the prompt, the filler cut out"), {name: "aligned", rows: binned(aligned, "side"), told: "average attention weight of each token of the prompt, on both sides"});
    const spec = line("token");
    delete spec.encoding.color;
    await draw(whole, {...spec, mark: {type: "bar", width: 2}, height: 140, encoding: {...spec.encoding, row: {field: "side", title: null, sort: null},
      color: {field: "part", type: "nominal", scale: {domain: ["prompt", "filler"], range: ["#4c78a8", "#e45756"]}, title: null}}},
    {name: "whole", rows: binned(every, "side"), told: "average attention weight of every token, the filler marked"});
    const rows = (await Promise.all(sides.map((side) => get(`/api/views/${side.id}/classes`, {head: state.head})
      .then((r) => r.rows.filter((row) => ["hash", "star", "whitespace", "digit", "slash", "punctuation", "word"].includes(row.class)).map((row) => ({...row, side: label(side)})))))).flat();
    await draw(bars, {facet: {field: "class", type: "nominal", title: null}, columns: 4, spec: {width: 180, height: 120, mark: "bar",
      encoding: {x: {field: "layer", type: "ordinal", axis: {labelOverlap: true}}, xOffset: {field: "side", sort: null}, y: {field: "mass", type: "quantitative"},
        color: {field: "side", type: "nominal", sort: null, title: null}, tooltip: [{field: "side"}, {field: "layer"}, {field: "mass", format: ".4f"}]}}},
    {name: "classes", rows, told: "mass of each class of tokens in every layer, on both sides"});
    document.documentElement.dataset.compared = sides.map((s) => s.id).join(" ");
  });

  const mode = make("p", {className: "faint", textContent: "A second model is shown the very same prompt, filler included. Otherwise the two sides differ by the filler."});
  host.replaceChildren(
    make("div", {className: "card"},
      make("div", {className: "controls"}, labelled("Model", first), labelled("against", second)), text,
      make("div", {className: "controls"}, labelled("filler", kind), labelled("of", unit), labelled("how many", count), counted, labelled("where", position), labelled("against", other)),
      mode, make("button", {className: "main", id: "compare-now", textContent: "Compare", onclick: measure})),
    make("div", {className: "card"}, note, make("div", {className: "controls"}, layer, head), make("h2", {textContent: "The prompt’s tokens on both sides"}), curves,
      make("h2", {textContent: "Every token"}), whole, make("h2", {textContent: "Classes over layers"}), bars));
  if (state.tab === "compare" && state.text) measure();
  return measure;
};
