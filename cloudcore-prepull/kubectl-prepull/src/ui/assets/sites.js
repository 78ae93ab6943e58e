// The sites that share layers: what their uplinks carry now, and for whom.

import { Pager, ago, bytes, fill, make, number, row, table, write } from "./dom.js";
import { ask } from "./live.js";
import { keep, linkTo } from "./place.js";

const INTERVAL = 2000;
const COLUMNS = ["Site", ["Uplink now"], ["Carriers"], ["Waiting"], ["From neighbours"], ["Faults"]];
const CARRIERS = ["Box", "Layer", ["Done"], ["Rate"], "Since", "Why"];

export class Sites {
  /** `name`: the site to show with its downloads, if one is. */
  constructor(name, asked) {
    this.name = name;
    this.pager = new Pager(() => this.change(), asked.from);
    this.rows = make("tbody");
    this.downloads = make("tbody");
    this.caption = make("caption");
    this.text = make("p", { class: "empty", role: "status" }, "Asking the leader for its sites.");
    this.table = make("div", { hidden: true }, table(this.pager.caption, COLUMNS, this.rows), this.pager.element);
    this.carriers = make("div", { class: "apart", hidden: true }, table(this.caption, CARRIERS, this.downloads));
    const head = name && [
      make("p", {}, make("a", { href: "#/sites" }, "All sites"), " ", make("a", { href: linkTo("edges", "", { q: name }) }, "Edges of this site")),
      make("h2", {}, name),
    ];
    this.element = make("section", { "aria-label": "Sites" }, head, this.text, this.table, this.carriers);
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

  turn() {
    if (this.list) this.change();
  }

  change() {
    this.show();
    keep({ from: this.pager.first });
  }

  show() {
    const { items, siteLabel, knownSince } = this.list;
    const none = this.name ? "This site shares no layers now" : "No site shares layers now";
    write(this.text, `${none}. The site of a Node is its label ${siteLabel}; the leader counts since ${ago(knownSince)}.`);
    this.text.hidden = items.length > 0;
    this.table.hidden = items.length === 0;
    fill(this.rows, this.pager.part(items, "Site").map((site) => this.row(site)));
    const site = this.name ? items[0] : null;
    this.carriers.hidden = !site;
    if (!site) return;
    const { downloads = [] } = site;
    write(this.caption, downloads.length ? "Downloads over its uplink now" : "Nothing is downloaded over its uplink now");
    fill(this.downloads, downloads.map(carrier));
  }

  row(site) {
    const faults = [
      [site.leasesLost, "lost"],
      [site.claimsRefused, "out of turn"],
      [site.holdersDelisted, "delisted"],
    ];
    const shown = faults.filter(([count]) => count).map(([count, text]) => `${number(count)} ${text}`);
    const name = this.name ? site.name : make("a", { class: "name", href: linkTo("sites", site.name) }, site.name);
    return row(COLUMNS, [
      name,
      `${bytes(site.uplinkBytesPerSecond)}/s`,
      number(site.carriers),
      `${number(site.waiting)} of ${number(site.nodes)}`,
      bytes(site.bytesShared),
      shown.join(", "),
    ]);
  }
}

function carrier(download) {
  return row(CARRIERS, [
    make("a", { class: "name", href: linkTo("edges", download.node) }, download.node),
    make("code", {}, download.digest.replace("sha256:", "").slice(0, 12)),
    `${bytes(download.done)} of ${bytes(download.size)}`,
    `${bytes(download.bytesPerSecond)}/s`,
    ago(download.since),
    download.alone ? `alone: ${download.alone}` : "for its site",
  ]);
}
