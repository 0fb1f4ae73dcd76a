function (root, d) {
  const [layerChoice, headChoice] = root.querySelectorAll("select");
  const [status, note] = [root.querySelector("[role=status]"), root.querySelector(".full")];
  const spans = [...root.querySelectorAll(".text span[data-query]")];
  const colour = d.colour.split(",").map(Number);
  root.querySelector(".bar").style.background =
    `linear-gradient(90deg,transparent,rgba(${d.colour},.75))`;
  // Where the maps of each layer begin: its mean, then its heads.
  const starts = d.heads.map((_, l) => 1 + d.heads.slice(0, l).reduce((n, h) => n + 1 + h, 0));
  const maps = 1 + d.heads.reduce((n, h) => n + 1 + h, 0);
  const images = d.images.map((image, n) => {
    const text = atob(image.cells);
    const bytes = Uint8Array.from(text, (letter) => letter.charCodeAt(0));
    const host = root.querySelectorAll(".picture")[n], canvas = host.querySelector("canvas");
    const [left, top, right, bottom] = image.box.map((part) => 100 * part);
    Object.assign(canvas.style, {
      left: left + "%", top: top + "%", width: right - left + "%", height: bottom - top + "%",
    });
    return {...image, bytes, host, canvas};
  });
  let query = 0, pinned = 0, map = 0;
  const part = (image, q, m) => {
    const size = image.rows * image.columns, at = (q * maps + m) * size;
    return image.bytes.subarray(at, at + size);
  };
  const paint = (canvas, image, m) => {
    const cells = part(image, query, m);
    canvas.width = image.columns;
    canvas.height = image.rows;
    const context = canvas.getContext("2d");
    const pixels = context.createImageData(image.columns, image.rows);
    cells.forEach((value, i) => pixels.data.set([...colour, value * 0.75], 4 * i));
    context.putImageData(pixels, 0, 0);
  };
  const option = (select, text, value) => {
    const made = document.createElement("option");
    [made.textContent, made.value] = [text, value];
    select.append(made);
  };
  option(layerChoice, "mean", "");
  d.layers.forEach((layer, l) => option(layerChoice, layer, l));
  option(headChoice, "mean", "");
  for (let h = 0; h < Math.max(...d.heads); h++) option(headChoice, h, h);
  const buttons = [];
  const grid = root.querySelector(".grid");
  if (Math.max(...d.heads)) {
    const table = document.createElement("table");
    table.createCaption().textContent = "layers ↓, heads → for picture 1";
    d.heads.forEach((heads, l) => {
      const row = table.insertRow(), th = document.createElement("th"), cell = row.insertCell();
      th.textContent = d.layers[l];
      row.prepend(th);
      for (let h = 0; h < heads; h++) {
        const button = document.createElement("button");
        button.title = `layer ${d.layers[l]}, head ${h}`;
        button.setAttribute("aria-label", button.title);
        button.append(document.createElement("canvas"));
        const at = starts[l] + 1 + h;
        button.onclick = () => {
          [layerChoice.value, headChoice.value] = map === at ? ["", ""] : [l, h];
          show();
        };
        buttons.push([button, at]);
        cell.append(button);
      }
    });
    grid.append(table);
  }
  const where = () => {
    const l = layerChoice.value, h = headChoice.value;
    if (l === "") return "mean of layers and heads";
    return `layer ${d.layers[l]}, ${h === "" ? "mean of heads" : "head " + h}`;
  };
  const who = () => query === 0 ? "Mean of all counted queries" :
    "Query " + JSON.stringify(spans.find((s) => +s.dataset.query === query).textContent);
  const show = (thumbnails = true) => {
    const l = layerChoice.value;
    headChoice.disabled = l === "" || !d.heads[l];
    if (headChoice.disabled || +headChoice.value >= d.heads[l]) headChoice.value = "";
    map = l === "" ? 0 : starts[l] + (headChoice.value === "" ? 0 : 1 + +headChoice.value);
    images.forEach((image) => paint(image.canvas, image, map));
    note.textContent = "0 to " + images.map((image) => image.full[query][map]).join(" and ");
    for (const [button, at] of buttons) {
      button.setAttribute("aria-pressed", String(at === map));
      if (thumbnails) paint(button.firstChild, images[0], at);
    }
    for (const span of spans) span.classList.toggle("chosen", +span.dataset.query === query);
    const pin = pinned ? " Click it again to let go." : " Click a token to keep it.";
    status.textContent = `${who()}, ${where()}.${spans.length ? pin : ""}`;
  };
  images.forEach((image, n) => {
    image.host.onmousemove = (event) => {
      const box = image.canvas.getBoundingClientRect();
      const row = Math.floor(((event.clientY - box.top) / box.height) * image.rows);
      const column = Math.floor(((event.clientX - box.left) / box.width) * image.columns);
      if (row < 0 || column < 0 || row >= image.rows || column >= image.columns) return;
      const value = part(image, query, map)[row * image.columns + column] / 255;
      status.textContent = `${who()}, ${where()}: weight ` +
        `${(value * image.full[query][map]).toPrecision(2)} at row ${row}, column ${column} of ` +
        `picture ${n + 1}.`;
    };
    image.host.onmouseleave = () => show(false);
  });
  for (const span of spans) {
    const number = +span.dataset.query;
    span.tabIndex = 0;
    span.onmouseenter = () => { if (!pinned) { query = number; show(); } };
    span.onfocus = span.onmouseenter;
    span.onclick = () => { pinned = pinned === number ? 0 : number; query = number; show(); };
    span.onkeydown = (event) => { if (event.key === "Enter") span.onclick(); };
  }
  root.querySelector(".text").onmouseleave = () => { if (!pinned) { query = 0; show(); } };
  layerChoice.onchange = () => show();
  headChoice.onchange = () => show();
  show();
}
