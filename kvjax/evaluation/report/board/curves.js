// Curves.
const HOLE = null;
const MARKS = [
  (x, y) => drawing("circle", { cx: x, cy: y, r: 4.5 }),
  (x, y) => drawing("rect", { x: x - 4, y: y - 4, width: 8, height: 8 }),
  (x, y) => drawing("path", { d: `M${x} ${y - 5.5}l5 9h-10z` }),
  (x, y) => drawing("path", { d: `M${x} ${y - 6}l5.5 6l-5.5 6l-5.5 -6z` }),
  (x, y) => drawing("path", { d: `M${x} ${y + 5.5}l5 -9h-10z` }),
  (x, y) => drawing("path", { d: `M${x - 6} ${y - 2}h4v-4h4v4h4v4h-4v4h-4v-4h-4z` }),
  (x, y) => drawing("path", { d: `M${x} ${y - 6}l5.7 4.1l-2.2 6.8h-7l-2.2 -6.8z` }),
];
function toggle(label) {
  at("drawn").textContent = "";
  if (curves.includes(label)) curves[curves.indexOf(label)] = HOLE; // the others keep their colours
  else {
    const free = curves.indexOf(HOLE);
    if (free >= 0) curves[free] = label;
    else if (curves.length < MOST) curves.push(label);
    else at("drawn").textContent = `${MOST} curves are drawn at most: untick one first.`;
  }
  for (const input of at("board").querySelectorAll(".name input")) {
    const place = curves.indexOf(cells.find((cell) => input.getAttribute("aria-label") === `draw the curve of ${cell.label}`)?.label);
    input.checked = place >= 0;
    if (place < 0) input.style.removeProperty("--own"); else input.style.setProperty("--own", `var(--c${place})`);
  }
  drawCurves();
}
function drawCurves() {
  const inside = cells.filter((cell) => isIn(cell) && cell.mean);
  const panels = unique(inside.map((cell) => `${cell.model} ${cell.question}`));
  at("legend").replaceChildren(...curves.flatMap((label, i) => (label === HOLE ? [] : [element("li", {}, element("button", {
    type: "button", title: "remove this curve", onclick: () => toggle(label) }, sample(i), label, element("span", { "aria-hidden": "true" }, "×")))])));
  at("plots").replaceChildren(...panels.map((key) => {
    const some = inside.filter((cell) => `${cell.model} ${cell.question}` === key);
    const full = some.find((cell) => cell.full);
    const caption = `${some[0].modelName}, question ${SEEN[some[0].question]}${full ? `; dashed: the full cache, ${fixed(full.mean[0])}` : ""}`;
    return element("figure", {}, element("figcaption", {}, caption));
  }));
  if (inside.every((cell) => cell.full)) at("plots").replaceChildren(element("p", {}, "No policy has a mean of all tasks here."));
  else panels.forEach((key, i) => plot(at("plots").children[i], inside.filter((cell) => `${cell.model} ${cell.question}` === key)));
}
const sample = (i) => drawing("svg", { viewBox: "0 0 26 12", "aria-hidden": "true", style: { color: `var(--c${i})` } },
  drawing("path", { d: "M0 6h26", stroke: "currentColor", "stroke-width": 2 }), drawing("g", { fill: "currentColor" }, MARKS[i](13, 6)));
function plot(figure, some) {
  const width = Math.max(280, figure.clientWidth), height = Math.min(380, Math.max(250, width * 0.55));
  const left = 34, right = 14, top = 12, bottom = 42;
  const x = (share) => left + (share / 100) * (width - left - right), y = (score) => top + (1 - score / 100) * (height - top - bottom);
  const svg = drawing("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img" });
  const said = [];
  for (let score = 0; score <= 100; score += 20) {
    svg.append(drawing("path", { class: "axis", d: `M${left} ${y(score)}H${width - right}` }));
    svg.append(drawing("text", { x: left - 6, y: y(score) + 4, "text-anchor": "end" }, String(score)));
  }
  const ticks = unique([0, ...some.filter((cell) => cell.removed !== null).map((cell) => cell.removed), 100]).sort((a, b) => a - b);
  let last = -Infinity; // labels must not overlap
  for (const tick of ticks) {
    svg.append(drawing("path", { class: "axis", d: `M${x(tick)} ${height - bottom}v5` }));
    if (x(tick) - last < (tick === 100 ? 44 : 30)) continue;
    last = x(tick);
    svg.append(drawing("text", { x: x(tick), y: height - bottom + 18, "text-anchor": tick === 100 ? "end" : "middle" }, String(Number(tick.toFixed(1)))));
  }
  svg.append(drawing("text", { x: (left + width - right) / 2, y: height - 5, "text-anchor": "middle" }, "entries removed, %"));
  const full = some.find((cell) => cell.full);
  if (full) {
    svg.append(drawing("path", { d: `M${left} ${y(full.mean[0])}H${width - right}`, stroke: "var(--faint)", "stroke-width": 1.5, "stroke-dasharray": "5 4" }));
    said.push(`full cache ${fixed(full.mean[0])}`);
  }
  const count = curves.filter((label) => label !== HOLE).length;
  let nth = 0;
  curves.forEach((label, i) => {
    if (label === HOLE) return;
    const points = some.filter((cell) => cell.label === label && !cell.full).sort((a, b) => a.dropped - b.dropped);
    const beside = (nth++ - (count - 1) / 2) * 2.5; // so that the bars of policies at one share do not hide one another
    const where = points.map((cell) => [x(cell.dropped) + beside, y(cell.mean[0])]);
    const own = drawing("g", { style: { color: `var(--c${i})` } });
    for (const [j, cell] of points.entries()) {
      if (cell.mean[1] !== null) own.append(drawing("path", { d: `M${where[j][0]} ${y(cell.mean[1])}V${y(cell.mean[2])}`, stroke: "currentColor", "stroke-width": 1.5, opacity: 0.55 }));
    }
    own.append(drawing("path", { d: where.map(([a, b], j) => `${j ? "L" : "M"}${a} ${b}`).join(""), fill: "none", stroke: "currentColor", "stroke-width": 2 }));
    for (const [j, cell] of points.entries()) {
      const title = `${label}: ${fixed(cell.mean[0])}${cell.mean[1] === null ? "" : ` (${between(cell.mean[1], cell.mean[2])})`} with ${share(cell.dropped)} removed`;
      own.append(drawing("g", { fill: "currentColor", stroke: "var(--paper)", "stroke-width": 1 }, MARKS[i](...where[j]), drawing("title", {}, title)));
      said.push(title);
    }
    svg.append(own);
  });
  svg.setAttribute("aria-label", said.join("; "));
  figure.append(svg);
}
