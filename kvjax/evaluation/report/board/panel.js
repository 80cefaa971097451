// The panel of a cell.
const fact = (name, ...value) => element("div", {}, element("dt", {}, name), element("dd", {}, ...value));
const known = (found, form) => (found ? [element("b", {}, form(found[0])), ` ${between(found[1], found[2], form) && `(${between(found[1], found[2], form)})`}`] : [NONE]);
function openPanel(cell) {
  const benchmark = data.benchmarks[cell.benchmark], published = publishedOf(cell);
  const paired = cell.tasks.some((task) => task && task[4] !== null);
  const where = [cell.modelName, benchmark.name, `question ${SEEN[cell.question]}`, cell.full ? "nothing removed" : cell.budget === null ? "a budget of its own" : cell.key.endsWith("%") ? `${cell.key} removed` : cell.key];
  const inside = at("panel").firstElementChild;
  const close = element("button", { type: "button", onclick: () => at("panel").close() }, "Close");
  inside.replaceChildren(
    element("div", { class: "head" }, element("div", {}, element("h2", { id: "panel-title" }, cell.label), element("div", { class: "faint" }, where.join(" · "))), close),
    element("dl", {},
      fact("Mean of the tasks", ...known(cell.mean, fixed)),
      cell.full ? null : fact("To the full cache, paired", ...known(cell.difference, signed)),
      cell.rank === null ? null : fact("Rank", element("b", {}, cell.rank)),
      fact("Prompts", element("b", {}, number.format(cell.prompts))),
      fact("Entries removed, measured", element("b", {}, share(cell.dropped))),
      fact("Cache of a row", element("b", {}, bytes(cell.bytes)), cell.of_full === null || cell.full ? "" : ` ${share(cell.of_full)} of the full one`),
    ),
    cell.families.length ? element("p", { class: "faint" }, `Families: ${cell.families.join("; ")}.`) : null,
    element("h3", {}, "Scores"),
    element("div", { class: "box" }, element("table", {},
      headings(["task", "score", "95 % interval", "prompts", ...(paired ? ["to full", "95 % interval"] : []), ...(published ? ["published"] : [])]),
      element("tbody", {}, ...benchmark.tasks.map((name, i) => {
        const [score, low, high, prompts, difference, least, greatest] = cell.tasks[i] ?? [];
        return element("tr", {}, element("th", { scope: "row" }, ...wrapping(name)), ...[
          fixed(score), between(low, high), prompts ?? NONE,
          ...(paired ? [signed(difference), between(least, greatest, signed)] : []),
          ...(published ? [fixed(published.tasks[i])] : []),
        ].map((text) => element("td", {}, text)));
      })))),
    ...layersOf(cell), ...commandOf(cell), ...exampleOf(cell),
  );
  at("panel").showModal();
  at("panel").scrollTop = 0;
  close.focus();
}
const headings = (texts, words = 1) => element("thead", {}, element("tr", {}, ...texts.map((text, i) => element("th", { scope: "col", class: i < words ? "plain words" : "plain" }, text))));
const publishedOf = (cell) => data.published?.groups.flatMap((group) => group.rows).find((row) => cells[row.cell] === cell && row.tasks.some((x) => x !== null));

function layersOf(cell) {
  if (!cell.kept.length) return [];
  const { kept } = cell, width = 600, height = 120, left = 46, bottom = 20, most = Math.max(...kept, 1);
  const wide = (width - left) / kept.length, svg = drawing("svg", { viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": `retained entries per kv head, by layer: ${kept.map((n) => number.format(Math.round(n))).join(", ")}` });
  for (const mark of [0, most]) {
    const y = 10 + (1 - mark / most) * (height - 10 - bottom);
    svg.append(drawing("path", { class: "axis", d: `M${left} ${y}H${width}` }), drawing("text", { x: left - 5, y: y + 4, "text-anchor": "end" }, number.format(Math.round(mark))));
  }
  kept.forEach((n, i) => {
    const tall = (n / most) * (height - 10 - bottom);
    svg.append(drawing("rect", { x: left + i * wide + 0.1 * wide, y: height - bottom - tall, width: 0.8 * wide, height: tall, fill: "var(--c0)" },
      drawing("title", {}, `layer ${i}: ${number.format(n)}`)));
  });
  for (const i of unique([0, kept.length - 1])) svg.append(drawing("text", { x: left + (i + 0.5) * wide, y: height - 4, "text-anchor": "middle" }, String(i)));
  return [element("h3", {}, "Retained entries per kv head, by layer"), element("p", { class: "faint" }, `Mean of ${plural(cell.prompts, "prompt")}.`), svg];
}

function commandOf(cell) {
  const head = element("h3", {}, "Repeat it");
  if (!cell.command) return [head, element("p", { class: "faint" }, `No command repeats this cell. Its policy is `, element("code", {}, cell.text), ".")];
  const text = element("pre", { tabindex: 0, "aria-label": "command" }, cell.command);
  const button = element("button", { type: "button", onclick: async () => {
    try {
      await navigator.clipboard.writeText(cell.command);
      button.textContent = "Copied";
    } catch { // no clipboard here: the text is selected instead
      getSelection().selectAllChildren(text);
      button.textContent = "Selected";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  } }, "Copy");
  return [element("div", { class: "copy" }, head, button), text];
}

function exampleOf(cell) {
  const { example } = cell;
  if (!example) return [];
  const asked = data.asked[example.asked], found = [];
  const quote = (name, text, note) => text === null ? null : element("div", {}, element("h4", {}, name, note ? element("small", {}, ` ${note}`) : null),
    element("blockquote", { dir: "auto" }, text.trim() || "(nothing)"));
  found.push(quote("End of the prompt", asked.end, `of ${plural(example.tokens, "token")}`));
  if (asked.expected.length) found.push(quote("Expected", asked.expected.join("\n"), asked.more ? `and ${asked.more} more` : ""));
  found.push(quote("Answer", example.answer, `score ${fixed(example.score)}; ${number.format(Math.round(example.kept))} entries of the prompt per kv head`));
  found.push(quote("Answer from the full cache", example.full));
  if (asked.pieces && example.retained) found.push(retainedOf(asked.pieces, example.retained));
  const why = cell.full ? "" : example.lost ? "The full cache's answer scores higher." : "The full cache's answer scores no higher.";
  return [element("h3", {}, "An example"), element("p", { class: "faint" }, `${asked.task}, ${asked.id}. ${example.full !== null ? why : ""}`), ...found.filter(Boolean)];
}

// The tokens of a prompt, with a digit each for the kv heads that retain it: 0 for none, 9 for all. What follows the
// digits was read after the prompt was compressed.
function retainedOf(pieces, digits) {
  const runs = [];
  pieces.forEach((piece, i) => {
    const digit = digits[i] ?? "after";
    if (runs.length && runs[runs.length - 1].digit === digit) runs[runs.length - 1].text += piece;
    else runs.push({ digit, text: piece });
  });
  const parts = runs.map(({ digit, text }) => digit === "0" || digit === "after" ? text : element("span", { style: { "--share": digit / 9 } }, text));
  return element("div", {}, element("h4", {}, "Retained tokens", element("small", {}, " the stronger the colour, the more kv heads hold an entry of the token")),
    element("blockquote", { class: "prompt", dir: "auto", tabindex: 0 }, ...parts));
}
