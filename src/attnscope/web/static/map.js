// Layers × heads, to look at and to pick from.
import {make, number} from "./dom.js";

export class HeadMap {
  constructor(host, {onchoose, ontell = () => {}}) {
    this.host = host;
    this.onchoose = onchoose;
    this.ontell = ontell;
    host.addEventListener("click", (event) => this.pick(event.target));
    host.addEventListener("mouseover", (event) => this.tell(event.target));
    host.addEventListener("focusin", (event) => this.tell(event.target));
    host.addEventListener("keydown", (event) => this.key(event));
  }

  show(layers, rows, of, layer, head) {
    this.of = of;
    const all = rows.flat().filter((v) => v !== null);
    const low = Math.min(...all), high = Math.max(...all), span = high - low || 1;
    this.cells = rows.map((row, i) => row.map((value, h) => {
      const cell = make("td", {tabIndex: -1});
      cell.setAttribute("role", "gridcell");
      cell.setAttribute("aria-label", `layer ${layers[i]}, head ${h}: ${of} ${number(value)}`);
      Object.assign(cell.dataset, {layer: layers[i], head: h, row: i});
      const full = value === null ? 0 : (value - low) / span;
      cell.style.backgroundColor = `rgba(var(--shade), ${(0.06 + 0.94 * full).toFixed(3)})`;
      return cell;
    }));
    const body = this.cells.map((cells, i) => make("tr", {},
      make("th", {textContent: layers[i], scope: "row"}), ...cells));
    const table = make("table", {}, make("tbody", {}, ...body));
    table.setAttribute("role", "grid");
    table.setAttribute("aria-label", `${of} of every head, a row for each layer`);
    this.host.replaceChildren(table);
    this.scale = `${number(low)} to ${number(high)}`;
    this.mark(layer, head);
  }

  mark(layer, head) {
    for (const old of this.host.querySelectorAll(".chosen")) old.classList.remove("chosen");
    let first = this.cells?.[0]?.[0];
    for (const cell of this.cells?.flat() ?? []) {
      cell.tabIndex = -1;
      const inLayer = String(layer) === cell.dataset.layer;
      if (inLayer && (head === null || String(head) === cell.dataset.head)) {
        cell.classList.add("chosen");
        first = head === null ? first : cell;
      }
    }
    if (first) first.tabIndex = 0;
  }

  tell(cell) {
    if (cell.dataset?.head !== undefined) this.ontell(cell.getAttribute("aria-label"));
  }

  pick(cell) {
    if (cell.dataset?.head !== undefined) this.onchoose(Number(cell.dataset.layer), Number(cell.dataset.head));
    else if (cell.tagName === "TH") this.onchoose(Number(cell.textContent), null);
  }

  key(event) {
    const {row, head} = event.target.dataset ?? {};
    if (head === undefined) return;
    const [i, h] = [Number(row), Number(head)];
    const to = {ArrowRight: [i, h + 1], ArrowLeft: [i, h - 1], ArrowDown: [i + 1, h], ArrowUp: [i - 1, h]}[event.key];
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
