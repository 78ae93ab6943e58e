// The page: which view is shown, and the jobs that all views know.

import { write } from "./dom.js";
import { Edges } from "./edges.js";
import { Job } from "./job.js";
import { Jobs } from "./jobs.js";
import { follow } from "./live.js";
import { Sites } from "./sites.js";

const main = document.getElementById("main");
const connection = document.getElementById("connection");
const message = document.getElementById("message");
const jobs = new Map();
const list = new Jobs();
let view = null;
let pending = 0;

function lost(isLost) {
  connection.classList.toggle("lost", isLost);
  write(connection, isLost ? "not connected: is kubectl prepull ui still running?" : "live");
}

/** Says what went wrong, for a while. */
function complain(error) {
  write(message, error.message);
  clearTimeout(complain.timer);
  complain.timer = setTimeout(() => write(message, ""), 15000);
}

function route() {
  view?.leave?.();
  const [, first, name] = location.hash.split("/").map(decodeURIComponent);
  if (first === "job" && name) view = new Job(name, jobs, lost, complain);
  else if (first === "edges") view = new Edges(complain);
  else if (first === "sites") view = new Sites(name);
  else view = list;
  main.replaceChildren(view.element);
  const place = first === "edges" || first === "sites" ? first : "jobs";
  for (const id of ["nav-jobs", "nav-edges", "nav-sites"]) {
    const on = id === `nav-${place}`;
    const link = document.getElementById(id);
    if (on) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = name ? `${name} – image pre-pull` : "Image pre-pull";
  show();
}

function show() {
  pending ||= requestAnimationFrame(() => {
    pending = 0;
    if (view === list) list.show(jobs);
    else if (view instanceof Job) view.later();
  });
}

follow(
  "live",
  {
    hello: ({ cluster }) => write(document.getElementById("cluster"), cluster),
    jobs: (rows) => {
      jobs.clear();
      for (const job of rows) jobs.set(job.job, job);
      show();
    },
    job: (job) => {
      jobs.set(job.job, job);
      show();
    },
    gone: (name) => {
      jobs.delete(name);
      show();
    },
    problem: ({ message }) => complain(new Error(message)),
  },
  lost,
);
addEventListener("hashchange", () => {
  route();
  main.focus();
});
route();

// For measurements: how long each frame of the grid took to draw, in milliseconds.
Object.defineProperty(window, "frames_of_grid", { get: () => view?.grid?.frames ?? [] });
