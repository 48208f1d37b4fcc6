// Asks the server. The token is kept here, in memory only: it ends with the page.

const base = new URL(".", document.baseURI);
let token = null;

export const address = (path) => new URL(path, base).href;
export const modelPath = (name) => `v2/models/${encodeURIComponent(name)}`;
export const hasToken = () => token !== null;
export const useToken = (text) => { token = text; };

export class Refused extends Error {
  constructor(status, message, retryAfter) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

export async function ask(path, body) {
  const headers = token === null ? {} : { Authorization: `Bearer ${token}` };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(address(path), { method: body === undefined ? "GET" : "POST", headers, body, cache: "no-store" });
  const text = await answer.text();
  let document = null;
  try {
    document = JSON.parse(text);
  } catch {
    // A proxy's error is a page of its own.
  }
  if (answer.ok && document !== null) return document;
  throw new Refused(answer.status, document?.error ?? (text.slice(0, 500) || answer.statusText), answer.headers.get("Retry-After"));
}
