// A canvas to draw on with a mouse, a finger or the keyboard, or to put a picture on.
//
// One pixel of the model is a square of `scale` pixels here. What the model gets is the mean of each square, so
// a picture of the model's own size reaches it with its own bytes.

import { h } from "./dom.js";
import { grey } from "./picture.js";

const SIDE = 280; // pixels of a small model's pad
const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

export class Pad {
  // `changed(empty)` is called when a stroke has ended, and after everything else that changes the picture. `name` is
  // the input's.
  constructor(picture, changed, name) {
    Object.assign(this, picture, { name });
    this.changed = changed;
    this.empty = true;
    this.scale = Math.max(1, Math.round(SIDE / Math.max(this.height, this.width)));
    const size = { width: this.width * this.scale, height: this.height * this.scale };
    this.canvas = h("canvas", {
      ...size, tabindex: "0", role: "application", class: "canvas",
      "aria-label": `Drawing of ${this.width} by ${this.height} pixels. Arrow keys move the pen, space draws.`,
    });
    this.context = this.canvas.getContext("2d", { alpha: false, willReadFrequently: true });
    this.pen = h("i", { class: "pen", hidden: true });
    this.at = { x: this.width / 2, y: this.height / 2 };
    this.element = h("div", { class: "pad" }, h("div", { class: "sheet" }, this.canvas, this.pen), this.#tools());
    this.#listen();
    this.blank();
  }

  #tools() {
    const longest = Math.max(this.height, this.width);
    const range = { type: "range", class: "brush", min: 1, max: Math.ceil(longest / 5), value: Math.ceil(longest / 14) };
    this.brush = h("input", range);
    this.colour = h("input", { type: "color", class: "colour", value: "#ffffff" });
    this.invert = h("input", { type: "checkbox", class: "invert", role: "switch", onchange: () => this.#inverted() });
    this.file = h("input", { type: "file", id: `picture-${this.name}`, accept: "image/*", class: "unseen", onchange: () => this.#chosen() });
    const small = h("canvas", { width: this.width, height: this.height, class: "small", role: "img", "aria-label": "What the model gets" });
    this.small = small.getContext("2d");
    this.problem = h("p", { class: "problem", role: "alert", hidden: true });
    return h(
      "div", { class: "side" },
      h("label", { for: `picture-${this.name}`, class: "button" }, "Open a picture…"), this.file,
      h("button", { type: "button", class: "clear", onclick: () => this.clear() }, "Clear"),
      h("label", null, "Pen ", this.brush),
      this.channels === 1 ? null : h("label", null, "Colour ", this.colour),
      h("label", { title: "For models that learned light things on a dark ground, and pictures that are dark on light." },
        this.invert, " Swap light and dark"),
      this.scale > 1 ? h("figure", null, small, h("figcaption", null, `as the model gets it, ${this.width} × ${this.height}`)) : null,
      this.problem,
    );
  }

  clear() {
    this.blank();
    this.#done(true);
  }

  blank() {
    this.context.fillStyle = this.invert.checked ? "#fff" : "#000";
    this.context.fillRect(0, 0, this.canvas.width, this.canvas.height);
    this.#showSmall();
  }

  // RGBA bytes as the model sees the picture, row by row.
  pixels() {
    const { width, height, scale } = this;
    const from = this.context.getImageData(0, 0, width * scale, height * scale).data;
    const to = new Uint8ClampedArray(4 * width * height);
    for (let y = 0; y < height; y++) {
      for (let x = 0; x < width; x++) {
        for (let c = 0; c < 4; c++) {
          let sum = 0;
          for (let dy = 0; dy < scale; dy++) {
            const start = 4 * ((y * scale + dy) * width * scale + x * scale) + c;
            for (let dx = 0; dx < scale; dx++) sum += from[start + 4 * dx];
          }
          to[4 * (y * width + x) + c] = Math.round(sum / scale ** 2);
        }
      }
    }
    return to;
  }

  #showSmall() {
    if (this.scale > 1) this.small.putImageData(new ImageData(this.pixels(), this.width), 0, 0);
  }

  #done(empty) {
    this.empty = empty;
    this.#showSmall();
    this.changed(empty);
  }

  #listen() {
    const canvas = this.canvas;
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      event.preventDefault();
      canvas.focus({ preventScroll: true, focusVisible: false });
      canvas.setPointerCapture(event.pointerId);
      this.pen.hidden = true;
      this.at = this.#place(event);
      this.#line(this.at);
      this.drawing = event.pointerId;
    });
    canvas.addEventListener("pointermove", (event) => {
      if (this.drawing !== event.pointerId) return;
      const all = event.getCoalescedEvents?.() ?? [];
      for (const each of all.length ? all : [event]) this.#line(this.#place(each));
    });
    for (const end of ["pointerup", "pointercancel"]) {
      canvas.addEventListener(end, (event) => {
        if (this.drawing !== event.pointerId) return;
        this.drawing = null;
        this.#done(false);
      });
    }
    canvas.addEventListener("keydown", (event) => this.#key(event));
    canvas.addEventListener("blur", () => this.#lift());
    canvas.addEventListener("dragover", (event) => event.preventDefault());
    canvas.addEventListener("drop", (event) => {
      event.preventDefault();
      if (event.dataTransfer.files[0]) this.load(event.dataTransfer.files[0]);
    });
  }

  // Where an event is, in the model's pixels.
  #place(event) {
    const box = this.canvas.getBoundingClientRect();
    return {
      x: ((event.clientX - box.left) / box.width) * this.width,
      y: ((event.clientY - box.top) / box.height) * this.height,
    };
  }

  #line(to) {
    const c = this.context, k = this.scale;
    c.strokeStyle = this.channels > 1 ? this.colour.value : this.invert.checked ? "#000" : "#fff";
    c.lineWidth = this.brush.value * k;
    c.lineCap = "round";
    c.beginPath();
    c.moveTo(this.at.x * k, this.at.y * k);
    c.lineTo(to.x * k, to.y * k);
    c.stroke();
    this.at = to;
  }

  #key(event) {
    if (event.key === " ") {
      event.preventDefault();
      if (event.repeat) return;
      if (this.down) this.#lift();
      else {
        this.down = true;
        this.#line(this.at);
      }
    } else if (MOVES[event.key]) {
      event.preventDefault();
      const [dx, dy] = MOVES[event.key], limit = (value, most) => Math.min(Math.max(value, 0), most);
      const to = { x: limit(this.at.x + dx, this.width), y: limit(this.at.y + dy, this.height) };
      if (this.down) this.#line(to);
      this.at = to;
    } else return;
    this.pen.hidden = false;
    this.pen.classList.toggle("down", Boolean(this.down));
    this.pen.style.left = `${(100 * this.at.x) / this.width}%`;
    this.pen.style.top = `${(100 * this.at.y) / this.height}%`;
  }

  #lift() {
    this.pen.hidden = true;
    if (!this.down) return;
    this.down = false;
    this.#done(false);
  }

  #inverted() {
    this.context.globalCompositeOperation = "difference";
    this.context.fillStyle = "#fff";
    this.context.fillRect(0, 0, this.canvas.width, this.canvas.height);
    this.context.globalCompositeOperation = "source-over";
    this.#done(this.empty);
  }

  #chosen() {
    const [file] = this.file.files;
    this.file.value = ""; // the same file may be chosen again
    if (file) this.load(file);
  }

  // Brings a picture to the model's size and channels, as `paceline predict` does.
  async load(file) {
    const { width, height } = this;
    this.problem.hidden = true;
    let bitmap;
    try {
      const size = { resizeWidth: width, resizeHeight: height, resizeQuality: "high" };
      bitmap = await createImageBitmap(file, { ...size, colorSpaceConversion: "none" });
    } catch {
      this.problem.textContent = `${file.name} is no picture that this browser can read.`;
      this.problem.hidden = false;
      return;
    }
    const sheet = h("canvas", { width, height }), context = sheet.getContext("2d", { alpha: false });
    context.fillStyle = "#fff"; // under what is transparent
    context.fillRect(0, 0, width, height);
    context.drawImage(bitmap, 0, 0);
    bitmap.close();
    const image = context.getImageData(0, 0, width, height), bytes = image.data;
    for (let i = 0; i < bytes.length; i += 4) {
      if (this.channels === 1) bytes.fill(grey(bytes[i], bytes[i + 1], bytes[i + 2]), i, i + 3);
      if (this.invert.checked) for (let c = 0; c < 3; c++) bytes[i + c] = 255 - bytes[i + c];
    }
    this.#put(image);
    this.#done(false);
  }

  // Shows a picture of the model's own size: RGBA bytes, row by row.
  show(bytes) {
    this.#put(new ImageData(bytes, this.width));
    this.empty = false;
    this.#showSmall();
  }

  #put(image) {
    const sheet = h("canvas", { width: this.width, height: this.height });
    sheet.getContext("2d", { alpha: false }).putImageData(image, 0, 0);
    this.context.imageSmoothingEnabled = false;
    this.context.drawImage(sheet, 0, 0, this.canvas.width, this.canvas.height);
  }
}
