// Elements without HTML strings: whatever a prompt says is text and stays text.
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
export const select = (label, options, chosen, changed) => {
  const box = make("select", {onchange: () => changed(box.value)});
  box.setAttribute("aria-label", label);
  fill(box, options, chosen);
  return box;
};
export const fill = (box, options, chosen) => {
  box.replaceChildren(...options.map((option) => {
    const [value, text] = Array.isArray(option) ? option : [option, option];
    return new Option(text, value, false, String(value) === String(chosen));
  }));
};
export const labelled = (text, element) => make("label", {}, make("span", {textContent: text}), element);
export const save = (name, content, type) => {
  const url = typeof content === "string" && content.startsWith("data:") ? content
    : URL.createObjectURL(new Blob([content], {type}));
  make("a", {href: url, download: name}).click();
};
export const number = (value) => (value === null || value === undefined ? "undefined"
  : Math.abs(value) >= 0.01 || value === 0 ? value.toFixed(4) : value.toExponential(2));
