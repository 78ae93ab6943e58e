#!/usr/bin/env bash
# Coverage-guided fuzzing of all that others write (e2e/fuzz): plays the corpus, and looks for inputs that reach what
# none before has reached. From the environment:
#
#   MINUTES=10   how long it looks, in all; or RUNS=1000000, how many inputs it tries, in all
#   ONLY=plan    one target, instead of one after the other
#   KEEP=1       writes what it has found into e2e/fuzz/corpus: the fewest inputs that reach as much
#
# An input that breaks a promise is shown, and how to play it again; the run goes on with the next target, and fails.
set -euo pipefail
setup=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
corpus=$setup/../fuzz/corpus
out=$(realpath -m "${CARGO_TARGET_DIR:-$setup/../../target}")/fuzz

say() { printf '==> %s\n' "$*"; }

targets=("$corpus"/*)
targets=("${targets[@]##*/}")
if [[ -n ${ONLY-} ]]; then
  [[ -f $corpus/$ONLY ]] || { say "ONLY=$ONLY is none of: ${targets[*]}" >&2 && exit 2; }
  targets=("$ONLY")
fi
for number in "${MINUTES:=10}" "${RUNS:=}"; do
  [[ $number =~ ^[0-9]*$ ]] || { say "MINUTES and RUNS are whole numbers, and not $number" >&2 && exit 2; }
done
# How many of the inputs are a target's: one of edge_messages plays a whole job and its recording again, which takes
# several milliseconds; those of most targets take less than one.
weight() { # TARGET
  case $1 in edge_messages) echo 1 ;; recordings) echo 3 ;; *) echo 12 ;; esac
}
weights=0
for target in "${targets[@]}"; do weights=$((weights + $(weight "$target"))); done

say "building the targets with coverage"
# With the workspace's features, and in its directory: the crates of others are those that the tests have built.
RUSTC_WORKSPACE_WRAPPER=$setup/with-coverage.sh cargo build --workspace --features prepull-fuzz/libfuzzer --bin libfuzzer
fuzzer=$(realpath -m "${CARGO_TARGET_DIR:-$setup/../../target}")/debug/libfuzzer
limits=(-timeout=10 -rss_limit_mb=2048)

# The inputs of a file of the corpus, each ending in a record separator, as files.
unpack() { # FILE DIRECTORY
  # shellcheck disable=SC2016
  split --separator=$'\x1e' --lines=1 --suffix-length=5 --filter='head --bytes=-1 >"$FILE"' "$1" "$2/kept-"
}

# The fewest of the inputs in a directory that reach as much, as a file of the corpus: the shortest of them, up to 16 KiB,
# and only those that are text.
pack() { # TARGET DIRECTORY FILE
  local fewest=$2.fewest input
  rm -rf "$fewest" && mkdir "$fewest"
  PREPULL_FUZZ_TARGET=$1 "$fuzzer" -set_cover_merge=1 -use_counters=0 "${limits[@]}" "$fewest" "$2" 2>"$2.merge.log" ||
    { tail -n 20 "$2.merge.log" >&2 && return 1; }
  find "$fewest" -type f -printf '%s %p\n' | sort --numeric-sort --key=1,1 --key=2 |
    awk '(sum += $1 + 1) <= 16384 { print $2 }' | while read -r input; do
    # shellcheck disable=SC2094
    if iconv --from-code=utf-8 --to-code=utf-8 "$input" >/dev/null 2>&1 &&
      tr --delete '\000-\010\013-\037\177' <"$input" | cmp --quiet - "$input"; then
      cat "$input" && printf '\x1e'
    fi
  done >"$3"
}

# The last line of progress in a log.
progress() { grep --text '^#[0-9]' "$1" | tail -n 1 | sed -E 's/^#([0-9]+)\t+[a-zA-Z]+ +/\1 inputs, /; s/ (ft|lim|rss): [^ ]+//g'; }

failed=()
total=0
for target in "${targets[@]}"; do
  inputs=$out/$target
  mkdir -p "$inputs" "$out/findings"
  unpack "$corpus/$target" "$inputs"
  log=$inputs.log
  if [[ -n $RUNS ]]; then
    share=(-runs="$((RUNS * $(weight "$target") / weights + 1))")
  else
    share=(-max_total_time="$((MINUTES * 60 / ${#targets[@]} + 1))")
  fi
  PREPULL_FUZZ_TARGET=$target nice -n 10 "$fuzzer" "${share[@]}" "${limits[@]}" -print_final_stats=1 \
    -artifact_prefix="$out/findings/$target-" "$inputs" >"$log" 2>&1 </dev/null &
  trap 'kill $! 2>/dev/null; exit 130' INT TERM
  while sleep 10 && kill -0 $! 2>/dev/null; do say "$target: $(progress "$log")"; done
  status=0
  wait $! || status=$?
  trap - INT TERM
  tried=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
  total=$((total + ${tried:-0}))
  say "$target: $(progress "$log")"
  if ((status != 0)); then
    failed+=("$target")
    finding=$(sed -n 's/.*Test unit written to //p' "$log" | tail -n 1)
    grep --text -A 3 -E "panicked at|libFuzzer: (timeout|out-of-memory)" "$log" | head -n 20 || tail -n 20 "$log"
    say "$target: FOUND ${finding:-nothing that could be written}; again: PREPULL_FUZZ_TARGET=$target $fuzzer $finding"
  elif [[ -n ${KEEP-} ]]; then
    pack "$target" "$inputs" "$corpus/$target.new"
    mv "$corpus/$target.new" "$corpus/$target"
    say "$target: $(tr --complement --delete '\036' <"$corpus/$target" | wc --bytes) inputs kept, $(wc --bytes <"$corpus/$target") bytes"
  fi
done
say "$total inputs after $SECONDS s"
if ((${#failed[@]})); then say "FAILED: ${failed[*]}" && exit 1; fi
