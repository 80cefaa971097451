// The published ranking.
function showPublished() {
  const { published } = data;
  if (!published) return;
  at("published").hidden = false;
  at("missing").textContent = published.missing.length ? `Not in these runs: ${published.missing.join(", ")}.` : "";
  if (!published.groups.length) {
    at("missing").textContent += " No policy has a published mean and a mean of all tasks here.";
    for (const box of at("published").querySelectorAll(".box, h3")) box.hidden = true;
    return;
  }
  at("groups").tHead.replaceWith(headings(["removed", "question", "ours", "published", "policies", "rank correlation"], 4));
  const rows = published.groups.map((group) => {
    const choose = element("button", { type: "button", onclick: () => choosePublished(group, rows) }, share(group.removed));
    return element("tr", {}, element("th", { scope: "row" }, choose), ...[
      SEEN[group.question], `${cells[group.cell].modelName}, ${data.benchmarks[cells[group.cell].benchmark].name}`, group.published,
      group.rows.length, group.spearman === null ? NONE : group.spearman.toFixed(2).replace("-", "−"),
    ].map((text, i) => element("td", { class: i < 3 ? "words" : null }, text)));
  });
  at("groups").tBodies[0].replaceChildren(...rows);
  const alike = published.groups.filter((group) => share(group.removed) === state.removed && group.question === state.question);
  const first = (alike.length ? alike : published.groups).reduce((a, b) => (b.rows.length > a.rows.length ? b : a));
  choosePublished(first, rows);
}
function choosePublished(group, rows) {
  rows.forEach((row, i) => {
    const chosen = data.published.groups[i] === group;
    row.classList.toggle("chosen", chosen);
    row.querySelector("button").setAttribute("aria-pressed", chosen);
  });
  at("group-title").textContent = `${share(group.removed)} removed, question ${SEEN[group.question]}: ours and ${group.published}`;
  at("pairs").tHead.replaceWith(headings(["policy", "ours", "rank", "published", "rank", "difference of ranks"]));
  at("pairs").tBodies[0].replaceChildren(...[...group.rows].sort((a, b) => a.ranks[0] - b.ranks[0]).map((row) => {
    const cell = cells[row.cell], [ours, theirs] = row.ranks, apart = ours - theirs;
    const open = element("button", { type: "button", "aria-haspopup": "dialog", onclick: () => openPanel(cell) }, ...wrapping(cell.label));
    const step = (x) => String(Number(x.toFixed(1)));
    return element("tr", { class: row.outlier ? "outlier" : null }, element("th", { scope: "row" }, element("span", { class: "name" }, open)), ...[
      withEnds(cell.mean, fixed), step(ours), fixed(row.mean), step(theirs),
      `${sign(apart, step(Math.abs(apart)))}${row.outlier ? (apart > 0 ? " lower here" : " higher here") : ""}`,
    ].map((content) => element("td", {}, content)));
  }));
}
