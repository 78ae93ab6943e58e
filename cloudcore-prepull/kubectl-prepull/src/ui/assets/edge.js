// One edge: its facts from the leader, and its jobs.

import { PHASE_NAMES, Pager, badge, bytes, fill, keyOf, make, row, table, time, write } from "./dom.js";
import { factsOf } from "./edges.js";
import { ask, path } from "./live.js";
import { linkTo } from "./place.js";

const INTERVAL = 5000;
const COLUMNS = ["Job", "State here", "Job's state", ["Bytes"], "Ended", "Reason"];

export class Edge {
  constructor({ name, known }) {
    Object.assign(this, { name, known });
    this.mark = make("span");
    this.state = make("p", { class: "dim", role: "status" }, "Asking the leader.");
    this.facts = make("dl");
    this.jobs = [];
    this.pager = new Pager(() => this.showJobs());
    this.rows = make("tbody");
    this.table = table(this.pager.caption, COLUMNS, this.rows);
    this.empty = make("p", { class: "empty", role: "status" }, "Asking for its jobs.");
    this.element = make(
      "div",
      {},
      make(
        "section",
        { "aria-label": "Edge" },
        make("p", {}, make("a", { href: "#/edges" }, "All edges")),
        make("div", { class: "top" }, make("h2", {}, name), this.mark),
        this.state,
        this.facts,
      ),
      make("section", { "aria-label": "Jobs of the edge" }, this.empty, this.table, this.pager.element),
    );
    this.showJobs();
    this.refresh();
  }

  async refresh() {
    await Promise.all([this.readFacts(), this.readJobs()]);
    if (!this.left) this.timer = setTimeout(() => this.refresh(), INTERVAL);
  }

  leave() {
    this.left = true;
    clearTimeout(this.timer);
  }

  turn() {
    this.showJobs();
  }

  async readFacts() {
    try {
      const [edge] = (await ask(`edges?edge=${encodeURIComponent(this.name)}`)).edges;
      write(this.state, edge ? "" : `The leader knows no edge ${this.name}: its Node may have been deleted, or lack the label of edges.`);
      if (edge) this.show(edge);
    } catch (error) {
      write(this.state, `What the leader knows of this edge can't be shown: ${error.message}`);
    }
    this.state.hidden = this.state.textContent === "";
  }

  show(edge) {
    const { connected, disk, certificate, runtime } = factsOf(edge);
    this.mark.replaceChildren(...(edge.revoked ? [badge("revoked")] : []));
    const tasks = edge.tasks == null ? null : `${edge.tasks}${edge.maxTasks ? ` of ${edge.maxTasks} at a time` : ""}`;
    const facts = [
      ["Connected", connected],
      ["Revoked", edge.revoked && ["It gets no session and no certificate. ", make("code", {}, `kubectl prepull node allow ${edge.name}`), " lets it in again."]],
      ["Site", edge.site && make("a", { href: linkTo("sites", edge.site) }, edge.site)],
      ["Disk of images", disk && [...disk, edge.disk.mountpoint ? `, ${edge.disk.mountpoint}` : ""]],
      ["Certificate", certificate],
      ["Tasks", tasks],
      ["Version", edge.version],
      ["Runtime", runtime],
      ["Node", edge.ready ? "Ready" : "not Ready"],
    ].filter(([, value]) => value);
    fill(this.facts, facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
  }

  async readJobs() {
    try {
      this.jobs = Object.entries(await ask(`jobs/${path(this.name)}`));
      this.heard = new Date();
      write(this.empty, "No job has this node.");
    } catch (error) {
      write(this.empty, `The jobs can't be read: ${error.message}${this.heard ? `. Below is the answer of ${this.heard.toLocaleTimeString()}` : ""}`);
      this.empty.hidden = false;
      return;
    }
    this.empty.hidden = this.jobs.length > 0;
    this.showJobs();
  }

  showJobs() {
    // The newest first.
    const created = ([name]) => this.known.jobs.get(name)?.created ?? "";
    this.jobs.sort((a, b) => created(b).localeCompare(created(a)));
    fill(this.rows, this.pager.part(this.jobs, "Job").map(([name, node]) => this.row(name, node)));
    this.table.hidden = this.jobs.length === 0;
  }

  row(name, node) {
    const link = make("a", { class: "name", href: linkTo("job", name, { node: this.name }) }, name);
    const state = [keyOf(node.phase), PHASE_NAMES[node.phase]];
    const size = node.total ? `${bytes(node.done)} of ${bytes(node.total)}` : "";
    return row(COLUMNS, [link, state, this.known.jobs.get(name)?.state, size, node.ended && time(node.ended), node.reason]);
  }
}
