// What is on screen, kept in the address so that it can be shared and gone back to.
const START = {tab: "playground", model: "", text: "", chat: "", system: "", answer: "0", beyond: "", layer: "", head: "",
  queries: "all", of: "received", map: "entropy", kinds: "", token: "", way: "to", from: "", to: "",
  mode: "filler", b: "", other: "", kind: "repeat", count: "55", unit: "/", by: "text", position: "between", against: "sentence", run: ""};
export const state = {...START};
export const read = () => {
  const given = new URLSearchParams(location.hash.slice(1));
  for (const name of Object.keys(START)) state[name] = given.get(name) ?? START[name];
};
let later = 0;
export const set = (changes) => {
  Object.assign(state, changes);
  clearTimeout(later);
  later = setTimeout(() => {
    const kept = Object.entries(state).filter(([name, value]) => value !== START[name] && value !== null);
    history.replaceState(null, "", `#${new URLSearchParams(kept)}`);
  }, 60);
};
// "" stands for the mean.
export const numberOr = (value) => (value === "" || value === null ? null : Number(value));
