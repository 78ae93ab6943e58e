// The nodes of a job, a small square each. They are drawn, since ten thousand elements would be slow; the table below has
// the same for people who can't see it.

import { PHASE_NAMES, make, plain } from "./dom.js";

const HEADING = 22;
/** Edges of a square, the largest first, and for how many nodes each is the largest. */
const EDGES = [[28, 60], [14, 1000], [10, 4000], [8, 10000], [6, 20000], [4, Infinity], [3, Infinity]];
/** Part of a screen that all squares take, if their edges can be short enough. */
const SCREEN = 0.7;
const DARK = matchMedia("(prefers-color-scheme: dark)");

/** Where each node is drawn: groups one below the other, each with a heading. Pure. */
export function layout(groups, width, edge) {
  const pitch = edge + (edge > 10 ? 3 : edge > 6 ? 2 : 1);
  const columns = Math.max(1, Math.floor(width / pitch));
  const places = new Map();
  const headings = [];
  let top = 0;
  for (const [name, nodes] of groups) {
    if (name !== null) {
      headings.push({ name, top });
      top += HEADING;
    }
    nodes.forEach((node, at) => {
      places.set(node, { x: (at % columns) * pitch, y: top + Math.floor(at / columns) * pitch });
    });
    top += Math.ceil(nodes.length / columns) * pitch + (name === null ? 0 : 8);
  }
  return { places, headings, height: Math.max(top, pitch), pitch, columns, edge };
}

/** The layout with the largest squares that fit into this height. Pure. */
export function fit(groups, width, height) {
  const count = groups.reduce((sum, [, nodes]) => sum + nodes.length, 0);
  const edges = EDGES.filter(([, most]) => count <= most).map(([edge]) => edge);
  let plan;
  for (const edge of edges) {
    plan = layout(groups, width, edge);
    if (plan.height <= height) break;
  }
  return plan;
}

export class Grid {
  /** `choose` hears of the node that was clicked. */
  constructor(choose) {
    this.choose = choose;
    this.canvas = make("canvas", { tabindex: "0", role: "application" });
    this.hint = make("div", { class: "hint", hidden: true });
    this.spoken = make("p", { class: "visually-hidden", "aria-live": "polite" });
    this.element = make("div", {}, this.canvas, this.hint, this.spoken);
    this.nodes = new Map();
    this.groups = [];
    this.dirty = new Set();
    this.all = true;
    this.cursor = null;
    this.frames = [];
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => (this.hint.hidden = true));
    this.canvas.addEventListener("click", (event) => {
      const node = this.at(event);
      if (node) this.move(node, true);
    });
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.redrawn = () => this.redraw();
    this.sized = new ResizeObserver(this.redrawn);
    this.sized.observe(this.element);
    DARK.addEventListener("change", this.redrawn);
  }

  /** The browser would keep what listens, with all nodes of the job. */
  leave() {
    this.sized.disconnect();
    DARK.removeEventListener("change", this.redrawn);
  }

  /** Draws everything: nodes by name, in groups of `[heading or null, names]`. */
  set(nodes, groups, label) {
    this.nodes = nodes;
    this.groups = groups;
    this.canvas.setAttribute("aria-label", label);
    this.redraw();
  }

  /** These nodes have changed, and are where they were. */
  touch(names) {
    for (const name of names) this.dirty.add(name);
    this.schedule();
  }

  redraw() {
    this.all = true;
    this.schedule();
  }

  schedule() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      const begun = performance.now();
      this.draw();
      this.frames.push(performance.now() - begun);
      if (this.frames.length > 600) this.frames.shift();
    });
  }

  draw() {
    const width = this.element.clientWidth;
    if (width === 0) return;
    const context = this.canvas.getContext("2d");
    if (this.all) {
      this.plan = fit(this.groups, width, SCREEN * innerHeight);
      const scale = devicePixelRatio;
      this.canvas.width = Math.round(width * scale);
      this.canvas.height = Math.round(this.plan.height * scale);
      this.canvas.style.height = `${this.plan.height}px`;
      context.setTransform(scale, 0, 0, scale, 0, 0);
      const style = getComputedStyle(document.documentElement);
      const colour = (name) => style.getPropertyValue(`--${name}`).trim();
      this.colours = {
        Pending: colour("pending"),
        InProgress: colour("running"),
        Successful: colour("successful"),
        Failure: colour("failure"),
        Unknown: colour("unknown"),
        text: colour("text"),
        back: colour("card"),
      };
      context.font = "600 13px system-ui, sans-serif";
      context.fillStyle = this.colours.text;
      context.textBaseline = "top";
      for (const { name, top } of this.plan.headings) context.fillText(name, 0, top + 3, width);
      for (const [name, place] of this.plan.places) this.square(context, name, place);
      this.all = false;
    } else {
      for (const name of this.dirty) {
        const place = this.plan.places.get(name);
        if (place) this.square(context, name, place);
      }
    }
    this.dirty.clear();
  }

  square(context, name, { x, y }) {
    const { colours } = this;
    const { edge } = this.plan;
    const node = this.nodes.get(name);
    if (!node) return;
    context.fillStyle = colours.back;
    // With the frame of the cursor, and not the squares beside it.
    const frame = edge > 6 ? 1 : 0;
    context.fillRect(x - frame, y - frame, edge + 2 * frame, edge + 2 * frame);
    context.fillStyle = colours[node.phase];
    if (node.phase === "InProgress") {
      // Filled from below, as far as its bytes are there.
      context.globalAlpha = 0.35;
      context.fillRect(x, y, edge, edge);
      context.globalAlpha = 1;
      const done = node.total ? Math.max(1, Math.round((edge * node.done) / node.total)) : 1;
      context.fillRect(x, y + edge - done, edge, done);
    } else {
      context.fillRect(x, y, edge, edge);
    }
    if (node.phase === "Failure" || node.phase === "Unknown") {
      // Not by colour alone.
      context.fillStyle = colours.back;
      const notch = Math.max(2, Math.round(edge / 3));
      context.fillRect(x + edge - notch, y, notch, notch);
    }
    if (name === this.cursor) {
      context.strokeStyle = colours.text;
      context.lineWidth = 2;
      context.strokeRect(x, y, edge, edge);
    }
  }

  at({ offsetX, offsetY }) {
    if (!this.plan) return null;
    for (const [name, { x, y }] of this.plan.places) {
      if (offsetX >= x && offsetX < x + this.plan.pitch && offsetY >= y && offsetY < y + this.plan.pitch) return name;
    }
    return null;
  }

  point(event) {
    const name = this.at(event);
    this.hint.hidden = !name;
    this.canvas.style.cursor = name ? "pointer" : "default";
    if (!name) return;
    this.hint.textContent = plain(tell(name, this.nodes.get(name)));
    const left = Math.min(event.clientX + 14, innerWidth - this.hint.offsetWidth - 8);
    this.hint.style.left = `${left}px`;
    this.hint.style.top = `${event.clientY + 16}px`;
  }

  key(event) {
    const names = [...(this.plan?.places.keys() ?? [])];
    if (names.length === 0) return;
    const at = names.indexOf(this.cursor);
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.plan.columns, ArrowUp: -this.plan.columns };
    if (event.key in steps) {
      const next = at < 0 ? 0 : Math.min(names.length - 1, Math.max(0, at + steps[event.key]));
      this.move(names[next], false);
    } else if (event.key === "Enter" && at >= 0) {
      this.choose(this.cursor);
    } else {
      return;
    }
    event.preventDefault();
  }

  move(name, choose) {
    const before = this.cursor;
    this.cursor = name;
    this.touch([before, name].filter(Boolean));
    this.spoken.textContent = plain(tell(name, this.nodes.get(name)));
    if (choose) this.choose(name);
  }
}

export function tell(name, node) {
  if (!node) return name;
  const percent = node.phase === "InProgress" && node.total ? `, ${Math.floor((100 * node.done) / node.total)} %` : "";
  return `${name}: ${PHASE_NAMES[node.phase]}${percent}${node.reason ? `: ${node.reason}` : ""}`;
}
