// Elements are made here, and text only ever becomes text: names, logs and errors are not trusted.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

export const h = (tag, properties, ...children) => fill(document.createElement(tag), properties, children);
export const s = (tag, properties, ...children) =>
  fill(document.createElementNS(SVG, tag), properties, children);

export function table(headings, rows, caption) {
  const cells = headings.map(([text, kind]) => h("th", { scope: "col", class: kind }, text));
  const lines = rows.map((row) => h("tr", null, row.map((cell, i) => h("td", { class: headings[i][1] }, cell))));
  return h(
    "div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", null, h("thead", null, h("tr", null, cells)), h("tbody", null, lines)),
  );
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 100) return `${seconds.toFixed(0)} s`;
  if (seconds < 6000) return `${(seconds / 60).toFixed(0)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(0)} d`;
}

export function figure(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return Number(value.toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 4 });
}

export const bytes = (number) =>
  number >= 2 ** 30 ? `${(number / 2 ** 30).toFixed(2)} GiB`
  : number >= 2 ** 20 ? `${(number / 2 ** 20).toFixed(1)} MiB` : `${(number / 1024).toFixed(0)} KiB`;
