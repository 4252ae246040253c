// The page: news from the server to the parts that show them, and keys.

import { Commands } from "./commands.js";
import { Details, showDecisions } from "./decisions.js";
import { byId, getJson, setText } from "./dom.js";
import { listen } from "./feed.js";
import { showGlance, showProblems, showWorkers } from "./glance.js";
import { Timeline } from "./timeline.js";
import { megabytes } from "./words.js";

const LINKS = {
  live: ["", ""],
  lost: ["wait", "connection lost, trying again"],
  gone: ["bad", "the page's server is gone; this is what it last said"],
};

async function start() {
  const session = await getJson("/session");
  setText(byId("run"), session.run);
  const commands = new Commands(session);
  const details = new Details();
  const timeline = new Timeline(session.pictures, { onDecision: (index) => details.open(index) });
  let newest = null;
  let bytesRead = null;
  let newestGrowth = null;

  // What stands in place of the pictures. Problems are listed above, with the state.
  const showReading = () => {
    byId("reading").hidden = newestGrowth ? newestGrowth.num_steps > 0 : !bytesRead;
    let text = "No step is in the journal yet.";
    if (newestGrowth?.problem) text = "There is nothing to draw without the journal.";
    else if (bytesRead) text = `Reading the journal: ${megabytes(bytesRead[0])} of ${megabytes(bytesRead[1])} MB.`;
    setText(byId("reading"), text);
  };

  listen({
    onStatus(status) {
      if (!status.workers) { // the server could not look: what is shown is old
        showProblems([`there is no newer status: ${status.problem}`]);
        return;
      }
      newest = status.newest.at(-1);
      showGlance(status);
      commands.offer(status.takes_commands);
      showWorkers(status, { commands: commands.offered, onDrain: (worker) => commands.drain(worker) });
      showDecisions(status, { onOpen: (index) => details.open(index) });
      byId("live").hidden = !status.is_live;
      bytesRead = status.reading;
      showReading();
    },
    onGrown(grown) {
      newestGrowth = grown;
      showReading();
      byId("figures").hidden = !grown.num_steps;
      timeline.grown(grown.begin_s, grown.end_s);
    },
    onLink(link) {
      const [kind, text] = LINKS[link];
      byId("link").dataset.kind = kind;
      setText(byId("link"), text);
    },
  });

  const actions = {
    "+": () => timeline.zoom(0.5),
    "=": () => timeline.zoom(0.5),
    "-": () => timeline.zoom(2),
    ArrowLeft: () => timeline.move(-0.25),
    ArrowRight: () => timeline.move(0.25),
    0: () => timeline.all(),
    l: () => timeline.live(),
    d: () => newest && details.open(newest.index),
    "?": () => byId("keys").showModal(),
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select")) return;
    if (document.querySelector("dialog[open]") || (event.target.closest(".scroll") && event.key.startsWith("Arrow"))) return;
    const act = actions[event.key] || actions[event.key.toLowerCase()];
    if (!act) return;
    event.preventDefault();
    act();
  });
  const buttons = { earlier: "ArrowLeft", later: "ArrowRight", in: "+", out: "-", all: "0", live: "l", help: "?" };
  for (const [id, key] of Object.entries(buttons)) byId(id).onclick = actions[key];
  for (const dialog of document.querySelectorAll("dialog")) {
    dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  }
}

start().catch((error) => {
  setText(byId("link"), `this page cannot start: ${error.message}`);
  byId("link").dataset.kind = "bad";
});
