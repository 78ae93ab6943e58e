// Completion over time, as a line, with what happened meanwhile.

const NS = "http://www.w3.org/2000/svg";
const WIDTH = 320;
const HEIGHT = 120;

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
  const y = (count) => HEIGHT - ((HEIGHT - 4) * count) / total;
  const part = (name, attributes) => {
    const element = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    svg.append(element);
    return element;
  };
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  for (const { at, what } of marks) {
    const second = (Date.parse(at) - Date.parse(began)) / 1000;
    if (second < 0 || second > last) continue;
    const line = part("line", { x1: x(second), x2: x(second), y1: 0, y2: HEIGHT, stroke: "currentColor", "stroke-dasharray": "2 3", opacity: 0.6 });
    const title = document.createElementNS(NS, "title");
    title.textContent = what;
    line.append(title);
  }
  // Of ten thousand points no more than a screen can show.
  const step = Math.max(1, Math.floor(points.length / 600));
  const shown = points.filter((_, at) => at % step === 0 || at === points.length - 1);
  let path = `M0 ${HEIGHT}`;
  for (const [second, count] of shown) path += ` L${x(second).toFixed(1)} ${y(count).toFixed(1)}`;
  if (shown.length) path += ` L${WIDTH} ${y(points.length).toFixed(1)}`;
  part("path", { d: path, fill: "none", stroke: "var(--successful)", "stroke-width": 2 });
}
