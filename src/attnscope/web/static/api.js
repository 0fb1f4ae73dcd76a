// Requests to our own address. Long work gives a ticket, which is asked about until it is over.
const said = async (response) => {
  if (response.ok) return response.json();
  let why = response.statusText;
  try { why = (await response.json()).error || why; } catch { /* not JSON: the status will do */ }
  throw new Error(why);
};
const reached = (request) => request.catch(() => { throw new Error("the server does not answer: is attnscope serve still running?"); }).then(said);
export const get = (path, query = {}) => {
  const given = Object.entries(query).filter(([, v]) => v !== null && v !== undefined && v !== "");
  return reached(fetch(`${path}?${new URLSearchParams(given)}`));
};
export const post = (path, body) => reached(fetch(path, {
  method: "POST", headers: {"content-type": "application/json"}, body: JSON.stringify(body),
}));

const at = (id) => document.getElementById(id);
export const tell = (text, wrong = false) => {
  at("status").textContent = text;
  at("status").classList.toggle("wrong", wrong);
};
const bar = (now) => {
  at("work").hidden = now === null;
  if (now === null) return;
  at("doing").textContent = now.place ? `Number ${now.place} in the queue: others are being served first.` : `${now.said} …`;
  if (now.of) Object.assign(at("progress"), {max: now.of, value: now.done});
  else at("progress").removeAttribute("value");
};

// One piece of work: its result, or an error that says why. `replaces` names a kind of work of which
// only the newest counts: an older one is called off. `early` is told what can be looked at already.
const newest = new Map();
export const work = async (path, body, {replaces = null, early = null} = {}) => {
  const older = replaces && newest.get(replaces);
  if (older) fetch(`/api/jobs/${older}`, {method: "DELETE"}).catch(() => {});
  const {job} = await post(path, body);
  if (replaces) newest.set(replaces, job);
  at("cancel").onclick = () => fetch(`/api/jobs/${job}`, {method: "DELETE"});
  let pause = 15, layers = 0;
  try {
    for (;;) {
      const now = await get(`/api/jobs/${job}`);
      if (now.state === "done") { tell(""); return now.result; }
      if (now.state === "failed") throw new Error(now.said);
      if (now.state === "cancelled") {
        if (!replaces || newest.get(replaces) === job) tell("Called off.");
        return null;
      }
      if (pause > 60) bar(now);
      if (early && now.result && now.result.layers > layers) { layers = now.result.layers; await early(now.result); }
      await new Promise((go) => setTimeout(go, pause));
      pause = Math.min(pause * 1.5, 500);
    }
  } finally {
    if (!replaces || newest.get(replaces) === job) { newest.delete(replaces); bar(null); }
  }
};
export const guarded = (doing) => async (...args) => {
  try { return await doing(...args); } catch (error) { tell(error.message, true); return null; }
};
