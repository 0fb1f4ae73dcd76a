(() => {
  for (const table of document.querySelectorAll("table.sortable")) {
    const body = table.tBodies[0],
      heads = [...table.tHead.rows[0].cells];
    const rows = [...body.rows].map((row) => {
      const cells = [...row.cells].map((cell) => cell.textContent);
      return {row, cells, words: cells.join(" ").toLowerCase()};
    });
    const value = (text) => (text === "" || Number.isNaN(Number(text)) ? text : Number(text));
    const before = (a, b) => {
      if (a === "—" || b === "—") return (a === "—") - (b === "—");
      [a, b] = [value(a), value(b)];
      if (typeof a === "number" && typeof b === "number") return a - b;
      return String(a).localeCompare(String(b));
    };
    heads.forEach((head, i) => {
      head.tabIndex = 0;
      const sort = () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        rows.sort((a, b) => (down ? -1 : 1) * before(a.cells[i], b.cells[i]));
        body.append(...rows.map(({row}) => row));
      };
      head.addEventListener("click", sort);
      head.addEventListener("keydown", (event) => {
        if (event.key === "Enter") sort();
      });
    });
    const filter = document.createElement("input"),
      count = document.createElement("span");
    Object.assign(filter, {
      type: "search",
      className: "filter screen",
      placeholder: "only rows with these words",
    });
    filter.setAttribute("aria-label", filter.placeholder);
    count.className = "faint screen";
    const narrow = () => {
      const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
      rows.forEach(({row, words: text}) => {
        row.hidden = !words.every((w) => text.includes(w));
      });
      count.textContent = `${rows.filter(({row}) => !row.hidden).length} of ${rows.length} rows`;
    };
    filter.addEventListener("input", narrow);
    narrow();
    if (rows.length > 8) table.parentElement.before(filter, count);
  }
})();
