#!/usr/bin/env bash
# Changes the code that decides in one place after the other, and lists the changes that no test notices: `make mutants`.
# First with the unit tests of the changed crate, some five seconds a change; what these do not notice, the models get to
# see, some twenty seconds a change.
#
#   BASE=main     only what has changed since this revision, in files that git knows
#   arguments     go to cargo-mutants and choose among the changes: --file GLOB, --re REGEX, --shard 0/20
#
# It changes a copy of the tree, which it keeps with its build: the next run compiles one crate, and the
# tree itself stays untouched. Ends with 0 if every change was noticed, with 2 if not.
set -euo pipefail
setup=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$setup/../.."
out=$(realpath -m "${CARGO_TARGET_DIR:-target}")/mutants
tree=$out/tree

say() { printf '==> %s\n' "$*"; }
fail() { say "$@" >&2 && exit 1; }
count() { cat "$@" 2>/dev/null | wc --lines; }

mkdir -p "$tree"
exec 9>"$out/lock"
flock --nonblock 9 || fail "another make mutants runs in $out: wait for it, or set another CARGO_TARGET_DIR"
tool=$("$setup/cargo-tool.sh" cargo-mutants 27.1.0) ||
  fail "cargo-mutants cannot be installed: see above, or install it yourself; that of PATH is taken"

# Only what differs is written: cargo goes by the time of a file, and so compiles nothing that is as it was. This also
# puts back what an interrupted run has left changed.
sums() { xargs --null --no-run-if-empty sha256sum | sort; }
names() { cut --characters=67- "$@" | sort; }
export LC_ALL=C
# What git knows may have been deleted.
git ls-files -z --cached --others --exclude-standard | { sums 2>/dev/null || true; } >"$out/here"
(cd "$tree" && find . -type f -printf '%P\0' | sums) >"$out/there"
comm -23 "$out/here" "$out/there" | names | xargs --no-run-if-empty --delimiter='\n' cp --parents --target-directory="$tree"
comm -13 <(names "$out/here") <(names "$out/there") | (cd "$tree" && xargs --no-run-if-empty --delimiter='\n' rm)

crates=(--package prepull-engine --package prepull-api)
choice=()
if [[ -n ${BASE-} ]]; then
  git -c diff.noprefix=false -c diff.mnemonicPrefix=false diff --no-ext-diff --no-color "$BASE" -- '*.rs' >"$out/change.diff" ||
    fail "BASE=$BASE is no revision of this repository: give a branch, a tag or a commit"
  choice+=(--in-diff "$out/change.diff")
fi
# One line a change is the progress where there is no terminal for a bar.
verbose=()
[[ -t 1 ]] || verbose=(--caught --unviable)

export CARGO_TARGET_DIR=$out/build CARGO_INCREMENTAL=1 CARGO_PROFILE_DEV_DEBUG=false RUST_BACKTRACE=0
# The engine is built for each change: optimised, that takes longer than its tests do.
unoptimised=(--config profile.dev.package.prepull-engine.opt-level=0)
# A changed loop may fill the memory before its time is over.
ulimit -v $((8 * 1024 * 1024))

# Runs cargo-mutants; its results go to $out/NAME.
stage() { # NAME ARGUMENT...
  local status=0
  rm -rf "${out:?}/$1"
  "$tool" mutants --in-place --dir "$tree" --output "$out" "${crates[@]}" "${@:2}" "${unoptimised[@]/#/--cargo-arg=}" &
  trap 'kill -INT $! 2>/dev/null; wait $! || true; say "interrupted; seen until now: $out/mutants.out"; exit 130' INT TERM
  wait $! || status=$?
  trap - INT TERM
  [[ ! -d $out/mutants.out ]] || mv "$out/mutants.out" "$out/$1"
  # 2: some were missed; 3: some took too long, which is as good as a failure.
  case $status in
    0 | 2 | 3) ;;
    4) fail "the tests fail without any change: mend them first; their output is in $out/$1/log" ;;
    *) fail "cargo-mutants ended with $status: see above" ;;
  esac
}
rm -rf "$out"/{mutants.out,mutants.out.old,models}
say "the unit tests of the changed crate"
# Random runs find at once what they find of a change.
PREPULL_MODEL_RUNS=200 PREPULL_MODEL_SEEDS=20 stage units "${verbose[@]}" "${choice[@]}" "$@" --cargo-arg=--lib --cargo-arg=--features=prepull-api/crd
if [[ -s $out/units/missed.txt ]]; then
  say "the models and the replay, for the $(count "$out/units/missed.txt") that were missed"
  # To --iterate all others are caught already. The choice of before does not come to it: it would take a shard of these.
  mkdir "$out/mutants.out"
  "$tool" mutants --list --dir "$tree" "${crates[@]}" |
    { grep --line-regexp --fixed-strings --invert-match --file="$out/units/missed.txt" || true; } >"$out/mutants.out/caught.txt"
  # What cargo-mutants runs without a change are the tests of the changed crate and no others.
  models=(--test=model --test=kruise --test=replay)
  (cd "$tree" && cargo test "${unoptimised[@]}" --quiet --package cloudcore-prepull --package prepull-engine "${models[@]}") ||
    fail "the models fail without any change: mend them first"
  stage models --iterate "${verbose[@]}" --test-package cloudcore-prepull,prepull-engine "${models[@]/#/--cargo-arg=}" \
    --baseline=skip --timeout=300
fi

missed=$out/units/missed.txt
[[ ! -d $out/models ]] || missed=$out/models/missed.txt
unviable=$(count "$out/units/unviable.txt")
units=$(count "$out"/units/{caught,timeout}.txt)
by_models=$(count "$out"/models/{caught,timeout}.txt)
say "$((unviable + units + by_models + $(count "$missed"))) changes in $SECONDS s: $unviable do not compile, noticed by unit tests: $units, by the models: $by_models, by none: $(count "$missed")"
[[ -s $missed ]] || exit 0
cat "$missed"
say "each is in need of a test, or its code is needless; to look again: make mutants ARGS='--file FILE'"
exit 2
