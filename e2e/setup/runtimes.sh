#!/usr/bin/env bash
# Runs the tests that touch the container runtime with one containerd after the other, and prints a table at the end:
# how many of each topic passed, and how long each release took. A release that fails does not stop the next one.
#
#   RUNTIMES='1.6 2.1'   these only: the installed one, such as 1.6, is `system`; others are got by containerd.sh
#   arguments            topics instead of these below, such as links:: restarts::a_killed_agent
set -euo pipefail
setup=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
target=$(realpath -m "${CARGO_TARGET_DIR:-$setup/../../target}")
cd "$setup/../.."

say() { printf '==> %s\n' "$*"; }

# Beginnings of the names of tests. Pulls, bytes and digests; credentials; resuming after cuts, kills and deadlines;
# leases, and removal of unused content; pins; layers that are passed on while they arrive.
topics=(
  pulls:: tries:: policies:: overriders:: fetch:: fetch_access:: unpacking:: deltas::
  secrets:: credential_providers::
  links:: stalls:: restarts:: deletion:: pins:: removal:: sharing::a_delta
  site_streams::readers_go_on
  edge_faults::a_full_disk edge_faults::leftovers edge_faults::a_late_containerd
  rollout::the_next_job harness::a_proxy
)
if (($#)); then topics=("$@"); fi
read -ra releases <<<"${RUNTIMES:-system 1.7 2.1 2.2}"

logs=$target/runtimes-logs
mkdir -p "$logs"
results=$logs.results
: >"$results"
names=()
failed=()
for release in "${releases[@]}"; do
  if [[ $release == system ]]; then
    unset PREPULL_CONTAINERD_DIR
    program=containerd
  else
    PREPULL_CONTAINERD_DIR=$("$setup/containerd.sh" "$release")
    export PREPULL_CONTAINERD_DIR
    program=$PREPULL_CONTAINERD_DIR/containerd
  fi
  # The third word is the version, which a packager may have extended.
  name=$("$program" --version | awk '{ sub(/^v/, "", $3); sub(/[~+].*/, "", $3); print $3 }')
  names+=("$name")
  say "containerd $name: ${topics[*]}"
  pattern=$(IFS='|' && printf '%s' "${topics[*]}")
  run=("$setup/nextest.sh" run --workspace -E "binary(=e2e) and test(/^($pattern)/)")
  began=$SECONDS
  output=$logs.$name.txt
  PREPULL_E2E_LOGS=$logs-$name "$setup/with-parts.sh" "$target/debug" "${run[@]}" 2>&1 | tee "$output" || failed+=("$name")
  # `PASS [   1.234s] prepull-e2e::e2e links::a_busy…`. Of a test that is listed again at the end, the first line counts.
  sed -E 's/\x1b\[[0-9;]*m//g' "$output" | awk -v name="$name" -v took=$((SECONDS - began)) '
    $1 ~ /^(PASS|FAIL|TIMEOUT|SIGNAL|SIGKILL|SIGTERM|ABORT)$/ && /prepull-e2e::e2e/ { test = $NF; result = $1 == "PASS" }
    test != "" && !(test in seen) { seen[test] = 1; sub(/::.*/, "", test); print name, test, result }
    { test = "" }
    END { print name, "seconds", took }' >>"$results"
done

say "tests that passed, of those that ran; the logs: $logs-…"
awk -v names="${names[*]}" '
  $2 == "seconds" { took[$1] = $3; next }
  { if (!($2 in known)) { known[$2] = 1; topics[++count] = $2 } passed[$1, $2] += $3; ran[$1, $2]++ }
  END {
    releases = split(names, release, " ")
    printf "%-22s", "containerd"; for (r = 1; r <= releases; r++) printf "%10s", release[r]; print ""
    for (t = 1; t <= count; t++) {
      printf "%-22s", topics[t]
      for (r = 1; r <= releases; r++) printf "%10s", passed[release[r], topics[t]] + 0 "/" ran[release[r], topics[t]] + 0
      print ""
    }
    printf "%-22s", "seconds"; for (r = 1; r <= releases; r++) printf "%10s", took[release[r]]; print ""
  }' "$results"
if ((${#failed[@]})); then say "FAILED with containerd ${failed[*]}" >&2 && exit 1; fi
