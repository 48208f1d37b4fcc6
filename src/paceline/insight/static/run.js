// One run: figures, alerts, curves, ranks, recoveries, checkpoints, options and logs.

import { Chart } from "./chart.js";
import { bytes, duration, figure, h, table } from "./dom.js";
import { age, pill, progress } from "./parts.js";

const TITLES = { loss: "Training loss", lr: "Learning rate", samples_per_s: "Throughput, samples/s", imbalance: "Imbalance, slowest rank over mean" };
const SILENT_S = 15;

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
      "article", null, h("p", null, h("a", { href: "#" }, "← all runs")),
      section("head"), section("alerts"), section("curves"), section("ranks", "Ranks"),
      section("recoveries", "Recoveries"), section("history", "Timeline"),
      section("checkpoints", "Checkpoints"), section("config", "Options"), this.#logSection(),
    );
    this.parts.curves.className = "charts";
  }

  update(detail, curves, now) {
    const run = detail.run;
    document.title = `${run.name} · Paceline`;
    this.#show("head", [run, detail.history?.goodput, curves.samples_per_s?.mean.at(-1), curves.loss?.mean.at(-1)], (v) => head(...v));
    this.#show("alerts", [...run.alerts, ...detail.problems.map((text) => ({ severity: "warning", text }))], alerts);
    this.#showCurves(curves);
    const beats = detail.ranks.map((rank) => [rank, rank.time !== undefined && !rank.left && now - rank.time > SILENT_S]);
    this.#show("ranks", [beats, run.state], ([ranks, state]) => rankTable(ranks, state));
    this.#show("recoveries", detail.history?.recoveries ?? [], recoveries);
    this.#show("history", detail.history?.entries ?? [], (entries) => timeline(entries, detail.history.left_out));
    this.#show("checkpoints", detail.checkpoints ?? [], checkpoints);
    this.#show("config", Object.entries(detail.config ?? {}), options);
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

  #logSection() {
    this.logChoice = h("select", { "aria-label": "Rank" });
    this.logText = h("pre", { tabindex: "0", "aria-label": "Log" });
    const load = async () => {
      const answer = await fetch(`/api/runs/${this.id}/logs/${this.logChoice.value}`);
      this.logText.textContent = answer.ok ? (await answer.json()).text || "(empty)" : "There is no log any more.";
      this.logText.scrollTop = this.logText.scrollHeight;
    };
    this.logChoice.addEventListener("change", load);
    const again = h("button", { type: "button", onclick: load }, "Read again");
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
    ["active", run.seconds === null ? null : duration(run.seconds)],
    ["to go", left === null ? null : duration(left)],
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
    ["rank", "number"], ["machine", ""], ["process", "number"], ["last heartbeat", "number"], ["step", "number"],
    ["steps/s", "number"], ["ms a step", "number"], ["busy", "number"], ["memory", "number"], ["utilisation", "number"],
  ], rows, "Ranks");
}

function recoveries(all) {
  const rows = [...all].reverse().map((r) => [
    clock(r.begin), r.cause, r.seconds < 1 ? `${(r.seconds * 1000).toFixed(0)} ms` : `${r.seconds.toFixed(1)} s`, String(r.generation),
  ]);
  return table([["began after", "number"], ["cause", ""], ["took", "number"], ["generation", "number"]], rows, "Recoveries");
}

function timeline(entries, leftOut) {
  const rows = [...entries].reverse().map((e) => [clock(e.seconds), e.step === null ? "" : figure(e.step), e.text]);
  const note = leftOut ? h("p", { class: "muted" }, `${figure(leftOut)} earlier entries: paceline runs show`) : null;
  return [table([["after", "number"], ["step", "number"], ["what happened", "text"]], rows, "Timeline"), note].filter(Boolean);
}

function checkpoints(all) {
  const rows = [...all].reverse().map((c) => [
    figure(c.step), c.name, bytes(c.size_bytes), age(c.created), c.problem ?? c.marks.join(", "),
  ]);
  return table([["step", "number"], ["name", ""], ["size", "number"], ["age", "number"], ["", ""]], rows, "Checkpoints");
}

function options(all) {
  const shown = (value) => (Array.isArray(value) ? value.join(" ") : String(value));
  return h("details", null, h("summary", null, `${all.length} options`), table([["option", ""], ["value", "text"]],
    all.map(([name, value]) => [name, shown(value)]), "Options"));
}

function clock(seconds) {
  const whole = Math.floor(seconds), two = (n) => String(n).padStart(2, "0");
  return `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}`;
}
