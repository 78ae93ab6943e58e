#!/usr/bin/env bash
# Runs the tests that replace the programs of an earlier release in the middle of jobs, in both orders.
#
# Usage: upgrade.sh BEFORE: a revision, whose programs are built beside (the first time it takes as long as any build from
# nothing; then they are kept in target/before), or a directory that has cloudcore-prepull and edgecore-prepull.
set -euo pipefail
setup=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
target=$(realpath -m "${CARGO_TARGET_DIR:-$setup/../../target}")

say() { printf '==> %s\n' "$*"; }

before=${1-}
[[ -n $before ]] || { say "which release? make test-upgrade BEFORE=REVISION, or a directory with its programs" >&2 && exit 1; }
if [[ ! -d $before ]]; then
  cd "$setup/../.."
  revision=$(git rev-parse --verify --quiet "$before^{commit}") || { say "$before is neither a directory nor a revision" >&2 && exit 1; }
  before=$target/before/${revision::12}
  if [[ ! -x $before/edgecore-prepull ]]; then
    say "the programs of $(git log -1 --format='%h, %s' "$revision")"
    source=$(mktemp -d "$target/before-source.XXXXXX")
    trap 'rm -rf "$source"' EXIT
    # All of it as new as now: cargo would take what was built of a later revision for newer than these files.
    git archive "$revision" | tar --extract --touch --directory "$source"
    build=$target/before/build
    (cd "$source" && CARGO_TARGET_DIR=$build cargo build --workspace --bin cloudcore-prepull --bin edgecore-prepull)
    mkdir -p "$before"
    cp "$build"/debug/{cloudcore,edgecore}-prepull "$before/"
  fi
fi
before=$(realpath "$before")
export PREPULL_E2E_BEFORE=$before PREPULL_E2E_LOGS=${PREPULL_E2E_LOGS:-$target/upgrade-logs}
"$setup/with-parts.sh" "$target/debug" "$setup/nextest.sh" run --workspace --run-ignored only \
  -E 'binary(=e2e) and test(/^release_before::/)'
