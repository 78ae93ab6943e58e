#!/usr/bin/env bash
# Sourced by the scripts that build a part once and keep it in the cache. They set `part`, what it is called, `cache`, and
# `log`, a file; then they call `begin_build`, `phase` for each step, and find a `scratch` directory that goes with them.
# All that is said is on stderr.
# shellcheck disable=SC2154 # set by those who source this

say() { printf '==> %s\n' "$*" >&2; }

die() {
  say "$*"
  exit 1
}

# Waits for another build, empties what a killed one has left, and makes `scratch`. If `take` succeeds after the wait,
# the other build was ours.
begin_build() {
  mkdir -p "$cache"
  exec 9>"$cache/lock"
  flock --nonblock 9 || { say "another run is building $part, waiting for it" && flock 9; }
  take && exit
  rm -rf "$cache"/build.* || true # an orphan may still write there
  scratch=$(mktemp -d "$cache/build.XXXXXX")
  job=
  trap end_build EXIT
  trap 'say "interrupted"; exit 130' INT TERM HUP
  : >"$log"
}

end_build() {
  # The job is a process group of its own, so that none of its descendants stays.
  if [[ -n $job ]]; then
    kill -TERM -- "-$job" 2>/dev/null || true
    wait "$job" 2>/dev/null || true
  fi
  rm -rf "$scratch"
}

# Runs a step with its output in the log, prints how long it took, and shows a sign of life every half minute.
phase() { # NAME COMMAND...
  local name=$1 began=$SECONDS status=0
  shift
  say "  $name"
  printf '\n### %s: %s\n' "$name" "$*" >>"$log"
  set -m
  "$@" >>"$log" 2>&1 </dev/null 9>&- &
  job=$!
  set +m
  while kill -0 "$job" 2>/dev/null; do
    sleep 1
    (((SECONDS - began) % 30)) || say "    $((SECONDS - began)) s"
  done
  wait "$job" || status=$?
  job=
  ((status == 0)) || {
    tail -n 30 "$log" >&2
    die "$name: failed with status $status after $((SECONDS - began)) s, the end of $log is above"
  }
  say "    done in $((SECONDS - began)) s"
}
