#!/usr/bin/env bash
# Runs a command that uses the real parts, with their places in its environment:
#
#   PREPULL_APISERVER_DIR  the directory of kube-apiserver, kubelet and the others (unset where PREPULL_E2E_KUBECONFIG is
#                          set)
#   PREPULL_BIN_DIR        the directory of our programs: BIN-DIR
#   PREPULL_E2E_LOGS       where each test writes its logs, emptied first; default: target/e2e-logs. While a demo that was
#                          kept (KEEP=1) has this one, it is the first that is free of …-2, …-3
#   PREPULL_E2E_POOL       where tests find the API servers that they share, and leave what they have started
#
# Usage: with-parts.sh [--search-secrets] BIN-DIR COMMAND [ARGUMENT]...
# --search-secrets: afterwards, whether it failed or not, no log may hold a credential.
set -euo pipefail
setup=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

say() { printf '==> %s\n' "$*"; }

search=
if [[ $1 == --search-secrets ]]; then search=yes && shift; fi
# Absolute, all of them: cargo runs each test in the directory of its crate.
PREPULL_BIN_DIR=$(realpath -m "$1")
shift
target=${CARGO_TARGET_DIR:-$setup/../../target}
PREPULL_E2E_LOGS=$(realpath -m "${PREPULL_E2E_LOGS:-$target/e2e-logs}")
# The demo writes the id of a process (a `sleep`); its end will end it all. After that the number may be another's.
kept() { # DIRECTORY
  local keeper name
  { read -r keeper || [[ -n $keeper ]]; } 2>/dev/null <"$1/.kept" || return 1
  { read -r name <"/proc/$keeper/comm"; } 2>/dev/null && [[ $name == sleep ]]
}
first=$PREPULL_E2E_LOGS
for ((number = 2; number < 100; number++)); do
  kept "$PREPULL_E2E_LOGS" || break
  PREPULL_E2E_LOGS=$first-$number
done
export PREPULL_BIN_DIR PREPULL_E2E_LOGS
if [[ -z ${PREPULL_E2E_KUBECONFIG-} ]]; then
  PREPULL_APISERVER_DIR=$("$setup/kubernetes.sh")
  export PREPULL_APISERVER_DIR
fi

mkdir -p "$PREPULL_E2E_LOGS"
# One run at a time: the next would empty the logs under our hands.
exec 9>"$PREPULL_E2E_LOGS.lock"
flock --nonblock 9 || { say "another run writes to $PREPULL_E2E_LOGS, waiting for it" && flock 9; }
# The mark shows that what is in there is ours: a directory given by mistake is never emptied.
mark=$PREPULL_E2E_LOGS/.prepull-e2e-logs
if [[ ! -e $mark && -n $(ls -A "$PREPULL_E2E_LOGS") ]]; then
  say "PREPULL_E2E_LOGS=$PREPULL_E2E_LOGS has files that no test wrote: give an empty or a new directory" >&2
  exit 1
fi
# The node checks and disk images of the tests need some GiB; without them they fail for reasons that look like bugs.
free=$(df --output=avail -BM "$PREPULL_E2E_LOGS" /tmp | tail -n +2 | tr -dc '0-9\n' | sort -n | head -1)
((free >= 6144)) || say "only $free MiB are free on the disk of the tests: some need up to 6 GiB, and fail for want of it" >&2
find "$PREPULL_E2E_LOGS" -mindepth 1 -delete
touch "$mark"

# What tests leave to each other ends with us, however we end: the reaper acts when the other end of its
# pipe is closed. We hold it, and for a moment each test that writes to it.
PREPULL_E2E_POOL=$(mktemp --directory /tmp/prepull-pool.XXXXXX)
export PREPULL_E2E_POOL
mkfifo "$PREPULL_E2E_POOL/reaper"
set -m # in a process group of its own: Ctrl-C is not for it
"$setup/reaper.sh" "$PREPULL_E2E_LOGS/reaper-of-the-run.log" <"$PREPULL_E2E_POOL/reaper" 9>&- &
reaper=$!
set +m
exec 8>"$PREPULL_E2E_POOL/reaper"
echo "dir $PREPULL_E2E_POOL" >&8

# A build beside us must not replace the programs while tests start and restart them. What is kept afterwards is run
# from where it was built.
if [[ -z ${KEEP-} && -x $PREPULL_BIN_DIR/cloudcore-prepull && -x $PREPULL_BIN_DIR/edgecore-prepull ]]; then
  mkdir "$PREPULL_E2E_POOL/bin"
  cp "$PREPULL_BIN_DIR"/{cloudcore,edgecore}-prepull "$PREPULL_E2E_POOL/bin/"
  # Benchmarks and the demo may have been built without it.
  [[ ! -x $PREPULL_BIN_DIR/kubectl-prepull ]] || cp "$PREPULL_BIN_DIR/kubectl-prepull" "$PREPULL_E2E_POOL/bin/"
  PREPULL_BIN_DIR=$PREPULL_E2E_POOL/bin
fi

say "$* (logs: $PREPULL_E2E_LOGS)"
status=0
# Without the lock: a process that outlives the run must not block the next one. In a group of its own, so that it hears
# of Ctrl-C and of SIGTERM through us, and has ended before its servers are killed.
set -m
"$@" 8>&- 9>&- &
job=$!
set +m
for signal in INT TERM HUP; do
  # shellcheck disable=SC2064 # expanded now, on purpose
  trap "kill -$signal -- -$job 2>/dev/null || true" "$signal"
done
# A signal ends the wait, and not the job.
while :; do
  status=0
  wait "$job" || status=$?
  kill -0 "$job" 2>/dev/null || break
done
trap - INT TERM HUP
exec 8>&-
wait "$reaper" || say "the reaper failed, see $PREPULL_E2E_LOGS/reaper-of-the-run.log" >&2
case $status in
  0) say "done after $SECONDS s" ;;
  130) say "interrupted after $SECONDS s" >&2 ;;
  *) say "FAILED with status $status after $SECONDS s" >&2 ;;
esac
if [[ -n $search ]]; then
  "$setup/search-secrets.sh" "$PREPULL_E2E_LOGS" || exit $((status ? status : 1))
fi
exit "$status"
