"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const MOST = 7; // curves, one per colour
const NONE = "–";

// Elements. Text is always text: nothing of the data becomes markup.
function element(name, options = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(options)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "style") for (const [name, x] of Object.entries(value)) made.style.setProperty(name, x);
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}
function drawing(name, options = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(options)) {
    if (key === "style") for (const [name, x] of Object.entries(value)) made.style.setProperty(name, x);
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

// Numbers as text.
const number = new Intl.NumberFormat("en");
const fixed = (x) => (x === null || x === undefined ? NONE : x.toFixed(1));
const sign = (x, text) => (Number(text) === 0 ? text : `${x < 0 ? "−" : "+"}${text}`);
const signed = (x) => (x === null || x === undefined ? NONE : sign(x, Math.abs(x).toFixed(1)));
const between = (low, high, form = fixed) => (low === null || low === undefined ? "" : `${form(low)} to ${form(high)}`);
const share = (x) => `${Number(x.toFixed(2))} %`;
const bytes = (x) => (x >= 1e9 ? `${(x / 1e9).toFixed(2)} GB` : x >= 1e6 ? `${(x / 1e6).toFixed(1)} MB` : `${(x / 1e3).toFixed(1)} kB`);
const plural = (n, what) => `${number.format(n)} ${what}${n === 1 ? "" : "s"}`;
// A long name may wrap after these characters.
const wrapping = (text) => text.split(/(?<=[_/,])/).flatMap((piece, i) => (i ? [document.createElement("wbr"), piece] : [piece]));

// Cells, with what the page says of each.
const names = data.models.map(({ name }) => name.replace(/\/+$/, "").split("/").pop() || name);
const short = names.map((name, i) => (names.indexOf(name) === names.lastIndexOf(name) ? name : data.models[i].name));
const cells = data.cells;
cells.forEach((cell, i) => {
  cell.index = i;
  cell.label = data.policies[cell.policy].name;
  cell.families = data.policies[cell.policy].families;
  cell.modelName = short[cell.model];
  cell.key = cell.full ? "full" : cell.budget === null ? "own" : cell.removed !== null ? share(cell.removed) : `${number.format(cell.budget)} entries`;
  cell.removedText = cell.key === "full" ? "nothing" : cell.key === "own" ? share(cell.dropped) : cell.key;
});
const unique = (values) => [...new Set(values)];
const most = (values) => unique(values).sort((a, b) => values.filter((x) => x === b).length - values.filter((x) => x === a).length)[0];
const SEEN = { after: "unknown", before: "seen" };
