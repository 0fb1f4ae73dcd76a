// One prompt: its tokens shaded, a map of heads to pick from, bars of classes, an answer step by step.
import {get, guarded, tell, work} from "./api.js";
import {Curves, binned, draw} from "./charts.js";
import {area, chances, fill, firstHere, labelled, make, modelChoices, number, select} from "./dom.js";
import {Heads} from "./heads.js";
import {numberOr, set, state} from "./state.js";
import {TextView} from "./text.js";

const EXAMPLES = [
  ["A word problem", "Tom has 12 apples. He buys 3 bags with 4 apples each. How many apples has Tom now?"],
  ["A map of # and *", "## Map\n\n  * * *\n  * # *\n  * * *\n\nMove the # one step to the right."],
  ["A repetition", "The cat sat on the mat. The dog sat on the log. The cat sat on the"],
];
const QUERIES = {all: "all tokens", last: "the last prompt token", predicts: "those that write the answer"};
const SHADES = {received: "attention received", average: "average attention weight", lift: "lift (1: no preference)"};

// What is asked: model, prompt, system prompt, how the model is to go on.
const composer = (choices, measure) => {
  const model = select("model", modelChoices(choices.models), state.model || firstHere(choices.models), (value) => set({model: value}));
  const text = area("prompt", "prompt", state.text, "Type or paste a prompt", (value) => set({text: value}));
  const system = area("system", "system prompt", state.system, "You are a helpful assistant.", (value) => set({system: value}), "low");
  const more = make("details", {open: state.system !== "", id: "system-part"}, make("summary", {textContent: "System prompt"}), system,
    make("p", {className: "faint", textContent: "With a system prompt the text goes through the model’s chat template."}));
  const check = (name, label) => {
    const box = make("input", {type: "checkbox", checked: state[name] === "1", onchange: () => set({[name]: box.checked ? "1" : ""})});
    return labelled(label, box, "check");
  };
  const answer = make("input", {type: "number", min: 0, max: choices.answer, value: state.answer, id: "answer", size: 4, onchange: () => set({answer: answer.value})});
  const examples = make("fieldset", {}, make("legend", {textContent: "Examples"}), ...EXAMPLES.map(([name, said]) => make("button", {className: "chip", textContent: name, onclick: () => {
    text.value = said;
    set({text: said, token: ""});
    measure();
  }})));
  text.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) measure(); });
  set({model: model.value});
  return make("div", {className: "card"},
    make("div", {className: "controls"}, labelled("Model", model), make("span", {className: "grow"}), examples), text,
    make("div", {className: "controls"}, more),
    make("div", {className: "controls"}, make("button", {className: "main", id: "measure", textContent: "Measure", title: "Ctrl+Enter", onclick: measure}),
      labelled("tokens to answer with", answer), check("chat", "chat template"), check("beyond", "longer than it was made for"),
      make("span", {className: "faint", textContent: `up to ${choices.longest.toLocaleString("en")} tokens · Ctrl+Enter measures`})));
};

export const playground = (host, choices) => {
  const note = make("p", {className: "tiny"}), told = make("p", {className: "told", id: "told", "aria-live": "polite"});
  const textHost = make("div", {className: "text", id: "text", tabIndex: -1, role: "group", "aria-label": "the tokens of the prompt"});
  const scale = make("span", {className: "scale", id: "scale"}), bars = make("div", {id: "bars"}), along = make("div", {id: "along"});
  const likely = make("div", {id: "likely"}), steps = make("div", {className: "controls", id: "steps", hidden: true});
  const layer = select("layer", [], "", (value) => pick(numberOr(value), numberOr(state.head)));
  const head = select("head", [], "", (value) => pick(numberOr(state.layer), numberOr(value)));
  const queries = select("queries", ["all"], "all", (value) => { set({queries: value}); refresh(); heads.show(facts); });
  const of = select("shade", choices.shades.map((s) => [s, SHADES[s]]), state.of, (value) => { set({of: value}); refresh(); });
  const toggle = select("gaze", [["to", "what it looks at"], ["by", "who looks at it"]], state.way, (value) => { set({way: value}); if (view.chosen !== null) choose(view.chosen, null); });
  const links = make("div", {className: "saves", id: "downloads"});
  const cut = make("button", {id: "knockout", textContent: "Knock the chosen tokens out", hidden: true, onclick: () => knockout()});
  const clear = make("button", {className: "small", id: "clear", textContent: "Clear the choice", hidden: true, onclick: () => choose(null, null)});
  const knocked = make("div", {id: "knocked"});
  const view = new TextView(textHost, {ontell: (line) => { told.textContent = line; }, onchoose: (n, range) => choose(n, range)});
  const heads = new Heads({onchoose: (l, h) => pick(l, h), onkind: () => {
    [layer.value, head.value] = [state.layer, state.head];
    choose(null, null);
  }});
  const curve = new Curves(along, {name: "along-the-text", told: "what is shaded above, along the text", onrange: (from, to) => set({from: String(from), to: String(to)})});
  let facts = null, span = null;

  const measure = guarded(async () => {
    if (!state.text.trim()) throw new Error("The prompt is empty: type something for the model to read.");
    waiting.hidden = facts !== null;
    hint.hidden = true;
    results.classList.add("stale");
    let made;
    try {
      made = await work("/api/views", {model: state.model, text: state.text, chat: state.chat === "1", system: state.system.trim() ? state.system : null,
        answer: Number(state.answer) || 0, beyond: state.beyond === "1"}, {replaces: "view", early: (now) => open(now.view)});
    } finally { results.classList.remove("stale"); waiting.hidden = true; hint.hidden = facts !== null; }
    if (!made) return;
    await open(made.view);
    if (state.token !== "" && Number(state.token) < facts.read) await choose(Number(state.token), null);
    document.documentElement.dataset.ready = facts.id;
  });

  // The view may still grow: layers of a long text come one by one.
  const open = async (id) => {
    const fresh = facts?.id !== id;
    results.classList.remove("stale");
    facts = await get(`/api/views/${id}`);
    [hint.hidden, waiting.hidden, results.hidden] = [true, true, false];
    note.textContent = facts.note;
    if (!facts.layers.map(String).includes(state.layer) && facts.layers.length === facts.deep) set({layer: ""});
    if (state.head !== "" && Number(state.head) >= Math.max(...facts.heads)) set({head: ""});
    if (!facts.queries.includes(state.queries)) set({queries: "all"});
    const far = facts.layers.length < facts.deep ? ` (${facts.layers.length} of ${facts.deep} so far)` : "";
    fill(layer, [["", `mean of layers${far}`], ...facts.layers.map((n) => [n, `layer ${n}`])], state.layer);
    fill(head, [["", "mean of heads"], ...[...Array(Math.max(...facts.heads)).keys()].map((n) => [n, `head ${n}`])], state.head);
    fill(queries, facts.queries.map((q) => [q, QUERIES[q]]), state.queries);
    if (fresh) {
      span = null;
      [cut.hidden, clear.hidden] = [true, true];
      told.textContent = "Point at a token for its number; click it to follow its gaze.";
      knocked.replaceChildren();
      view.show(facts);
    }
    likely.replaceChildren(...(facts.likely.length ? [make("h2", {textContent: "What comes next"}), chances(facts.likely)] : []));
    showSteps();
    await Promise.all([refresh(), heads.show(facts)]);
    document.documentElement.dataset.seen = `${facts.id} ${facts.layers.length}`;
  };

  const where = () => ({layer: facts.layers.map(String).includes(state.layer) ? state.layer : "", head: state.head, queries: state.queries, of: state.of, among: heads.among()});
  const refresh = guarded(async () => {
    const wanted = where();
    const [{values}, {rows}] = await Promise.all([get(`/api/views/${facts.id}/shade`, wanted), get(`/api/views/${facts.id}/classes`, {queries: wanted.queries, head: wanted.head})]);
    if (view.chosen === null) shaded(values, `${SHADES[wanted.of]}, ${place()}`);
    heads.mark();
    showLinks();
    document.documentElement.dataset.shaded = JSON.stringify(wanted);
    if (view.chosen === null) await lined(SHADES[wanted.of], (first, last, bins) => get(`/api/views/${facts.id}/curve`, {...where(), first, last, bins}));
    await draw(bars, (wide) => ({
      width: "container", height: 210, autosize: {type: "fit-x", contains: "padding"}, mark: {type: "bar"},
      encoding: {
        x: {field: "layer", type: "ordinal", axis: {labelOverlap: true, labelSeparation: 4, labelAngle: 0}},
        y: {field: "mass", type: "quantitative", title: "mass, from the average query"},
        color: {field: "class", type: "nominal", scale: {domain: facts.names, range: facts.colours}, legend: {title: null, orient: "bottom", columns: Math.max(2, Math.floor((wide - 50) / 104)), values: [...new Set(rows.map((r) => r.class))]}},
        tooltip: [{field: "layer"}, {field: "class"}, {field: "mass", format: ".4f"}],
      },
    }), {name: "classes", rows, told: `mass of each class of tokens in every layer, ${place()}`});
  });
  const lined = (y, fetch) => curve.show(facts.read, async (first, last, bins) => [{side: y, ...await fetch(first, last, bins)}],
    {says: (n) => facts.tokens[n], y, spans: spansOf(facts.filler), colours: ["#f06543"], first: Number(state.from) || 0, last: state.to === "" ? null : Number(state.to)});
  const shaded = (values, what) => {
    view.shade(values, what);
    scale.replaceChildren(make("span", {textContent: "0"}), make("i"), make("span", {textContent: `${number(view.top)}${view.most > view.top ? " or more" : ""}`}));
  };
  const place = () => heads.said() ?? `${state.layer === "" ? "mean of layers" : `layer ${state.layer}`}, ${state.head === "" ? "mean of heads" : `head ${state.head}`}`;
  const pick = guarded(async (l, h) => {
    heads.release();
    set({layer: l === null ? "" : String(l), head: h === null ? "" : String(h)});
    layer.value = state.layer;
    head.value = state.head;
    await refresh();
    if (view.chosen !== null) await choose(view.chosen, null);
  });

  const choose = guarded(async (n, range) => {
    span = range ?? (n === null ? null : [n, n]);
    cut.hidden = span === null || span[1] >= facts.prompt - 1;
    clear.hidden = span === null;
    if (range) { view.mark(view.chosen, range); told.textContent = `tokens ${range[0]} to ${range[1]} are chosen`; return; }
    view.mark(n);
    of.disabled = n !== null;  // a gaze has weights of its own
    set({token: n === null ? "" : String(n)});
    if (n === null) { delete document.documentElement.dataset.gaze; await refresh(); told.textContent = ""; return; }
    if (n >= facts.read) { tell("The last token of an answer is never read, so it looks at nothing."); return; }
    if (state.layer === "") { set({layer: String(facts.layers[0])}); layer.value = state.layer; heads.mark(); }
    const gaze = await work(`/api/views/${facts.id}/gaze`, {token: n, layer: Number(state.layer), head: numberOr(state.head), way: state.way}, {replaces: "gaze"});
    if (!gaze) return;
    const said = `${state.layer === "" ? "" : `layer ${state.layer}, `}${state.head === "" ? "mean of heads" : `head ${state.head}`}`;
    shaded(gaze.values, state.way === "to" ? `weight that token ${n} puts on it, ${said}` : `weight that it puts on token ${n}, ${said}`);
    view.tell(n);
    document.documentElement.dataset.gaze = String(n);
    await lined(state.way === "to" ? "weight it puts on each" : "weight each puts on it", async (first, last, bins) => binned(gaze.values, first, last, bins));
  });

  const showSteps = () => {
    const made = facts.tokens.length - facts.prompt;
    steps.hidden = !made;
    if (!made) return;
    const line = make("span", {className: "faint", "aria-live": "polite"});
    const slide = make("input", {type: "range", min: 0, max: made - 1, value: 0, id: "step", "aria-label": "step of the answer", oninput: () => {
      const n = facts.prompt + Number(slide.value);
      line.textContent = `${Number(slide.value) + 1} of ${made}: ${JSON.stringify(facts.tokens[n])} was written from token ${n - 1}’s gaze`;
      choose(n - 1, null);
    }});
    const step = (by) => () => { slide.value = Number(slide.value) + by; slide.dispatchEvent(new Event("input")); };
    steps.replaceChildren(make("span", {textContent: "Step through the answer"}), make("button", {className: "small", textContent: "◀", "aria-label": "step back", onclick: step(-1)}), slide,
      make("button", {className: "small", textContent: "▶", "aria-label": "step on", onclick: step(1)}), line);
  };
  const showLinks = () => {
    const query = new URLSearchParams(Object.entries(where()).filter(([name, v]) => v !== "" && name !== "among"));
    const link = (label, path) => make("a", {textContent: label, href: `/api/views/${facts.id}/${path}`, download: ""});
    links.replaceChildren(make("span", {className: "faint", textContent: "Keep:"}), link("numbers (CSV)", `numbers.csv?${query}`), link("experiment file", `experiment.yaml?${new URLSearchParams(Object.entries({layer: state.layer, head: state.head}).filter(([, v]) => v !== ""))}`),
      link("this text as one HTML file", `page.html?queries=${encodeURIComponent(state.queries)}`));
  };
  const knockout = guarded(async () => {
    const found = await work(`/api/views/${facts.id}/knockout`, {first: span[0], last: span[1],
      layer: numberOr(state.layer), head: numberOr(state.head)}, {replaces: "knockout"});
    if (!found) return;
    const scope = state.layer === "" ? "in every layer" : `in layer ${state.layer}${state.head === "" ? "" : `, head ${state.head}`} alone`;
    const cutText = JSON.stringify(facts.tokens.slice(span[0], span[1] + 1).join("").slice(0, 80));
    knocked.replaceChildren(make("h2", {textContent: `Without sight of ${cutText} ${scope}`}),
      make("p", {className: "faint", textContent: `tokens ${span[0]} to ${span[1]}; the distribution of the next token moves by ${number(found.kl)} nats (Kullback–Leibler)`}),
      make("div", {className: "sides"}, make("div", {}, make("h3", {textContent: "before"}), chances(found.before)), make("div", {}, make("h3", {textContent: "after"}), chances(found.after))));
  });

  const hint = make("div", {className: "card empty", id: "hint"}, make("p", {}, make("strong", {textContent: "Where does the model look?"})),
    make("p", {textContent: "Take an example or type a prompt, and press Measure. The model reads it once; then every layer, head and token is one click away."}));
  const waiting = make("div", {className: "card empty", id: "waiting", hidden: true}, make("p", {textContent: "The model is reading …"}));
  const results = make("div", {hidden: true, id: "results"}, note, make("div", {className: "columns"},
    make("div", {},
      make("div", {className: "card"}, make("div", {className: "head"}, make("h2", {textContent: "The text, shaded by attention"}), scale),
        make("div", {className: "controls"}, layer, head, labelled("from", queries), labelled("shade", of)),
        steps, textHost, told, make("div", {className: "controls"}, labelled("a chosen token:", toggle), clear, cut,
          make("span", {className: "faint", textContent: "Drag, shift-click, or Shift with the arrow keys chooses several."})), links),
      make("div", {className: "card"}, make("div", {className: "head"}, make("h2", {textContent: "Along the text"})), along),
      make("div", {className: "card"}, likely, knocked)),
    make("div", {}, heads.card, make("div", {className: "card"}, make("div", {className: "head"}, make("h2", {textContent: "Classes over layers"})), bars))));
  host.replaceChildren(composer(choices, () => measure()), hint, waiting, results);
  if (state.text) measure();
  return measure;
};
// Stretches of neighbours in a list of tokens.
export const spansOf = (tokens) => {
  const out = [];
  for (const n of tokens) {
    if (out.length && out.at(-1)[1] === n) out.at(-1)[1] = n + 1;
    else out.push([n, n + 1]);
  }
  return out;
};
