// The tab that compares two views: with and without a filler, two fillers, two models, or two
// prompts.
import {get, guarded, work} from "./api.js";
import {Curves, draw, theme} from "./charts.js";
import {area, fill, firstHere, group, labelled, make, modelChoices, number, select} from "./dom.js";
import {spansOf} from "./playground.js";
import {set, state} from "./state.js";

const MODES = {
  filler: "With and without filler",
  fillers: "Filler against filler",
  models: "Two models",
  prompts: "Two prompts",
};
const FILLERS = {
  repeat: "repeated character",
  word: "repeated word",
  "random-tokens": "random tokens",
  sentence: "random sentences",
  lorem: "lorem ipsum",
};
const POSITIONS = {
  between: "before the question",
  end: "at the end",
  random: "at a random position",
  "before-system": "before the system prompt",
};
const PROBLEM =
  "Tom has 12 apples. He buys 3 bags with 4 apples each. How many apples has Tom now?";
const MAP =
  "## Target\n\n  * * #\n  * # *\n  # * *\n\n## Current\n\n  # * *\n  * # *\n  * * #\n\n" +
  "Which action turns the current map into the target?";
// The settings of the published figures.
const FIGURES = [
  [
    "Slashes against no filler",
    {
      mode: "filler",
      text: PROBLEM,
      system: "You solve word problems.",
      kind: "repeat",
      unit: "/",
      count: "55",
      by: "ids",
      position: "between",
      layer: "0",
      head: "0",
    },
  ],
  [
    "Slashes against a sentence",
    {
      mode: "fillers",
      text: PROBLEM,
      system: "You solve word problems.",
      kind: "repeat",
      unit: "/",
      count: "55",
      by: "ids",
      position: "between",
      against: "sentence",
      layer: "0",
      head: "0",
    },
  ],
  [
    "# and *: a base and its fine-tune",
    {mode: "models", text: MAP, system: "", count: "0", layer: "0", head: ""},
  ],
];
// A model and its fine-tune on maps, if both are on this machine: the real pair, or the tiny one.
const pairOf = (models) => {
  const here = new Set(models.filter((m) => m.here).map((m) => m.name));
  return [
    ["zoo:smollm2", "zoo:smollm2-phys"],
    ["zoo:spatial-base", "zoo:spatial-phys"],
  ].find((pair) => pair.every((name) => here.has(name)));
};
const CLASSES = ["hash", "star", "whitespace", "digit", "slash", "operator", "punctuation", "word"];

export const compare = (host, choices) => {
  const models = modelChoices(choices.models);
  const measured = () => Boolean(sides);
  const change =
    (name, quick = true) =>
    (value) => {
      set({[name]: value});
      if (quick && measured()) again();
    };
  const mode = make(
    "fieldset",
    {},
    make("legend", {textContent: "Compare"}),
    ...Object.entries(MODES).map(([name, title]) => {
      const button = make("button", {
        className: "chip",
        textContent: title,
        onclick: () => {
          set({mode: name});
          arrange();
          if (measured()) again();
        },
      });
      button.dataset.mode = name;
      return button;
    }),
  );
  const figures = make(
    "fieldset",
    {},
    make("legend", {textContent: "Published figures"}),
    ...FIGURES.map(([title, settings]) =>
      make("button", {
        className: "chip",
        textContent: title,
        onclick: () => {
          const pair = settings.mode === "models" ? pairOf(choices.models) : null;
          set({...settings, ...(pair ? {model: pair[0], b: pair[1]} : {})});
          renew();
          measure();
        },
      }),
    ),
  );
  const first = select(
    "first model",
    models,
    state.model || firstHere(choices.models),
    change("model"),
  );
  const second = select("second model", models, state.b || firstHere(choices.models), change("b"));
  const text = area("prompt-a", "prompt", state.text, "The prompt", change("text", false));
  const other = area(
    "prompt-b",
    "second prompt",
    state.other,
    "The second prompt",
    change("other", false),
  );
  const system = area(
    "system-b",
    "system prompt",
    state.system,
    "optional; the filler may be between it and the question",
    change("system", false),
    "low",
  );
  const kind = select(
    "filler",
    Object.entries(FILLERS).filter(([k]) => choices.fillers.includes(k)),
    state.kind,
    change("kind"),
  );
  const against = select(
    "compared with",
    Object.entries(FILLERS).filter(([k]) => choices.fillers.includes(k)),
    state.against,
    change("against"),
  );
  const unit = make("input", {
    value: state.unit,
    size: 4,
    maxLength: 40,
    "aria-label": "repeated text",
    oninput: () => change("unit")(unit.value),
  });
  const counted = make("output", {textContent: state.count});
  const count = make("input", {
    type: "range",
    min: 0,
    max: 200,
    value: state.count,
    id: "count",
    "aria-label": "count",
    oninput: () => {
      counted.textContent = count.value;
      change("count")(count.value);
    },
  });
  const by = select(
    "counted as",
    [
      ["text", "repetitions in the text"],
      ["ids", "exact number of tokens"],
    ],
    state.by,
    change("by"),
  );
  const position = select(
    "position",
    Object.entries(POSITIONS),
    state.position,
    change("position"),
  );
  const layer = select("layer", [["0", "layer 0"]], state.layer || "0", (value) => {
    set({layer: value});
    show();
  });
  const head = select("head", [["", "mean of heads"]], state.head, (value) => {
    set({head: value});
    show();
  });
  const note = make("p", {className: "tiny"}),
    numbers = make("dl", {className: "numbers", id: "pair-numbers"}),
    aligned = make("p", {className: "faint"});
  const bars = make("div", {id: "pair-bars"}),
    curves = make("div", {id: "curves"}),
    whole = [make("div", {id: "whole-a"}), make("div", {id: "whole-b"})];
  const titles = [make("h3"), make("h3")];
  const lines = {
    pair: new Curves(curves, {
      name: "aligned",
      label: "average attention weight of each token that both sides share",
    }),
    sides: whole.map(
      (box, i) =>
        new Curves(box, {
          name: `side-${"ab"[i]}`,
          label:
            `average attention weight of every token of side ${"ab"[i]}, ` +
            "with the filler shaded",
        }),
    ),
  };
  let sides = null;

  const parts = {
    second: labelled("against", second),
    other: labelled("Second prompt", other, "tall"),
    against: labelled("against", against),
    unit: labelled("of", unit),
    filler: null,
  };
  parts.filler = make(
    "div",
    {className: "controls", id: "filler"},
    labelled("Filler", kind),
    parts.unit,
    labelled("count", count),
    counted,
    by,
    labelled("position", position),
    parts.against,
  );
  const arrange = () => {
    for (const button of mode.querySelectorAll("button"))
      button.setAttribute("aria-pressed", String(button.dataset.mode === state.mode));
    parts.second.hidden = state.mode !== "models";
    parts.other.hidden = state.mode !== "prompts";
    parts.against.hidden = state.mode !== "fillers";
    parts.filler.hidden = state.mode === "prompts";
  };
  const renew = () => {
    for (const [box, name] of [
      [first, "model"],
      [second, "b"],
      [text, "text"],
      [other, "other"],
      [system, "system"],
      [kind, "kind"],
      [against, "against"],
      [unit, "unit"],
      [count, "count"],
      [by, "by"],
      [position, "position"],
    ]) {
      if (state[name] !== "" || box.tagName !== "SELECT") box.value = state[name];
    }
    counted.textContent = state.count;
    arrange();
  };

  const filler = (which) =>
    !Number(state.count)
      ? null
      : {
          kind: which,
          count: Number(state.count),
          position: state.position,
          by: state.by,
          unit: ["repeat", "word"].includes(which) ? state.unit || "/" : null,
        };
  // The request of each side: [model, text, filler, label].
  const requests = () => {
    const model = first.value,
      {mode: m} = state;
    if (m === "models")
      return [
        [model, state.text, filler(state.kind), model],
        [second.value, state.text, filler(state.kind), second.value],
      ];
    if (m === "prompts")
      return [
        [model, state.text, null, "first prompt"],
        [model, state.other, null, "second prompt"],
      ];
    const label = `with ${FILLERS[state.kind]}`;
    if (m === "fillers")
      return [
        [model, state.text, filler(state.kind), label],
        [model, state.text, filler(state.against), `with ${FILLERS[state.against]}`],
      ];
    return [
      [model, state.text, null, "without filler"],
      [model, state.text, filler(state.kind), label],
    ];
  };
  const known = new Map(); // an unchanged side is not measured again
  const side = async ([model, prompt, fill, label], name) => {
    const body = {
        model,
        text: prompt,
        system: state.system.trim() ? state.system : null,
        filler: fill,
      },
      key = JSON.stringify(body);
    if (!known.has(key)) {
      const made = await work("/api/views", body, {replaces: name});
      if (!made) return null;
      known.set(key, made.view);
      while (known.size > 6) known.delete(known.keys().next().value);
    }
    try {
      return {...(await get(`/api/views/${known.get(key)}`)), label};
    } catch (error) {
      if (!known.delete(key)) throw error;
      return side([model, prompt, fill, label], name); // the server no longer has the view
    }
  };
  let turn = 0;
  const measure = guarded(async () => {
    const mine = ++turn,
      [requestA, requestB] = requests();
    if (!state.text.trim() || (state.mode === "prompts" && !state.other.trim()))
      throw new Error("A prompt is empty. Type a text.");
    results.classList.add("stale");
    let a, b;
    try {
      [a, b] = [await side(requestA, "a"), mine === turn ? await side(requestB, "b") : null];
    } finally {
      if (mine === turn) results.classList.remove("stale");
    }
    if (!a || !b || mine !== turn) return;
    if (a.label === b.label) [a.label, b.label] = [`${a.label} (first)`, `${b.label} (second)`];
    sides = [a, b];
    [results.hidden, hint.hidden] = [false, true];
    note.textContent = [...new Set(sides.map((s) => s.note).filter(Boolean))].join("; ");
    const shared = a.layers.filter((n) => b.layers.includes(n));
    if (!shared.map(String).includes(state.layer)) set({layer: String(shared[0])});
    fill(
      layer,
      shared.map((n) => [n, `layer ${n}`]),
      state.layer,
    );
    const most = Math.min(...sides.map((s) => Math.max(...s.heads)));
    if (state.head !== "" && Number(state.head) >= most) set({head: ""});
    fill(
      head,
      [["", "mean of heads"], ...[...Array(most).keys()].map((n) => [n, `head ${n}`])],
      state.head,
    );
    await show();
  });
  let waiting = 0;
  const again = () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => {
      if (state.text.trim()) measure();
    }, 90);
  };

  const entry = (name, value, why) =>
    make(
      "div",
      {title: why},
      make("dt", {textContent: name}),
      make("dd", {textContent: value === null || value === undefined ? "–" : value.toFixed(3)}),
    );
  const show = guarded(async () => {
    const [a, b] = sides,
      where = {layer: state.layer, head: state.head};
    const pair = await get("/api/comparison", {a: a.id, b: b.id, ...where});
    const n = pair.numbers;
    numbers.replaceChildren(
      entry(
        "λ, second on first",
        n.lambda,
        "slope through the origin: average weights of the second side against those of the " +
          "first, over the tokens both share",
      ),
      entry(
        "λ under uniform attention",
        n.uniform_slope,
        "λ if every query attended equally to all visible tokens: the decrease that any " +
          "insertion causes",
      ),
      entry(
        "R² of one factor",
        n.lambda_r2,
        "share of the second side’s variance that one factor explains",
      ),
      ...sides.flatMap((s, i) =>
        s.filler.length
          ? [
              entry(
                `variation over the filler, ${s.label}`,
                n[`uniformity_${"ab"[i]}`],
                "coefficient of variation of the average weights over the filler: 0 is uniform",
              ),
            ]
          : [],
      ),
    );
    const [lostA, lostB] = pair.unaligned;
    const lost =
      lostA || lostB
        ? `; ${lostA} of the first and ${lostB} of the second have no aligned position and are ` +
          "left out"
        : "";
    const counts = sides.map((s) => {
      const inserted = s.filler.length ? `, ${s.filler.length} of filler` : "";
      return `${s.label}: ${s.prompt} tokens${inserted}`;
    });
    aligned.textContent =
      `${pair.aligned} tokens are the same on both sides${lost}. ` + `${counts.join(" · ")}.`;
    const side = (i) => (c) => ({side: sides[i].label, ...c});
    if (pair.aligned)
      await lines.pair.show(
        pair.aligned,
        (first_, last, bins) =>
          get("/api/comparison", {a: a.id, b: b.id, ...where, first: first_, last, bins}).then(
            (p) => p.curves.map((c, i) => side(i)(c)),
          ),
        {textOf: (t) => pair.tokens[t], title: "token that both sides share, without the filler"},
      );
    for (const [i, s] of sides.entries()) {
      titles[i].textContent = `All tokens, ${s.label}`;
      await lines.sides[i].show(
        s.read,
        (first_, last, bins) =>
          get(`/api/views/${s.id}/token-curve`, {
            ...where,
            of: "average",
            first: first_,
            last,
            bins,
          }).then((c) => [side(i)(c)]),
        {textOf: (t) => s.tokens[t], spans: spansOf(s.filler), colours: [theme.sides[i]]},
      );
    }
    const rows = (
      await Promise.all(
        sides.map((s) =>
          get(`/api/views/${s.id}/class-masses`, {head: state.head}).then((r) =>
            r.rows.map((row) => ({...row, side: s.label})),
          ),
        ),
      )
    ).flat();
    const present = CLASSES.filter((c) => rows.some((row) => row.class === c && row.mass > 0));
    const spec = (wide) => {
      const across = wide < 520 ? 1 : wide < 900 ? 2 : 4;
      return {
        facet: {field: "class", type: "nominal", title: null, sort: present},
        columns: across,
        spec: {
          width: Math.floor(wide / across) - 62,
          height: 120,
          mark: "bar",
          encoding: {
            x: {
              field: "layer",
              type: "ordinal",
              axis: {labelOverlap: true, labelSeparation: 4, labelAngle: 0},
            },
            xOffset: {field: "side", sort: null},
            y: {field: "mass", type: "quantitative"},
            color: {
              field: "side",
              type: "nominal",
              sort: null,
              scale: {domain: sides.map((s) => s.label), range: theme.sides},
              legend: {title: null, orient: "top"},
            },
            tooltip: [
              {field: "side"},
              {field: "class"},
              {field: "layer"},
              {field: "mass", format: ".4f"},
            ],
          },
        },
        resolve: {scale: {y: "independent"}, axis: {x: "independent"}},
      };
    };
    await draw(bars, spec, {
      name: "classes",
      rows: rows.filter((row) => present.includes(row.class)),
      label: "mass of each class of tokens in every layer, on both sides",
    });
    document.documentElement.dataset.compared = sides.map((s) => s.id).join(" ");
  });

  const hint = group(
    "card empty",
    make(
      "p",
      {},
      make("strong", {textContent: "What changes with the prompt, the filler or the model?"}),
    ),
    make("p", {
      textContent:
        "Choose one of the published figures above, or choose what to compare and press " +
        "Compare. The curves update while you drag.",
    }),
  );
  const results = make(
    "div",
    {hidden: true},
    group(
      "card",
      group(
        "head",
        make("h2", {textContent: "Tokens that both sides share"}),
        group("controls", layer, head),
      ),
      note,
      numbers,
      aligned,
      curves,
    ),
    group("columns even", ...whole.map((box, i) => group("card", titles[i], box))),
    group("card", group("head", make("h2", {textContent: "Classes over layers"})), bars),
  );
  host.replaceChildren(
    group(
      "card",
      group("controls", mode, make("span", {className: "grow"}), figures),
      group("controls", labelled("Model", first), parts.second),
      make(
        "details",
        {open: state.system !== "", id: "system-part-b"},
        make("summary", {textContent: "System prompt"}),
        system,
      ),
      group("controls"),
      text,
      parts.other,
      parts.filler,
      group(
        "controls",
        make("button", {
          className: "main",
          id: "compare-now",
          textContent: "Compare",
          onclick: () => measure(),
        }),
      ),
    ),
    hint,
    results,
  );
  if (!state.text) {
    set({text: PROBLEM});
    text.value = PROBLEM;
  }
  set({model: first.value});
  arrange();
  if (state.tab === "compare") measure();
  return measure;
};
