// The first screen: is it training, who is slow, how fast.

import { byId, keyed, make, setText, swatch } from "./dom.js";
import { count, duration, milliseconds, number, percent } from "./words.js";

// What a state means, in a colour and a symbol: never by colour alone.
const STATES = {
  training: ["good", "▶"],
  recorded: ["over", "■"],
  finished: ["good", "✓"],
  ended: ["over", "■"],
  finishing: ["good", "✓"],
  starting: ["wait", "…"],
  reading: ["wait", "…"],
  stopped: ["over", "■"],
  "no coordinator": ["bad", "!"],
  regrouping: ["wait", "↻"],
  stopping: ["wait", "■"],
  paused: ["bad", "‖"],
};

export function showGlance(status) {
  const [kind, symbol] = STATES[status.state] || ["bad", "!"];
  const state = byId("state");
  state.dataset.kind = kind;
  setText(state.querySelector(".symbol"), symbol);
  setText(state.querySelector(".word"), status.state);
  setText(byId("why"), status.reason || "");
  showProgress(status.progress);
  showVitals(status);
  showProblems(status.problems);
  document.title = `${symbol} ${titlePosition(status)} · ${status.run || "evenstep"}`;
}

export function showProblems(problems) {
  keyed(byId("problems"), problems, (p) => p, () => make("li"), setText);
}

function titlePosition(status) {
  const { samples, total_samples: total } = status.progress;
  return total ? percent(samples / total) : status.state;
}

function showProgress(progress) {
  const bar = byId("progress");
  const part = progress.total_samples ? Math.min(1, progress.samples / progress.total_samples) : 0;
  bar.hidden = !progress.total_samples;
  bar.setAttribute("aria-valuenow", Math.round(100 * part));
  bar.firstElementChild.style.inlineSize = `${100 * part}%`;
  const parts = [];
  if (progress.num_epochs) parts.push(`epoch ${Math.min(progress.epoch + 1, progress.num_epochs)} of ${progress.num_epochs}`);
  if (progress.total_samples) parts.push(percent(part));
  else if (progress.samples) parts.push(`${count(progress.samples)} samples`);
  if (progress.seconds_left) parts.push(`${duration(progress.seconds_left)} left`);
  setText(byId("position"), parts.join(" · "));
}

function showVitals(status) {
  const { totals } = status;
  const inRoster = status.workers.filter((w) => w.rank !== null).length;
  const rows = [
    ["Throughput", number(status.samples_per_s), "samples/s"],
    ["Of the limit", status.part_of_limit ? percent(status.part_of_limit) : "–", status.part_of_limit ? "with the best shares" : "not known yet"],
    ["Speed-up", status.speedup ? `${status.speedup.toFixed(2)}×` : "–", "over equal shares"],
    ["Step", count(Math.max(status.step, 0)), `generation ${status.generation}`],
    ["Workers", count(inRoster), totals.num_lost ? `${totals.num_lost} lost so far` : "none lost"],
    ["Elapsed", totals.elapsed_s ? duration(totals.elapsed_s) : "–", totals.is_priced ? `cost so far: ${number(totals.cost)}` : `${number(totals.cost)} worker-hours`],
  ];
  keyed(byId("vitals"), rows, (row) => row[0], ([name]) => make("div", {}, make("dt", {}, name), make("dd"), make("dd", { class: "note" })), (div, [, value, note]) => {
    setText(div.children[1], value);
    setText(div.children[2], note);
  });
}

const MAX_ROWS = 64;

export function showWorkers(status, { commands, onDrain }) {
  const rows = status.workers;
  const longest = Math.max(...rows.map((w) => w.compute_s + w.wait_s), 1e-9);
  const shown = rows.length <= MAX_ROWS ? rows : [...rows].sort((a, b) => b.compute_s - a.compute_s).slice(0, MAX_ROWS);
  byId("no-workers").hidden = rows.length > 0;
  setText(byId("workers-title"), rows.length > MAX_ROWS ? `Workers: the ${MAX_ROWS} slowest of ${rows.length}` : "Workers");
  keyed(byId("workers"), shown, (w) => w.worker, createRow, (row, w) => {
    const [name, share, bar, compute, wait] = row.children;
    const trains = w.rank !== null && w.compute_s > 0;
    const isSlowest = w.worker === status.slowest;
    row.classList.toggle("slowest", isSlowest);
    row.classList.toggle("out", w.rank === null);
    setText(name.querySelector(".name"), w.worker);
    name.querySelector(".swatch rect").setAttribute("class", w.colour === undefined ? "" : `f${w.colour}`);
    setText(name.querySelector(".state"), [isSlowest ? "▲ slowest" : "", w.state === "training" ? "" : w.state].filter(Boolean).join(" · "));
    name.title = [w.host, w.pid ? `pid ${w.pid}` : "", w.rank === null ? "not in the roster" : `rank ${w.rank}`].filter(Boolean).join(", ");
    setText(share, w.rank === null ? "–" : count(w.share));
    const [did, waited] = bar.querySelectorAll("i");
    did.style.inlineSize = `${trains ? (100 * w.compute_s) / longest : 0}%`;
    waited.style.inlineSize = `${trains ? (100 * w.wait_s) / longest : 0}%`;
    setText(compute, trains ? milliseconds(w.compute_s) : "–");
    setText(wait, trains ? milliseconds(w.wait_s) : "–");
    const drain = name.querySelector("button");
    drain.hidden = !commands || w.rank === null;
    drain.onclick = () => onDrain(w.worker);
    drain.setAttribute("aria-label", `Drain ${w.worker}`);
  });
}

function createRow() {
  const name = make("th", { scope: "row" }, swatch(""), make("span", { class: "name" }), make("span", { class: "state" }), make("button", { type: "button", class: "small", hidden: true, title: "Let it leave at the end of a step" }, "Drain"));
  return make("tr", {}, name, make("td", { class: "number" }), make("td", { class: "times" }, make("span", { class: "stack" }, make("i", { class: "compute" }), make("i", { class: "wait" }))), make("td", { class: "number" }), make("td", { class: "number" }));
}
