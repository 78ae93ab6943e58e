// The page: which view is shown, and what all views know.

import { PHONE, make, write } from "./dom.js";
import { Edge } from "./edge.js";
import { Edges } from "./edges.js";
import { Job } from "./job.js";
import { Jobs } from "./jobs.js";
import { follow } from "./live.js";
import { here } from "./place.js";
import { Sites } from "./sites.js";

const main = document.getElementById("main");
const connection = document.getElementById("connection");
const trouble = document.getElementById("trouble");
const message = document.getElementById("message");

/** The jobs by name, whether all are known, and what the server knows about its own connection. */
const known = { jobs: new Map(), isListed: false, state: {} };
/** Since when `kubectl prepull ui` has not answered. */
let silentSince = null;
let view = null;
/** Closes the stream. */
let close = null;
let pending = 0;

/** Whether the stream is broken. */
function lost(isLost) {
  silentSince = isLost ? (silentSince ?? new Date()) : null;
  showConnection();
}

function showConnection() {
  const { since, lost, leaderless } = known.state;
  const then = silentSince ?? (since && new Date(since));
  const at = then && new Date(then).toLocaleTimeString();
  connection.classList.toggle("lost", Boolean(then));
  write(connection, then ? `not live since ${at}` : "live");
  const texts = [
    silentSince && `kubectl prepull ui has not answered since ${at}. If it has ended, start it again: it prints another address.`,
    !silentSince && then && `Changes may be missing since ${at}: ${lost}. The page tries again by itself.`,
    then && "What is shown below is of that time.",
    !then && leaderless && `${sentence(leaderless)}. Jobs don't go on until another one leads: kubectl prepull check looks for the reason.`,
  ];
  write(trouble, texts.filter(Boolean).join(" "));
}

/** Shows what went wrong, until the person closes it or goes elsewhere. */
function complain(error) {
  const close = make("button", { type: "button", onclick: () => message.replaceChildren() }, "Close");
  message.replaceChildren(make("span", {}, sentence(error.message)), close);
}

function sentence(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

function route() {
  const before = view;
  view?.leave?.();
  message.replaceChildren();
  const { first, name, asked } = here();
  if (first === "job" && name) view = new Job({ name, asked, known, listen, complain });
  else if (first === "edges" && name) view = new Edge({ name, known });
  else if (first === "edges") view = new Edges(asked);
  else if (first === "sites") view = new Sites(name, asked);
  else view = new Jobs(asked, known);
  // A job has opened its own stream, and the other views have the same one.
  if (!(view instanceof Job) && (!before || before instanceof Job)) listen("live", {});
  main.replaceChildren(view.element);
  const place = first === "edges" || first === "sites" ? first : "jobs";
  for (const id of ["nav-jobs", "nav-edges", "nav-sites"]) {
    const on = id === `nav-${place}`;
    const link = document.getElementById(id);
    if (on) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${name || place} – image pre-pull`;
  show();
}

/** Shows what has arrived, once for all that comes with the same frame. */
function show() {
  pending ||= requestAnimationFrame(() => {
    pending = 0;
    view.later?.();
  });
}

const handlers = {
  hello: ({ cluster }) => write(document.getElementById("cluster"), cluster),
  state: (state) => {
    known.state = state;
    showConnection();
    show();
  },
  jobs: (rows) => {
    known.jobs.clear();
    for (const job of rows) known.jobs.set(job.job, job);
    known.isListed = true;
    show();
  },
  job: (job) => {
    known.jobs.set(job.job, job);
    show();
  },
  gone: (name) => {
    known.jobs.delete(name);
    show();
  },
};

/** Opens the stream of a view instead of the one before; `more`: its own handlers. */
function listen(path, more) {
  close?.();
  close = follow(path, { ...handlers, ...more }, lost);
}

addEventListener("hashchange", () => {
  route();
  scrollTo(0, 0);
  main.focus({ preventScroll: true });
});
PHONE.addEventListener("change", () => view.turn?.());
// As a link it would replace the address of the view.
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
route();

// For measurements: how long each frame of the grid took to draw, in milliseconds.
Object.defineProperty(window, "frames_of_grid", { get: () => view?.nodes?.grid?.frames ?? [] });
