// The tab of one prompt: shaded tokens, a map of heads, bars of classes, the steps of a completion.
import {get, guarded, queryOf, showStatus, work} from "./api.js";
import {Curves, draw, theme} from "./charts.js";
import {
  area,
  chances,
  fill,
  firstHere,
  group,
  labelled,
  make,
  modelChoices,
  number,
  select,
} from "./dom.js";
import {Heads} from "./heads.js";
import {numberOr, set, state} from "./state.js";
import {TextView} from "./text.js";

const EXAMPLES = [
  [
    "A word problem",
    "Tom has 12 apples. He buys 3 bags with 4 apples each. How many apples has Tom now?",
  ],
  ["A map of # and *", "## Map\n\n  * * *\n  * # *\n  * * *\n\nMove the # one step to the right."],
  ["A repetition", "The cat sat on the mat. The dog sat on the log. The cat sat on the"],
];
const QUERIES = {
  all: "all tokens",
  last: "the last prompt token",
  predicts: "the tokens that predict the completion",
};
const SHADES = {
  received: "attention received",
  average: "average attention weight",
  lift: "lift (1: no preference)",
};

// The form: model, prompt, system prompt, length of the completion.
const composer = (choices, measure) => {
  const model = select(
    "model",
    modelChoices(choices.models),
    state.model || firstHere(choices.models),
    (value) => set({model: value}),
  );
  const text = area("prompt", "prompt", state.text, "Type or paste a prompt", (value) =>
    set({text: value}),
  );
  const system = area(
    "system",
    "system prompt",
    state.system,
    "You are a helpful assistant.",
    (value) => set({system: value}),
    "low",
  );
  const more = make(
    "details",
    {open: state.system !== "", id: "system-part"},
    make("summary", {textContent: "System prompt"}),
    system,
    make("p", {
      className: "faint",
      textContent: "With a system prompt, the model’s chat template is applied.",
    }),
  );
  const check = (name, label) => {
    const box = make("input", {
      type: "checkbox",
      checked: state[name] === "1",
      onchange: () => set({[name]: box.checked ? "1" : ""}),
    });
    return labelled(label, box, "check");
  };
  const completion = make("input", {
    type: "number",
    min: 0,
    max: choices.completion,
    value: state.completion,
    id: "completion",
    size: 4,
    onchange: () => set({completion: completion.value}),
  });
  const examples = make(
    "fieldset",
    {},
    make("legend", {textContent: "Examples"}),
    ...EXAMPLES.map(([name, example]) =>
      make("button", {
        className: "chip",
        textContent: name,
        onclick: () => {
          text.value = example;
          set({text: example, token: ""});
          measure();
        },
      }),
    ),
  );
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) measure();
  });
  set({model: model.value});
  return group(
    "card",
    group("controls", labelled("Model", model), make("span", {className: "grow"}), examples),
    text,
    group("controls", more),
    group(
      "controls",
      make("button", {
        className: "main",
        id: "measure",
        textContent: "Measure",
        title: "Ctrl+Enter",
        onclick: measure,
      }),
      labelled("tokens to generate", completion),
      check("chat", "chat template"),
      check("beyond", "allow more tokens than the model has positions"),
      make("span", {
        className: "faint",
        textContent: `up to ${choices.longest.toLocaleString("en")} tokens · Ctrl+Enter measures`,
      }),
    ),
  );
};

export const playground = (host, choices) => {
  const note = make("p", {className: "tiny"}),
    info = make("p", {className: "info", id: "info", "aria-live": "polite"});
  const textHost = make("div", {
    className: "text",
    id: "text",
    tabIndex: -1,
    role: "group",
    "aria-label": "the tokens of the prompt",
  });
  const scale = make("span", {className: "scale", id: "scale"}),
    bars = make("div", {id: "bars"}),
    along = make("div", {id: "along"});
  const nextTokens = make("div", {id: "next-tokens"}),
    steps = make("div", {className: "controls", id: "steps", hidden: true});
  const layer = select("layer", [], "", (value) => pick(numberOr(value), numberOr(state.head)));
  const head = select("head", [], "", (value) => pick(numberOr(state.layer), numberOr(value)));
  const queries = select("queries", ["all"], "all", (value) => {
    set({queries: value});
    refresh();
    heads.show(data);
  });
  const of = select(
    "shade",
    choices.shades.map((s) => [s, SHADES[s]]),
    state.of,
    (value) => {
      set({of: value});
      refresh();
    },
  );
  const toggle = select(
    "row",
    [
      ["to", "its attention to other tokens"],
      ["by", "the attention of other tokens to it"],
    ],
    state.direction,
    (value) => {
      set({direction: value});
      if (view.chosen !== null) choose(view.chosen, null);
    },
  );
  const links = make("div", {className: "saves", id: "downloads"});
  const cut = make("button", {
    id: "knockout",
    textContent: "Knock out the chosen tokens",
    hidden: true,
    onclick: () => knockout(),
  });
  const clear = make("button", {
    className: "small",
    id: "clear",
    textContent: "Clear the selection",
    hidden: true,
    onclick: () => choose(null, null),
  });
  const knocked = make("div", {id: "knocked"});
  const view = new TextView(textHost, {
    onhover: (line) => {
      info.textContent = line;
    },
    onchoose: (n, range) => choose(n, range),
  });
  const heads = new Heads({
    onchoose: (l, h) => pick(l, h),
    ontype: () => {
      [layer.value, head.value] = [state.layer, state.head];
      choose(null, null);
    },
  });
  const curve = new Curves(along, {
    name: "along-the-text",
    label: "the values of the shades, along the text",
    onrange: (from, to) => set({from: String(from), to: String(to)}),
  });
  let data = null,
    span = null;

  const measure = guarded(async () => {
    if (!state.text.trim()) throw new Error("The prompt is empty. Type a text.");
    waiting.hidden = data !== null;
    hint.hidden = true;
    results.classList.add("stale");
    let made;
    try {
      made = await work(
        "/api/views",
        {
          model: state.model,
          text: state.text,
          chat: state.chat === "1",
          system: state.system.trim() ? state.system : null,
          completion: Number(state.completion) || 0,
          beyond_positions: state.beyond === "1",
        },
        {replaces: "view", early: (now) => open(now.view)},
      );
    } finally {
      results.classList.remove("stale");
      waiting.hidden = true;
      hint.hidden = data !== null;
    }
    if (!made) return;
    await open(made.view);
    if (state.token !== "" && Number(state.token) < data.read)
      await choose(Number(state.token), null);
    document.documentElement.dataset.ready = data.id;
  });

  // A view may be partial: the layers of a long text arrive one by one.
  const open = async (id) => {
    const fresh = data?.id !== id;
    results.classList.remove("stale");
    data = await get(`/api/views/${id}`);
    [hint.hidden, waiting.hidden, results.hidden] = [true, true, false];
    note.textContent = data.note;
    if (!data.layers.map(String).includes(state.layer) && data.layers.length === data.layer_count)
      set({layer: ""});
    if (state.head !== "" && Number(state.head) >= Math.max(...data.heads)) set({head: ""});
    if (!data.queries.includes(state.queries)) set({queries: "all"});
    const far =
      data.layers.length < data.layer_count
        ? ` (${data.layers.length} of ${data.layer_count} so far)`
        : "";
    fill(
      layer,
      [["", `mean of layers${far}`], ...data.layers.map((n) => [n, `layer ${n}`])],
      state.layer,
    );
    fill(
      head,
      [
        ["", "mean of heads"],
        ...[...Array(Math.max(...data.heads)).keys()].map((n) => [n, `head ${n}`]),
      ],
      state.head,
    );
    fill(
      queries,
      data.queries.map((q) => [q, QUERIES[q]]),
      state.queries,
    );
    if (fresh) {
      span = null;
      [cut.hidden, clear.hidden] = [true, true];
      info.textContent = "Point at a token to read its value. Click it to show its attention row.";
      knocked.replaceChildren();
      view.show(data);
    }
    nextTokens.replaceChildren(
      ...(data.next_tokens.length
        ? [make("h2", {textContent: "Most probable next tokens"}), chances(data.next_tokens)]
        : []),
    );
    showSteps();
    await Promise.all([refresh(), heads.show(data)]);
    document.documentElement.dataset.shown = `${data.id} ${data.layers.length}`;
  };

  const where = () => ({
    layer: data.layers.map(String).includes(state.layer) ? state.layer : "",
    head: state.head,
    queries: state.queries,
    of: state.of,
    among: heads.among(),
  });
  const refresh = guarded(async () => {
    const choice = where();
    const [{values}, {rows}] = await Promise.all([
      get(`/api/views/${data.id}/token-values`, choice),
      get(`/api/views/${data.id}/class-masses`, {queries: choice.queries, head: choice.head}),
    ]);
    if (view.chosen === null) shaded(values, `${SHADES[choice.of]}, ${whichHeads()}`);
    heads.mark();
    showLinks();
    document.documentElement.dataset.shaded = JSON.stringify(choice);
    if (view.chosen === null)
      await lined(SHADES[choice.of], (first, last, bins) =>
        get(`/api/views/${data.id}/token-curve`, {...where(), first, last, bins}),
      );
    await draw(
      bars,
      (wide) => ({
        width: "container",
        height: 210,
        autosize: {type: "fit-x", contains: "padding"},
        mark: {type: "bar"},
        encoding: {
          x: {
            field: "layer",
            type: "ordinal",
            axis: {labelOverlap: true, labelSeparation: 4, labelAngle: 0},
          },
          y: {field: "mass", type: "quantitative", title: "mass per query"},
          color: {
            field: "class",
            type: "nominal",
            scale: {domain: data.names, range: data.colours},
            legend: {
              title: null,
              orient: "bottom",
              columns: Math.max(2, Math.floor((wide - 50) / 104)),
              values: [...new Set(rows.map((r) => r.class))],
            },
          },
          tooltip: [{field: "layer"}, {field: "class"}, {field: "mass", format: ".4f"}],
        },
      }),
      {
        name: "classes",
        rows,
        label: `mass of each class of tokens in every layer, ${whichHeads()}`,
      },
    );
  });
  const lined = (y, fetch) =>
    curve.show(
      data.read,
      async (first, last, bins) => [{side: y, ...(await fetch(first, last, bins))}],
      {
        textOf: (n) => data.tokens[n],
        y,
        spans: spansOf(data.filler),
        colours: [theme.shade],
        first: Number(state.from) || 0,
        last: state.to === "" ? null : Number(state.to),
      },
    );
  const shaded = (values, what) => {
    view.shade(values, what);
    scale.replaceChildren(
      make("span", {textContent: "0"}),
      make("i"),
      make("span", {textContent: `${number(view.top)}${view.most > view.top ? " or more" : ""}`}),
    );
  };
  const headName = () => (state.head === "" ? "mean of heads" : `head ${state.head}`);
  const whichHeads = () =>
    heads.label() ??
    `${state.layer === "" ? "mean of layers" : `layer ${state.layer}`}, ${headName()}`;
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
    cut.hidden = span === null || span[1] >= data.prompt - 1;
    clear.hidden = span === null;
    if (range) {
      view.mark(view.chosen, range);
      info.textContent = `tokens ${range[0]} to ${range[1]} are chosen`;
      return;
    }
    view.mark(n);
    of.disabled = n !== null; // a row shows attention weights only
    set({token: n === null ? "" : String(n)});
    if (n === null) {
      delete document.documentElement.dataset.row;
      await refresh();
      info.textContent = "";
      return;
    }
    if (n >= data.read) {
      showStatus(
        "The model never reads the last token of a completion, so this token has no attention row.",
      );
      return;
    }
    if (state.layer === "") {
      set({layer: String(data.layers[0])});
      layer.value = state.layer;
      heads.mark();
    }
    const asked = {
      token: n,
      layer: Number(state.layer),
      head: numberOr(state.head),
      direction: state.direction,
    };
    const row = await work(`/api/views/${data.id}/attention-row`, asked, {replaces: "row"});
    if (!row) return;
    const scope = `${state.layer === "" ? "" : `layer ${state.layer}, `}${headName()}`;
    shaded(
      row.values,
      state.direction === "to"
        ? `weight of token ${n} on this token, ${scope}`
        : `weight of this token on token ${n}, ${scope}`,
    );
    view.hover(n);
    document.documentElement.dataset.row = String(n);
    await lined(
      state.direction === "to"
        ? `weight of token ${n} on each token`
        : `weight of each token on token ${n}`,
      (first, last, bins) =>
        get(`/api/views/${data.id}/attention-row-curve`, {...asked, first, last, bins}),
    );
  });

  const showSteps = () => {
    const made = data.tokens.length - data.prompt;
    steps.hidden = !made;
    if (!made) return;
    const line = make("span", {className: "faint", "aria-live": "polite"});
    const slide = make("input", {
      type: "range",
      min: 0,
      max: made - 1,
      value: 0,
      id: "step",
      "aria-label": "step of the completion",
      oninput: () => {
        const n = data.prompt + Number(slide.value);
        const token = JSON.stringify(data.tokens[n]);
        const step = Number(slide.value) + 1;
        line.textContent = `${step} of ${made}: ${token} was predicted at token ${n - 1}`;
        choose(n - 1, null);
      },
    });
    const step = (by) => () => {
      slide.value = Number(slide.value) + by;
      slide.dispatchEvent(new Event("input"));
    };
    steps.replaceChildren(
      make("span", {textContent: "Steps of the completion"}),
      make("button", {
        className: "small",
        textContent: "◀",
        "aria-label": "step back",
        onclick: step(-1),
      }),
      slide,
      make("button", {
        className: "small",
        textContent: "▶",
        "aria-label": "step forward",
        onclick: step(1),
      }),
      line,
    );
  };
  const showLinks = () => {
    const query = queryOf({...where(), among: ""});
    const link = (label, path) =>
      make("a", {textContent: label, href: `/api/views/${data.id}/${path}`, download: ""});
    links.replaceChildren(
      make("span", {className: "faint", textContent: "Download:"}),
      link("numbers (CSV)", `numbers.csv?${query}`),
      link("experiment file", `experiment.yaml?${queryOf({layer: state.layer, head: state.head})}`),
      link("this text as one HTML file", `page.html?queries=${encodeURIComponent(state.queries)}`),
    );
  };
  const knockout = guarded(async () => {
    const effect = await work(
      `/api/views/${data.id}/knockout-effect`,
      {first: span[0], last: span[1], layer: numberOr(state.layer), head: numberOr(state.head)},
      {replaces: "knockout"},
    );
    if (!effect) return;
    const scope =
      state.layer === ""
        ? "in every layer"
        : `only in layer ${state.layer}${state.head === "" ? "" : `, head ${state.head}`}`;
    const cutText = JSON.stringify(
      data.tokens
        .slice(span[0], span[1] + 1)
        .join("")
        .slice(0, 80),
    );
    knocked.replaceChildren(
      make("h2", {textContent: `Knockout (ablation) of attention to ${cutText} ${scope}`}),
      make("p", {
        className: "faint",
        textContent:
          `tokens ${span[0]} to ${span[1]}; change of the next-token distribution: ` +
          `${number(effect.kl)} nats (Kullback–Leibler divergence)`,
      }),
      group(
        "sides",
        make("div", {}, make("h3", {textContent: "before"}), chances(effect.before)),
        make("div", {}, make("h3", {textContent: "after"}), chances(effect.after)),
      ),
    );
  });

  const hint = make(
    "div",
    {className: "card empty", id: "hint"},
    make("p", {}, make("strong", {textContent: "Where does attention go?"})),
    make("p", {
      textContent:
        "Choose an example or type a prompt, and press Measure. The model runs once. Then choose " +
        "any layer, head or token.",
    }),
  );
  const waiting = make(
    "div",
    {className: "card empty", id: "waiting", hidden: true},
    make("p", {textContent: "The model is running …"}),
  );
  const results = make(
    "div",
    {hidden: true, id: "results"},
    note,
    group(
      "columns",
      make(
        "div",
        {},
        group(
          "card",
          group("head", make("h2", {textContent: "The text, shaded by attention"}), scale),
          group("controls", layer, head, labelled("queries", queries), labelled("shade", of)),
          steps,
          textHost,
          info,
          group(
            "controls",
            labelled("chosen token:", toggle),
            clear,
            cut,
            make("span", {
              className: "faint",
              textContent:
                "To choose several tokens: drag, shift-click, or press Shift with the arrow keys.",
            }),
          ),
          links,
        ),
        group("card", group("head", make("h2", {textContent: "Along the text"})), along),
        group("card", nextTokens, knocked),
      ),
      make(
        "div",
        {},
        heads.card,
        group("card", group("head", make("h2", {textContent: "Classes over layers"})), bars),
      ),
    ),
  );
  host.replaceChildren(
    composer(choices, () => measure()),
    hint,
    waiting,
    results,
  );
  if (state.text) measure();
  return measure;
};
// The runs of consecutive positions in a sorted list.
export const spansOf = (tokens) => {
  const out = [];
  for (const n of tokens) {
    if (out.length && out.at(-1)[1] === n) out.at(-1)[1] = n + 1;
    else out.push([n, n + 1]);
  }
  return out;
};
