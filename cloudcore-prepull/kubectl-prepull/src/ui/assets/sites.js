// The sites that share layers: what their uplinks carry now, and for whom.

import { Pager, ago, bytes, make, number, table, write } from "./dom.js";
import { ask } from "./live.js";

const INTERVAL = 2000;

export class Sites {
  /** `name`: the site to show with its downloads, if one is. */
  constructor(name) {
    this.name = name;
    this.pager = new Pager(() => this.show());
    this.rows = make("tbody");
    this.downloads = make("tbody");
    this.caption = make("caption");
    this.text = make("p", { class: "empty", role: "status" }, "asking the leader");
    const heads = ["Site", ["Uplink now"], ["Carriers"], ["Waiting"], ["From neighbours"], ["Faults"]];
    this.table = make("div", { class: "scroll", hidden: true }, table(this.pager.caption, heads, this.rows));
    const columns = ["Box", "Layer", ["Done"], ["Rate"], "Since", "Why"];
    this.carriers = make("div", { class: "scroll", hidden: true }, table(this.caption, columns, this.downloads));
    const back = name && make("p", { class: "top" }, make("a", { href: "#/sites" }, "All sites"), make("h2", {}, name));
    this.element = make("section", { "aria-label": "Sites" }, back, this.text, this.table, this.pager.element, this.carriers);
    this.pager.element.hidden = true;
    this.refresh();
  }

  async refresh() {
    try {
      this.list = await ask(this.name ? `sites?site=${encodeURIComponent(this.name)}` : "sites");
      this.heard = new Date();
      this.show();
    } catch (error) {
      const old = this.heard ? `. Below is the answer of ${this.heard.toLocaleTimeString()}` : "";
      write(this.text, `The sites can't be shown: ${error.message}${old}`);
      this.text.hidden = false;
    }
    if (!this.left) this.timer = setTimeout(() => this.refresh(), INTERVAL);
  }

  leave() {
    this.left = true;
    clearTimeout(this.timer);
  }

  show() {
    const { items, siteLabel, knownSince } = this.list;
    const none = this.name ? "This site shares no layers now" : "No site shares layers now";
    write(this.text, `${none}. The site of a Node is its label ${siteLabel}; the leader counts since ${ago(knownSince)}.`);
    this.text.hidden = items.length > 0;
    this.table.hidden = items.length === 0;
    this.rows.replaceChildren(...this.pager.part(items, "Site").map((site) => this.row(site)));
    const site = this.name ? items[0] : null;
    this.carriers.hidden = !site;
    if (!site) return;
    const { downloads = [] } = site;
    write(this.caption, downloads.length ? "Downloads over its uplink now" : "Nothing is downloaded over its uplink now");
    this.downloads.replaceChildren(...downloads.map(carrier));
  }

  row(site) {
    const faults = [
      [site.leasesLost, "lost"],
      [site.claimsRefused, "out of turn"],
      [site.holdersDelisted, "delisted"],
    ];
    const shown = faults.filter(([count]) => count).map(([count, text]) => `${number(count)} ${text}`);
    const name = this.name ? site.name : make("a", { href: `#/sites/${encodeURIComponent(site.name)}` }, site.name);
    return make(
      "tr",
      {},
      make("th", { scope: "row" }, name),
      make("td", { class: "number" }, `${bytes(site.uplinkBytesPerSecond)}/s`),
      make("td", { class: "number" }, number(site.carriers)),
      make("td", { class: "number" }, `${number(site.waiting)} of ${number(site.nodes)}`),
      make("td", { class: "number" }, bytes(site.bytesShared)),
      make("td", { class: "number" }, shown.join(", ") || "–"),
    );
  }
}

function carrier(download) {
  return make(
    "tr",
    {},
    make("th", { scope: "row" }, download.node),
    make("td", { class: "mono time" }, download.digest.replace("sha256:", "").slice(0, 12)),
    make("td", { class: "number" }, `${bytes(download.done)} of ${bytes(download.size)}`),
    make("td", { class: "number" }, `${bytes(download.bytesPerSecond)}/s`),
    make("td", { class: "time" }, ago(download.since)),
    make("td", { class: "wide" }, download.alone ? `alone: ${download.alone}` : "for its site"),
  );
}
