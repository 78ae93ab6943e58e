#!/usr/bin/env bash
# What `make bench` measures, with the programs in BIN-DIR. With BEFORE=DIR in the environment it measures the programs
# of another release first, those in DIR, and prints both side by side. Simulated edges, and the executor that pulls
# beside PullImage, are part of the laboratory and so of this tree in both. Usage: bench.sh BIN-DIR
set -euo pipefail
setup=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

laboratory=$1/laboratory
bench() { # BIN-DIR
  # shellcheck disable=SC2016 # by the inner shell
  "$setup/with-parts.sh" "$1" bash -ec '"$0" bench-agent; "$0" bench-fleet' "$laboratory"
}
if [[ -z ${BEFORE-} ]]; then
  cargo bench -p prepull-engine
  bench "$1"
  exit
fi
for name in cloudcore edgecore; do
  [[ -x $BEFORE/$name-prepull ]] || { printf 'BEFORE=%s has no program %s-prepull\n' "$BEFORE" "$name" >&2 && exit 1; }
done
runs=$(mktemp --directory)
trap 'rm -r "$runs"' EXIT
bench "$BEFORE" | tee "$runs/before"
cargo bench -p prepull-engine # is no program, and has no before
bench "$1" | tee "$runs/after"
printf '\nBefore (%s), after, and after / before\n' "$BEFORE"
# Lines such as "  10000 nodes, Completed: 3.0 s (bar 30 s) ok".
awk '
  !match($0, /^  .+: [0-9]+[.][0-9]+/) { next }
  {
    figure = substr($0, 3, RLENGTH - 2); unit = substr($0, RLENGTH + 1); sub(/ ?[(].*/, "", unit)
    value = figure; sub(/.*: /, "", value)
    name = substr(figure, 1, length(figure) - length(value) - 2)
    value += 0
  }
  NR == FNR { before[name] = value; next }
  name in before && !(name in done) {
    done[name] = 1
    ratio = before[name] > 0 ? sprintf("%.2f", value / before[name]) : "-"
    printf "  %-58s %9s %9s %6s %s\n", name, before[name], value, ratio, unit
  }' "$runs/before" "$runs/after"
