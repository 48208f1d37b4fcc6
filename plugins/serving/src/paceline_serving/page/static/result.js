// What the server answered: labels with their probabilities, other outputs, errors as they are.

import { figure, h, table } from "./dom.js";

const MOST_BARS = 10, MOST_ROWS = 20, MOST_VALUES = 200;

export function answer(metadata, document, ms) {
  const { label, labels = [], probabilities, output_fields: fields = [] } = metadata.parameters ?? {};
  const fieldsOf = (name) => fields.filter(({ output }) => output === name);
  const outputs = new Map(document.outputs.map((output) => [output.name, output]));
  const known = [label, probabilities].filter((name) => outputs.has(name));
  const rest = document.outputs.filter(({ name }) => !known.includes(name));
  const shares = outputs.get(probabilities), rows = document.outputs[0].shape[0];
  const single = rows === 1 && !known.length ? rest.filter(({ data }) => data.length === 1) : []; // each is a line of its own
  const said = (number) => String(labels[number] ?? number);
  const parts = [];
  if (shares && rows === 1) parts.push(bars(shares.data, said));
  else if (known.length && rows === 1) parts.push(h("p", { class: "best" }, h("strong", null, said(outputs.get(label).data[0]))));
  else if (known.length) parts.push(perRow(outputs.get(label), shares, rows, said));
  else parts.push(single.map(({ name, data }) => h("p", { class: "best" }, `${name} `, h("strong", null, shown(data[0])), unitOf(fieldsOf(name)[0]))));
  const others = rest.filter((output) => !single.includes(output));
  if (others.length) parts.push(table([["output", ""], ["shape", ""], ["values", "text"]], others.map((output) => values(output, fieldsOf(output.name))), "Outputs"));
  parts.push(h("p", { class: "muted" }, `${ms.toFixed(1)} ms from the request to its answer; ${document.model_name}, version ${document.model_version}`));
  return parts;
}

const shown = (value) => (typeof value === "number" ? figure(value) : String(value));

function bars(shares, said) {
  const order = [...shares.keys()].sort((a, b) => shares[b] - shares[a]), best = order.slice(0, MOST_BARS);
  const lines = best.map((number) => h(
    "li", null, h("span", { class: "name" }, said(number)),
    h("progress", { max: 1, value: shares[number] ?? 0, "aria-label": said(number) }), h("span", { class: "number" }, percent(shares[number])),
  ));
  const more = order.length - best.length;
  return [
    h("p", { class: "best" }, h("strong", null, said(order[0])), ` ${percent(shares[order[0]])}`),
    h("ol", { class: "bars" }, lines), more > 0 ? h("p", { class: "muted" }, `and ${more} more labels`) : null,
  ];
}

function perRow(label, shares, rows, said) {
  const classes = shares ? shares.data.length / rows : 0;
  const lines = Array.from({ length: Math.min(rows, MOST_ROWS) }, (_, row) => {
    const of = shares ? shares.data.slice(row * classes, (row + 1) * classes) : [];
    const best = label ? label.data[row] : of.indexOf(Math.max(...of));
    return [String(row), said(best), percent(of[best])];
  });
  const more = rows - lines.length;
  return [
    table([["row", "number"], ["label", ""], ["probability", "number"]], lines, "Rows"),
    more > 0 ? h("p", { class: "muted" }, `and ${more} more rows`) : null,
  ];
}

const unitOf = (field) => (field?.unit ? ` ${field.unit}` : "");

// Elements that have names are shown with them; the numbers of several rows, without.
function values({ name, datatype, shape, data }, fields) {
  const named = fields.length === data.length && data.length > 1;
  const text = data.slice(0, MOST_VALUES).map((value, i) => (named ? `${fields[i].name} ${shown(value)}${unitOf(fields[i])}` : shown(value))).join(", ");
  if (fields.length === 1 && fields[0].unit) name += ` (${fields[0].unit})`;
  const more = data.length - MOST_VALUES;
  return [name, `${datatype} [${shape.join(", ")}]`, more > 0 ? `${text}, and ${more} more` : text];
}

// JSON has no NaN: the server says null.
const percent = (share) => (share === undefined ? "" : share === null ? "no number" : `${(100 * share).toFixed(1)} %`);

export function failure(error) {
  if (error.status === undefined) return h("p", { class: "refused" }, h("strong", null, "The server does not answer. "), error.message);
  const again = error.retryAfter ? ` (Retry-After: ${error.retryAfter})` : "";
  return h("p", { class: "refused" }, h("strong", null, `${error.status} `), error.message, again);
}
