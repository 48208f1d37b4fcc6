// One model: what it takes and gives, something to ask it with, its answer, and the same request for a terminal.

import { ask, modelPath } from "./api.js";
import { h, table } from "./dom.js";
import { Pad } from "./pad.js";
import { pictureOf, RANGES, tensor } from "./picture.js";
import { curl, example, text } from "./request.js";
import { answer, failure } from "./result.js";

export class Model {
  constructor(metadata, asked) {
    this.metadata = metadata;
    this.asked = asked; // told each error, or null
    this.number = 0; // of the last question; after Clear nobody wants its answer
    this.picture = pictureOf(metadata);
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
        h("section", null, h("h2", null, this.picture ? "Draw, or open a picture" : "Request"), this.#input(), h("p", null, this.button)),
        h("section", null, h("h2", null, "Answer"), this.result)),
      h("section", null, h("h2", null, "The same in a terminal"),
        h("div", { class: "command" }, this.command, h("p", null, h("button", { type: "button", id: "copy", onclick: () => this.#copy() }, "Copy"), " ", this.save, " ", this.copied))),
      h("section", null, h("h2", null, "What the model takes and gives"), schema(metadata)),
    );
    this.#rest();
  }

  #input() {
    if (!this.picture) {
      const body = example(this.metadata);
      this.editor = h("textarea", {
        id: "request", rows: Math.min(24, 4 + Math.ceil(body.length / 60)), spellcheck: "false", "aria-label": "Request, in JSON",
        oninput: () => this.#showCommand(),
        onkeydown: (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.predict(); },
      });
      this.editor.value = body;
      return this.editor;
    }
    const choices = Object.keys(RANGES).map((name) => h("option", { value: name }, name));
    this.range = h("select", { id: "range", onchange: () => this.predict() }, choices);
    this.pad = new Pad(this.picture, (empty) => (empty ? this.#rest() : this.predict()));
    return [this.pad.element, this.picture.isFloat ? h("p", null, h("label", null, "Numbers of a pixel ", this.range)) : null];
  }

  #rest() {
    this.number++;
    this.again = false;
    const hint = this.picture ? "It comes when something is drawn or opened." : "It comes when Predict is pressed.";
    this.result.replaceChildren(h("p", { class: "muted" }, hint));
    this.#showCommand();
  }

  #body() {
    return this.editor ? this.editor.value : text([tensor(this.picture, this.pad.pixels(), this.range.value)]);
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
  const sizes = (shape) => `[${shape.map((size) => (size === -1 ? "any" : size)).join(", ")}]`;
  const rows = ["inputs", "outputs"].flatMap((side) => metadata[side].map(({ name, datatype, shape }) => [side.slice(0, -1), name, datatype, sizes(shape)]));
  const labels = metadata.parameters?.labels ?? [];
  return [
    table([["", ""], ["name", ""], ["datatype", ""], ["shape", "text"]], rows, "Inputs and outputs"),
    labels.length ? h("details", null, h("summary", null, `${labels.length} labels`), h("p", null, labels.join(", "))) : null,
  ];
}
