// Tokens shaded by a number each. Long texts are cut into chunks; only what is on screen is painted.
import {make, number} from "./dom.js";

const CHUNK = 400;

export class TextView {
  constructor(host, {onchoose = () => {}, ontell = () => {}} = {}) {
    this.host = host;
    this.onchoose = onchoose;
    this.ontell = ontell;
    this.seen = new IntersectionObserver((entries) => {
      for (const {target, isIntersecting} of entries) {
        target.onScreen = isIntersecting;
        if (isIntersecting && target.stale) this.paint(target);
      }
    }, {root: host, rootMargin: "300px"});
    const at = (event) => event.target.closest("span[data-n]");
    // A click chooses a token, a drag the tokens from one to another.
    let from = null, to = null;
    host.addEventListener("mousedown", (event) => { from = to = at(event) && event.button === 0 && !event.shiftKey ? Number(at(event).dataset.n) : null; });
    window.addEventListener("mouseup", () => {
      if (from !== null && to !== from) { this.dragged = true; onchoose(from, [Math.min(from, to), Math.max(from, to)]); }
      from = to = null;
    });
    host.addEventListener("click", (event) => {
      const after = this.dragged;
      this.dragged = false;
      if (at(event) && !after) this.pick(event, Number(at(event).dataset.n));
    });
    host.addEventListener("mouseover", (event) => {
      if (!at(event)) return;
      const n = Number(at(event).dataset.n);
      this.tell(n);
      if (from !== null && n !== to) { to = n; this.mark(this.chosen, [Math.min(from, n), Math.max(from, n)]); }
    });
    host.addEventListener("focusin", (event) => { if (at(event)) this.tell(Number(at(event).dataset.n)); });
    host.addEventListener("keydown", (event) => this.key(event));
  }

  show(facts) {
    this.facts = facts;
    this.values = [];
    this.chosen = null;
    this.spans = [];
    this.seen.disconnect();
    const filler = new Set(facts.filler);
    this.chunks = [];
    for (let from = 0; from < facts.tokens.length; from += CHUNK) {
      const chunk = make("div", {className: "chunk"});
      chunk.from = from;
      chunk.stale = true;
      for (let n = from; n < Math.min(from + CHUNK, facts.tokens.length); n += 1) {
        const span = make("span", {textContent: facts.tokens[n]});
        span.dataset.n = n;
        span.tabIndex = n === 0 ? 0 : -1;
        if (n >= facts.prompt) span.classList.add("answer");
        if (filler.has(n)) span.classList.add("filler");
        chunk.append(span);
        this.spans.push(span);
      }
      this.chunks.push(chunk);
    }
    // Chunks are blocks: a text that fits into one reads as one.
    this.host.replaceChildren(...this.chunks);
    this.chunks.forEach((chunk) => this.seen.observe(chunk));
  }

  shade(values, what) {
    this.values = values;
    this.what = what;
    // The first token takes so much in many models that nothing else would show, and so do the
    // largest few of a long text: full colour is what they leave.
    const there = values.filter((v) => v !== null && Number.isFinite(v));
    const rest = (there.length > 1 && values[0] !== null ? there.slice(1) : there).sort((a, b) => a - b);
    this.most = Math.max(0, ...(there.length > 10000 ? [there[0], rest.at(-1)] : there));
    this.top = rest[Math.min(rest.length - 1, Math.ceil(rest.length * 0.995) - 1)] || rest.at(-1) || this.most || 1;
    for (const chunk of this.chunks) {
      chunk.stale = true;
      if (chunk.onScreen !== false) this.paint(chunk);
    }
  }

  paint(chunk) {
    chunk.stale = false;
    for (const span of chunk.children) {
      const value = this.values[span.dataset.n];
      const full = value === null || value === undefined ? 0 : Math.min(1, Math.max(0, value / this.top));
      span.style.backgroundColor = `rgba(var(--shade), ${(Math.sqrt(full) * 0.85).toFixed(3)})`;
    }
  }

  tell(n) {
    const {facts} = this, kind = facts.classes[n] >= 0 ? facts.names[facts.classes[n]] : "no class";
    const value = this.values[n];
    this.ontell(`token ${n} ${JSON.stringify(facts.tokens[n])} · ${kind} · ${this.what}: ${number(value)}`);
  }

  pick(event, n) {
    if (event.shiftKey && (this.chosen !== null || this.span)) {
      const anchor = this.chosen ?? this.span[0];
      this.onchoose(n, [Math.min(n, anchor), Math.max(n, anchor)]);
    } else this.onchoose(n === this.chosen ? null : n, null);
  }

  mark(n, span = null) {
    this.span = span;
    for (const each of this.host.querySelectorAll(".chosen, .cut")) each.classList.remove("chosen", "cut");
    this.chosen = n;
    if (n !== null && this.spans[n]) {
      this.spans[n].classList.add("chosen");
      this.host.querySelectorAll("span[tabindex='0']").forEach((s) => { s.tabIndex = -1; });
      this.spans[n].tabIndex = 0;
    }
    if (span) for (let i = span[0]; i <= span[1]; i += 1) this.spans[i].classList.add("cut");
  }

  key(event) {
    const at = event.target.closest("span[data-n]");
    if (!at) return;
    const n = Number(at.dataset.n);
    const to = {ArrowRight: n + 1, ArrowLeft: n - 1, Home: 0, End: this.spans.length - 1}[event.key];
    if (to !== undefined && this.spans[to]) {
      if (event.shiftKey) {
        this.anchor ??= n;
        this.onchoose(this.anchor, [Math.min(this.anchor, to), Math.max(this.anchor, to)]);
      } else this.anchor = null;
      at.tabIndex = -1;
      this.spans[to].tabIndex = 0;
      this.spans[to].focus();
      event.preventDefault();
    } else if (event.key === "Enter" || event.key === " ") {
      this.pick(event, n);
      event.preventDefault();
    }
  }
}
