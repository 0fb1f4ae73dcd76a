// DOM helpers. No HTML strings are parsed, so the text of a prompt is never markup.
export const make = (tag, attributes = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && name !== "list") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
};
export const group = (className, ...children) => make("div", {className}, ...children);
export const select = (label, options, chosen, changed) => {
  const box = make("select", {onchange: () => changed(box.value), "aria-label": label});
  fill(box, options, chosen);
  return box;
};
// Options are values, [value, text] or {group, options}.
export const fill = (box, options, chosen) => {
  const option = (each) => {
    const [value, text, off] = Array.isArray(each) ? each : [each, each];
    const made = new Option(text, value, false, String(value) === String(chosen));
    made.disabled = Boolean(off);
    return made;
  };
  box.replaceChildren(
    ...options.map((each) =>
      each.group
        ? make("optgroup", {label: each.group}, ...each.options.map(option))
        : option(each),
    ),
  );
};
export const labelled = (text, element, className = "") =>
  make("label", {className}, make("span", {textContent: text}), element);
export const area = (id, label, value, placeholder, changed, className = "") => {
  const box = make("textarea", {
    id,
    value,
    placeholder,
    className,
    spellcheck: false,
    "aria-label": label,
    oninput: () => changed(box.value),
  });
  return box;
};
// The model options in groups; a model that is not on this machine is disabled.
export const modelChoices = (models) => {
  const of = (kind, group) => ({
    group,
    options: models
      .filter((m) => m.kind === kind)
      .map((m) => [m.name, `${m.name} · ${m.about}`, !m.here]),
  });
  return [
    of("yours", "Yours"),
    of("real", "Real models"),
    of("tiny", "Tiny models, trained for this project"),
  ].filter((g) => g.options.length);
};
export const firstHere = (models) => (models.find((m) => m.here) ?? models[0]).name;
export const save = (name, content, type) => {
  const url =
    typeof content === "string" && content.startsWith("data:")
      ? content
      : URL.createObjectURL(new Blob([content], {type}));
  make("a", {href: url, download: name}).click();
};
export const number = (value) =>
  value === null || value === undefined
    ? "undefined"
    : Math.abs(value) >= 0.01 || value === 0
      ? value.toFixed(4)
      : value.toExponential(2);
export const chances = (list) =>
  make(
    "dl",
    {className: "chances"},
    ...list.flatMap(([token, p]) => {
      const full = make("i");
      full.style.width = `${(100 * p).toFixed(1)}%`;
      return [
        make("dt", {textContent: JSON.stringify(token)}),
        make("dd", {className: "bar", ariaHidden: "true"}, full),
        make("dd", {
          textContent: p < 5e-5 ? "< 0.01 %" : `${(100 * p).toFixed(p < 0.01 ? 2 : 1)} %`,
        }),
      ];
    }),
  );
