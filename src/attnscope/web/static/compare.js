// Two sides: with and without a filler, filler against filler, two models, or two prompts.
import {get, guarded, work} from "./api.js";
import {Curves, SIDES, draw} from "./charts.js";
import {area, fill, firstHere, labelled, make, modelChoices, number, select} from "./dom.js";
import {spansOf} from "./playground.js";
import {set, state} from "./state.js";

const MODES = {filler: "With and without filler", fillers: "Filler against filler", models: "Two models", prompts: "Two prompts"};
const FILLERS = {repeat: "repeated sign", word: "repeated word", "random-tokens": "random tokens", sentence: "random sentences", lorem: "lorem ipsum"};
const POSITIONS = {between: "before the question", end: "at the end", random: "at a random place", "before-system": "before the system prompt"};
const PROBLEM = "Tom has 12 apples. He buys 3 bags with 4 apples each. How many apples has Tom now?";
const MAP = "## Target\n\n  * * #\n  * # *\n  # * *\n\n## Current\n\n  # * *\n  * # *\n  * * #\n\nWhich action turns the current map into the target?";
// The published figures, one click each.
const FIGURES = [
  ["Slashes calm a prompt", {mode: "filler", text: PROBLEM, system: "You solve word problems.", kind: "repeat", unit: "/", count: "55", by: "ids", position: "between", layer: "0", head: "0"}],
  ["Slashes against a sentence", {mode: "fillers", text: PROBLEM, system: "You solve word problems.", kind: "repeat", unit: "/", count: "55", by: "ids", position: "between", against: "sentence", layer: "0", head: "0"}],
  ["# and *: a base and its fine-tune", {mode: "models", text: MAP, system: "", count: "0", layer: "0", head: ""}],
];
// A model and its fine-tune on maps, if they are here: the real pair, or the tiny one.
const pairOf = (models) => {
  const here = new Set(models.filter((m) => m.here).map((m) => m.name));
  return [["zoo:smollm2", "zoo:smollm2-phys"], ["zoo:spatial-base", "zoo:spatial-phys"]].find((pair) => pair.every((name) => here.has(name)));
};
const CLASSES = ["hash", "star", "whitespace", "digit", "slash", "operator", "punctuation", "word"];

export const compare = (host, choices) => {
  const models = modelChoices(choices.models);
  const begun = () => Boolean(sides);
  const change = (name, quick = true) => (value) => { set({[name]: value}); if (quick && begun()) again(); };
  const mode = make("fieldset", {}, make("legend", {textContent: "Compare"}), ...Object.entries(MODES).map(([name, title]) => {
    const button = make("button", {className: "chip", textContent: title, onclick: () => { set({mode: name}); arrange(); if (begun()) again(); }});
    button.dataset.mode = name;
    return button;
  }));
  const figures = make("fieldset", {}, make("legend", {textContent: "Published figures, live"}), ...FIGURES.map(([title, wanted]) => make("button", {className: "chip", textContent: title, onclick: () => {
    const pair = wanted.mode === "models" ? pairOf(choices.models) : null;
    set({...wanted, ...(pair ? {model: pair[0], b: pair[1]} : {})});
    renew();
    measure();
  }})));
  const first = select("first model", models, state.model || firstHere(choices.models), change("model"));
  const second = select("second model", models, state.b || firstHere(choices.models), change("b"));
  const text = area("prompt-a", "prompt", state.text, "The prompt", change("text", false));
  const other = area("prompt-b", "second prompt", state.other, "The second prompt", change("other", false));
  const system = area("system-b", "system prompt", state.system, "optional: the filler may stand between it and the question", change("system", false), "low");
  const kind = select("filler", Object.entries(FILLERS).filter(([k]) => choices.fillers.includes(k)), state.kind, change("kind"));
  const against = select("compared with", Object.entries(FILLERS).filter(([k]) => choices.fillers.includes(k)), state.against, change("against"));
  const unit = make("input", {value: state.unit, size: 4, maxLength: 40, "aria-label": "what is repeated", oninput: () => change("unit")(unit.value)});
  const counted = make("output", {textContent: state.count});
  const count = make("input", {type: "range", min: 0, max: 200, value: state.count, id: "count", "aria-label": "how many", oninput: () => {
    counted.textContent = count.value;
    change("count")(count.value);
  }});
  const by = select("counted as", [["text", "signs in the text"], ["ids", "exactly so many tokens"]], state.by, change("by"));
  const position = select("position", Object.entries(POSITIONS), state.position, change("position"));
  const layer = select("layer", [["0", "layer 0"]], state.layer || "0", (value) => { set({layer: value}); show(); });
  const head = select("head", [["", "mean of heads"]], state.head, (value) => { set({head: value}); show(); });
  const note = make("p", {className: "tiny"}), facts = make("dl", {className: "facts", id: "pair-facts"}), aligned = make("p", {className: "faint"});
  const bars = make("div", {id: "pair-bars"}), curves = make("div", {id: "curves"}), whole = [make("div", {id: "whole-a"}), make("div", {id: "whole-b"})];
  const titles = [make("h3"), make("h3")];
  const lines = {pair: new Curves(curves, {name: "aligned", told: "average attention weight of each token that both sides share"}),
    sides: whole.map((place, i) => new Curves(place, {name: `side-${"ab"[i]}`, told: `average attention weight of every token of side ${"ab"[i]}, the filler shaded`}))};
  let sides = null;

  const parts = {second: labelled("against", second), other: labelled("Second prompt", other, "tall"), against: labelled("against", against), unit: labelled("of", unit), filler: null};
  parts.filler = make("div", {className: "controls", id: "filler"}, labelled("Filler", kind), parts.unit, labelled("how many", count), counted, by, labelled("where", position), parts.against);
  const arrange = () => {
    for (const button of mode.querySelectorAll("button")) button.setAttribute("aria-pressed", String(button.dataset.mode === state.mode));
    parts.second.hidden = state.mode !== "models";
    parts.other.hidden = state.mode !== "prompts";
    parts.against.hidden = state.mode !== "fillers";
    parts.filler.hidden = state.mode === "prompts";
  };
  const renew = () => {
    for (const [box, name] of [[first, "model"], [second, "b"], [text, "text"], [other, "other"], [system, "system"], [kind, "kind"], [against, "against"], [unit, "unit"], [count, "count"], [by, "by"], [position, "position"]]) {
      if (state[name] !== "" || box.tagName !== "SELECT") box.value = state[name];
    }
    counted.textContent = state.count;
    arrange();
  };

  const filler = (which) => (!Number(state.count) ? null : {kind: which, count: Number(state.count), position: state.position, by: state.by,
    unit: ["repeat", "word"].includes(which) ? (state.unit || "/") : null});
  // What is asked of each side: [model, text, filler, what it is called].
  const asked = () => {
    const model = first.value, {mode: m} = state;
    if (m === "models") return [[model, state.text, filler(state.kind), model], [second.value, state.text, filler(state.kind), second.value]];
    if (m === "prompts") return [[model, state.text, null, "first prompt"], [model, state.other, null, "second prompt"]];
    const called = `with ${FILLERS[state.kind]}`;
    if (m === "fillers") return [[model, state.text, filler(state.kind), called], [model, state.text, filler(state.against), `with ${FILLERS[state.against]}`]];
    return [[model, state.text, null, "without filler"], [model, state.text, filler(state.kind), called]];
  };
  const known = new Map();  // a side that has not changed is not measured again
  const side = async ([model, said, fill, called], name) => {
    const body = {model, text: said, system: state.system.trim() ? state.system : null, filler: fill}, key = JSON.stringify(body);
    if (!known.has(key)) {
      const made = await work("/api/views", body, {replaces: name});
      if (!made) return null;
      known.set(key, made.view);
      while (known.size > 6) known.delete(known.keys().next().value);
    }
    try { return {...await get(`/api/views/${known.get(key)}`), called}; } catch (error) {
      if (!known.delete(key)) throw error;
      return side([model, said, fill, called], name);  // the server has forgotten it
    }
  };
  let turn = 0;
  const measure = guarded(async () => {
    const mine = ++turn, wanted = asked();
    if (!state.text.trim() || (state.mode === "prompts" && !state.other.trim())) throw new Error("A prompt is empty: type something for the model to read.");
    results.classList.add("stale");
    let a, b;
    try { [a, b] = [await side(wanted[0], "a"), mine === turn ? await side(wanted[1], "b") : null]; } finally { if (mine === turn) results.classList.remove("stale"); }
    if (!a || !b || mine !== turn) return;
    if (a.called === b.called) [a.called, b.called] = [`${a.called} (first)`, `${b.called} (second)`];
    sides = [a, b];
    [results.hidden, hint.hidden] = [false, true];
    note.textContent = [...new Set(sides.map((s) => s.note).filter(Boolean))].join("; ");
    const shared = a.layers.filter((n) => b.layers.includes(n));
    if (!shared.map(String).includes(state.layer)) set({layer: String(shared[0])});
    fill(layer, shared.map((n) => [n, `layer ${n}`]), state.layer);
    const most = Math.min(...sides.map((s) => Math.max(...s.heads)));
    if (state.head !== "" && Number(state.head) >= most) set({head: ""});
    fill(head, [["", "mean of heads"], ...[...Array(most).keys()].map((n) => [n, `head ${n}`])], state.head);
    await show();
  });
  let waiting = 0;
  const again = () => { clearTimeout(waiting); waiting = setTimeout(() => { if (state.text.trim()) measure(); }, 90); };

  const fact = (name, value, why) => make("div", {title: why}, make("dt", {textContent: name}), make("dd", {textContent: value === null || value === undefined ? "–" : value.toFixed(3)}));
  const show = guarded(async () => {
    const [a, b] = sides, where = {layer: state.layer, head: state.head};
    const pair = await get("/api/pair", {a: a.id, b: b.id, ...where});
    const n = pair.numbers;
    facts.replaceChildren(fact("λ, second on first", n.lambda, "slope through the origin of the second side’s averages on the first’s, over the tokens both share"),
      fact("λ under uniform attention", n.uniform_slope, "what λ would be if every query spread its attention evenly: the fall that any insertion brings"),
      fact("R² of one factor", n.lambda_r2, "how far that one factor explains the second side"),
      ...sides.flatMap((s, i) => (s.filler.length ? [fact(`filler’s unevenness, ${s.called}`, n[`uniformity_${"ab"[i]}`], "coefficient of variation of the averages over the filler: 0 is even")] : [])));
    aligned.textContent = `${pair.aligned} tokens are the same on both sides${pair.alone.some(Boolean) ? `; ${pair.alone[0]} of the first and ${pair.alone[1]} of the second have no twin and are left out here` : ""}. ${sides.map((s) => `${s.called}: ${s.prompt} tokens${s.filler.length ? `, ${s.filler.length} of filler` : ""}`).join(" · ")}.`;
    const side = (i) => (c) => ({side: sides[i].called, ...c});
    if (pair.aligned) await lines.pair.show(pair.aligned, (first_, last, bins) => get("/api/pair", {a: a.id, b: b.id, ...where, first: first_, last, bins}).then((p) => p.curves.map((c, i) => side(i)(c))),
      {says: (t) => pair.tokens[t], title: "token that both sides share, the filler cut out"});
    for (const [i, s] of sides.entries()) {
      titles[i].textContent = `Every token ${s.called}`;
      await lines.sides[i].show(s.read, (first_, last, bins) => get(`/api/views/${s.id}/curve`, {...where, of: "average", first: first_, last, bins}).then((c) => [side(i)(c)]),
        {says: (t) => s.tokens[t], spans: spansOf(s.filler), colours: [SIDES[i]]});
    }
    const rows = (await Promise.all(sides.map((s) => get(`/api/views/${s.id}/classes`, {head: state.head}).then((r) => r.rows.map((row) => ({...row, side: s.called})))))).flat();
    const there = CLASSES.filter((c) => rows.some((row) => row.class === c && row.mass > 0));
    const spec = (wide) => {
      const across = wide < 520 ? 1 : wide < 900 ? 2 : 4;
      return {facet: {field: "class", type: "nominal", title: null, sort: there}, columns: across, spec: {width: Math.floor(wide / across) - 62, height: 120, mark: "bar",
        encoding: {x: {field: "layer", type: "ordinal", axis: {labelOverlap: true, labelSeparation: 4, labelAngle: 0}}, xOffset: {field: "side", sort: null}, y: {field: "mass", type: "quantitative"},
          color: {field: "side", type: "nominal", sort: null, scale: {domain: sides.map((s) => s.called), range: SIDES}, legend: {title: null, orient: "top"}}, tooltip: [{field: "side"}, {field: "class"}, {field: "layer"}, {field: "mass", format: ".4f"}]}},
      resolve: {scale: {y: "independent"}, axis: {x: "independent"}}};
    };
    await draw(bars, spec, {name: "classes", rows: rows.filter((row) => there.includes(row.class)), told: "mass of each class of tokens in every layer, on both sides"});
    document.documentElement.dataset.compared = sides.map((s) => s.id).join(" ");
  });

  const hint = make("div", {className: "card empty"}, make("p", {}, make("strong", {textContent: "What changes when the prompt, the filler or the model does?"})),
    make("p", {textContent: "Take one of the published figures above, or choose what to compare and press Compare. Curves follow while you drag."}));
  const results = make("div", {hidden: true},
    make("div", {className: "card"}, make("div", {className: "head"}, make("h2", {textContent: "The tokens both sides share"}), make("div", {className: "controls"}, layer, head)), note, facts, aligned, curves),
    make("div", {className: "columns even"}, ...whole.map((place, i) => make("div", {className: "card"}, titles[i], place))),
    make("div", {className: "card"}, make("div", {className: "head"}, make("h2", {textContent: "Classes over layers"})), bars));
  host.replaceChildren(
    make("div", {className: "card"}, make("div", {className: "controls"}, mode, make("span", {className: "grow"}), figures),
      make("div", {className: "controls"}, labelled("Model", first), parts.second),
      make("details", {open: state.system !== "", id: "system-part-b"}, make("summary", {textContent: "System prompt"}), system),
      make("div", {className: "controls"}), text, parts.other, parts.filler,
      make("div", {className: "controls"}, make("button", {className: "main", id: "compare-now", textContent: "Compare", onclick: () => measure()}))),
    hint, results);
  if (!state.text) { set({text: PROBLEM}); text.value = PROBLEM; }
  set({model: first.value});
  arrange();
  if (state.tab === "compare") measure();
  return measure;
};
