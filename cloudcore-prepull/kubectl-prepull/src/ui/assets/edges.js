// The edges: those that need a person first, with versions, sites, certificates and disks.

import { Pager, ago, badge, bytes, figures, fill, make, number, row, seconds, table, write } from "./dom.js";
import { ask } from "./live.js";
import { keep, linkTo } from "./place.js";

const INTERVAL = 5000;
/** A certificate that ends within so many days is named: it should have been renewed at two thirds of its life. */
const SOON_DAYS = 7;
/** Part of a disk beyond which it is nearly full: the kubelet begins to remove images there. */
const FULL = 0.85;
/** Rows of the sums by version and by site: the largest ones. */
const SUMS = 8;
const COLUMNS = ["Edge", "Site", "Connected", "Version", "Runtime", "Disk", "Certificate"];
const GROUPS = {
  connected: ["connected", (edge) => edge.connected],
  away: ["not connected", (edge) => !edge.connected],
  revoked: ["revoked", (edge) => edge.revoked],
  ending: [`certificate ends within ${SOON_DAYS} days`, endsSoon],
  full: ["disk nearly full", isFull],
};

export class Edges {
  constructor(asked) {
    this.only = asked.only in GROUPS ? asked.only : "";
    this.pager = new Pager(() => this.change(), asked.from);
    this.figures = make("div", { class: "figures" });
    this.versions = make("tbody");
    this.sites = make("tbody");
    this.rows = make("tbody");
    this.search = make("input", {
      type: "search",
      placeholder: "edge, site or version",
      "aria-label": "Filter edges",
      value: asked.q,
      oninput: () => {
        this.pager.restart();
        this.change();
      },
    });
    this.state = make("p", { class: "empty", role: "status" }, "Asking the leader for its edges.");
    const side = (name, columns, body) => make("section", {}, table(make("caption", {}, name), columns, body));
    this.lists = make(
      "div",
      { class: "columns", hidden: true },
      make(
        "section",
        { "aria-label": "Edges" },
        make("div", { class: "tools" }, this.search, this.figures),
        table(this.pager.caption, COLUMNS, this.rows),
        this.pager.element,
      ),
      make("div", { class: "side" }, side("By version", ["Version", ["Edges"]], this.versions), side("By site", ["Site", ["Connected"]], this.sites)),
    );
    this.element = make("div", {}, this.state, this.lists);
    this.edges = [];
    this.refresh();
  }

  async refresh() {
    try {
      this.edges = (await ask("edges")).edges;
      this.heard = new Date();
      this.state.hidden = this.edges.length > 0;
      write(this.state, "There is no edge. An edge is a Node with the label node-role.kubernetes.io/edge.");
      this.show();
    } catch (error) {
      write(this.state, `The edges can't be shown: ${error.message}${this.heard ? `. Below is the answer of ${this.heard.toLocaleTimeString()}` : ""}`);
      this.state.hidden = false;
    }
    if (!this.left) this.timer = setTimeout(() => this.refresh(), INTERVAL);
  }

  leave() {
    this.left = true;
    clearTimeout(this.timer);
  }

  turn() {
    this.change();
  }

  change() {
    this.show();
    keep({ q: this.search.value.trim(), only: this.only, from: this.pager.first });
  }

  show() {
    const { edges } = this;
    const text = this.search.value.trim().toLowerCase();
    this.lists.hidden = edges.length === 0;
    const groups = Object.entries(GROUPS).map(([key, [name, has]]) => [key, name, edges.filter(has).length]);
    figures(this.figures, groups, this.only, (only) => {
      this.only = only;
      this.pager.restart();
      this.change();
    });
    tally(this.versions, ["Version", ["Edges"]], edges, (edge) => (edge.connected ? (edge.version ?? "unknown") : null), ({ all }) => number(all));
    const ofSite = (site) => (site === "without" ? site : make("a", { href: linkTo("sites", site) }, site));
    tally(this.sites, ["Site", ["Connected"]], edges, (edge) => edge.site ?? "without", ({ all, connected }) => `${number(connected)} of ${number(all)}`, ofSite);
    const fits = (edge) =>
      (!this.only || GROUPS[this.only][1](edge)) && (!text || [edge.name, edge.site, edge.version, edge.runtime].some((value) => (value ?? "").toLowerCase().includes(text)));
    // The list is by name already, and a sort keeps the order of equals.
    const part = this.pager.part(edges.filter(fits).sort((a, b) => need(b) - need(a)), "Edge");
    fill(this.rows, part.map(rowOf));
  }
}

/** Facts of an edge in words, with a mark where a person is needed. */
export function factsOf(edge) {
  const connected = edge.connected
    ? `for ${seconds((Date.now() - Date.parse(edge.connectedSince)) / 1000)}`
    : edge.lastSeen
      ? `no, seen ${ago(edge.lastSeen)}`
      : "no";
  const until = edge.certificateUntil && new Date(edge.certificateUntil);
  const used = edge.disk && Math.round(100 * (1 - edge.disk.available / edge.disk.capacity));
  return {
    connected: edge.revoked ? [badge("revoked, kept out"), ` ${connected}`] : connected,
    disk: edge.disk && [isFull(edge) && badge(`${used} % full`), ` ${bytes(edge.disk.available)} of ${bytes(edge.disk.capacity)} free`],
    certificate: until && [endsSoon(edge) && badge(until < new Date() ? "ended" : "ends soon"), ` until ${until.toLocaleDateString()}`],
    runtime: [edge.runtime, edge.arch].filter(Boolean).join(", "),
  };
}

function rowOf(edge) {
  const { connected, disk, certificate, runtime } = factsOf(edge);
  const name = make("a", { class: "name", href: linkTo("edges", edge.name) }, edge.name);
  const site = edge.site && make("a", { href: linkTo("sites", edge.site) }, edge.site);
  return row(COLUMNS, [name, site, connected, edge.version, runtime, disk, certificate], { class: edge.revoked ? "revoked" : null });
}

function tally(body, columns, edges, nameOf, text, show = (name) => name) {
  const counts = new Map();
  for (const edge of edges) {
    const key = nameOf(edge);
    if (key === null) continue;
    const count = counts.get(key) ?? { all: 0, connected: 0 };
    count.all += 1;
    count.connected += edge.connected ? 1 : 0;
    counts.set(key, count);
  }
  const sorted = [...counts].sort(([, a], [, b]) => b.all - a.all);
  const rows = sorted.slice(0, SUMS).map(([key, count]) => row(columns, [show(key), text(count)]));
  const more = sorted.length - SUMS;
  if (more > 0) rows.push(row(columns, [`${number(more)} others`, number(sorted.slice(SUMS).reduce((sum, [, { all }]) => sum + all, 0))]));
  fill(body, rows);
}

/** The order of the list: what a person has to look at, then what is away. */
function need(edge) {
  return edge.revoked || endsSoon(edge) || isFull(edge) ? 2 : edge.connected ? 0 : 1;
}

function endsSoon(edge) {
  return Boolean(edge.certificateUntil) && Date.parse(edge.certificateUntil) - Date.now() < SOON_DAYS * 86400000;
}

function isFull(edge) {
  return Boolean(edge.disk) && edge.disk.available / edge.disk.capacity < 1 - FULL;
}
