// A model's requests, and the command that sends one.

import { address, hasToken, modelPath } from "./api.js";

const LONGEST = 20_000; // characters that somebody might paste into a terminal

export function text(inputs) {
  return `{\n  "inputs": [\n    ${inputs.map((input) => JSON.stringify(input)).join(",\n    ")}\n  ]\n}`;
}

// The words of a shell: single quotes keep everything but themselves.
const quoted = (word) => `'${word.replaceAll("'", "'\\''")}'`;

// The command, and the file that it sends where the request is too long to be pasted.
export function curl(name, body) {
  const short = body.length <= LONGEST;
  const words = [`curl ${quoted(address(`${modelPath(name)}/infer`))}`, "-H 'Content-Type: application/json'"];
  if (hasToken()) words.push('-H "Authorization: Bearer $TOKEN"');
  // As it is sent, to the letter: JSON that JavaScript has read may hold other numbers.
  words.push(short ? `--data-raw ${quoted(body)}` : "--data-binary @request.json");
  return { command: words.join(" \\\n  "), file: short ? null : body };
}
