// Filters. An option that cannot choose anything is left out.
const budgets = unique(cells.filter((cell) => cell.budget !== null).map((cell) => cell.key));
budgets.sort((a, b) => a.endsWith("%") - b.endsWith("%") || Number.parseFloat(a.replace(/,/g, "")) - Number.parseFloat(b.replace(/,/g, "")));
const kinds = unique(cells.flatMap((cell) => cell.families.slice(0, 1))).sort();
const facts = unique(cells.flatMap((cell) => cell.families.slice(1))).sort();
const own = cells.filter((cell) => cell.budget !== null);
const SELECTS = [
  ["benchmark", "Benchmark", data.benchmarks.map((one, i) => [String(i), one.name]), null],
  ["model", "Model", data.models.map((_, i) => [String(i), short[i]]), "all models"],
  ["question", "Question", Object.keys(data.questions).filter((q) => cells.some((cell) => cell.question === q)).map((q) => [q, SEEN[q]]), "both"],
  ["removed", "Removed", budgets.map((key) => [key, key]), "all shares"],
  ["family", "Family", [...kinds, ...facts].map((name) => [name, name, kinds.includes(name) ? "Kind" : "Property"]), "all families"],
];
const state = {
  benchmark: String(most(cells.map((cell) => cell.benchmark))), model: String(most(cells.map((cell) => cell.model))), family: "", text: "",
  question: String(most(cells.map((cell) => cell.question))),
  removed: own.length ? most(own.map((cell) => cell.key)) : "",
  sort: "mean", down: true,
};
const START = { ...state };
let curves = [];

function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  for (const [name, , options, all] of SELECTS) {
    const value = given.get(name);
    if (value === null) continue;
    if (options.some(([key]) => key === value) || (value === "" && all !== null)) state[name] = value;
  }
  if (given.get("text") !== null) state.text = given.get("text");
}
function writeAddress() {
  const changed = Object.keys(START).filter((name) => name !== "sort" && name !== "down" && state[name] !== START[name]);
  const text = new URLSearchParams(changed.map((name) => [name, state[name]])).toString();
  try { history.replaceState(null, "", text ? `#${text}` : location.pathname + location.search); } catch { /* not allowed in some frames */ }
}

function makeFilters() {
  for (const [name, label, options, all] of SELECTS) {
    if (options.length < 2) continue;
    const select = element("select", { id: `filter-${name}`, onchange: () => { state[name] = select.value; show(); } });
    if (all !== null) select.append(new Option(all, ""));
    for (const [value, text, group] of options) {
      if (group && select.lastElementChild.label !== group) select.append(element("optgroup", { label: group }));
      (group ? select.lastElementChild : select).append(new Option(text, value));
    }
    select.value = state[name];
    at("filters").append(element("label", {}, label, select));
  }
  const input = element("input", { type: "search", id: "filter-text", placeholder: "snapkv, merge, …", autocomplete: "off",
    oninput: () => { state.text = input.value; show(); } });
  input.value = state.text;
  at("filters").append(element("label", {}, "Search", input));
  at("filters").addEventListener("submit", (event) => event.preventDefault());
}

// The full cache, and policies without a budget, belong to every share.
const isIn = (cell) => String(cell.benchmark) === state.benchmark && (!state.model || String(cell.model) === state.model)
  && (!state.question || cell.question === state.question);
function isShown(cell) {
  if (!isIn(cell)) return false;
  if (state.removed && cell.budget !== null && cell.key !== state.removed) return false;
  if (state.family && !cell.full && !cell.families.includes(state.family)) return false;
  const words = state.text.toLowerCase().split(/\s+/).filter(Boolean);
  const text = `${cell.label} ${cell.text} ${cell.families.join(" ")}`.toLowerCase();
  return words.every((word) => text.includes(word));
}

// Columns: heading, value to sort by, content, and whether they are words.
function columns(rows) {
  const differ = (value) => new Set(rows.map(value)).size > 1;
  const found = [
    { id: "policy", head: ["policy"], value: (cell) => cell.label, words: true },
    ...(rows.some((cell) => cell.rank) ? [{ id: "rank", head: ["rank"], value: (cell) => cell.rank, show: (cell) => cell.rank ?? NONE, up: true }] : []),
    { id: "mean", head: ["mean"], value: (cell) => cell.mean?.[0], show: meanCell, name: "mean" },
    { id: "difference", head: ["to full"], value: (cell) => cell.difference?.[0], show: (cell) => withEnds(cell.difference, signed) },
  ];
  if (new Set(rows.filter((cell) => !cell.full).map((cell) => cell.key)).size > 1) found.push({ id: "removed", head: ["removed"], value: (cell) => cell.dropped, show: (cell) => cell.removedText });
  if (differ((cell) => cell.question)) found.push({ id: "question", head: ["question"], value: (cell) => SEEN[cell.question], show: (cell) => SEEN[cell.question], words: true });
  if (differ((cell) => cell.model)) found.push({ id: "model", head: ["model"], value: (cell) => cell.modelName, show: (cell) => cell.modelName, words: true });
  data.benchmarks[state.benchmark].tasks.forEach((task, i) => found.push({
    id: `task ${i}`, head: wrapping(task), value: (cell) => cell.tasks[i]?.[0], show: (cell) => fixed(cell.tasks[i]?.[0]), heat: (cell) => cell.tasks[i]?.[0],
  }));
  if (differ((cell) => cell.prompts)) found.push({ id: "prompts", head: ["prompts"], value: (cell) => cell.prompts, show: (cell) => number.format(cell.prompts) });
  found.push({ id: "cache", head: ["cache"], value: (cell) => cell.bytes, show: (cell) => bytes(cell.bytes), up: true });
  return found;
}
function withEnds(found, form) {
  if (!found) return NONE;
  const ends = between(found[1], found[2], form);
  return element("span", {}, form(found[0]), ends ? element("br") : null, ends ? element("small", {}, ends) : null);
}
function meanCell(cell) {
  if (!cell.mean) {
    const done = cell.tasks.filter(Boolean).length;
    return element("small", {}, `${done} of ${plural(cell.asked, "task")}`);
  }
  const [mean, low, high] = cell.mean;
  const track = element("span", { class: "track", "aria-hidden": "true" },
    low === null ? null : element("i", { style: { left: `${low}%`, width: `${Math.max(high - low, 0.6)}%` } }),
    element("u", { style: { left: `${mean}%` } }));
  const ends = low === null ? "no interval" : `${fixed(low)}–${fixed(high)}`;
  return element("span", {}, element("small", {}, ends), " ", element("b", {}, fixed(mean)), track);
}

function compare(column) {
  const { value } = column, sign = state.down ? -1 : 1;
  return (a, b) => {
    const x = value(a) ?? null, y = value(b) ?? null;
    if (x === null || y === null) return (x === null) - (y === null) || a.index - b.index;
    return sign * (typeof x === "string" ? x.localeCompare(y) : x - y) || a.index - b.index;
  };
}

function show() {
  const rows = cells.filter(isShown), shown = columns(rows);
  const column = shown.find((one) => one.id === state.sort) ?? shown.find((one) => one.id === "mean");
  rows.sort(compare(column));
  const head = element("tr");
  for (const one of shown) {
    const chosen = one === column;
    const button = element("button", { type: "button", "data-column": one.id, onclick: () => {
      state.down = chosen ? !state.down : !(one.words || one.up);
      state.sort = one.id;
      show();
      [...at("board").querySelectorAll("thead button")].find((x) => x.dataset.column === one.id)?.focus();
    } }, ...one.head);
    head.append(element("th", { scope: "col", class: one.words ? "words" : one.heat ? "task" : null,
      "aria-sort": chosen ? (state.down ? "descending" : "ascending") : "none" }, button));
  }
  at("board").tHead.replaceChildren(head);
  at("board").tBodies[0].replaceChildren(...rows.map((cell) => tableRow(cell, shown)));
  const all = cells.filter((cell) => String(cell.benchmark) === state.benchmark).length;
  at("count").textContent = rows.length ? `${plural(rows.length, "row")} of ${number.format(all)}.` : "No policy fits these filters.";
  drawCurves();
  writeAddress();
}
function tableRow(cell, shown) {
  const place = curves.indexOf(cell.label);
  const tick = cell.full ? null : element("input", { type: "checkbox", "aria-label": `draw the curve of ${cell.label}`,
    style: place < 0 ? {} : { "--own": `var(--c${place})` }, onchange: () => toggle(cell.label) });
  if (tick) tick.checked = place >= 0;
  const open = element("button", { type: "button", "aria-haspopup": "dialog", onclick: () => openPanel(cell) }, ...wrapping(cell.label));
  return element("tr", { class: cell.full ? "full" : null },
    element("th", { scope: "row" }, element("span", { class: "name" }, tick, open)),
    ...shown.slice(1).map((one) => {
      const score = one.heat?.(cell);
      const tint = score === undefined || score === null ? {} : { "--tint": `color-mix(in srgb, var(--heat) ${(0.42 * score).toFixed(0)}%, transparent)` };
      return element("td", { class: [one.words ? "words" : "", one.name ?? "", one.heat ? "heat" : ""].join(" ").trim() || null, style: tint }, one.show(cell));
    }));
}
