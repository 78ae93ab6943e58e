#!/usr/bin/env bash
# The programs of an earlier release, beside today's. Prints the directory that has cloudcore-prepull and edgecore-prepull.
#
# Usage: before.sh BEFORE: a revision, built first (the first time it takes as long as any build from nothing;
# then they are kept in target/before), or a directory that has them.
set -euo pipefail
setup=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
target=$(realpath -m "${CARGO_TARGET_DIR:-$setup/../../target}")

say() { printf '==> %s\n' "$*" >&2; }

before=${1-}
[[ -n $before ]] || { say "which release? BEFORE=REVISION, or a directory with its programs" && exit 1; }
if [[ ! -d $before ]]; then
  cd "$setup/../.."
  revision=$(git rev-parse --verify --quiet "$before^{commit}") || { say "$before is neither a directory nor a revision" && exit 1; }
  before=$target/before/${revision::12}
  if [[ ! -x $before/edgecore-prepull ]]; then
    say "the programs of $(git log -1 --format='%h, %s' "$revision")"
    source=$(mktemp -d "$target/before-source.XXXXXX")
    trap 'rm -rf "$source"' EXIT
    # All of it as new as now: cargo would take what was built of a later revision for newer than these files.
    git archive "$revision" | tar --extract --touch --directory "$source"
    build=$target/before/build
    (cd "$source" && CARGO_TARGET_DIR=$build cargo build --workspace --bin cloudcore-prepull --bin edgecore-prepull >&2)
    mkdir -p "$before"
    cp "$build"/debug/{cloudcore,edgecore}-prepull "$before/"
  fi
fi
realpath "$before"
