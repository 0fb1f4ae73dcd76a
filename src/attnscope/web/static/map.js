// A map of layers × heads to choose from, coloured by a number or by head type.
import {make, number} from "./dom.js";

const shaded = (share) => `rgba(var(--shade), ${share.toFixed(3)})`;

export class HeadMap {
  constructor(host, {onchoose, onhover = () => {}}) {
    this.host = host;
    this.onchoose = onchoose;
    this.onhover = onhover;
    host.addEventListener("click", (event) => this.pick(event.target));
    host.addEventListener("mouseover", (event) => this.hover(event.target));
    host.addEventListener("focusin", (event) => this.hover(event.target));
    host.addEventListener("keydown", (event) => this.key(event));
  }

  // `textOf(value, layer, head)` is the label of a cell; `colour(value)` its colour.
  show(layers, rows, of, textOf, colour) {
    this.of = of;
    this.cells = rows.map((row, i) =>
      row.map((value, h) => {
        const cell = make("td", {
          tabIndex: -1,
          role: "gridcell",
          "aria-label": `layer ${layers[i]}, head ${h}: ${textOf(value, layers[i], h)}`,
        });
        Object.assign(cell.dataset, {layer: layers[i], head: h, row: i});
        cell.style.backgroundColor = colour(value);
        return cell;
      }),
    );
    const most = Math.max(...rows.map((row) => row.length)),
      every = most > 20 ? 5 : 1;
    const top = make(
      "tr",
      {role: "row"},
      make("th", {role: "columnheader", scope: "col", "aria-label": "layer"}),
      ...[...Array(most).keys()].map((h) =>
        make("th", {
          role: "columnheader",
          scope: "col",
          textContent: h % every ? "" : h,
          "aria-label": `head ${h}`,
        }),
      ),
    );
    const body = this.cells.map((cells, i) =>
      make(
        "tr",
        {role: "row"},
        make("th", {
          textContent: layers[i],
          scope: "row",
          role: "rowheader",
          title: `layer ${layers[i]}, mean of its heads`,
        }),
        ...cells,
      ),
    );
    const table = make(
      "table",
      {role: "grid", "aria-label": `${of} of every head, a row for each layer`},
      make("thead", {}, top),
      make("tbody", {}, ...body),
    );
    table.style.width = `max(min(100%, 24rem), ${14 * most + 34}px)`;
    this.host.replaceChildren(table);
  }

  numbers(layers, rows, of) {
    const all = rows.flat().filter((v) => v !== null);
    const low = Math.min(...all),
      high = Math.max(...all),
      span = high - low || 1;
    [this.low, this.high] = [low, high];
    this.show(
      layers,
      rows,
      of,
      (value) => `${of} ${number(value)}`,
      (value) => shaded(0.06 + 0.94 * (value === null ? 0 : (value - low) / span)),
    );
  }

  // Dims all heads but the chosen ones.
  only(chosen) {
    for (const cell of this.cells?.flat() ?? []) {
      cell.classList.toggle(
        "aside",
        chosen !== null && !chosen.has(`${cell.dataset.layer}.${cell.dataset.head}`),
      );
    }
  }

  mark(layer, head) {
    for (const old of this.host.querySelectorAll(".chosen")) old.classList.remove("chosen");
    let first = this.cells?.[0]?.[0];
    for (const cell of this.cells?.flat() ?? []) {
      cell.tabIndex = -1;
      const inLayer = String(layer) === cell.dataset.layer;
      const chosen = inLayer && (head === null || String(head) === cell.dataset.head);
      cell.setAttribute("aria-selected", String(chosen));
      if (chosen) {
        cell.classList.add("chosen");
        first = head === null ? first : cell;
      }
    }
    if (first) first.tabIndex = 0;
  }

  hover(cell) {
    if (cell.dataset?.head !== undefined) this.onhover(cell.getAttribute("aria-label"));
  }

  pick(cell) {
    if (cell.dataset?.head !== undefined) {
      const again =
        cell.classList.contains("chosen") && this.host.querySelectorAll(".chosen").length === 1;
      this.onchoose(
        again ? null : Number(cell.dataset.layer),
        again ? null : Number(cell.dataset.head),
      );
    } else if (cell.tagName === "TH" && cell.scope === "row")
      this.onchoose(Number(cell.textContent), null);
  }

  key(event) {
    const {row, head} = event.target.dataset ?? {};
    if (head === undefined) return;
    const [i, h] = [Number(row), Number(head)];
    const to = {
      ArrowRight: [i, h + 1],
      ArrowLeft: [i, h - 1],
      ArrowDown: [i + 1, h],
      ArrowUp: [i - 1, h],
    }[event.key];
    const next = to && this.cells[to[0]]?.[to[1]];
    if (next) {
      event.target.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
      event.preventDefault();
    } else if (event.key === "Enter" || event.key === " ") {
      this.pick(event.target);
      event.preventDefault();
    }
  }
}
