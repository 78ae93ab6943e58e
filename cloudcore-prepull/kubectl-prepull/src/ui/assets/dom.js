// Small tools for the document, and how amounts are written.

/** A text from an edge, without characters that change the order in which the words around it are shown. */
export function plain(text) {
  return typeof text === "string" ? text.replace(/[\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/g, "\ufffd") : text;
}

/** Makes an element: `make("a", {href: "#/"}, "Jobs")`. Handlers begin with `on`; a child may be a text. */
export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value != null) element.setAttribute(key, plain(value));
  }
  element.append(...children.flat().filter((child) => child != null && child !== false).map(plain));
  return element;
}

/** Sets a text only where it differs, so that selections and screen readers are left alone. */
export function write(element, text) {
  const shown = plain(text);
  if (element.textContent !== shown) element.textContent = shown;
}

/** A table with these heads around a body that is filled later; a head in an array is of a column of numbers. */
export function table(caption, heads, body) {
  const cell = (head) => (Array.isArray(head) ? make("th", { scope: "col", class: "number" }, head) : make("th", { scope: "col" }, head));
  const head = make("tr", {}, heads.map(cell));
  return make("table", {}, caption, make("thead", {}, head), body);
}

/** Rows of a table that are shown at a time. */
const PAGE = 100;

/** Shows a long table a page at a time: `show` is called when the page changes, and the caption says which part it is. */
export class Pager {
  constructor(show) {
    this.page = 0;
    this.caption = make("caption");
    const turn = (by) => {
      this.page += by;
      show();
    };
    this.before = make("button", { type: "button", onclick: () => turn(-1) }, "Previous");
    this.after = make("button", { type: "button", onclick: () => turn(1) }, "Next");
    this.element = make("div", { class: "tools" }, this.before, this.after);
  }

  /** Back to the beginning: something else is listed. */
  restart() {
    this.page = 0;
  }

  /** What of all is on the page. `noun`: what they are, one of them. */
  part(all, noun) {
    const pages = Math.max(1, Math.ceil(all.length / PAGE));
    this.page = Math.min(this.page, pages - 1);
    const first = this.page * PAGE;
    const part = all.slice(first, first + PAGE);
    write(this.caption, all.length ? `${noun}s ${number(first + 1)} to ${number(first + part.length)} of ${number(all.length)}` : `No ${noun.toLowerCase()} fits`);
    this.element.hidden = pages === 1;
    this.before.disabled = this.page === 0;
    this.after.disabled = this.page >= pages - 1;
    return part;
  }
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(count) {
  let unit = 0;
  while (count >= 1024 && unit < UNITS.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return `${unit === 0 || count >= 100 ? Math.round(count) : count.toFixed(1)} ${UNITS[unit]}`;
}

export function seconds(count) {
  const whole = Math.max(0, Math.round(count));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 172800) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} days`;
}

export function number(count) {
  return count.toLocaleString("en");
}

export function time(text) {
  return text ? new Date(text).toLocaleString() : "–";
}

/** How long ago, as of now. */
export function ago(text) {
  return text ? `${seconds((Date.now() - Date.parse(text)) / 1000)} ago` : "–";
}

/** Counts of nodes by phase, out of the summary of a job. */
export function counts({ pending = 0, inProgress = 0, successful = 0, failure = 0, unknown = 0 }) {
  return { Pending: pending, InProgress: inProgress, Successful: successful, Failure: failure, Unknown: unknown };
}

export const PHASES = ["Pending", "InProgress", "Successful", "Failure", "Unknown"];

export const PHASE_NAMES = {
  Pending: "waiting",
  InProgress: "in progress",
  Successful: "successful",
  Failure: "failed",
  Unknown: "no result",
};

/** A bar with a part for each phase, and a mark where the wave ends. */
export class Bar {
  constructor() {
    this.parts = ["Successful", "Failure", "Unknown", "InProgress", "Pending"].map((phase) => {
      const part = make("span", { class: phase });
      part.phase = phase;
      return part;
    });
    this.element = make("div", { class: "bar", role: "img" }, this.parts);
  }

  show(job) {
    const by = counts(job.nodes);
    const total = job.nodes.desired ?? 0;
    for (const part of this.parts) part.style.flexGrow = String(by[part.phase]);
    this.element.setAttribute("aria-label", describe(job));
    this.mark?.remove();
    this.mark = null;
    if (job.wave && job.wave.nodes < total) {
      this.mark = make("i", { title: `wave ${job.wave.number} of ${job.wave.of} ends after ${number(job.wave.nodes)} nodes` });
      this.mark.style.left = `${(100 * job.wave.nodes) / total}%`;
      this.element.append(this.mark);
    }
  }
}

export function describe({ nodes }) {
  const by = counts(nodes);
  const parts = PHASES.filter((phase) => by[phase]).map((phase) => `${number(by[phase])} ${PHASE_NAMES[phase]}`);
  const skipped = nodes.skipped ? `, ${number(nodes.skipped)} skipped` : "";
  return (parts.length ? `${parts.join(", ")} of ${number(nodes.desired ?? 0)} nodes` : "no nodes yet") + skipped;
}
