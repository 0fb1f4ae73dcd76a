// The card with the map of heads: by a measure on this prompt, or by head type.
import {get, guarded, work} from "./api.js";
import {fill, group, labelled, make, number, select} from "./dom.js";
import {HeadMap} from "./map.js";
import {numberOr, set, state} from "./state.js";

const TYPES = "head types";
const named = (map) => map.replaceAll("_", " ");

// The types and scores of a head in one line.
const describe = (head) => {
  if (!head) return "not measured";
  const ofClass = head.class && head.type === "class-specific" ? ` (${head.class})` : "";
  const scores = Object.entries(head.scores).map(
    ([name, score]) => `${name} ${score === null ? "–" : score.toFixed(2)}`,
  );
  return `${head.types.join(", ") || head.type}${ofClass} · ${scores.join(", ")}`;
};

export class Heads {
  constructor({onchoose, ontype}) {
    this.ontype = ontype;
    this.of = select("map", ["entropy"], "entropy", (value) => {
      set({map: value, type: ""});
      this.draw();
      this.ontype();
    });
    this.host = make("div", {className: "map", id: "map"});
    this.info = make("p", {className: "faint", id: "head-info", "aria-live": "polite"});
    this.legend = make("div", {
      className: "legend",
      id: "head-types",
      role: "group",
      "aria-label": "head types",
    });
    this.map = new HeadMap(this.host, {
      onchoose,
      onhover: (line) => {
        this.info.textContent = line;
      },
    });
    this.card = group(
      "card",
      group("head", make("h2", {textContent: "Heads"}), labelled("by", this.of)),
      this.legend,
      this.host,
      this.info,
    );
    this.result = null;
    this.needles = false;
  }

  async show(data) {
    if (this.data?.model !== data.model) {
      this.result = null;
      this.needles = false;
    }
    this.data = data;
    if (![...data.maps, TYPES].includes(state.map)) set({map: "entropy"});
    const of = (group, options) => ({group, options: options.map((m) => [m, named(m)])});
    fill(
      this.of,
      [
        of(
          "On this prompt",
          data.maps.filter((m) => !/^(mass|lift) /.test(m)),
        ),
        {group: "Of the model", options: [[TYPES, "head types (sink, induction, …)"]]},
        of(
          "Mass of a class",
          data.maps.filter((m) => m.startsWith("mass ")),
        ),
        of(
          "Lift of a class",
          data.maps.filter((m) => m.startsWith("lift ")),
        ),
      ],
      state.map,
    );
    // Head types need the model, which is busy until all layers are measured.
    if (state.map !== TYPES || data.layers.length === data.layer_count) await this.draw();
  }

  draw = guarded(async () => {
    if (state.map === TYPES) {
      await this.byType();
      return;
    }
    const {rows} = await get(`/api/views/${this.data.id}/head-values`, {
      of: state.map,
      queries: state.queries,
    });
    this.map.numbers(this.data.layers, rows, named(state.map));
    this.mark();
    this.legend.replaceChildren(
      make(
        "span",
        {className: "scale linear"},
        make("span", {textContent: number(this.map.low)}),
        make("i"),
        make("span", {textContent: number(this.map.high)}),
      ),
    );
    this.info.textContent =
      "Rows are layers, columns are heads. Click a head to shade the text by it, or a layer’s " +
      "number for the mean of its heads.";
    this.host.dataset.map = state.map;
  });

  async byType() {
    if (!this.result || this.result.needles !== this.needles) {
      this.info.textContent = "Classifying every head on generated texts …";
      const result = await work(
        "/api/head-types",
        {model: this.data.model, needles: this.needles},
        {replaces: "head-types"},
      );
      if (!result) {
        this.needles = false;
        return;
      }
      this.result = result;
      this.by = new Map(result.heads.map((h) => [`${h.layer}.${h.head}`, h]));
    }
    const {types, none, prompts, needles} = this.result;
    const colours = Object.fromEntries([...types, none].map((t) => [t.name, t.colour]));
    const rows = this.data.layers.map((layer, i) =>
      [...Array(this.data.heads[i]).keys()].map((h) => this.by.get(`${layer}.${h}`)),
    );
    this.map.show(this.data.layers, rows, "head type", describe, (head) =>
      head?.type === none.name ? "var(--soft)" : (colours[head?.type] ?? "transparent"),
    );
    this.mark();
    this.legend.replaceChildren(
      ...types.map((type) => {
        const sign = make("i");
        sign.style.backgroundColor = type.colour;
        const button = make(
          "button",
          {
            className: "chip",
            title: type.rule,
            disabled: !type.heads,
            onclick: () => {
              set({type: state.type === type.name ? "" : type.name, layer: "", head: ""});
              this.mark();
              this.ontype();
            },
          },
          sign,
          `${type.name} ${type.heads}`,
        );
        button.dataset.type = type.name;
        return button;
      }),
      ...(needles
        ? []
        : [
            make("button", {
              className: "small",
              textContent: "Search for retrieval heads too (slow)",
              onclick: () => {
                this.needles = true;
                this.draw();
              },
            }),
          ]),
    );
    this.info.textContent =
      "A head has a type if the whole 95 % confidence interval of its score is above a " +
      `threshold. Scores are measured on ${prompts} generated texts, not on this prompt. ` +
      "Choose a type to shade the text by the mean of its heads.";
    this.host.dataset.map = TYPES;
    this.mark();
  }

  // The heads of the chosen type as `layer.head`, or null.
  chosen() {
    if (state.map !== TYPES || !state.type || !this.result) return null;
    return this.result.heads
      .filter((h) => h.types.includes(state.type) && this.data.layers.includes(h.layer))
      .map((h) => `${h.layer}.${h.head}`);
  }

  among() {
    return (this.chosen() ?? []).join(",");
  }

  label() {
    const chosen = this.chosen();
    return chosen ? `mean of ${chosen.length} ${state.type} heads` : null;
  }

  release() {
    if (state.type) {
      set({type: ""});
      this.mark();
    }
  }

  mark() {
    const chosen = this.chosen();
    this.map.only(chosen ? new Set(chosen) : null);
    for (const button of this.legend.querySelectorAll("[data-type]"))
      button.setAttribute("aria-pressed", String(button.dataset.type === state.type));
    this.map.mark(chosen ? null : numberOr(state.layer), chosen ? null : numberOr(state.head));
  }
}
