// The state of the page, stored in the URL fragment so that a link restores it.
const START = {
  tab: "playground",
  model: "",
  text: "",
  chat: "",
  system: "",
  completion: "0",
  beyond: "",
  layer: "",
  head: "",
  queries: "all",
  of: "received",
  map: "entropy",
  type: "",
  token: "",
  direction: "to",
  from: "",
  to: "",
  mode: "filler",
  b: "",
  other: "",
  kind: "repeat",
  count: "55",
  unit: "/",
  by: "text",
  position: "between",
  against: "sentence",
  run: "",
  seeing: "",
  question: "",
  question2: "",
};
export const state = {...START};
export const read = () => {
  const stored = new URLSearchParams(location.hash.slice(1));
  for (const name of Object.keys(START)) state[name] = stored.get(name) ?? START[name];
};
let later = 0;
export const set = (changes) => {
  Object.assign(state, changes);
  clearTimeout(later);
  later = setTimeout(() => {
    const kept = Object.entries(state).filter(
      ([name, value]) => value !== START[name] && value !== null,
    );
    history.replaceState(null, "", `#${new URLSearchParams(kept)}`);
  }, 60);
};
// "" means the mean over all.
export const numberOr = (value) => (value === "" || value === null ? null : Number(value));
