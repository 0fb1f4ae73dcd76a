// Requests to our own address. Long work gives a ticket, which is asked about until it is over.
const said = async (response) => {
  if (response.ok) return response.json();
  let why = response.statusText;
  try { why = (await response.json()).error || why; } catch { /* not JSON: the status will do */ }
  throw new Error(why);
};
export const get = (path, query = {}) => {
  const given = Object.entries(query).filter(([, v]) => v !== null && v !== undefined && v !== "");
  const search = new URLSearchParams(given);
  return fetch(`${path}?${search}`).then(said);
};
export const post = (path, body) => fetch(path, {
  method: "POST", headers: {"content-type": "application/json"}, body: JSON.stringify(body),
}).then(said);

const status = document.getElementById("status"), cancel = document.getElementById("cancel");
export const tell = (text, wrong = false) => {
  status.textContent = text;
  status.classList.toggle("wrong", wrong);
};

// One piece of work: its result, or an error that says why. `replaces` names a kind of work of
// which only the newest counts: an older one is called off.
const newest = new Map();
export const work = async (path, body, replaces = null) => {
  const older = replaces && newest.get(replaces);
  if (older) fetch(`/api/jobs/${older}`, {method: "DELETE"}).catch(() => {});
  const {job} = await post(path, body);
  if (replaces) newest.set(replaces, job);
  const stop = () => fetch(`/api/jobs/${job}`, {method: "DELETE"});
  cancel.onclick = stop;
  let pause = 15;
  try {
    for (;;) {
      const now = await get(`/api/jobs/${job}`);
      if (now.state === "done") { tell(""); return now.result; }
      if (now.state === "failed") throw new Error(now.said);
      if (now.state === "cancelled") {
        const mine = !replaces || newest.get(replaces) === job;
        if (mine) tell("called off");
        return null;
      }
      if (pause > 60) {
        tell(now.place ? `number ${now.place} in the queue` : `${now.said} …`);
        cancel.hidden = false;
      }
      await new Promise((go) => setTimeout(go, pause));
      pause = Math.min(pause * 1.5, 500);
    }
  } finally {
    cancel.hidden = true;
    if (replaces && newest.get(replaces) === job) newest.delete(replaces);
  }
};
export const guarded = (doing) => async (...args) => {
  try { return await doing(...args); } catch (error) { tell(error.message, true); return null; }
};
