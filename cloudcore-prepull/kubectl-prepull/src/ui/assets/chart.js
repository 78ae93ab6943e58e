// Completion over time, as a line of steps, and what happened at which time.

import { fill, make, number, seconds } from "./dom.js";

const NS = "http://www.w3.org/2000/svg";
const WIDTH = 320;
const HEIGHT = 120;
/** Above the line, for how many nodes there are; below it, for the time. */
const ABOVE = 14;
const BELOW = 14;
/** Events that are listed: the last ones. */
const LISTED = 6;
const MARKS = ["Suspended", "Resumed", "WaveStarted", "WaveEnded", "Retrying"];

/** What is marked: events of the job, and the failover, of which the last one is known. Pure. */
export function marksOf(events, ledSince) {
  const marks = events.filter(({ reason }) => MARKS.includes(reason)).map(({ time, reason, message }) => ({ at: time, what: `${reason}: ${message}` }));
  return ledSince ? [...marks, { at: ledSince, what: "Failover: another cloudcore-prepull leads from here on" }] : marks;
}

/** Points of the line: at which second how many nodes had ended. Pure. */
export function completion(nodes, began) {
  const ends = [];
  for (const node of nodes) if (node.ended) ends.push((Date.parse(node.ended) - Date.parse(began)) / 1000);
  ends.sort((a, b) => a - b);
  return ends.map((second, at) => [Math.max(0, second), at + 1]);
}

export function draw(svg, nodes, total, began, marks, until) {
  svg.replaceChildren();
  if (!began || total === 0) return;
  const points = completion(nodes, began);
  const last = Math.max(1, (Date.parse(until) - Date.parse(began)) / 1000, points.at(-1)?.[0] ?? 0);
  const x = (second) => (WIDTH * second) / last;
  const bottom = HEIGHT - BELOW;
  const y = (count) => bottom - ((bottom - ABOVE) * count) / total;
  const part = (name, attributes) => {
    const element = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    svg.append(element);
    return element;
  };
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  const text = (x, y, anchor, content) => (part("text", { x, y, "text-anchor": anchor }).textContent = content);
  for (const at of [0, total]) part("line", { x1: 0, x2: WIDTH, y1: y(at), y2: y(at), stroke: "var(--line)" });
  text(0, ABOVE - 4, "start", `${number(total)} nodes`);
  text(0, HEIGHT - 3, "start", "0 s");
  text(WIDTH, HEIGHT - 3, "end", seconds(last));
  for (const { second } of timed(marks, began)) {
    if (second <= last) part("line", { x1: x(second), x2: x(second), y1: ABOVE, y2: bottom, stroke: "currentColor", "stroke-dasharray": "2 3", opacity: 0.6 });
  }
  // Of ten thousand points no more than a screen can show.
  const step = Math.max(1, Math.floor(points.length / 600));
  const shown = points.filter((_, at) => at % step === 0 || at === points.length - 1);
  // Steps: between two ends nothing has ended.
  let path = `M0 ${bottom}`;
  for (const [second, count] of shown) path += ` H${x(second).toFixed(1)} V${y(count).toFixed(1)}`;
  path += ` H${WIDTH}`;
  part("path", { d: path, fill: "none", stroke: "var(--successful)", "stroke-width": 2 });
}

/** The marks as a list, with the time since the start. */
export function list(element, marks, began) {
  const last = timed(marks, began).slice(-LISTED);
  fill(element, last.map(({ second, what }) => make("li", {}, make("b", {}, seconds(second)), ` ${what}`)));
}

function timed(marks, began) {
  const all = marks.map(({ at, what }) => ({ second: (Date.parse(at) - Date.parse(began)) / 1000, what }));
  return all.filter(({ second }) => second >= 0).sort((a, b) => a.second - b.second);
}
