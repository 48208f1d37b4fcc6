// A line chart as SVG: one or several series over steps, with a band where records were merged into a point.

import { figure, h, s, table } from "./dom.js";

const WIDTH = 460, HEIGHT = 200, LEFT = 52, RIGHT = 12, TOP = 10, BOTTOM = 26;
const MOST_ROWS = 200;

export class Chart {
  constructor(title) {
    this.title = title;
    this.isLog = false;
    this.legend = h("div", { class: "legend" });
    this.log = h("button", { type: "button", class: "log-axis", "aria-pressed": "false", onclick: () => this.#toggle() }, "log");
    this.plot = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title });
    this.readout = h("div", { class: "readout", "aria-hidden": "true" });
    this.numbers = h("details", null, h("summary", null, "Numbers"));
    this.numbers.addEventListener("toggle", () => this.#list());
    this.element = h(
      "figure", { class: "chart" },
      h("figcaption", null, h("span", null, title), this.legend, this.log), this.plot, this.readout, this.numbers,
    );
    this.plot.addEventListener("pointermove", (event) => this.#point(event));
    this.plot.addEventListener("pointerleave", () => this.#leave());
  }

  // series: [[name, {step, mean, low?, high?}], ...]
  update(series) {
    const key = JSON.stringify(series.map(([name, data]) => [name, data.step.length, data.step.at(-1), data.mean.at(-1)]));
    if (key === this.key) return;
    this.key = key;
    this.series = series;
    this.legend.replaceChildren(...(series.length < 2 ? [] : series.map(([name], i) =>
      h("span", { class: `series-${i % 6}` }, h("i", null), name))));
    const lowest = reduce(series.flatMap(([, data]) => data.low ?? data.mean), Math.min);
    this.log.disabled = lowest <= 0; // zero has no logarithm
    this.log.title = this.log.disabled ? "A logarithmic axis needs values above zero" : "Logarithmic axis";
    this.#draw();
    this.#list();
  }

  #toggle() {
    this.isLog = !this.isLog;
    this.log.setAttribute("aria-pressed", String(this.isLog));
    this.#draw();
  }

  #draw() {
    const steps = this.series.flatMap(([, data]) => [data.step[0], data.step.at(-1)]);
    const values = this.series.flatMap(([, data]) => [...(data.low ?? data.mean), ...(data.high ?? data.mean)]);
    const [x0, x1] = widened(Math.min(...steps), Math.max(...steps));
    const isLog = this.isLog && !this.log.disabled, scale = isLog ? Math.log10 : (value) => value;
    const [lowest, highest] = widened(reduce(values, Math.min), reduce(values, Math.max));
    const ticks = isLog && lowest > 0 ? logTicks(lowest, highest) : niceTicks(lowest, highest, 4);
    const [y0, y1] = isLog ? [scale(Math.min(lowest, ticks[0])), scale(Math.max(highest, ticks.at(-1)))] : [ticks[0], ticks.at(-1)];
    this.x = (step) => LEFT + ((step - x0) / (x1 - x0)) * (WIDTH - LEFT - RIGHT);
    this.y = (value) => HEIGHT - BOTTOM - ((scale(value) - y0) / (y1 - y0)) * (HEIGHT - TOP - BOTTOM);
    const parts = ticks.map((tick) => [
      s("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: this.y(tick), y2: this.y(tick) }),
      s("text", { x: LEFT - 6, y: this.y(tick) + 4, "text-anchor": "end" }, figure(tick)),
    ]);
    for (const tick of niceTicks(x0, x1, 5).filter((tick) => tick >= x0 && tick <= x1)) {
      const isLast = this.x(tick) > WIDTH - 3 * RIGHT; // in the middle of its tick, the text would be cut
      const at = isLast ? { x: WIDTH - 1, "text-anchor": "end" } : { x: this.x(tick), "text-anchor": "middle" };
      parts.push(s("text", { ...at, y: HEIGHT - 8 }, figure(tick)));
    }
    this.series.forEach(([, data], i) => {
      const at = data.step.map((step) => this.x(step).toFixed(1));
      const along = (column) => column.map((value, j) => `${at[j]},${this.y(value).toFixed(1)}`);
      if (data.low) {
        const outline = [...along(data.high), ...along(data.low).reverse()].join(" ");
        parts.push(s("polygon", { class: `band series-${i % 6}`, points: outline }));
      }
      parts.push(s("polyline", { class: `line series-${i % 6}`, points: along(data.mean).join(" ") }));
      const last = data.step.length - 1;
      parts.push(s("circle", { class: `dot series-${i % 6}`, cx: at[last], cy: this.y(data.mean[last]), r: 3 }));
    });
    this.cursor = s("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    this.plot.replaceChildren(...parts.flat(), this.cursor);
    if (!this.pointed) this.#leave();
  }

  #point(event) {
    const box = this.plot.getBoundingClientRect();
    const wanted = ((event.clientX - box.left) / box.width) * WIDTH;
    const steps = this.series.flatMap(([, data]) => data.step);
    const step = steps[nearest(steps, (one) => Math.abs(this.x(one) - wanted))];
    this.pointed = true;
    const x = this.x(step);
    for (const [name, value] of [["x1", x], ["x2", x], ["visibility", "visible"]]) this.cursor.setAttribute(name, value);
    this.#tell(step);
  }

  #leave() {
    this.pointed = false;
    this.cursor.setAttribute("visibility", "hidden");
    this.#tell(Math.max(...this.series.map(([, data]) => data.step.at(-1))));
  }

  // Only series with a point at this very step are told: a neighbour's value belongs to another step.
  #tell(step) {
    const told = [];
    for (const [name, data] of this.series) {
      const i = data.step.indexOf(step);
      if (i < 0) continue;
      const value = `${this.series.length > 1 ? `${name} ` : ""}${figure(data.mean[i])}`;
      told.push(data.low ? `${value} (mean since step ${figure(i ? data.step[i - 1] + 1 : 1)}; ${figure(data.low[i])} to ${figure(data.high[i])})` : value);
    }
    this.readout.textContent = `step ${figure(step)}: ${told.join(" · ")}`;
  }

  #list() {
    if (!this.numbers.open || !this.series) return;
    const lines = this.series.flatMap(([name, data]) => data.step.map((step, i) => [step, name, data.mean[i]]));
    lines.sort((a, b) => b[0] - a[0]);
    const rows = lines.slice(0, MOST_ROWS).map(([step, name, value]) => [figure(step), name, figure(value)]);
    const note = lines.length > MOST_ROWS ? h("p", null, `The last ${MOST_ROWS} of ${figure(lines.length)}.`) : "";
    const headings = [["step", "number"], ["curve", ""], ["value", "number"]];
    this.numbers.replaceChildren(this.numbers.firstChild, table(headings, rows, `${this.title} as numbers`), note);
  }
}

// Math.min(...values) fails on long arrays.
const reduce = (values, pick) => values.reduce((a, b) => pick(a, b));

function widened(low, high) {
  if (low !== high) return [low, high];
  const by = Math.abs(low) * 0.1 || 1;
  return [low - by, high + by];
}

function niceTicks(low, high, about) {
  const raw = (high - low) / about, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= raw * 0.999);
  const ticks = [];
  for (let i = Math.floor(low / step + 1e-9); ; i++) {
    ticks.push(Number((i * step).toPrecision(12)));
    if (i * step >= high - step * 1e-9) return ticks;
  }
}

// Powers of ten, or where there are less than two between the two, also 2 and 5 times them.
function logTicks(low, high) {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const every = Math.max(1, Math.ceil((last - first) / 6)), ticks = [];
  const factors = Math.log10(high / low) < 2 ? [1, 2, 5] : [1];
  for (let power = first; power <= last; power += every) ticks.push(...factors.map((n) => Number((n * 10 ** power).toPrecision(3))));
  const inside = ticks.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
  return inside.length > 1 ? inside : niceTicks(low, high, 4).filter((tick) => tick > 0);
}

function nearest(items, distance) {
  let best = 0;
  for (let i = 1; i < items.length; i++) if (distance(items[i]) < distance(items[best])) best = i;
  return best;
}
