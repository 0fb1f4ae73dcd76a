(() => {
  const figures = JSON.parse(document.getElementById("specifications").textContent);
  const darkness = window.matchMedia("(prefers-color-scheme: dark)");
  const draw = (dark) =>
    Promise.all(
      figures.map((figure, i) => {
        const spec = {...figure.spec, config: dark ? figure.dark : figure.light};
        const host = document.getElementById("chart-" + i);
        const options = {renderer: "svg", actions: false, mode: "vega-lite"};
        return vegaEmbed(host, spec, options).then(() => {
          // A chart shrinks with the page, but its text stays readable.
          const svg = host.querySelector("svg");
          svg.style.minWidth = 0.65 * svg.width.baseVal.value + "px";
        });
      }),
    ).then(() => {
      document.documentElement.dataset.drawn = dark ? "dark" : "light";
    });
  let queue = draw(darkness.matches);
  const again = (dark) => {
    queue = queue.then(() => draw(dark));
  };
  darkness.addEventListener("change", () => again(darkness.matches));
  window.addEventListener("beforeprint", () => {
    if (darkness.matches) again(false);
  });
  window.addEventListener("afterprint", () => {
    if (darkness.matches) again(true);
  });
})();
