#!/usr/bin/env bash
# What a run on real parts needs, in the shortest time: the packages, then Kubernetes, the PARTS and
# the Rust programs side by side. Usage: prepare.sh CARGO-COMMAND..., each one an argument, in order.
# NEEDS has further COMMAND:PACKAGEs, for packages.sh. PARTS names further scripts of this folder that build a part into the
# cache, such as helm: inside of a test, a build of minutes would be the test's time.
set -euo pipefail
setup=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

say() { printf '==> %s\n' "$*"; }

read -ra needs <<<"${NEEDS-}"
"$setup/packages.sh" "${needs[@]}"

# Each in a process group of its own, so that stopping it stops all that it has started; outside of
# the terminal's group, so that Ctrl-C reaches them through us alone. What a line belongs to is
# written before it; when one fails, the other may finish: its result is kept for the next time.
# When stopped, the group waits for its members and `sed` for their last words.
declare -A names=() # PID -> name
begin() { # NAME COMMAND...
  local name=$1
  shift
  set -m
  {
    trap : TERM
    "$@" 2>&1 | (trap '' TERM && exec sed --unbuffered "s/^/[$name] /")
  } </dev/null &
  names[$!]=$name
  set +m
}

stop() {
  local pid
  for pid in "${!names[@]}"; do kill -TERM -- "-$pid" 2>/dev/null || true; done
  wait
}
trap 'say "interrupted"; stop; exit 130' INT TERM HUP

kubernetes() { "$setup/kubernetes.sh" >/dev/null; }
build_part() { "$setup/$1.sh" >/dev/null; }

cargo_commands() {
  local command
  for command; do
    printf '==> %s\n' "$command"
    bash -c "$command" || return
  done
}

# A cluster of the user's own makes one of ours needless.
if [[ -n ${PREPULL_E2E_KUBECONFIG-} ]]; then
  say "Kubernetes: the cluster of PREPULL_E2E_KUBECONFIG ($PREPULL_E2E_KUBECONFIG)"
else
  begin kubernetes kubernetes
fi
read -ra parts <<<"${PARTS-}"
for part in "${parts[@]}"; do begin "$part" build_part "$part"; done
begin cargo cargo_commands "$@"

failed=()
while ((${#names[@]})); do
  status=0
  wait -n -p ended "${!names[@]}" || status=$?
  name=${names[$ended]}
  unset "names[$ended]"
  if ((status == 0)); then
    say "$name: done after $SECONDS s"
  else
    failed+=("$name")
    say "$name: FAILED after $SECONDS s${names[*]:+ (the other one goes on, Ctrl-C stops it)}" >&2
  fi
done
((${#failed[@]} == 0)) || { say "not prepared: ${failed[*]} failed" >&2 && exit 1; }
