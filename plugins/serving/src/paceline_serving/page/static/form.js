// A form for a row of a model's input: a picture, a number, a choice, a text, or a list that may come from a file.

import { h } from "./dom.js";
import { Pad } from "./pad.js";
import { bytesOf, pictureOf, rangeOf, RANGES, tensor } from "./picture.js";

const SHORT = 16; // elements of a list that get a field each
const LONGEST = 20_000; // characters of a list that is shown
const NAMED = 8; // categories that are listed

// `changed(now)` is called after each change; `now` says that an answer is wanted at once: a picture was drawn.
export class Form {
  constructor(metadata, example, changed) {
    this.example = new Map(example.inputs.map((input) => [input.name, input]));
    this.inputs = metadata.inputs.map((input) => {
      const fields = metadata.parameters.fields.filter((field) => field.input === input.name);
      const alone = metadata.inputs.length === 1;
      return partOf(input, fields, (drawn) => changed(drawn && alone));
    });
    this.isPicture = this.inputs.length === 1 && this.inputs[0].isPicture;
    this.element = h("form", { class: "row", onsubmit: (event) => event.preventDefault() }, this.inputs.map((input) => input.element));
    this.fill();
  }

  fill() {
    for (const part of this.inputs) part.fill(this.example.get(part.name));
  }

  get isValid() {
    return this.element.reportValidity();
  }

  // The request's inputs, of one row.
  tensors() {
    return this.inputs.map((part) => part.tensor());
  }
}

function partOf(input, fields, changed) {
  const picture = pictureOf(input);
  if (picture) return new PicturePart(input, picture, changed);
  const { name, shape } = input, sizes = shape.slice(1);
  const hasColumns = sizes.length === 1 && fields[0].shape.length === 0;
  if (hasColumns) return new FieldsPart(input, fields, changed);
  const isShort = sizes.length === 1 && sizes[0] >= 1 && sizes[0] <= SHORT;
  if (isShort) {
    const each = Array.from({ length: sizes[0] }, (_, i) => ({ ...fields[0], name: `${name}[${i}]`, shape: [] }));
    return new FieldsPart(input, each, changed);
  }
  return sizes.length ? new ListPart(input, fields[0], changed) : new FieldsPart(input, fields, changed);
}

// An input of one value, or of several that have a field each.
class FieldsPart {
  constructor({ name, datatype, shape }, fields, changed) {
    Object.assign(this, { name, datatype, shape: [1, ...shape.slice(1).map(() => fields.length)] });
    this.fields = fields.map((field) => control(field, () => changed(false)));
    this.element = this.fields.map(({ label }) => label);
  }

  fill({ data }) {
    this.fields.forEach((field, i) => field.fill(data[i]));
  }

  tensor() {
    return { name: this.name, datatype: this.datatype, shape: this.shape, data: this.fields.map((field) => field.value()) };
  }
}

let number = 0;

function control(field, changed) {
  const id = `field-${number++}`, about = aboutOf(field);
  const listen = { id, name: field.name, oninput: changed };
  let element, value, fill, extra = null;
  if (field.datatype === "BOOL") {
    element = h("input", { ...listen, type: "checkbox", role: "switch" });
    value = () => element.checked;
    fill = (to) => { element.checked = to === true; };
  } else if (field.datatype !== "BYTES") {
    const isWhole = /^U?INT/.test(field.datatype);
    const limits = { min: field.minimum, max: field.maximum, step: isWhole ? 1 : "any", required: !field.allow_missing };
    element = h("input", { ...listen, ...limits, type: "number", inputmode: isWhole ? "numeric" : "decimal", placeholder: field.allow_missing ? "missing" : null });
    value = () => (element.value === "" ? null : Number(element.value));
    fill = (to) => { element.value = to ?? ""; };
  } else if (field.format) {
    element = h("input", { ...listen, type: field.format === "date" ? "date" : "datetime-local", required: !field.allow_missing });
    value = () => element.value;
    fill = (to) => { element.value = (to ?? "").slice(0, field.format === "date" ? 10 : undefined); };
  } else if (field.choices.length && !field.is_open) {
    const options = field.choices.map((choice) => h("option", { value: choice }, choice));
    element = h("select", { ...listen }, field.allow_missing ? h("option", { value: "" }, "(missing)") : null, options);
    value = () => element.value;
    fill = (to) => { element.value = to ?? ""; };
  } else if (field.choices.length) {
    extra = h("datalist", { id: `${id}-choices` }, field.choices.map((choice) => h("option", { value: choice })));
    element = h("input", { ...listen, type: "text", list: `${id}-choices`, autocomplete: "off", required: !field.allow_missing, placeholder: field.allow_missing ? "missing" : null });
    value = () => element.value;
    fill = (to) => { element.value = to ?? ""; };
  } else {
    element = h("textarea", { ...listen, rows: 3, class: "words" });
    value = () => element.value;
    fill = (to) => { element.value = to ?? ""; };
  }
  const unit = field.unit ? h("span", { class: "muted" }, ` ${field.unit}`) : null;
  const label = h("div", { class: "field" }, h("label", { for: id }, field.name, unit), element, extra, about ? h("small", { class: "muted" }, about) : null);
  return { label, value, fill };
}

function aboutOf(field) {
  const parts = [], named = field.choices;
  // The list under an open field has only what fits to the text that is already there.
  if (field.is_open) {
    const more = named.length > NAMED ? ` and ${named.length - NAMED} more` : "";
    parts.push(`${named.slice(0, NAMED).join(", ")}${more} or any other`);
  }
  if (named.length === 0 && (field.minimum !== null || field.maximum !== null)) parts.push(`${field.minimum ?? "any"} to ${field.maximum ?? "any"}`);
  if (field.observed) parts.push(`seen: ${field.observed[0]} to ${field.observed[1]}`);
  if (field.allow_missing && (field.format || field.datatype !== "BYTES")) parts.push("may be empty");
  return parts.join("; ");
}

// A list of numbers or texts in JSON, which may come from a file.
class ListPart {
  constructor({ name, datatype, shape }, field, changed) {
    Object.assign(this, { name, datatype, sizes: shape.slice(1), changed });
    const id = `field-${number++}`;
    this.area = h("textarea", { id, name, rows: 4, spellcheck: "false", oninput: () => this.#typed() });
    this.long = null; // what is too long to be shown
    this.note = h("small", { class: "muted" }, aboutOf(field));
    const file = h("input", { id: `${id}-file`, type: "file", accept: ".json,.csv,.txt", class: "unseen", onchange: () => this.#chosen(file) });
    this.element = h("div", { class: "field" },
      h("label", { for: id }, name, h("span", { class: "muted" }, ` ${datatype} [${this.sizes.map((size) => (size === -1 ? "any" : size)).join(", ")}]`)),
      this.area, this.note, h("label", { for: `${id}-file`, class: "button" }, "Open a file…"), file);
  }

  fill({ data, shape }) {
    this.#show(nested(data, shape.slice(1)));
  }

  #typed() {
    this.long = null;
    this.area.setCustomValidity(read(this.area.value) === null ? "This is not a list in JSON." : "");
    this.changed(false);
  }

  #show(list) {
    const text = JSON.stringify(list);
    this.long = text.length > LONGEST ? list : null;
    this.area.value = this.long ? "" : text;
    this.area.placeholder = this.long ? `${list.flat(Infinity).length} elements` : "";
    this.area.setCustomValidity("");
  }

  async #chosen(file) {
    const [chosen] = file.files;
    file.value = ""; // the same file may be chosen again
    if (!chosen) return;
    const text = await chosen.text();
    const list = read(text) ?? read(`[${text.trim().split(/[\s,;]+/).join(",")}]`);
    if (list === null) this.area.setCustomValidity(`${chosen.name} holds neither a list in JSON nor numbers.`);
    else this.#show(list);
    this.area.reportValidity();
    this.changed(false);
  }

  tensor() {
    let list = this.long ?? read(this.area.value) ?? [];
    const given = list.flat(Infinity);
    const free = this.sizes.filter((size) => size === -1).length;
    const known = this.sizes.reduce((product, size) => (size === -1 ? product : product * size), 1);
    // One free size follows from the number of elements; of several, each from its own level.
    const shape = this.sizes.map((size) => {
      const length = Array.isArray(list) ? list.length : 0;
      list = list?.[0];
      return size !== -1 ? size : free === 1 ? Math.max(1, Math.floor(given.length / known)) : length;
    });
    return { name: this.name, datatype: this.datatype, shape: [1, ...shape], data: given };
  }
}

function read(text) {
  try {
    const list = JSON.parse(text);
    return Array.isArray(list) ? list : null;
  } catch {
    return null;
  }
}

function nested(data, sizes) {
  for (const size of sizes.slice(1).reverse()) {
    data = Array.from({ length: data.length / size }, (_, i) => data.slice(i * size, (i + 1) * size));
  }
  return data;
}

class PicturePart {
  constructor({ name }, picture, changed) {
    Object.assign(this, { name, picture, isPicture: true });
    const choices = Object.keys(RANGES).map((range) => h("option", { value: range }, range));
    this.range = h("select", { id: `range-${name}`, class: "range", onchange: () => changed(true) }, choices);
    this.pad = new Pad(picture, (empty) => changed(!empty), name);
    const range = picture.isFloat ? h("p", null, h("label", null, "Numbers of a pixel ", this.range)) : null;
    this.element = h("div", { class: "field" }, h("span", { class: "heading" }, name), this.pad.element, range);
  }

  fill({ data, shape }) {
    const range = this.picture.isFloat ? rangeOf(data) : null;
    const isPicture = shape.every((size, i) => size === this.picture.shape[i]) && (range !== null || !this.picture.isFloat);
    if (!isPicture || !data.some((value) => value !== 0)) {
      this.pad.blank();
      return;
    }
    if (range !== null) this.range.value = range;
    this.pad.show(bytesOf(this.picture, data, range));
  }

  tensor() {
    return tensor(this.picture, this.pad.pixels(), this.range.value);
  }
}
