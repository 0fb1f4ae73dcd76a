// The card with the map of heads: by a number of this prompt, or by the kind each head is of.
import {get, guarded, work} from "./api.js";
import {fill, labelled, make, number, select} from "./dom.js";
import {HeadMap} from "./map.js";
import {numberOr, set, state} from "./state.js";

const KINDS = "head types";
const named = (map) => map.replaceAll("_", " ");

export class Heads {
  constructor({onchoose, onkind}) {
    this.onkind = onkind;
    this.of = select("map", ["entropy"], "entropy", (value) => { set({map: value, kinds: ""}); this.draw(); this.onkind(); });
    this.host = make("div", {className: "map", id: "map"});
    this.told = make("p", {className: "faint", id: "head-told", "aria-live": "polite"});
    this.legend = make("div", {className: "legend", id: "kinds", role: "group", "aria-label": "kinds of heads"});
    this.map = new HeadMap(this.host, {onchoose, ontell: (line) => { this.told.textContent = line; }});
    this.card = make("div", {className: "card"}, make("div", {className: "head"}, make("h2", {textContent: "Heads"}), labelled("by", this.of)), this.legend, this.host, this.told);
    this.kinds = null;
    this.needles = false;
  }

  async show(facts) {
    if (this.facts?.model !== facts.model) { this.kinds = null; this.needles = false; }
    this.facts = facts;
    if (![...facts.maps, KINDS].includes(state.map)) set({map: "entropy"});
    const of = (group, options) => ({group, options: options.map((m) => [m, named(m)])});
    fill(this.of, [of("On this prompt", facts.maps.filter((m) => !/^(mass|lift) /.test(m))), {group: "Of the model", options: [[KINDS, "head types (sink, induction, …)"]]},
      of("Mass of a class", facts.maps.filter((m) => m.startsWith("mass "))), of("Lift of a class", facts.maps.filter((m) => m.startsWith("lift ")))], state.map);
    // Head types take the model, which is still at the text.
    if (state.map !== KINDS || facts.layers.length === facts.deep) await this.draw();
  }

  draw = guarded(async () => {
    if (state.map === KINDS) { await this.byKind(); return; }
    const {rows} = await get(`/api/views/${this.facts.id}/map`, {of: state.map, queries: state.queries});
    this.map.numbers(this.facts.layers, rows, named(state.map));
    this.mark();
    this.legend.replaceChildren(make("span", {className: "scale linear"}, make("span", {textContent: number(this.map.low)}), make("i"), make("span", {textContent: number(this.map.high)})));
    this.told.textContent = "Rows are layers, columns heads. Click a head to see through it, a layer’s number for all of its heads.";
    this.host.dataset.map = state.map;
  });

  async byKind() {
    if (!this.kinds || this.kinds.needles !== this.needles) {
      this.told.textContent = "Measuring what every head does, on texts made for it …";
      const found = await work("/api/kinds", {model: this.facts.model, needles: this.needles}, {replaces: "kinds"});
      if (!found) { this.needles = false; return; }
      this.kinds = found;
      this.by = new Map(found.heads.map((h) => [`${h.layer}.${h.head}`, h]));
    }
    const {kinds, none, prompts, needles} = this.kinds;
    const colours = Object.fromEntries([...kinds, none].map((k) => [k.name, k.colour]));
    const rows = this.facts.layers.map((layer, i) => [...Array(this.facts.heads[i]).keys()].map((h) => this.by.get(`${layer}.${h}`)));
    this.map.show(this.facts.layers, rows, "the kind",
      (head) => (head ? `${head.kinds.length ? head.kinds.join(", ") : head.kind}${head.class && head.kind === "class-specific" ? ` (${head.class})` : ""} · ${Object.entries(head.scores).map(([k, v]) => `${k} ${v === null ? "–" : v.toFixed(2)}`).join(", ")}` : "not measured"),
      (head) => (head?.kind === none.name ? "var(--soft)" : colours[head?.kind] ?? "transparent"));
    this.mark();
    this.legend.replaceChildren(...kinds.map((kind) => {
      const sign = make("i");
      sign.style.backgroundColor = kind.colour;
      const button = make("button", {className: "chip", title: kind.rule, disabled: !kind.heads, onclick: () => {
        set({kinds: state.kinds === kind.name ? "" : kind.name, layer: "", head: ""});
        this.mark();
        this.onkind();
      }}, sign, `${kind.name} ${kind.heads}`);
      button.dataset.kind = kind.name;
      return button;
    }), ...(needles ? [] : [make("button", {className: "small", textContent: "Search for retrieval heads too (slow)", onclick: () => { this.needles = true; this.draw(); }})]));
    this.told.textContent = `A head is of a kind where the whole 95 % interval of its score over ${prompts} texts lies above a stated threshold; texts of their own, not this prompt. Choose a kind to see the text through all heads of it.`;
    this.host.dataset.map = KINDS;
    this.mark();
  }

  // The heads of the kind that is chosen, as the server takes them.
  chosen() {
    if (state.map !== KINDS || !state.kinds || !this.kinds) return null;
    return this.kinds.heads.filter((h) => h.kinds.includes(state.kinds) && this.facts.layers.includes(h.layer)).map((h) => `${h.layer}.${h.head}`);
  }

  among() { return (this.chosen() ?? []).join(","); }

  said() {
    const chosen = this.chosen();
    return chosen ? `mean of ${chosen.length} ${state.kinds} heads` : null;
  }

  release() { if (state.kinds) { set({kinds: ""}); this.mark(); } }

  mark() {
    const chosen = this.chosen();
    this.map.only(chosen ? new Set(chosen) : null);
    for (const button of this.legend.querySelectorAll("[data-kind]")) button.setAttribute("aria-pressed", String(button.dataset.kind === state.kinds));
    this.map.mark(chosen ? null : numberOr(state.layer), chosen ? null : numberOr(state.head));
  }
}
