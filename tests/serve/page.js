// Runs the script of the server's page without a browser: asks each question of argv[3], whose answers are its events,
// and prints the lines that the page shows after each.
const { readFileSync } = require("fs");

class Element {
  constructor() { Object.assign(this, { kids: [], textContent: "", value: "", className: "" }); }
  get childElementCount() { return this.kids.length; }
  append(kid) { this.kids.push(kid); kid.parent = this; }
  before(kid) { kid.remove(); this.parent.kids.splice(this.parent.kids.indexOf(this), 0, kid); kid.parent = this.parent; }
  remove() { this.parent.kids.splice(this.parent.kids.indexOf(this), 1); }
  replaceChildren(...kids) { this.kids = kids; }
  addEventListener() {}
}

const elements = {};
let told = [];
globalThis.document = { getElementById: id => elements[id] ??= new Element(), createElement: () => new Element() };
globalThis.setInterval = () => {};
globalThis.fetch = async url => ({
  ok: url.startsWith("v1/chat"),
  body: new Blob(told.map(event => `data: ${JSON.stringify(event)}\n\n`)).stream(),
});
const script = readFileSync(process.argv[2], "utf8").match(/<script>(.*)<\/script>/s)[1];
const ask = new Function(`${script}; return ask`)();

(async () => {
  for (told of JSON.parse(process.argv[3])) {
    const said = document.getElementById("said");
    said.kids = [];
    await ask("question");
    console.log(JSON.stringify(said.kids.map(line => [line.className, line.textContent])));
  }
})();
