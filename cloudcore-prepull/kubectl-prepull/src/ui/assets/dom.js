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

/** Where a row of a table takes several lines, as in page.css. */
export const PHONE = matchMedia("(max-width: 700px)");

/**
 * A table with these columns around a body that is filled later; a column in an array is of numbers. It has its roles
 * written out, since a phone shows its rows as blocks, and would take them for plain text otherwise.
 */
export function table(caption, columns, body) {
  const head = columns.map((column) => make("th", { scope: "col", role: "columnheader", class: Array.isArray(column) && "number" }, column));
  body.setAttribute("role", "rowgroup");
  return make("table", { role: "table" }, caption, make("thead", { role: "rowgroup" }, make("tr", { role: "row" }, head)), body);
}

/** A row of such a table. The first cell names it; one without content is left out on a phone. */
export function row(columns, [first, ...others], attributes = {}) {
  const cell = (content, at) => {
    const column = columns[at + 1];
    const is = [Array.isArray(column) && "number", (content == null || content === "") && "none"].filter(Boolean).join(" ");
    return make("td", { role: "cell", "data-column": String(column), class: is || null }, content || "–");
  };
  return make("tr", { role: "row", ...attributes }, make("th", { scope: "row", role: "rowheader" }, first), others.map(cell));
}

/**
 * Puts children into an element, if they look different from those that it was filled with: a click on one that is replaced
 * would be lost. The control that has the focus keeps it, by its text or by its place.
 */
export function fill(element, children) {
  const html = children.map((child) => child.outerHTML ?? plain(child)).join("");
  if (element.filled === html) return;
  element.filled = html;
  const controls = () => [...element.querySelectorAll("a, button")];
  const at = controls().indexOf(document.activeElement);
  const text = document.activeElement.textContent;
  element.replaceChildren(...children);
  if (at >= 0) (controls().find((control) => control.textContent === text) ?? controls()[at])?.focus({ preventScroll: true });
}

/** Fills an element with buttons that choose one group each, with its number: `[[key, text, count]…]`. */
export function figures(element, groups, chosen, choose) {
  const figure = ([key, text, count]) =>
    make("button", { type: "button", "aria-pressed": String(chosen === key), onclick: () => choose(chosen === key ? "" : key) }, make("b", {}, number(count)), ` ${text}`);
  fill(element, groups.map(figure));
}

/** The colour of a phase. */
export function keyOf(phase) {
  return make("span", { class: `key ${phase}` });
}

/** A mark for what needs a person. */
export function badge(text) {
  return make("span", { class: "badge" }, text);
}

/** Shows a long table a page at a time: `show` is called when the page changes, and the caption says which part it is. */
export class Pager {
  /** `first`: the number of the row to begin with. `few`: rows of a page on a phone, where each is about three times as high. */
  constructor(show, first, few = 8) {
    this.few = few;
    this.first = Number.parseInt(first ?? "0", 10) || 0;
    this.caption = make("caption");
    const turn = (by) => {
      this.first += by * this.size();
      show();
    };
    this.before = make("button", { type: "button", onclick: () => turn(-1) }, "Previous");
    this.after = make("button", { type: "button", onclick: () => turn(1) }, "Next");
    this.element = make("div", { class: "tools" }, this.before, this.after);
  }

  /** A long list is three screens at most. */
  size() {
    return PHONE.matches ? this.few : 25;
  }

  /** Back to the beginning: something else is listed. */
  restart() {
    this.first = 0;
  }

  /** What of all is on the page. `noun`: what they are, one of them. */
  part(all, noun) {
    const size = this.size();
    const last = Math.max(0, Math.ceil(all.length / size) - 1);
    const page = Math.min(last, Math.max(0, Math.floor(this.first / size)));
    // Before anything has arrived the page of the address stays.
    if (all.length) this.first = page * size;
    const part = all.slice(this.first, this.first + size);
    write(this.caption, all.length ? `${noun}s ${number(this.first + 1)} to ${number(this.first + part.length)} of ${number(all.length)}` : `No ${noun.toLowerCase()} fits`);
    this.element.hidden = last === 0;
    this.before.disabled = page === 0;
    this.after.disabled = page === last;
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
    // The page of the job has the number.
    if (job.wave && job.wave.nodes < total) {
      this.mark = make("i");
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
