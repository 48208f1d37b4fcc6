// Finds the server's models, asks for the token where there is one, and shows a model.

import { ask, modelPath, Refused, useToken } from "./api.js";
import { h } from "./dom.js";
import { Model } from "./model.js";
import { failure } from "./result.js";

const main = document.getElementById("main"), choice = document.getElementById("models"), state = document.getElementById("state");

async function start() {
  try {
    const { models } = await ask("v2/models");
    choose(models);
    await show(models[0]);
  } catch (error) {
    stop(error);
  }
}

// A failure that leaves nothing to show: the token is missing, or the server is.
function stop(error) {
  if (error instanceof Refused && error.status === 401) {
    state.textContent = "";
    login();
    return;
  }
  contact(error);
  main.replaceChildren(failure(error), h("button", { type: "button", onclick: start }, "Try again"));
}

function choose(models) {
  const options = models.map((name) => h("option", { value: name }, name));
  const select = h("select", { id: "model", "aria-label": "Model", onchange: () => show(select.value) }, options);
  choice.replaceChildren(...(models.length > 1 ? [select] : []));
}

let wanted = null;

async function show(name) {
  wanted = name;
  try {
    const [metadata, example] = await Promise.all([ask(modelPath(name)), ask(`${modelPath(name)}/example`)]);
    const model = new Model(metadata, example, asked);
    if (wanted !== name) return; // another one was chosen meanwhile
    document.title = `${name} · Paceline`;
    main.replaceChildren(model.element);
    const ready = await readiness(name);
    if (wanted === name) contact(ready);
  } catch (error) {
    if (wanted === name) stop(error);
  }
}

async function readiness(name) {
  try {
    await ask(`${modelPath(name)}/ready`);
    return null;
  } catch (error) {
    return error;
  }
}

function asked(error) {
  if (error?.status === 401) login();
  else contact(error);
}

// What was asked wrongly says nothing about the server.
function contact(error) {
  const lost = error !== null && error.status === undefined, unready = error?.status >= 500;
  state.className = lost ? "lost" : unready ? "unready" : "live";
  state.textContent = lost ? "no contact" : unready ? "not ready" : "ready";
}

let tried = false;

function login() {
  const field = h("input", { type: "password", id: "token", autocomplete: "off", required: true, spellcheck: "false" });
  const wrong = h("p", { class: "refused", role: "alert", hidden: !tried }, "The server does not know this token.");
  const form = h(
    "form", { class: "login", novalidate: true }, h("h1", null, "This server asks for a token"),
    h("label", { for: "token" }, "It is in the file that paceline serve --token-file names."), field, wrong, h("button", { class: "main" }, "Enter"),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    tried = true;
    // A header takes only such letters.
    useToken(field.value.trim().replace(/[^\x21-\x7e]/g, "?"));
    start();
  });
  document.title = "Paceline";
  choice.replaceChildren();
  main.replaceChildren(form);
  field.focus();
}

start();
