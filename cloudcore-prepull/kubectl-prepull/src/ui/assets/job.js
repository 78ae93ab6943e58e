// One job: how it stands, its nodes, why some failed, and what may be done.

import { draw as drawChart, list as listMarks, marksOf } from "./chart.js";
import { detailOf } from "./detail.js";
import { Bar, PHASE_NAMES, bytes, describe, fill, make, number, seconds, time, write } from "./dom.js";
import { act, ask, path } from "./live.js";
import { Nodes } from "./nodes.js";
import { keep, linkTo } from "./place.js";

/** Time between two looks at the events of the job. */
const INTERVAL = 5000;
/** Time between two requests for the chosen node, while it changes. */
const AGAIN = 2000;
/** What is changed together is drawn together. */
const QUIET = 200;

const VERBS = [
  { verb: "suspend", text: "Suspend", fits: (job) => !job.isOver && !job.suspended && !job.cancelled },
  { verb: "pause", text: "Pause downloads", fits: (job) => !job.isOver && !job.paused && !job.cancelled },
  { verb: "resume", text: "Resume", fits: (job) => !job.isOver && job.suspended && !job.cancelled },
  { verb: "retry", text: "Retry", fits: (job) => job.isOver && job.state !== "Refused" && !job.cancelled && job.nodes.successful < job.nodes.desired },
  {
    verb: "cancel",
    text: "Cancel",
    danger: true,
    fits: (job) => !job.isOver && !job.cancelled,
    sure: "End this job now, and for good? Nodes that are pulling stop, and no further one starts. What is there stays.",
  },
];

export class Job {
  /** `listen` opens the stream of the job. */
  constructor({ name, asked, known, listen, complain }) {
    Object.assign(this, { name, known, complain });
    this.events = [];
    const choose = (node, rows) => this.choose(node, rows);
    this.nodes = new Nodes({ asked, choose, changed: () => this.changed(), complain });
    this.build();
    listen(`live/${path(name)}`, {
      nodes: (rows) => this.take(() => this.nodes.set(rows)),
      changed: (rows) => this.take(() => this.nodes.change(rows)),
      left: (names) => this.take(() => this.nodes.remove(names)),
    });
    ask("may").then(
      ({ change }) => {
        this.mayChange = change;
        this.show();
      },
      () => {
        // The head of the page shows that the cluster doesn't answer.
      },
    );
    this.readEvents();
    this.show();
    if (asked.node) this.choose(asked.node);
  }

  build() {
    this.phase = make("b", { class: "state" });
    this.buttons = VERBS.map((verb) =>
      make("button", { type: "button", class: verb.danger ? "danger" : "", hidden: true, onclick: () => this.act(verb) }, verb.text),
    );
    this.standing = make("div", { class: "standing", role: "status" });
    this.bar = new Bar();
    this.said = make("p", { class: "dim" });
    this.facts = make("dl");
    this.svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    this.svg.setAttribute("class", "chart");
    this.svg.setAttribute("role", "img");
    this.svg.setAttribute("preserveAspectRatio", "xMinYMid");
    this.marked = make("ul", { class: "marks" });
    this.chart = make("section", { "aria-label": "Completion" }, make("h3", {}, "Nodes that have ended"), this.svg, this.marked);
    this.reasons = make("ul", { class: "reasons" });
    this.reasonsCard = make("section", { "aria-labelledby": "reasons-title" }, make("h3", { id: "reasons-title" }, "Failures by reason"), this.reasons);
    this.detail = make("section", { "aria-label": "Node", tabindex: "-1", hidden: true });
    this.marks = make("p");
    this.escape = (event) => {
      if (event.key === "Escape" && this.chosen) this.unchoose();
    };
    document.addEventListener("keydown", this.escape);
    this.progress = make("div", {}, this.bar.element, this.said, this.facts);
    const side = make("div", { class: "side" }, this.detail, this.reasonsCard, this.chart);
    this.parts = make("div", {}, make("div", { class: "columns side-first" }, side, this.nodes.squares), this.nodes.list);
    this.element = make(
      "div",
      {},
      make(
        "section",
        { "aria-label": "Job" },
        make("div", { class: "top" }, make("h2", {}, this.name), this.phase, make("div", { class: "buttons" }, this.buttons)),
        this.standing,
        this.progress,
      ),
      this.parts,
    );
  }

  async readEvents() {
    try {
      this.ledSince = (await ask("leader")).since;
      // A deleted one has none any more.
      if (this.known.jobs.has(this.name)) {
        this.events = await ask(`events/${path(this.name)}`);
        this.showDetail();
        if (this.isOutdated) this.readDetailSoon();
      }
      this.later();
    } catch (error) {
      // Without the right to read events everything else works.
      this.events = [];
    }
    if (!this.left) this.reading = setTimeout(() => this.readEvents(), INTERVAL);
  }

  leave() {
    this.left = true;
    document.removeEventListener("keydown", this.escape);
    this.nodes.leave();
    clearTimeout(this.reading);
    clearTimeout(this.asking);
    clearTimeout(this.timer);
  }

  turn() {
    this.nodes.setFilter({}, false);
  }

  take(rows) {
    const before = this.nodes.all.get(this.chosen);
    rows();
    const now = this.nodes.all.get(this.chosen);
    if (before && now && now !== before) this.readDetailSoon();
    this.later();
  }

  /** Everything but the grid is drawn a moment later, once for all that arrives until then. */
  later() {
    this.timer ??= setTimeout(() => {
      this.timer = undefined;
      this.show();
    }, QUIET);
  }

  /** Puts the filters and the chosen node into the address. */
  changed() {
    if (this.left) return;
    this.showReasons();
    keep({ ...this.nodes.address(), node: this.chosen });
  }

  show() {
    if (this.left) return;
    const now = this.known.jobs.get(this.name);
    if (now) [this.job, this.gone] = [now, null];
    else if (this.job) this.gone ??= new Date();
    const { job } = this;
    const standing = standingOf(job, this.name, this.gone, this.known, this.mayChange);
    const shown = standing.filter(Boolean).map((parts) => make("p", {}, parts));
    fill(this.standing, shown);
    this.standing.classList.toggle("bad", job?.state === "Refused");
    const hasNodes = this.nodes.all.size > 0 || (job?.nodes.desired ?? 0) > 0;
    this.parts.hidden = !hasNodes;
    this.progress.hidden = !job;
    this.bar.element.hidden = !hasNodes;
    write(this.phase, this.gone ? "Deleted" : (job?.state ?? ""));
    this.phase.classList.toggle("bad", job?.phase === "Failure");
    if (job) this.showJob(job, hasNodes);
    if (!hasNodes) return;
    this.nodes.ungrouped.hidden = !this.known.state.withoutSites;
    write(this.nodes.ungrouped, `Sites and labels of nodes aren't known: ${this.known.state.withoutSites ?? ""}`);
    this.showReasons();
    this.nodes.show();
    if (this.chosen) this.showMarks();
  }

  showJob(job, hasNodes) {
    this.bar.show(job);
    // Its standing has the reason, where no node began.
    write(this.said, hasNodes ? [describe(job), job.reason].filter(Boolean).join(". ") : "");
    const facts = [
      [job.removal ? "Removes" : "Images", job.images.join(", ")],
      [job.dryRun ? "Would free" : "Freed", job.removal ? freedBy(job.removal) : null],
      ["Kept", job.removal?.kept ? images(job.removal.kept) : null],
      ["Wave", job.wave ? waveOf(job.wave) : null],
      ["Round", job.round ? `${job.round + 1}` : null],
      ["Bytes", job.bytes.done ? `${bytes(job.bytes.done)}${job.bytesPerSecond ? `, ${bytes(job.bytesPerSecond)}/s` : ""}` : null],
      ["Deltas saved", job.deltaSavedBytes ? `${bytes(job.deltaSavedBytes)} of ${bytes(job.bytes.total)}` : null],
      ["Time left", job.secondsLeft == null ? null : seconds(job.secondsLeft)],
      ["Began", job.began ? time(job.began) : null],
      ["Ended", job.endedAt ? time(job.endedAt) : null],
      ["Skipped", alike(job.skipped)],
      ["Waiting", alike(job.waiting)],
    ].filter(([, value]) => value);
    fill(this.facts, facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
    VERBS.forEach((verb, at) => {
      this.buttons[at].hidden = !(this.mayChange && !this.gone && verb.fits(job));
    });
    const desired = job.nodes.desired ?? 0;
    this.chart.hidden = !job.began || this.nodes.all.size === 0;
    const marks = marksOf(this.events, this.ledSince);
    const ended = describe(job);
    this.svg.setAttribute("aria-label", `Nodes that have ended, over time: ${ended}`);
    drawChart(this.svg, this.nodes.all.values(), desired, job.began, marks, job.endedAt ?? new Date().toISOString());
    listMarks(this.marked, marks, job.began);
  }

  showReasons() {
    const reasons = new Map();
    for (const node of this.nodes.all.values()) {
      if (node.phase !== "Failure" && node.phase !== "Unknown") continue;
      const code = node.code ?? "Other";
      const found = reasons.get(code) ?? { count: 0, example: node };
      found.count += 1;
      reasons.set(code, found);
    }
    this.reasonsCard.hidden = reasons.size === 0;
    const sorted = [...reasons].sort(([, a], [, b]) => b.count - a.count);
    const chosen = this.nodes.filter.code;
    const signature = JSON.stringify([sorted.map(([code, { count }]) => [code, count]), chosen]);
    if (signature === this.reasonsShown) return;
    this.reasonsShown = signature;
    const button = (code, { count, example }) =>
      make(
        "button",
        { type: "button", "aria-pressed": String(chosen === code), onclick: () => this.nodes.setFilter({ code: chosen === code ? "" : code }) },
        make("b", {}, `${number(count)} × ${code}`),
        make("span", { class: "dim" }, `${example.name}: ${example.reason || "no reason is known"}`),
      );
    fill(this.reasons, sorted.map(([code, found]) => make("li", {}, button(code, found))));
  }

  /** Shows a node. `rows`: the table with the button for it, to which the focus returns. */
  choose(name, rows) {
    this.chosen = name;
    this.chosenIn = rows;
    this.changed();
    this.detail.hidden = false;
    [this.record, this.shownAt] = [null, 0];
    this.showMarks();
    this.fillDetail(make("p", { class: "dim" }, "Asking for its record."));
    this.detail.scrollIntoView({ block: "nearest" });
    this.detail.focus({ preventScroll: true });
    this.readDetail();
  }

  async readDetail() {
    const name = this.chosen;
    const at = performance.now();
    [this.askedAt, this.isOutdated] = [at, false];
    try {
      const record = await ask(`node/${path(this.name, name)}`);
      // An answer may have been overtaken by a later one.
      if (this.chosen !== name || at < this.shownAt) return;
      [this.record, this.shownAt] = [record, at];
      this.showDetail();
    } catch (error) {
      if (this.chosen !== name) return;
      // What is known of it stays, and the next look at the events asks again.
      this.isOutdated = Boolean(this.record);
      if (!this.record) this.fillDetail(make("p", {}, `It can't be shown: ${error.message}`));
    }
  }

  fillDetail(...content) {
    const close = make("button", { type: "button", onclick: () => this.unchoose() }, "Close");
    fill(this.detail, [make("div", { class: "top" }, make("h3", {}, this.chosen), make("div", { class: "buttons" }, close)), this.marks, ...content]);
  }

  /** The chosen node has changed: asks again, but not more often than every two seconds. */
  readDetailSoon() {
    this.asking ??= setTimeout(
      () => {
        this.asking = undefined;
        if (this.chosen && !this.left) this.readDetail();
      },
      Math.max(0, this.askedAt + AGAIN - performance.now()),
    );
  }

  showDetail() {
    const { chosen, record } = this;
    if (chosen && record) this.fillDetail(...detailOf({ job: this.name, name: chosen, record, events: this.events }));
  }

  showMarks() {
    const node = this.nodes.all.get(this.chosen);
    write(this.marks, node ? `${PHASE_NAMES[node.phase]}${node.reason ? `: ${node.reason}` : ""}` : "");
  }

  unchoose() {
    const button = [...(this.chosenIn?.querySelectorAll("button") ?? [])].find(({ textContent }) => textContent === this.chosen);
    this.chosen = null;
    this.detail.hidden = true;
    this.changed();
    (button ?? this.nodes.grid.canvas).focus();
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

/** How the job stands where its nodes don't show it: paragraphs, each of texts and elements. Pure but for elements. */
function standingOf(job, name, gone, known, mayChange) {
  if (!job && !known.isListed) return [["Waiting for the list of jobs."]];
  if (!job) {
    const jobs = make("a", { href: linkTo("", "", { q: name }) }, "Look for it among the jobs");
    return [[`There is no job ${name}. It may have another name, or was deleted: ttlSecondsAfterFinished deletes jobs some time after their end. `, jobs, "."]];
  }
  if (gone) return [[`This job was deleted at ${gone.toLocaleTimeString()}. Below is what was known of it then.`]];
  const readOnly = mayChange === false && !job.isOver && ["You can look at this job and not change it: that takes the right to patch imageprepulljobs. prepull-operator in manifests/kubectl-prepull/rbac.yaml has it."];
  if (job.state === "Refused") {
    const edit = make("code", {}, `kubectl edit imageprepulljob ${name}`);
    return [[job.reason], ["No node has begun. Correct the field and apply the job again, or ", edit, ": it begins once its spec is valid."]];
  }
  if (job.nodes.desired) return [readOnly];
  const resume = make("code", {}, `kubectl prepull resume ${name}`);
  if (job.isOver) return [[job.reason || "It has ended without a node."]];
  if (job.suspended) return [["Suspended before it began: no node is selected. ", resume, " lets it begin."], readOnly];
  return [[job.reason || "No node is selected yet. cloudcore-prepull selects them when it begins with the job."], readOnly];
}

function waveOf({ number: at, of, nodes, pausedSeconds }) {
  const pause = pausedSeconds ? `; the next one begins in ${seconds(pausedSeconds)}` : "";
  return `${at} of ${of}, up to ${number(nodes)} nodes${pause}`;
}

/** What a job has removed from its nodes. */
function freedBy({ removed, freedBytes, nodes }) {
  return removed ? `${bytes(freedBytes)} by ${images(removed)} on ${number(nodes)} ${nodes === 1 ? "node" : "nodes"}` : "nothing";
}

function images(count) {
  return `${number(count)} ${count === 1 ? "image" : "images"}`;
}

/** Nodes that wait or are skipped, by reason. */
function alike(groups) {
  return groups.map(({ reason, nodes, examples }) => `${number(nodes)} (${examples[0]}${nodes > 1 ? ", …" : ""}): ${reason}`).join("; ");
}
