// Asks the server every two seconds while the page is seen, and shows a run or all of them.

import { tickAges } from "./parts.js";
import { List } from "./list.js";
import { RunPage } from "./run.js";

const EVERY_MS = 2000;
const main = document.getElementById("main"), contact = document.getElementById("contact");
const runs = new Map();
const list = new List();
let jobs = [], searches = [], tag = "", skew_s = 0, page = null, asking = null;

const search = () => /^#search=([0-9a-f]{16})$/.exec(location.hash)?.[1] ?? null;
const now = () => Date.now() / 1000 - skew_s;

async function get(path) {
  const answer = await fetch(path, { cache: "no-cache", signal: AbortSignal.timeout(10000) });
  if (answer.status === 401) location.reload();
  if (!answer.ok) throw new Error((await answer.json()).error);
  const date = Date.parse(answer.headers.get("Date"));
  // The header has whole seconds: less than that is no skew.
  if (Number.isFinite(date)) skew_s = Math.abs(Date.now() - date) < 2000 ? 0 : (Date.now() - date) / 1000;
  return answer.json();
}

async function ask() {
  const told = await get(`/api/runs?since=${encodeURIComponent(tag)}`);
  if (!told.part) runs.clear();
  for (const run of told.runs) runs.set(run.id, run);
  for (const id of told.removed) runs.delete(id);
  ({ tag, jobs, searches } = told);
  const asked = page;
  if (asked && !runs.has(asked.id)) throw new Error("This run is not there any more.");
  if (asked) {
    const [detail, told] = await Promise.all([get(`/api/runs/${asked.id}`), get(`/api/runs/${asked.id}/curves`)]);
    if (asked === page) asked.update(detail, told.curves, now(), runs, get);
  } else {
    list.update(runs, jobs, searches, search());
  }
}

async function refresh() {
  if (document.hidden) return;
  try {
    asking ??= ask();
    await asking;
    contact.className = "live";
    contact.textContent = "live";
  } catch (error) {
    contact.className = "lost";
    // What fetch itself throws differs by browser.
    contact.textContent = error instanceof TypeError || error.name === "TimeoutError" ? "disconnected" : error.message;
  } finally {
    asking = null;
  }
  tickAges(now());
}

async function route() {
  const match = /^#run=([0-9a-f]{16})$/.exec(location.hash);
  if (match?.[1] !== page?.id || !main.firstElementChild || main.querySelector("noscript")) {
    page = match ? new RunPage(match[1]) : null;
    document.title = "Paceline";
    main.replaceChildren(page ? page.element : list.element);
    scrollTo(0, 0);
  }
  await asking?.catch(() => {});
  await refresh();
}

addEventListener("hashchange", route);
document.addEventListener("visibilitychange", refresh);
setInterval(refresh, EVERY_MS);
setInterval(() => tickAges(now()), 1000);
route();
