// Light and dark.
const system = matchMedia("(prefers-color-scheme: dark)");
let theme = null;
function dress() {
  const dark = theme === null ? system.matches : theme === "dark";
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  at("theme").textContent = dark ? "Light" : "Dark";
  at("theme").setAttribute("aria-label", dark ? "use light colours" : "use dark colours");
}
at("theme").addEventListener("click", () => { theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark"; dress(); });
system.addEventListener("change", dress);
dress();

// The page.
document.title = at("title").textContent = data.title;
const answered = cells.reduce((sum, cell) => sum + cell.prompts, 0);
at("about").textContent = `${plural(data.policies.length, "policy").replace(/ys$/, "ies")}, ${short.join(", ")}, ${data.benchmarks.map((one) => `${one.name} (${plural(one.tasks.length, "task")})`).join(", ")}; ${plural(answered, "answer")}.`;
const errors = data.models.reduce((sum, model) => sum + model.errors, 0);
at("errors").hidden = !errors;
at("errors").textContent = `${plural(errors, "answer")} missing because of errors, which the results files list.`;
at("most").textContent = MOST;
at("fewest").textContent = data.fewest;
at("meaning").textContent = Object.entries(data.questions).map(([name, text]) => `Question ${SEEN[name]}: ${text}.`).join(" ");
readAddress();
curves = unique(cells.filter((cell) => isIn(cell) && cell.mean && cell.budget !== null).sort((a, b) => b.mean[0] - a.mean[0]).map((cell) => cell.label)).slice(0, 5);
makeFilters();
show();
showPublished();
at("panel").addEventListener("click", (event) => { if (event.target === at("panel")) at("panel").close(); });
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; drawCurves(); } });
