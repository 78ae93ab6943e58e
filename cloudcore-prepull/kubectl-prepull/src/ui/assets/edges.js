// The edges: who is there, with which version, and whose certificate or disk needs somebody.

import { Pager, ago, bytes, make, number, seconds, table } from "./dom.js";
import { ask } from "./live.js";

const INTERVAL = 5000;
/** A certificate that ends within so many days is named: it should have been renewed at two thirds of its life. */
const SOON_DAYS = 7;
/** Part of a disk beyond which it is nearly full: the kubelet begins to remove images there. */
const FULL = 0.85;

export class Edges {
  constructor(complain) {
    this.complain = complain;
    this.text = "";
    this.only = null;
    this.pager = new Pager(() => this.show());
    this.figures = make("div", { class: "figures" });
    this.versions = make("tbody");
    this.sites = make("tbody");
    this.rows = make("tbody");
    this.search = make("input", {
      type: "search",
      placeholder: "edge, site or version",
      "aria-label": "Filter edges",
      oninput: () => {
        this.text = this.search.value.trim().toLowerCase();
        this.pager.restart();
        this.show();
      },
    });
    this.element = make(
      "div",
      {},
      make("section", { "aria-label": "Figures" }, this.figures),
      make(
        "div",
        { class: "columns" },
        make(
          "section",
          { "aria-label": "All edges" },
          make("div", { class: "tools" }, this.search),
          table(this.pager.caption, ["Edge", "Site", "Connected", "Version", "Runtime", ["Disk"], "Certificate"], this.rows),
          this.pager.element,
        ),
        make(
          "div",
          { class: "side" },
          make("section", {}, table(make("caption", {}, "By version"), ["Version", ["Edges"]], this.versions)),
          make("section", {}, table(make("caption", {}, "By site"), ["Site", ["Connected"]], this.sites)),
        ),
      ),
    );
    this.edges = [];
    this.refresh();
  }

  async refresh() {
    try {
      this.edges = (await ask("edges")).edges;
      this.show();
    } catch (error) {
      this.complain(error);
    }
    if (!this.left) this.timer = setTimeout(() => this.refresh(), INTERVAL);
  }

  leave() {
    this.left = true;
    clearTimeout(this.timer);
  }

  show() {
    const { edges } = this;
    const groups = {
      connected: ["connected", (edge) => edge.connected],
      away: ["not connected", (edge) => !edge.connected],
      ending: [`certificate ends within ${SOON_DAYS} days`, (edge) => endsSoon(edge)],
      full: ["disk nearly full", (edge) => isFull(edge)],
    };
    this.figures.replaceChildren(
      ...Object.entries(groups).map(([key, [text, fits]]) =>
        make(
          "div",
          {},
          make("b", {}, number(edges.filter(fits).length)),
          make(
            "button",
            {
              type: "button",
              "aria-pressed": String(this.only === key),
              onclick: () => {
                this.only = this.only === key ? null : key;
                this.pager.restart();
                this.show();
              },
            },
            text,
          ),
        ),
      ),
    );
    this.tally(this.versions, (edge) => (edge.connected ? (edge.version ?? "unknown") : null), false);
    this.tally(this.sites, (edge) => edge.site ?? "without", true);
    const fits = (edge) =>
      (!this.only || groups[this.only][1](edge)) && (!this.text || [edge.name, edge.site, edge.version, edge.runtime].some((value) => (value ?? "").toLowerCase().includes(this.text)));
    const part = this.pager.part(edges.filter(fits), "Edge");
    this.rows.replaceChildren(
      ...part.map((edge) =>
        make(
          "tr",
          {},
          make("th", { scope: "row" }, edge.name),
          make("td", {}, edge.site ?? "–"),
          make("td", {}, edge.connected ? `for ${seconds((Date.now() - Date.parse(edge.connectedSince)) / 1000)}` : edge.lastSeen ? `no, seen ${ago(edge.lastSeen)}` : "no"),
          make("td", {}, edge.version ?? "–"),
          make("td", {}, [edge.runtime, edge.arch].filter(Boolean).join(", ") || "–"),
          make("td", { class: "number" }, edge.disk ? `${bytes(edge.disk.available)} of ${bytes(edge.disk.capacity)} free` : "–"),
          make("td", {}, edge.certificateUntil ? `until ${new Date(edge.certificateUntil).toLocaleDateString()}` : "–"),
        ),
      ),
    );
  }

  tally(body, name, withConnected) {
    const counts = new Map();
    for (const edge of this.edges) {
      const key = name(edge);
      if (key === null) continue;
      const count = counts.get(key) ?? { all: 0, connected: 0 };
      count.all += 1;
      count.connected += edge.connected ? 1 : 0;
      counts.set(key, count);
    }
    const sorted = [...counts].sort(([, a], [, b]) => b.all - a.all).slice(0, 30);
    body.replaceChildren(
      ...sorted.map(([key, { all, connected }]) => make("tr", {}, make("th", { scope: "row" }, key), make("td", { class: "number" }, withConnected ? `${number(connected)} of ${number(all)}` : number(all)))),
    );
  }
}

function endsSoon(edge) {
  return edge.certificateUntil && Date.parse(edge.certificateUntil) - Date.now() < SOON_DAYS * 86400000;
}

function isFull(edge) {
  return edge.disk && edge.disk.available / edge.disk.capacity < 1 - FULL;
}
