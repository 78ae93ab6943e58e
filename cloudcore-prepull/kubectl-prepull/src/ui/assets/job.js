// One job: its nodes as a grid and as a table, why some failed, and what may be done.

import { draw as drawChart, marksOf } from "./chart.js";
import { detailOf } from "./detail.js";
import { Bar, PHASES, PHASE_NAMES, Pager, bytes, describe, make, number, seconds, table, time, write } from "./dom.js";
import { Grid } from "./grid.js";
import { phaseOf } from "./jobs.js";
import { act, ask, follow, path } from "./live.js";

/** Time between two looks at the events of the job. */
const INTERVAL = 5000;
/** What is changed together is drawn together. */
const QUIET = 200;

const VERBS = [
  { verb: "suspend", text: "Suspend", fits: (job) => !job.isOver && !job.suspended && !job.cancelled },
  { verb: "resume", text: "Resume", fits: (job) => !job.isOver && job.suspended && !job.cancelled },
  { verb: "retry", text: "Retry", fits: (job) => job.isOver && !job.cancelled && job.nodes.successful < job.nodes.desired },
  {
    verb: "cancel",
    text: "Cancel",
    danger: true,
    fits: (job) => !job.isOver && !job.cancelled,
    sure: "End this job now, and for good? Nodes that are pulling stop, and no further one starts. What is there stays.",
  },
];

export class Job {
  constructor(name, jobs, lost, complain) {
    Object.assign(this, { name, jobs, complain });
    this.nodes = new Map();
    this.events = [];
    this.filter = { text: "", phase: null, code: null };
    this.pager = new Pager(() => this.show());
    this.grouped = "site";
    this.groups = new Map();
    this.build();
    this.close = follow(
      `live/${path(name)}`,
      {
        nodes: (rows) => this.setNodes(rows),
        changed: (rows) => this.changeNodes(rows),
        gone: (names) => this.removeNodes(names),
      },
      lost,
    );
    ask("may").then(({ change }) => {
      this.mayChange = change;
      this.show();
    }, complain);
    this.readEvents();
    this.show();
  }

  build() {
    this.phase = make("span");
    this.buttons = VERBS.map((verb) =>
      make("button", { type: "button", class: verb.danger ? "danger" : "", hidden: true, onclick: () => this.act(verb) }, verb.text),
    );
    this.bar = new Bar();
    this.said = make("p", { class: "dim" });
    this.facts = make("dl");
    this.svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    this.svg.setAttribute("class", "chart");
    this.svg.setAttribute("role", "img");
    this.svg.setAttribute("aria-label", "Nodes that have ended, over time");
    this.reasons = make("ul", { class: "reasons" });
    this.reasonsCard = make("section", { "aria-labelledby": "reasons-title" }, make("h3", { id: "reasons-title" }, "Failures by reason"), this.reasons);
    this.detail = make("section", { "aria-label": "Node", tabindex: "-1", hidden: true });
    this.grid = new Grid((node) => this.choose(node));
    this.legend = make(
      "ul",
      { class: "legend", "aria-hidden": "true" },
      PHASES.map((phase) => make("li", {}, make("span", { class: `key ${phase}` }), PHASE_NAMES[phase])),
    );
    this.label = make("input", { type: "text", size: "24", placeholder: "a label of nodes", "aria-label": "Label to group by", hidden: true });
    this.label.addEventListener("change", () => this.groupBy(this.label.value.trim()));
    const select = make(
      "select",
      {
        id: "group",
        onchange: () => {
          this.label.hidden = select.value !== "label";
          if (select.value === "label") this.label.focus();
          else this.groupBy(select.value);
        },
      },
      [["site", "by site"], ["", "not at all"], ["label", "by another label"]].map(([value, text]) => make("option", { value }, text)),
    );
    this.search = make("input", {
      type: "search",
      placeholder: "node or reason",
      "aria-label": "Filter nodes",
      oninput: () => this.setFilter({ text: this.search.value.trim().toLowerCase() }),
    });
    this.phases = PHASES.map((phase) =>
      make("button", { type: "button", "aria-pressed": "false", onclick: () => this.setFilter({ phase: this.filter.phase === phase ? null : phase }) }, PHASE_NAMES[phase]),
    );
    this.rows = make("tbody");
    this.table = table(this.pager.caption, ["Node", "State", ["Bytes"], ["Attempt"], "Ended", "Reason"], this.rows);
    this.element = make(
      "div",
      {},
      make(
        "section",
        { "aria-label": "Job" },
        make("div", { class: "top" }, make("h2", {}, this.name), this.phase, make("div", { class: "buttons" }, this.buttons)),
        this.bar.element,
        this.said,
        this.facts,
      ),
      make(
        "div",
        { class: "columns" },
        make(
          "div",
          {},
          make(
            "section",
            { "aria-label": "Nodes" },
            make("div", { class: "tools" }, make("label", { for: "group" }, "Group nodes "), select, this.label),
            this.legend,
            this.grid.element,
          ),
          make(
            "section",
            { "aria-label": "Nodes as a table" },
            make("div", { class: "tools" }, this.search, this.phases),
            this.table,
            this.pager.element,
          ),
        ),
        make("div", { class: "side" }, this.detail, this.reasonsCard, make("section", { "aria-label": "Completion" }, make("h3", {}, "Nodes that have ended"), this.svg)),
      ),
    );
  }

  async readEvents() {
    try {
      this.ledSince = (await ask("leader")).since;
      this.events = await ask(`events/${path(this.name)}`);
      this.later();
    } catch (error) {
      // Without the right to read events everything else works.
      this.events = [];
    }
    if (!this.left) this.reading = setTimeout(() => this.readEvents(), INTERVAL);
  }

  leave() {
    this.left = true;
    this.close();
    clearTimeout(this.reading);
    clearTimeout(this.timer);
  }

  setNodes(rows) {
    this.nodes = new Map(rows.map((row) => [row.name, row]));
    this.arrange();
    this.later();
  }

  changeNodes(rows) {
    const isNew = rows.some((row) => !this.nodes.has(row.name));
    for (const row of rows) this.nodes.set(row.name, row);
    const filtered = this.filter.phase || this.filter.code || this.filter.text;
    if (isNew || filtered) this.arrange();
    else this.grid.touch(rows.map((row) => row.name));
    this.later();
  }

  removeNodes(names) {
    for (const name of names) this.nodes.delete(name);
    this.arrange();
    this.later();
  }

  /** Everything but the grid is drawn a moment later, once for all that arrives until then. */
  later() {
    this.timer ??= setTimeout(() => {
      this.timer = undefined;
      this.show();
    }, QUIET);
  }

  fits(node) {
    const { text, phase, code } = this.filter;
    return (
      (!phase || node.phase === phase) &&
      (!code || (node.code ?? "") === code) &&
      (!text || node.name.toLowerCase().includes(text) || (node.reason ?? "").toLowerCase().includes(text))
    );
  }

  setFilter(change) {
    Object.assign(this.filter, change);
    this.pager.restart();
    this.arrange();
    this.show();
  }

  async groupBy(by) {
    this.grouped = by;
    this.groups = new Map();
    if (by && by !== "site") {
      try {
        this.groups = new Map(Object.entries(await ask(`groups?label=${encodeURIComponent(by)}`)));
      } catch (error) {
        this.complain(error);
      }
    }
    this.arrange();
  }

  /** Sorts the nodes that fit into groups. */
  arrange() {
    this.shown = [...this.nodes.values()].filter((node) => this.fits(node)).sort((a, b) => compare(a.name, b.name));
    const groups = new Map();
    for (const node of this.shown) {
      const group = this.grouped === "" ? null : ((this.grouped === "site" ? node.site : this.groups.get(node.name)) ?? "without");
      if (!groups.has(group)) groups.set(group, []);
      groups.get(group).push(node.name);
    }
    let sorted = [...groups].sort(([a], [b]) => compare(a ?? "", b ?? ""));
    // One group of all is none.
    if (sorted.length === 1) sorted = [[null, sorted[0][1]]];
    const hidden = this.nodes.size - this.shown.length;
    const label = `${number(this.shown.length)} nodes as squares${hidden ? `, ${number(hidden)} others are filtered out` : ""}. Arrow keys move, Enter shows a node; the table below has the same.`;
    this.grid.set(this.nodes, sorted, label);
  }

  show() {
    const job = this.jobs.get(this.name);
    if (job) this.showJob(job);
    else write(this.phase, this.nodes.size ? "deleted" : "");
    this.showReasons();
    this.showTable();
    if (this.chosen) this.showMarks();
  }

  showJob(job) {
    write(this.phase, phaseOf(job));
    this.bar.show(job);
    write(this.said, `${describe(job)}. ${job.reason ?? ""}`);
    const facts = [
      ["Images", job.images.join(", ")],
      ["Wave", job.wave ? waveOf(job.wave) : null],
      ["Round", job.round ? `${job.round + 1}` : null],
      ["Bytes", job.bytes.done ? `${bytes(job.bytes.done)}${job.bytesPerSecond ? `, ${bytes(job.bytesPerSecond)}/s` : ""}` : null],
      ["Time left", job.secondsLeft == null ? null : seconds(job.secondsLeft)],
      ["Began", job.began ? time(job.began) : null],
      ["Ended", job.endedAt ? time(job.endedAt) : null],
    ].filter(([, value]) => value);
    this.facts.replaceChildren(...facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
    VERBS.forEach((verb, at) => {
      this.buttons[at].hidden = !(this.mayChange && verb.fits(job));
    });
    drawChart(this.svg, this.nodes.values(), job.nodes.desired ?? 0, job.began, marksOf(this.events, this.ledSince), job.endedAt ?? new Date().toISOString());
  }

  showReasons() {
    const reasons = new Map();
    for (const node of this.nodes.values()) {
      if (node.phase !== "Failure" && node.phase !== "Unknown") continue;
      const code = node.code ?? "";
      const found = reasons.get(code) ?? { count: 0, example: node };
      found.count += 1;
      reasons.set(code, found);
    }
    this.reasonsCard.hidden = reasons.size === 0;
    const sorted = [...reasons].sort(([, a], [, b]) => b.count - a.count);
    const signature = JSON.stringify([sorted.map(([code, { count }]) => [code, count]), this.filter.code]);
    if (signature === this.reasonsShown) return;
    this.reasonsShown = signature;
    this.reasons.replaceChildren(
      ...sorted.map(([code, { count, example }]) =>
        make(
          "li",
          {},
          make(
            "button",
            { type: "button", "aria-pressed": String(this.filter.code === code), onclick: () => this.setFilter({ code: this.filter.code === code ? null : code }) },
            make("b", {}, `${number(count)} × ${code || "Other"}`),
            make("div", { class: "dim" }, `${example.name}: ${example.reason || "no reason is known"}`),
          ),
        ),
      ),
    );
  }

  showTable() {
    this.shown ??= [];
    const rows = this.pager.part(this.shown, "Node").map((node) => this.nodes.get(node.name) ?? node);
    this.phases.forEach((button, at) => button.setAttribute("aria-pressed", String(this.filter.phase === PHASES[at])));
    // A row that has the focus keeps it.
    const focused = this.rows.contains(document.activeElement) ? document.activeElement.textContent : null;
    this.rows.replaceChildren(
      ...rows.map((node) =>
        make(
          "tr",
          {},
          make("th", { scope: "row" }, make("button", { type: "button", onclick: () => this.choose(node.name) }, node.name)),
          make("td", { class: "phase" }, make("span", { class: `key ${node.phase}` }), PHASE_NAMES[node.phase]),
          make("td", { class: "number" }, node.total ? `${bytes(node.done)} of ${bytes(node.total)}` : "–"),
          make("td", { class: "number" }, String(node.attempt ?? 0)),
          make("td", { class: "time" }, node.ended ? new Date(node.ended).toLocaleTimeString() : "–"),
          make("td", {}, node.reason ?? ""),
        ),
      ),
    );
    if (focused) [...this.rows.querySelectorAll("button")].find((button) => button.textContent === focused)?.focus();
  }

  async choose(name) {
    this.chosen = name;
    this.detail.hidden = false;
    this.detail.replaceChildren(make("h3", {}, name), make("p", { class: "dim" }, "…"));
    this.detail.focus({ preventScroll: false });
    try {
      const detail = await ask(`node/${path(this.name, name)}`);
      if (this.chosen === name) this.showDetail(name, detail);
    } catch (error) {
      this.complain(error);
    }
  }

  showDetail(name, record) {
    this.marks = make("p");
    const close = make("button", { type: "button", onclick: () => this.unchoose() }, "Close");
    this.detail.replaceChildren(...detailOf({ job: this.name, name, record, events: this.events }, this.marks, close));
    this.showMarks();
  }

  showMarks() {
    const node = this.nodes.get(this.chosen);
    if (node && this.marks) write(this.marks, `${PHASE_NAMES[node.phase]}${node.reason ? `: ${node.reason}` : ""}`);
  }

  unchoose() {
    this.chosen = null;
    this.detail.hidden = true;
    this.grid.canvas.focus();
  }

  async act(verb) {
    if (verb.sure && !confirm(verb.sure)) return;
    for (const button of this.buttons) button.disabled = true;
    try {
      await act(`act/${path(this.name)}/${verb.verb}`);
    } catch (error) {
      this.complain(error);
    }
    for (const button of this.buttons) button.disabled = false;
  }
}

function waveOf({ number: at, of, nodes, pausedSeconds }) {
  const pause = pausedSeconds ? `; the next one begins in ${seconds(pausedSeconds)}` : "";
  return `${at} of ${of}, up to ${number(nodes)} nodes${pause}`;
}

const collator = new Intl.Collator("en", { numeric: true });
const compare = (a, b) => collator.compare(a, b);
