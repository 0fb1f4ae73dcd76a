(() => {
  const figures = JSON.parse(document.getElementById("specifications").textContent);
  const darkness = window.matchMedia("(prefers-color-scheme: dark)");
  const draw = (dark) => Promise.all(figures.map((figure, i) => {
    const spec = {...figure.spec, config: dark ? figure.dark : figure.light};
    return vegaEmbed(document.getElementById("chart-" + i), spec,
      {renderer: "svg", actions: false, mode: "vega-lite"});
  })).then(() => { document.documentElement.dataset.drawn = dark ? "dark" : "light"; });
  let queue = draw(darkness.matches);
  const again = (dark) => { queue = queue.then(() => draw(dark)); };
  darkness.addEventListener("change", () => again(darkness.matches));
  window.addEventListener("beforeprint", () => { if (darkness.matches) again(false); });
  window.addEventListener("afterprint", () => { if (darkness.matches) again(true); });
})();
