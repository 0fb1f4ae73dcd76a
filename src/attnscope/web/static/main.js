// The tabs of the page.
import {get, showStatus} from "./api.js";
import {theme} from "./charts.js";
import {compare} from "./compare.js";
import {pictures} from "./pictures.js";
import {playground} from "./playground.js";
import {runs} from "./runs.js";
import {read, set, state} from "./state.js";

const TABS = ["playground", "compare", "pictures", "runs"];
const start = async () => {
  read();
  let choices;
  try {
    choices = await get("/api/choices");
  } catch (error) {
    showStatus(error.message, true);
    return;
  }
  Object.assign(theme, choices.theme);
  const tabs = {playground, compare, pictures, runs},
    opened = {};
  const show = (tab) => {
    for (const name of TABS) {
      document.getElementById(name).hidden = name !== tab;
      const button = document.getElementById(`tab-${name}`);
      button.setAttribute("aria-selected", String(name === tab));
      button.tabIndex = name === tab ? 0 : -1;
    }
    set({tab});
    if (!opened[tab]) opened[tab] = tabs[tab](document.getElementById(tab), choices);
    if (tab === "runs") opened[tab]();
  };
  TABS.forEach((name, i) => {
    const button = document.getElementById(`tab-${name}`);
    button.addEventListener("click", () => show(name));
    button.addEventListener("keydown", (event) => {
      const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
      if (!step) return;
      const next = TABS[(i + step + TABS.length) % TABS.length];
      show(next);
      document.getElementById(`tab-${next}`).focus();
    });
  });
  show(TABS.includes(state.tab) ? state.tab : "playground");
  document.documentElement.dataset.started = "yes";
};
start();
