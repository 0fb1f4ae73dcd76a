// One prompt: its tokens shaded, a map of heads to pick from, bars of classes, an answer step by step.
import {get, guarded, tell, work} from "./api.js";
import {draw} from "./charts.js";
import {fill, labelled, make, number, select} from "./dom.js";
import {HeadMap} from "./map.js";
import {numberOr, set, state} from "./state.js";
import {TextView} from "./text.js";

const EXAMPLES = [
  ["Tom has 12 apples. He buys 3 bags with 4 apples each. How many apples has Tom now?", "a word problem"],
  ["## Map\n\n  * * *\n  * # *\n  * * *\n\nMove the # one step to the right.", "a map of # and *"],
  ["The cat sat on the mat. The dog sat on the log. The cat sat on the", "a repetition"],
];

export const playground = (host, choices) => {
  const model = select("model", choices.models.map((m) => [m.name, `${m.name} · ${m.about}`]), state.model,
    (value) => set({model: value}));
  const text = make("textarea", {id: "prompt", value: state.text, placeholder: "Type or paste a prompt",
    oninput: () => set({text: text.value})});
  text.setAttribute("aria-label", "prompt");
  const chat = make("input", {type: "checkbox", checked: state.chat === "1", onchange: () => set({chat: chat.checked ? "1" : ""})});
  const beyond = make("input", {type: "checkbox", checked: state.beyond === "1", onchange: () => set({beyond: beyond.checked ? "1" : ""})});
  const answer = make("input", {type: "number", min: 0, max: choices.answer, value: state.answer, id: "answer",
    onchange: () => set({answer: answer.value})});
  const example = select("examples", [["", "Examples …"], ...EXAMPLES], "", (value) => {
    if (value) { text.value = value; set({text: value}); example.value = ""; }
  });
  const note = make("p", {className: "note"}), told = make("p", {className: "faint", id: "told"});
  const textHost = make("div", {className: "text", id: "text"}), mapHost = make("div", {className: "map", id: "map"});
  textHost.setAttribute("aria-label", "the tokens of the prompt");
  const bars = make("div", {id: "bars"}), likely = make("div", {id: "likely"}), steps = make("div", {className: "controls", id: "steps"});
  const mapTold = make("p", {className: "faint"});
  const layer = select("layer", [], "", (value) => pick(numberOr(value), numberOr(state.head)));
  const head = select("head", [], "", (value) => pick(numberOr(state.layer), numberOr(value)));
  const queries = select("queries", ["all"], "all", (value) => { set({queries: value}); refresh(); });
  const of = select("shade", choices.shades, state.of, (value) => { set({of: value}); refresh(); });
  const mapOf = select("map", ["entropy"], "entropy", (value) => { set({map: value}); showMap(); });
  const links = make("div", {className: "controls", id: "downloads"});
  const cut = make("button", {id: "knockout", textContent: "Knock the chosen tokens out", hidden: true, onclick: () => knockout()});
  const knocked = make("div", {id: "knocked"});

  const view = new TextView(textHost, {ontell: (line) => { told.textContent = line; }, onchoose: (n, span) => choose(n, span)});
  const map = new HeadMap(mapHost, {ontell: (line) => { mapTold.textContent = line; }, onchoose: (l, h) => pick(l, h)});
  let facts = null, span = null;

  const measure = guarded(async () => {
    const made = await work("/api/views", {model: state.model || model.value, text: text.value, chat: chat.checked,
      answer: Number(answer.value) || 0, beyond: beyond.checked}, "view");
    if (!made) return;
    facts = await get(`/api/views/${made.view}`);
    span = null;
    results.hidden = false;
    note.textContent = facts.note;
    if (!facts.layers.map(String).includes(state.layer)) set({layer: ""});
    if (state.head !== "" && Number(state.head) >= Math.max(...facts.heads)) set({head: ""});
    if (!facts.queries.includes(state.queries)) set({queries: "all"});
    if (!facts.maps.includes(state.map)) set({map: "entropy"});
    fill(layer, [["", "mean of layers"], ...facts.layers.map((n) => [n, `layer ${n}`])], state.layer);
    fill(head, [["", "mean of heads"], ...[...Array(Math.max(...facts.heads)).keys()].map((n) => [n, `head ${n}`])], state.head);
    fill(queries, facts.queries.map((q) => [q, {all: "all queries", last: "the last prompt token", predicts: "those that write the answer"}[q]]), state.queries);
    fill(mapOf, facts.maps.map((m) => [m, m.replace("_", " ")]), state.map);
    view.show(facts);
    showLikely(likely, facts.likely, "What comes next");
    showSteps();
    knocked.replaceChildren();
    await Promise.all([refresh(), showMap()]);
    if (state.token !== "" && Number(state.token) < facts.read) await choose(Number(state.token), null);
    document.documentElement.dataset.ready = facts.id;
  });

  const where = () => ({layer: state.layer, head: state.head, queries: state.queries, of: state.of});
  const refresh = guarded(async () => {
    const wanted = where(), asked = [get(`/api/views/${facts.id}/shade`, wanted),
      get(`/api/views/${facts.id}/classes`, {queries: wanted.queries, head: wanted.head})];
    const [{values}, {rows}] = await Promise.all(asked);
    if (view.chosen === null) view.shade(values, `${wanted.of}, ${place()}`);
    map.mark(numberOr(state.layer), numberOr(state.head));
    showLinks();
    document.documentElement.dataset.shaded = JSON.stringify(wanted);
    await draw(bars, {
      width: 380, height: 220, mark: {type: "bar"},
      encoding: {
        x: {field: "layer", type: "ordinal", axis: {labelOverlap: true}},
        y: {field: "mass", type: "quantitative", title: "mass, from the average query"},
        color: {field: "class", type: "nominal", scale: {domain: facts.names, range: facts.colours}, legend: {symbolLimit: 20}},
        tooltip: [{field: "layer"}, {field: "class"}, {field: "mass", format: ".4f"}],
      },
    }, {name: "classes", rows, told: `mass of each class of tokens in every layer, ${place()}`});
  });
  const showMap = guarded(async () => {
    const {rows} = await get(`/api/views/${facts.id}/map`, {of: state.map, queries: state.queries});
    map.show(facts.layers, rows, state.map.replace("_", " "), numberOr(state.layer), numberOr(state.head));
    mapTold.textContent = `rows: layers, columns: heads; colour from ${map.scale}`;
  });
  const place = () => `${state.layer === "" ? "mean of layers" : `layer ${state.layer}`}, ${state.head === "" ? "mean of heads" : `head ${state.head}`}`;
  const pick = guarded(async (l, h) => {
    set({layer: l === null ? "" : String(l), head: h === null ? "" : String(h)});
    layer.value = state.layer;
    head.value = state.head;
    await refresh();
    if (view.chosen !== null) await choose(view.chosen, null);
  });

  const choose = guarded(async (n, range) => {
    span = range ?? (n === null ? null : [n, n]);
    cut.hidden = span === null || span[1] >= facts.prompt;
    if (range) { view.mark(view.chosen, range); return; }
    view.mark(n);
    set({token: n === null ? "" : String(n)});
    if (n === null) { await refresh(); told.textContent = ""; return; }
    if (n >= facts.read) { tell("the last token of an answer is never read, so it looks at nothing"); return; }
    if (state.layer === "") { set({layer: String(facts.layers[0])}); layer.value = state.layer; map.mark(numberOr(state.layer), numberOr(state.head)); }
    const gaze = await work(`/api/views/${facts.id}/gaze`, {token: n, layer: Number(state.layer), head: numberOr(state.head)}, "gaze");
    if (!gaze) return;
    view.shade(toggle.value === "to" ? gaze.looks_at : gaze.looked_at_by,
      toggle.value === "to" ? `weight that token ${n} puts on it, ${place()}` : `weight that it puts on token ${n}, ${place()}`);
    document.documentElement.dataset.gaze = String(n);
  });
  const toggle = select("gaze", [["to", "what it looks at"], ["by", "who looks at it"]], "to", () => { if (view.chosen !== null) choose(view.chosen, null); });

  const showLikely = (box, list, title) => box.replaceChildren(...(list.length ? [make("h2", {textContent: title}),
    make("table", {className: "data"}, make("tbody", {}, ...list.map(([token, p]) => make("tr", {},
      make("td", {textContent: JSON.stringify(token)}), make("td", {textContent: number(p)})))))] : []));
  const showSteps = () => {
    const made = facts.tokens.length - facts.prompt;
    if (!made) { steps.replaceChildren(); return; }
    const line = make("span", {className: "faint"});
    const slide = make("input", {type: "range", min: 0, max: made - 1, value: 0, id: "step", oninput: () => {
      const n = facts.prompt + Number(slide.value);
      line.textContent = `step ${Number(slide.value) + 1} of ${made}: ${JSON.stringify(facts.tokens[n])} was written from token ${n - 1}’s gaze`;
      choose(n - 1, null);
    }});
    slide.setAttribute("aria-label", "step of the answer");
    steps.replaceChildren(make("span", {textContent: "Step through the answer"}), slide, line);
  };
  const showLinks = () => {
    const query = new URLSearchParams(Object.entries(where()).filter(([, v]) => v !== ""));
    const link = (label, path) => make("a", {textContent: label, href: `/api/views/${facts.id}/${path}`, download: ""});
    links.replaceChildren(link("numbers (CSV)", `numbers.csv?${query}`), link("experiment file", "experiment.yaml"),
      link("this text as one HTML file", `page.html?queries=${encodeURIComponent(state.queries)}`));
  };
  const knockout = guarded(async () => {
    const found = await work(`/api/views/${facts.id}/knockout`, {first: span[0], last: span[1],
      layer: state.layer === "" ? null : Number(state.layer), head: numberOr(state.head)}, "knockout");
    if (!found) return;
    const before = make("div"), after = make("div");
    showLikely(before, found.before, "next token");
    showLikely(after, found.after, "without sight of them");
    knocked.replaceChildren(make("h2", {textContent: `Tokens ${span[0]} to ${span[1]} knocked out (${place()})`}),
      make("p", {className: "faint", textContent: `the distribution of the next token moved by ${number(found.kl)} nats (Kullback–Leibler)`}),
      make("div", {className: "sides"}, before, after));
  });

  const results = make("div", {className: "columns", hidden: true},
    make("div", {},
      make("div", {className: "card"}, note,
        make("div", {className: "controls"}, layer, head, queries, labelled("shade", of), labelled("a chosen token:", toggle), cut),
        steps, textHost, told, make("p", {className: "faint", textContent: "Click a token to follow its gaze; shift-click to choose a span."}), links),
      make("div", {className: "card"}, likely, knocked)),
    make("div", {},
      make("div", {className: "card"}, make("h2", {textContent: "Heads"}), labelled("by", mapOf), mapHost, mapTold),
      make("div", {className: "card"}, make("h2", {textContent: "Classes over layers"}), bars)));
  host.replaceChildren(
    make("div", {className: "card"}, make("div", {className: "controls"}, labelled("Model", model), example, labelled("chat template", chat),
      labelled("answer, tokens", answer), labelled("longer than trained for", beyond)), text,
    make("div", {className: "controls"}, make("button", {className: "main", id: "measure", textContent: "Measure", onclick: measure}),
      make("span", {className: "faint", textContent: `up to ${choices.longest.toLocaleString("en")} tokens`}))),
    results);
  if (!state.model) set({model: model.value});
  if (state.text) measure();
  return measure;
};
