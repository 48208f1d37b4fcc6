// What the dashboard's pages have in common.

import { duration, figure, h } from "./dom.js";

// A time that grows older while the page is open.
export const age = (time) => h("time", { "data-since": time });

export function tickAges(now) {
  for (const element of document.querySelectorAll("[data-since]")) {
    const text = duration(Math.max(0, now - Number(element.dataset.since)));
    if (element.textContent !== text) element.textContent = text;
  }
}

export const pill = (state) => h("span", { class: `pill ${/^[a-z]+$/.test(state) ? state : "unknown"}` }, state);

export function progress(run) {
  if (run.step === null) return "";
  const text = run.total_steps ? `${figure(run.step)} / ${figure(run.total_steps)}` : figure(run.step);
  if (!run.total_steps) return text;
  const bar = h("progress", { max: run.total_steps, value: Math.min(run.step, run.total_steps), "aria-label": text });
  return h("div", { class: "progress" }, bar, h("span", null, text));
}
