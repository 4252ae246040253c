// What the system did, and why: the newest, and each with the numbers behind it.

import { byId, getJson, keyed, make, setText } from "./dom.js";
import { ago, clock, count, milliseconds, number } from "./words.js";

const SHOWN = 7;

const SYMBOLS = { plan: "⇄", regroup: "↻", launch: "+", drain: "−", pause: "‖", stay: "=" };

export function showDecisions(status, { onOpen }) {
  const newest = [...status.newest].reverse().slice(0, SHOWN);
  byId("no-decisions").hidden = newest.length > 0;
  keyed(byId("decisions"), newest, (d) => d.index, () => {
    const button = make("button", { type: "button" }, make("span", { class: "kind" }), make("span", { class: "reason" }), make("time"));
    return make("li", {}, button);
  }, (row, d) => {
    const button = row.firstChild;
    const [kind, reason, time] = button.children;
    row.dataset.kind = d.kind;
    button.onclick = () => onOpen(d.index);
    setText(kind, `${SYMBOLS[d.kind] || "•"} ${d.kind}`);
    setText(reason, d.num_before ? `${d.reason} (and ${count(d.num_before)} ${d.num_before === 1 ? "plan" : "plans"} before)` : d.reason);
    setText(time, status.is_live ? ago(status.at_s - d.at_s) : `at ${clock(d.at_s - status.began_s)}`);
  });
}

export class Details {
  constructor() {
    this.dialog = byId("details");
    this.index = -1;
    byId("previous").onclick = () => this.open(this.index - 1, -1);
    byId("next").onclick = () => this.open(this.index + 1, 1);
  }

  async open(index) {
    let found;
    try {
      found = await getJson(`/decisions/${index}`);
    } catch {
      return; // dropped from memory, or the server is gone
    }
    this.index = found.index;
    byId("previous").disabled = found.index === 0;
    byId("next").disabled = found.index >= found.num_decisions - 1;
    setText(byId("details-title"), found.reason);
    const facts = make("dl", { class: "facts" });
    const fact = (name, value) => facts.append(make("dt", {}, name), make("dd", {}, value));
    fact("what", `${SYMBOLS[found.kind] || "•"} ${found.kind}`);
    fact("when", `${clock(found.at_s - found.began_s)} into the run`);
    fact("because of", found.event);
    fact("generation", count(found.generation));
    byId("details-body").replaceChildren(facts, numbersOf(found.numbers));
    if (!this.dialog.open) this.dialog.showModal();
  }
}

// For each worker: the last step before the decision, and its share before and after.
function numbersOf(rows) {
  if (!rows.length) return make("p", { class: "empty" }, "No step was done before it.");
  const longest = Math.max(...rows.map((r) => (r.compute_s || 0) + (r.wait_s || 0)), 1e-9);
  const most = Math.max(...rows.map((r) => Math.max(r.before || 0, r.after || 0)), 1);
  const cell = (text) => make("td", { class: "number" }, text);
  const body = rows.map((r) => {
    const stack = make("span", { class: "stack" }, make("i", { class: "compute" }), make("i", { class: "wait" }));
    stack.children[0].style.inlineSize = `${(100 * (r.compute_s || 0)) / longest}%`;
    stack.children[1].style.inlineSize = `${(100 * (r.wait_s || 0)) / longest}%`;
    const change = r.after === null || r.after === undefined ? "" : signed(r.after - (r.before || 0));
    const share = make("span", { class: "stack share" }, make("i"));
    share.children[0].style.inlineSize = `${(100 * (r.after || 0)) / most}%`;
    return make("tr", {}, make("th", { scope: "row" }, r.worker), make("td", { class: "times" }, stack), cell(text(r.compute_s, milliseconds)), cell(text(r.wait_s, milliseconds)), cell(text(r.pace, number)), cell(text(r.forecast, number)), cell(text(r.before, count)), cell(text(r.after, count)), cell(change), make("td", { class: "times" }, share));
  });
  const heads = [["Worker"], ["Last step"], ["Compute", "number"], ["Wait", "number"], ["Speed", "number"], ["Forecast", "number"], ["Share before", "number"], ["after", "number"], ["change", "number"], [""]];
  const head = make("tr", {}, ...heads.map(([name, kind]) => make("th", { scope: "col", class: kind || "" }, name)));
  return make("div", { class: "scroll", tabindex: "0" }, make("table", { class: "numbers" }, make("thead", {}, head), make("tbody", {}, ...body)), make("p", { class: "note" }, "Last step: compute and wait of the step before the decision. Speed and forecast in samples per second."));
}

function text(value, write) {
  return value === null || value === undefined ? "–" : write(value);
}

function signed(value) {
  return value > 0 ? `+${count(value)}` : value < 0 ? `−${count(-value)}` : "=";
}
