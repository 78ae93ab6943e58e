#!/usr/bin/env bash
# Changes the code that decides in one place after the other, and says which changes no test notices: `make mutants`.
# First with the unit tests of the changed crate, some five seconds a change; what these do not notice, the models get to
# see, some twenty seconds a change.
#
#   BASE=main     only what has changed since this revision, in files that git knows
#   arguments     go to cargo-mutants and choose among the changes: --file GLOB, --re REGEX, --shard 0/20
#
# It changes a copy of the tree, which stays with what was built of it: the next run compiles one crate, and whoever
# works on the tree meanwhile sees nothing of it. Ends with 0 if every change was noticed, with 2 if not.
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
git ls-files --cached --others --exclude-standard | sort >"$out/files"
while IFS= read -r file; do
  if [[ -f $file ]]; then
    cmp --quiet "$file" "$tree/$file" || cp --parents "$file" "$tree"
  else
    rm -f "$tree/$file"
  fi
done <"$out/files"
find "$tree" -type f -printf '%P\n' | sort | comm -13 "$out/files" - | while IFS= read -r file; do rm "$tree/$file"; done

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
# A changed loop may fill the memory before its time is over.
ulimit -v $((8 * 1024 * 1024))

# Runs cargo-mutants; its results go to $out/NAME.
stage() { # NAME ARGUMENT...
  local status=0
  rm -rf "${out:?}/$1"
  "$tool" mutants --in-place --dir "$tree" --output "$out" "${crates[@]}" "${@:2}" &
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
PREPULL_MODEL_RUNS=200 stage units "${verbose[@]}" "${choice[@]}" "$@" --cargo-arg=--lib --cargo-arg=--features=prepull-api/crd
if [[ -s $out/units/missed.txt ]]; then
  say "the models and the replay, for the $(count "$out/units/missed.txt") that were missed"
  # To --iterate all others are caught already. The choice of before does not come to it: it would take a shard of these.
  mkdir "$out/mutants.out"
  "$tool" mutants --list --dir "$tree" "${crates[@]}" |
    { grep --line-regexp --fixed-strings --invert-match --file="$out/units/missed.txt" || true; } >"$out/mutants.out/caught.txt"
  stage models --iterate "${verbose[@]}" \
    --test-package cloudcore-prepull --cargo-arg=--test=model --cargo-arg=--test=kruise \
    --test-package prepull-engine --cargo-arg=--test=replay
fi

missed=$out/units/missed.txt
[[ ! -d $out/models ]] || missed=$out/models/missed.txt
unviable=$(count "$out/units/unviable.txt")
units=$(count "$out"/units/{caught,timeout}.txt)
models=$(count "$out"/models/{caught,timeout}.txt)
say "$((unviable + units + models + $(count "$missed"))) changes in $SECONDS s: $unviable do not compile, noticed by unit tests: $units, by the models: $models, by none: $(count "$missed")"
[[ -s $missed ]] || exit 0
cat "$missed"
say "each is in need of a test, or its code is needless; to look again: make mutants ARGS='--file FILE'"
exit 2
