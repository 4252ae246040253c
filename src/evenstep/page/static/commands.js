// Commands, if the server was started with them: always asked back, never by a link.

import { byId, make } from "./dom.js";

export class Commands {
  constructor(session) {
    this.token = session.token || "";
    this.allowed = Boolean(session.commands);
    this.offer(false);
    byId("stop").onclick = () => this.ask("Stop the run?", "It stops after the step at hand, with a checkpoint; `evenstep run --resume` goes on.", "Stop the run", { what: "stop" });
    byId("scale").onsubmit = (event) => {
      event.preventDefault();
      const num = Number(byId("scale").elements.num.value);
      this.ask(`Change to ${num} workers?`, "New workers join when they are ready; surplus ones leave at the end of a step.", "Scale", { what: "scale", num_workers: num });
    };
  }

  // Buttons, while there is a coordinator that takes commands.
  offer(takesCommands) {
    this.offered = this.allowed && takesCommands;
    byId("stop").hidden = !this.offered;
    byId("scale").hidden = !this.offered;
  }

  drain(worker) {
    this.ask(`Let ${worker} leave?`, "It leaves at the end of a step, and the others take its share.", "Drain", { what: "drain", worker });
  }

  ask(title, text, yes, command) {
    const dialog = byId("confirm");
    byId("confirm-title").textContent = title;
    byId("confirm-text").textContent = text;
    byId("confirm-yes").textContent = yes;
    dialog.returnValue = "no";
    dialog.onclose = () => dialog.returnValue === "yes" && this.send(command);
    dialog.showModal();
  }

  async send(command) {
    try {
      const response = await fetch("/commands", {
        method: "POST",
        headers: { "content-type": "application/json", "x-evenstep-token": this.token },
        body: JSON.stringify(command),
      });
      const answer = await response.json();
      toast(answer.told || answer.problem, response.ok);
    } catch {
      toast("the page's server does not answer", false);
    }
  }
}

let hiding = 0;

function toast(text, ok) {
  const box = byId("toast");
  box.replaceChildren(make("span", { class: ok ? "ok" : "refused" }, ok ? "✓ " : "! "), text);
  box.hidden = false;
  clearTimeout(hiding);
  hiding = setTimeout(() => (box.hidden = true), 8000);
}
