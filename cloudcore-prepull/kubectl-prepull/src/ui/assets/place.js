// The address of a view: its object and its filters, so that a link can be shared.

/** `#/job/web?phase=Failure` is `{first: "job", name: "web", asked: {phase: "Failure"}}`. */
export function here() {
  const [path, query = ""] = location.hash.slice(1).split("?");
  const [, first = "", name = ""] = path.split("/").map(decode);
  return { first, name, asked: Object.fromEntries(new URLSearchParams(query)) };
}

/** Puts the filters of this view into its address. Those that are empty are left out. */
export function keep(filters) {
  const query = new URLSearchParams(Object.entries(filters).filter(([, value]) => value)).toString();
  const path = location.hash.split("?")[0] || "#/";
  history.replaceState(null, "", query ? `${path}?${query}` : path);
}

/** The address of a view. */
export function linkTo(first, name, filters = {}) {
  const query = new URLSearchParams(filters).toString();
  return `#/${first}${name ? `/${encodeURIComponent(name)}` : ""}${query ? `?${query}` : ""}`;
}

function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}
