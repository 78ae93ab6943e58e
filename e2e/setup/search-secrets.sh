#!/usr/bin/env bash
# No log may hold a credential. Every credential of the tests contains a canary; this looks for it
# in each file below DIR: in plain text, in base64 (and once more encoded, as `auth` of a
# dockerconfigjson is in a Secret), in hexadecimal, and as Rust prints bytes.
# Prints FILE:LINE of what it finds, never the line. Usage: search-secrets.sh DIR
set -euo pipefail

canary=s3cr3t-canary-
dir=${1:?usage: search-secrets.sh DIR}

say() { printf '==> %s\n' "$*"; }

# The part of TEXT's base64 that is the same in any surroundings. Three bytes become four characters,
# so the form depends on where TEXT begins modulo three; the characters at both ends, which hold
# bits of the neighbours, are left out.
base64_forms() { # TEXT
  local before encoded from to
  for before in 0 1 2; do
    encoded=$(printf '%.*s%s' "$before" xx "$1" | base64 --wrap=0)
    from=$(((before * 8 + 5) / 6)) to=$(((before + ${#1}) * 8 / 6))
    printf '%s\n' "${encoded:from:to-from}"
  done
}

patterns() {
  local form hex decimal
  printf '%s\n' "$canary"
  while read -r form; do
    printf '%s\n' "$form"
    base64_forms "$form"
  done < <(base64_forms "$canary") | sed -e p -e 'y|+/|-_|' # and the alphabet for URLs
  hex=$(printf '%s' "$canary" | od -An -v -tx1 | tr -d ' \n')
  printf '%s\n%s\n' "$hex" "${hex^^}"
  decimal=$(printf '%s' "$canary" | od -An -v -tu1 -w99 | xargs)
  printf '%s\n%s\n' "${decimal// /, }" "${decimal// /,}"
}

list=$(patterns | sort -u)
# A search that cannot find is worse than none: first, it has to find these.
for before in '' u us; do
  once=$(printf '%s' "$before:${canary}x" | base64 --wrap=0)
  for sample in "$before${canary}x" "$once" "$(printf '%s' "$before$once" | base64 --wrap=0)"; do
    grep --quiet --fixed-strings --regexp "$list" <<<"$sample" || {
      say "search-secrets.sh is broken: it does not find $sample" >&2
      exit 1
    }
  done
done

files=$(find "$dir" -type f -size +0 2>/dev/null | wc -l)
if ((files == 0)); then
  say "no logs in $dir: nothing was searched" >&2
  exit 1
fi

# A NUL after the file name: test names, and so directories, may have colons.
status=0
matches=$(grep --recursive --text --null --line-number --fixed-strings --regexp "$list" -- "$dir" |
  sed 's/\x00\([0-9]*\):.*/:\1/') || status=$?
case $status in
  0)
    printf '%s\n' "$matches"
    printf '%s\n' "$matches" | sed 's/:[0-9]*$//' | sort | uniq --count | sed 's/^ *\([0-9]*\) \(.*\)/\2: \1 lines/'
    say "credentials in the logs, in the lines above" >&2
    exit 1
    ;;
  1) say "no credential in $files log files of $dir" ;;
  *)
    say "could not search $dir" >&2
    exit 1
    ;;
esac
