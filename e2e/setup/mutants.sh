#!/usr/bin/env bash
# Changes the pure code in one place after the other, and says which changes no test notices: `make mutants`. First with
# the unit tests of the changed crate, which take seconds; what they miss goes to the models.
#
#   BASE=main     only what has changed since this revision; without it, all of prepull-engine and prepull-api
#   arguments     go to cargo-mutants: --file GLOB, --shard 0/8, --jobs 2
set -euo pipefail
setup=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$setup/../.."
version=27.1.0
out=$(realpath -m "${CARGO_TARGET_DIR:-target}")/mutants

say() { printf '==> %s\n' "$*"; }

mkdir -p "$out"
tool=$out/bin/cargo-mutants
if [[ $("$tool" mutants --version 2>/dev/null) != *" $version" ]]; then
  say "installing cargo-mutants $version"
  cargo install --quiet --locked --debug --root "$out" --target-dir "$out/tool" "cargo-mutants@$version"
  rm -rf "$out/tool"
fi

options=(--package prepull-engine --package prepull-api --output "$out")
if [[ -n ${BASE-} ]]; then
  git diff "$BASE" -- '*.rs' >"$out/change.diff"
  options+=(--in-diff "$out/change.diff")
fi
# A build directory that stays, since each run is in a copy of the tree.
export CARGO_TARGET_DIR=$out/build CARGO_INCREMENTAL=1
rm -rf "$out/mutants.out" "$out/mutants.out.old"

say "the tests of the crates themselves"
"$tool" mutants "${options[@]}" "$@" -- --lib || status=$?
# 0: all caught; 2: some missed; 3: some took too long. Anything else is no answer.
((${status:=0} == 0 || status == 2 || status == 3)) || exit "$status"
if ((status == 2)); then
  say "the models, for what was missed"
  export PREPULL_MODEL_RUNS=${PREPULL_MODEL_RUNS:-500} PREPULL_KRUISE_RUNS=${PREPULL_KRUISE_RUNS:-100}
  status=0
  "$tool" mutants "${options[@]}" "$@" --iterate --test-package cloudcore-prepull -- --test model --test kruise || status=$?
fi
say "missed: $(wc --lines <"$out/mutants.out/missed.txt"), listed in $out/mutants.out/missed.txt; after $SECONDS s"
exit "$status"
