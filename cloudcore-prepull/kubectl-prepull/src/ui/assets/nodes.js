// The nodes of a job: as squares by group and as a table, both with those that have failed first.

import { PHASES, PHASE_NAMES, PHONE, Pager, bytes, fill, keyOf, make, number, row, table, write } from "./dom.js";
import { Grid } from "./grid.js";
import { ask } from "./live.js";

const COLUMNS = ["Node", "State", "Site", ["Bytes"], ["Attempt"], "Ended", "Reason"];
/** Groups with a heading of their own: those with the most failures. The others are drawn together. */
const apartAtMost = () => (PHONE.matches ? 4 : 8);
/** In the address: no groups. It's no label. */
const NONE = "-";
/** Time between two sorts of the nodes while they change. */
const SORT = 1000;
/** The order of the table. */
const RANK = { Failure: 0, Unknown: 1, InProgress: 2, Pending: 3, Successful: 4 };

export class Nodes {
  /** `choose` hears of the node that was clicked, `changed` of other filters, `complain` of what can't be read. */
  constructor({ asked, choose, changed, complain }) {
    Object.assign(this, { choose, changed, complain });
    this.all = new Map();
    this.filter = { text: asked.q ?? "", phase: PHASES.includes(asked.phase) ? asked.phase : "", code: asked.code ?? "" };
    this.pager = new Pager(() => this.setFilter({}, false), asked.from, 5);
    this.grouped = asked.group === NONE ? "" : (asked.group ?? "site");
    this.values = new Map();
    this.isAll = false;
    this.shown = [];
    this.grid = new Grid((name) => choose(name));
    this.build();
    if (this.grouped && this.grouped !== "site") this.groupBy(this.grouped);
  }

  build() {
    const isLabel = this.grouped && this.grouped !== "site";
    this.label = make("input", { type: "text", size: "20", placeholder: "a label of nodes", "aria-label": "Label to group by", hidden: !isLabel, value: isLabel ? this.grouped : null });
    this.label.addEventListener("change", () => this.groupBy(this.label.value.trim()));
    this.select = make(
      "select",
      {
        id: "group",
        onchange: () => {
          this.label.hidden = this.select.value !== "label";
          if (this.select.value === "label") this.label.focus();
          else this.groupBy(this.select.value);
        },
      },
      [["site", "by site"], ["", "not at all"], ["label", "by another label"]].map(([value, text]) => make("option", { value }, text)),
    );
    this.select.value = isLabel ? "label" : this.grouped;
    this.ungrouped = make("p", { class: "dim", hidden: true });
    this.more = make("button", {
      type: "button",
      hidden: true,
      onclick: () => {
        this.isAll = !this.isAll;
        this.arrange();
      },
    });
    this.search = make("input", {
      type: "search",
      placeholder: "node, site or reason",
      "aria-label": "Filter nodes",
      value: this.filter.text,
      oninput: () => this.setFilter({ text: this.search.value.trim() }),
    });
    this.phases = PHASES.map((phase) =>
      make("button", { type: "button", "aria-pressed": "false", onclick: () => this.setFilter({ phase: this.filter.phase === phase ? "" : phase }) }, keyOf(phase), PHASE_NAMES[phase]),
    );
    this.rows = make("tbody");
    this.squares = make(
      "section",
      { "aria-label": "Nodes" },
      make("div", { class: "tools" }, make("label", { for: "group" }, "Group nodes "), this.select, this.label),
      this.ungrouped,
      make("div", { class: "tools" }, this.search, this.phases),
      this.grid.element,
      this.more,
    );
    this.list = make("section", { "aria-label": "Nodes as a table" }, table(this.pager.caption, COLUMNS, this.rows), this.pager.element);
  }

  leave() {
    clearTimeout(this.sorting);
    this.grid.leave();
  }

  set(rows) {
    this.all = new Map(rows.map((node) => [node.name, node]));
    this.names = null;
    this.arrange();
  }

  change(rows) {
    if (this.isStale) this.all.clear();
    this.isStale = false;
    const { phase, code, text } = this.filter;
    let isOther = Boolean(phase || code || text);
    for (const node of rows) {
      const before = this.all.get(node.name);
      if (!before) this.names = null;
      isOther ||= before?.phase !== node.phase || before?.site !== node.site;
      this.all.set(node.name, node);
    }
    if (!this.names) this.arrange();
    else {
      this.grid.touch(rows.map((node) => node.name));
      if (isOther) this.sorting ??= setTimeout(() => this.arrange(), SORT);
    }
  }

  remove(names) {
    // With its job: what was known of them stays, until others come.
    this.isStale = names.length === this.all.size;
    if (this.isStale) return;
    for (const name of names) this.all.delete(name);
    this.names = null;
    this.arrange();
  }

  fits(node) {
    const { phase, code } = this.filter;
    const text = this.filter.text.toLowerCase();
    return (
      (!phase || node.phase === phase) &&
      (!code || (node.code ?? "Other") === code) &&
      (!text || [node.name, node.site, node.reason].some((value) => (value ?? "").toLowerCase().includes(text)))
    );
  }

  setFilter(change, restarts = true) {
    Object.assign(this.filter, change);
    if (restarts) this.pager.restart();
    this.arrange();
    this.show();
    this.changed();
  }

  /** The filters, as the address of the page has them. */
  address() {
    const { text, phase, code } = this.filter;
    return { q: text, phase, code, group: this.grouped === "site" ? "" : this.grouped || NONE, from: this.pager.first };
  }

  async groupBy(by) {
    this.grouped = by;
    this.values = new Map();
    if (by && by !== "site") {
      try {
        this.values = new Map(Object.entries(await ask(`groups?label=${encodeURIComponent(by)}`)));
      } catch (error) {
        this.complain(error);
      }
    }
    this.arrange();
    this.changed();
  }

  /** Sorts the nodes that fit, and puts them into groups. */
  arrange() {
    clearTimeout(this.sorting);
    this.sorting = undefined;
    this.names ??= [...this.all.keys()].sort(compare);
    const fitting = this.names.map((name) => this.all.get(name)).filter((node) => this.fits(node));
    // A sort keeps the order of equals, which is that of the names.
    this.shown = [...fitting].sort((a, b) => RANK[a.phase] - RANK[b.phase]).map(({ name }) => name);
    const groups = new Map();
    for (const node of fitting) {
      const group = this.grouped === "" ? null : ((this.grouped === "site" ? node.site : this.values.get(node.name)) ?? "without");
      if (!groups.has(group)) groups.set(group, { name: group, nodes: [], failed: 0 });
      groups.get(group).nodes.push(node.name);
      groups.get(group).failed += RANK[node.phase] < 2 ? 1 : 0;
    }
    const { drawn, rest } = headed([...groups.values()], this.isAll);
    this.more.hidden = !rest && !(this.isAll && groups.size > apartAtMost() + 1);
    write(this.more, this.isAll ? "Draw most groups together" : `Draw all ${number(groups.size)} groups apart`);
    const hidden = this.all.size - fitting.length;
    const label = `${number(fitting.length)} nodes as squares${hidden ? `, ${number(hidden)} others are filtered out` : ""}. Arrow keys move, Enter shows a node; the table below has the same.`;
    // What is where it was has been drawn.
    if (label === this.labelled && this.names === this.placed && isSame(drawn, this.drawn)) return;
    [this.labelled, this.placed, this.drawn] = [label, this.names, drawn];
    this.grid.set(this.all, drawn, label);
  }

  show() {
    const part = this.pager.part(this.shown, "Node").flatMap((name) => this.all.get(name) ?? []);
    if (this.all.size === 0) write(this.pager.caption, "Reading the reports of the nodes");
    this.phases.forEach((button, at) => button.setAttribute("aria-pressed", String(this.filter.phase === PHASES[at])));
    fill(this.rows, part.map((node) => this.row(node)));
  }

  row(node) {
    return row(COLUMNS, [
      make("button", { type: "button", onclick: () => this.choose(node.name, this.rows) }, node.name),
      [keyOf(node.phase), PHASE_NAMES[node.phase]],
      node.site,
      node.total ? `${bytes(node.done)} of ${bytes(node.total)}` : "",
      node.attempt ? String(node.attempt) : "",
      node.ended && new Date(node.ended).toLocaleTimeString(),
      node.reason,
    ]);
  }
}

/** The groups with their headings, the most failures first; unless `isAll`, of many the others are one group. Pure. */
export function headed(groups, isAll) {
  const sorted = groups.sort((a, b) => b.failed - a.failed || compare(a.name ?? "", b.name ?? ""));
  // One group of all is none.
  if (sorted.length <= 1) return { drawn: sorted.map(({ nodes }) => [null, nodes]), rest: 0 };
  const apart = isAll || sorted.length <= apartAtMost() + 1 ? sorted : sorted.slice(0, apartAtMost());
  const others = sorted.slice(apart.length);
  const drawn = apart.map((group) => [heading(group.name, group), group.nodes]);
  if (others.length) {
    const nodes = others.flatMap((group) => group.nodes);
    drawn.push([heading(`${number(others.length)} other groups`, { nodes, failed: others.reduce((sum, { failed }) => sum + failed, 0) }), nodes]);
  }
  return { drawn, rest: others.length };
}

/** Whether two lists of groups have the same headings, and the same nodes in the same order. Pure. */
function isSame(groups, others) {
  const areSame = (some, at) => some.length === others[at][1].length && some.every((node, place) => node === others[at][1][place]);
  return groups.length === others.length && groups.every(([name, nodes], at) => name === others[at][0] && areSame(nodes, at));
}

function heading(name, { nodes, failed }) {
  return `${name}: ${number(nodes.length)} ${nodes.length === 1 ? "node" : "nodes"}${failed ? `, ${number(failed)} failed` : ""}`;
}

const collator = new Intl.Collator("en", { numeric: true });
const compare = (a, b) => collator.compare(a, b);
