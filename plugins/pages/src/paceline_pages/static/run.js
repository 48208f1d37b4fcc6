// One run: figures, alerts, curves, ranks, recoveries, checkpoints, options and logs.

import { Chart } from "./chart.js";
import { bytes, duration, figure, h, table } from "./dom.js";
import { age, pill, progress } from "./parts.js";

const TITLES = { loss: "Training loss", lr: "Learning rate", samples_per_s: "Throughput, samples/s", imbalance: "Load imbalance, slowest rank / mean" };
const SILENT_S = 15;
const MOST_CHOICES = 200;

export class RunPage {
  constructor(id) {
    this.id = id;
    this.charts = new Map();
    this.seen = new Map();
    this.parts = {};
    const section = (name, title) => {
      this.parts[name] = h("section", { hidden: true, class: name });
      this.parts[name].title_ = title;
      return this.parts[name];
    };
    this.element = h(
      "article", null, this.back = h("p"), section("head"), section("links"), section("alerts"), section("curves"), section("ranks", "Ranks"),
      section("recoveries", "Recoveries"), section("history", "Timeline"),
      section("checkpoints", "Checkpoints"), section("config", "Configuration"), this.#logSection(),
    );
    this.parts.curves.className = "charts";
    this.other = h("select", { "aria-label": "Compare the configuration with that of" });
    this.other.addEventListener("change", () => this.#compare());
    this.differences = h("div");
  }

  update(detail, curves, now, runs, get) {
    const run = detail.run;
    this.get = get;
    this.detail = detail;
    const back = run.search ? "← all trials" : "← all runs";
    if (this.back.textContent !== back) this.back.replaceChildren(h("a", { href: run.search ? `#search=${run.search}` : "#" }, back));
    this.#show("links", [detail.report, detail.packages ?? [], detail.trackers, detail.logs.length > 0], (v) => this.#links(...v));
    document.title = `${run.name} · Paceline`;
    this.#show("head", [run, detail.history?.goodput, curves.samples_per_s?.mean.at(-1), curves.loss?.mean.at(-1)], (v) => head(...v));
    this.#show("alerts", [...run.alerts, ...detail.problems.map((text) => ({ severity: "warning", text }))], alerts);
    this.#showCurves(curves);
    const beats = detail.ranks.map((rank) => [rank, rank.time !== undefined && !rank.left && now - rank.time > SILENT_S]);
    this.#show("ranks", [beats, run.state], ([ranks, state]) => rankTable(ranks, state));
    this.#show("recoveries", detail.history?.recoveries ?? [], recoveries);
    this.#show("history", detail.history?.entries ?? [], (entries) => timeline(entries, detail.history.left_out));
    this.#show("checkpoints", detail.checkpoints ?? [], checkpoints);
    this.#show("config", Object.entries(detail.config ?? {}), (all) => [
      h("div", { class: "tools" }, h("label", null, "Compare with ", this.other)), this.differences, options(all),
    ]);
    this.#offerRuns(run, runs);
    this.#offerLogs(detail.logs);
  }

  // Only what has changed is drawn again, so that focus, selection and scrolling stay.
  #show(name, value, draw) {
    const key = JSON.stringify(value), part = this.parts[name];
    if (this.seen.get(name) === key) return;
    this.seen.set(name, key);
    const drawn = Array.isArray(value) && value.length === 0 ? null : draw(value);
    part.hidden = drawn === null;
    if (drawn === null) return;
    const open = part.querySelector("details")?.open;
    part.replaceChildren(...(part.title_ ? [h("h2", null, part.title_)] : []), ...[drawn].flat());
    if (open) part.querySelector("details").open = true;
  }

  #showCurves(curves) {
    const groups = new Map();
    for (const [name, data] of Object.entries(curves)) {
      if (name === "imbalance" && data.mean.every((value) => value === 1)) continue;
      const [split, metric] = TITLES[name] ? [null, name] : name.split(/\.(.*)/s);
      const title = TITLES[name] ?? (split === "logged" ? metric : `Evaluation: ${metric}`);
      if (!groups.has(title)) groups.set(title, []);
      groups.get(title).push([split === null || split === "logged" ? metric : split, data]);
    }
    for (const [title, series] of groups) {
      if (!this.charts.has(title)) this.charts.set(title, new Chart(title));
      this.charts.get(title).update(series);
    }
    const order = [...groups.keys()].sort((a, b) => place(a) - place(b));
    const key = order.join("\n");
    if (this.order !== key) {
      this.order = key;
      this.parts.curves.replaceChildren(...order.map((title) => this.charts.get(title).element));
      this.parts.curves.hidden = order.length === 0;
    }
  }

  #links(report, packages, trackers, hasLog) {
    const to = [];
    if (report) to.push(h("a", { href: `/api/runs/${this.id}/report` }, "Report"));
    if (hasLog) {
      const open = () => { this.log.open = true; this.log.scrollIntoView(); };
      to.push(h("button", { type: "button", class: "link", onclick: open }, "Log"));
    }
    for (const { name, run, url } of trackers) {
      const text = `${{ mlflow: "MLflow", wandb: "W&B" }[name] ?? name} run ${run.slice(0, 8)}`;
      to.push(url ? h("a", { href: url, rel: "noreferrer" }, text) : h("span", { title: run }, text));
    }
    for (const name of packages) to.push(h("span", null, "Package ", h("code", null, name.length === 64 ? name.slice(0, 12) : name)));
    return to.length ? to : null;
  }

  // Runs of the same task come first: their configurations have the same names.
  #offerRuns(run, runs) {
    const others = [...runs.values()].filter((other) => other.id !== run.id);
    const nearness = (other) => 2 * (other.search === run.search) + (other.task === run.task);
    others.sort((a, b) => nearness(b) - nearness(a) || (b.created ?? 0) - (a.created ?? 0));
    const offered = others.slice(0, MOST_CHOICES), key = offered.map((other) => other.id).join();
    if (key === this.offered || document.activeElement === this.other) return;
    this.offered = key;
    const chosen = this.other.value;
    this.other.replaceChildren(h("option", { value: "" }, "no run"),
      ...offered.map((other) => h("option", { value: other.id }, other.search ? `${other.search_name}/${other.name}` : other.name)));
    this.other.value = offered.some((other) => other.id === chosen) ? chosen : "";
  }

  async #compare() {
    const id = this.other.value;
    if (!id) { this.differences.replaceChildren(); return; }
    let other;
    try {
      other = await this.get(`/api/runs/${id}`);
    } catch (error) {
      this.differences.replaceChildren(h("p", { class: "problem" }, error.message));
      return;
    }
    if (this.other.value !== id) return;
    const ours = this.detail.config ?? {}, theirs = other.config ?? {};
    const names = [...new Set([...Object.keys(ours), ...Object.keys(theirs)])];
    const rows = names.filter((name) => shown(ours[name]) !== shown(theirs[name])).map((name) => [name, shown(ours[name]), shown(theirs[name])]);
    const headings = [["", ""], [this.detail.run.name, ""], [other.run.name, ""]];
    this.differences.replaceChildren(rows.length ? table(headings, rows, "Differences") : h("p", { class: "muted" }, "The configurations are equal."));
  }

  #logSection() {
    this.logChoice = h("select", { "aria-label": "Rank" });
    this.logText = h("pre", { tabindex: "0", "aria-label": "Log" });
    const load = async () => {
      const answer = await fetch(`/api/runs/${this.id}/logs/${this.logChoice.value}`);
      this.logText.textContent = answer.ok ? (await answer.json()).text || "(empty)" : "There is no log any more.";
      this.logText.scrollTop = this.logText.scrollHeight;
    };
    this.logChoice.addEventListener("change", load);
    const again = h("button", { type: "button", onclick: load }, "Reload");
    this.log = h("details", { class: "log" }, h("summary", null, "Logs"), h("div", { class: "tools" }, this.logChoice, again), this.logText);
    this.log.addEventListener("toggle", () => { if (this.log.open) load(); });
    return this.log;
  }

  #offerLogs(ranks) {
    this.log.hidden = ranks.length === 0;
    if (this.logChoice.options.length !== ranks.length) {
      const chosen = this.logChoice.value;
      this.logChoice.replaceChildren(...ranks.map((rank) => h("option", { value: rank }, `rank ${rank}`)));
      if (chosen) this.logChoice.value = chosen;
    }
  }
}

function place(title) {
  const order = ["Training loss", "Evaluation", "Learning rate", "Throughput"];
  const found = order.findIndex((start) => title.startsWith(start));
  return found < 0 ? order.length : found;
}

function head(run, goodput, throughput, loss) {
  const left = run.total_steps && run.steps_per_s ? (run.total_steps - run.step) / run.steps_per_s : null;
  const tiles = [
    ["loss", loss === undefined ? null : figure(loss)],
    [run.metric ?? "", run.value === null ? null : figure(run.value)],
    ["samples/s", throughput === undefined ? null : figure(throughput)],
    ["processes", run.world_size],
    ["micro-batches", run.microbatches],
    ["active time", run.seconds === null ? null : duration(run.seconds)],
    ["time left", left === null ? null : duration(left)],
    ["goodput", typeof goodput === "number" ? `${(goodput * 100).toFixed(1)} %` : null],
  ].filter(([name, value]) => name && value !== null && value !== undefined);
  return [
    h("div", { class: "title" }, h("h1", null, run.name), pill(run.state), h("span", { class: "muted" }, run.task ?? "")),
    progress(run),
    h("dl", { class: "tiles" }, tiles.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, String(value))))),
  ];
}

const alerts = (all) => h("ul", { role: "alert" }, all.map((alert) => h("li", { class: alert.severity }, alert.text)));

function rankTable(ranks, state) {
  const rows = ranks.map(([rank, silent]) => {
    const t = rank.telemetry ?? {};
    const beat = rank.time === undefined ? "–"
      : rank.left ? "left" : [h("i", { class: silent ? "beat silent" : state === "running" ? "beat" : "beat over" }), age(rank.time)];
    return [
      String(rank.rank), rank.host ?? "", rank.pid === undefined ? "" : String(rank.pid), beat,
      rank.step === undefined ? "" : figure(rank.step),
      rank.left || (rank.steps_per_s ?? null) === null ? "–" : figure(rank.steps_per_s),
      figure(t.step_ms ?? null), t.busy === null || t.busy === undefined ? "–" : `${(t.busy * 100).toFixed(0)} %`,
      t.memory_mib ? bytes(t.memory_mib * 2 ** 20) : "–",
      t.utilisation === null || t.utilisation === undefined ? "–" : `${(t.utilisation * 100).toFixed(0)} %`,
    ];
  });
  return table([
    ["rank", "number"], ["node", ""], ["PID", "number"], ["last heartbeat", "number"], ["step", "number"],
    ["steps/s", "number"], ["ms/step", "number"], ["busy", "number"], ["memory", "number"], ["utilisation", "number"],
  ], rows, "Ranks");
}

function recoveries(all) {
  const rows = [...all].reverse().map((r) => [
    clock(r.begin), r.cause, r.seconds < 1 ? `${(r.seconds * 1000).toFixed(0)} ms` : `${r.seconds.toFixed(1)} s`, String(r.generation),
  ]);
  return table([["time", "number"], ["cause", ""], ["duration", "number"], ["attempt", "number"]], rows, "Recoveries");
}

function timeline(entries, leftOut) {
  const rows = [...entries].reverse().map((e) => [clock(e.seconds), e.step === null ? "" : figure(e.step), e.text]);
  const note = leftOut ? h("p", { class: "muted" }, `${figure(leftOut)} earlier entries: paceline runs show`) : null;
  return [table([["time", "number"], ["step", "number"], ["event", "text"]], rows, "Timeline"), note].filter(Boolean);
}

function checkpoints(all) {
  const rows = [...all].reverse().map((c) => [
    figure(c.step), c.name, bytes(c.size_bytes), age(c.created), c.problem ?? c.marks.join(", "),
  ]);
  return table([["step", "number"], ["name", ""], ["size", "number"], ["age", "number"], ["", ""]], rows, "Checkpoints");
}

function options(all) {
  return h("details", null, h("summary", null, `All ${all.length} settings`), table([["setting", ""], ["value", "text"]],
    all.map(([name, value]) => [name, shown(value)]), "Configuration"));
}

const shown = (value) => (value === undefined || value === null ? "–" : Array.isArray(value) ? value.join(" ") : String(value));

function clock(seconds) {
  const whole = Math.floor(seconds), two = (n) => String(n).padStart(2, "0");
  return `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}`;
}
