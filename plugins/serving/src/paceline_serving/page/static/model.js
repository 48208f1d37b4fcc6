// One model: what it takes and gives, something to ask it with, its answer, and the same request for a terminal.

import { ask, modelPath } from "./api.js";
import { h, table } from "./dom.js";
import { Form } from "./form.js";
import { curl, text } from "./request.js";
import { answer, failure } from "./result.js";

export class Model {
  constructor(metadata, example, asked) {
    this.metadata = metadata;
    this.asked = asked; // told each error, or null
    this.number = 0; // of the last question; after Clear nobody wants its answer
    this.form = new Form(metadata, example, (now) => (now ? this.predict() : this.#changed()));
    this.result = h("div", { id: "result", "aria-live": "polite" });
    this.button = h("button", { type: "button", id: "predict", class: "main", onclick: () => this.predict() }, "Predict");
    this.command = h("pre", { id: "curl", tabindex: "0", "aria-label": "Command" });
    this.save = h("a", { download: "request.json", hidden: true }, "request.json");
    this.copied = h("span", { class: "muted", role: "status" });
    this.version = h("span", { class: "muted" }, versionOf(metadata));
    this.element = h(
      "article", null,
      h("div", { class: "title" }, h("h1", null, metadata.name), this.version),
      h("div", { class: "try" },
        h("section", null, h("h2", null, this.form.isPicture ? "Draw, or open a picture" : "Input"), this.#input()),
        h("section", null, h("h2", null, "Answer"), this.result)),
      h("section", null, h("h2", null, "The same in a terminal"),
        h("div", { class: "command" }, this.command, h("p", null, h("button", { type: "button", id: "copy", onclick: () => this.#copy() }, "Copy"), " ", this.save, " ", this.copied))),
      h("section", null, h("h2", null, "What the model takes and gives"), schema(metadata)),
    );
    this.#rest();
  }

  // The form, and beside it the whole request as JSON, for several rows and everything else that a form has no field for.
  #input() {
    this.editor = h("textarea", {
      id: "request", hidden: true, spellcheck: "false", "aria-label": "Request, in JSON", oninput: () => this.#showCommand(),
      onkeydown: (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.predict(); },
    });
    const refill = () => {
      this.form.fill();
      if (this.isEdited) this.editor.value = this.#formBody();
      this.#rest();
    };
    this.form.element.addEventListener("submit", () => this.predict());
    this.form.element.append(h("button", { hidden: true })); // Enter in a field sends a form that has one
    const example = h("button", { type: "button", id: "example", onclick: refill }, "Example");
    this.toggle = h("button", { type: "button", id: "json", "aria-pressed": "false", onclick: () => this.#toggled() }, "As JSON");
    return [this.form.element, this.editor, h("p", { class: "actions" }, this.button, example, this.toggle)];
  }

  get isEdited() {
    return !this.editor.hidden;
  }

  #toggled() {
    this.editor.value = this.#formBody();
    this.editor.rows = Math.min(24, 4 + Math.ceil(this.editor.value.length / 60));
    this.editor.hidden = this.isEdited;
    this.form.element.hidden = this.isEdited;
    this.toggle.setAttribute("aria-pressed", String(this.isEdited));
    this.#showCommand();
  }

  #changed() {
    if (this.form.isPicture) this.#rest();
    else this.#showCommand();
  }

  #rest() {
    this.number++;
    this.again = false;
    const hint = this.form.isPicture ? "It comes when something is drawn or opened, or Predict is pressed." : "It comes when Predict is pressed.";
    this.result.replaceChildren(h("p", { class: "muted" }, hint));
    this.#showCommand();
  }

  #formBody() {
    return text(this.form.tensors());
  }

  #body() {
    return this.isEdited ? this.editor.value : this.#formBody();
  }

  #showCommand() {
    const { command, file } = curl(this.metadata.name, this.#body());
    this.command.textContent = command;
    this.copied.textContent = "";
    this.save.hidden = file === null;
    if (this.save.href) URL.revokeObjectURL(this.save.href);
    this.save.removeAttribute("href");
    if (file !== null) this.save.href = URL.createObjectURL(new Blob([file], { type: "application/json" }));
  }

  // One request at a time: what is drawn meanwhile is asked afterwards, once.
  async predict() {
    if (!this.isEdited && !this.form.isValid) return;
    this.again = true;
    if (this.waiting) return;
    this.waiting = true;
    this.result.setAttribute("aria-busy", "true");
    while (this.again) {
      this.again = false;
      this.#showCommand();
      const body = this.#body(), began = performance.now(), number = ++this.number;
      try {
        const document = await ask(`${modelPath(this.metadata.name)}/infer`, body), ms = performance.now() - began;
        if (!this.metadata.versions.includes(document.model_version)) await this.#exchanged();
        if (number === this.number) this.result.replaceChildren(...answer(this.metadata, document, ms).flat(Infinity).filter(Boolean));
        this.asked(null);
      } catch (error) {
        if (number === this.number) this.result.replaceChildren(failure(error));
        this.asked(error);
      }
    }
    this.waiting = false;
    this.result.removeAttribute("aria-busy");
  }

  // Another version answers: its labels may be others.
  async #exchanged() {
    this.metadata = await ask(modelPath(this.metadata.name));
    this.version.textContent = versionOf(this.metadata);
  }

  async #copy() {
    try {
      await navigator.clipboard.writeText(this.command.textContent);
      this.copied.textContent = "copied";
    } catch {
      // Without encryption a browser lets no page write there.
      getSelection().selectAllChildren(this.command);
      this.copied.textContent = "selected: press Ctrl+C";
    }
  }
}

const versionOf = (metadata) => `version ${metadata.versions.join(", ")}, ${metadata.platform}`;

function schema(metadata) {
  const sizes = (shape) => (shape.length ? `[${shape.map((size) => (size === -1 ? "any" : size)).join(", ")}]` : "");
  const { fields, output_fields: given, labels = [] } = metadata.parameters;
  const named = ({ name, unit }) => (unit ? `${name} (${unit})` : name);
  const sized = [...fields, ...given].some(({ shape }) => shape.length);
  const row = (kind) => (field) => [kind, named(field), field.datatype, ...(sized ? [sizes(field.shape)] : [])];
  const headings = [["", ""], ["name", ""], ["datatype", sized ? "" : "text"], ...(sized ? [["shape of a row", "text"]] : [])];
  return [
    table(headings, [...fields.map(row("input")), ...given.map(row("output"))], "Inputs and outputs"),
    labels.length ? h("details", null, h("summary", null, `${labels.length} labels`), h("p", null, labels.join(", "))) : null,
  ];
}
