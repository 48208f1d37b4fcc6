// A line chart as SVG: one or several series over steps, with a band where records were merged into a point.

import { figure, h, s, table } from "./dom.js";

const WIDTH = 460, HEIGHT = 200, LEFT = 52, RIGHT = 12, TOP = 10, BOTTOM = 26;
const MOST_ROWS = 200;

export class Chart {
  constructor(title) {
    this.title = title;
    this.legend = h("div", { class: "legend" });
    this.plot = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title });
    this.readout = h("div", { class: "readout", "aria-hidden": "true" });
    this.numbers = h("details", null, h("summary", null, "Numbers"));
    this.numbers.addEventListener("toggle", () => this.#list());
    this.element = h(
      "figure", { class: "chart" },
      h("figcaption", null, h("span", null, title), this.legend), this.plot, this.readout, this.numbers,
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
    this.#draw();
    this.#list();
  }

  #draw() {
    const steps = this.series.flatMap(([, data]) => [data.step[0], data.step.at(-1)]);
    const values = this.series.flatMap(([, data]) => [...(data.low ?? data.mean), ...(data.high ?? data.mean)]);
    const [x0, x1] = widened(Math.min(...steps), Math.max(...steps));
    const ticks = niceTicks(...widened(reduce(values, Math.min), reduce(values, Math.max)), 4);
    const [y0, y1] = [ticks[0], ticks.at(-1)];
    this.x = (step) => LEFT + ((step - x0) / (x1 - x0)) * (WIDTH - LEFT - RIGHT);
    this.y = (value) => HEIGHT - BOTTOM - ((value - y0) / (y1 - y0)) * (HEIGHT - TOP - BOTTOM);
    const parts = ticks.map((tick) => [
      s("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: this.y(tick), y2: this.y(tick) }),
      s("text", { x: LEFT - 6, y: this.y(tick) + 4, "text-anchor": "end" }, figure(tick)),
    ]);
    for (const tick of niceTicks(x0, x1, 5).filter((tick) => tick >= x0 && tick <= x1)) {
      parts.push(s("text", { x: this.x(tick), y: HEIGHT - 8, "text-anchor": "middle" }, figure(tick)));
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
    const told = this.series.map(([name, data]) => {
      const i = nearest(data.step, (step) => Math.abs(this.x(step) - wanted));
      return [name, data.step[i], data.mean[i]];
    });
    this.pointed = true;
    const x = this.x(told[0][1]);
    for (const [name, value] of [["x1", x], ["x2", x], ["visibility", "visible"]]) this.cursor.setAttribute(name, value);
    this.#tell(told);
  }

  #leave() {
    this.pointed = false;
    this.cursor.setAttribute("visibility", "hidden");
    this.#tell(this.series.map(([name, data]) => [name, data.step.at(-1), data.mean.at(-1)]));
  }

  #tell(told) {
    const named = told.length > 1;
    const text = told.map(([name, step, value]) => `${named ? `${name} ` : ""}${figure(value)}`).join(" · ");
    this.readout.textContent = `step ${figure(told[0][1])}: ${text}`;
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

function nearest(items, distance) {
  let best = 0;
  for (let i = 1; i < items.length; i++) if (distance(items[i]) < distance(items[best])) best = i;
  return best;
}
