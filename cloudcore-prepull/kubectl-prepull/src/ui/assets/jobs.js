// All jobs, a row each.

import { Bar, ago, bytes, describe, make, seconds, table, time, write } from "./dom.js";

export class Jobs {
  constructor() {
    this.rows = new Map();
    this.body = make("tbody");
    const caption = make("caption", {}, "Jobs that pull images ahead, the newest first");
    this.table = table(caption, ["Job", "Phase", "Nodes", ["Rate"], ["Time left"], "Began"], this.body);
    this.empty = make("p", { class: "empty" }, "There is no job. Make one with ", make("code", {}, "kubectl prepull run IMAGE"), ".");
    this.element = make("section", { "aria-label": "Jobs" }, this.table, this.empty);
  }

  show(jobs) {
    const sorted = [...jobs.values()].sort((a, b) => (b.created ?? "").localeCompare(a.created ?? ""));
    const wanted = new Set(sorted.map((job) => job.job));
    for (const [key, row] of this.rows) {
      if (!wanted.has(key)) {
        row.element.remove();
        this.rows.delete(key);
      }
    }
    sorted.forEach((job, at) => {
      let row = this.rows.get(job.job);
      if (!row) this.rows.set(job.job, (row = new Row(job)));
      if (this.body.children[at] !== row.element) this.body.insertBefore(row.element, this.body.children[at] ?? null);
      row.show(job);
    });
    this.table.hidden = sorted.length === 0;
    this.empty.hidden = sorted.length !== 0;
  }
}

class Row {
  constructor(job) {
    this.bar = new Bar();
    this.counts = make("span", { class: "dim" });
    this.phase = make("td");
    this.rate = make("td", { class: "number" });
    this.left = make("td", { class: "number" });
    this.began = make("td");
    // Of OpenKruise's jobs the page knows no nodes: those are for the command line.
    const link = job.namespace
      ? make("span", { title: `kubectl prepull failures ${job.job}` }, job.job)
      : make("a", { href: `#/job/${encodeURIComponent(job.job)}` }, job.job);
    this.element = make(
      "tr",
      {},
      make("th", { scope: "row" }, link, make("div", { class: "dim" }, images(job))),
      this.phase,
      make("td", { class: "wide" }, this.bar.element, this.counts),
      this.rate,
      this.left,
      this.began,
    );
  }

  show(job) {
    write(this.phase, phaseOf(job));
    this.phase.title = job.reason ?? "";
    this.bar.show(job);
    write(this.counts, describe(job));
    write(this.rate, job.bytesPerSecond ? `${bytes(job.bytesPerSecond)}/s` : "–");
    write(this.left, job.secondsLeft == null ? "–" : seconds(job.secondsLeft));
    write(this.began, job.began ? ago(job.began) : "–");
    this.began.title = time(job.began);
  }
}

export function phaseOf(job) {
  return job.suspended && !job.isOver ? "Suspended" : job.phase;
}

function images({ images }) {
  return images.length > 2 ? `${images.slice(0, 2).join(", ")} and ${images.length - 2} more` : images.join(", ");
}
