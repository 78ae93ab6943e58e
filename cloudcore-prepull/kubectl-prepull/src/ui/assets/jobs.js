// All jobs, a row each: those at work first, and of these the ones with failures.

import { Bar, Pager, ago, bytes, describe, figures, make, number, row, seconds, table, write } from "./dom.js";
import { keep, linkTo } from "./place.js";

const COLUMNS = ["Job", "State", "Nodes", ["Rate"], ["Time left"], "Began"];
/** Longest part of a reason in a row, in characters. The page of the job has all of it. */
const REASON = 160;
const GROUPS = {
  work: ["at work", (job) => rank(job) < 2],
  suspended: ["suspended", (job) => rank(job) === 2],
  failed: ["failed or refused", (job) => job.isOver && job.phase === "Failure"],
  completed: ["completed", (job) => job.isOver && job.phase === "Completed"],
};

export class Jobs {
  constructor(asked, known) {
    this.known = known;
    this.rows = new Map();
    this.only = asked.only in GROUPS ? asked.only : "";
    this.pager = new Pager(() => this.change(), asked.from);
    this.body = make("tbody");
    this.figures = make("div", { class: "figures" });
    this.search = make("input", {
      type: "search",
      placeholder: "job, image or reason",
      "aria-label": "Filter jobs",
      value: asked.q,
      oninput: () => {
        this.pager.restart();
        this.change();
      },
    });
    this.table = table(this.pager.caption, COLUMNS, this.body);
    this.table.classList.add("jobs");
    this.empty = make("p", { class: "empty", role: "status" });
    this.tools = make("div", { class: "tools" }, this.search, this.figures);
    this.element = make("section", { "aria-label": "Jobs" }, this.tools, this.table, this.pager.element, this.empty);
  }

  /** Shows other jobs, and has them in the address. */
  change() {
    this.later();
    keep({ q: this.search.value.trim(), only: this.only, from: this.pager.first });
  }

  turn() {
    this.change();
  }

  later() {
    const all = [...this.known.jobs.values()];
    const text = this.search.value.trim().toLowerCase();
    const fits = (job) => (!this.only || GROUPS[this.only][1](job)) && (!text || textOf(job).includes(text));
    const shown = all.filter(fits).sort((a, b) => rank(a) - rank(b) || (b.created ?? "").localeCompare(a.created ?? ""));
    const groups = Object.entries(GROUPS).map(([key, [name, has]]) => [key, name, all.filter(has).length]);
    figures(this.figures, groups, this.only, (only) => {
      this.only = only;
      this.pager.restart();
      this.change();
    });
    const part = this.pager.part(shown, "Job");
    for (const [key, { element }] of this.rows) {
      if (part.some((job) => job.job === key)) continue;
      element.remove();
      this.rows.delete(key);
    }
    part.forEach((job, at) => {
      let row = this.rows.get(job.job);
      if (!row) this.rows.set(job.job, (row = new Row(job)));
      // Moved only if it has to be: an element that moves loses the focus.
      if (this.body.children[at] !== row.element) this.body.insertBefore(row.element, this.body.children[at] ?? null);
      row.show(job);
    });
    this.table.hidden = part.length === 0;
    this.tools.hidden = all.length === 0;
    this.empty.hidden = part.length !== 0;
    this.empty.replaceChildren(...(part.length ? [] : this.nothing(all.length)));
  }

  nothing(all) {
    if (!this.known.isListed) return ["Waiting for the list of jobs."];
    if (all === 0) return ["There is no job. Make one with ", make("code", {}, "kubectl prepull run IMAGE"), "."];
    return ["No job fits the filter. ", make("a", { href: "#/" }, `Show all ${number(all)}`), "."];
  }
}

class Row {
  constructor(job) {
    this.bar = new Bar();
    this.counts = make("span", { class: "dim" });
    this.state = make("span", { class: "state" });
    this.reason = make("div", { class: "dim" });
    const [rate, left, began] = [make("span"), make("span"), make("span")];
    Object.assign(this, { rate, left, began });
    // Of OpenKruise's jobs the page knows no nodes: those are for the command line.
    const name = job.namespace
      ? [make("b", {}, job.job), make("div", { class: "dim" }, "nodes: ", make("code", {}, `kubectl prepull failures ${job.job}`))]
      : [make("a", { class: "name", href: linkTo("job", job.job) }, job.job)];
    name.push(make("div", { class: "dim" }, images(job)));
    this.element = row(COLUMNS, [name, [this.state, this.reason], [this.bar.element, this.counts], rate, left, began]);
  }

  show(job) {
    write(this.state, job.state);
    this.state.classList.toggle("bad", job.phase === "Failure");
    write(this.reason, shorten(job.reason ?? ""));
    this.bar.show(job);
    write(this.counts, describe(job));
    write(this.rate, job.bytesPerSecond ? `${bytes(job.bytesPerSecond)}/s` : "–");
    write(this.left, job.secondsLeft == null ? "–" : seconds(job.secondsLeft));
    write(this.began, job.began ? ago(job.began) : "–");
    for (const cell of [this.rate, this.left, this.began]) cell.parentElement.classList.toggle("none", cell.textContent === "–");
  }
}

/** The place of a job in the list: at work with failures, at work, suspended, over. */
function rank(job) {
  if (job.isOver) return 3;
  if (job.suspended) return 2;
  return job.nodes.failure || job.nodes.unknown ? 0 : 1;
}

function textOf(job) {
  return [job.job, job.state, job.reason, ...job.images].join("\n").toLowerCase();
}

function shorten(text) {
  return text.length > REASON ? `${text.slice(0, REASON)}…` : text;
}

function images({ images }) {
  return images.length > 2 ? `${images.slice(0, 2).join(", ")} and ${images.length - 2} more` : images.join(", ");
}
