// Requests to the server. A long job returns an id, which is polled until the job has ended.
const parsed = async (response) => {
  if (response.ok) return response.json();
  let why = response.statusText;
  try {
    why = (await response.json()).error || why;
  } catch {
    /* not JSON: the status text remains */
  }
  throw new Error(why);
};
const checked = (request) =>
  request
    .catch(() => {
      throw new Error("the server does not respond: is attnscope serve still running?");
    })
    .then(parsed);
// The query string of the values that are given.
export const queryOf = (values) =>
  new URLSearchParams(
    Object.entries(values).filter(([, v]) => v !== null && v !== undefined && v !== ""),
  );
export const get = (path, query = {}) => checked(fetch(`${path}?${queryOf(query)}`));
export const post = (path, body) =>
  checked(
    fetch(path, {
      method: "POST",
      headers: {"content-type": "application/json"},
      body: JSON.stringify(body),
    }),
  );

const at = (id) => document.getElementById(id);
export const showStatus = (text, wrong = false) => {
  at("status").textContent = text;
  at("status").classList.toggle("wrong", wrong);
};
const bar = (now) => {
  at("work").hidden = now === null;
  if (now === null) return;
  at("doing").textContent = now.position
    ? `Position ${now.position} in the queue.`
    : `${now.message} …`;
  if (now.total) Object.assign(at("progress"), {max: now.total, value: now.done});
  else at("progress").removeAttribute("value");
};

// Runs a job and returns its result; throws an error with the reason. A job with the same
// `replaces` cancels the older one. `early` is called with each partial result.
const newest = new Map();
export const work = async (path, body, {replaces = null, early = null} = {}) => {
  const older = replaces && newest.get(replaces);
  if (older) fetch(`/api/jobs/${older}`, {method: "DELETE"}).catch(() => {});
  const {job} = await post(path, body);
  if (replaces) newest.set(replaces, job);
  at("cancel").onclick = () => fetch(`/api/jobs/${job}`, {method: "DELETE"});
  let pause = 15,
    layers = 0;
  try {
    for (;;) {
      const now = await get(`/api/jobs/${job}`);
      if (now.state === "done") {
        showStatus("");
        return now.result;
      }
      if (now.state === "failed") throw new Error(now.message);
      if (now.state === "cancelled") {
        if (!replaces || newest.get(replaces) === job) showStatus("Cancelled.");
        return null;
      }
      if (pause > 60) bar(now);
      if (early && now.result && now.result.layers > layers) {
        layers = now.result.layers;
        await early(now.result);
      }
      await new Promise((go) => setTimeout(go, pause));
      pause = Math.min(pause * 1.5, 500);
    }
  } finally {
    if (!replaces || newest.get(replaces) === job) {
      newest.delete(replaces);
      bar(null);
    }
  }
};
// Shows an error of the function in the status line.
export const guarded =
  (action) =>
  async (...args) => {
    try {
      return await action(...args);
    } catch (error) {
      showStatus(error.message, true);
      return null;
    }
  };
