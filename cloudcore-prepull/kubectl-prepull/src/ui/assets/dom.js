// Small tools for the document, and how amounts are written.

/** Makes an element: `make("a", {href: "#/"}, "Jobs")`. Handlers begin with `on`; a child may be a text. */
export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value != null) element.setAttribute(key, value);
  }
  element.append(...children.flat().filter((child) => child != null && child !== false));
  return element;
}

/** Sets a text only where it differs, so that selections and screen readers are left alone. */
export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
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
