// Tokens shaded by a number each. Long texts are split into chunks; only visible chunks are
// painted.
import {group, make, number} from "./dom.js";

const CHUNK = 400;

export class TextView {
  constructor(host, {onchoose = () => {}, onhover = () => {}} = {}) {
    this.host = host;
    this.onchoose = onchoose;
    this.onhover = onhover;
    this.visible = new IntersectionObserver(
      (entries) => {
        for (const {target, isIntersecting} of entries) {
          target.onScreen = isIntersecting;
          if (isIntersecting && target.stale) this.paint(target);
        }
      },
      {root: host, rootMargin: "300px"},
    );
    const at = (event) => event.target.closest("span[data-n]");
    // A click chooses one token, a drag chooses a span.
    let from = null,
      to = null;
    host.addEventListener("mousedown", (event) => {
      from = to =
        at(event) && event.button === 0 && !event.shiftKey ? Number(at(event).dataset.n) : null;
    });
    window.addEventListener("mouseup", () => {
      if (from !== null && to !== from) {
        this.dragged = true;
        onchoose(from, [Math.min(from, to), Math.max(from, to)]);
      }
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
      this.hover(n);
      if (from !== null && n !== to) {
        to = n;
        this.mark(this.chosen, [Math.min(from, n), Math.max(from, n)]);
      }
    });
    host.addEventListener("focusin", (event) => {
      if (at(event)) this.hover(Number(at(event).dataset.n));
    });
    host.addEventListener("keydown", (event) => this.key(event));
  }

  show(data) {
    this.data = data;
    this.values = [];
    this.chosen = null;
    this.spans = [];
    this.visible.disconnect();
    const filler = new Set(data.filler);
    this.chunks = [];
    for (let from = 0; from < data.tokens.length; from += CHUNK) {
      const chunk = group("chunk");
      chunk.from = from;
      chunk.stale = true;
      for (let n = from; n < Math.min(from + CHUNK, data.tokens.length); n += 1) {
        const span = make("span", {textContent: data.tokens[n]});
        span.dataset.n = n;
        span.tabIndex = n === 0 ? 0 : -1;
        if (n >= data.prompt) span.classList.add("completion");
        if (filler.has(n)) span.classList.add("filler");
        chunk.append(span);
        this.spans.push(span);
      }
      this.chunks.push(chunk);
    }
    // Chunks are block elements, so a text of one chunk is one paragraph.
    this.host.replaceChildren(...this.chunks);
    this.chunks.forEach((chunk) => this.visible.observe(chunk));
  }

  shade(values, what) {
    this.values = values;
    this.what = what;
    // The first token, and a few tokens of a long text, receive so much attention that all others
    // would look blank. So the first token and the largest 0.5 % do not set the scale.
    const finite = values.filter((v) => v !== null && Number.isFinite(v));
    const rest = (finite.length > 1 && values[0] !== null ? finite.slice(1) : finite).sort(
      (a, b) => a - b,
    );
    this.most = Math.max(0, ...(finite.length > 10000 ? [finite[0], rest.at(-1)] : finite));
    this.top =
      rest[Math.min(rest.length - 1, Math.ceil(rest.length * 0.995) - 1)] ||
      rest.at(-1) ||
      this.most ||
      1;
    for (const chunk of this.chunks) {
      chunk.stale = true;
      if (chunk.onScreen !== false) this.paint(chunk);
    }
  }

  paint(chunk) {
    chunk.stale = false;
    for (const span of chunk.children) {
      const value = this.values[span.dataset.n];
      const full =
        value === null || value === undefined ? 0 : Math.min(1, Math.max(0, value / this.top));
      span.style.backgroundColor = `rgba(var(--shade), ${(Math.sqrt(full) * 0.85).toFixed(3)})`;
    }
  }

  hover(n) {
    const {data} = this,
      name = data.classes[n] >= 0 ? data.names[data.classes[n]] : "no class";
    const value = this.values[n];
    this.onhover(
      `token ${n} ${JSON.stringify(data.tokens[n])} · ${name} · ${this.what}: ${number(value)}`,
    );
  }

  pick(event, n) {
    if (event.shiftKey && (this.chosen !== null || this.span)) {
      const anchor = this.chosen ?? this.span[0];
      this.onchoose(n, [Math.min(n, anchor), Math.max(n, anchor)]);
    } else this.onchoose(n === this.chosen ? null : n, null);
  }

  mark(n, span = null) {
    this.span = span;
    for (const each of this.host.querySelectorAll(".chosen, .cut"))
      each.classList.remove("chosen", "cut");
    this.chosen = n;
    if (n !== null && this.spans[n]) {
      this.spans[n].classList.add("chosen");
      this.host.querySelectorAll("span[tabindex='0']").forEach((s) => {
        s.tabIndex = -1;
      });
      this.spans[n].tabIndex = 0;
    }
    if (span) for (let i = span[0]; i <= span[1]; i += 1) this.spans[i].classList.add("cut");
  }

  key(event) {
    const at = event.target.closest("span[data-n]");
    if (!at) return;
    const n = Number(at.dataset.n);
    const to = {ArrowRight: n + 1, ArrowLeft: n - 1, Home: 0, End: this.spans.length - 1}[
      event.key
    ];
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
