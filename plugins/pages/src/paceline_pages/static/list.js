// The overview: all runs, and the jobs that were submitted.

import { duration, figure, h, table } from "./dom.js";
import { age, pill, progress } from "./parts.js";

const HEADINGS = [
  ["state", ""], ["run", ""], ["task", "wide"], ["progress", ""], ["processes", "number wide"],
  ["steps/s", "number wide"], ["result", ""], ["age", "number"], ["active", "number wide"],
];
const ORDER = ["running", "waiting", "failed", "crashed", "damaged", "preempted", "stopped", "finished"];

export class List {
  constructor() {
    this.rows = new Map();
    this.shown = "all";
    this.chips = h("div", { class: "chips", role: "group", "aria-label": "Filter by state" });
    this.search = h("input", { type: "search", placeholder: "Find a run or task", "aria-label": "Find a run or task" });
    this.search.addEventListener("input", () => this.#arrange());
    this.body = h("tbody");
    this.empty = h("p", { class: "empty" });
    const heads = HEADINGS.map(([text, kind]) => h("th", { scope: "col", class: kind }, text));
    const runs = h("table", { class: "runs" }, h("thead", null, h("tr", null, heads)), this.body);
    this.runs = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Runs" }, runs);
    this.jobs = h("section", { hidden: true });
    this.searches = h("section", { hidden: true });
    this.title = h("div");
    this.element = h(
      "div", null, this.title, h("div", { class: "tools" }, this.chips, this.search), this.runs, this.empty,
      this.searches, this.jobs,
    );
  }

  // inside: the search whose trials are listed; null: the runs that are no trials.
  update(runs, jobs, searches, inside) {
    this.inside = inside;
    this.runs.firstChild.classList.toggle("trials", inside !== null);
    const one = searches.find((search) => search.id === inside);
    const title = inside === null ? "" : one ? `Trials of ${one.name}` : "This search is not there any more.";
    if (title !== this.title.lastChild?.textContent) {
      this.title.replaceChildren(...(title ? [h("p", null, h("a", { href: "#" }, "← all runs")), h("h1", null, title)] : []));
    }
    for (const id of [...this.rows.keys()]) {
      if (!runs.has(id)) this.rows.delete(id);
    }
    for (const run of runs.values()) {
      if (this.rows.get(run.id)?.run !== run) this.rows.set(run.id, { run, element: row(run) });
    }
    this.#arrange();
    this.#showSearches(inside === null ? searches : [], runs);
    this.#showJobs(inside === null ? jobs : []);
  }

  #arrange() {
    const all = [...this.rows.values()].filter(({ run }) => run.search === this.inside);
    const counts = new Map();
    for (const { run } of all) counts.set(run.state, (counts.get(run.state) ?? 0) + 1);
    if (this.shown !== "all" && !counts.has(this.shown)) this.shown = "all";
    const chip = (name, count) => h(
      "button",
      { type: "button", "aria-pressed": String(this.shown === name), onclick: () => { this.shown = name; this.#arrange(); } },
      `${name} ${count}`,
    );
    const chips = [chip("all", all.length), ...ORDER.filter((n) => counts.has(n)).map((n) => chip(n, counts.get(n)))];
    const key = chips.map((c) => c.textContent + c.getAttribute("aria-pressed")).join();
    if (key !== this.key) {
      const focused = this.chips.contains(document.activeElement) ? document.activeElement.textContent.split(" ")[0] : null;
      this.chips.replaceChildren(...chips);
      if (focused) chips.find((c) => c.textContent.split(" ")[0] === focused)?.focus();
      this.key = key;
    }
    const text = this.search.value.toLowerCase();
    const wanted = all.filter(({ run }) => (this.shown === "all" || run.state === this.shown)
      && `${run.name} ${run.task ?? ""} ${run.folder}`.toLowerCase().includes(text));
    const atWork = (run) => run.state === "running" || run.state === "waiting";
    wanted.sort((a, b) => atWork(b.run) - atWork(a.run) || (b.run.created ?? 0) - (a.run.created ?? 0));
    const elements = wanted.map(({ element }) => element);
    const same = elements.length === this.body.children.length && elements.every((e, i) => this.body.children[i] === e);
    if (!same) this.body.replaceChildren(...elements);
    this.runs.hidden = wanted.length === 0;
    this.empty.hidden = wanted.length > 0;
    this.empty.textContent = all.length ? "No run matches." : "No runs yet. Start one: paceline train fashion-mnist";
  }

  #showSearches(searches, runs) {
    const trials = new Map();
    for (const { search, state } of runs.values()) {
      const counts = trials.get(search) ?? { begun: 0, active: 0 };
      trials.set(search, { begun: counts.begun + 1, active: counts.active + (state === "running") });
    }
    const rows = searches.map((one) => {
      const { begun, active } = trials.get(one.id) ?? { begun: 0, active: 0 };
      const best = one.value === null ? "" : `${one.metric} ${figure(one.value)}`;
      return [
        one.state, one.id, one.name, one.task, `${begun}${one.planned === null ? "" : ` / ${one.planned}`}`,
        String(active || ""), best, one.best !== null && runs.has(one.best) ? one.best : null,
      ];
    });
    const key = JSON.stringify(rows);
    if (key === this.searchesKey) return;
    this.searchesKey = key;
    this.searches.hidden = rows.length === 0;
    const headings = [["state", ""], ["search", ""], ["task", "wide"], ["trials", "number"], ["running", "number wide"], ["best trial", ""]];
    const cells = rows.map(([state, id, name, task, count, active, best, run]) => [
      pill(state), h("a", { href: `#search=${id}` }, name), task, count, active,
      run ? h("a", { href: `#run=${run}` }, best) : best,
    ]);
    this.searches.replaceChildren(h("h2", null, "Searches"), table(headings, cells, "Searches"));
  }

  #showJobs(jobs) {
    const key = JSON.stringify(jobs);
    if (key === this.jobsKey) return;
    this.jobsKey = key;
    this.jobs.hidden = jobs.length === 0;
    const rows = jobs.map((job) => [
      pill(job.state === "pending" ? "waiting" : job.state), job.id,
      job.run ? h("a", { href: `#run=${job.run}` }, job.name) : job.name,
      job.detail, age(job.submitted), String(job.restarts || ""),
    ]);
    const headings = [["state", ""], ["job", ""], ["name", ""], ["detail", ""], ["submitted", "number"], ["restarts", "number"]];
    this.jobs.replaceChildren(h("h2", null, "Jobs"), table(headings, rows, "Jobs"));
  }
}

function row(run) {
  const result = run.problem ?? (run.metric && run.value !== null ? `${run.metric} ${figure(run.value)}` : "");
  const worst = run.alerts[0];
  const mark = worst && h(
    "span", { class: `mark ${worst.severity}`, title: run.alerts.map((a) => a.text).join("\n") },
    worst.severity === "error" ? "!" : "△",
    h("span", { class: "unseen" }, ` ${worst.severity}: ${worst.text}`),
  );
  const name = h("a", { href: `#run=${run.id}` }, run.name);
  const processes = run.world_size === null ? "" : `${run.world_size} × ${run.microbatches ?? "?"}`;
  const cells = [
    pill(run.state), [name, mark ? " " : null, mark], run.task ?? "", progress(run), processes,
    run.steps_per_s === null ? "" : figure(run.steps_per_s),
    h("span", { class: run.problem ? "problem" : "", title: result }, result),
    run.created === null ? "" : age(run.created), duration(run.seconds),
  ];
  return h("tr", null, cells.map((cell, i) => h("td", { class: HEADINGS[i][1] }, cell)));
}
