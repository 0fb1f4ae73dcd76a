function (root, d) {
  const buttons = [...root.querySelectorAll("button")];
  const spans = [...root.querySelectorAll(".text span")];
  const [title, status] = [root.querySelector(".one b"), root.querySelector("[role=status]")];
  const [matrix, mark] = [root.querySelector(".matrix"), root.querySelector(".matrix i")];
  const picture = matrix.querySelector("img");
  const rows = d.queries.length, columns = d.tokens.length;
  const labels = (box, names) => {
    for (const name of names) {
      const span = document.createElement("span");
      span.textContent = name.replace(/\n/g, "");
      box.append(span);
    }
  };
  if (d.labelled) {
    labels(root.querySelector(".over"), d.tokens);
    labels(root.querySelector(".beside"), d.queries.map((q) => d.tokens[q]));
  }
  let opacity = null, head = 0, row = rows - 1;
  const weight = (r, c) => {
    const step = Math.round((opacity[(r * columns + c) * 4 + 3] / 255) * d.levels);
    return (step / d.levels) ** 2;
  };
  const name = (n) => n + " " + JSON.stringify(d.tokens[n]);
  const paint = (column) => {
    const weights = spans.map((_, c) => weight(row, c));
    const most = Math.max(...weights.slice(1)) || weights[0] || 1;
    spans.forEach((span, c) => {
      span.style.background = `rgba(${d.colour},${Math.min(1, weights[c] / most)})`;
      span.style.outline = c === d.queries[row] ? "2px solid" : "";
      span.title = name(c) + ": " + weights[c].toPrecision(2);
    });
    mark.style.display = "block";
    mark.style.top = (100 * row) / rows + "%";
    mark.style.height = `max(3px, ${100 / rows}%)`;
    const order = weights.map((_, c) => c).sort((a, b) => weights[b] - weights[a]).slice(0, 3);
    const about = d.levels < 100 ? "about " : "";
    const shown = column === undefined ? order : [column];
    status.textContent = "Query " + name(d.queries[row]) + " attends to " +
      shown.map((c) => name(c) + " " + about + weights[c].toPrecision(2)).join(", ") + ".";
  };
  const show = (n) => {
    buttons[head].setAttribute("aria-pressed", "false");
    head = n;
    buttons[n].setAttribute("aria-pressed", "true");
    title.textContent = "Layer " + d.heads[n][0] + ", head " + d.heads[n][1];
    picture.alt = "attention matrix of layer " + d.heads[n][0] + ", head " + d.heads[n][1];
    picture.onload = () => {
      const canvas = document.createElement("canvas");
      canvas.width = columns;
      canvas.height = rows;
      const context = canvas.getContext("2d");
      context.drawImage(picture, 0, 0);
      opacity = context.getImageData(0, 0, columns, rows).data;
      paint();
    };
    picture.src = d.large.length ? d.large[n] : buttons[n].firstChild.src;
  };
  buttons.forEach((button, n) => { button.onclick = () => show(n); });
  matrix.onmousemove = (event) => {
    if (!opacity) return;
    const box = matrix.getBoundingClientRect();
    const at = (part, size, n) => Math.min(n - 1, Math.max(0, Math.floor((part / size) * n)));
    row = at(event.clientY - box.top, box.height, rows);
    paint(at(event.clientX - box.left, box.width, columns));
  };
  d.queries.forEach((token, r) => {
    const choose = () => { row = r; paint(); };
    spans[token].tabIndex = 0;
    spans[token].onclick = choose;
    spans[token].onkeydown = (event) => { if (event.key === "Enter") choose(); };
  });
  show(0);
}
